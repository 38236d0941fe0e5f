//! A running machine whose writes are recorded, for a live copy of its disks.
//!
//! The guest is not delayed: bitmaps in QEMU record its writes, and QEMU exports the disks. Another process, the watchdog,
//! removes them if this one dies, and resumes a machine that is paused for too long.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast_block::DirtyBitmap;
use holdfast_host::qemu::{RunId, TakenMarks, TrackingRequest, WriteLimit, WriteTracker, limit_writes, unlimit_writes};
use holdfast_host::qmp::{QmpCommand, wake_with_retries};
use holdfast_host::{Description, DiskChoice, Machine, MachineDisk, MachineState};
use holdfast_repo::Processes;
use holdfast_serve::nbd::client::{Endpoint, ExportContent, NbdDevice, NbdOptions};
use jiff::Timestamp;
use serde_json::Value;

use super::devices::{decide, devices_of, monitor_failed, refuse_unknown};
use super::lock::{INSTANT_PATIENCE, MachineLock, Work};
use super::noted_run::{MachineWork, NotedRun};
use super::other_runs::make_way;
use super::quiesce::{AgentAccess, FreezeState, Guest, Quiesce, Quiesced, RunState};
use super::run_journal::JournalPlace;
use super::state::scratch::{RuntimeFolder, SOCKET, listen};
use super::watchdog::Guard;
use crate::job::{Error, Job, Result};

/// Bytes that one mark covers: what most guests write at least. Coarser marks send more for each write.
const GRANULARITY_BYTES: u32 = 4096;

/// Connections for reads of a disk.
const READER_CONNECTION_COUNT: usize = 4;

/// The machine, and what is recorded.
pub struct TrackRequest<'a> {
    /// The machine at its hypervisor, with a connection of its own.
    pub machine: &'a dyn Machine,
    /// A random number, used in the names of all objects in QEMU.
    pub run: u32,
    /// The disks.
    pub choice: DiskChoice,
    /// The folder of the socket between QEMU and this process: a short path that QEMU's user can access.
    pub runtime: PathBuf,
    /// Where locks and notes of runs are; none if the run is not noted.
    pub journal: Option<JournalPlace>,
    /// How long to wait for a backup of the machine.
    pub patience: Duration,
    /// The command that starts the watchdog of this run: see [`watch_over`](crate::watch_over).
    pub watchdog: Option<Vec<OsString>>,
    /// Whether the guest's file systems are frozen for the point in time.
    pub quiesce: Quiesce,
    /// The watchdog resumes a machine that is paused for longer.
    pub pause_max: Duration,
    /// Determines which processes are alive.
    pub processes: &'a dyn Processes,
    /// The current time.
    pub now: &'a (dyn Fn() -> Timestamp + Sync),
}

/// A disk whose writes are recorded.
#[derive(Debug, Clone)]
pub struct TrackedDisk {
    /// The disk of the machine.
    pub disk: MachineDisk,
    /// Its size.
    pub size_bytes: u64,
    /// The QOM path of its device.
    pub device: String,
}

/// A machine whose writes are recorded. It must be ended by [`end`](Self::end).
pub struct TrackedMachine<'a> {
    request: TrackRequest<'a>,
    description: Description,
    job: Job<'a>,
    disks: Vec<TrackedDisk>,
    left_out: Vec<(String, String)>,
    tracker: WriteTracker,
    /// The marks of each disk that were read, and are still in QEMU.
    read_marks: Vec<Mutex<Vec<TakenMarks>>>,
    folder: RuntimeFolder,
    note: NotedRun<'a>,
    guard: Mutex<Guard>,
    pause: Mutex<Option<MachinePause>>,
    _lock: Option<MachineLock>,
}

/// A pause of the machine.
struct MachinePause {
    frozen: FreezeState,
    _lock: Option<MachineLock>,
}

