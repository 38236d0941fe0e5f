//! Problems with the disks of a machine: useless bitmaps, orphaned overlays.

use std::path::PathBuf;

use holdfast_host::MachineState;

use super::diagnosis::{Diagnosis, Owner};
use super::seen::{SeenCommit, SeenDisk, SeenMachine};
use super::{Action, Finding, FindingKind, Repair};
use crate::capture::qemu::{is_bitmap_of, is_holdfast_bitmap};
use crate::machine::run_journal::Phase;
use crate::restore::machine::is_same;

/// Finds bitmaps that are inconsistent, or that no snapshot needs any more.
pub(super) fn bitmaps(diagnosis: &mut Diagnosis<'_>, machine: &SeenMachine) {
    let is_at_work = diagnosis.is_at_work(machine);
    for disk in &machine.disks {
        let Some(node) = &disk.node else { continue };
        for bitmap in disk.bitmaps.iter().filter(|bitmap| !bitmap.is_busy) {
            let is_own = is_holdfast_bitmap(&bitmap.name);
            let repository = diagnosis.seen.repository.as_ref();
            let is_obsolete = repository.is_some_and(|repository| {
                is_bitmap_of(&bitmap.name, &repository.id) && !repository.needed.contains(&bitmap.name)
            });
            let why = match (bitmap.is_inconsistent, is_obsolete) {
                (true, _) => "is inconsistent: QEMU was killed before it could save it, and it cannot be relied on",
                (false, true) => "is needed by no snapshot in the repository, and costs a little at each write",
                (false, false) => continue,
            };
            if is_own && is_at_work {
                continue;
            }
            let repair = Repair::RemoveBitmap {
                node: node.clone(),
                name: bitmap.name.clone(),
            };
            let remedy = if is_own {
                Action::Repair(
                    repair,
                    "remove it; the next backup reads everything once, and stores what changed".to_owned(),
                )
            } else {
                Action::Advice(format!(
                    "it is another program's: where it is a checkpoint of libvirt, virsh checkpoint-delete {} {} --metadata, \
                     and a full backup by that program",
                    machine.name, bitmap.name
                ))
            };
            diagnosis.find(Finding {
                machine: Some(machine.name.clone()),
                kind: FindingKind::Bitmap,
                what: format!("the bitmap {} of disk {} {why}", bitmap.name, disk.target),
                since_ms: None,
                is_danger: false,
                remedy,
            });
        }
    }
}

/// The orphaned overlays of a disk, and the image that they can be committed to.
struct Forgotten {
    overlays: Vec<PathBuf>,
    base: PathBuf,
}

/// State of a disk's chain.
enum Chain {
    /// No problem.
    Sound,
    /// The backing image is shared by several machines.
    Template(PathBuf),
    Forgotten(Forgotten),
}

fn chain_of(diagnosis: &Diagnosis<'_>, machine: &SeenMachine, disk: &SeenDisk) -> Chain {
    let (Some(known), [active, below, ..]) = (&machine.snapshot_files, &disk.chain[..]) else {
        return Chain::Sound;
    };
    let is_known = |path: &PathBuf| known.iter().any(|known| is_same(known, path));
    let is_shared = |path: &PathBuf| {
        let users = diagnosis.seen.chains.iter();
        let with_it = users.filter(|(_, chain)| chain.iter().any(|image| is_same(image, path)));
        with_it.count() > 1
    };
    if is_known(active) {
        return Chain::Sound;
    }
    if is_shared(below) || is_shared(active) {
        return Chain::Template(below.clone());
    }
    // Follows the chain down to an image that libvirt knows, but not to one that other machines use.
    let mut depth = 1;
    while depth + 1 < disk.chain.len() && !is_known(&disk.chain[depth]) && !is_shared(&disk.chain[depth + 1]) {
        depth += 1;
    }
    Chain::Forgotten(Forgotten {
        overlays: disk.chain[..depth].to_vec(),
        base: disk.chain[depth].clone(),
    })
}

