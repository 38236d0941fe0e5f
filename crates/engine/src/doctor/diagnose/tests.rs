//! Difficult cases: which processes are alive, which run paused a machine, and which images must not be written to.

use std::path::PathBuf;

use holdfast_host::MachineState;
use holdfast_host::qemu::{Bitmap, QemuJob, RunId};
use holdfast_repo::{Liveness, ProcessIdentity};

use super::diagnose;
use crate::doctor::seen::{
    FindingKind, Repair, Seen, SeenCommit, SeenDisk, SeenFreeze, SeenInstant, SeenMachine, SeenRepository, SeenRun,
};
use crate::doctor::{Action, Finding};
use crate::machine::run_journal::{Phase, RunRecord};
use crate::restore::instant::InstantState;

const RUN: RunId = RunId(7);

fn record(phase: Phase) -> RunRecord {
    RunRecord {
        run: RUN,
        machine: "web1".to_owned(),
        uuid: "u1".to_owned(),
        way: ["--connect", "qemu:///system"].map(str::to_owned).to_vec(),
        process: ProcessIdentity {
            host: "h".to_owned(),
            boot: "b".to_owned(),
            namespace: "n".to_owned(),
            process: 1,
            started: 1,
        },
        start_ms: 5,
        phase,
        was_running: true,
        scratch: "/var/tmp".into(),
    }
}

fn noted_run(phase: Phase, life: Liveness) -> SeenRun {
    SeenRun {
        record: record(phase),
        life,
    }
}

fn machine(change: impl FnOnce(&mut SeenMachine)) -> SeenMachine {
    let mut machine = SeenMachine {
        name: "web1".to_owned(),
        uuid: "u1".to_owned(),
        address: "qemu:///system".to_owned(),
        is_libvirt: true,
        state: MachineState::Running,
        runs: Vec::new(),
        frozen: SeenFreeze::Thawed,
        jobs: Vec::new(),
        disks: Vec::new(),
        snapshot_files: Some(Vec::new()),
    };
    change(&mut machine);
    machine
}

fn seen(machine: SeenMachine, change: impl FnOnce(&mut Seen)) -> Seen {
    let disks = machine.disks.iter();
    let mut seen = Seen {
        chains: disks.map(|disk| (machine.name.clone(), disk.chain.clone())).collect(),
        machines: vec![machine],
        processes: Some(Vec::new()),
        everything: true,
        address: "qemu:///system".to_owned(),
        ..Seen::default()
    };
    change(&mut seen);
    seen
}

fn disk(chain: &[&str]) -> SeenDisk {
    SeenDisk {
        target: "vda".to_owned(),
        node: Some("node".to_owned()),
        bitmaps: Vec::new(),
        chain: chain.iter().map(PathBuf::from).collect(),
        write_protected: Vec::new(),
        commit: SeenCommit::None,
    }
}

fn findings(seen: &Seen) -> Vec<Finding> {
    diagnose(seen).0
}

fn kinds(seen: &Seen) -> Vec<FindingKind> {
    findings(seen).iter().map(|finding| finding.kind).collect()
}

fn repairs_of(seen: &Seen) -> Vec<Repair> {
    let remedies = findings(seen).into_iter().filter_map(|finding| match finding.remedy {
        Action::Repair(repair, _) => Some(repair),
        Action::Advice(_) => None,
    });
    remedies.collect()
}

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

#[test]
fn leftovers_are_removed_only_if_their_run_is_certainly_dead() {
    let left = || machine(|machine| machine.runs.push(RUN));
    let with = |run: Option<SeenRun>, processes: Option<Vec<&str>>| {
        let processes = processes.map(|lines| lines.into_iter().map(words).collect());
        seen(left(), |seen| {
            seen.runs.extend(run);
            seen.processes = processes;
        })
    };
    let dead = || Some(noted_run(Phase::Reading, Liveness::Dead));
    let removed = [Repair::RemoveRun(RUN), Repair::ForgetRun(RUN)];
    assert_eq!(repairs_of(&with(dead(), Some(vec![]))), removed);
    assert_eq!(repairs_of(&with(dead(), Some(vec!["holdfast backup db1"]))), removed);
    assert_eq!(repairs_of(&with(dead(), None)), removed);
    assert_eq!(repairs_of(&with(None, Some(vec![]))), removed[..1]);
    // The watchdog is about to clean up.
    let watchdog = "holdfast watchdog --connect x --machine web1 --run 7";
    for run in [dead(), None] {
        assert_eq!(kinds(&with(run, Some(vec![watchdog]))), []);
    }
    let other = "holdfast watchdog --connect x --machine web1 --run 77";
    assert_eq!(repairs_of(&with(dead(), Some(vec![other]))), removed);
    assert_eq!(kinds(&with(Some(noted_run(Phase::Reading, Liveness::Alive)), None)), []);
    // It is unknown whether the run is alive: the finding is reported, and nothing is repaired.
    let mut unattached = with(None, Some(vec!["/usr/bin/holdfast backup --all"]));
    unattached
        .unattached
        .push("process 12 (holdfast backup --all)".to_owned());
    let unknown = [
        (
            with(Some(noted_run(Phase::Reading, Liveness::Unknown)), Some(vec![])),
            "run the doctor there",
        ),
        (with(None, None), "run the doctor again as root"),
        (unattached, "process 12 (holdfast backup --all)"),
    ];
    for (seen, advice) in &unknown {
        assert_eq!(repairs_of(seen), []);
        let found = &findings(seen)[0];
        assert_eq!(found.kind, FindingKind::Remains);
        assert!(
            matches!(&found.remedy, Action::Advice(text) if text.contains(advice)),
            "{found:?}"
        );
    }
    // A process that works on another machine is not the owner.
    assert_eq!(repairs_of(&with(None, Some(vec!["holdfast backup db1"]))), removed[..1]);
}

