//! Two machines of one name are not stored as one.

use holdfast_host::xapi::XapiError;
use holdfast_repo::Manifest;

use super::{NOTE_DISK, NOTE_POOL, XenBackup, XenBackupError};
use crate::error::Result;
use crate::machine_backup::NOTE_UUID;

impl XenBackup<'_> {
    /// Whether a snapshot is of disks that the machine has: then it is of this pool, by another of its addresses.
    fn has_disks_of(&self, manifest: &Manifest) -> bool {
        let mut known = manifest.disks.iter().filter_map(|record| record.notes.get(NOTE_DISK));
        known.any(|uuid| self.taken.iter().any(|taken| taken.live.uuid == *uuid))
    }

    /// Refuses to store under a name that snapshots of another machine have, which is there still or is of another pool. Who says the name himself
    /// means it.
    pub(super) fn refuse_namesake(&self, manifests: &[Manifest]) -> Result<()> {
        if self.request.is_name_chosen {
            return Ok(());
        }
        let own = manifests
            .iter()
            .filter(|manifest| manifest.machine == self.name.as_str());
        let Some(newest) = own.max_by_key(|manifest| manifest.time_ms) else {
            return Ok(());
        };
        let note = |key: &str| newest.notes.get(key).map(String::as_str).unwrap_or_default();
        let (uuid, pool) = (note(NOTE_UUID), note(NOTE_POOL));
        let is_elsewhere = pool != self.request.pool.title();
        if uuid == self.machine.summary.uuid && is_elsewhere && !pool.is_empty() && !self.has_disks_of(newest) {
            // It may have moved; or one of both is a copy.
            self.job.progress.warning(&format!(
                "the newest snapshot that is listed as {} is of this machine in the pool {pool}: where it is there still, list one of both under another name (--machine NAME)",
                self.name
            ));
        }
        if uuid.is_empty() || uuid == self.machine.summary.uuid {
            return Ok(());
        }
        let is_there = || match self.request.pool.machine(uuid) {
            Ok(_) => Ok(true),
            Err(XapiError::NoMachine { .. }) => Ok(false),
            Err(error) => Err(error),
        };
        // One that was brought back as another machine goes on where the one ended that is gone.
        if !is_elsewhere && !is_there()? {
            return Ok(());
        }
        Err(XenBackupError::Namesake {
            name: self.name.to_string(),
            uuid: uuid.to_owned(),
            pool: if pool.is_empty() {
                "another hypervisor".to_owned()
            } else {
                pool.to_owned()
            },
        }
        .into())
    }
}
