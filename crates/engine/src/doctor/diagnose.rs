//! Derives findings from the observations: a pure function.

use holdfast_host::MachineState;
use holdfast_host::qemu::{QemuJob, RunId};
use holdfast_repo::Liveness;

use super::diagnosis::{Diagnosis, Owner};
use super::seen::{Leftover, LeftoverKind, Seen, SeenCommit, SeenDisk, SeenFreeze, SeenInstant, SeenMachine, SeenRun};
use super::{Action, Finding, FindingKind, Repair};
use super::{containers, diagnose_disks, diagnose_host, emptied, instants, places, pool, pulls, virtualbox};
use crate::machine::run_journal::Phase;
use crate::machine::watchdog::is_watchdog_of;

/// The findings, most urgent first, and remarks.
pub(super) fn diagnose(seen: &Seen) -> (Vec<Finding>, Vec<String>) {
    let mut diagnosis = Diagnosis {
        seen,
        findings: Vec::new(),
        notes: Vec::new(),
    };
    for (machine, why) in &seen.unreachable {
        diagnosis.find(Finding {
            machine: Some(machine.clone()),
            kind: FindingKind::Unreachable,
            what: format!("it cannot be examined: {why}"),
            since_ms: None,
            is_danger: false,
            remedy: Action::Advice("make sure that it answers, then run the doctor again".to_owned()),
        });
    }
    for machine in &seen.machines {
        diagnosis.machine(machine);
    }
    diagnosis
        .findings
        .extend(seen.instants.iter().filter_map(instants::diagnose));
    let left = seen
        .emptied
        .iter()
        .filter_map(|overlay| match diagnosis.owner(overlay.run) {
            Owner::Alive => None,
            Owner::Dead => Some(emptied::diagnose(overlay)),
            Owner::Unknown => Some(emptied::of_unknown_owner(
                overlay,
                diagnosis.liveness_advice(overlay.run),
            )),
        });
    let left: Vec<Finding> = left.collect();
    diagnosis.findings.extend(left);
    let of_host = diagnose_host::diagnose(seen, &mut diagnosis.notes);
    diagnosis.findings.extend(of_host);
    let of_containers = containers::diagnose(seen, &mut diagnosis.notes);
    diagnosis.findings.extend(of_containers);
    for machine in &seen.boxes {
        let finding = virtualbox::diagnose(machine, &mut diagnosis.notes);
        diagnosis.findings.extend(finding);
    }
    for one in &seen.pools {
        let findings = pool::diagnose(seen, one, &mut diagnosis.notes);
        diagnosis.findings.extend(findings);
    }
    diagnosis.leftovers();
    diagnosis.dead_runs();
    diagnosis.findings.extend(places::diagnose(seen));
    diagnosis.findings.extend(pulls::diagnose(seen));
    if seen.repository.is_some() {
        diagnosis
            .notes
            .push("the content of the repository is not checked here: use holdfast scrub".to_owned());
    }
    (diagnosis.findings, diagnosis.notes)
}

/// QEMU's name for jobs that copy a disk.
const COPY: &str = "mirror";

