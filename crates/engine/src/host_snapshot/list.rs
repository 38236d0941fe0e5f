//! Lists existing host snapshots.

use holdfast_host::provider::{Dataset, HostSnapshot};

use super::{HostSnapshotRecord, Providers, SetCompleteness};
use crate::job::Result;

/// A host snapshot and its record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSnapshotState {
    /// The host snapshot.
    pub snapshot: HostSnapshot,
    /// Its record, if Holdfast made it and the version is known.
    pub record: Option<HostSnapshotRecord>,
    /// Whether its set is complete; none if unknown because another program made it.
    pub is_whole: Option<bool>,
}

/// The host snapshots of a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSnapshotList {
    /// The dataset.
    pub dataset: Dataset,
    /// Its snapshots, the oldest first.
    pub snapshots: Vec<HostSnapshotState>,
}

/// Whether the sizes of host snapshots are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotSizes {
    /// They are measured, which takes long.
    Measured,
    /// They are not measured.
    Unknown,
}

/// Lists the host snapshots of datasets.
pub fn list_host_snapshots(
    providers: &Providers,
    datasets: &[Dataset],
    sizes: SnapshotSizes,
) -> Result<Vec<HostSnapshotList>> {
    let mut completeness = SetCompleteness::new(providers);
    let mut lists = Vec::new();
    for dataset in datasets {
        let provider = providers.of_dataset(dataset);
        let mut snapshots = provider.snapshots(&dataset.name)?;
        if sizes == SnapshotSizes::Measured {
            provider.measure(&mut snapshots)?;
        }
        let state = |snapshot: HostSnapshot| HostSnapshotState {
            is_whole: completeness.of(&snapshot.name, snapshot.record.as_deref()),
            record: snapshot.record.as_deref().and_then(HostSnapshotRecord::parse),
            snapshot,
        };
        lists.push(HostSnapshotList {
            dataset: dataset.clone(),
            snapshots: snapshots.into_iter().map(state).collect(),
        });
    }
    Ok(lists)
}