#[test]
fn only_a_machine_that_a_dead_run_paused_is_resumed() {
    let paused = |run: SeenRun| {
        let machine = machine(|machine| machine.state = MachineState::Paused);
        seen(machine, |seen| seen.runs.push(run))
    };
    let dead = noted_run(Phase::Freezing, Liveness::Dead);
    assert_eq!(
        repairs_of(&paused(dead.clone())),
        [Repair::Resume, Repair::ForgetRun(RUN)]
    );
    assert!(findings(&paused(dead.clone()))[0].is_danger);
    // Runs that did not pause it: the machine was paused before; the run had resumed it; the UUID is another one; the
    // run is alive, or may be.
    let mut before = dead.clone();
    before.record.was_running = false;
    let mut other = dead;
    other.record.uuid = "u2".to_owned();
    let other_runs = [
        before,
        noted_run(Phase::Reading, Liveness::Dead),
        other,
        noted_run(Phase::Freezing, Liveness::Alive),
        noted_run(Phase::Freezing, Liveness::Unknown),
    ];
    for run in other_runs {
        assert!(!repairs_of(&paused(run)).contains(&Repair::Resume));
    }
}

#[test]
fn a_freeze_is_reported_with_its_owner_unless_the_run_is_alive() {
    let frozen = |run: Option<SeenRun>| {
        let machine = machine(|machine| machine.frozen = SeenFreeze::Frozen);
        seen(machine, |seen| seen.runs.extend(run))
    };
    let own = findings(&frozen(Some(noted_run(Phase::Freezing, Liveness::Dead))));
    assert!(own[0].what.contains("00000007") && own[0].since_ms == Some(5));
    let foreign = findings(&frozen(None));
    assert!(foreign[0].what.contains("no run of Holdfast froze them") && foreign[0].is_danger);
    assert!(matches!(foreign[0].remedy, Action::Repair(Repair::Thaw, _)));
    assert_eq!(kinds(&frozen(Some(noted_run(Phase::Freezing, Liveness::Alive)))), []);
    let silent = machine(|machine| machine.frozen = SeenFreeze::Silent("late".to_owned()));
    assert_eq!(repairs_of(&seen(silent, |_| ())), []);
}

#[test]
fn only_jobs_that_have_ended_are_dismissed() {
    let with = |status: &str, id: &str, has_failed_io| {
        let job = QemuJob {
            id: id.to_owned(),
            kind: "mirror".to_owned(),
            status: status.to_owned(),
            error: None,
            has_failed_io,
        };
        let machine = machine(|machine| {
            machine.jobs.push(job);
            machine.disks.push(disk(&["/i/a.qcow2"]));
        });
        seen(machine, |_| ())
    };
    let id = "copy-vda-libvirt-1-format";
    assert_eq!(
        repairs_of(&with("concluded", id, false)),
        [Repair::DismissJob(id.to_owned())]
    );
    for status in ["ready", "paused", "standby", "pending"] {
        let found = findings(&with(status, id, false));
        assert!(
            matches!(&found[0].remedy, Action::Advice(words) if words.contains("blockjob web1 vda --abort")),
            "{found:?}"
        );
    }
    assert_eq!(kinds(&with("running", id, false)), []);
    assert!(findings(&with("running", id, true))[0].is_danger);
    assert_eq!(kinds(&with("ready", "hf-00000007-memory", false)), []);
    // The job belongs to an instant restore; resuming the restore resumes the job.
    let mut restored = with("ready", id, false);
    restored.instants.push(SeenInstant {
        is_near: true,
        folder: "/i/.web1.holdfast".into(),
        machine: Some("web1".to_owned()),
        snapshot: None,
        owner: Some("web1".to_owned()),
        since_ms: None,
        state: Some(InstantState {
            is_attended: false,
            has_server: true,
            has_begun: true,
        }),
    });
    assert_eq!(kinds(&restored), [FindingKind::InstantRestore]);
}

