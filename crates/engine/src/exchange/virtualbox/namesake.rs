//! Two machines of one name are not stored as one.

use holdfast_repo::Manifest;

use super::error::VirtualBoxError;
use super::machine::VirtualBoxMachine;
use super::place::of;
use super::request::VirtualBoxBackup;
use super::store::HYPERVISOR;
use crate::error::Result;
use crate::namesake::Predecessor;

/// Refuses to store under a name that snapshots of another machine have, which is there still or is one of another hypervisor. Who says the name himself
/// means it.
pub(super) fn refuse_namesake(request: &VirtualBoxBackup<'_>, manifests: &[Manifest]) -> Result<()> {
    let predecessor = Predecessor::of(manifests, request.name.as_str());
    let is_another = |other: &Predecessor<'_>| !request.is_name_chosen && !other.is(request.machine.uuid());
    let Some(other) = predecessor.filter(is_another) else {
        return Ok(());
    };
    let is_there = || -> Result<bool> {
        let (machines, inaccessible) = request.machine.place().machines()?;
        let mut uuids = machines.iter().map(VirtualBoxMachine::uuid);
        Ok(uuids.any(|uuid| other.is(uuid)) || inaccessible.iter().any(|machine| other.is(&machine.uuid)))
    };
    // One that was brought back as another machine goes on where the one ended that is gone.
    if other.hypervisor == Some(HYPERVISOR) && !is_there()? {
        return Ok(());
    }
    Err(of(VirtualBoxError::Namesake {
        name: request.name.to_string(),
        uuid: other.uuid.to_owned(),
        place: other.place().to_owned(),
    }))
}
