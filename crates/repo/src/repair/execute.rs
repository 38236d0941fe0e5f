//! Executes a repair plan.

use super::{RepairAction, RepairReport};
use crate::check::finding::{DamagedPart, classify};
use crate::check::impact::impact;
use crate::check::scrub::copied_manifest;
use crate::error::{Error, Result};
use crate::format::manifest::snapshot_name;
use crate::format::pack::pack_name;
use crate::id::{PackId, SnapshotId};
use crate::repository::Repository;
use crate::repository::damage_records::{clear_damage, damage_names, read_damage};
use crate::repository::relocations::RelocationId;
use crate::store::{ObjectKind, ObjectName, StoreError};
use crate::writers::forget::ForgottenRecord;
use crate::writers::lease::Lease;

impl Repository {
    pub(super) fn execute(
        &self,
        action: &RepairAction,
        lease: &Lease<'_>,
        thread_count: usize,
        report: &mut RepairReport,
    ) -> Result<()> {
        match action {
            RepairAction::RestoreConfig => self.repair_config().map(|_| ()),
            RepairAction::RestoreSnapshot { snapshot, copy } => self.restore_manifest(*snapshot, *copy),
            RepairAction::RestoreRelocation { object } => {
                match RelocationId::of(&object.parse().map_err(StoreError::from)?) {
                    Some((id, replica)) => self.restore_replica(&id, replica),
                    None => Ok(()),
                }
            }
            RepairAction::Replace { object } => self.replace(&object.parse().map_err(StoreError::from)?),
            RepairAction::RebuildIndex { segments } => {
                let names: Vec<ObjectName> = segments
                    .iter()
                    .map(|name| Ok(name.parse().map_err(StoreError::from)?))
                    .collect::<Result<_>>()?;
                self.rebuild_index(&names)
            }
            RepairAction::RecordLoss { pack } => self.record_loss(&[*pack].into()),
            RepairAction::DeletePack { pack } => {
                self.vault.store.delete(&pack_name(*pack))?;
                self.packs.forget(*pack);
                clear_damage(&self.vault, *pack)?;
                report.deleted_packs.push(*pack);
                Ok(())
            }
            RepairAction::ForgetDamage { pack } => clear_damage(&self.vault, *pack),
            RepairAction::Salvage { pack } => {
                // Bytes that were stored again already need not be salvaged.
                report.healed_bytes += self.heal(lease)?;
                let names = damage_names(&self.vault)?.remove(pack).unwrap_or_default();
                if let (Some(record), _) = read_damage(&self.vault, &names)? {
                    let damaged = [(*pack, record)].into();
                    report
                        .deleted_packs
                        .extend(self.salvage(lease, &damaged, thread_count)?);
                }
                Ok(())
            }
        }
    }

    /// Restores the manifest of a snapshot from the copy in a pack.
    fn restore_manifest(&self, snapshot: SnapshotId, copy: PackId) -> Result<()> {
        let reader = self.packs.reader(copy)?;
        let Some(manifest) = copied_manifest(&reader.directory).filter(|manifest| manifest.id == snapshot) else {
            let detail = format!("it carries no copy of the manifest of snapshot {snapshot}");
            return Err(Error::damaged(&reader.name, reader.length, detail));
        };
        let name = snapshot_name(snapshot);
        // After a crash between the two, the snapshot is found missing and is restored by the next run.
        self.vault.store.delete(&name)?;
        self.vault.put_sealed(&name, &manifest.encode())?;
        Ok(())
    }

    /// Removes an unreadable object; rewrites it if its name contains all relevant information.
    fn replace(&self, name: &ObjectName) -> Result<()> {
        let content = match name.kind() {
            ObjectKind::Forgotten => {
                let snapshot = name
                    .name()
                    .parse()
                    .map_err(|_| Error::damaged(name, 0, "its name is no snapshot"))?;
                let record = ForgottenRecord {
                    snapshot,
                    // As long as there is a copy, the record prevents it from being reported as a lost
                    // snapshot.
                    copy: self.copies()?.of(snapshot),
                    time_ms: (self.vault.environment.now_ms)(),
                    reason: "removed earlier; the record of it was damaged".to_owned(),
                };
                Some(serde_json::to_vec(&record).expect("a record is made of strings and numbers"))
            }
            ObjectKind::Protected => Some(b"{}".to_vec()),
            _ => None,
        };
        self.vault.store.delete(name)?;
        if let Some(content) = content {
            self.vault.put_sealed(name, &content)?;
        }
        Ok(())
    }

    /// Whether everything that the manifest in `copy` refers to is readable.
    pub(super) fn is_complete(&self, copy: PackId) -> Result<bool> {
        let reader = match self.packs.reader(copy) {
            Ok(reader) => reader,
            // Gc has deleted it since it was found, or it is damaged: nothing can be restored from it.
            Err(error) if error.is_about_one_object() => return Ok(false),
            Err(error) => return Err(error),
        };
        let Some(manifest) = copied_manifest(&reader.directory) else {
            return Ok(false);
        };
        let unreachable = |pack: PackId, frame: u32| {
            let is_there = self
                .packs
                .frame_reader(pack)
                .is_ok_and(|reader| reader.frame(frame).is_ok());
            (!is_there).then_some(DamagedPart::Frame(pack, frame))
        };
        let mut is_complete = true;
        match impact(&self.packs, &[manifest], &unreachable, |_, _| is_complete = false) {
            Err(error) => classify(error).map(|_| false),
            Ok(()) => Ok(is_complete),
        }
    }
}
