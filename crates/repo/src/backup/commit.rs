//! The commit of a backup, and the cleanup of one that failed.

use crate::check::scrub::exists;
use crate::error::{Error, Result};
use crate::format::manifest::{Manifest, snapshot_name};
use crate::format::pack::pack_name;
use crate::gc::dead_writers::UNFINISHED_REASON;
use crate::id::{PackId, SnapshotId};
use crate::repository::Repository;
use crate::store::{ObjectKind, Put};
use crate::writers::emergency_space::with_room;
use crate::writers::lease;
use crate::writers::lease::Lease;

impl Repository {
    /// Puts the snapshot's object; returns its length in bytes.
    pub(super) fn commit(&self, lease: &Lease<'_>, manifest: &Manifest) -> Result<u64> {
        // While this writer's announcement exists, gc keeps what the snapshot refers to; without it, gc may
        // have deleted that.
        let name = snapshot_name(manifest.id);
        if !lease.is_announced()? {
            return Err(revoked(lease));
        }
        let bytes = manifest.encode();
        let put = match self.vault.put_sealed(&name, &bytes) {
            // The object may exist in spite of the error; a second put settles it.
            Err(_) => self.vault.put_sealed(&name, &bytes)?,
            Ok(put) => put,
        };
        if put == Put::AlreadyExists && lease::is_revoked(&self.vault, &lease.record)? {
            return Err(revoked(lease));
        }
        if matches!(lease.is_announced(), Ok(false)) {
            // The announcement disappeared between the check and the put, together with the mark: gc considered this
            // process dead, and what the snapshot refers to may be deleted.
            let recorded = self.record_never(manifest.id, Some(manifest.copy), UNFINISHED_REASON);
            self.vault.store.delete(&name)?;
            recorded?;
            return Err(revoked(lease));
        }
        Ok(self.vault.store.length(&name).unwrap_or(bytes.len() as u64))
    }

    /// Ensures that the leftovers of a failed backup are not reported as a lost snapshot. Returns false if that failed;
    /// then the announcement must remain.
    pub(super) fn close_unfinished(&self, lease: &Lease<'_>, snapshot: SnapshotId, copy: Option<PackId>) -> bool {
        let Some(copy) = copy else { return true };
        let recorded = self.record_unfinished(lease, snapshot, copy);
        if recorded
            .or_else(|_| self.record_unfinished(lease, snapshot, copy))
            .is_ok()
        {
            return true;
        }
        // The store is full. No other writer refers to the pack with the copy.
        let is_committed = exists(&self.vault, &snapshot_name(snapshot));
        let is_removed = matches!(is_committed, Ok(true))
            || matches!(is_committed, Ok(false)) && self.vault.store.delete(&pack_name(copy)).is_ok();
        let has_others = self
            .vault
            .names(ObjectKind::Snapshot)
            .is_ok_and(|names| !names.is_empty());
        is_removed && has_others
    }

    /// Records that a snapshot was never committed. The mark uses the snapshot's object name: if that name is taken,
    /// the snapshot was committed after all, and nothing is recorded.
    fn record_unfinished(&self, lease: &Lease<'_>, snapshot: SnapshotId, copy: PackId) -> Result<()> {
        let put = with_room(&self.vault, || lease::revoke(&self.vault, &lease.record))?;
        if put == Put::AlreadyExists && !lease::is_revoked(&self.vault, &lease.record)? {
            return Ok(());
        }
        self.record_never(snapshot, Some(copy), UNFINISHED_REASON)?;
        Ok(self.vault.store.delete(&snapshot_name(snapshot))?)
    }
}

/// The error of a writer that was considered dead.
fn revoked(lease: &Lease<'_>) -> Error {
    Error::Revoked {
        writer: lease.record.writer,
    }
}
