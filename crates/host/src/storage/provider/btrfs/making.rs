//! Snapshots of btrfs between their preparation and their names.
//!
//! A snapshot is cut under a hidden name, and gets its own with its record. So one without a record was never finished by its maker, and one
//! that a killed process left is known by its hidden name.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::{MutexGuard, PoisonError};

use super::super::folder::{SnapshotFolder, sync_folder};
use super::super::{HostSnapshotLabel, HostSnapshotName, HostSnapshotScope, ProviderError, ProviderResult};
use super::Btrfs;

/// A snapshot that is being made.
pub(super) struct PendingSnapshot {
    /// The lock of its dataset: while it is held, the hidden snapshots there are not leftovers.
    _lock: File,
    /// Whether it was cut: then it exists under its hidden name.
    is_created: bool,
}

impl Btrfs {
    fn making(&self) -> MutexGuard<'_, BTreeMap<(String, String), PendingSnapshot>> {
        self.making.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prepares a snapshot of `dataset` with this name.
    pub(super) fn begin(
        &self,
        kept: &SnapshotFolder,
        (dataset, name): (&str, &str),
        shown: &str,
    ) -> ProviderResult<()> {
        self.clear_hidden(kept, name, shown)?;
        let making = PendingSnapshot {
            _lock: kept.lock_making()?,
            is_created: false,
        };
        self.making().insert((dataset.to_owned(), name.to_owned()), making);
        Ok(())
    }

    /// Deletes what a killed process left under the hidden name of a snapshot. While the lock of those who make snapshots is held, it may belong to
    /// a live process.
    fn clear_hidden(&self, kept: &SnapshotFolder, name: &str, shown: &str) -> ProviderResult<()> {
        let _lock = kept.lock()?;
        let hidden = kept.hidden_place(name);
        if hidden.symlink_metadata().is_err() {
            return Ok(());
        }
        if kept.is_making() {
            return Err(ProviderError::Exists {
                what: format!("{shown}, which another process is making,"),
            });
        }
        self.delete(("remove what was left of", shown), &hidden)
    }

    /// Notes that a prepared snapshot exists under its hidden name.
    pub(super) fn note_created(&self, dataset: &str, name: &str) {
        if let Some(making) = self.making().get_mut(&(dataset.to_owned(), name.to_owned())) {
            making.is_created = true;
        }
    }

    /// Gives a snapshot that was cut its name, or one that has its name another record; durably.
    pub(super) fn commit_one(&self, one: &HostSnapshotScope, label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        let kept = Self::folder(&one.dataset.name)?;
        let of = (one.dataset.name.clone(), label.name.to_owned());
        let name = HostSnapshotName {
            dataset: one.dataset.clone(),
            name: label.name.to_owned(),
        };
        let has_no_name = self.making().contains_key(&of);
        if has_no_name {
            let hidden = format!(".{}", label.name);
            kept.adopt((&hidden, label.name), &name.to_string(), Some(label))?;
            // From here on it is not taken back as one that has no name.
            self.making().remove(&of);
        } else {
            kept.must_be_there(&name)?;
            kept.note(label)?;
        }
        // A snapshot is in the next commit of the file system; this waits for that.
        sync_folder(&kept.place(label.name))?;
        sync_folder(&kept.place(""))
    }

    /// Takes back what was prepared or cut, and has no name yet. Says whether there was such a snapshot.
    pub(super) fn give_up(&self, dataset: &str, name: &str) -> ProviderResult<bool> {
        let Some(making) = self.making().remove(&(dataset.to_owned(), name.to_owned())) else {
            return Ok(false);
        };
        if making.is_created {
            let kept = Self::folder(dataset)?;
            self.delete(("remove", &format!("{dataset}@{name}")), &kept.hidden_place(name))?;
        }
        Ok(true)
    }
}
