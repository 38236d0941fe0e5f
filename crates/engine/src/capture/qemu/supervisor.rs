//! Supervises a machine while its frozen disks are read: the size of the scratch files, and the latency of the guest's
//! writes.
//!
//! Data that the guest overwrites goes to unnamed files, which grow from nothing. A full file system breaks the copy
//! and not the guest, but other programs on the host need the space. So the copy is aborted before: the run is removed
//! from QEMU at once, which frees the space even if the reader is busy.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use holdfast_host::Machine;
use holdfast_host::qemu::{RunId, WriteCounters, remove_run, write_counters};
use holdfast_serve::nbd::client::NbdStopper;

use crate::job::Job;
use crate::job::error::ScratchOverrun;
use crate::job::rate_limit::{LatencyGovernor, RateChange, RateLimit};

/// The interval between two checks of the scratch files.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// The number of these checks per measurement of the latency.
const LOOKS_PER_QUESTION: u32 = 5;
/// The maximum space that is kept free on the scratch files' file system.
const RESERVE_BYTES_MAX: u64 = 1 << 30;
/// On a small file system, this fraction is kept free instead.
const RESERVE_PARTS: u64 = 20;
/// The unit of a file's `st_blocks` on every file system.
const STAT_BLOCK_BYTES: u64 = 512;

/// Limits on the load that reading a running machine may cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// The maximum rate of reading, in bytes per second.
    pub bytes_per_second: Option<std::num::NonZeroU64>,
    /// The maximum size of all its scratch files together, in bytes.
    pub scratch_bytes_max: Option<u64>,
    /// The maximum average latency of the guest's writes over a second; above it, the machine is read slower.
    pub write_latency_max: Option<Duration>,
}

/// The load that reading a machine caused, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// Average latency of the guest's writes from the machine's start to its point in time.
    pub latency_before: Option<Duration>,
    /// Average latency while the machine was read.
    pub latency_meanwhile: Option<Duration>,
    /// The highest average over a second.
    pub latency_highest: Option<Duration>,
    /// How often reading was slowed down because of the latency.
    pub slowed_count: u32,
    /// How long reading waited because of limits.
    pub waited: Duration,
    /// The largest size of the scratch files that was seen.
    pub scratch_bytes: u64,
}

/// How data that the guest overwrites takes space.
#[derive(Debug, Clone, Copy)]
pub(super) enum CopySpace {
    /// In scratch files.
    InScratch,
    /// In blocks that were shared before. The value is the free space of the file system at that time, once it is
    /// known.
    Shared(Option<u64>),
}

impl CopySpace {
    pub(super) fn shared() -> Self {
        Self::Shared(None)
    }
}

/// Supervises one machine.
pub(super) struct Supervisor<'a> {
    pub(super) machine: &'a dyn Machine,
    pub(super) run: RunId,
    /// QEMU's names of the devices that are read.
    pub(super) devices: Vec<String>,
    /// The files that grow as the guest writes.
    pub(super) scratch: Vec<File>,
    /// How these files take space.
    pub(super) kept: CopySpace,
    /// Stops the readers, which may be waiting for QEMU.
    pub(super) readers: Vec<NbdStopper>,
    pub(super) limits: Limits,
    pub(super) pace: &'a RateLimit<'a>,
    pub(super) job: Job<'a>,
}

/// The report of a supervisor.
#[derive(Debug, Default)]
pub(super) struct SupervisorReport {
    pub(super) load: Load,
    pub(super) overrun: Option<ScratchOverrun>,
    /// The files that grew. They must stay open until QEMU has closed them: the process that closes a file last waits
    /// until its space is freed, and the guest would wait with its QEMU.
    pub(super) scratch: Vec<File>,
}

impl Supervisor<'_> {
    /// Runs `work`, and supervises the machine meanwhile.
    pub(super) fn watch<T>(self, work: impl FnOnce() -> T) -> (T, SupervisorReport) {
        let (pace, clock) = (self.pace, self.job.clock);
        let start = clock.now();
        let (result, mut watched) = std::thread::scope(|scope| {
            // The channel closes when the work ends, even by a panic.
            let (working, over) = channel();
            let watcher = scope.spawn(move || self.look_until(&over));
            let result = work();
            drop(working);
            (result, watcher.join().unwrap_or_default())
        });
        watched.load.waited = pace.waited(clock.now().saturating_sub(start));
        (result, watched)
    }

    fn look_until(mut self, over: &Receiver<()>) -> SupervisorReport {
        let mut watched = SupervisorReport::default();
        let mut writes = WriteLatency::new(&self);
        watched.load.latency_before = writes.first.average();
        for number in 1u32.. {
            let is_over = over.recv_timeout(LOOK_INTERVAL) != Err(RecvTimeoutError::Timeout);
            let used = self.used_bytes();
            watched.load.scratch_bytes = watched.load.scratch_bytes.max(used);
            if is_over {
                break;
            }
            if let Some(why) = self.too_much(used) {
                watched.overrun = Some(why);
                self.give_up();
                over.recv().ok();
                break;
            }
            if number % LOOKS_PER_QUESTION == 0 {
                writes.look(&self, &mut watched.load);
            }
        }
        writes.end(&self, &mut watched.load);
        watched.scratch = std::mem::take(&mut self.scratch);
        watched
    }

    fn used_bytes(&mut self) -> u64 {
        if let CopySpace::Shared(before) = self.kept {
            let free_bytes = self.room().map(|(free_bytes, _)| free_bytes).unwrap_or_default();
            self.kept = CopySpace::Shared(Some(before.unwrap_or(free_bytes)));
            return before.unwrap_or(free_bytes).saturating_sub(free_bytes);
        }
        let metadata = self.scratch.iter().filter_map(|file| file.metadata().ok());
        metadata.map(|metadata| metadata.blocks() * STAT_BLOCK_BYTES).sum()
    }

    /// The free and the total space of the files' file system, in bytes.
    fn room(&self) -> Option<(u64, u64)> {
        let file_system = rustix::fs::fstatvfs(self.scratch.first()?).ok()?;
        let bytes = |blocks: u64| blocks.saturating_mul(file_system.f_frsize);
        Some((bytes(file_system.f_bavail), bytes(file_system.f_blocks)))
    }

    /// Why the copy must be aborted, if it must.
    fn too_much(&self, used_bytes: u64) -> Option<ScratchOverrun> {
        let (free_bytes, whole_bytes) = self.room()?;
        too_much(used_bytes, self.limits.scratch_bytes_max, free_bytes, whole_bytes)
    }

    /// Aborts the copy. The guest does not notice.
    fn give_up(&mut self) {
        // Readers first: they must not wait for a reply that never comes.
        self.pace.end();
        self.readers.iter().for_each(NbdStopper::stop);
        self.machine.monitor().wake().ok();
        if let Err(error) = remove_run(self.machine.monitor(), self.job.clock, self.run) {
            self.job
                .progress
                .note(&format!("giving the copy up: {error}; it is tried again"));
        }
        self.scratch.clear();
    }
}

