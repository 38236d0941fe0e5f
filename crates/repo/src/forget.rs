//! Removing snapshots, and keeping them from being removed.
//!
//! A snapshot is removed in two steps: a record that it was forgotten on purpose, then its object goes. So a snapshot that is
//! gone without such a record was lost, and can be told, and brought back. Space is given back by gc.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::id::{PackId, SnapshotId};
use crate::manifest::snapshot_name;
use crate::repository::{Repository, Vault};
use crate::room::with_room;
use crate::store::{ObjectKind, ObjectName, StoreError};

const FORGOTTEN_BYTES_MAX: u64 = 64 << 10;

/// What is kept of a snapshot that was removed, until gc has given its space back.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ForgottenRecord {
    pub(crate) snapshot: SnapshotId,
    /// The pack that carries a copy of its manifest; none when the manifest could not be read.
    pub(crate) copy: Option<PackId>,
    /// When it was removed.
    pub(crate) time_ms: i64,
    /// Why.
    pub(crate) reason: String,
}

pub(crate) fn forgotten_name(snapshot: SnapshotId) -> ObjectName {
    ObjectName::new(ObjectKind::Forgotten, &snapshot.to_string()).expect("hex digits are a name")
}

fn protected_name(snapshot: SnapshotId) -> ObjectName {
    ObjectName::new(ObjectKind::Protected, &snapshot.to_string()).expect("hex digits are a name")
}

/// All records of snapshots that were removed.
pub(crate) fn forgotten(vault: &Vault) -> Result<Vec<ForgottenRecord>> {
    let mut records = Vec::new();
    for name in vault.names(ObjectKind::Forgotten)? {
        let bytes = match vault.get_sealed(&name, FORGOTTEN_BYTES_MAX) {
            Err(Error::Store(StoreError::NotFound { .. })) => continue,
            other => other?,
        };
        let record = serde_json::from_slice(&bytes).map_err(|error| Error::damaged(&name, 0, error.to_string()))?;
        records.push(record);
    }
    Ok(records)
}

impl Repository {
    /// Removes a snapshot. [`Error::Protected`] when it is protected.
    ///
    /// A snapshot whose manifest is damaged can be removed as well.
    pub fn forget(&self, snapshot: SnapshotId, reason: &str) -> Result<()> {
        if self.protected()?.contains(&snapshot) {
            return Err(Error::Protected { id: snapshot });
        }
        let copy = match self.snapshot(snapshot) {
            Ok(manifest) => Some(manifest.copy),
            Err(error) if error.is_damage() => None,
            Err(error) => return Err(error),
        };
        let time_ms = (self.vault.surroundings.now_ms)();
        let record = ForgottenRecord {
            snapshot,
            copy,
            time_ms,
            reason: reason.to_owned(),
        };
        let bytes = serde_json::to_vec(&record).expect("a record is made of strings and numbers");
        with_room(&self.vault, || self.vault.put_sealed(&forgotten_name(snapshot), &bytes))?;
        Ok(self.vault.store.delete(&snapshot_name(snapshot))?)
    }

    /// Keeps a snapshot from being removed.
    pub fn protect(&self, snapshot: SnapshotId) -> Result<()> {
        self.snapshot(snapshot)?;
        self.vault.put_sealed(&protected_name(snapshot), b"{}")?;
        Ok(())
    }

    /// Lets a snapshot be removed again.
    pub fn unprotect(&self, snapshot: SnapshotId) -> Result<()> {
        Ok(self.vault.store.delete(&protected_name(snapshot))?)
    }

    /// The snapshots that are kept from being removed.
    pub fn protected(&self) -> Result<HashSet<SnapshotId>> {
        Ok(self.vault.identities(ObjectKind::Protected)?.into_iter().collect())
    }
}
