//! Removes snapshots, and protects them from removal.
//!
//! A snapshot is removed in two steps: a record of the removal is put, then its object is deleted. A snapshot that is
//! missing without such a record was lost, and can be reported and restored. Gc frees the space.
//!
//! A protected snapshot has an object `protected/<snapshot>`, or one `protected/<snapshot>-<holder>` for each temporary
//! holder. A removal announces itself as `protected/<snapshot>.<writer>` before it looks for protections; a protection
//! looks for announcements afterwards.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::check::scrub::exists;
use crate::error::{Error, Result};
use crate::format::manifest::snapshot_name;
use crate::id::{PackId, SnapshotId, WriterId};
use crate::repository::Repository;
use crate::store::{ObjectKind, ObjectName, Put, StoreError};
use crate::vault::Vault;
use crate::writers::emergency_space::with_room;
use crate::writers::lease;
use crate::writers::lease::{Work, WriterRecord};

const FORGOTTEN_BYTES_MAX: u64 = 64 << 10;

/// The record of a removed snapshot, kept until gc has freed its space.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ForgottenRecord {
    pub(crate) snapshot: SnapshotId,
    /// The pack with a copy of its manifest; `None` if the manifest was unreadable.
    pub(crate) copy: Option<PackId>,
    /// The time of the removal.
    pub(crate) time_ms: i64,
    /// The reason.
    pub(crate) reason: String,
}

pub(crate) fn forgotten_name(snapshot: SnapshotId) -> ObjectName {
    ObjectName::new(ObjectKind::Forgotten, &snapshot.to_string()).expect("hex digits are a name")
}

fn protected_name(snapshot: SnapshotId) -> ObjectName {
    ObjectName::new(ObjectKind::Protected, &snapshot.to_string()).expect("hex digits are a name")
}

/// The name of a temporary protection.
fn hold_name(snapshot: SnapshotId, holder: u32) -> ObjectName {
    let name = format!("{snapshot}-{holder:08x}");
    ObjectName::new(ObjectKind::Protected, &name).expect("hex digits are a name")
}

/// The snapshot that an object with this name protects; `None` if it is not a protection.
pub(crate) fn protected_by(name: &ObjectName) -> Option<SnapshotId> {
    let (snapshot, holder) = match name.name().split_once('-') {
        Some((snapshot, holder)) => (snapshot, Some(holder)),
        None => (name.name(), None),
    };
    let is_number = |text: &str| text.len() == 8 && u32::from_str_radix(text, 16).is_ok();
    let is_of_snapshot = name.kind() == ObjectKind::Protected && holder.is_none_or(is_number);
    is_of_snapshot.then(|| snapshot.parse().ok())?
}

