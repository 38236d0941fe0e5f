//! Leftovers of killed processes in a dataset whose host snapshots are in its `.holdfast` folder.
//!
//! Locks (flock) show which processes are active, since the kernel releases a lock when its process ends. A process
//! that creates a folder of clones locks it. A process that creates a btrfs snapshot locks `making`, one that
//! receives locks `receiving`, and one that writes notes, holds or removes locks `lock`. Everything without a lock is
//! a leftover.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

use super::folder::{LockAttempt, SnapshotFolder, check_name, file_error};
use super::{Dataset, ProviderError, ProviderResult};

/// A leftover of a killed process in a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderLeftover {
    /// The dataset.
    pub dataset: Dataset,
    /// The kind of the leftover.
    pub kind: ProviderLeftoverKind,
    /// The name of the host snapshot.
    pub name: String,
    /// The path.
    pub place: std::path::PathBuf,
    /// The last modification, in seconds since 1970-01-01 UTC.
    pub since_s: Option<i64>,
}

/// The kind of a leftover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProviderLeftoverKind {
    /// The folder of a snapshot that was being created or removed.
    HalfSnapshot,
    /// An incomplete note.
    HalfNote,
    /// The note of a missing snapshot.
    Note,
    /// Holds of a missing snapshot.
    Holds,
    /// A partially received snapshot.
    HalfReceived,
}

impl ProviderLeftoverKind {
    /// A description of the kind, for messages.
    pub const fn description(self) -> &'static str {
        match self {
            Self::HalfSnapshot => "an incomplete host snapshot of a process that was killed",
            Self::HalfNote => "an incomplete note about a host snapshot, of a process that was killed",
            Self::Note => "a note about a missing host snapshot",
            Self::Holds => "a hold of a missing host snapshot",
            Self::HalfReceived => "a partially received host snapshot",
        }
    }
}

/// The leftovers in the folder of a dataset. Empty while another process works on its snapshots.
pub(super) fn leftovers(dataset: &Dataset) -> ProviderResult<Vec<ProviderLeftover>> {
    let snapshot_folder = SnapshotFolder::of(Path::new(&dataset.name))?;
    match snapshot_folder.try_lock()? {
        LockAttempt::Busy => Ok(Vec::new()),
        LockAttempt::Acquired(_lock) => find(&snapshot_folder, dataset),
    }
}

/// Finds the leftovers while the lock is held.
fn find(snapshot_folder: &SnapshotFolder, dataset: &Dataset) -> ProviderResult<Vec<ProviderLeftover>> {
    let mut found = Vec::new();
    let mut add = |kind, name: &str, (place, shown): (&Path, std::path::PathBuf)| {
        found.push(ProviderLeftover {
            dataset: dataset.clone(),
            kind,
            name: name.to_owned(),
            since_s: place.symlink_metadata().ok().map(|metadata| metadata.mtime()),
            place: shown,
        });
    };
    for hidden in snapshot_folder.all_names("snapshots")? {
        let Some(name) = hidden.strip_prefix('.').filter(|name| check_name(name).is_ok()) else {
            continue;
        };
        let place = snapshot_folder.hidden_place(name);
        // A btrfs snapshot cannot be locked before it exists, so its creator locks `making`.
        if !is_locked(&place) && !snapshot_folder.is_making() {
            add(
                ProviderLeftoverKind::HalfSnapshot,
                name,
                (&place, snapshot_folder.shown_place(&hidden)),
            );
        }
    }
    let exists = |name: &str| {
        let is_one = |place: &Path| place.symlink_metadata().is_ok();
        // The note is written before the snapshot gets its name.
        is_one(&snapshot_folder.place(name))
            || is_one(&snapshot_folder.hidden_place(name)) && is_locked(&snapshot_folder.hidden_place(name))
    };
    for file in snapshot_folder.all_names("records")? {
        let place = snapshot_folder.in_ours("records").join(&file);
        let shown = snapshot_folder.shown("records").join(&file);
        let half = file.strip_prefix('.').and_then(|rest| rest.strip_suffix(".new"));
        let whole = file.strip_suffix(".json").filter(|name| check_name(name).is_ok());
        match (half, whole) {
            (Some(name), _) => add(ProviderLeftoverKind::HalfNote, name, (&place, shown)),
            (None, Some(name)) if !exists(name) => add(ProviderLeftoverKind::Note, name, (&place, shown)),
            _ => {}
        }
    }
    for name in snapshot_folder.all_names("holds")? {
        let place = snapshot_folder.in_ours("holds").join(&name);
        if check_name(&name).is_ok() && !exists(&name) {
            add(
                ProviderLeftoverKind::Holds,
                &name,
                (&place, snapshot_folder.shown("holds").join(&name)),
            );
        }
    }
    Ok(found)
}

/// Removes a leftover; `remove` removes the folder of a snapshot.
pub(super) fn remove(
    leftover: &ProviderLeftover,
    remove: impl FnOnce(&Path) -> ProviderResult<()>,
) -> ProviderResult<()> {
    let snapshot_folder = SnapshotFolder::of(Path::new(&leftover.dataset.name))?;
    let changed = || ProviderError::Held {
        what: leftover.place.display().to_string(),
        reason: "another process uses it, or has used it since it was found".to_owned(),
    };
    let turn = snapshot_folder.try_lock()?;
    if matches!(turn, LockAttempt::Busy) {
        return Err(changed());
    }
    let is_same = |other: &ProviderLeftover| other.kind == leftover.kind && other.place == leftover.place;
    if !find(&snapshot_folder, &leftover.dataset)?.iter().any(is_same) {
        return Err(changed());
    }
    let failed = |source| file_error("remove", &leftover.place, source);
    let file_name = leftover.place.file_name().unwrap_or_default();
    match leftover.kind {
        ProviderLeftoverKind::HalfSnapshot => remove(&snapshot_folder.hidden_place(&leftover.name)),
        ProviderLeftoverKind::HalfNote | ProviderLeftoverKind::Note => {
            std::fs::remove_file(snapshot_folder.in_ours("records").join(file_name)).map_err(failed)
        }
        ProviderLeftoverKind::Holds => {
            std::fs::remove_dir_all(snapshot_folder.in_ours("holds").join(file_name)).map_err(failed)
        }
        ProviderLeftoverKind::HalfReceived => Err(changed()),
    }
}

/// Whether a process has locked a folder. A folder that cannot be opened counts as locked.
fn is_locked(place: &Path) -> bool {
    let Ok(open) = std::fs::File::open(place) else {
        return true;
    };
    flock(&open, FlockOperation::NonBlockingLockExclusive).is_err()
}
