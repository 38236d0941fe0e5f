//! `cron`: a policy carried out once. Snapshots that are due are taken, those that have served their time are removed.
//!
//! What is due and what has expired is decided by `holdfast_policy::sanoid`, which is pure; here it is done. Datasets that hold disks of one
//! machine are cut together, so that the machine holds still once, and all its disks are of one instant.
//!
//! A dataset that fails does not keep the others: errors are reported at the end.

mod hooks;
mod prune;
mod take;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use holdfast_host::Description;
use holdfast_host::provider::{
    Dataset, HostSnapshot, HostSnapshotName, HostSnapshotScope, Provider as _, ProviderKind,
};
use holdfast_policy::sanoid::{DatasetPolicy, SanoidConfig, TypedSnapshot};
use jiff::{Timestamp, Zoned};
use rustix::fs::{FlockOperation, flock};

use super::states::{StateStore, sweep_states};
use super::{GuestReport, GuestRequest, MachinePlaces, Providers};
use crate::host_snapshot::record::SetId;
use crate::job::{Error, Job, Result};
use crate::repository::forget::Execution;

/// The machines of a host, found when they are needed.
pub trait Guests {
    /// Where the disks of all of them are.
    fn places(&self) -> Vec<&MachinePlaces>;

    /// What is asked of one of them, by its place in that list.
    fn request(&self, index: usize) -> Result<GuestRequest<'_>>;

    /// Machines that run, and have disks in what was wanted, by now: those that came while it was cut among them.
    fn newcomers(&self, wanted: &[HostSnapshotScope]) -> Vec<Description>;

    /// A number that no set of host snapshots has.
    fn new_set(&self) -> Result<SetId>;
}

/// A policy, and how it is carried out.
pub struct PolicyRunRequest<'a> {
    /// The providers of this host.
    pub providers: &'a Providers,
    /// The policy.
    pub config: &'a SanoidConfig,
    /// Whether snapshots that are due are taken.
    pub takes: bool,
    /// Whether those that have served their time are removed.
    pub prunes: bool,
    /// Whether anything is changed.
    pub execution: Execution,
    /// The machines of this host.
    pub guests: &'a dyn Guests,
    /// The clock, in the zone whose hours and days are meant.
    pub now: &'a dyn Fn() -> Zoned,
    /// Where the states of the machines are kept; none where they are not.
    pub states: Option<&'a StateStore>,
    /// The program that does it.
    pub program: String,
    /// A file that is locked meanwhile: two runs at once would take everything twice.
    pub lock: PathBuf,
    /// Variables of the environment that hooks do not get.
    pub withheld: Vec<String>,
}

/// What was done.
#[derive(Debug, Default)]
pub struct PolicyRunReport {
    /// Snapshots that were taken, or would be: by what was cut together.
    pub taken: Vec<TakenSnapshotSet>,
    /// Snapshots that were removed, or would be.
    pub removed: Vec<RemovedByPolicy>,
    /// States of machines that were forgotten, since no host snapshot needs them.
    pub forgotten_states: usize,
    /// What is hardly meant in the policy.
    pub doubts: Vec<String>,
    /// Datasets that could not be looked at: each with why.
    pub unreadable: Vec<(String, String)>,
    /// Whether it was interrupted before all was done; what is reported was done.
    pub is_interrupted: bool,
}

/// Datasets that were cut together.
#[derive(Debug, Default)]
pub struct TakenSnapshotSet {
    /// The snapshots, by their full names.
    pub snapshots: Vec<HostSnapshotName>,
    /// Machines that hold still, by name, in a dry run.
    pub would_freeze: Vec<usize>,
    /// What happened to the machines.
    pub guests: Vec<GuestReport>,
    /// Machines of which there is no whole snapshot, since other datasets with disks of theirs could not be cut: by their places.
    pub incomplete: Vec<usize>,
    /// Why there is none.
    pub failure: Option<String>,
}

