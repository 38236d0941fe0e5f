//! Captures a machine as a snapshot in a repository.
//!
//! All hypervisors follow the same steps, in the order of [`capture`]: find the machine, lock it, choose its disks,
//! freeze it, read it, and release it. Each [`Capture`] implements the steps for its hypervisor:
//!
//! | step | libvirt and QEMU | XenServer | VirtualBox | container | off |
//! |---|---|---|---|---|---|
//! | freeze | filters, host snapshots, clones or overlays | a snapshot of the pool | a snapshot of VirtualBox | a snapshot of its layers | images are opened |
//! | read | what a dirty bitmap names, or all | what the pool tracks, or all | all | the layers above that of the backup before, or all | all |
//! | release | the old bitmaps, or the new ones if it failed | disks that the next backup compares with stay | the snapshot is deleted | the snapshot of the backup before is deleted | |

pub(crate) mod container;
pub(crate) mod foreign_disks;
pub(crate) mod foreign_machine;
pub(crate) mod images;
pub(crate) mod plan;
pub(crate) mod qemu;
pub(crate) mod sink;
pub(crate) mod snapshot;
pub(crate) mod store;
pub(crate) mod virtualbox;
pub(crate) mod xen;

use std::path::PathBuf;
use std::time::Duration;

use holdfast_host::{DiskChoice, MachineSummary};
use holdfast_repo::Repository;
use jiff::Timestamp;

use crate::job::{Error, Job, MachineName, Result};
use crate::machine::hooks::{HookCalls, Hooks};
use crate::machine::lock::{MachineLock, Work};
use crate::machine::run_journal::JournalPlace;
use crate::repository::name_conflict::Claimant;
use plan::{BackupPlan, PlannedCapture};
use sink::{RepositorySink, SnapshotSink};
use snapshot::{BackupReport, SnapshotOptions};

/// Options that all hypervisors share.
pub struct CaptureOptions<'a> {
    /// The name that snapshots are listed under.
    pub name: MachineName,
    /// Which disks are read.
    pub choice: DiskChoice,
    /// Files and folders elsewhere that images and settings may refer to.
    pub allowed: Vec<PathBuf>,
    /// The current time; called at the point in time.
    pub now: &'a (dyn Fn() -> Timestamp + Sync),
    /// The name of the host that reads the machine.
    pub host: String,
    /// The name of the program that reads it.
    pub program: String,
    /// Where locks and notes of runs are; none if the run is not noted.
    pub journal: Option<JournalPlace>,
    /// How long to wait for another backup of the machine.
    pub patience: Duration,
    /// Programs to call.
    pub hooks: Hooks,
    /// A random number, used in the names of objects created at the hypervisor.
    pub run: u32,
}

/// A machine that was backed up.
#[derive(Debug)]
pub struct MachineBackupReport<R> {
    /// The snapshot.
    pub backup: BackupReport,
    /// How the machine was read.
    pub reading: R,
}

/// A machine of one kind of hypervisor that is to be captured.
pub(crate) trait Capture {
    /// What the hypervisor says about the machine.
    type Found;
    /// The machine with its disks chosen.
    type Prepared<'c>: PreparedMachine<Reading = Self::Reading>
    where
        Self: 'c;
    /// How the machine was read.
    type Reading;

    fn options(&self) -> &CaptureOptions<'_>;

    /// Asks the hypervisor about the machine. Called again when the machine is locked, since it may have changed.
    fn find(&self) -> Result<Self::Found>;

    fn summary(found: &Self::Found) -> &MachineSummary;

    /// Removes leftovers of killed backups, if the machine is locked; chooses the disks, and checks everything that can
    /// be checked before the machine is disturbed.
    fn prepare<'c>(self, found: Self::Found, steps: Steps<'c>) -> Result<Self::Prepared<'c>>
    where
        Self: 'c;
}

/// What the steps of a capture work with.
#[derive(Clone, Copy)]
pub(crate) struct Steps<'c> {
    pub(crate) sink: &'c dyn SnapshotSink,
    pub(crate) hooks: &'c HookCalls<'c>,
    pub(crate) job: Job<'c>,
    /// Whether the machine is locked. Without a lock, another backup may be using what looks like leftovers.
    pub(crate) is_locked: bool,
}

/// A machine with its disks chosen.
pub(crate) trait PreparedMachine {
    /// The machine while its point in time is held.
    type Held<'h>
    where
        Self: 'h;
    type Reading;