#[test]
fn only_unneeded_bitmaps_of_holdfast_are_removed() {
    let bitmap = |name: &str, is_inconsistent, is_busy| Bitmap {
        name: name.to_owned(),
        granularity_bytes: 65_536,
        dirty_bytes: 0,
        is_recording: true,
        is_persistent: true,
        is_inconsistent,
        is_busy,
    };
    let bitmaps = vec![
        bitmap("holdfast-0123abcd-00000001", false, false),
        bitmap("holdfast-0123abcd-00000002", false, false),
        bitmap("holdfast-0123abcd-00000003", false, true),
        bitmap("holdfast-99999999-00000004", false, false),
        bitmap("holdfast-99999999-00000005", true, false),
        bitmap("holdfast-mine", true, false),
        bitmap("checkpoint", true, false),
    ];
    let with = |repository: Option<SeenRepository>, runs: Vec<SeenRun>| {
        let mut disk = disk(&["/i/a.qcow2"]);
        disk.bitmaps = bitmaps.clone();
        let machine = machine(|machine| machine.disks.push(disk));
        seen(machine, |seen| {
            seen.repository = repository;
            seen.runs = runs;
        })
    };
    let names = |seen: &Seen| -> Vec<String> {
        let removed = repairs_of(seen).into_iter().filter_map(|repair| match repair {
            Repair::RemoveBitmap { name, .. } => Some(name[9..].to_owned()),
            _ => None,
        });
        removed.collect()
    };
    let repository = || {
        Some(SeenRepository {
            id: "0123abcd45".to_owned(),
            needed: vec!["holdfast-0123abcd-00000002".to_owned()],
            ..SeenRepository::default()
        })
    };
    assert_eq!(names(&with(None, vec![])), ["99999999-00000005"]);
    assert_eq!(
        names(&with(repository(), vec![])),
        ["0123abcd-00000001", "99999999-00000005"]
    );
    // The next bitmap of a running backup is not in a snapshot yet.
    let at_work = with(repository(), vec![noted_run(Phase::Reading, Liveness::Alive)]);
    assert_eq!(names(&at_work), [""; 0]);
    let found = findings(&with(None, vec![]));
    assert!(
        found
            .iter()
            .any(|found| found.what.contains("bitmap checkpoint") && matches!(found.remedy, Action::Advice(_)))
    );
}

fn commits(
    chain: &[&str],
    change: impl FnOnce(&mut SeenMachine, &mut Vec<(String, Vec<PathBuf>)>),
) -> (Seen, Option<Repair>) {
    let mut others = Vec::new();
    let machine = machine(|machine| {
        machine.disks.push(disk(chain));
        change(machine, &mut others);
    });
    let seen = seen(machine, |seen| seen.chains.extend(others));
    let commit = repairs_of(&seen)
        .into_iter()
        .find(|repair| matches!(repair, Repair::Commit { .. }));
    (seen, commit)
}

fn commit_of(overlays: &[&str], base: &str) -> Repair {
    Repair::Commit {
        disk: "vda".to_owned(),
        overlays: overlays.iter().map(PathBuf::from).collect(),
        base: base.into(),
    }
}

