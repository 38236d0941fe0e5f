//! Looks after a machine while its frozen disks are read: how full the scratch files are, and how long the guest's writes take.
//!
//! What the guest overwrites goes to files without names, which grow from nothing. A file system that is full breaks the copy and
//! not the guest; but the host has other programs that need it. So the copy is given up before: the run is taken out of QEMU at
//! once, which gives the space back, though the reader may be busy with something else.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use holdfast_host::Machine;
use holdfast_host::qemu::{RunId, WriteCounters, remove_run, write_counters};
use holdfast_serve::nbd::client::NbdStopper;

use crate::job::Job;
use crate::job::error::GivenUp;
use crate::job::rate_limit::{LatencyGovernor, RateChange, RateLimit};

/// How often scratch files are looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// Looks between two questions how long writes take.
const LOOKS_PER_QUESTION: u32 = 5;
/// Of the file system that holds the scratch files as much stays free, at most.
const RESERVE_BYTES_MAX: u64 = 1 << 30;
/// That is, where it is small, one part of so many.
const RESERVE_PARTS: u64 = 20;
/// A file's `st_blocks` count blocks of this size on every file system.
const STAT_BLOCK_BYTES: u64 = 512;

/// What reading a running machine may cost it and its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Bytes read from the machine each second, at most.
    pub bytes_per_second: Option<std::num::NonZeroU64>,
    /// Bytes that all its scratch files together may take.
    pub scratch_bytes_max: Option<u64>,
    /// How long a write of the guest may take, on average over a second; where it takes longer, the machine is read slower.
    pub write_latency_max: Option<Duration>,
}

/// What reading a machine did to it, as far as is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// How long a write of the guest took on average, from the machine's start until its instant.
    pub latency_before: Option<Duration>,
    /// How long one took on average while the machine was read.
    pub latency_meanwhile: Option<Duration>,
    /// The highest average over a second.
    pub latency_highest: Option<Duration>,
    /// How often reading was slowed down for that.
    pub slowed_count: u32,
    /// How long reading waited, for one limit or the other.
    pub waited: Duration,
    /// The most that was seen in scratch files.
    pub scratch_bytes: u64,
}

/// How what the guest overwrites takes room.
#[derive(Debug, Clone, Copy)]
pub(super) enum CopySpace {
    /// In scratch files.
    InScratch,
    /// In blocks that were shared before: of the file system so many bytes were free then, once that is known.
    Shared(Option<u64>),
}

impl CopySpace {
    pub(super) fn shared() -> Self {
        Self::Shared(None)
    }
}

/// Looks after one machine.
pub(super) struct Supervisor<'a> {
    pub(super) machine: &'a dyn Machine,
    pub(super) run: RunId,
    /// The devices that are read, as QEMU calls them.
    pub(super) devices: Vec<String>,
    /// The files that grow as the guest writes.
    pub(super) scratch: Vec<File>,
    /// How they do.
    pub(super) kept: CopySpace,
    /// Stops the readers, which may be waiting for QEMU.
    pub(super) readers: Vec<NbdStopper>,
    pub(super) limits: Limits,
    pub(super) pace: &'a RateLimit<'a>,
    pub(super) job: Job<'a>,
}

/// What a warden saw.
#[derive(Debug, Default)]
pub(super) struct SupervisorReport {
    pub(super) load: Load,
    pub(super) given_up: Option<GivenUp>,
    /// The files that grew, to be kept open until QEMU has closed them: the process that closes one last waits until its space is freed, and a guest
    /// would wait with its QEMU.
    pub(super) scratch: Vec<File>,
}

impl Supervisor<'_> {
    /// Does `work`, and looks after the machine meanwhile.
    pub(super) fn watch<T>(self, work: impl FnOnce() -> T) -> (T, SupervisorReport) {
        let (pace, clock) = (self.pace, self.job.clock);
        let start = clock.now();
        let (result, mut watched) = std::thread::scope(|scope| {
            // The end of the channel is the end of the work, even where it panics.
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
                watched.given_up = Some(why);
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

    /// Bytes that are free where the files are, and all there are.
    fn room(&self) -> Option<(u64, u64)> {
        let file_system = rustix::fs::fstatvfs(self.scratch.first()?).ok()?;
        let bytes = |blocks: u64| blocks.saturating_mul(file_system.f_frsize);
        Some((bytes(file_system.f_bavail), bytes(file_system.f_blocks)))
    }

    /// Why the copy has to be given up, if it has to.
    fn too_much(&self, used_bytes: u64) -> Option<GivenUp> {
        let (free_bytes, whole_bytes) = self.room()?;
        too_much(used_bytes, self.limits.scratch_bytes_max, free_bytes, whole_bytes)
    }

    /// Takes the copy away from its readers. The guest does not notice.
    fn give_up(&mut self) {
        // Readers first: they must not wait for an answer that never comes.
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

fn too_much(used_bytes: u64, max_bytes: Option<u64>, free_bytes: u64, whole_bytes: u64) -> Option<GivenUp> {
    if let Some(max_bytes) = max_bytes.filter(|max_bytes| used_bytes > *max_bytes) {
        return Some(GivenUp::ScratchMax { used_bytes, max_bytes });
    }
    let reserve_bytes = RESERVE_BYTES_MAX.min(whole_bytes / RESERVE_PARTS);
    // Where other programs fill it, and we have nothing in it, giving up frees nothing.
    (used_bytes > 0 && free_bytes < reserve_bytes).then_some(GivenUp::NearlyFull {
        used_bytes,
        free_bytes,
        reserve_bytes,
    })
}

/// The guest's writes, and what follows from them.
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
        // A question that is not answered is no reason to change anything.
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

    /// The end, in the middle of a second: what came since the last look counts, too.
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
    use super::{GivenUp, RESERVE_BYTES_MAX, too_much};

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_copy_is_given_up_before_it_takes_too_much() {
        assert_eq!(too_much(5, Some(5), 100 * GIB, 200 * GIB), None);
        assert!(matches!(
            too_much(6, Some(5), 100 * GIB, 200 * GIB),
            Some(GivenUp::ScratchMax { .. })
        ));
        let nearly = |used, free, whole| too_much(used, None, free, whole).is_some();
        assert!(nearly(1, RESERVE_BYTES_MAX - 1, 200 * GIB) && !nearly(1, RESERVE_BYTES_MAX, 200 * GIB));
        // Others have filled it.
        assert!(!nearly(0, 0, 200 * GIB));
        // A small one keeps a twentieth.
        assert!(nearly(1, GIB / 20 - 1, GIB) && !nearly(1, GIB / 20, GIB));
    }
}
