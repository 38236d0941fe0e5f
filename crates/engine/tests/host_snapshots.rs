//! The consistency that host snapshots record for machines that change during the snapshot, with a fake hypervisor and
//! a fake ZFS.

#![allow(clippy::unwrap_used, reason = "all of it is test")]

use std::collections::BTreeSet;
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_engine::{
    Error, GuestRequest, HostSnapshotReport, HostSnapshotRequest, Interrupt, Job, MachinePlaces, NamedSnapshotSet,
    NoProgress, Providers, Quiesce, SetId, Subject, take_host_snapshots,
};
use holdfast_host::provider::{Dataset, HostSnapshotScope, ProviderKind};
use holdfast_host::qmp::{Monitor, QmpCommand, Result as QmpResult};
use holdfast_host::{
    Answer, BackupMark, Description, DiskKind, DiskSource, Error as HostError, Machine, MachineDisk, MachineState,
    MachineSummary, Result as HostResult, ToolError, Tools,
};
use serde_json::{Value, json};

const SECOND: Duration = Duration::from_secs(1);

/// A clock that advances only when the test sets it.
#[derive(Default)]
struct Time(Mutex<Duration>);

impl Time {
    fn reach(&self, after: Duration) {
        let mut now = self.0.lock().unwrap();
        *now = after.max(*now);
    }
}

impl Clock for Time {
    fn now(&self) -> Duration {
        *self.0.lock().unwrap()
    }

    fn sleep(&self, duration: Duration) {
        self.reach(self.now() + duration);
    }
}

/// A ZFS that remembers the snapshots that were taken.
#[derive(Default)]
struct FakeZfs(Mutex<BTreeSet<String>>);

impl Tools for FakeZfs {
    fn ask(&self, program: &str, words: &[&str]) -> Result<Answer, ToolError> {
        if program == "zpool" {
            return Ok(Answer {
                is_success: true,
                output: format!("{}\t960M\t1%\tONLINE\t950M\n", words.last().unwrap()),
                stderr: String::new(),
            });
        }
        let mut present = self.0.lock().unwrap();
        let names = words
            .iter()
            .filter(|word| word.contains('@'))
            .map(|word| (*word).to_owned());
        let names: Vec<String> = names
            .filter(|name| !name.starts_with('{') && !name.contains('='))
            .collect();
        let is_there = names.iter().all(|name| present.contains(name));
        let is_success = match words[0] {
            "snapshot" => {
                present.extend(names);
                true
            }
            "destroy" => names.iter().all(|name| present.remove(name)),
            "get" => is_there,
            _ => true,
        };
        Ok(Answer {
            is_success,
            output: String::new(),
            stderr: "dataset does not exist".to_owned(),
        })
    }
}

/// How an agent answers a command.
struct Reply {
    delay: Duration,
    /// All agents whose answers arrive at the same time.
    together: Arc<Barrier>,
}

impl Reply {
    fn at_once() -> Self {
        Self::after_ms(0, &Arc::new(Barrier::new(1)))
    }

    fn after_ms(delay_ms: u64, together: &Arc<Barrier>) -> Self {
        Self {
            delay: Duration::from_millis(delay_ms),
            together: Arc::clone(together),
        }
    }
}

/// A fake machine whose agent answers with a delay.
struct Fake {
    description: Mutex<Description>,
    /// The commands to its QEMU that change something.
    commands: Mutex<Vec<String>>,
    runs: Mutex<bool>,
    time: Arc<Time>,
    /// The reply of its agent to the status query.
    status: Reply,
    /// The reply of its agent to the request to freeze.
    freeze: Reply,
}

impl Fake {
    fn new(name: &str, state: MachineState) -> Self {
        let disk = MachineDisk {
            target: "vda".to_owned(),
            kind: DiskKind::Disk,
            source: DiskSource::File(format!("/tank/{name}").into()),
            format: Some("raw".to_owned()),
            is_read_only: false,
            is_shared: false,
            alias: None,
        };
        Self {
            description: Mutex::new(Description {
                summary: MachineSummary {
                    name: name.to_owned(),
                    uuid: name.to_owned(),
                    state,
                },
                disks: vec![disk],
                nvram: None,
                tpm: None,
                has_agent_channel: false,
                mark: BackupMark::default(),
            }),
            commands: Mutex::default(),
            runs: Mutex::new(state == MachineState::Running),
            time: Arc::default(),
            status: Reply::at_once(),
            freeze: Reply::at_once(),
        }
    }

