//! A QEMU without a management layer, by its own monitor socket.

use std::sync::Arc;
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use holdfast_host::qemu::{PointInTime, QemuVersion, disks, runs_in};
use holdfast_host::qmp::{Monitor as _, MonitorError, QmpCommand, QueuedSocket};
use holdfast_host::{
    BareQemu, Decision, Description, DiskChoice, DiskKind, DiskSource, Error, Hypervisor as _, MachineEnd,
    MachineState, agent,
};
use rustix::process::{Signal, kill_process};
use serde_json::Value;

use holdfast_test_kit::qemu::QemuLab;
use holdfast_test_kit::run;

/// A monitor for the backup of the machine, besides that of the test.
const MONITOR: [&str; 2] = ["-qmp", "unix:{}/own,server=on,wait=off"];
const AGENT: [&str; 6] = [
    "-device",
    "virtio-serial",
    "-chardev",
    "socket,path={}/agent,server=on,wait=off,id=channel",
    "-device",
    "virtserialport,chardev=channel,name=org.qemu.guest_agent.0",
];
const PATIENCE: Duration = Duration::from_secs(10);

fn bare(lab: &QemuLab) -> BareQemu {
    BareQemu::connect(&lab.path("own"), Arc::new(SystemClock::new())).unwrap()
}

fn targets(description: &Description) -> Vec<&str> {
    description.disks.iter().map(|disk| &disk.target[..]).collect()
}

#[test]
fn a_machine_is_described_by_its_monitor() {
    let words = [
        &MONITOR[..],
        &AGENT,
        &["-name", "web1", "-uuid", "6b1e0d0c-6f0f-4d4e-9d2a-4f2b6d4b8c11"],
        &[
            "-drive",
            "if=none,id=shared,format=raw,file={}/disk1,file.locking=off,readonly=on",
        ],
        &["-device", "virtio-blk-pci,drive=shared,share-rw=on"],
        &["-device", "virtio-scsi-pci", "-device", "scsi-cd,id=tray"],
        &[
            "-drive",
            "if=none,id=root,format=qcow2,file={}/disk0,file.locking=off,readonly=on",
        ],
        &["-device", "scsi-hd,drive=root,id=scsi"],
    ];
    let lab = QemuLab::with(&["qcow2", "raw"], &words.concat());
    let qemu = bare(&lab);
    let summary = &qemu.machines().unwrap()[0];
    assert_eq!(
        (&summary.name[..], &summary.uuid[..], summary.state),
        ("web1", "6b1e0d0c-6f0f-4d4e-9d2a-4f2b6d4b8c11", MachineState::Running)
    );
    assert!(qemu.machine("web1").is_ok() && qemu.machine(&summary.uuid).is_ok());
    assert!(matches!(qemu.machine("web2"), Err(Error::NoSuchMachine { .. })));

    let machine = qemu.only_machine();
    let description = machine.describe().unwrap();
    assert_eq!(description.summary, *summary);
    let mut names = targets(&description);
    names.sort_unstable();
    assert_eq!(names, ["disk0", "disk1", "scsi", "shared", "tray"]);
    let disk = |name: &str| {
        let mut disks = description.disks.iter();
        disks.find(|disk| disk.target == name).unwrap()
    };
    assert_eq!(disk("disk0").source, DiskSource::File(lab.path("disk0")));
    assert_eq!(disk("disk0").format.as_deref(), Some("qcow2"));
    assert!(disk("shared").is_shared && disk("shared").is_read_only && !disk("disk0").is_shared);
    assert_eq!(
        (disk("tray").kind, &disk("tray").source),
        (DiskKind::Cdrom, &DiskSource::Empty)
    );
    let decisions = description.decide(&DiskChoice::default());
    let taken = description.disks.iter().zip(decisions);
    let taken: Vec<_> = taken.filter(|(_, decision)| *decision == Decision::Take).collect();
    assert_eq!(taken.len(), 2);
    // Each disk is found in QEMU's own list by its alias in the description.
    let present = disks(machine.monitor()).unwrap();
    for disk in description.disks.iter().filter(|disk| disk.source != DiskSource::Empty) {
        let its = present
            .iter()
            .filter(|device| device.is_called(disk.alias.as_deref().unwrap()));
        assert_eq!(its.count(), 1, "{disk:?}");
    }
    assert!(description.has_agent_channel && description.tpm.is_none() && description.nvram.is_none());
    assert_eq!(qemu.agent_socket(), Some(lab.path("agent").as_path()));

    let files = machine.configuration().unwrap();
    let file = |name: &str| -> Value {
        let (_, bytes) = files.iter().find(|(found, _)| found == name).unwrap();
        serde_json::from_slice(bytes).unwrap()
    };
    let words = file("qemu-command-line.json");
    let words: Vec<&str> = words
        .as_array()
        .unwrap()
        .iter()
        .map(|word| word.as_str().unwrap())
        .collect();
    assert!(
        words[0].contains("qemu-system-x86_64") && words.contains(&"-uuid"),
        "{words:?}"
    );
    assert_eq!(file("machine.json")["name"], "web1");
    let version = QemuVersion::query(&*lab.monitor).unwrap();
    assert_eq!(file("machine.json")["qemu"]["qemu"]["major"], version.major);
}

