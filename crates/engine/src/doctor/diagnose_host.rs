//! Derives findings from the observations of host snapshots: a pure function.

use holdfast_repo::Liveness;

use super::seen::{FindingKind, Repair, Seen};
use super::seen::{IncompleteSet, SeenClone, SeenHost, SeenWork};
use super::{Action, Finding};
use crate::host_snapshot::states::UnfinishedKind;

/// The findings; remarks are added to `notes`.
pub(super) fn diagnose(seen: &Seen, notes: &mut Vec<String>) -> Vec<Finding> {
    let host = &seen.host;
    // Clones of a temporary host snapshot are removed before it.
    let is_instant = |work: &&SeenWork| work.work.kind == UnfinishedKind::Instant;
    let (instants, works): (Vec<_>, Vec<_>) = host.works.iter().partition(is_instant);
    let mut findings: Vec<Finding> = works.iter().filter_map(|work| of_work(work, notes)).collect();
    let is_passing = |cut: &&IncompleteSet| {
        let mut there = cut.there.iter();
        there.all(|name| instants.iter().any(|work| work.work.safety.contains(&name.to_string())))
    };
    findings.extend(host.cuts.iter().filter(|cut| !is_passing(cut)).map(of_cut));
    findings.extend(host.clones.iter().filter_map(|clone| of_clone(clone, seen)));
    findings.extend(instants.iter().filter_map(|work| of_work(work, notes)));
    findings.extend(remains(host));
    findings.extend(half_notes(host));
    findings.extend(states(host));
    notes.extend(host.unknown.iter().cloned());
    findings
}

fn finding(kind: FindingKind, what: String, since_ms: Option<i64>, remedy: Action) -> Finding {
    Finding {
        machine: None,
        kind,
        what,
        since_ms,
        is_danger: false,
        remedy,
    }
}

fn of_work(seen: &SeenWork, notes: &mut Vec<String>) -> Option<Finding> {
    let work = &seen.work;
    let word = match work.kind {
        UnfinishedKind::Instant => UnfinishedKind::Clone.word(),
        kind => kind.word(),
    };
    match seen.life {
        Liveness::Alive => {
            notes.push(format!("a {word} is working on {}", work.machine));
            return None;
        }
        Liveness::Unknown => {
            notes.push(format!(
                "it is not known here whether the {word} of {} still runs: check on its host",
                work.machine
            ));
            return None;
        }
        Liveness::Dead => {}
    }
    let found = match (work.kind, seen.is_defined) {
        (UnfinishedKind::Rollback, Some(false)) => finding(
            FindingKind::Rollback,
            format!(
                "a rollback of {} to {} was killed, and the machine no longer exists",
                work.machine, work.point
            ),
            Some(work.start_ms),
            Action::Repair(Repair::ForgetWork(work.uuid.clone()), "delete its note".to_owned()),
        ),
        (UnfinishedKind::Rollback, _) => half_rolled_back(seen),
        (UnfinishedKind::Instant, _) => finding(
            FindingKind::HostSnapshot,
            format!(
                "a clone of {} as it was then was killed, and left the host snapshots that it was made of: {}",
                work.of,
                work.safety.join(", ")
            ),
            Some(work.start_ms),
            Action::Repair(
                Repair::RemoveInstant(work.uuid.clone()),
                "remove them, as far as no clone needs them".to_owned(),
            ),
        ),
        (UnfinishedKind::Clone, Some(true)) => finding(
            FindingKind::Clone,
            format!(
                "the clone {} of {} is complete, and its process died before it noted that",
                work.machine, work.of
            ),
            Some(work.start_ms),
            Action::Repair(Repair::ForgetWork(work.uuid.clone()), "delete its note".to_owned()),
        ),
        (UnfinishedKind::Clone, defined) => half_clone(seen, defined),
    };
    Some(found)
}

fn half_clone(seen: &SeenWork, is_defined: Option<bool>) -> Finding {
    let work = &seen.work;
    let files = match &seen.files[..] {
        [] => "none of its files exists".to_owned(),
        files => {
            let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
            format!("some of its files exist: {}", files.join(", "))
        }
    };
    let remedy = if is_defined == Some(false) {
        Action::Repair(
            Repair::RemoveHalfClone(work.uuid.clone()),
            "delete them, unless a machine uses them".to_owned(),
        )
    } else {
        Action::Advice("ask again when libvirt can be asked whether the machine is there".to_owned())
    };
    let what = format!(
        "a clone {} of {} was killed before the machine was there; {files}",
        work.machine, work.of
    );
    finding(FindingKind::Clone, what, Some(work.start_ms), remedy)
}