/// Whether an overlay is named like a snapshot of its base: in the same folder, with the same prefix.
///
/// A single clone of a template looks the same in all other respects, and its template must not be written.
fn is_called_like_a_snapshot(overlay: &std::path::Path, base: &std::path::Path) -> bool {
    let stem = |path: &std::path::Path| path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let (Some(name), Some(stem)) = (overlay.file_name(), stem(base)) else {
        return false;
    };
    let rest = name.to_string_lossy();
    let rest = rest.strip_prefix(&stem);
    overlay.parent() == base.parent() && rest.is_some_and(|rest| rest.starts_with(['.', '-', '_']))
}

/// Whether a doctor process that died has started a complete commit of this disk, so that this process may finish it.
pub(super) fn is_resumed(diagnosis: &Diagnosis<'_>, machine: &SeenMachine, disk: &SeenDisk) -> bool {
    disk.commit == SeenCommit::Complete
        && diagnosis.seen.runs.iter().any(|noted| {
            let record = &noted.record;
            record.phase == Phase::Committing
                && record.uuid == machine.uuid
                && diagnosis.owner(record.run) == Owner::Dead
        })
}

/// Finds disks on orphaned overlays.
pub(super) fn overlays(diagnosis: &mut Diagnosis<'_>, machine: &SeenMachine) {
    for disk in &machine.disks {
        match chain_of(diagnosis, machine, disk) {
            Chain::Sound => {}
            Chain::Template(template) => diagnosis.notes.push(format!(
                "disk {} of {} is based on {}, which other machines have too: a template, and nothing is written into it",
                disk.target,
                machine.name,
                template.display()
            )),
            Chain::Forgotten(forgotten) => overlay(diagnosis, machine, disk, forgotten),
        }
    }
}

fn overlay(diagnosis: &mut Diagnosis<'_>, machine: &SeenMachine, disk: &SeenDisk, forgotten: Forgotten) {
    let Forgotten { overlays, base } = forgotten;
    if disk.write_protected.contains(&base) {
        // A template is explained in a remark.
        diagnosis.notes.push(format!(
            "disk {} of {} is based on {}, which is write-protected, as templates are: nothing is written into it",
            disk.target,
            machine.name,
            base.display()
        ));
        return;
    }
    let is_resumed = is_resumed(diagnosis, machine, disk);
    let virsh = format!(
        "virsh -c '{}' blockcommit {} {} --base '{}' --active --pivot",
        machine.address,
        machine.name,
        disk.target,
        base.display()
    );
    let lowest = &overlays[overlays.len() - 1];
    let by_hand = if !is_called_like_a_snapshot(lowest, &base) {
        Some(format!(
            "where {base} is a template, this is as it should be, and chmod a-w {base} says so; where it is a forgotten snapshot: \
             {virsh}",
            base = base.display()
        ))
    } else if machine.state == MachineState::ShutOff {
        Some("start the machine and ask again: libvirt brings overlays down only while it runs".to_owned())
    } else if machine.state != MachineState::Running || diagnosis.is_at_work(machine) || !machine.runs.is_empty() {
        Some("ask again when the machine runs, and no backup of it is running or left over".to_owned())
    } else if !is_resumed && machine.jobs.iter().any(|job| job.status != "concluded") {
        Some("a block job is on the machine: end that first".to_owned())
    } else {
        None
    };
    let files: Vec<String> = overlays.iter().map(|path| path.display().to_string()).collect();
    let remedy = match by_hand {
        Some(advice) => Action::Advice(advice),
        None => Action::Repair(
            Repair::Commit {
                disk: disk.target.clone(),
                base: base.clone(),
                overlays: overlays.clone(),
            },
            if is_resumed {
                format!("put the machine onto {}, which holds everything by now", base.display())
            } else {
                format!(
                    "commit it into {} while the machine runs, then switch to that",
                    base.display()
                )
            },
        ),
    };
    diagnosis.find(Finding {
        machine: Some(machine.name.clone()),
        kind: FindingKind::Overlay,
        what: format!(
            "disk {} is on an orphaned overlay, which belongs to no snapshot of libvirt: {}; deleting it loses data",
            disk.target,
            files.join(", ")
        ),
        since_ms: None,
        is_danger: false,
        remedy,
    });
}
