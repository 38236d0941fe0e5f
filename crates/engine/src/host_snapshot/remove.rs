//! Removes host snapshots: plan, then execute.

use holdfast_host::provider::{HostSnapshot, HostSnapshotName, ProviderError};

use super::Providers;
use crate::job::{Job, Result};
use crate::repository::forget::Execution;

/// Which host snapshots to remove.
pub struct HostRemovalRequest<'a> {
    /// The providers of this host.
    pub providers: &'a Providers,
    /// The snapshots, by their full names.
    pub snapshots: Vec<HostSnapshotName>,
    /// Whether they are removed, or only the plan is made.
    pub execution: Execution,
}

/// A host snapshot that was removed, or would be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedRemoval {
    /// The snapshot.
    pub snapshot: HostSnapshot,
    /// Why it is kept; none if it is removed.
    pub obstacle: Option<String>,
}

/// What was removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRemovalReport {
    /// The snapshots, in the order of the request.
    pub removals: Vec<PlannedRemoval>,
}

/// Removes host snapshots. An obstacle to one removal does not stop the others.
///
/// # Errors
/// A snapshot does not exist: then none is removed, since the name is a mistake.
pub fn remove_host_snapshots(request: &HostRemovalRequest<'_>, job: Job<'_>) -> Result<HostRemovalReport> {
    let mut planned = Vec::new();
    for name in &request.snapshots {
        let found = request
            .providers
            .of_dataset(&name.dataset)
            .snapshots(&name.dataset.name)?;
        let snapshot = found.into_iter().find(|snapshot| snapshot.name == *name);
        planned.push(snapshot.ok_or_else(|| ProviderError::NotFound { what: name.to_string() })?);
    }
    let removals = remove_looked_at(request.providers, planned, request.execution, job)?;
    Ok(HostRemovalReport { removals })
}

/// Removes these host snapshots, but not others that have been given the same names since.
pub(super) fn remove_looked_at(
    providers: &Providers,
    snapshots: Vec<HostSnapshot>,
    execution: Execution,
    job: Job<'_>,
) -> Result<Vec<PlannedRemoval>> {
    let mut removals = Vec::new();
    for snapshot in snapshots {
        job.interrupt.check()?;
        let provider = providers.of_dataset(&snapshot.name.dataset);
        let held = || match snapshot.hold_count {
            0 => None,
            1 => Some("it has a hold".to_owned()),
            count => Some(format!("{count} hold it")),
        };
        let destroy = || provider.destroy_this(&snapshot).err().map(|error| error.to_string());
        let needed = || match provider.clones(&snapshot.name) {
            Ok(clones) if clones.is_empty() => None,
            Ok(clones) => Some(format!("it has clones, which need it: {}", clones.join(", "))),
            Err(error) => Some(format!("whether it has clones is not known: {error}")),
        };
        let obstacle = match execution {
            Execution::DryRun => held().or_else(needed),
            Execution::Execute => held().or_else(destroy),
        };
        removals.push(PlannedRemoval { snapshot, obstacle });
    }
    Ok(removals)
}
