//! The model of QEMU into which other tests inject faults answers as a real QEMU does: both get the same commands in
//! sequence.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use holdfast_block::SystemClock;
use holdfast_host::qemu::{
    DiskRequest, PausePolicy, PointInTime, PointInTimeRequest, RunId, TrackingRequest, WriteTracker, disks, remove_run,
    runs_in,
};
use holdfast_host::qmp::{Monitor, MonitorError, QmpCommand, QmpSocket, Result};
use holdfast_qemu_model::{ModelDisk, ModelFormat, ModelMachine, QemuModel};
use serde_json::{Value, json};

use holdfast_test_kit::qemu::{DISK_BYTES, QemuLab, scratch};
use holdfast_test_kit::run;

const DEVICE: [&str; 2] = [
    "/machine/peripheral/disk0/virtio-backend",
    "/machine/peripheral/disk1/virtio-backend",
];

/// The same machine in QEMU and in the model, with one qcow2 and one raw disk.
struct RealAndModel {
    lab: QemuLab,
    folder: tempfile::TempDir,
    model: QemuModel,
    monitor: QmpSocket,
}

impl RealAndModel {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let formats = [("qcow2", ModelFormat::Qcow2), ("raw", ModelFormat::Raw)];
        let disks = formats.map(|(name, format)| {
            let image = folder.path().join(name);
            run(
                "qemu-img",
                &["create", "-q", "-f", name, image.to_str().unwrap(), "16M"],
            );
            ModelDisk {
                format,
                image,
                size_bytes: DISK_BYTES,
                iothread: None,
            }
        });
        let lab = QemuLab::new(&["qcow2", "raw"]);
        let reported = lab.execute("query-version", Value::Null)["qemu"].clone();
        let socket = folder.path().join("qmp");
        let machine = ModelMachine {
            // The commands depend on it.
            version: ["major", "minor", "micro"].map(|part| reported[part].as_u64().unwrap()),
            disks: disks.to_vec(),
            nvram: None,
        };
        let model = QemuModel::start(&socket, &machine).unwrap();
        Self {
            lab,
            monitor: QmpSocket::connect(&socket).unwrap(),
            folder,
            model,
        }
    }

    /// Does the same to both, and compares their answers and their state afterwards.
    fn both(&self, step: &str, act: impl Fn(&dyn Monitor, &Path)) {
        let real = Answers::of(&*self.lab.monitor, |monitor| act(monitor, self.lab.directory.path()));
        let model = Answers::of(&self.monitor, |monitor| act(monitor, self.folder.path()));
        let differs = real.iter().zip(&model).find(|(real, model)| real != model);
        assert_eq!(differs, None, "{step}: QEMU and the model");
        assert_eq!(real.len(), model.len(), "{step}");
        let (real, model) = (disks_and_nodes(&*self.lab.monitor), disks_and_nodes(&self.monitor));
        for (what, found) in real.as_object().unwrap() {
            assert_eq!(*found, model[what], "{what} after {step}: QEMU and the model");
        }
        assert_eq!(self.model.aborted(), None);
    }
}

/// Records each command with the kind of its answer.
struct Answers<'a> {
    inner: &'a dyn Monitor,
    answers: Mutex<Vec<String>>,
}

impl<'a> Answers<'a> {
    fn of(inner: &'a dyn Monitor, act: impl FnOnce(&dyn Monitor)) -> Vec<String> {
        let recording = Self {
            inner,
            answers: Mutex::default(),
        };
        act(&recording);
        recording.answers.into_inner().unwrap()
    }
}

impl Monitor for Answers<'_> {
    fn execute(&self, command: &QmpCommand) -> Result<Value> {
        let answer = self.inner.execute(command);
        let kind = match &answer {
            Ok(Value::Array(_)) => "a list".to_owned(),
            Ok(_) => "an answer".to_owned(),
            Err(MonitorError::Refused { class, .. }) => class.clone(),
            Err(other) => panic!("{}: {other}", command.name),
        };
        // QEMU chooses the numbers of fd sets.
        let arguments = match command.name {
            "remove-fd" => String::new(),
            _ => without_fd_sets(&command.arguments.to_string()),
        };
        self.answers
            .lock()
            .unwrap()
            .push(format!("{} {arguments}: {kind}", command.name));
        answer
    }
}

