//! VirtualBox snapshots of killed backups: until they are deleted, their machines write to growing difference images.

use std::time::Duration;

use holdfast_host::{MachineState, MachineSummary};
use holdfast_repo::Liveness;
use jiff::Timestamp;

use super::seen::SeenBox;
use super::seen::{FindingKind, Repair, Seen};
use super::{Action, DoctorRequest, Finding};
use crate::capture::virtualbox::VirtualBoxMachine;
use crate::job::{Job, Result};
use crate::machine::lock::{MachineLock, Work};
use crate::machine::run_journal::JournalPlace;

/// Examines the machines.
pub(super) fn look(request: &DoctorRequest<'_>, seen: &mut Seen) {
    for machine in &request.virtualbox {
        match look_at(request, machine, seen.processes.as_deref()) {
            Ok(found) => seen.boxes.extend(found),
            Err(error) => seen.unreachable.push((machine.name().to_owned(), error.to_string())),
        }
    }
}

fn look_at(
    request: &DoctorRequest<'_>,
    machine: &VirtualBoxMachine<'_>,
    processes: Option<&[Vec<String>]>,
) -> Result<Option<SeenBox>> {
    if machine.left_snapshots()?.is_empty() {
        return Ok(None);
    }
    let life = life(request, machine, processes);
    // A backup that has ended meanwhile has deleted its snapshots.
    let snapshots = machine.left_snapshots()?;
    Ok((!snapshots.is_empty()).then(|| SeenBox {
        name: machine.name().to_owned(),
        uuid: machine.uuid().to_owned(),
        snapshots,
        life,
        manager: machine.manager().map(|manager| manager.program().to_owned()),
    }))
}

/// Whether a backup of the machine is running. If it has no note here, any backup of VirtualBox machines may be the one.
fn life(request: &DoctorRequest<'_>, machine: &VirtualBoxMachine<'_>, processes: Option<&[Vec<String>]>) -> Liveness {
    let Some(place) = place(request) else {
        return Liveness::Unknown;
    };
    if MachineLock::is_held(&place, &summary(machine), Work::Backup) {
        return Liveness::Alive;
    }
    match processes {
        Some(processes) if !processes.iter().any(|words| backs_up_virtualbox(words)) => Liveness::Dead,
        _ => Liveness::Unknown,
    }
}

/// Whether a command line is a backup of VirtualBox machines.
fn backs_up_virtualbox(words: &[String]) -> bool {
    words.iter().any(|word| word == "backup") && words.iter().any(|word| word.starts_with("vbox:"))
}

fn place(request: &DoctorRequest<'_>) -> Option<JournalPlace> {
    Some(JournalPlace {
        folder: request.journal.clone()?,
        way: Vec::new(),
        process: request.process.clone(),
    })
}

/// The machine in the form that locks use.
fn summary(machine: &VirtualBoxMachine<'_>) -> MachineSummary {
    MachineSummary {
        name: machine.name().to_owned(),
        uuid: machine.uuid().to_owned(),
        state: MachineState::Between,
    }
}

/// The finding; remarks are added to `notes`.
pub(super) fn diagnose(seen: &SeenBox, notes: &mut Vec<String>) -> Option<Finding> {
    match seen.life {
        Liveness::Alive => {
            notes.push(format!(
                "a backup of {}, a machine of VirtualBox, is running",
                seen.name
            ));
            return None;
        }
        Liveness::Unknown => {
            notes.push(format!(
                "it is not known whether the backup that made a snapshot of {}, a machine of VirtualBox, still runs: try again when no backup runs",
                seen.name
            ));
            return None;
        }
        Liveness::Dead => {}
    }
    let names: Vec<&str> = seen.snapshots.iter().map(|snapshot| &snapshot.name[..]).collect();
    let remedy = if seen.manager.is_some() {
        Action::Repair(
            Repair::DeleteSnapshots(seen.uuid.clone()),
            "delete it: VirtualBox merges what the machine has written since".to_owned(),
        )
    } else {
        let uuids = seen.snapshots.iter().rev().map(|snapshot| &snapshot.uuid[..]);
        let line = |uuid: &str| format!("VBoxManage snapshot {} delete {uuid}", seen.uuid);
        let lines: Vec<String> = uuids.map(line).collect();
        Action::Advice(format!("where VBoxManage is: {}", lines.join("; ")))
    };
    Some(Finding {
        machine: Some(seen.name.clone()),
        kind: FindingKind::VirtualBoxSnapshot,
        what: format!(
            "a backup that was killed left the snapshot {} of VirtualBox, and the machine takes room for all that it has written since",
            names.join(", ")
        ),
        since_ms: None,
        is_danger: false,
        remedy,
    })
}