fn half_rolled_back(seen: &SeenWork) -> Finding {
    let work = &seen.work;
    let (machine, point) = (&work.machine, &work.point);
    let undo = match work.safety_name() {
        Some(before) => format!("; holdfast rollback {machine}@{before} undoes it"),
        None => String::new(),
    };
    Finding {
        machine: Some(machine.clone()),
        is_danger: true,
        ..finding(
            FindingKind::Rollback,
            format!(
                "a rollback to {point} was killed while it wrote: its disks are partly of then and partly of later, and it must not be started so"
            ),
            Some(work.start_ms),
            Action::Advice(format!("holdfast rollback {machine}@{point} ends it{undo}")),
        )
    }
}

fn of_cut(cut: &IncompleteSet) -> Finding {
    let names: Vec<String> = cut.there.iter().map(ToString::to_string).collect();
    let missing = match &cut.missing[..] {
        [] => String::new(),
        missing => format!(", and there is none of {}", missing.join(", ")),
    };
    let (is, it) = if names.len() == 1 {
        ("is", "it")
    } else {
        ("are", "them")
    };
    let remedy = match cut.of_dead {
        Some(set) => Action::Repair(
            Repair::RemoveCut(cut.there.clone(), set),
            format!("remove {it}, with the states of machines that belong to {it}"),
        ),
        // It is not certain that the process belonged to Holdfast.
        None => Action::Advice(format!(
            "holdfast host remove {}, unless you need what is in {it}: each by itself is as after a power cut",
            names.join(" ")
        )),
    };
    let what = format!(
        "{} {is} not finished: the process that made {it} was killed{missing}; a machine with disks in several datasets does not go back to {it}",
        names.join(", ")
    );
    finding(FindingKind::HostSnapshot, what, cut.since_ms, remedy)
}

fn of_clone(seen: &SeenClone, all: &Seen) -> Option<Finding> {
    let name = &seen.clone.name;
    if seen.life == Liveness::Alive {
        return None;
    }
    let what = match seen.machine() {
        None => format!("{name} is a clone made to look into a host snapshot, which cannot be removed before it"),
        Some(machine) => {
            format!("{name} is a clone for the machine {machine}, which was killed before it was complete")
        }
    };
    let kind = match seen.machine() {
        None => FindingKind::Leftover,
        Some(_) => FindingKind::Clone,
    };
    let by_hand = || Action::Advice(format!("zfs destroy {name}, when no process and no machine uses it"));
    let remedy = match (&seen.user, seen.machine()) {
        _ if seen.life == Liveness::Unknown => by_hand(),
        (Some(user), Some(_)) => Action::Repair(
            Repair::FinishClone(seen.clone.clone()),
            format!("remove the mark: {user} has its disks there"),
        ),
        (Some(user), None) => Action::Advice(format!("{user} has disks there: look what it is")),
        // Only an examination of all machines shows which of them have disks in it.
        (None, Some(_)) if !all.everything => by_hand(),
        (None, _) => Action::Repair(
            Repair::DestroyClone(seen.clone.clone()),
            "destroy it, unless it is in use".to_owned(),
        ),
    };
    Some(finding(kind, what, None, remedy))
}

fn remains(host: &SeenHost) -> impl Iterator<Item = Finding> {
    host.remains.iter().map(|remain| {
        finding(
            FindingKind::Leftover,
            format!("{} is {}", remain.place.display(), remain.kind.description()),
            remain.since_s.map(|since| since.saturating_mul(1000)),
            Action::Repair(Repair::ClearRemain(remain.clone()), "delete it".to_owned()),
        )
    })
}

fn half_notes(host: &SeenHost) -> impl Iterator<Item = Finding> {
    host.half_notes.iter().map(|(path, since_ms)| {
        finding(
            FindingKind::Leftover,
            format!("{} is an incomplete note of a killed process", path.display()),
            *since_ms,
            Action::Repair(Repair::DeleteFile(path.clone()), "delete it".to_owned()),
        )
    })
}

fn states(host: &SeenHost) -> Option<Finding> {
    let mut machines = host.states.clone();
    let count = machines.len();
    machines.sort();
    machines.dedup();
    (count > 0).then(|| {
        finding(
            FindingKind::States,
            format!(
                "{count} machine states use space, but their host snapshots no longer exist: {}",
                machines.join(", ")
            ),
            None,
            Action::Repair(Repair::ForgetStates, "forget them".to_owned()),
        )
    })
}

