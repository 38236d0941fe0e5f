//! An opened repository.

pub(crate) mod accepted_losses;
pub(crate) mod chunk_index;
pub(crate) mod damage_records;
pub(crate) mod init;
pub(crate) mod packs;
pub(crate) mod pending_deletes;
pub(crate) mod relocations;

use std::collections::HashSet;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::manifest::{MANIFEST_BYTES_MAX, Manifest, SnapshotObject, decode_snapshot, snapshot_name};
use crate::id::SnapshotId;
use crate::repository::packs::Packs;
use crate::store::{ObjectKind, Store, StoreError};
use crate::vault::Vault;

/// An open repository.
pub struct Repository {
    pub(crate) vault: Vault,
    pub(crate) packs: Arc<Packs>,
}

impl Repository {
    pub(crate) fn with_vault(vault: Vault) -> Result<Self> {
        let packs = Arc::new(Packs::new(
            Arc::clone(&vault.store),
            vault.cipher,
            vault.keyring.clone(),
        ));
        let repository = Self { vault, packs };
        repository.refresh()?;
        Ok(repository)
    }

    /// Loads changes that other processes made since the repository was opened.
    pub(crate) fn refresh(&self) -> Result<()> {
        self.packs.refresh().map(|_| ())
    }

    /// The time of this host's clock, in milliseconds since 1970-01-01 UTC.
    pub fn now_ms(&self) -> i64 {
        (self.vault.environment.now_ms)()
    }

    /// The description of the store.
    pub fn describe(&self) -> String {
        self.vault.store.describe()
    }

    /// The manifest of a snapshot.
    pub fn snapshot(&self, id: SnapshotId) -> Result<Manifest> {
        match self.read_snapshot(id)? {
            Some(manifest) => Ok(manifest),
            None => Err(Error::NoSnapshot { id }),
        }
    }

    fn read_snapshot(&self, id: SnapshotId) -> Result<Option<Manifest>> {
        let name = snapshot_name(id);
        let bytes = match self.vault.get_sealed(&name, MANIFEST_BYTES_MAX) {
            Err(Error::Store(StoreError::NotFound { .. })) => return Ok(None),
            other => other?,
        };
        match decode_snapshot(&bytes, id)? {
            SnapshotObject::Committed(manifest) => Ok(Some(*manifest)),
            SnapshotObject::Revoked => Ok(None),
        }
    }

    /// The ids of stored snapshots, and of snapshots with a record of removal. No object is read.
    pub fn snapshot_ids(&self) -> Result<(HashSet<SnapshotId>, HashSet<SnapshotId>)> {
        // The record of a removal is put before the snapshot is deleted.
        let there = self.vault.identities(ObjectKind::Snapshot)?.into_iter().collect();
        let removed = self.vault.identities(ObjectKind::Forgotten)?.into_iter().collect();
        Ok((there, removed))
    }

    /// Removes snapshots from `manifests` that were deleted after they were read, and returns their ids. Gc may have
    /// deleted their packs, so their missing data is not a loss.
    pub(crate) fn exclude_removed(&self, manifests: &mut Vec<Manifest>) -> Result<Vec<SnapshotId>> {
        // The order matters: a record is put before its snapshot is deleted.
        let present: HashSet<SnapshotId> = self.vault.identities(ObjectKind::Snapshot)?.into_iter().collect();
        let records: HashSet<SnapshotId> = self.vault.identities(ObjectKind::Forgotten)?.into_iter().collect();
        let (mut kept, mut removed) = (Vec::new(), Vec::new());
        for manifest in manifests.drain(..) {
            let is_removed = records.contains(&manifest.id)
                || !present.contains(&manifest.id) && self.has_expired_record(&manifest)?;
            if is_removed {
                removed.push(manifest.id);
            } else {
                kept.push(manifest);
            }
        }
        *manifests = kept;
        Ok(removed)
    }

    /// Whether gc has deleted the removal record of this snapshot. The record is kept for a day, which a job may
    /// exceed, and as long as the pack with the manifest copy exists. A lost snapshot leaves that pack behind.
    fn has_expired_record(&self, manifest: &Manifest) -> Result<bool> {
        self.is_absent(manifest.copy)
    }

    /// All snapshots, oldest first; and the errors of those that cannot be read.
    pub fn snapshots(&self) -> Result<(Vec<Manifest>, Vec<Error>)> {
        self.snapshots_except(&HashSet::new())
    }

    /// The same without `known` snapshots, which are not read.
    pub fn snapshots_except(&self, known: &HashSet<SnapshotId>) -> Result<(Vec<Manifest>, Vec<Error>)> {
        let mut left_out: HashSet<SnapshotId> = self.vault.identities(ObjectKind::Forgotten)?.into_iter().collect();
        left_out.extend(known);
        self.stored_snapshots_except(&left_out)
    }

    /// Snapshots whose objects exist, including those that are being forgotten.
    pub(crate) fn stored_snapshots_except(
        &self,
        left_out: &HashSet<SnapshotId>,
    ) -> Result<(Vec<Manifest>, Vec<Error>)> {
        let (mut manifests, mut errors) = (Vec::new(), Vec::new());
        for id in self.vault.identities::<SnapshotId>(ObjectKind::Snapshot)? {
            if left_out.contains(&id) {
                continue;
            }
            match self.read_snapshot(id) {
                Ok(manifest) => manifests.extend(manifest),
                Err(error) if error.is_about_one_object() || error.is_unreadable() => errors.push(error),
                Err(error) => return Err(error),
            }
        }
        manifests.sort_by_key(|manifest| (manifest.time_ms, manifest.id));
        Ok((manifests, errors))
    }
}
