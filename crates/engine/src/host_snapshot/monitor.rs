//! `monitor`: whether a policy is met, and whether its pools are healthy, for monitoring programs.
//!
//! `holdfast_policy::sanoid` decides the result of a check, and is pure; here ZFS is queried. A missing answer never counts as
//! OK: such a dataset or pool is unknown, and the others are still reported.

use std::collections::BTreeMap;

use holdfast_block::error_text;
use holdfast_host::provider::{DatasetState, HostSnapshot, PoolRoom, PoolState, Provider as _, ProviderError};
use holdfast_policy::sanoid::{
    Check, DatasetPolicy, Level, PoolDevice, PoolFacts, PoolStatus, ResolvedDatasets, SanoidConfig, SnapshotType,
    TypedSnapshot, capacity, freshness, health,
};
use jiff::Timestamp;

use super::{Providers, SetCompleteness};

/// What to monitor.
pub struct MonitorRequest<'a> {
    /// The providers of this host.
    pub providers: &'a Providers,
    /// The policy.
    pub config: &'a SanoidConfig,
    /// Now.
    pub now: Timestamp,
}

/// Results of all checks, with figures.
#[derive(Debug)]
pub struct MonitorReport {
    /// Whether the snapshots are fresh.
    pub snapshots: Check,
    /// Whether the pools are healthy.
    pub health: Check,
    /// Whether the pools have free space.
    pub capacity: Check,
    /// The datasets of the policy that could be examined.
    pub datasets: Vec<DatasetFigures>,
    /// The pools of the policy that could be examined.
    pub pools: Vec<PoolFigures>,
}

/// Figures of a dataset.
#[derive(Debug)]
pub struct DatasetFigures {
    /// Its name.
    pub dataset: String,
    /// Its used and free space; none if the dataset does not exist.
    pub state: Option<DatasetState>,
    /// Its snapshots by type: types that the policy keeps, and other types that exist.
    pub types: Vec<TypeFigures>,
    /// Whether its snapshots are as fresh as the policy demands; none if the policy does not monitor them.
    pub is_fresh: Option<bool>,
}

/// Figures of the snapshots of one type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TypeFigures {
    /// The type.
    pub kind: SnapshotType,
    /// How many there are.
    pub count: u64,
    /// When the newest was taken.
    pub newest: Option<Timestamp>,
    /// Bytes used by each snapshot alone, added up.
    pub used_bytes: u64,
}

/// Figures of a pool.
#[derive(Debug)]
pub struct PoolFigures {
    /// Its state.
    pub state: PoolState,
    /// Its space; none if unknown.
    pub room: Option<PoolRoom>,
}

/// Checks whether the datasets of a policy have fresh snapshots.
pub fn check_snapshots(request: &MonitorRequest<'_>) -> Check {
    match MonitoredDatasets::find(request) {
        Ok(watched) => watched.check(request.now),
        Err(reason) => Check::unknown(&reason),
    }
}

/// Checks whether the pools of a policy are healthy.
pub fn check_health(request: &MonitorRequest<'_>) -> Check {
    let pools = request.of_sections().pools().into_iter();
    let answers = pools.map(|pool| {
        let answer = request.pool_with_devices(&pool);
        (pool, answer)
    });
    health(&answers.collect())
}

/// Checks whether the pools of a policy have free space.
pub fn check_capacity(request: &MonitorRequest<'_>) -> Check {
    let resolved = request.of_sections();
    if resolved.datasets.is_empty() {
        return Check::unknown(NO_DATASET);
    }
    let limits = resolved.capacity_limits().into_iter();
    let answers = limits.map(|(pool, limits)| {
        let answer = answer(request.providers.zfs().pool(&pool), Vec::new());
        (pool, (limits, answer))
    });
    capacity(&answers.collect())
}

