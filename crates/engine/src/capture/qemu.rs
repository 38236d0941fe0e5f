//! `backup` of a QEMU machine: all its disks at one point in time, with its configuration, its firmware variables and
//! the state of its TPM.
//!
//! 1. The hypervisor describes the machine; each disk that is left out is reported with the reason.
//! 2. A machine that is shut off is read from its images. One that runs, or is paused, is frozen: see
//!    `docs/design/0004-live-machines.md`.
//! 3. The changes since the previous snapshot come from QEMU's dirty bitmap, if it can be trusted ([`changes`]);
//!    otherwise everything is read, and the reason is reported.
//! 4. The snapshot is committed; only then does the new bitmap replace the old one.

mod at_rest;
mod changes;
mod choice;
mod copied_disk;
mod disk_format;
mod fate;
mod filter;
mod from_images;
mod frozen;
mod frozen_device;
mod host_snapshots;
mod method;
mod notes;
mod offer;
mod planning;
mod proof;
mod supervisor;

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::PathBuf;
use std::time::Duration;

use holdfast_block::BlockDevice;
use holdfast_host::qemu::memory::MemoryMethod;
use holdfast_host::qemu::{Pause, RunId};
use holdfast_host::qmp::wake_with_retries;
use holdfast_host::{Description, Machine, MachineDisk, MachineState, MachineSummary, Overlays};
use holdfast_repo::{Processes, Repository};
use jiff::Timestamp;

use super::plan::{BackupPlan, PlannedCapture};
use super::sink::SnapshotSink;
use super::snapshot::SnapshotOptions;
use super::store::{DiskToStore, MachineToStore, OtherContent, OtherToStore, store_machine};
use super::{Capture, CaptureOptions, MachineBackupReport, PreparedMachine, Steps, capture_into, plan_capture};
use crate::host_snapshot::Providers;
use crate::job::rate_limit::RateLimit;
use crate::job::{Error, Job, Result, Unit};
use crate::machine::devices::{decide, refuse_unknown};
use crate::machine::hooks::HookCalls;
use crate::machine::noted_run::MachineWork;
use crate::machine::other_runs::make_way;
use crate::machine::quiesce::{Quiesce, Quiesced};
use crate::machine::state::streams::{FirmwareState, SavedState};
use crate::notes::{NOTE_KIND, STREAM_MEMORY};
use at_rest::HeldAtRest;
use changes::Changes;
pub use changes::{Compared, ReadAll};
pub(crate) use changes::{is_bitmap_of, is_holdfast_bitmap};
use choice::check_choice;
use filter::HeldByFilters;
use from_images::HeldByImages;
use frozen::GuestFreezer;
use host_snapshots::HeldByHostSnapshots;
pub use method::Method;
pub(crate) use method::{overlay_of, run_of_overlay};
use notes::notes_of;
pub use supervisor::{Limits, Load};

/// The machine to read, and how.
pub struct MachineReadRequest<'a> {
    /// The machine at its hypervisor.
    pub machine: &'a dyn Machine,
    /// Options that all hypervisors share.
    pub capture: CaptureOptions<'a>,
    /// The interface that commits overlays into their bases, if the hypervisor has one.
    pub overlays: Option<&'a dyn Overlays>,
    /// The method; by default the best one that the machine offers.
    pub method: Option<Method>,
    /// The providers for host snapshots of its disks.
    pub providers: &'a Providers,
    /// The folder for data that the guest overwrites meanwhile.
    pub scratch: PathBuf,
    /// The folder of the socket between QEMU and this process: a short path that QEMU's user can access.
    pub runtime: PathBuf,
    /// How long a write of the guest may wait for its copy before the copy is aborted.
    pub write_deadline: Duration,
    /// Whether the guest's file systems are frozen for the point in time.
    pub quiesce: Quiesce,
    /// How the memory is captured; none if it is not.
    pub memory: Option<MemoryMethod>,
    /// The command that starts the watchdog of this run: see [`watch_over`](crate::watch_over).
    pub watchdog: Option<Vec<std::ffi::OsString>>,
    /// Limits on the load that reading may cause.
    pub limits: Limits,
    /// Determines which processes are alive, to find other backups of the machine.
    pub processes: &'a dyn Processes,
}

/// How a machine was read.
#[derive(Debug)]
pub struct MachineReading {
    /// How the disks were read.
    pub method: Method,
    /// The reason for the method, as text.
    pub method_reason: String,
    /// The consistency of the point in time.
    pub consistency: String,
    /// How long the machine was paused; none if it was not running.
    pub pause: Option<Pause>,
    /// The result of freezing the guest's file systems.
    pub quiesced: Quiesced,
    /// The size of its memory in bytes, if it was captured.
    pub memory_bytes: Option<u64>,
    /// The load that reading caused.
    pub load: Load,
    /// Disks that were left out, and why.
    pub left_out: Vec<(String, String)>,
    /// How each disk was compared with the previous snapshot, in the order of the snapshot.
    pub compared: Vec<(String, Compared)>,
}

