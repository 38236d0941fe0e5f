//! Chooses the disks of a machine that are backed up.

use holdfast_host::qemu::memory::MemoryMethod;
use holdfast_host::{Description, DiskKind, DiskSource, Machine, MachineDisk};

use crate::job::{Error, Job, Result};

/// Checks that the choice is worth a snapshot; warns if a machine could not resume from its memory with it.
///
/// # Errors
/// All disks are left out.
pub(super) fn check_choice(
    description: &Description,
    taken: &[MachineDisk],
    memory: Option<MemoryMethod>,
    job: Job<'_>,
) -> Result<()> {
    if taken.is_empty() && !is_without_disks(description) {
        return Err(Error::NoDisks {
            machine: description.summary.name.clone(),
        });
    }
    if memory.is_some() {
        warn_of_missing_disks(description, taken, job);
    }
    Ok(())
}

/// Whether a machine has only removable drives: it may boot from the network.
fn is_without_disks(description: &Description) -> bool {
    let is_drive = |disk: &MachineDisk| matches!(disk.kind, DiskKind::Cdrom | DiskKind::Floppy);
    description.disks.iter().all(is_drive)
}

/// Warns about missing disks: memory is useful only with every disk that the guest writes to.
fn warn_of_missing_disks(description: &Description, taken: &[MachineDisk], job: Job<'_>) {
    let is_missing = |disk: &&MachineDisk| {
        let is_written = !disk.is_read_only && matches!(disk.kind, DiskKind::Disk | DiskKind::Lun);
        is_written && disk.source != DiskSource::Empty && !taken.contains(disk)
    };
    let missing = description.disks.iter().filter(is_missing);
    let missing: Vec<&str> = missing.map(|disk| &disk.target[..]).collect();
    if !missing.is_empty() {
        job.progress.warning(&format!(
            "the machine cannot resume from the memory in this snapshot, since {} is not in it",
            missing.join(", ")
        ));
    }
}

/// Why no files are created beside the images; none if they can be. In a folder of another user, that user's QEMU could
/// not use files owned by root, and the user could replace them.
pub(super) fn not_beside(machine: &dyn Machine) -> Option<String> {
    let user = machine.rights().other_user()?;
    Some(format!(
        "its files belong to user {user}, and Holdfast makes no files beside them"
    ))
}