fn without_fd_sets(text: &str) -> String {
    let mut parts = text.split("/dev/fdset/");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| {
        text + "/dev/fdset/N" + part.trim_start_matches(|digit: char| digit.is_ascii_digit())
    })
}

/// The disks, nodes and node order of QEMU, as Holdfast reads them.
fn disks_and_nodes(monitor: &dyn Monitor) -> Value {
    let ask = |name, arguments: Value| monitor.execute(&QmpCommand::new(name, arguments)).unwrap();
    let list = |name, arguments| ask(name, arguments).as_array().cloned().unwrap_or_default();
    let mut nodes: Vec<Value> = list("query-named-block-nodes", json!({ "flat": true }))
        .iter()
        .map(|node| {
            json!({
                "name": named(node["node-name"].as_str().unwrap()),
                "driver": node["drv"],
                "size": (node["drv"] != "file").then(|| node["image"]["virtual-size"].clone()),
                "compat": node.pointer("/image/format-specific/data/compat"),
                "bitmaps": bitmaps(node),
            })
        })
        .collect();
    nodes.sort_by_key(Value::to_string);
    let graph = ask("x-debug-query-block-graph", Value::Null);
    let name_of = |id: &Value| {
        let mut nodes = graph["nodes"].as_array().unwrap().iter();
        let node = nodes.find(|node| node["id"] == *id && node["type"] == "block-driver");
        Some(named(node?["name"].as_str().unwrap()))
    };
    let mut edges: Vec<Value> = graph["edges"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|edge| {
            Some(json!([
                name_of(&edge["parent"])?,
                edge["name"],
                name_of(&edge["child"])?
            ]))
        })
        .collect();
    edges.sort_by_key(Value::to_string);
    let devices = list("query-block", Value::Null);
    let devices: Vec<Value> = devices
        .iter()
        .map(|device| {
            json!([
                device["qdev"],
                device["inserted"]["node-name"],
                device["inserted"]["ro"]
            ])
        })
        .collect();
    let sets = list("query-fdsets", Value::Null);
    let mut labels: Vec<String> = sets.iter().map(|set| set["fds"][0]["opaque"].to_string()).collect();
    labels.sort();
    let mut exports: Vec<Value> = list("query-block-exports", Value::Null)
        .iter()
        .map(|export| json!([export["id"], export["node-name"], export["type"]]))
        .collect();
    exports.sort_by_key(Value::to_string);
    let status = ask("query-status", Value::Null);
    json!({
        "nodes": nodes, "edges": edges, "devices": devices, "files": labels, "exports": exports,
        "status": status["status"], "running": status["running"],
    })
}

/// The name of a node if Holdfast gave it one; otherwise a number.
fn named(name: &str) -> &str {
    if name.starts_with("#block") { "#block" } else { name }
}

fn bitmaps(node: &Value) -> Vec<Value> {
    let bitmaps = node.get("dirty-bitmaps").and_then(Value::as_array);
    let mut bitmaps: Vec<Value> = bitmaps
        .into_iter()
        .flatten()
        // Bitmaps without a name are QEMU's own, and not visible to programs.
        .filter(|bitmap| bitmap.get("name").is_some())
        .map(|bitmap| {
            let fields = ["name", "granularity", "count", "recording", "persistent", "busy"];
            fields.iter().map(|field| bitmap[field].clone()).collect()
        })
        .collect();
    bitmaps.sort_by_key(Value::to_string);
    bitmaps
}

/// A request to freeze the disks with these devices.
fn request(monitor: &dyn Monitor, folder: &Path, number: u32, disk_count: usize) -> PointInTimeRequest {
    let listener = UnixListener::bind(folder.join(format!("nbd-{number}"))).unwrap();
    let wanted = disks(monitor).unwrap().into_iter().take(disk_count);
    let disks = wanted.enumerate().map(|(place, disk)| DiskRequest {
        scratch: scratch(folder, disk.size_bytes),
        spool: None,
        next_bitmap: Some(format!("bitmap-{place}-{number}")),
        changes: (number > 1).then(|| format!("bitmap-{place}-{}", number - 1)),
        changes_below: None,
        disk,
    });
    PointInTimeRequest {
        run: RunId(number),
        disks: disks.collect(),
        write_deadline: Duration::from_secs(2),
        listener: OwnedFd::from(listener),
        memory: None,
        pause_policy: PausePolicy::WhereNeeded,
    }
}

