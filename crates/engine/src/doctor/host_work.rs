//! Finds leftovers of processes that were killed while they worked on host snapshots. Only examines, and changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use holdfast_host::provider::{
    Dataset, HostSnapshotName, ProviderError, ProviderKind, ProviderLeftover, SNAPSHOT_FOLDER, TemporaryClone,
    TemporaryCloneKind,
};
use holdfast_host::{Description, DiskChoice, ToolError};
use holdfast_repo::{Liveness, ProcessIdentity};

use super::DoctorRequest;
use super::leftovers::{AGE_MIN_MS, changed_ms};
use super::seen::{IncompleteSet, SeenClone, SeenHost, SeenWork};
use crate::files::atomic_file::left_of;
use crate::host_snapshot::record::SetId;
use crate::host_snapshot::states::{KeptState, StateStore, Unfinished, UnfinishedKind, sweep_states};
use crate::host_snapshot::{HostSnapshotRecord, Providers, SetCompleteness, places_of};
use crate::job::{Job, Result};
use crate::machine::run_journal::{liveness_of, read_process};
use crate::repository::forget::Execution;

/// Where to look for host snapshots.
pub struct DoctorStorage<'a> {
    /// The providers of this host.
    pub providers: &'a Providers,
    /// Datasets that were named by the user or by configurations; those with disks of the machines are always examined.
    pub datasets: Vec<Dataset>,
    /// The store for states of machines; none if it does not exist yet.
    pub states: Option<&'a StateStore>,
}

/// Examines the datasets with disks of `descriptions`, and the named ones.
pub(super) fn look(request: &DoctorRequest<'_>, descriptions: &[Description], job: Job<'_>) -> Result<SeenHost> {
    let Some(storage) = &request.storage else {
        return Ok(SeenHost::default());
    };
    let mut seen = SeenHost::default();
    let now_ms = (request.now_ms)();
    let states = match storage.states {
        Some(store) => store.states(job)?,
        None => Vec::new(),
    };
    let users = users(request, descriptions);
    let datasets = datasets(request, storage, &users, &states);
    let mut unfinished = BTreeMap::new();
    let mut completeness = SetCompleteness::new(storage.providers);
    for dataset in &datasets {
        job.interrupt.check()?;
        let looked = look_at(request, storage, dataset, &mut completeness, &mut unfinished);
        match looked {
            Ok(remains) => seen.remains.extend(remains),
            Err(error) if is_gone(&error) => {}
            Err(error) => seen.unknown.push(format!("{dataset} cannot be examined: {error}")),
        }
        if dataset.provider.has_folders() {
            seen.folders.push(Path::new(&dataset.name).join(SNAPSHOT_FOLDER));
        }
    }
    seen.cuts = unfinished.into_values().collect();
    for pool in pools(&datasets) {
        match clones(request, storage, pool, &users) {
            Ok(clones) => seen.clones.extend(clones),
            Err(error) if is_gone(&error) => {}
            Err(error) => seen
                .unknown
                .push(format!("clones in the pool {pool} cannot be examined: {error}")),
        }
    }
    if let Some(store) = storage.states {
        seen.works = works(request, store, descriptions)?;
        let halves = store.half_notes().into_iter();
        let halves = halves.map(|path| (changed_ms(&path), path));
        let is_old = |changed: &Option<i64>| changed.is_some_and(|changed| now_ms - changed > AGE_MIN_MS);
        let left = halves.filter(|(changed, _)| is_old(changed));
        seen.half_notes = left.map(|(changed, path)| (path, changed)).collect();
        if request.everything && !states.is_empty() {
            look_at_states(storage, store, &mut seen, job)?;
        }
    }
    Ok(seen)
}

/// Whether the error only says that the dataset does not exist.
fn is_gone(error: &ProviderError) -> bool {
    matches!(
        error,
        ProviderError::NotFound { .. }
            | ProviderError::NoService { .. }
            | ProviderError::Tool(ToolError::NotFound { .. })
    )
}