    /// What a backup would read, and how. Nothing is changed.
    fn plan(&self) -> Result<PlannedCapture>;

    /// Freezes the machine at a point in time. If this fails, nothing is left at the hypervisor.
    fn freeze(&self) -> Result<Self::Held<'_>>;

    /// Reads the frozen machine, and stores it.
    fn read<'h>(&'h self, held: &mut Self::Held<'h>) -> Result<Self::Reading>;

    /// Releases the point in time, even if reading failed. If `read` is good, what the next backup is compared with is
    /// kept.
    fn release<'h>(&'h self, held: Self::Held<'h>, read: Result<Self::Reading>) -> Result<Self::Reading>;

    /// The error of a step, extended by the hypervisor's current information about the machine.
    fn explain(&self, error: Error) -> Error;

    /// The consistency of what was read, for hooks.
    fn consistency(reading: &Self::Reading) -> &str;
}

/// Captures a machine: its point in time goes to `sink`.
///
/// # Errors
/// A machine that was running still runs after any error.
pub(crate) fn capture<C: Capture>(machine: C, sink: &dyn SnapshotSink, job: Job<'_>) -> Result<C::Reading> {
    let mut found = machine.find()?;
    let options = machine.options();
    let (journal, now) = (options.journal.as_ref(), (options.now)());
    let lock = MachineLock::take(journal, C::summary(&found), Work::Backup, options.patience, now, job)?;
    if lock.is_some() {
        found = machine.find()?;
    }
    let summary = C::summary(&found).clone();
    let (hooks, name) = (options.hooks.clone(), options.name.clone());
    let calls = HookCalls::new(&hooks, name.as_str(), &summary, options.run, job);
    let steps = Steps {
        sink,
        hooks: &calls,
        job,
        is_locked: lock.is_some(),
    };
    let take = || {
        let prepared = machine.prepare(found, steps)?;
        sink.begin(&name, Claimant::Machine(&summary.uuid))?;
        job.interrupt.check()?;
        let taken = prepared.freeze().and_then(|mut held| {
            let read = prepared.read(&mut held);
            prepared.release(held, read)
        });
        taken.map_err(|error| prepared.explain(error))
    };
    let consistency = |reading: &C::Reading| <C::Prepared<'_> as PreparedMachine>::consistency(reading).to_owned();
    calls.around(take, |reading| (sink.snapshot(), consistency(reading)))
}

/// Captures a machine as a snapshot in a repository.
pub(crate) fn capture_into<C: Capture>(
    repository: &Repository,
    machine: C,
    snapshot: SnapshotOptions,
    job: Job<'_>,
) -> Result<MachineBackupReport<C::Reading>> {
    let sink = RepositorySink::new(repository, snapshot, job);
    let reading = capture(machine, &sink, job)?;
    let backup = sink.into_report().expect("what was read was stored");
    Ok(MachineBackupReport { backup, reading })
}

/// Plans what [`capture_into`] would do. The machine is not locked, no program is called, and nothing is changed.
pub(crate) fn plan_capture<C: Capture>(
    repository: &Repository,
    machine: C,
    snapshot: SnapshotOptions,
    job: Job<'_>,
) -> Result<BackupPlan> {
    plan_capture_into(&RepositorySink::new(repository, snapshot, job), machine, job)
}

/// Plans a capture into `sink`.
pub(crate) fn plan_capture_into<C: Capture>(sink: &dyn SnapshotSink, machine: C, job: Job<'_>) -> Result<BackupPlan> {
    let found = machine.find()?;
    let summary = C::summary(&found).clone();
    let (name, run) = (machine.options().name.clone(), machine.options().run);
    let hooks = Hooks::none();
    let calls = HookCalls::new(&hooks, name.as_str(), &summary, run, job);
    let steps = Steps {
        sink,
        hooks: &calls,
        job,
        is_locked: false,
    };
    let prepared = machine.prepare(found, steps)?;
    sink.begin(&name, Claimant::Machine(&summary.uuid))?;
    let planned = prepared.plan().map_err(|error| prepared.explain(error))?;
    let parent = sink.history().and_then(|history| history.parent.cloned());
    Ok(BackupPlan {
        name,
        state: Some(summary.state),
        parent,
        method: planned.method,
        disks: planned.disks,
        left_out: planned.left_out,
    })
}
