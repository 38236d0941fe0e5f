//! The last step of gc: deletes auxiliary objects whose pack or snapshot is gone.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use crate::error::Result;
use crate::gc::compact::{Compaction, compact_index};
use crate::gc::mark::Marks;
use crate::id::{PackId, SnapshotId};
use crate::repository::Repository;
use crate::repository::damage_records::damage_names;
use crate::repository::relocations::{RelocationId, Replica, delete_relocation, read_replica, relocations};
use crate::store::{ObjectKind, ObjectName};
use crate::vault::Vault;
use crate::writers::forget::{ForgottenRecord, clear_intents, forgotten, forgotten_name, protected_by};

/// The record of a forgotten snapshot is kept for at least a day, by the clock of the store: a deleted pack can
/// reappear after a power failure, and its copy of the manifest must not be reported as a lost snapshot.
const FORGOTTEN_AGE: Duration = Duration::from_secs(24 * 3600);

/// Objects about single packs that may be obsolete.
///
/// They are listed before the mark phase: later objects may belong to packs and snapshots that the marks do not
/// include.
pub(crate) struct AuxiliaryObjects {
    relocations: BTreeMap<RelocationId, BTreeSet<Replica>>,
    damage: BTreeMap<PackId, Vec<ObjectName>>,
}

impl AuxiliaryObjects {
    pub(crate) fn list(vault: &Vault) -> Result<Self> {
        Ok(Self {
            relocations: relocations(&*vault.store)?,
            damage: damage_names(vault)?,
        })
    }
}

impl Repository {
    /// Deletes objects that only served deleted packs.
    pub(crate) fn tidy_up(&self, marks: &Marks, leftovers: &AuxiliaryObjects) -> Result<()> {
        let existing = compact_index(&self.vault, Compaction::Thorough(marks))?;
        for (id, replicas) in &leftovers.relocations {
            if !marks.relocated.contains(&id.pack) && !existing.contains(&id.pack) {
                delete_relocation(&*self.vault.store, id)?;
            } else if replicas.len() == 1 {
                self.complete(id, replicas)?;
            }
        }
        // The damage record of a missing but needed pack is required for healing.
        let served = |pack: &PackId| existing.contains(pack) || marks.is_live(*pack);
        let useless = leftovers.damage.iter().filter(|(pack, _)| !served(pack));
        for name in useless.flat_map(|(_, names)| names) {
            self.vault.store.delete(name)?;
        }
        self.drop_old_acceptances(&existing, marks)?;
        self.delete_old_removal_records(&existing)?;
        self.delete_orphaned_protections()?;
        clear_intents(&self.vault)
    }

    /// Puts the missing replica of a relocation.
    ///
    /// Its writer may have died in between, or may be about to put it: then nothing changes.
    fn complete(&self, id: &RelocationId, replicas: &BTreeSet<Replica>) -> Result<()> {
        for replica in replicas {
            match read_replica(&*self.vault.store, &self.vault.keyring, id, *replica) {
                Ok(table) => drop(self.vault.put_sealed(&id.name(replica.other()), &table.encode())?),
                // Damaged objects are left to repair.
                Err(error) if error.is_about_one_object() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Deletes records of forgotten snapshots of which no object is left.
    fn delete_old_removal_records(&self, existing: &HashSet<PackId>) -> Result<()> {
        let mut old = HashSet::new();
        self.vault.store.ages(ObjectKind::Forgotten, &mut |name, age| {
            if age.is_some_and(|age| age > FORGOTTEN_AGE) {
                old.insert(name);
            }
            Ok(())
        })?;
        for ForgottenRecord { snapshot, copy, .. } in forgotten(&self.vault)? {
            let gone = copy.is_none_or(|copy| !existing.contains(&copy));
            let name = forgotten_name(snapshot);
            if gone && old.contains(&name) {
                self.vault.store.delete(&name)?;
            }
        }
        Ok(())
    }

    fn delete_orphaned_protections(&self) -> Result<()> {
        // Protections are listed first: only an existing snapshot can be protected, so snapshots that are missing
        // afterwards are gone for good.
        let mut protections = self.vault.names(ObjectKind::Protected)?;
        protections.sort_unstable();
        let snapshots: HashSet<SnapshotId> = self.vault.identities(ObjectKind::Snapshot)?.into_iter().collect();
        let is_of_nothing = |name: &&ObjectName| protected_by(name).is_some_and(|id| !snapshots.contains(&id));
        let of_nothing = protections.iter().filter(is_of_nothing);
        of_nothing
            .into_iter()
            .try_for_each(|name| Ok(self.vault.store.delete(name)?))
    }
}
