//! Snapshots of btrfs between their preparation and their names.
//!
//! A snapshot is created under a hidden name, and gets its own with its record. So one without a record is incomplete,
//! and the leftover of a killed process has a hidden name.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::{MutexGuard, PoisonError};

use super::super::folder::{SnapshotFolder, sync_folder};
use super::super::{HostSnapshotLabel, HostSnapshotName, HostSnapshotScope, ProviderError, ProviderResult};
use super::Btrfs;

/// A snapshot that is being created.
pub(super) struct PendingSnapshot {
    /// The lock of its dataset: while it is held, the hidden snapshots there are not leftovers.
    _lock: File,
    /// Whether it was created: it then exists under its hidden name.
    is_created: bool,
}

impl Btrfs {
    fn making(&self) -> MutexGuard<'_, BTreeMap<(String, String), PendingSnapshot>> {
        self.making.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prepares a snapshot of `dataset` with this name.
    pub(super) fn begin(
        &self,
        snapshot_folder: &SnapshotFolder,
        dataset: &str,
        name: &str,
        shown: &str,
    ) -> ProviderResult<()> {
        self.clear_hidden(snapshot_folder, name, shown)?;
        let making = PendingSnapshot {
            _lock: snapshot_folder.lock_making()?,
            is_created: false,
        };
        self.making().insert((dataset.to_owned(), name.to_owned()), making);
        Ok(())
    }

    /// Deletes the leftover of a killed process under the hidden name of a snapshot. While another process holds the
    /// lock, it may belong to that process.
    fn clear_hidden(&self, snapshot_folder: &SnapshotFolder, name: &str, shown: &str) -> ProviderResult<()> {
        let _lock = snapshot_folder.lock()?;
        let hidden = snapshot_folder.hidden_place(name);
        if hidden.symlink_metadata().is_err() {
            return Ok(());
        }
        if snapshot_folder.is_making() {
            return Err(ProviderError::Exists {
                what: format!("{shown}, which another process is creating,"),
            });
        }
        self.delete("remove the leftover of", shown, &hidden)
    }

    /// Records that a prepared snapshot exists under its hidden name.
    pub(super) fn note_created(&self, dataset: &str, name: &str) {
        if let Some(making) = self.making().get_mut(&(dataset.to_owned(), name.to_owned())) {
            making.is_created = true;
        }
    }

    /// Renames a created snapshot to its own name, or gives an existing one another record; durably.
    pub(super) fn commit_one(&self, one: &HostSnapshotScope, label: &HostSnapshotLabel<'_>) -> ProviderResult<()> {
        let snapshot_folder = Self::folder(&one.dataset.name)?;
        let of = (one.dataset.name.clone(), label.name.to_owned());
        let name = HostSnapshotName {
            dataset: one.dataset.clone(),
            name: label.name.to_owned(),
        };
        let has_no_name = self.making().contains_key(&of);
        if has_no_name {
            let hidden = format!(".{}", label.name);
            snapshot_folder.adopt(&hidden, label.name, &name.to_string(), Some(label))?;
            // From here on it has its name, and is not reverted.
            self.making().remove(&of);
        } else {
            snapshot_folder.check_exists(&name)?;
            snapshot_folder.note(label)?;
        }
        // A snapshot becomes durable with the next commit of the file system; this waits for it.
        sync_folder(&snapshot_folder.place(label.name))?;
        sync_folder(&snapshot_folder.place(""))
    }

    /// Removes a pending snapshot that has no name yet, and returns whether there was one.
    pub(super) fn revert_pending(&self, dataset: &str, name: &str) -> ProviderResult<bool> {
        let Some(making) = self.making().remove(&(dataset.to_owned(), name.to_owned())) else {
            return Ok(false);
        };
        if making.is_created {
            let snapshot_folder = Self::folder(dataset)?;
            self.delete(
                "remove",
                &format!("{dataset}@{name}"),
                &snapshot_folder.hidden_place(name),
            )?;
        }
        Ok(true)
    }
}