/// For each dataset, the machines with disks in it.
fn users(request: &DoctorRequest<'_>, descriptions: &[Description]) -> BTreeMap<Dataset, String> {
    let mut users = BTreeMap::new();
    for description in descriptions {
        let places = places_of(description, &DiskChoice::default(), (request.new_run)());
        for (_, place) in places.disks {
            users.insert(place.dataset, description.summary.name.clone());
        }
    }
    users
}

fn datasets(
    request: &DoctorRequest<'_>,
    storage: &DoctorStorage<'_>,
    users: &BTreeMap<Dataset, String>,
    states: &[KeptState],
) -> BTreeSet<Dataset> {
    let mut datasets: BTreeSet<Dataset> = storage.datasets.iter().chain(users.keys()).cloned().collect();
    if request.everything {
        let snapshots = states.iter().flat_map(|state| &state.snapshots);
        datasets.extend(snapshots.map(|name| name.dataset.clone()));
        let disks = states.iter().flat_map(|state| &state.disks);
        datasets.extend(disks.map(|disk| disk.place.dataset.clone()));
    }
    // A folder that is a subvolume is examined as a subvolume.
    let is_twice = |dataset: &Dataset| {
        dataset.provider == ProviderKind::Reflink
            && storage.providers.of(ProviderKind::Btrfs).noted(&dataset.name).is_ok()
    };
    let twice: Vec<Dataset> = datasets.iter().filter(|dataset| is_twice(dataset)).cloned().collect();
    for dataset in twice {
        datasets.remove(&dataset);
        datasets.insert(Dataset {
            provider: ProviderKind::Btrfs,
            ..dataset
        });
    }
    datasets
}

/// Key of a group: the set, or the dataset if no record exists; and the name.
type SnapshotSets = BTreeMap<(std::result::Result<SetId, Dataset>, String), IncompleteSet>;

fn look_at(
    request: &DoctorRequest<'_>,
    storage: &DoctorStorage<'_>,
    dataset: &Dataset,
    completeness: &mut SetCompleteness<'_>,
    cuts: &mut SnapshotSets,
) -> std::result::Result<Vec<ProviderLeftover>, ProviderError> {
    let provider = storage.providers.of_dataset(dataset);
    // Running processes are listed first: host snapshots that one of them has made by then are not leftovers.
    let is_making = provider.is_making(&dataset.name);
    for noted in provider.noted(&dataset.name)? {
        if completeness.of(&noted.name, noted.record.as_deref()) != Some(false) {
            continue;
        }
        let record = noted.record.as_deref().and_then(HostSnapshotRecord::parse);
        let is_alive = match &record {
            Some(record) => life_of(request, record.maker.as_ref()) != Liveness::Dead,
            None => is_making,
        };
        if is_alive {
            continue;
        }
        let set = record.as_ref().and_then(|record| record.set);
        let of_dead = record
            .as_ref()
            .and_then(|record| cut_by_dead(request, &noted.name, record));
        let key = (set.ok_or_else(|| dataset.clone()), noted.name.name.clone());
        let cut = cuts.entry(key).or_insert_with(|| IncompleteSet {
            there: Vec::new(),
            missing: record
                .as_ref()
                .map(|record| completeness.missing(&noted.name, record))
                .unwrap_or_default(),
            since_ms: record.as_ref().map(|record| record.time.as_millisecond()),
            of_dead,
        });
        cut.of_dead = cut.of_dead.filter(|set| Some(*set) == of_dead);
        cut.there.push(noted.name);
    }
    provider.leftovers(&dataset.name)
}

/// The set of an incomplete host snapshot, if its record says that a dead process of this host made it, of this
/// dataset. A copy that was received elsewhere has the record of its original, and belongs to the replication.
pub(super) fn cut_by_dead(
    request: &DoctorRequest<'_>,
    name: &HostSnapshotName,
    record: &HostSnapshotRecord,
) -> Option<SetId> {
    let was_cut_here = record.datasets.contains(&name.dataset.to_string());
    let is_dead = life_of(request, record.maker.as_ref()) == Liveness::Dead;
    record.set.filter(|_| was_cut_here && is_dead && !record.is_whole)
}