/// A snapshot that has served its time.
#[derive(Debug)]
pub struct RemovedByPolicy {
    /// It.
    pub snapshot: HostSnapshotName,
    /// Why.
    pub reason: String,
    /// Bytes that were free without it.
    pub used_bytes: Option<u64>,
    /// Why it stays all the same.
    pub obstacle: Option<String>,
}

/// Carries out a policy once.
///
/// # Errors
/// Another run is under way, or nothing can be asked at all. What goes wrong with a dataset is in the report, and so is what was done
/// until it was interrupted.
pub fn run_policy(request: &PolicyRunRequest<'_>, job: Job<'_>) -> Result<PolicyRunReport> {
    let _lock = lock(request)?;
    let found = request.providers.zfs().datasets()?;
    let names: Vec<String> = found.iter().map(|state| state.dataset.name.clone()).collect();
    let resolved = request.config.resolve(&names);
    let doubts = request.config.warnings().iter().chain(&resolved.warnings);
    let mut report = PolicyRunReport {
        doubts: doubts.map(ToString::to_string).collect(),
        ..PolicyRunReport::default()
    };
    let policies: Vec<&DatasetPolicy> = resolved
        .datasets
        .iter()
        .filter(|policy| names.contains(&policy.dataset))
        .collect();
    let run = PolicyRun {
        request,
        now: (request.now)(),
        job,
    };
    if request.takes {
        let snapshots = run.snapshots(policies.iter().filter(|policy| policy.takes()), &mut report);
        take::take(&run, &policies, &snapshots, &mut report);
    }
    // An interrupted run reports what was done, which an error would not.
    if request.prunes && !report.is_interrupted {
        // Those that were just taken count.
        let snapshots = run.snapshots(policies.iter().filter(|policy| policy.prunes()), &mut report);
        prune::prune(&run, &policies, &snapshots, &mut report);
        report.forgotten_states = if report.is_interrupted { 0 } else { run.sweep() };
    }
    Ok(report)
}

/// The snapshots of datasets, by dataset.
type Snapshots = BTreeMap<String, Vec<HostSnapshot>>;

struct PolicyRun<'a> {
    request: &'a PolicyRunRequest<'a>,
    now: Zoned,
    job: Job<'a>,
}

impl PolicyRun<'_> {
    /// Forgets the states of which no host snapshot is left, however they were removed.
    fn sweep(&self) -> usize {
        let Some(store) = self
            .request
            .states
            .filter(|_| self.request.execution == Execution::Execute)
        else {
            return 0;
        };
        match sweep_states(store, self.request.providers, Execution::Execute, self.job) {
            Ok(report) => report.forgotten.len(),
            Err(error) => {
                let message = format!("states of machines that are no longer needed were not removed: {error}");
                self.job.progress.warning(&message);
                0
            }
        }
    }

    fn snapshots<'p>(
        &self,
        policies: impl Iterator<Item = &'p &'p DatasetPolicy>,
        report: &mut PolicyRunReport,
    ) -> Snapshots {
        let mut all = Snapshots::new();
        for policy in policies {
            match self.request.providers.zfs().snapshots(&policy.dataset) {
                Ok(snapshots) => drop(all.insert(policy.dataset.clone(), snapshots)),
                Err(error) => report.unreadable.push((policy.dataset.clone(), error.to_string())),
            }
        }
        all
    }
}

/// What the policy knows of a snapshot; none where another program made it.
fn typed(snapshot: &HostSnapshot) -> Option<TypedSnapshot> {
    TypedSnapshot::new(&snapshot.name.name, Timestamp::from_second(snapshot.time_s).ok()?)
}

fn dataset(name: &str) -> Dataset {
    Dataset {
        provider: ProviderKind::Zfs,
        name: name.to_owned(),
    }
}

/// Locked until it is dropped.
fn lock(request: &PolicyRunRequest<'_>) -> Result<Option<File>> {
    if request.execution == Execution::DryRun {
        return Ok(None);
    }
    let path = &request.lock;
    let failed = |source| Error::File {
        action: "open",
        path: path.clone(),
        source,
    };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    let mut options = File::options();
    let file = options
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::PolicyBusy { lock: path.clone() }),
        Err(error) => Err(failed(error.into())),
    }
}