impl<'a> TrackedMachine<'a> {
    /// Records the writes to a running machine from now on.
    ///
    /// # Errors
    /// The machine does not run, another run is at work on it, or QEMU cannot export its disks.
    pub fn begin(request: TrackRequest<'a>, job: Job<'a>) -> Result<Self> {
        let description = request.machine.describe()?;
        let summary = &description.summary;
        if !matches!(summary.state, MachineState::Running | MachineState::Paused) {
            return Err(Error::MachineBetween {
                machine: summary.name.clone(),
            });
        }
        refuse_unknown(&description, &request.choice)?;
        let (taken, left_out) = decide(&description, &request.choice);
        let now = (request.now)();
        let journal = request.journal.as_ref();
        let lock = MachineLock::take(journal, summary, Work::Backup, request.patience, now, job)?;
        let work = MachineWork {
            machine: request.machine,
            shown: summary.name.clone(),
            run: RunId(request.run),
            journal,
            now: request.now,
            scratch: Path::new(""),
            processes: request.processes,
        };
        make_way(&work, summary, job)?;
        let note = NotedRun::begin(request.machine, &work, &description, job);
        let ((tracker, folder, guard, disks), note) = note.freezing(|| {
            let devices = devices_of(request.machine, &taken)?;
            let (folder, listener) = listen(&request.runtime)?;
            let guard = Guard::start(request.watchdog.as_deref())?;
            let disks = taken.iter().zip(&devices).map(|(disk, device)| TrackedDisk {
                disk: disk.clone(),
                size_bytes: device.size_bytes,
                device: device.device.clone(),
            });
            let disks = disks.collect();
            let tracking = TrackingRequest {
                run: RunId(request.run),
                disks: devices,
                granularity_bytes: GRANULARITY_BYTES,
                listener,
            };
            match WriteTracker::start(request.machine.monitor(), job.clock, tracking) {
                Ok(tracker) => Ok((tracker, folder, guard, disks)),
                Err(error) => {
                    guard.done();
                    Err(monitor_failed(&summary.name, error))
                }
            }
        })?;
        Ok(Self {
            description,
            job,
            disks,
            left_out,
            read_marks: (0..tracker.disk_count()).map(|_| Mutex::default()).collect(),
            tracker,
            folder,
            note,
            guard: Mutex::new(guard),
            pause: Mutex::default(),
            _lock: lock,
            request,
        })
    }

    /// The machine as it was when its writes began to be recorded.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// The disks, in the order of the configuration.
    pub fn disks(&self) -> &[TrackedDisk] {
        &self.disks
    }

    /// Disks that were left out, and why.
    pub fn left_out(&self) -> &[(String, String)] {
        &self.left_out
    }

    /// Bytes that one mark covers.
    pub fn granularity_bytes(&self) -> u32 {
        self.tracker.granularity_bytes()
    }

    /// The disk `number` as it is now.
    pub fn open(&self, number: usize) -> Result<NbdDevice> {
        self.connect(&self.tracker.export(number), ExportContent::Changing, Vec::new())
    }

    fn connect(&self, export: &str, content: ExportContent, contexts: Vec<String>) -> Result<NbdDevice> {
        let options = NbdOptions {
            contexts,
            // Marks are read while the guest waits.
            connection_count_max: match content {
                ExportContent::Fixed => 1,
                ExportContent::Changing => READER_CONNECTION_COUNT,
            },
            content,
            is_stopped: Some(self.job.interrupt.question()),
            ..NbdOptions::default()
        };
        let endpoint = Endpoint::Unix(self.folder.path().join(SOCKET));
        NbdDevice::connect(&endpoint, export, options).map_err(|source| Error::Frozen {
            machine: self.name().to_owned(),
            source: Box::new(source),
        })
    }

    fn name(&self) -> &str {
        &self.description.summary.name
    }

    fn failed(&self, source: holdfast_host::qmp::MonitorError) -> Error {
        monitor_failed(self.name(), source)
    }

    /// Takes the marks of the disk `number`.
    ///
    /// # Errors
    /// The marks are lost.
    pub fn take_marks(&self, number: usize) -> Result<DirtyBitmap> {
        let monitor = self.request.machine.monitor();
        let mut taken = self.tracker.take(monitor, number).map_err(|error| self.failed(error))?;
        let mut found = self.read_bitmap(&taken);
        if found.is_err() {
            let again = self.tracker.export_again(monitor, number, taken);
            taken = again.map_err(|error| self.failed(error))?;
            found = self.read_bitmap(&taken);
        }
        self.read_marks(number).push(taken);
        let found = found?;
        let granularity_bytes = u64::from(self.granularity_bytes());
        let mut marks = DirtyBitmap::new(found.size_bytes(), granularity_bytes)?;
        for range in &found {
            marks.set(range);
        }
        Ok(marks)
    }

    fn read_bitmap(&self, taken: &TakenMarks) -> Result<DirtyBitmap> {
        let device = self.connect(&taken.export, ExportContent::Fixed, vec![taken.context.clone()])?;
        Ok(device.dirty_bitmap(taken.bitmap())?)
    }

    /// Removes marks from QEMU that were read. QEMU takes some milliseconds to close their exports, so this is not done while
    /// the guest may wait.
    pub fn drop_read_marks(&self, number: usize) -> Result<()> {
        let read = std::mem::take(&mut *self.read_marks(number));
        let monitor = self.request.machine.monitor();
        for taken in read {
            let dropped = self.tracker.drop_marks(monitor, self.job.clock, number, &taken);
            dropped.map_err(|error| self.failed(error))?;
        }
        Ok(())
    }