/// Whether a name announces that a snapshot is about to be removed.
pub(crate) fn is_announcement(name: &ObjectName) -> bool {
    let parts = name.name().split_once('.');
    parts.is_some_and(|(snapshot, writer)| snapshot.parse::<SnapshotId>().is_ok() && writer.parse::<WriterId>().is_ok())
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

/// The name of an announced removal of `snapshot`.
fn intent_name(snapshot: SnapshotId, writer: WriterId) -> ObjectName {
    ObjectName::new(ObjectKind::Protected, &format!("{snapshot}.{writer}")).expect("hex digits are a name")
}

/// The announced removals, by name.
fn intents(vault: &Vault) -> Result<Vec<(ObjectName, WriterRecord)>> {
    let mut intents = Vec::new();
    let mut names = Vec::new();
    vault.store.ages(ObjectKind::Protected, &mut |name, age| {
        if name.name().contains('.') {
            names.push((name, age));
        }
        Ok(())
    })?;
    names.sort_unstable();
    for (name, age) in names {
        let bytes = match vault.get_sealed(&name, FORGOTTEN_BYTES_MAX) {
            Err(Error::Store(StoreError::NotFound { .. })) => continue,
            other => other?,
        };
        let record: WriterRecord =
            serde_json::from_slice(&bytes).map_err(|error| Error::damaged(&name, 0, error.to_string()))?;
        intents.push((name, record.silent_for(age)));
    }
    Ok(intents)
}

/// Removes the announcements of dead processes.
pub(crate) fn clear_intents(vault: &Vault) -> Result<()> {
    for (name, record) in intents(vault)? {
        if lease::is_dead(vault, &record) {
            vault.store.delete(&name)?;
        }
    }
    Ok(())
}

impl Repository {
    /// Removes a snapshot. [`Error::Protected`] if it is protected, [`Error::NoSnapshot`] if it does not exist or was
    /// already removed.
    ///
    /// A snapshot with an unreadable manifest can be removed as well, and one whose manifest is missing, as long as a
    /// pack has the copy that repair would restore it from. Neither is returned by [`snapshots`](Self::snapshots), so
    /// no rule and no pattern removes such a snapshot: only its id does.
    pub fn forget(&self, snapshot: SnapshotId, reason: &str) -> Result<()> {
        // Removal and protection both announce first and check for the other second: at least one sees the
        // other.
        let intent = WriterRecord::new(&self.vault, Work::Forget, Some(snapshot))?;
        let name = intent_name(snapshot, intent.writer);
        let bytes = serde_json::to_vec(&intent).expect("a record is made of strings and numbers");
        let announced = with_room(&self.vault, || self.vault.put_sealed(&name, &bytes));
        let result = announced.and_then(|_| self.forget_announced(snapshot, reason, &name));
        let store = &self.vault.store;
        let taken_back = store.delete(&name).or_else(|_| store.delete(&name));
        result.and(taken_back.map_err(Error::from))
    }

    /// Whether [`forget`](Self::forget) would remove a snapshot now; otherwise its error.
    pub fn check_forgettable(&self, snapshot: SnapshotId) -> Result<()> {
        self.forgettable(snapshot).map(drop)
    }

    /// The pack with the copy of the manifest of a snapshot that may be removed.
    fn forgettable(&self, snapshot: SnapshotId) -> Result<Option<PackId>> {
        if self.protected()?.contains(&snapshot) {
            return Err(Error::Protected { id: snapshot });
        }
        match self.snapshot(snapshot) {
            Ok(manifest) => Ok(Some(manifest.copy)),
            Err(error) if error.is_about_one_object() || error.is_unreadable() => Ok(self.copies()?.of(snapshot)),
            Err(error @ Error::NoSnapshot { .. }) => {
                let lost = self.copies()?.lost(&self.vault)?;
                let found = lost.into_iter().find(|(id, _)| *id == snapshot);
                Ok(Some(found.ok_or(error)?.1))
            }
            Err(error) => Err(error),
        }
    }

    fn forget_announced(&self, snapshot: SnapshotId, reason: &str, intent: &ObjectName) -> Result<()> {
        let copy = self.forgettable(snapshot)?;
        self.check_announced(snapshot, intent)?;
        let time_ms = (self.vault.environment.now_ms)();
        let record = ForgottenRecord {
            snapshot,
            copy,
            time_ms,
            reason: reason.to_owned(),
        };
        let bytes = serde_json::to_vec(&record).expect("a record is made of strings and numbers");
        // From here on it is forgotten: gc completes the removal if this process cannot.
        let name = forgotten_name(snapshot);
        let put = with_room(&self.vault, || self.vault.put_sealed(&name, &bytes))?;
        if let Err(error) = self.check_announced(snapshot, intent)
            && self.is_protected_before_record(snapshot)?
        {
            // Gc considered this process dead and removed the announcement, and a protection may rely on
            // that.
            if put == Put::Created {
                self.vault.store.delete(&name)?;
            }
            if exists(&self.vault, &snapshot_name(snapshot))? {
                return Err(error);
            }
            // Gc has completed the removal.
            self.vault.put_sealed(&name, &bytes)?;
            return Ok(());
        }
        Ok(self.vault.store.delete(&snapshot_name(snapshot))?)
    }

    /// An error if the announcement was removed because this process was considered dead.
    fn check_announced(&self, snapshot: SnapshotId, intent: &ObjectName) -> Result<()> {
        match self.vault.store.length(intent) {
            Ok(_) => Ok(()),
            Err(StoreError::NotFound { .. }) => Err(Error::Locked {
                what: "the protection of a snapshot",
                who: format!("a process that reported snapshot {snapshot} as lost"),
            }),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether a snapshot has a protection that may have been put before its removal record.
    ///
    /// Only such a protection can have succeeded, because a later one sees the record. All processes decide in the same
    /// way, by the clock of the store; without such a clock, the protection takes precedence.
    fn is_protected_before_record(&self, snapshot: SnapshotId) -> Result<bool> {
        let store = &self.vault.store;
        // Listed first: the time that passes in between makes protections appear older.
        let mut record_age = None;
        store.ages(ObjectKind::Forgotten, &mut |name, age| {
            if name == forgotten_name(snapshot) {
                record_age = age;
            }
            Ok(())
        })?;
        let mut is_protected = false;
        store.ages(ObjectKind::Protected, &mut |name, age| {
            let is_earlier = age.zip(record_age).is_none_or(|(age, record_age)| age >= record_age);
            is_protected |= is_earlier && protected_by(&name) == Some(snapshot);
            Ok(())
        })?;
        Ok(is_protected)
    }

    /// Protects a snapshot from removal. [`Error::Locked`] if another process is about to remove it.
    pub fn protect(&self, snapshot: SnapshotId) -> Result<()> {
        self.protect_by(&protected_name(snapshot), snapshot)
    }

    /// Protects a snapshot temporarily, for a holder with its own number. Several holders do not affect each other.
    pub fn hold(&self, snapshot: SnapshotId, holder: u32) -> Result<()> {
        self.protect_by(&hold_name(snapshot, holder), snapshot)
    }

    /// Releases the hold of this holder.
    pub fn release(&self, snapshot: SnapshotId, holder: u32) -> Result<()> {
        Ok(self.vault.store.delete(&hold_name(snapshot, holder))?)
    }

    /// Releases all temporary protections.
    pub fn release_all(&self, snapshot: SnapshotId) -> Result<()> {
        for name in self.vault.names(ObjectKind::Protected)? {
            if protected_by(&name) == Some(snapshot) && name != protected_name(snapshot) {
                self.vault.store.delete(&name)?;
            }
        }
        Ok(())
    }

    /// The number of temporary holders of a snapshot.
    pub fn holder_count(&self, snapshot: SnapshotId) -> Result<usize> {
        let names = self.vault.names(ObjectKind::Protected)?;
        let holds = names.iter().filter(|name| protected_by(name) == Some(snapshot));
        Ok(holds.filter(|name| **name != protected_name(snapshot)).count())
    }

    fn protect_by(&self, name: &ObjectName, snapshot: SnapshotId) -> Result<()> {
        self.snapshot(snapshot)?;
        self.vault.put_sealed(name, b"{}")?;
        // The protection remains even if it came too late: another process may rely on it, and gc deletes
        // protections without a snapshot.
        let mut rival = None;
        for (intent, record) in intents(&self.vault)? {
            if record.snapshot != Some(snapshot) {
                continue;
            }
            if lease::is_dead(&self.vault, &record) {
                // If its process resumes after a suspension, it detects the missing announcement and gives
                // up.
                self.vault.store.delete(&intent)?;
            } else {
                rival = Some(record);
            }
        }
        if let Some(rival) = rival {
            return Err(Error::Locked {
                what: rival.work.name(),
                who: rival.describe(),
            });
        }
        if self.vault.identities(ObjectKind::Forgotten)?.contains(&snapshot) {
            return Err(Error::NoSnapshot { id: snapshot });
        }
        self.snapshot(snapshot).map(|_| ())
    }

    /// Ends the protection of a snapshot, except temporary ones.
    pub fn unprotect(&self, snapshot: SnapshotId) -> Result<()> {
        Ok(self.vault.store.delete(&protected_name(snapshot))?)
    }

    /// The protected snapshots.
    pub fn protected(&self) -> Result<HashSet<SnapshotId>> {
        let names = self.vault.names(ObjectKind::Protected)?;
        Ok(names.iter().filter_map(protected_by).collect())
    }
}

impl Repository {
    /// Completes removals of processes that died.
    ///
    /// A protection that was put before the record may have succeeded: then the forget deletes its record again, or gc
    /// does after a month.
    pub(crate) fn finish_forgetting(&self) -> Result<()> {
        let old = lease::old_objects(&self.vault, ObjectKind::Forgotten)?;
        for record in forgotten(&self.vault)? {
            let name = snapshot_name(record.snapshot);
            if exists(&self.vault, &name)? {
                if self.is_protected_before_record(record.snapshot)? {
                    if old.contains(&record.snapshot) {
                        self.vault.store.delete(&forgotten_name(record.snapshot))?;
                    }
                    continue;
                }
                self.vault.store.delete(&name)?;
                // The forget may have deleted the record meanwhile, and without a record the snapshot would count as
                // lost.
                let kept = forgotten_name(record.snapshot);
                if !exists(&self.vault, &kept)? {
                    let bytes = serde_json::to_vec(&record).expect("a record is made of strings and numbers");
                    with_room(&self.vault, || self.vault.put_sealed(&kept, &bytes))?;
                }
            }
        }
        Ok(())
    }
}