    fn becomes(&self, state: MachineState) {
        self.description.lock().unwrap().summary.state = state;
        *self.runs.lock().unwrap() = state == MachineState::Running;
    }

    /// Answers after a delay, together with all others.
    fn answer(&self, reply: &Reply, deadline: Duration, answer: &Value) -> HostResult<String> {
        let start = self.time.now();
        reply.together.wait();
        self.time.reach(start + reply.delay.min(deadline));
        // The time is read only after all have answered.
        reply.together.wait();
        if reply.delay > deadline {
            return Err(HostError::Refused {
                action: "ask the guest agent of",
                machine: self.name().to_owned(),
                reason: "it did not answer in time".to_owned(),
            });
        }
        Ok(json!({ "return": answer }).to_string())
    }
}

impl Monitor for Fake {
    fn execute(&self, command: &QmpCommand) -> QmpResult<Value> {
        let mut runs = self.runs.lock().unwrap();
        match command.name {
            "query-status" => return Ok(json!({ "running": *runs })),
            "stop" => *runs = false,
            "cont" => *runs = true,
            _ => {}
        }
        self.commands.lock().unwrap().push(command.name.to_owned());
        Ok(json!({}))
    }
}

impl Machine for Fake {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn describe(&self) -> HostResult<Description> {
        Ok(self.description.lock().unwrap().clone())
    }

    fn size_of(&self, _disk: &MachineDisk) -> Option<u64> {
        None
    }

    fn configuration(&self) -> HostResult<Vec<(String, Vec<u8>)>> {
        Ok(Vec::new())
    }

    fn monitor(&self) -> &dyn Monitor {
        self
    }

    fn ask_agent(&self, command: &str, deadline: Duration) -> HostResult<String> {
        match () {
            () if command.contains("status") => self.answer(&self.status, deadline, &json!("thawed")),
            () if command.contains("thaw") => Ok(json!({ "return": 1 }).to_string()),
            () => self.answer(&self.freeze, deadline, &json!(1)),
        }
    }
}

/// A host with datasets and a manual clock.
struct World {
    zfs: Arc<FakeZfs>,
    time: Arc<Time>,
    /// Snapshots in two pools are not of one point in time.
    datasets: &'static [&'static str],
}

const ONE: &[&str] = &["tank/vm"];
const TWO: &[&str] = &["tank/vm", "pond/vm"];

impl World {
    fn new(datasets: &'static [&'static str]) -> Self {
        Self {
            zfs: Arc::default(),
            time: Arc::default(),
            datasets,
        }
    }

    fn take(
        &self,
        machines: &[Fake],
        (subject, quiesce): (Subject<'_>, Quiesce),
        meanwhile: &mut dyn FnMut(),
    ) -> Result<HostSnapshotReport, Error> {
        let tools: Arc<dyn Tools> = Arc::clone(&self.zfs) as _;
        let providers = Providers::new(&tools, "/nowhere".into(), Arc::clone(&self.time) as _);
        let wanted = self.datasets.iter().map(|name| {
            HostSnapshotScope::all_of(Dataset {
                provider: ProviderKind::Zfs,
                name: (*name).to_owned(),
            })
        });
        let guests = machines.iter().zip(1..).map(|(machine, run)| GuestRequest {
            machine,
            description: machine.describe().unwrap(),
            quiesce,
            places: MachinePlaces::default(),
            has_to_stop: false,
            memory: None,
            watchdog: None,
            journal: None,
            run,
        });
        let request = HostSnapshotRequest {
            providers: &providers,
            cuts: vec![NamedSnapshotSet {
                name: "a".to_owned(),
                wanted: wanted.collect(),
            }],
            guests: guests.collect(),
            subject,
            now: &|| "2026-11-22T16:45:00Z".parse().unwrap(),
            program: "test".to_owned(),
            set: SetId(1),
            states: None,
        };
        let interrupt = Interrupt::new();
        let job = Job {
            progress: &NoProgress,
            interrupt: &interrupt,
            clock: &*self.time,
            thread_count: 1,
        };
        take_host_snapshots(&request, meanwhile, job)
    }

    fn snapshot_count(&self) -> usize {
        self.zfs.0.lock().unwrap().len()
    }
}