    fn read_marks(&self, number: usize) -> MutexGuard<'_, Vec<TakenMarks>> {
        self.read_marks[number].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of marked bytes of the disk `number`; none if writes may have been missed.
    pub fn dirty_bytes(&self, number: usize) -> Result<Option<u64>> {
        let monitor = self.request.machine.monitor();
        let counted = self.tracker.dirty_bytes(monitor, number);
        counted.map_err(|error| self.failed(error))
    }

    /// Limits the writes of the guest to the disk `number`, so that at most this many bytes become dirty per second. False
    /// if the owner of the machine has set limits, which are kept.
    pub fn limit_writes(&self, number: usize, dirty_bytes_per_s_max: u64) -> Result<bool> {
        let limit = WriteLimit {
            bytes_per_s: dirty_bytes_per_s_max,
            requests_per_s: dirty_bytes_per_s_max / u64::from(self.granularity_bytes()),
        };
        let device = &self.disks[number].device;
        let limited = limit_writes(self.request.machine.monitor(), RunId(self.request.run), device, limit);
        limited.map_err(|error| self.failed(error))
    }

    /// Removes all limits.
    pub fn unlimit_writes(&self) -> Result<()> {
        let removed = unlimit_writes(self.request.machine.monitor(), RunId(self.request.run));
        match removed {
            // The limits have ended with the machine.
            Err(_) if self.request.machine.ended().is_some() => Ok(()),
            other => other.map_err(|error| self.failed(error)),
        }
    }

    /// Pauses the machine, with its file systems frozen if that was requested. A machine that another program has paused stays
    /// as it is.
    pub fn pause(&self) -> Result<()> {
        if self.execute("query-status")?["running"] == false {
            return Ok(());
        }
        let (journal, now) = (self.request.journal.as_ref(), (self.request.now)());
        let summary = &self.description.summary;
        let lock = MachineLock::take(journal, summary, Work::Instant, INSTANT_PATIENCE, now, self.job)?;
        let mut guard = self.guard();
        let agent = AgentAccess::of(&self.description);
        let frozen = FreezeState::begin(self.guest(), agent, &mut guard, self.job)?;
        let stopped = guard
            .about_to_pause(self.request.pause_max)
            .and_then(|()| self.execute("stop"));
        *self.paused() = Some(MachinePause { frozen, _lock: lock });
        stopped.map(drop)
    }

    /// Resumes and thaws the machine, if it was paused by [`pause`](Self::pause).
    ///
    /// # Errors
    /// The machine does not run. Another call tries again.
    pub fn resume(&self) -> Result<Option<Quiesced>> {
        let Some(pause) = self.paused().take() else {
            return Ok(None);
        };
        if let Err(error) = self.execute("cont").or_else(|_| {
            wake_with_retries(self.request.machine.monitor(), self.job.clock).ok();
            self.execute("cont")
        }) {
            *self.paused() = Some(pause);
            return Err(error);
        }
        let mut guard = self.guard();
        let quiesced = pause.frozen.end(self.guest(), &mut guard, RunState::Restored, self.job);
        guard.runs().ok();
        Ok(Some(quiesced))
    }

    /// Removes everything from QEMU. The machine runs as before.
    pub fn end(self) -> Result<()> {
        let resumed = self.resume();
        let monitor = self.request.machine.monitor();
        wake_with_retries(monitor, self.job.clock).ok();
        let stopped = self.tracker.stop(monitor, self.job.clock);
        let guard = self.guard.into_inner().unwrap_or_else(PoisonError::into_inner);
        let is_gone = self.request.machine.ended().is_some();
        if resumed.is_ok() && (stopped.is_ok() || is_gone) {
            guard.done();
        } else {
            guard.hand_over();
        }
        self.note.end();
        resumed?;
        match stopped {
            Err(error) if !is_gone => Err(monitor_failed(&self.description.summary.name, error)),
            _ => Ok(()),
        }
    }

    fn guest(&self) -> Guest<'_> {
        Guest {
            machine: self.request.machine,
            shown: &self.description.summary.name,
            quiesce: self.request.quiesce,
        }
    }

    fn execute(&self, name: &'static str) -> Result<Value> {
        let answer = self
            .request
            .machine
            .monitor()
            .execute(&QmpCommand::new(name, Value::Null));
        answer.map_err(|error| self.failed(error))
    }

    fn guard(&self) -> MutexGuard<'_, Guard> {
        self.guard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn paused(&self) -> MutexGuard<'_, Option<MachinePause>> {
        self.pause.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