/// Backs up a machine.
///
/// # Errors
/// A machine that was running still runs after any error.
pub fn back_up_machine(
    repository: &Repository,
    request: MachineReadRequest<'_>,
    snapshot: SnapshotOptions,
    job: Job<'_>,
) -> Result<MachineBackupReport<MachineReading>> {
    capture_into(repository, request, snapshot, job)
}

/// Plans a backup of a machine.
pub fn plan_machine_backup(
    repository: &Repository,
    request: MachineReadRequest<'_>,
    snapshot: SnapshotOptions,
    job: Job<'_>,
) -> Result<BackupPlan> {
    plan_capture(repository, request, snapshot, job)
}

impl MachineReadRequest<'_> {
    fn work(&self) -> MachineWork<'_> {
        MachineWork {
            machine: self.machine,
            shown: self.capture.name.to_string(),
            run: RunId(self.capture.run),
            journal: self.capture.journal.as_ref(),
            now: self.capture.now,
            scratch: &self.scratch,
            processes: self.processes,
        }
    }
}

impl Capture for MachineReadRequest<'_> {
    type Found = Description;
    type Prepared<'c>
        = QemuCapture<'c>
    where
        Self: 'c;
    type Reading = MachineReading;

    fn options(&self) -> &CaptureOptions<'_> {
        &self.capture
    }

    fn find(&self) -> Result<Description> {
        let description = self.machine.describe()?;
        refuse_unknown(&description, &self.capture.choice)?;
        Ok(description)
    }

    fn summary(found: &Description) -> &MachineSummary {
        &found.summary
    }

    fn prepare<'c>(self, description: Description, steps: Steps<'c>) -> Result<QemuCapture<'c>>
    where
        Self: 'c,
    {
        let (taken, left_out) = decide(&description, &self.capture.choice);
        check_choice(&description, &taken, self.memory, steps.job)?;
        Ok(QemuCapture {
            // The configuration is read before objects are added to QEMU, so that it does not contain them.
            configuration: self.machine.configuration()?,
            request: self,
            description,
            taken,
            left_out,
            sink: steps.sink,
            hooks: steps.hooks,
            job: steps.job,
        })
    }
}

/// A machine with its disks chosen.
pub(crate) struct QemuCapture<'a> {
    request: MachineReadRequest<'a>,
    description: Description,
    configuration: Vec<(String, Vec<u8>)>,
    taken: Vec<MachineDisk>,
    left_out: Vec<(String, String)>,
    sink: &'a dyn SnapshotSink,
    hooks: &'a HookCalls<'a>,
    job: Job<'a>,
}

/// A machine held at a point in time, by each method.
pub(crate) enum HeldMachine<'h> {
    AtRest(HeldAtRest),
    Filter(Box<HeldByFilters<'h>>),
    HostSnapshots(Box<HeldByHostSnapshots>),
    Images(Box<HeldByImages<'h>>),
}

impl PreparedMachine for QemuCapture<'_> {
    type Held<'h>
        = HeldMachine<'h>
    where
        Self: 'h;
    type Reading = MachineReading;

    fn plan(&self) -> Result<PlannedCapture> {
        self.plan_reading()
    }

    fn freeze(&self) -> Result<HeldMachine<'_>> {
        self.job
            .progress
            .phase(&self.sink.phase(&self.request.capture.name), Unit::Bytes);
        match self.description.summary.state {
            MachineState::ShutOff => self.freeze_stopped(),
            MachineState::Running | MachineState::Paused => self.freeze_active(),
            MachineState::Between => Err(Error::MachineBetween {
                machine: self.description.summary.name.clone(),
            }),
        }
    }

    fn read<'h>(&'h self, held: &mut HeldMachine<'h>) -> Result<MachineReading> {
        match held {
            HeldMachine::AtRest(held) => self.read_at_rest(held),
            HeldMachine::Filter(held) => self.read_filtered(held),
            HeldMachine::HostSnapshots(held) => self.read_host_snapshots(held),
            HeldMachine::Images(held) => self.read_images(held),
        }
    }

    fn release<'h>(&'h self, held: HeldMachine<'h>, read: Result<MachineReading>) -> Result<MachineReading> {
        match held {
            HeldMachine::AtRest(_) => {}
            HeldMachine::Filter(held) => self.release_filters(*held, &read),
            HeldMachine::HostSnapshots(held) => self.release_host_snapshots(*held, &read),
            HeldMachine::Images(held) => self.release_images(*held),
        }
        read
    }

    fn explain(&self, error: Error) -> Error {
        match self.description.summary.state {
            MachineState::Running | MachineState::Paused => {
                fate::explained(error, self.request.machine, &self.description.summary.name, self.job)
            }
            _ => error,
        }
    }

    fn consistency(reading: &MachineReading) -> &str {
        &reading.consistency
    }
}