/// Runs all checks, and also reports their figures.
pub fn monitor(request: &MonitorRequest<'_>) -> MonitorReport {
    let (snapshots, datasets) = match MonitoredDatasets::find(request) {
        Ok(watched) => (watched.check(request.now), watched.figures(request.now)),
        Err(reason) => (Check::unknown(&reason), Vec::new()),
    };
    let zfs = request.providers.zfs();
    let pools = request.of_sections().pools().into_iter();
    MonitorReport {
        snapshots,
        health: check_health(request),
        capacity: check_capacity(request),
        datasets,
        pools: pools
            .filter_map(|pool| {
                let state = zfs.pool(&pool).ok()?;
                let room = zfs.pool_room(&pool).ok();
                Some(PoolFigures { state, room })
            })
            .collect(),
    }
}

const NO_DATASET: &str = "the policy is about no dataset";

impl MonitorRequest<'_> {
    /// The policy for datasets with their own section: their pools are known without listing datasets.
    fn of_sections(&self) -> ResolvedDatasets {
        let datasets: Vec<String> = self.config.datasets().map(str::to_owned).collect();
        self.config.resolve(&datasets)
    }

    fn pool_with_devices(&self, pool: &str) -> PoolStatus {
        let zfs = self.providers.zfs();
        let state = match zfs.pool(pool) {
            Ok(state) => state,
            failed => return answer(failed, Vec::new()),
        };
        match zfs.pool_devices(&state) {
            Ok(devices) => {
                let devices = devices.into_iter().map(|device| PoolDevice {
                    depth: device.depth,
                    name: device.name,
                    state: device.state,
                    has_read_errors: device.has_errors.read,
                    has_write_errors: device.has_errors.write,
                    has_checksum_errors: device.has_errors.checksum,
                });
                answer(Ok(state), devices.collect())
            }
            // A pool that is not open is worse than an unknown state.
            Err(_) if !state.is_open() => answer(Ok(state), Vec::new()),
            Err(error) => answer(Err(error), Vec::new()),
        }
    }
}

fn answer(asked: Result<PoolState, ProviderError>, devices: Vec<PoolDevice>) -> PoolStatus {
    match asked {
        Ok(state) => PoolStatus::Present(PoolFacts {
            health: state.health,
            size: state.size,
            free: state.free,
            capacity: state.capacity,
            devices,
        }),
        Err(ProviderError::NotFound { .. }) => PoolStatus::Missing,
        Err(error) => PoolStatus::Unknown(error_text(&error)),
    }
}

/// The datasets of a policy, with their snapshots.
struct MonitoredDatasets {
    policies: Vec<DatasetPolicy>,
    states: BTreeMap<String, DatasetState>,
    types: BTreeMap<String, BTreeMap<SnapshotType, TypeFigures>>,
    /// Datasets that could not be examined, with the reasons.
    unknown: BTreeMap<String, String>,
}

impl MonitoredDatasets {
    /// # Errors
    /// Why nothing can be checked, in words.
    fn find(request: &MonitorRequest<'_>) -> Result<Self, String> {
        let zfs = request.providers.zfs();
        let found = zfs.datasets().map_err(|error| error_text(&error))?;
        if found.is_empty() {
            return Err("ZFS knows of no dataset".to_owned());
        }
        let states: BTreeMap<String, DatasetState> = found
            .into_iter()
            .map(|state| (state.dataset.name.clone(), state))
            .collect();
        let names: Vec<String> = states.keys().cloned().collect();
        let policies = request.config.resolve(&names).datasets;
        if policies.is_empty() {
            return Err(NO_DATASET.to_owned());
        }
        let mut completeness = SetCompleteness::new(request.providers);
        let (mut types, mut unknown) = (BTreeMap::new(), BTreeMap::new());
        for policy in &policies {
            let dataset = &policy.dataset;
            if !states.contains_key(dataset) {
                // A missing dataset has no dataset below it that could be checked.
                if policy.is_monitored_below() {
                    unknown.insert(
                        dataset.clone(),
                        "there is no such dataset, and nothing below it".to_owned(),
                    );
                }
                continue;
            }
            match zfs.snapshots(dataset) {
                Ok(snapshots) => {
                    // An incomplete set is not a point in time for a rollback.
                    let is_whole = |snapshot: &&HostSnapshot| {
                        completeness.of(&snapshot.name, snapshot.record.as_deref()) != Some(false)
                    };
                    let whole = snapshots.iter().filter(is_whole);
                    let typed = whole.filter_map(|snapshot| {
                        let time = Timestamp::from_second(snapshot.time_s).ok()?;
                        // A snapshot in the future, from a wrong clock, must not count as fresh.
                        if time.as_millisecond() > request.now.as_millisecond().saturating_add(crate::SKEW_MS) {
                            return None;
                        }
                        let typed = TypedSnapshot::new(&snapshot.name.name, time)?;
                        Some((typed, snapshot.used_bytes.unwrap_or_default()))
                    });
                    types.insert(dataset.clone(), figures(typed));
                }
                Err(error) => drop(unknown.insert(dataset.clone(), error_text(&error))),
            }
        }
        Ok(Self {
            policies,
            states,
            types,
            unknown,
        })
    }