impl Diagnosis<'_> {
    pub(super) fn find(&mut self, finding: Finding) {
        self.findings.push(finding);
    }

    fn note_of(&self, run: RunId) -> Option<&SeenRun> {
        self.seen.runs.iter().find(|noted| noted.record.run == run)
    }

    /// Whether the process of a run is alive, according to the journal and the visible processes.
    pub(super) fn owner(&self, run: RunId) -> Owner {
        let watches = |words: &Vec<String>| is_watchdog_of(words, run);
        let processes = self.seen.processes.as_ref();
        if processes.is_some_and(|processes| processes.iter().any(watches)) {
            return Owner::Alive;
        }
        match (self.note_of(run).map(|noted| noted.life), processes) {
            (Some(Liveness::Alive), _) => Owner::Alive,
            (Some(Liveness::Unknown), _) | (None, None) => Owner::Unknown,
            // A run without a note: any process that belongs to no other run may be its owner.
            (None, Some(_)) if !self.seen.unattached.is_empty() => Owner::Unknown,
            (Some(Liveness::Dead), _) | (None, Some(_)) => Owner::Dead,
        }
    }

    /// The noted runs on a machine.
    fn noted(&self, machine: &SeenMachine) -> Vec<&SeenRun> {
        let is_its = |noted: &&SeenRun| noted.record.uuid == machine.uuid && noted.record.machine == machine.name;
        self.seen.runs.iter().filter(is_its).collect()
    }

    /// Whether a run of Holdfast is working on a machine, or may be.
    pub(super) fn is_at_work(&self, machine: &SeenMachine) -> bool {
        let noted = self.noted(machine);
        let mut runs = machine
            .runs
            .iter()
            .copied()
            .chain(noted.iter().map(|noted| noted.record.run));
        runs.any(|run| self.owner(run) != Owner::Dead)
    }

    fn machine(&mut self, machine: &SeenMachine) {
        self.paused(machine);
        self.frozen(machine);
        self.remains(machine);
        for job in &machine.jobs {
            self.job(machine, job);
        }
        diagnose_disks::bitmaps(self, machine);
        diagnose_disks::overlays(self, machine);
    }

    /// The dead run that froze a machine.
    fn dead_freeze(&self, machine: &SeenMachine) -> Option<SeenRun> {
        let noted = self.noted(machine).into_iter();
        let mut freezing =
            noted.filter(|noted| noted.record.phase == Phase::Freezing && self.owner(noted.record.run) == Owner::Dead);
        freezing.next().cloned()
    }

    fn paused(&mut self, machine: &SeenMachine) {
        if machine.state != MachineState::Paused || self.is_at_work(machine) {
            return;
        }
        match self.dead_freeze(machine).filter(|noted| noted.record.was_running) {
            Some(noted) => self.find(Finding {
                machine: Some(machine.name.clone()),
                kind: FindingKind::Paused,
                what: format!(
                    "it is paused: run {} paused it for its point in time, and died",
                    noted.record.run
                ),
                since_ms: Some(noted.record.start_ms),
                is_danger: true,
                remedy: Action::Repair(
                    Repair::Resume,
                    "resume it, and thaw its file systems if they are frozen".to_owned(),
                ),
            }),
            None => self.notes.push(format!(
                "{} is paused; according to the journal no backup did that, so it stays paused",
                machine.name
            )),
        }
    }

    fn frozen(&mut self, machine: &SeenMachine) {
        match &machine.frozen {
            SeenFreeze::NotAsked | SeenFreeze::Thawed => {}
            SeenFreeze::Silent(why) => self.find(Finding {
                machine: Some(machine.name.clone()),
                kind: FindingKind::AgentSilent,
                what: format!(
                    "its guest agent does not answer, so it is not known whether its file systems are frozen: {why}"
                ),
                since_ms: None,
                is_danger: false,
                remedy: Action::Advice(
                    "restart qemu-guest-agent in the guest; backups are as after a power cut meanwhile".to_owned(),
                ),
            }),
            SeenFreeze::Frozen if self.is_at_work(machine) => {
                self.notes
                    .push(format!("{} is frozen, and a backup of it is running", machine.name));
            }
            SeenFreeze::Frozen => {
                let own_freeze = self.dead_freeze(machine);
                let what = match &own_freeze {
                    Some(noted) => format!(
                        "its file systems are frozen, and every program in it that writes waits: run {} froze them, and died",
                        noted.record.run
                    ),
                    None => "its file systems are frozen, and every program in it that writes waits: according to the journal, \
                             no run of Holdfast froze them; another program may be working on it"
                        .to_owned(),
                };
                self.find(Finding {
                    machine: Some(machine.name.clone()),
                    kind: FindingKind::Frozen,
                    what,
                    since_ms: own_freeze.map(|noted| noted.record.start_ms),
                    is_danger: true,
                    remedy: Action::Repair(Repair::Thaw, "thaw them by the guest agent".to_owned()),
                });
            }
        }
    }

    fn remains(&mut self, machine: &SeenMachine) {
        for run in &machine.runs {
            let since_ms = self.note_of(*run).map(|noted| noted.record.start_ms);
            let (what, remedy) = match self.owner(*run) {
                Owner::Alive => {
                    self.notes.push(format!("run {run} is working on {}", machine.name));
                    continue;
                }
                Owner::Dead => (
                    "the process is dead",
                    Action::Repair(
                        Repair::RemoveRun(*run),
                        "remove it; the guest does not notice".to_owned(),
                    ),
                ),
                Owner::Unknown => (
                    "it is not known whether its process is alive",
                    Action::Advice(self.liveness_advice(*run)),
                ),
            };
            self.find(Finding {
                machine: Some(machine.name.clone()),
                kind: FindingKind::Remains,
                what: format!(
                    "run {run} left its filters or files in QEMU, and {what}; the machine is not in danger, but libvirt's own \
                     block jobs are refused, and the scratch file of the run fills its disk"
                ),
                since_ms,
                is_danger: false,
                remedy,
            });
        }
    }

    /// How the user can find out whether the process of a run is alive.
    fn liveness_advice(&self, run: RunId) -> String {
        match (self.note_of(run), &self.seen.processes) {
            (Some(noted), _) => format!(
                "it was process {} on {}, whose processes cannot be seen from this host; run the doctor there",
                noted.record.process.process, noted.record.process.host
            ),
            (None, None) => "the processes of other users cannot be seen; run the doctor again as root".to_owned(),
            (None, Some(_)) => format!(
                "it may belong to {}; run the doctor again when that has ended",
                self.seen.unattached.join(", ")
            ),
        }
    }

    fn job(&mut self, machine: &SeenMachine, job: &QemuJob) {
        // A resumed instant restore resumes its copies too.
        let is_filled = |instant: &SeenInstant| instant.owner.as_ref() == Some(&machine.name);
        let is_of_restore = job.kind == COPY && self.seen.instants.iter().any(is_filled);
        if job.id.starts_with("hf-") || is_of_restore {
            return;
        }
        let disk = machine
            .disks
            .iter()
            .find(|disk| job.id.contains(&format!("-{}-", disk.target)));
        let target = disk.map_or("DISK", |disk| &disk.target[..]);
        let why = job
            .error
            .as_ref()
            .map(|error| format!(" ({error})"))
            .unwrap_or_default();
        let (what, remedy) = match &job.status[..] {
            "concluded" => (
                format!("its {} job {} has ended{why}, and was not dismissed", job.kind, job.id),
                Action::Repair(Repair::DismissJob(job.id.clone()), "dismiss it".to_owned()),
            ),
            "ready" | "paused" | "standby" | "pending" => {
                // A commit by Holdfast is resumed with its overlay.
                if disk.is_some_and(|disk| diagnose_disks::is_resumed(self, machine, disk)) {
                    return;
                }
                (
                    format!(
                        "its {} job {} is {}{why} and waits for a decision",
                        job.kind, job.id, job.status
                    ),
                    Action::Advice(job_advice(machine, job, target)),
                )
            }
            _ if job.has_failed_io => (
                format!(
                    "its {} job {} has stopped: reading or writing failed{why}",
                    job.kind, job.id
                ),
                Action::Advice(job_advice(machine, job, target)),
            ),
            _ => {
                self.notes.push(format!(
                    "a {} job is running on {} ({})",
                    job.kind, machine.name, job.id
                ));
                return;
            }
        };
        self.find(Finding {
            machine: Some(machine.name.clone()),
            kind: FindingKind::Job,
            what,
            since_ms: None,
            is_danger: job.has_failed_io,
            remedy,
        });
    }

    fn leftovers(&mut self) {
        for Leftover { path, kind, since_ms } in &self.seen.leftovers {
            let (what, repair) = match kind {
                LeftoverKind::Socket => (
                    "a folder for sockets or mounts that no process uses",
                    Repair::DeleteFolder(path.clone()),
                ),
                LeftoverKind::MigrationSocket => (
                    "a socket of a migration that no process uses",
                    Repair::DeleteFile(path.clone()),
                ),
                LeftoverKind::Scratch => (
                    "a folder with scratch files that no process has open",
                    Repair::DeleteFolder(path.clone()),
                ),
                LeftoverKind::Probe => (
                    "a file by which a killed process tested whether files can be cloned",
                    Repair::DeleteFile(path.clone()),
                ),
                LeftoverKind::UnfinishedFolder => (
                    "the folder of an instant restore that was killed while it made the folder",
                    Repair::DeleteFolder(path.clone()),
                ),
                LeftoverKind::UnfinishedContainer => (
                    "the folder of a container that was not completed, because its process was killed",
                    Repair::DeleteUnfinishedContainer(path.clone()),
                ),
                LeftoverKind::HalfNote => (
                    "an incomplete note of a killed process",
                    Repair::DeleteHalfNote(path.clone()),
                ),
                LeftoverKind::Partial => (
                    "an incomplete file of a killed restore",
                    Repair::DeletePartial(path.clone()),
                ),
                LeftoverKind::DeadMount => (
                    "a mounted repository without the process that served it",
                    Repair::Unmount(path.clone()),
                ),
            };
            let remedy = match kind {
                LeftoverKind::DeadMount => "unmount it",
                _ => "delete it",
            };
            self.findings.push(Finding {
                machine: None,
                kind: FindingKind::Leftover,
                what: format!("{} is {what}", path.display()),
                since_ms: *since_ms,
                is_danger: false,
                remedy: Action::Repair(repair, remedy.to_owned()),
            });
        }
    }

    /// Reports the notes of dead runs last: the leftovers that they list are repaired first.
    fn dead_runs(&mut self) {
        for SeenRun { record, life } in &self.seen.runs {
            let examined = self
                .seen
                .machines
                .iter()
                .find(|machine| machine.uuid == record.uuid && machine.name == record.machine);
            let is_concerned = self.seen.everything || examined.is_some();
            if !is_concerned || self.owner(record.run) == Owner::Alive {
                continue;
            }
            let address = record.address().unwrap_or_default();
            let is_unreachable = self.seen.unreachable.iter().any(|(name, _)| *name == record.machine);
            // Its address was examined, and its machine was not found: its QEMU has ended, with everything in it.
            let is_gone = self.seen.everything && (address == self.seen.address || address.starts_with("qmp:"));
            let is_seen = examined.is_some() || is_gone;
            let is_on_its_way = |disk: &SeenDisk| disk.commit == SeenCommit::OnItsWay;
            let is_committing = record.phase == Phase::Committing
                && examined.is_some_and(|machine| machine.disks.iter().any(is_on_its_way));
            let remedy = if *life == Liveness::Unknown {
                Action::Advice("run the doctor on the host, or in the container, where it ran".to_owned())
            } else if is_committing {
                Action::Advice("libvirt is still committing it; run holdfast doctor again later".to_owned())
            } else if is_unreachable {
                Action::Advice("run the doctor again when the machine can be examined".to_owned())
            } else if is_seen {
                Action::Repair(Repair::ForgetRun(record.run), "delete its note".to_owned())
            } else {
                Action::Advice(format!("holdfast doctor --connect {address} examines what it left"))
            };
            self.findings.push(Finding {
                machine: Some(record.machine.clone()),
                kind: FindingKind::DeadRun,
                what: format!(
                    "run {} (process {}) died while it was {}",
                    record.run,
                    record.process.process,
                    record.phase.word()
                ),
                since_ms: Some(record.start_ms),
                is_danger: false,
                remedy,
            });
        }
    }
}

fn job_advice(machine: &SeenMachine, job: &QemuJob, target: &str) -> String {
    if !machine.is_libvirt {
        return format!(
            "by its monitor: block-job-complete or block-job-cancel, with {{\"device\":\"{}\"}}",
            job.id
        );
    }
    let virsh = format!("virsh -c '{}' blockjob {} {target}", machine.address, machine.name);
    if job.status == "ready" {
        format!("{virsh} --pivot ends it and uses its result, {virsh} --abort discards the result")
    } else {
        format!("{virsh} --abort discards its result")
    }
}

#[cfg(test)]
mod tests;
