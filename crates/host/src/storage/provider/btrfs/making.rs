//! Snapshots of btrfs between their preparation and their final names.
//!
//! A snapshot is created under a hidden name, and gets its final name together with its record. So a snapshot without
//! a record is incomplete, and the leftover of a killed process has a hidden name.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::{MutexGuard, PoisonError};

use super::super::folder::{SnapshotFolder, sync_folder};
use super::super::{HostSnapshotLabel, HostSnapshotName, HostSnapshotScope, ProviderError, ProviderResult};
use super::Btrfs;

/// A snapshot that is being created.
pub(super) struct PendingSnapshot {
    /// The lock of the dataset. While it is held, hidden snapshots of the dataset are not leftovers.
    _lock: File,
    /// Whether the snapshot was created and exists under its hidden name.
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
    /// lock, the hidden snapshot may belong to that process.
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

    /// Renames a created snapshot to its final name, or gives an existing snapshot another record. The change is
    /// durable.
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
            // From here on the snapshot has its final name, and is not reverted.
            self.making().remove(&of);
        } else {
            snapshot_folder.check_exists(&name)?;
            snapshot_folder.note(label)?;
        }
        // A snapshot becomes durable with the next commit of the file system. This call waits for the commit.
        sync_folder(&snapshot_folder.place(label.name))?;
        sync_folder(&snapshot_folder.place(""))
    }

    /// Removes a pending snapshot that has no final name yet, and returns whether there was one.
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