    fn newest(&self, dataset: &str, kind: SnapshotType) -> Option<Timestamp> {
        self.types.get(dataset)?.get(&kind)?.newest
    }

    fn check(&self, now: Timestamp) -> Check {
        let policies = self.policies.iter();
        let known: Vec<DatasetPolicy> = policies
            .filter(|policy| !self.unknown.contains_key(&policy.dataset))
            .cloned()
            .collect();
        let check = freshness(&known, |dataset, kind| self.newest(dataset, kind), now);
        let is_watched = |dataset: &str| {
            let mut policies = self.policies.iter();
            policies.any(|policy| policy.dataset == dataset && (policy.is_monitored() || policy.is_monitored_below()))
        };
        let unknown = self.unknown.iter().filter(|(dataset, _)| is_watched(dataset));
        let unknown: Vec<String> = unknown.map(|(dataset, why)| format!("{dataset}: {why}")).collect();
        if unknown.is_empty() {
            return check;
        }
        let unknown = Check::unknown(&unknown.join(", "));
        if check.level == Level::Ok {
            return unknown;
        }
        Check {
            level: check.level.max(unknown.level),
            line: format!("{}, {}", check.line, unknown.line),
        }
    }

    fn figures(mut self, now: Timestamp) -> Vec<DatasetFigures> {
        let mut all = Vec::new();
        for policy in std::mem::take(&mut self.policies) {
            let is_late = |kind| !policy.is_fresh(kind, self.newest(&policy.dataset, kind), now);
            let is_fresh = policy
                .is_monitored()
                .then(|| !SnapshotType::ALL.into_iter().any(is_late));
            if self.unknown.contains_key(&policy.dataset) {
                continue;
            }
            let state = self.states.remove(&policy.dataset);
            let mut types = self.types.remove(&policy.dataset).unwrap_or_default();
            for kind in SnapshotType::ALL {
                if policy.count(kind) > 0 && policy.is_monitored() {
                    types.entry(kind).or_insert_with(|| TypeFigures::none_of(kind));
                }
            }
            all.push(DatasetFigures {
                dataset: policy.dataset,
                state,
                types: types.into_values().collect(),
                is_fresh,
            });
        }
        all
    }
}

impl TypeFigures {
    fn none_of(kind: SnapshotType) -> Self {
        Self {
            kind,
            count: 0,
            newest: None,
            used_bytes: 0,
        }
    }
}

fn figures(snapshots: impl Iterator<Item = (TypedSnapshot, u64)>) -> BTreeMap<SnapshotType, TypeFigures> {
    let mut types = BTreeMap::new();
    for (snapshot, used_bytes) in snapshots {
        let figures = types
            .entry(snapshot.kind)
            .or_insert_with(|| TypeFigures::none_of(snapshot.kind));
        figures.count += 1;
        figures.newest = figures.newest.max(Some(snapshot.time));
        figures.used_bytes = figures.used_bytes.saturating_add(used_bytes);
    }
    types
}

#[cfg(test)]
mod tests;
