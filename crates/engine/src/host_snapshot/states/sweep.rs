//! Removes states whose host snapshots no longer exist.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use holdfast_host::provider::{Dataset, HostSnapshot, ProviderError, ProviderKind, SNAPSHOT_FOLDER};
use rustix::fs::FlockOperation;

use super::{KeptState, StateStore};
use crate::host_snapshot::record::SetId;
use crate::host_snapshot::{HostSnapshotRecord, Providers};
use crate::job::{Job, Result};
use crate::repository::forget::Execution;
use crate::repository::gc::gc;

/// Packs of which at most this share is used are rewritten: memory is large, and its storage may be small.
const REPACK_BELOW_PERCENT: u8 = 50;

/// What happened to the states.
#[derive(Debug, Default)]
pub struct SweepReport {
    /// States that were removed, or would be.
    pub forgotten: Vec<KeptState>,
    /// States whose host snapshots may or may not exist: a pool is not imported, or a file system not mounted.
    pub unknown: Vec<(KeptState, String)>,
    /// Number of states that are kept.
    pub kept_count: usize,
    /// Whether states were being stored: then nothing was examined.
    pub was_busy: bool,
}

/// Removes states whose host snapshots no longer exist, however they were removed.
///
/// # Errors
/// Errors of the store. If a provider cannot be queried, the states are kept.
pub fn sweep_states(
    store: &StateStore,
    providers: &Providers,
    execution: Execution,
    job: Job<'_>,
) -> Result<SweepReport> {
    let mut report = SweepReport::default();
    let Some(_alone) = store.try_lock(FlockOperation::NonBlockingLockExclusive)? else {
        report.was_busy = true;
        return Ok(report);
    };
    let mut sets = Sets {
        providers,
        of: BTreeMap::new(),
        everywhere: BTreeMap::new(),
    };
    for state in store.states(job)? {
        match sets.lives(&state) {
            Ok(true) => report.kept_count += 1,
            Ok(false) => report.forgotten.push(state),
            Err(reason) => report.unknown.push((state, reason)),
        }
    }
    if execution == Execution::Execute && !report.forgotten.is_empty() {
        for state in &report.forgotten {
            let reason = format!("no host snapshot of its set {} is left", state.set);
            store.repository().forget(state.manifest.id, &reason)?;
        }
        gc(store.repository(), REPACK_BELOW_PERCENT, execution, job)?;
    }
    Ok(report)
}

/// The sets that still have host snapshots.
struct Sets<'a> {
    providers: &'a Providers,
    /// By dataset; or why this is unknown, or that the dataset no longer exists.
    of: BTreeMap<Dataset, DatasetSets>,
    /// The sets of all datasets of a provider: a dataset may have been renamed.
    everywhere: BTreeMap<ProviderKind, std::result::Result<BTreeSet<SetId>, String>>,
}

#[derive(Clone)]
enum DatasetSets {
    Sets(BTreeSet<SetId>),
    DatasetGone,
    Unknown(String),
}

impl Sets<'_> {
    /// Whether a host snapshot of a state exists.
    fn lives(&mut self, state: &KeptState) -> std::result::Result<bool, String> {
        let mut unknown = None;
        let datasets: BTreeSet<&Dataset> = state.snapshots.iter().map(|name| &name.dataset).collect();
        for dataset in datasets {
            match self.of(dataset) {
                DatasetSets::Sets(sets) if sets.contains(&state.set) => return Ok(true),
                DatasetSets::Sets(_) => {}
                DatasetSets::DatasetGone => match self.everywhere(dataset.provider) {
                    Ok(sets) if sets.contains(&state.set) => return Ok(true),
                    Ok(_) => {}
                    Err(reason) => unknown = Some(reason),
                },
                DatasetSets::Unknown(reason) => unknown = Some(reason),
            }
        }
        unknown.map_or(Ok(false), Err)
    }

    fn of(&mut self, dataset: &Dataset) -> DatasetSets {
        if let Some(found) = self.of.get(dataset) {
            return found.clone();
        }
        let found = self.ask(dataset);
        self.of.insert(dataset.clone(), found.clone());
        found
    }

    fn ask(&self, dataset: &Dataset) -> DatasetSets {
        let provider = self.providers.of_dataset(dataset);
        // The empty mount point of an unmounted file system shows no host snapshots, which says nothing about the existing ones.
        if dataset.provider.has_folders() && !Path::new(&dataset.name).join(SNAPSHOT_FOLDER).is_dir() {
            return DatasetSets::Unknown(format!(
                "{dataset} has no host snapshots of Holdfast: it may not be mounted"
            ));
        }
        match provider.snapshots(&dataset.name) {
            Ok(snapshots) => DatasetSets::Sets(snapshots.iter().filter_map(set_of).collect()),
            Err(ProviderError::NotFound { .. }) if self.is_group_there(dataset) => DatasetSets::DatasetGone,
            Err(error) => DatasetSets::Unknown(error.to_string()),
        }
    }

    /// A dataset counts as missing only if its pool or volume group can be queried. An unmounted dataset is not missing.
    fn is_group_there(&self, dataset: &Dataset) -> bool {
        let pool = dataset.name.split('/').next().unwrap_or_default();
        match dataset.provider {
            ProviderKind::Zfs => pool != dataset.name && self.providers.of(ProviderKind::Zfs).dataset(pool).is_ok(),
            ProviderKind::Lvm => self.providers.lvm().has_group(pool),
            ProviderKind::Btrfs | ProviderKind::Reflink => false,
        }
    }

    fn everywhere(&mut self, kind: ProviderKind) -> std::result::Result<BTreeSet<SetId>, String> {
        let provider = self.providers.of(kind);
        let look = || {
            let mut sets = BTreeSet::new();
            for state in provider.datasets()? {
                sets.extend(provider.snapshots(&state.dataset.name)?.iter().filter_map(set_of));
            }
            Ok(sets)
        };
        let found = self
            .everywhere
            .entry(kind)
            .or_insert_with(|| look().map_err(|error: ProviderError| error.to_string()));
        found.clone()
    }
}

fn set_of(snapshot: &HostSnapshot) -> Option<SetId> {
    HostSnapshotRecord::parse(snapshot.record.as_deref()?)?.set
}