/// The firmware has two flash drives, and writes to one of them.
#[test]
fn firmware_drives_are_no_disks_and_a_pause_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    for name in ["code", "vars"] {
        run("qemu-img", &["create", "-q", "-f", "raw", &path(name), "256K"]);
    }
    let flash = |name: &str, options: &str| format!("if=pflash,format=raw,{options}file={}", path(name));
    let (code, vars) = (flash("code", "readonly=on,"), flash("vars", ""));
    let words = [
        "-machine",
        "q35",
        "-S",
        "-drive",
        &code,
        "-drive",
        &vars,
        "-drive",
        "format=qcow2,file={}/disk9",
    ];
    let words = [&MONITOR[..], &words[..words.len() - 2]].concat();
    let lab = QemuLab::with(&["qcow2"], &words);
    let qemu = bare(&lab);
    let description = qemu.only_machine().describe().unwrap();
    // Without a name it is identified by its socket.
    assert_eq!(
        (&description.summary.name[..], description.summary.state),
        ("own", MachineState::Paused)
    );
    assert_eq!(targets(&description), ["disk0"]);
    assert_eq!(description.nvram, Some(path("vars").into()));
    assert!(qemu.agent_socket().is_none());
    let answer = qemu.only_machine().ask_agent("{}", Duration::from_secs(1));
    assert!(matches!(answer, Err(Error::Refused { .. })), "{answer:?}");
}

#[test]
fn a_busy_monitor_is_reported_and_serves_the_queue_in_order() {
    let lab = QemuLab::with(&["raw"], &MONITOR);
    let qemu = bare(&lab);
    let clock = Arc::new(SystemClock::new());
    let Err(error) = BareQemu::connect(&lab.path("own"), clock.clone()) else {
        panic!("the monitor serves one client at a time")
    };
    assert!(
        matches!(&error, Error::MonitorInUse { address, .. } if address.ends_with("own")),
        "{error}"
    );
    let stand_in = BareQemu::stand_in(&lab.path("own"), "web1", None, clock.clone()).unwrap();
    let status = || {
        stand_in
            .monitor()
            .execute(&QmpCommand::new("query-status", Value::Null))
    };
    assert!(matches!(status(), Err(MonitorError::TimedOut { .. })));
    drop(qemu);
    assert_eq!(status().unwrap()["running"], true);
    assert_eq!(stand_in.describe().unwrap().disks.len(), 1);
    // A connection that QEMU dropped is opened again.
    drop(stand_in);
    let queued = QueuedSocket::connect(&lab.path("own")).unwrap();
    queued.execute(&QmpCommand::new("query-status", Value::Null)).unwrap();
}

/// Objects of a run in QEMU are removed by the next client in the queue when the backup's connection ends.
#[test]
fn the_next_client_in_the_queue_cleans_up() {
    let lab = QemuLab::with(&["qcow2"], &MONITOR);
    let before = lab.everything();
    let qemu = bare(&lab);
    let machine = qemu.only_machine();
    let stand_in = BareQemu::stand_in(&lab.path("own"), "web1", None, Arc::new(SystemClock::new())).unwrap();
    let (request, _socket) = lab.request(lab.directory.path());
    let run = request.run;
    let cut = PointInTime::make(machine.monitor(), &lab.clock, request, &mut |_| ()).unwrap();
    machine
        .monitor()
        .execute(&QmpCommand::new("stop", Value::Null))
        .unwrap();
    // Dropped as by a killed process: only its connection ends.
    std::mem::drop(cut);
    drop((machine, qemu));
    let cont = QmpCommand::new("cont", Value::Null);
    stand_in.monitor().execute(&cont).unwrap();
    assert_eq!(
        runs_in(stand_in.monitor()).unwrap().into_iter().collect::<Vec<_>>(),
        [run]
    );
    holdfast_host::qemu::remove_run(stand_in.monitor(), &lab.clock, run).unwrap();
    assert_eq!(lab.everything(), before);
}

#[test]
fn the_query_of_a_missing_agent_times_out() {
    let lab = QemuLab::with(&["raw"], &[&MONITOR[..], &AGENT].concat());
    let qemu = bare(&lab);
    let machine = qemu.only_machine();
    let start = lab.clock.now();
    let answer = agent::freeze(&*machine, Duration::from_millis(300));
    let Err(Error::Refused { reason, .. }) = answer else {
        panic!("{answer:?}")
    };
    assert!(reason.contains("did not answer within 300 ms"), "{reason}");
    assert!(lab.clock.now().saturating_sub(start) < PATIENCE);
}

/// A paused machine still exists; one whose process is gone has ended.
#[test]
fn a_qemu_without_a_process_counts_as_ended() {
    let lab = QemuLab::with(&["raw"], &MONITOR);
    let machine = bare(&lab).only_machine();
    assert_eq!(machine.ended(), None);
    lab.execute("stop", Value::Null);
    assert_eq!(machine.ended(), None);
    kill_process(lab.process_id(), Signal::ABORT).unwrap();
    while machine.ended().is_none() {
        lab.clock.sleep(Duration::from_millis(20));
    }
    assert_eq!(machine.ended(), Some(MachineEnd::Gone));
}
