//! The end of gc: what only served packs and snapshots that are gone goes as well.

use std::collections::{BTreeMap, HashSet};

use crate::compact::{Compaction, compact_index};
use crate::damage::damage_names;
use crate::error::Result;
use crate::forget::{ForgottenRecord, clear_intents, forgotten, forgotten_name};
use crate::id::{PackId, SnapshotId};
use crate::mark::Marks;
use crate::relocation::relocated_pack;
use crate::repository::{Repository, Vault};
use crate::store::{ObjectKind, ObjectName};

/// A forgotten snapshot's record stays at least a day: a pack that was deleted can come back after a power cut, and its copy
/// of the manifest must not pass for a lost snapshot.
const FORGOTTEN_AGE_MS: i64 = 24 * 3600 * 1000;

/// What is about single packs and may serve nothing any more.
///
/// It is listed before anything is marked: what comes later may be about packs, and serve snapshots, that the marks do not
/// know.
pub(crate) struct Leftovers {
    relocations: Vec<ObjectName>,
    damage: BTreeMap<PackId, Vec<ObjectName>>,
}

impl Leftovers {
    pub(crate) fn list(vault: &Vault) -> Result<Self> {
        Ok(Self {
            relocations: vault.names(ObjectKind::Relocation)?,
            damage: damage_names(vault)?,
        })
    }
}

impl Repository {
    /// Deletes what only served packs that are gone.
    pub(crate) fn tidy_up(&self, marks: &Marks, leftovers: &Leftovers) -> Result<()> {
        let living = compact_index(&self.vault, Compaction::Thorough(marks))?;
        for name in &leftovers.relocations {
            let needed =
                relocated_pack(name).is_none_or(|pack| marks.relocated.contains(&pack) || living.contains(&pack));
            if !needed {
                self.vault.store.delete(name)?;
            }
        }
        // Of a pack that is gone, and lost because it is needed, the record is what it is healed by.
        let served = |pack: &PackId| living.contains(pack) || marks.is_live(*pack);
        let useless = leftovers.damage.iter().filter(|(pack, _)| !served(pack));
        for name in useless.flat_map(|(_, names)| names) {
            self.vault.store.delete(name)?;
        }
        self.forget_old_removals(&living)?;
        self.drop_protections_of_nothing()?;
        clear_intents(&self.vault)
    }

    /// Deletes records of forgotten snapshots of which nothing is left.
    fn forget_old_removals(&self, living: &HashSet<PackId>) -> Result<()> {
        let now_ms = (self.vault.surroundings.now_ms)();
        for ForgottenRecord {
            snapshot,
            copy,
            time_ms,
            ..
        } in forgotten(&self.vault)?
        {
            let gone = copy.is_none_or(|copy| !living.contains(&copy));
            if gone && now_ms.saturating_sub(time_ms) > FORGOTTEN_AGE_MS {
                self.vault.store.delete(&forgotten_name(snapshot))?;
            }
        }
        Ok(())
    }

    fn drop_protections_of_nothing(&self) -> Result<()> {
        // Protections are listed first: only a snapshot that is there is protected, so what is missing then is gone for good.
        let mut protected: Vec<SnapshotId> = self.protected()?.into_iter().collect();
        protected.sort_unstable();
        let snapshots: HashSet<SnapshotId> = self.vault.identities(ObjectKind::Snapshot)?.into_iter().collect();
        protected.retain(|id| !snapshots.contains(id));
        protected.into_iter().try_for_each(|id| self.unprotect(id))
    }
}