fn too_much(used_bytes: u64, max_bytes: Option<u64>, free_bytes: u64, whole_bytes: u64) -> Option<ScratchOverrun> {
    if let Some(max_bytes) = max_bytes.filter(|max_bytes| used_bytes > *max_bytes) {
        return Some(ScratchOverrun::ScratchMax { used_bytes, max_bytes });
    }
    let reserve_bytes = RESERVE_BYTES_MAX.min(whole_bytes / RESERVE_PARTS);
    // If the copy takes no space, aborting it frees none, whatever other programs use.
    (used_bytes > 0 && free_bytes < reserve_bytes).then_some(ScratchOverrun::NearlyFull {
        used_bytes,
        free_bytes,
        reserve_bytes,
    })
}

/// The latency of the guest's writes, and the reactions to it.
struct WriteLatency {
    first: WriteCounters,
    last: WriteCounters,
    last_read_bytes: u64,
    last_time: Duration,
    governor: Option<LatencyGovernor>,
}

impl WriteLatency {
    fn new(supervisor: &Supervisor<'_>) -> Self {
        let first = supervisor.counters().unwrap_or_default();
        let governor = |latency_max| LatencyGovernor::new(latency_max, supervisor.pace.ceiling());
        Self {
            first,
            last: first,
            last_read_bytes: supervisor.pace.read_bytes(),
            last_time: supervisor.job.clock.now(),
            governor: supervisor.limits.write_latency_max.map(governor),
        }
    }

    fn look(&mut self, supervisor: &Supervisor<'_>, load: &mut Load) {
        // A request without an answer is no reason to change anything.
        let Some(counters) = supervisor.counters() else {
            supervisor.machine.monitor().wake().ok();
            return;
        };
        let latency = counters.since(&self.last).average();
        self.last = counters;
        load.latency_highest = load.latency_highest.max(latency);
        let (now, read_bytes) = (supervisor.job.clock.now(), supervisor.pace.read_bytes());
        let millis = now.saturating_sub(self.last_time).as_millis().max(1);
        let read = u128::from(read_bytes - self.last_read_bytes) * 1000 / millis;
        (self.last_time, self.last_read_bytes) = (now, read_bytes);
        let Some(governor) = &mut self.governor else { return };
        match governor.look(latency, u64::try_from(read).unwrap_or(u64::MAX)) {
            RateChange::Stay => {}
            RateChange::Slower(rate) => {
                load.slowed_count += 1;
                supervisor.pace.set(Some(rate));
            }
            RateChange::Faster(rate) => supervisor.pace.set(rate),
        }
    }

    /// Counts the last, incomplete second, too.
    fn end(&self, supervisor: &Supervisor<'_>, load: &mut Load) {
        let Some(counters) = supervisor.counters() else { return };
        load.latency_highest = load.latency_highest.max(counters.since(&self.last).average());
        load.latency_meanwhile = counters.since(&self.first).average();
    }
}

impl Supervisor<'_> {
    fn counters(&self) -> Option<WriteCounters> {
        write_counters(self.machine.monitor(), &self.devices).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::{RESERVE_BYTES_MAX, ScratchOverrun, too_much};

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_copy_is_cancelled_before_it_takes_too_much() {
        assert_eq!(too_much(5, Some(5), 100 * GIB, 200 * GIB), None);
        assert!(matches!(
            too_much(6, Some(5), 100 * GIB, 200 * GIB),
            Some(ScratchOverrun::ScratchMax { .. })
        ));
        let nearly = |used, free, whole| too_much(used, None, free, whole).is_some();
        assert!(nearly(1, RESERVE_BYTES_MAX - 1, 200 * GIB) && !nearly(1, RESERVE_BYTES_MAX, 200 * GIB));
        // Other programs have filled it.
        assert!(!nearly(0, 0, 200 * GIB));
        // On a small file system a twentieth is kept free.
        assert!(nearly(1, GIB / 20 - 1, GIB) && !nearly(1, GIB / 20, GIB));
    }
}