/// A disk, ready to be read.
struct ReadyDisk<'a> {
    target: String,
    device: &'a dyn BlockDevice,
    changes: Changes,
    notes: BTreeMap<String, String>,
}

impl ReadyDisk<'_> {
    fn to_store(&self) -> DiskToStore<'_> {
        DiskToStore {
            name: self.target.clone(),
            device: self.device,
            changed: match &self.changes {
                Changes::Only(changed) | Changes::Between(changed) => Some(changed),
                Changes::Unknown(_) => None,
            },
            notes: self.notes.clone(),
        }
    }
}

/// Disks that were stored.
struct StoredDisks {
    duration: Duration,
    /// How each disk was compared.
    compared: Vec<(String, Compared)>,
}

/// What is stored of a point in time.
struct PointOfDisks<'p> {
    disks: &'p [ReadyDisk<'p>],
    rest: SavedState<'p>,
    time: Timestamp,
    method: Method,
    consistency: &'p str,
}

impl QemuCapture<'_> {
    fn freeze_stopped(&self) -> Result<HeldMachine<'_>> {
        match (self.request.method, self.no_snapshot()) {
            (Some(Method::Snapshot), None) => self.freeze_host_snapshots("asked for".to_owned()),
            (Some(Method::Snapshot), Some(reason)) => Err(self.no_method_snapshot(&reason)),
            _ => self.open_stopped(),
        }
    }

    fn no_method_snapshot(&self, reason: &str) -> Error {
        Error::NoMethod {
            machine: self.request.capture.name.to_string(),
            reason: format!("snapshot: {reason}"),
        }
    }

    /// Freezes a machine that has a QEMU.
    fn freeze_active(&self) -> Result<HeldMachine<'_>> {
        make_way(&self.request.work(), &self.description.summary, self.job)?;
        match method::choose(self.request.method, &self.offer()?)? {
            (Method::Filter, reason) => self.freeze_filters(reason),
            (Method::Snapshot, reason) => self.freeze_host_snapshots(reason),
            (method, reason) => self.freeze_images(method, reason),
        }
    }

    fn freezer(&self) -> GuestFreezer<'_> {
        GuestFreezer::new(
            self.sink.history(),
            &self.request,
            self.description.summary.name.clone(),
            self.hooks,
            self.job,
        )
    }

    fn pace(&self) -> RateLimit<'_> {
        RateLimit::new(self.request.limits.bytes_per_second, self.job)
    }

    fn read_beside(&self) -> Result<FirmwareState> {
        FirmwareState::read(&self.description, &self.request.machine.rights(), self.job.clock)
    }

    /// Reconnects to the monitor: a proxy between this process and QEMU may have been restarted while the disks were
    /// read.
    fn wake(&self) {
        if let Err(error) = wake_with_retries(self.request.machine.monitor(), self.job.clock) {
            self.job
                .progress
                .note(&format!("{}: {error}", self.request.capture.name));
        }
    }

    /// The report of a machine that was not paused.
    fn reading(&self, method: Method, method_reason: &str, consistency: &str) -> MachineReading {
        MachineReading {
            method,
            method_reason: method_reason.to_owned(),
            consistency: consistency.to_owned(),
            quiesced: Quiesced::NotNeeded,
            memory_bytes: None,
            load: Load::default(),
            pause: None,
            left_out: self.left_out.clone(),
            compared: Vec::new(),
        }
    }

    /// The pause; none if the machine was paused before.
    fn pause_of_running(&self, pause: Pause) -> Option<Pause> {
        (self.description.summary.state == MachineState::Running).then_some(pause)
    }

    fn store(&self, point: PointOfDisks<'_>, pace: &RateLimit<'_>) -> Result<StoredDisks> {
        let disks = point.disks;
        let compared = disks.iter().map(|disk| (disk.target.clone(), disk.changes.compared()));
        let compared = compared.collect();
        let pages = point.rest.memory.map(|(_, pages)| OtherToStore {
            name: STREAM_MEMORY.to_owned(),
            content: OtherContent::Pages(&**pages),
            notes: [(NOTE_KIND.to_owned(), STREAM_MEMORY.to_owned())].into(),
        });
        let streams = point.rest.streams(&self.configuration);
        let streams = streams.into_iter().map(|stream| OtherToStore {
            notes: stream.notes,
            ..OtherToStore::stream(&stream.name, Cursor::new(stream.bytes))
        });
        let machine = MachineToStore {
            time: point.time,
            notes: self.notes(point.method, point.consistency),
            disks: disks.iter().map(ReadyDisk::to_store).collect(),
            others: pages.into_iter().chain(streams).collect(),
            total_bytes: Some(disks.iter().map(|disk| disk.changes.bytes_to_read(disk.device)).sum()),
        };
        let duration = store_machine(self.sink, machine, pace, self.job)?;
        Ok(StoredDisks { duration, compared })
    }
}