#[test]
fn a_backup_has_the_same_effects_in_the_model_and_in_qemu() {
    let both_machines = RealAndModel::new();
    let clock = SystemClock::new();
    for (number, disk_count, pause_policy) in [
        (1, 2, PausePolicy::WhereNeeded),
        (2, 2, PausePolicy::Always),
        (3, 1, PausePolicy::WhereNeeded),
    ] {
        let of_run = |monitor: &dyn Monitor, folder: &Path| {
            let mut request = request(monitor, folder, number, disk_count);
            request.pause_policy = pause_policy;
            let cut = PointInTime::make(monitor, &clock, request, &mut |_| ()).unwrap();
            cut.begin_witness(monitor, 0).unwrap();
        };
        both_machines.both(&format!("instant {number}"), of_run);
        both_machines.both(&format!("end {number}"), |monitor, _| {
            assert_eq!(runs_in(monitor).unwrap(), [RunId(number)].into());
            remove_run(monitor, &clock, RunId(number)).unwrap();
            assert!(runs_in(monitor).unwrap().is_empty());
        });
    }
}

#[test]
fn recording_writes_has_the_same_effects_in_the_model_and_in_qemu() {
    let both_machines = RealAndModel::new();
    let clock = SystemClock::new();
    let run = RunId(5);
    both_machines.both("tracking", |monitor, folder| {
        let request = TrackingRequest {
            run,
            disks: disks(monitor).unwrap(),
            granularity_bytes: 4096,
            listener: UnixListener::bind(folder.join("nbd-tracking")).unwrap().into(),
        };
        let tracker = WriteTracker::start(monitor, &clock, request).unwrap();
        assert_eq!(tracker.dirty_bytes(monitor, 1).unwrap(), Some(0));
        let taken = tracker.take(monitor, 0).unwrap();
        tracker.drop_marks(monitor, &clock, 0, &taken).unwrap();
        tracker.take(monitor, 1).unwrap();
    });
    both_machines.both("end of tracking", |monitor, _| {
        assert_eq!(runs_in(monitor).unwrap(), [run].into());
        remove_run(monitor, &clock, run).unwrap();
        assert!(runs_in(monitor).unwrap().is_empty());
    });
}