fn no_machines(_: &[HostSnapshotScope]) -> Vec<Description> {
    Vec::new()
}

const DATASETS: (Subject<'_>, Quiesce) = (Subject::Datasets(&no_machines), Quiesce::Try);

#[test]
fn a_machine_started_during_a_snapshot_is_not_recorded_as_shut_off() {
    for (before, after) in [
        (MachineState::ShutOff, MachineState::Running),
        (MachineState::ShutOff, MachineState::Paused),
        (MachineState::Paused, MachineState::Running),
    ] {
        let machine = [Fake::new("web1", before)];
        let world = World::new(ONE);
        let report = world
            .take(&machine, DATASETS, &mut || machine[0].becomes(after))
            .unwrap();
        assert_eq!(report.guests[0].consistency(), "crash");
        assert_eq!(report.record.consistency, "crash");
        assert_eq!(
            *machine[0].commands.lock().unwrap(),
            [""; 0],
            "Holdfast does not resume it"
        );

        // Two snapshots, taken one after the other, have its disks at different points in time.
        machine[0].becomes(before);
        let world = World::new(TWO);
        let in_two_pools = world.take(&machine, DATASETS, &mut || machine[0].becomes(after));
        if after == MachineState::Running {
            assert!(
                in_two_pools
                    .unwrap_err()
                    .to_string()
                    .contains("neither paused nor frozen")
            );
            assert_eq!(world.snapshot_count(), 0);
        }
    }
}

#[test]
fn machines_that_stay_off_are_recorded_as_shut_off() {
    let machines = [
        Fake::new("web1", MachineState::ShutOff),
        Fake::new("web2", MachineState::ShutOff),
    ];
    let world = World::new(TWO);
    let report = world.take(&machines, DATASETS, &mut || ()).unwrap();
    assert_eq!(report.record.consistency, "shut off");
    assert_eq!(world.snapshot_count(), 2);
}

#[test]
fn a_disk_moved_during_a_snapshot_is_not_claimed() {
    let machine = [Fake::new("web1", MachineState::Running)];
    let mut round = 0;
    let mut moves = || {
        round += 1;
        machine[0].description.lock().unwrap().disks[0].source = DiskSource::File(format!("/pond/{round}").into());
    };
    let world = World::new(ONE);
    let refused = world.take(&machine, (Subject::Machines, Quiesce::Off), &mut moves);
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("vda was moved") && text.contains("/pond/1"), "{text}");
    assert_eq!(world.snapshot_count(), 0);
    let report = world.take(&machine, DATASETS, &mut moves).unwrap();
    assert_eq!(report.record.consistency, "crash");
    assert_eq!(world.snapshot_count(), 1);
}

#[test]
fn a_machine_that_appears_during_a_snapshot_is_in_the_record() {
    let known = [Fake::new("web1", MachineState::ShutOff)];
    let newcomer = Fake::new("web2", MachineState::Running).describe().unwrap();
    let found = |wanted: &[HostSnapshotScope]| {
        assert_eq!(wanted.len(), 1);
        vec![known[0].describe().unwrap(), newcomer.clone()]
    };
    let subject = (Subject::Datasets(&found), Quiesce::Try);
    let report = World::new(ONE).take(&known, subject, &mut || ()).unwrap();
    assert_eq!(report.record.consistency, "crash");
    assert_eq!(report.record.machines, ["web1", "web2"]);
}

#[test]
fn a_machine_paused_by_its_owner_stays_paused() {
    // Paused by its owner after the inspection, and before it.
    for state in [MachineState::Running, MachineState::Paused] {
        let machine = [Fake::new("web1", state)];
        *machine[0].runs.lock().unwrap() = false;
        World::new(TWO).take(&machine, DATASETS, &mut || ()).unwrap();
        assert_eq!(*machine[0].commands.lock().unwrap(), [""; 0]);
        assert!(!*machine[0].runs.lock().unwrap());
    }
    let machine = [Fake::new("web1", MachineState::Running)];
    World::new(TWO).take(&machine, DATASETS, &mut || ()).unwrap();
    assert_eq!(*machine[0].commands.lock().unwrap(), ["stop", "cont"]);
}