/// Whether the process is alive; unknown if the record names none.
fn life_of(request: &DoctorRequest<'_>, process: Option<&ProcessIdentity>) -> Liveness {
    process.map_or(Liveness::Unknown, |process| liveness_of(process, request.processes))
}

/// The ZFS pools of the datasets.
fn pools(datasets: &BTreeSet<Dataset>) -> BTreeSet<&str> {
    let zfs = datasets.iter().filter(|dataset| dataset.provider == ProviderKind::Zfs);
    zfs.filter_map(|dataset| dataset.name.split('/').next()).collect()
}

fn clones(
    request: &DoctorRequest<'_>,
    storage: &DoctorStorage<'_>,
    pool: &str,
    users: &BTreeMap<Dataset, String>,
) -> std::result::Result<Vec<SeenClone>, ProviderError> {
    let seen = |clone: TemporaryClone| {
        let maker = serde_json::from_str(&clone.maker).ok();
        let maker = maker.as_ref().and_then(read_process);
        let dataset = Dataset {
            provider: ProviderKind::Zfs,
            name: clone.name.clone(),
        };
        SeenClone {
            life: life_of(request, maker.as_ref()),
            user: users.get(&dataset).cloned(),
            clone,
        }
    };
    let clones = storage.providers.zfs().temporary_clones(pool)?;
    Ok(clones.into_iter().map(seen).collect())
}

fn works(request: &DoctorRequest<'_>, store: &StateStore, descriptions: &[Description]) -> Result<Vec<SeenWork>> {
    let mut works = Vec::new();
    for work in store.unfinished()? {
        let is_described = descriptions
            .iter()
            .any(|description| description.summary.uuid.eq_ignore_ascii_case(&work.uuid));
        let is_defined = match request.neighbours {
            _ if is_described => Some(true),
            Some(hypervisor) => match hypervisor.machine(&work.uuid) {
                Ok(_) => Some(true),
                Err(holdfast_host::Error::NoSuchMachine { .. }) => Some(false),
                Err(_) => None,
            },
            None => None,
        };
        let is_of_described = || {
            let mut all = descriptions.iter();
            work.kind == UnfinishedKind::Instant && all.any(|description| description.summary.name == work.of)
        };
        if request.everything || is_described || is_of_described() {
            works.push(SeenWork {
                life: life_of(request, Some(&work.process)),
                files: match work.kind {
                    UnfinishedKind::Clone => left_files(&work),
                    UnfinishedKind::Rollback | UnfinishedKind::Instant => Vec::new(),
                },
                is_defined,
                work,
            });
        }
    }
    Ok(works)
}

/// The existing files of an unfinished clone: temporary files, and files with final names whose identity matches the note.
pub(super) fn left_files(work: &Unfinished) -> Vec<PathBuf> {
    use std::os::unix::fs::MetadataExt as _;
    let mut left = Vec::new();
    for file in &work.files {
        left.extend(left_of(&file.path));
        let found = file.path.symlink_metadata().ok().filter(std::fs::Metadata::is_file);
        let identity = found.map(|found| (found.dev(), found.ino()));
        if identity.is_some() && identity == file.identity {
            left.push(file.path.clone());
        }
    }
    left
}

fn look_at_states(storage: &DoctorStorage<'_>, store: &StateStore, seen: &mut SeenHost, job: Job<'_>) -> Result<()> {
    let swept = sweep_states(store, storage.providers, Execution::DryRun, job)?;
    let forgotten = swept.forgotten.into_iter();
    seen.states = forgotten.map(|state| state.manifest.machine).collect();
    if let Some((_, reason)) = swept.unknown.first() {
        seen.unknown.push(format!(
            "cannot determine whether the host snapshots of {} machine states exist: {reason}",
            swept.unknown.len()
        ));
    }
    Ok(())
}

impl SeenClone {
    /// The machine that the clone was made for, if any.
    pub(super) fn machine(&self) -> Option<&str> {
        match &self.clone.kind {
            TemporaryCloneKind::View => None,
            TemporaryCloneKind::Machine(machine) => Some(machine),
        }
    }
}
