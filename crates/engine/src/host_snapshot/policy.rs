//! `cron`: runs a policy once. Takes snapshots that are due, and removes those that have expired.
//!
//! `holdfast_policy::sanoid` decides what is due and what has expired, and is pure; here this is carried out. Datasets
//! with disks of the same machine are snapshotted together, so that the machine is frozen once, and all its disks are
//! of one point in time.
//!
//! A dataset that fails does not stop the others: errors are reported at the end.

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
    /// The places of the disks of all machines.
    fn places(&self) -> Vec<&MachinePlaces>;

    /// The request for one machine, by its index in that list.
    fn request(&self, index: usize) -> Result<GuestRequest<'_>>;

    /// Running machines that now have disks in `wanted`: those that appeared while the snapshots were made are among them.
    fn newcomers(&self, wanted: &[HostSnapshotScope]) -> Vec<Description>;

    /// A new number for a set of host snapshots.
    fn new_set(&self) -> Result<SetId>;
}

/// A policy, and how to run it.
pub struct PolicyRunRequest<'a> {
    /// The providers of this host.
    pub providers: &'a Providers,
    /// The policy.
    pub config: &'a SanoidConfig,
    /// Whether snapshots that are due are taken.
    pub takes: bool,
    /// Whether expired snapshots are removed.
    pub prunes: bool,
    /// Whether anything is changed, or only planned.
    pub execution: Execution,
    /// The machines of this host.
    pub guests: &'a dyn Guests,
    /// The clock, in the time zone of the policy.
    pub now: &'a dyn Fn() -> Zoned,
    /// Where the states of the machines are stored; none if they are not.
    pub states: Option<&'a StateStore>,
    /// The program that runs the policy.
    pub program: String,
    /// A lock file: two runs at once would take every snapshot twice.
    pub lock: PathBuf,
    /// Environment variables that are not passed to hooks.
    pub withheld: Vec<String>,
}

/// Result of a policy run.
#[derive(Debug, Default)]
pub struct PolicyRunReport {
    /// Snapshots that were taken, or would be, grouped by sets.
    pub taken: Vec<TakenSnapshotSet>,
    /// Snapshots that were removed, or would be.
    pub removed: Vec<RemovedByPolicy>,
    /// Number of states of machines that were removed because no host snapshot needs them.
    pub forgotten_states: usize,
    /// Settings of the policy that are probably mistakes.
    pub doubts: Vec<String>,
    /// Datasets that could not be examined, each with the reason.
    pub unreadable: Vec<(String, String)>,
    /// Whether the run was interrupted; the report lists what was done before.
    pub is_interrupted: bool,
}

/// Datasets that were snapshotted together.
#[derive(Debug, Default)]
pub struct TakenSnapshotSet {
    /// The snapshots, by their full names.
    pub snapshots: Vec<HostSnapshotName>,
    /// In a dry run: indexes of the machines that would be frozen or paused.
    pub would_freeze: Vec<usize>,
    /// What happened to the machines.
    pub guests: Vec<GuestReport>,
    /// Indexes of machines without a complete snapshot, because other datasets with their disks could not be snapshotted.
    pub incomplete: Vec<usize>,
    /// Why the snapshots failed.
    pub failure: Option<String>,
}

/// An expired snapshot.
#[derive(Debug)]
pub struct RemovedByPolicy {
    /// The snapshot.
    pub snapshot: HostSnapshotName,
    /// Why.
    pub reason: String,
    /// Bytes that its removal frees.
    pub used_bytes: Option<u64>,
    /// Why it is kept nevertheless.
    pub obstacle: Option<String>,
}

/// Runs a policy once.
///
/// # Errors
/// Another run is active, or no dataset can be queried at all. Errors of single datasets are in the report, and so is
/// what was done before an interruption.
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
    // An interrupted run reports what was done; an error would not.
    if request.prunes && !report.is_interrupted {
        // Includes the snapshots that were just taken.
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
    /// Removes states without a host snapshot, however the host snapshots were removed.
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

/// Type and time of a snapshot for the policy; none if another program made it.
fn typed(snapshot: &HostSnapshot) -> Option<TypedSnapshot> {
    TypedSnapshot::new(&snapshot.name.name, Timestamp::from_second(snapshot.time_s).ok()?)
}

fn dataset(name: &str) -> Dataset {
    Dataset {
        provider: ProviderKind::Zfs,
        name: name.to_owned(),
    }
}

/// Takes the lock, which is held until the returned file is dropped.
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