/// A machine that is switched off during the pause cannot be resumed, which does not prevent the snapshot.
#[test]
fn a_machine_switched_off_during_the_pause_is_of_one_point_in_time() {
    let machine = [Fake::new("web1", MachineState::Running)];
    let world = World::new(TWO);
    let report = world.take(&machine, DATASETS, &mut || machine[0].becomes(MachineState::ShutOff));
    assert_eq!(report.unwrap().record.consistency, "crash");
    assert_eq!(world.snapshot_count(), 2);
}

/// Machines whose agents have these delays in milliseconds for their status and for the freeze.
fn with_agents(time: &Arc<Time>, delays: &[(u64, u64)]) -> Vec<Fake> {
    // An agent that does not report its status is not asked to freeze.
    let answer_count = delays.iter().filter(|(status, _)| *status < 5000).count();
    let queried = Arc::new(Barrier::new(delays.len()));
    let frozen = Arc::new(Barrier::new(answer_count));
    let slow = |(number, (status, freeze)): (usize, &(u64, u64))| {
        let mut machine = Fake::new(&format!("web{number}"), MachineState::Running);
        machine.description.lock().unwrap().has_agent_channel = true;
        machine.time = Arc::clone(time);
        machine.status = Reply::after_ms(*status, &queried);
        machine.freeze = Reply::after_ms(*freeze, &frozen);
        machine
    };
    delays.iter().enumerate().map(slow).collect()
}

/// No guest is frozen during the status queries, and all freeze in the time of one.
#[test]
fn many_slow_agents_take_the_time_of_one() {
    let world = World::new(ONE);
    let machines = with_agents(
        &world.time,
        &[(4900, 4900), (4900, 10), (0, 4900), (10, 0), (4900, 4900), (3000, 3000)],
    );
    let report = world.take(&machines, DATASETS, &mut || ()).unwrap();
    assert!(
        report.guests.iter().all(|guest| guest.consistency() == "file system"),
        "{report:?}"
    );
    assert!(world.time.now() < 10 * SECOND, "{:?}", world.time.now());
    assert!(report.record.frozen_ms < 5000, "{:?}", report.record);
}

/// A guest that does not freeze in time is recorded as crash-consistent; the frozen guests are not kept waiting until
/// the watchdog thaws them.
#[test]
fn a_slow_agent_does_not_prolong_the_freeze_of_other_guests() {
    let world = World::new(ONE);
    let machines = with_agents(&world.time, &[(4900, 20), (0, 9000), (4900, 4000), (9000, 0)]);
    let report = world.take(&machines, DATASETS, &mut || ()).unwrap();
    let claims: Vec<&str> = report
        .guests
        .iter()
        .map(holdfast_engine::GuestReport::consistency)
        .collect();
    assert_eq!(claims, ["file system", "crash", "file system", "crash"], "{report:?}");
    assert_eq!(report.record.consistency, "crash");
    assert!(report.record.frozen_ms <= 5000, "{:?}", report.record);
    assert!(world.time.now() <= 10 * SECOND, "{:?}", world.time.now());
    assert_eq!(world.snapshot_count(), 1);
}

#[test]
fn a_slow_agent_that_is_required_to_freeze_prevents_the_snapshot() {
    let world = World::new(ONE);
    let machines = with_agents(&world.time, &[(0, 20), (0, 9000)]);
    let refused = world.take(
        &machines,
        (Subject::Datasets(&no_machines), Quiesce::Require),
        &mut || (),
    );
    assert!(matches!(refused.unwrap_err(), Error::NotQuiesced { .. }));
    assert_eq!(world.snapshot_count(), 0);
    assert!(world.time.now() <= 6 * SECOND, "{:?}", world.time.now());
}

/// The guest thawed by itself during the snapshot, so the required freeze was not achieved.
#[test]
fn a_required_freeze_fails_if_the_guest_thaws_by_itself() {
    let world = World::new(ONE);
    let machines = with_agents(&world.time, &[(0, 20)]);
    let mut late = || world.time.sleep(20 * SECOND);
    let refused = world.take(
        &machines,
        (Subject::Datasets(&no_machines), Quiesce::Require),
        &mut late,
    );
    assert!(refused.unwrap_err().to_string().contains("frozen too long"));
    assert_eq!(world.snapshot_count(), 0);
}
