//! Temporary host snapshots: of a machine in its present state, for making clones.
//!
//! They are noted before they are made, and the note is removed after them, so after a kill they can be identified. A
//! clone that needs its host snapshot permanently, as on ZFS, keeps it.

use holdfast_host::provider::{HostSnapshotName, ProviderError};
use holdfast_repo::Environment;

use crate::host_snapshot::states::{StateStore, Unfinished, UnfinishedKind};
use crate::host_snapshot::{HostSnapshotReport, HostSnapshotRequest, NamedSnapshotSet, Providers, take_host_snapshots};
use crate::job::{Job, Result};

/// Temporary host snapshots of the present state of a machine.
pub struct TemporarySnapshots<'a> {
    providers: &'a Providers,
    states: &'a StateStore,
    work: Unfinished,
    report: HostSnapshotReport,
}

impl<'a> TemporarySnapshots<'a> {
    /// Takes them, for the one machine and with the one name of `request`.
    ///
    /// # Errors
    /// No snapshot exists then.
    pub fn take(
        request: &HostSnapshotRequest<'a>,
        states: &'a StateStore,
        environment: &Environment,
        job: Job<'_>,
    ) -> Result<Self> {
        let names = request.cuts.iter().flat_map(NamedSnapshotSet::snapshots);
        let machine = request.guests.first().map(|guest| &guest.description.summary.name);
        let point = request.cuts.first().map(|cut| &cut.name);
        let work = Unfinished {
            kind: UnfinishedKind::Instant,
            machine: machine.cloned().unwrap_or_default(),
            uuid: request.set.to_string(),
            of: machine.cloned().unwrap_or_default(),
            point: point.cloned().unwrap_or_default(),
            safety: names.map(|name| name.to_string()).collect(),
            files: Vec::new(),
            process: environment.processes.this(),
            start_ms: (environment.now_ms)(),
        };
        states.note_unfinished(&work)?;
        let taken = take_host_snapshots(request, &mut || (), job);
        let report = taken.inspect_err(|_| {
            // If the note remains, a later examination finds that its snapshots do not exist.
            states.forget_unfinished(&work.uuid).ok();
        })?;
        Ok(Self {
            providers: request.providers,
            states,
            work,
            report,
        })
    }

    /// Their name.
    pub fn name(&self) -> &str {
        &self.work.point
    }

    /// The report of their creation.
    pub fn report(&self) -> &HostSnapshotReport {
        &self.report
    }

    /// Removes the snapshots that nothing needs, and returns the others. Errors become warnings.
    pub fn remove(self, job: Job<'_>) -> Vec<HostSnapshotName> {
        let mut needed = Vec::new();
        for name in &self.report.snapshots {
            match remove_unless_needed(self.providers, name) {
                Ok(None) => {}
                Ok(Some(clones)) => {
                    let clones = clones.join(", ");
                    job.progress
                        .note(&format!("{name} stays, as it is what {clones} came from"));
                    needed.push(name.clone());
                }
                Err(error) => {
                    let message =
                        format!("{name} was needed for a while, and stays: {error}; holdfast doctor sees to it");
                    job.progress.warning(&message);
                    return needed;
                }
            }
        }
        if let Err(error) = self.states.forget_unfinished(&self.work.uuid) {
            let message = format!("{error}: host snapshots that were needed for a while are still noted");
            job.progress.warning(&message);
        }
        needed
    }
}

/// Removes a host snapshot unless something needs it; returns what needs it. A missing snapshot is not an error.
pub(crate) fn remove_unless_needed(
    providers: &Providers,
    name: &HostSnapshotName,
) -> std::result::Result<Option<Vec<String>>, ProviderError> {
    let provider = providers.of_dataset(&name.dataset);
    let clones = match provider.clones(name) {
        Err(ProviderError::NotFound { .. }) => return Ok(None),
        clones => clones?,
    };
    if !clones.is_empty() {
        return Ok(Some(clones));
    }
    match provider.destroy(name) {
        Err(ProviderError::NotFound { .. }) => Ok(None),
        other => other.map(|()| None),
    }
}