/// Commands that QEMU refuses between the point in time and the end of a backup of two disks.
fn refused_commands() -> Vec<(&'static str, Value)> {
    let drive = |device: &str, node: &str| ("qom-set", json!({ "path": device, "property": "drive", "value": node }));
    let node = |name: &'static str, node: &str| (name, json!({ "node-name": node }));
    let bitmap = |name: &'static str, node: &str, bitmap: &str| (name, json!({ "node": node, "name": bitmap }));
    vec![
        node("blockdev-del", "hf-00000001-0-filter"),
        node("blockdev-del", "hf-00000001-0-frozen"),
        node("blockdev-del", "hf-00000001-0-scratch"),
        node("blockdev-del", "format0"),
        node("blockdev-del", "none"),
        drive(DEVICE[0], "format0"),
        drive(DEVICE[0], "format1"),
        drive(DEVICE[0], "none"),
        drive("/machine/peripheral/none", "format0"),
        ("qom-get", json!({ "path": DEVICE[0], "property": "none" })),
        ("qom-get", json!({ "path": "/machine/none", "property": "type" })),
        ("qom-list", json!({ "path": "/machine/none" })),
        bitmap("block-dirty-bitmap-add", "format0", "bitmap-0-1"),
        bitmap("block-dirty-bitmap-add", "none", "a"),
        bitmap("block-dirty-bitmap-remove", "format0", "none"),
        bitmap("block-dirty-bitmap-remove", "none", "none"),
        bitmap("block-dirty-bitmap-clear", "format0", "none"),
        (
            "block-dirty-bitmap-add",
            json!({ "node": "format1", "name": "kept", "persistent": true }),
        ),
        (
            "block-dirty-bitmap-merge",
            json!({ "node": "format0", "target": "bitmap-0-1", "bitmaps": [{ "node": "format0", "name": "none" }] }),
        ),
        (
            "transaction",
            json!({ "actions": [
            { "type": "block-dirty-bitmap-add", "data": { "node": "format0", "name": "half" } },
            { "type": "block-dirty-bitmap-add", "data": { "node": "format1", "name": "bitmap-1-1" } },
        ] }),
        ),
        (
            "blockdev-add",
            json!({ "driver": "raw", "node-name": "format0", "file": "format1" }),
        ),
        (
            "blockdev-add",
            json!({ "driver": "raw", "node-name": "new", "file": "none" }),
        ),
        (
            "blockdev-add",
            json!({ "driver": "file", "node-name": "new", "filename": "/dev/fdset/99999" }),
        ),
        (
            "blockdev-add",
            json!({ "driver": "copy-before-write", "node-name": "new", "file": "format0", "target": "none" }),
        ),
        (
            "blockdev-reopen",
            json!({ "options": [{ "driver": "raw", "node-name": "none", "file": "format0" }] }),
        ),
        (
            "block-export-add",
            json!({ "type": "nbd", "id": "hf-00000001-disk0", "node-name": "format0" }),
        ),
        (
            "block-export-add",
            json!({ "type": "nbd", "id": "new", "node-name": "none" }),
        ),
        (
            "block-export-add",
            json!({ "type": "nbd", "id": "new", "node-name": "format0", "writable": true, "bitmaps": [{ "node": "format0", "name": "none" }] }),
        ),
        (
            "block-export-add",
            json!({ "type": "nbd", "id": "new", "node-name": "hf-00000001-0-filter", "writable": true }),
        ),
        ("block-export-del", json!({ "id": "none", "mode": "hard" })),
        (
            "nbd-server-start",
            json!({ "addr": { "type": "fd", "data": { "str": "none" } } }),
        ),
        ("remove-fd", json!({ "fdset-id": 99999 })),
        ("closefd", json!({ "fdname": "none" })),
        ("add-fd", json!({})),
        ("getfd", json!({ "fdname": "none" })),
        ("job-cancel", json!({ "id": "none" })),
        ("job-dismiss", json!({ "id": "none" })),
        ("no-such-command", Value::Null),
    ]
}

/// Sends commands in the middle of a backup, when all its nodes and jobs exist and may conflict.
#[test]
fn the_model_refuses_what_qemu_refuses() {
    let both_machines = RealAndModel::new();
    let clock = SystemClock::new();
    both_machines.both("instant", |monitor, folder| {
        let request = request(monitor, folder, 1, 2);
        PointInTime::make(monitor, &clock, request, &mut |_| ()).unwrap();
    });
    for (name, arguments) in refused_commands() {
        both_machines.both(&format!("{name} {arguments}"), |monitor, _| {
            let answer = monitor.execute(&QmpCommand::new(name, arguments.clone()));
            assert!(
                matches!(answer, Err(MonitorError::Refused { .. })),
                "{name} {arguments}: {answer:?}"
            );
        });
    }
    both_machines.both("end", |monitor, _| {
        remove_run(monitor, &clock, RunId(1)).unwrap();
        let none = json!({ "id": "none", "mode": "hard" });
        for (name, arguments) in [("nbd-server-stop", Value::Null), ("block-export-del", none)] {
            monitor.execute(&QmpCommand::new(name, arguments)).unwrap_err();
        }
        let without_server = json!({ "type": "nbd", "id": "new", "node-name": "format0" });
        monitor
            .execute(&QmpCommand::new("block-export-add", without_server))
            .unwrap_err();
    });
}

/// A job copies the marked ranges from the frozen disk; its bitmap and nodes are busy meanwhile.
#[test]
fn the_model_copies_parts_as_qemu_does() {
    let both_machines = RealAndModel::new();
    let clock = SystemClock::new();
    both_machines.both("instant", |monitor, folder| {
        let mut request = request(monitor, folder, 1, 2);
        for disk in &mut request.disks {
            disk.spool = Some(scratch(folder, DISK_BYTES));
        }
        PointInTime::make(monitor, &clock, request, &mut |_| ()).unwrap();
    });
    both_machines.both("end", |monitor, _| remove_run(monitor, &clock, RunId(1)).unwrap());
}
