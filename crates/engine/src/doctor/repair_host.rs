//! Repairs leftovers of processes that were killed while they worked on host snapshots.

use std::path::Path;

use holdfast_host::provider::{HostSnapshotName, Provider as _, ProviderLeftover, TemporaryClone, TemporaryCloneKind};

use super::DoctorRequest;
use super::chains::{is_used, used_images};
use super::host_work::{DoctorStorage, cut_by_dead, left_files};
use crate::files::atomic_file::delete_left;
use crate::host_snapshot::record::SetId;
use crate::host_snapshot::rollback::remove_unless_needed;
use crate::host_snapshot::states::{StateStore, sweep_states};
use crate::host_snapshot::{HostSnapshotRecord, SetCompleteness};
use crate::job::Job;
use crate::repository::forget::Execution;

type RepairResult = Result<String, String>;

fn storage<'r, 'a>(request: &'r DoctorRequest<'a>) -> Result<&'r DoctorStorage<'a>, String> {
    request
        .storage
        .as_ref()
        .ok_or_else(|| "no storage is examined".to_owned())
}

fn states<'a>(request: &DoctorRequest<'a>) -> Result<&'a StateStore, String> {
    let states = storage(request)?.states;
    states.ok_or_else(|| "there is no store of states".to_owned())
}

pub(super) fn clear_remain(request: &DoctorRequest<'_>, remain: &ProviderLeftover) -> RepairResult {
    let provider = storage(request)?.providers.of_dataset(&remain.dataset);
    provider.remove_leftover(remain).map_err(|error| error.to_string())?;
    Ok(format!("deleted {}", remain.place.display()))
}

pub(super) fn forget_states(request: &DoctorRequest<'_>, job: Job<'_>) -> RepairResult {
    let swept = sweep_states(states(request)?, storage(request)?.providers, Execution::Execute, job);
    let swept = swept.map_err(|error| error.to_string())?;
    if swept.was_busy {
        return Err("states are being stored now".to_owned());
    }
    Ok(format!("forgot {} states", swept.forgotten.len()))
}

pub(super) fn forget_work(request: &DoctorRequest<'_>, uuid: &str) -> RepairResult {
    let forgotten = states(request)?.forget_unfinished(uuid);
    forgotten.map_err(|error| error.to_string())?;
    Ok("removed its note".to_owned())
}

/// Destroys a leftover clone. For a clone that was made for a machine, first checks again that no machine uses it.
pub(super) fn destroy_clone(request: &DoctorRequest<'_>, clone: &TemporaryClone) -> RepairResult {
    let zfs = storage(request)?.providers.zfs();
    if let TemporaryCloneKind::Machine(_) = clone.kind {
        let state = zfs.dataset(&clone.name).map_err(|error| error.to_string())?;
        let device = Path::new("/dev/zvol").join(&clone.name);
        let is_in = |image: &Path| {
            let is_below = state.folder.as_ref().is_some_and(|folder| image.starts_with(folder));
            is_below || image == device
        };
        if used_images(request)?.iter().any(|image| is_in(image)) {
            return Err("a machine has disks in it".to_owned());
        }
    }
    zfs.destroy_temporary(clone).map_err(|error| error.to_string())?;
    Ok(format!("destroyed {}", clone.name))
}

pub(super) fn finish_clone(request: &DoctorRequest<'_>, clone: &TemporaryClone) -> RepairResult {
    let finished = storage(request)?.providers.zfs().finish_clone(&clone.name);
    finished.map_err(|error| error.to_string())?;
    Ok(format!("{} is a dataset like any other now", clone.name))
}

/// Deletes the files of a clone whose machine does not exist, unless another machine uses them.
pub(super) fn remove_half_clone(request: &DoctorRequest<'_>, uuid: &str) -> RepairResult {
    let states = states(request)?;
    let used = used_images(request)?;
    let work = states.unfinished_on(uuid).map_err(|error| error.to_string())?;
    let work = work.ok_or("another process has handled it")?;
    let (mut deleted, mut kept) = (Vec::new(), Vec::new());
    for file in left_files(&work) {
        let is_whole = work.files.iter().any(|made| made.path == file);
        let shown = file.display().to_string();
        if is_whole && is_used(&used, &file) {
            kept.push(shown);
            continue;
        }
        let removed = if is_whole {
            std::fs::remove_file(&file)
        } else {
            delete_left(&file)
        };
        removed.map_err(|error| format!("{shown}: {error}"))?;
        deleted.push(shown);
    }
    states.forget_unfinished(uuid).map_err(|error| error.to_string())?;
    let deleted = match &deleted[..] {
        [] => "there was nothing to delete".to_owned(),
        deleted => format!("deleted {}", deleted.join(", ")),
    };
    Ok(match &kept[..] {
        [] => deleted,
        kept => format!("{deleted}; a machine has {}, which stays", kept.join(", ")),
    })
}

/// Removes unfinished host snapshots and their states. All are examined again before the first is removed.
pub(super) fn remove_cut(
    request: &DoctorRequest<'_>,
    names: &[HostSnapshotName],
    set: SetId,
    job: Job<'_>,
) -> RepairResult {
    let storage = storage(request)?;
    let mut completeness = SetCompleteness::new(storage.providers);
    let mut found = Vec::new();
    for name in names {
        let provider = storage.providers.of_dataset(&name.dataset);
        let present = provider.snapshots(&name.dataset.name);
        let present = present.map_err(|error| error.to_string())?;
        let Some(snapshot) = present.into_iter().find(|one| one.name == *name) else {
            continue;
        };
        let record = snapshot.record.as_deref().and_then(HostSnapshotRecord::parse);
        let is_it = record.is_some_and(|record| cut_by_dead(request, name, &record) == Some(set));
        if !is_it || completeness.of(name, snapshot.record.as_deref()) != Some(false) {
            return Err(format!("{name} was replaced meanwhile"));
        }
        found.push((provider, snapshot));
    }
    for (provider, snapshot) in found {
        provider.destroy_this(&snapshot).map_err(|error| error.to_string())?;
    }
    if let Some(states) = storage.states {
        let swept = sweep_states(states, storage.providers, Execution::Execute, job);
        swept.map_err(|error| error.to_string())?;
    }
    Ok(if names.len() == 1 { "removed it" } else { "removed them" }.to_owned())
}

/// Removes temporary host snapshots for clones, unless a clone needs them.
pub(super) fn remove_instant(request: &DoctorRequest<'_>, set: &str, job: Job<'_>) -> RepairResult {
    let (storage, states) = (storage(request)?, states(request)?);
    let work = states.unfinished_on(set).map_err(|error| error.to_string())?;
    let work = work.ok_or("another process has handled it")?;
    let mut kept = Vec::new();
    for name in work.safety.iter().filter_map(|text| HostSnapshotName::parse(text)) {
        let removed = remove_unless_needed(storage.providers, &name).map_err(|error| error.to_string())?;
        kept.extend(removed.map(|clones| format!("{name}, from which {} came", clones.join(", "))));
    }
    states.forget_unfinished(set).map_err(|error| error.to_string())?;
    // The state of its machine is no longer needed either.
    let swept = sweep_states(states, storage.providers, Execution::Execute, job);
    swept.map_err(|error| error.to_string())?;
    Ok(match &kept[..] {
        [] => "removed them".to_owned(),
        kept => format!("removed what no clone needs; there stays {}", kept.join(", ")),
    })
}

pub(super) fn delete_file(path: &Path) -> RepairResult {
    std::fs::remove_file(path)
        .map(|()| format!("deleted {}", path.display()))
        .map_err(|error| format!("{}: {error}", path.display()))
}