#[cfg(test)]
mod tests {
    use holdfast_host::provider::{TemporaryClone, TemporaryCloneKind};
    use holdfast_repo::{Liveness, Processes as _, SystemProcesses};

    use super::{Action, Repair, diagnose};
    use crate::doctor::seen::Seen;
    use crate::doctor::seen::{SeenClone, SeenHost, SeenWork};
    use crate::host_snapshot::states::{Unfinished, UnfinishedKind};

    fn work(kind: UnfinishedKind, life: Liveness, is_defined: Option<bool>) -> SeenWork {
        SeenWork {
            work: Unfinished {
                kind,
                machine: "web1".to_owned(),
                uuid: "u".to_owned(),
                of: "web0".to_owned(),
                point: "one".to_owned(),
                safety: vec!["zfs:t/vm@before".to_owned(), "zfs:t/vm@later".to_owned()],
                files: Vec::new(),
                process: SystemProcesses.this(),
                start_ms: 0,
            },
            life,
            is_defined,
            files: Vec::new(),
        }
    }

    fn clone(kind: TemporaryCloneKind, life: Liveness, user: Option<&str>) -> SeenClone {
        SeenClone {
            clone: TemporaryClone {
                name: "t/x".to_owned(),
                kind,
                maker: String::new(),
            },
            life,
            user: user.map(str::to_owned),
        }
    }

    fn found(host: SeenHost, everything: bool) -> Option<Action> {
        let seen = Seen {
            host,
            everything,
            ..Seen::default()
        };
        let mut findings = diagnose(&seen, &mut Vec::new());
        assert!(findings.len() < 2);
        findings.pop().map(|finding| finding.remedy)
    }

    #[test]
    fn work_of_a_process_that_may_be_alive_is_left_alone() {
        for life in [Liveness::Alive, Liveness::Unknown] {
            for kind in [UnfinishedKind::Clone, UnfinishedKind::Rollback, UnfinishedKind::Instant] {
                for is_defined in [None, Some(true), Some(false)] {
                    let host = SeenHost {
                        works: vec![work(kind, life, is_defined)],
                        ..SeenHost::default()
                    };
                    assert_eq!(found(host, true), None);
                }
            }
            for kind in [TemporaryCloneKind::View, TemporaryCloneKind::Machine("m".to_owned())] {
                for user in [None, Some("m")] {
                    let host = SeenHost {
                        clones: vec![clone(kind.clone(), life, user)],
                        ..SeenHost::default()
                    };
                    let remedy = found(host, true);
                    assert!(matches!(remedy, None | Some(Action::Advice(_))), "{remedy:?}");
                    assert_eq!(remedy.is_none(), life == Liveness::Alive);
                }
            }
        }
    }

    #[test]
    fn a_half_rollback_is_for_a_person_and_what_was_there_before_all_of_it_is_named() {
        let of = |is_defined| SeenHost {
            works: vec![work(UnfinishedKind::Rollback, Liveness::Dead, is_defined)],
            ..SeenHost::default()
        };
        for is_defined in [None, Some(true)] {
            let remedy = found(of(is_defined), true).unwrap();
            let words = "holdfast rollback web1@one ends it; holdfast rollback web1@before undoes it";
            assert_eq!(remedy, Action::Advice(words.to_owned()));
        }
        assert!(matches!(
            found(of(Some(false)), true),
            Some(Action::Repair(Repair::ForgetWork(_), _))
        ));
    }

    #[test]
    fn a_clone_goes_only_where_no_machine_has_it_and_that_is_known() {
        let of = |user| SeenHost {
            clones: vec![clone(TemporaryCloneKind::Machine("m".to_owned()), Liveness::Dead, user)],
            ..SeenHost::default()
        };
        assert!(matches!(
            found(of(None), true),
            Some(Action::Repair(Repair::DestroyClone(_), _))
        ));
        assert!(matches!(found(of(None), false), Some(Action::Advice(_))));
        assert!(matches!(
            found(of(Some("m")), true),
            Some(Action::Repair(Repair::FinishClone(_), _))
        ));
        let work = |is_defined| SeenHost {
            works: vec![work(UnfinishedKind::Clone, Liveness::Dead, is_defined)],
            ..SeenHost::default()
        };
        assert!(matches!(
            found(work(Some(false)), true),
            Some(Action::Repair(Repair::RemoveHalfClone(_), _))
        ));
        assert!(matches!(
            found(work(Some(true)), true),
            Some(Action::Repair(Repair::ForgetWork(_), _))
        ));
        assert!(matches!(found(work(None), true), Some(Action::Advice(_))));
    }
}
