//! Machines that run at another host and need their disks here, which no process serves any more.

use holdfast_host::MachineState;

use super::seen::{FindingKind, Repair, Seen};
use super::{Action, DoctorRequest, Finding};
use crate::doctor::leftovers::changed_ms;
use crate::machine::pull_record::{LeftPull, left_pulls};

/// The records that no process holds.
pub(super) fn look(request: &DoctorRequest<'_>) -> Vec<LeftPull> {
    let folder = request.pulls.as_ref().filter(|_| request.everything);
    folder.map(|folder| left_pulls(folder)).unwrap_or_default()
}

pub(super) fn diagnose(seen: &Seen) -> Vec<Finding> {
    let findings = seen.pulls.iter().map(|pull| {
        let LeftPull {
            machine, destination, ..
        } = pull;
        let here = seen.machines.iter().find(|known| known.uuid == pull.uuid);
        let runs_here = here.is_some_and(|machine| machine.state != MachineState::ShutOff);
        let (what, is_danger, remedy) = if runs_here || !pull.is_released {
            (
                format!("a migration to {destination} was interrupted before the machine ran there"),
                false,
                Action::Repair(Repair::DeleteFile(pull.path.clone()), "delete its record".to_owned()),
            )
        } else {
            (
                format!("it was migrated to {destination} with --post-copy, and a part of its disks may be here only"),
                true,
                Action::Advice(format!(
                    "do not start it here: holdfast migrate {machine} {destination} completes the disks there"
                )),
            )
        };
        Finding {
            machine: Some(machine.clone()),
            kind: FindingKind::Pull,
            what,
            since_ms: changed_ms(&pull.path),
            is_danger,
            remedy,
        }
    });
    findings.collect()
}

#[cfg(test)]
mod tests {
    use super::super::Action;
    use super::super::seen::Seen;
    use super::diagnose;
    use crate::machine::pull_record::LeftPull;

    #[test]
    fn a_record_matters_when_the_machine_may_run_there() {
        let pull = |is_released| LeftPull {
            path: "/p".into(),
            machine: "web1".to_owned(),
            uuid: "1".to_owned(),
            destination: "ssh://host2".to_owned(),
            is_released,
        };
        let seen = Seen {
            pulls: vec![pull(false), pull(true)],
            ..Seen::default()
        };
        let findings = diagnose(&seen);
        assert!(matches!(findings[0].remedy, Action::Repair(..)) && !findings[0].is_danger);
        assert!(matches!(findings[1].remedy, Action::Advice(..)) && findings[1].is_danger);
    }
}