#[test]
fn forgotten_overlays_are_committed_down_to_a_known_or_shared_image() {
    let (three, two) = (["/i/a.s2", "/i/a.s1", "/i/a.qcow2"], ["/i/a.s1", "/i/a.qcow2"]);
    assert_eq!(commits(&three, |_, _| ()).1, Some(commit_of(&three[..2], three[2])));
    assert_eq!(commits(&["/i/a.qcow2"], |_, _| ()).1, None);
    // libvirt knows the lower overlay as a snapshot, or as the image of the disk itself.
    let known = |path: &'static str| {
        commits(&three, move |machine, _| {
            machine.snapshot_files = Some(vec![path.into()]);
        })
        .1
    };
    assert_eq!(known("/i/a.s1"), Some(commit_of(&three[..1], three[1])));
    assert_eq!(known("/i/a.s2"), None);
    // A base that another machine uses, even one that is shut off, is not written to; neither is a shared overlay.
    let shared = |chain: &'static [&'static str], others: &'static [&'static str]| {
        commits(chain, move |_, all| {
            all.push(("db1".to_owned(), others.iter().map(PathBuf::from).collect()));
        })
    };
    let (seen, commit) = shared(&["/i/a.s1", "/i/a.qcow2"], &["/i/db1.qcow2", "/i/a.qcow2"]);
    assert_eq!((commit, kinds(&seen)), (None, vec![]));
    assert!(diagnose(&seen).1[0].contains("template"));
    let (_, commit) = shared(&["/i/a.s2", "/i/a.s1", "/i/a.qcow2"], &["/i/db1", "/i/a.qcow2"]);
    assert_eq!(commit, Some(commit_of(&three[..1], three[1])));
    // An image below a template is not written to either.
    let (_, commit) = shared(&["/i/a.s2", "/i/a.s1", "/i/a.qcow2"], &["/i/a.s1", "/i/a.qcow2"]);
    assert_eq!(commit, None);
    let is_reported = |seen: &Seen| kinds(seen) == [FindingKind::Overlay];
    // The names do not show a snapshot overlay: a clone of a template, a base in another folder, another image name. The user decides.
    for chain in [
        ["/i/web1.qcow2", "/i/debian.qcow2"],
        ["/i/a.s1", "/templates/a.qcow2"],
        ["/i/ab.qcow2", "/i/a.qcow2"],
    ] {
        let (seen, commit) = commits(&chain, |_, _| ());
        assert!(commit.is_none() && is_reported(&seen), "{chain:?}");
    }
    // A write-protected base is a template.
    let (seen, commit) = commits(&two, |machine, _| machine.disks[0].write_protected.push(two[1].into()));
    assert!(commit.is_none() && kinds(&seen).is_empty());
    for state in [MachineState::ShutOff, MachineState::Paused, MachineState::Between] {
        let (seen, commit) = commits(&two, |machine, _| machine.state = state);
        assert!(commit.is_none() && is_reported(&seen));
    }
    let (_, commit) = commits(&two, |machine, _| machine.runs.push(RUN));
    assert_eq!(commit, None);
    let (_, commit) = commits(&two, |machine, _| machine.snapshot_files = None);
    assert_eq!(commit, None);
}

#[test]
fn a_complete_commit_is_finished_only_for_a_dead_doctor() {
    let job = || QemuJob {
        id: "commit-vda-libvirt-2-format".to_owned(),
        kind: "commit".to_owned(),
        status: "ready".to_owned(),
        error: None,
        has_failed_io: false,
    };
    let with = |run: Option<SeenRun>, commit| {
        let mut disk = disk(&["/i/a.s1", "/i/a.qcow2"]);
        disk.commit = commit;
        let machine = machine(|machine| {
            machine.disks.push(disk);
            machine.jobs.push(job());
        });
        seen(machine, |seen| seen.runs.extend(run))
    };
    let dead = || Some(noted_run(Phase::Committing, Liveness::Dead));
    let commit = commit_of(&["/i/a.s1"], "/i/a.qcow2");
    assert_eq!(
        repairs_of(&with(dead(), SeenCommit::Complete)),
        [commit, Repair::ForgetRun(RUN)]
    );
    assert_eq!(repairs_of(&with(None, SeenCommit::Complete)), []);
    assert_eq!(
        repairs_of(&with(
            Some(noted_run(Phase::Committing, Liveness::Alive)),
            SeenCommit::Complete
        )),
        []
    );
    // The commit is not complete yet: the note that Holdfast began it is kept.
    assert_eq!(repairs_of(&with(dead(), SeenCommit::OnItsWay)), []);
}

#[test]
fn notes_of_missing_machines_are_removed() {
    let of = |machine: &str, uri: &str| {
        let mut run = noted_run(Phase::Reading, Liveness::Dead);
        run.record.machine = machine.to_owned();
        run.record.way[1] = uri.to_owned();
        run
    };
    let with = |run: SeenRun, everything| {
        seen(machine(|_| ()), |seen| {
            seen.runs.push(run);
            seen.everything = everything;
            seen.unreachable = vec![("mute".to_owned(), "it is busy".to_owned())];
        })
    };
    let here = "qemu:///system";
    assert_eq!(repairs_of(&with(of("gone", here), true)), [Repair::ForgetRun(RUN)]);
    assert_eq!(repairs_of(&with(of("gone", here), false)), []);
    assert_eq!(
        repairs_of(&with(of("gone", "qmp:/run/gone"), true)),
        [Repair::ForgetRun(RUN)]
    );
    assert_eq!(repairs_of(&with(of("mute", here), true)), []);
    let elsewhere = findings(&with(of("gone", "qemu:///session"), true));
    let last = elsewhere.last().unwrap();
    assert!(matches!(&last.remedy, Action::Advice(words) if words.contains("--connect qemu:///session")));
}
