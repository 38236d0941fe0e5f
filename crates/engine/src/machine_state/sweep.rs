//! States whose host snapshots are gone are forgotten.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use holdfast_host::provider::{Dataset, HostSnapshot, OURS, Provider as _, ProviderError, ProviderKind};
use rustix::fs::FlockOperation;

use super::{KeptState, SetId, StateStore};
use crate::error::Result;
use crate::forget::Execution;
use crate::gc::gc;
use crate::host_snapshot::{HostSnapshotRecord, Providers};
use crate::job::Job;

/// Packs of which at most so much is needed are rewritten: memory is large, and its place may be small.
const REPACK_BELOW_PERCENT: u8 = 50;

/// What became of the states.
#[derive(Debug, Default)]
pub struct SweepReport {
    /// Those that were forgotten, or would be.
    pub forgotten: Vec<KeptState>,
    /// Those of which nobody knows whether their host snapshots are there: a pool is not imported, a file system not mounted.
    pub unknown: Vec<(KeptState, String)>,
    /// How many stay.
    pub kept_count: usize,
    /// Whether somebody was keeping states meanwhile: then nothing was looked at.
    pub was_busy: bool,
}

/// Forgets states whose host snapshots are all gone, whoever removed them.
///
/// # Errors
/// Of the store. Where a provider cannot be asked, the states stay.
pub fn sweep_states(
    store: &StateStore,
    providers: &Providers,
    execution: Execution,
    job: Job<'_>,
) -> Result<SweepReport> {
    let mut report = SweepReport::default();
    let Some(_alone) = store.lock(FlockOperation::NonBlockingLockExclusive)? else {
        report.was_busy = true;
        return Ok(report);
    };
    let mut sets = Sets {
        providers,
        of: BTreeMap::new(),
        everywhere: None,
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

/// The sets that have host snapshots.
struct Sets<'a> {
    providers: &'a Providers,
    /// By dataset; or why that is not known, or that the dataset is gone.
    of: BTreeMap<Dataset, Found>,
    /// Those of all datasets of ZFS: one may have been renamed.
    everywhere: Option<std::result::Result<BTreeSet<SetId>, String>>,
}

#[derive(Clone)]
enum Found {
    Sets(BTreeSet<SetId>),
    DatasetGone,
    Unknown(String),
}

impl Sets<'_> {
    /// Whether a host snapshot of a state is there.
    fn lives(&mut self, state: &KeptState) -> std::result::Result<bool, String> {
        let mut unknown = None;
        let datasets: BTreeSet<&Dataset> = state.snapshots.iter().map(|name| &name.dataset).collect();
        for dataset in datasets {
            match self.of(dataset) {
                Found::Sets(sets) if sets.contains(&state.set) => return Ok(true),
                Found::Sets(_) => {}
                Found::DatasetGone => match self.everywhere() {
                    Ok(sets) if sets.contains(&state.set) => return Ok(true),
                    Ok(_) => {}
                    Err(reason) => unknown = Some(reason),
                },
                Found::Unknown(reason) => unknown = Some(reason),
            }
        }
        unknown.map_or(Ok(false), Err)
    }

    fn of(&mut self, dataset: &Dataset) -> Found {
        if let Some(found) = self.of.get(dataset) {
            return found.clone();
        }
        let found = self.ask(dataset);
        self.of.insert(dataset.clone(), found.clone());
        found
    }

    fn ask(&self, dataset: &Dataset) -> Found {
        let provider = self.providers.of_dataset(dataset);
        // An empty folder where a file system is mounted at other times has no host snapshots, and says nothing of those that are there.
        if dataset.provider != ProviderKind::Zfs && !Path::new(&dataset.name).join(OURS).is_dir() {
            return Found::Unknown(format!("nothing of ours is in {dataset}: it may not be mounted"));
        }
        match provider.snapshots(&dataset.name) {
            Ok(snapshots) => Found::Sets(snapshots.iter().filter_map(set_of).collect()),
            Err(error) if dataset.provider == ProviderKind::Zfs => self.zfs_without(dataset, &error),
            // What is not mounted is not gone.
            Err(error) => Found::Unknown(error.to_string()),
        }
    }

    /// A dataset of ZFS is known to be gone only where its pool answers.
    fn zfs_without(&self, dataset: &Dataset, error: &ProviderError) -> Found {
        let pool = dataset.name.split('/').next().unwrap_or_default();
        let is_pool_there = || self.providers.zfs().dataset(pool).is_ok();
        match error {
            ProviderError::NotThere { .. } if pool != dataset.name && is_pool_there() => Found::DatasetGone,
            error => Found::Unknown(error.to_string()),
        }
    }

    fn everywhere(&mut self) -> std::result::Result<BTreeSet<SetId>, String> {
        let providers = self.providers;
        let look = || {
            let zfs = providers.zfs();
            let mut sets = BTreeSet::new();
            for state in zfs.datasets()? {
                sets.extend(zfs.snapshots(&state.dataset.name)?.iter().filter_map(set_of));
            }
            Ok(sets)
        };
        let found = self
            .everywhere
            .get_or_insert_with(|| look().map_err(|error: ProviderError| error.to_string()));
        found.clone()
    }
}

fn set_of(snapshot: &HostSnapshot) -> Option<SetId> {
    HostSnapshotRecord::parse(snapshot.record.as_deref()?)?.set
}