/// Deletes the snapshots of a machine, unless a backup of it has started.
pub(super) fn delete(request: &DoctorRequest<'_>, uuid: &str, job: Job<'_>) -> std::result::Result<String, String> {
    let words = |error: crate::Error| error.to_string();
    let machine = request.virtualbox.iter().find(|machine| machine.uuid() == uuid);
    let machine = machine.ok_or("the machine is gone")?;
    let place = place(request);
    let now = Timestamp::from_millisecond((request.now_ms)()).unwrap_or(Timestamp::UNIX_EPOCH);
    let lock = MachineLock::take(
        place.as_ref(),
        &summary(machine),
        Work::Backup,
        Duration::ZERO,
        now,
        job,
    );
    let _lock = lock.map_err(words)?.ok_or("backups of it cannot be kept away")?;
    let deleted = machine.delete_left(job.progress).map_err(words)?;
    let left = machine.left_snapshots().map_err(words)?;
    match &left[..] {
        [] => Ok(format!("deleted {}", deleted.join(", "))),
        left => {
            let names: Vec<&str> = left.iter().map(|snapshot| &snapshot.name[..]).collect();
            Err(format!("VirtualBox still has {}", names.join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use holdfast_repo::Liveness;

    use super::{SeenBox, backs_up_virtualbox, diagnose};
    use crate::capture::virtualbox::LeftSnapshot;
    use crate::doctor::Action;
    use crate::doctor::seen::Repair;

    fn seen(life: Liveness, manager: Option<&str>) -> SeenBox {
        SeenBox {
            name: "lab".to_owned(),
            uuid: "u".to_owned(),
            snapshots: vec![LeftSnapshot {
                uuid: "s".to_owned(),
                name: "holdfast-backup-0000002a".to_owned(),
            }],
            life,
            manager: manager.map(str::to_owned),
        }
    }

    #[test]
    fn snapshots_go_only_where_their_backup_is_known_to_be_dead() {
        for life in [Liveness::Alive, Liveness::Unknown] {
            let mut notes = Vec::new();
            assert_eq!(diagnose(&seen(life, Some("vbox")), &mut notes), None);
            assert_eq!(notes.len(), 1);
        }
        let remedy = |manager| {
            diagnose(&seen(Liveness::Dead, manager), &mut Vec::new())
                .unwrap()
                .remedy
        };
        assert!(matches!(remedy(Some("vbox")), Action::Repair(Repair::DeleteSnapshots(uuid), _) if uuid == "u"));
        let advice = "where VBoxManage is: VBoxManage snapshot u delete s".to_owned();
        assert_eq!(remedy(None), Action::Advice(advice));
    }

    #[test]
    fn a_backup_of_machines_of_virtualbox_is_known_by_its_words() {
        let is_one = |line: &str| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            backs_up_virtualbox(&words)
        };
        assert!(is_one("holdfast backup -r /r vbox:") && is_one("/usr/bin/holdfast -v backup vbox:lab"));
        assert!(!is_one("holdfast backup -r /r web1") && !is_one("holdfast machines vbox:"));
    }
}
