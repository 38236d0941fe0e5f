//! Two machines of one name are not stored as one.

use holdfast_repo::Manifest;

use super::error::VirtualBoxError;
use super::machine::VirtualBoxMachine;
use super::place::of;
use super::request::VirtualBoxBackup;
use super::store::{HYPERVISOR, NOTE_HYPERVISOR};
use crate::error::Result;
use crate::machine_backup::NOTE_UUID;

/// Refuses to store under a name that snapshots of another machine have, which is there still or is one of another hypervisor. Who says the name himself
/// means it.
pub(super) fn refuse_namesake(request: &VirtualBoxBackup<'_>, manifests: &[Manifest]) -> Result<()> {
    if request.is_name_chosen {
        return Ok(());
    }
    let own = manifests
        .iter()
        .filter(|manifest| manifest.machine == request.name.as_str());
    let Some(newest) = own.max_by_key(|manifest| manifest.time_ms) else {
        return Ok(());
    };
    let note = |key: &str| newest.notes.get(key).map(String::as_str).unwrap_or_default();
    let uuid = note(NOTE_UUID);
    if uuid.is_empty() || uuid == request.machine.uuid() {
        return Ok(());
    }
    // One that was brought back as another machine goes on where the one ended that is gone.
    let is_there = || -> Result<bool> {
        let (machines, inaccessible) = request.machine.place().machines()?;
        let mut uuids = machines.iter().map(VirtualBoxMachine::uuid);
        Ok(uuids.any(|other| other == uuid) || inaccessible.iter().any(|machine| machine.uuid == uuid))
    };
    if note(NOTE_HYPERVISOR) == HYPERVISOR && !is_there()? {
        return Ok(());
    }
    Err(of(VirtualBoxError::Namesake {
        name: request.name.to_string(),
        uuid: uuid.to_owned(),
    }))
}
