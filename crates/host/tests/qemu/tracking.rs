//! Recording the writes of a guest.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use holdfast_host::qemu::{
    QemuVersion, RunId, TakenMarks, TrackingRequest, WriteLimit, WriteTracker, limit_writes, remove_run, runs_in,
};
use holdfast_host::qmp::{Monitor as _, MonitorError, QmpCommand};
use serde_json::{Value, json};

use holdfast_test_kit::qemu::{DISK_BYTES, MIB, QemuLab};
use holdfast_test_kit::{assert_served, run};

const GRANULARITY_BYTES: u32 = 4096;

fn start(lab: &QemuLab, run: RunId) -> (Result<WriteTracker, MonitorError>, PathBuf) {
    let socket = lab.path(&format!("nbd-{run}"));
    let request = TrackingRequest {
        run,
        disks: lab.disks(),
        granularity_bytes: GRANULARITY_BYTES,
        listener: OwnedFd::from(UnixListener::bind(&socket).unwrap()),
    };
    (WriteTracker::start(&*lab.monitor, &lab.clock, request), socket)
}

/// The marked ranges, as offsets and lengths.
fn marked(socket: &Path, taken: &TakenMarks) -> Vec<(u64, u64)> {
    let uri = format!("nbd+unix:///{}?socket={}", taken.export, socket.display());
    let map = format!("--map={}", taken.context);
    let map: Value = serde_json::from_str(&run("nbdinfo", &["--json", &map, &uri])).unwrap();
    let extents = map.as_array().unwrap().iter();
    extents
        .filter(|extent| extent["type"] == 1)
        .map(|extent| (extent["offset"].as_u64().unwrap(), extent["length"].as_u64().unwrap()))
        .collect()
}

fn take(lab: &QemuLab, tracker: &WriteTracker, socket: &Path, number: usize) -> Vec<(u64, u64)> {
    let taken = tracker.take(&*lab.monitor, number).unwrap();
    let marks = marked(socket, &taken);
    tracker.drop_marks(&*lab.monitor, &lab.clock, number, &taken).unwrap();
    marks
}

#[test]
fn every_write_is_in_exactly_one_take() {
    let lab = QemuLab::new(&["qcow2", "raw"]);
    let before = lab.everything();
    let (tracker, socket) = start(&lab, RunId(7));
    let tracker = tracker.unwrap();
    assert_eq!(tracker.disk_count(), 2);
    let dirty = |number| tracker.dirty_bytes(&*lab.monitor, number).unwrap();
    assert_eq!((dirty(0), dirty(1)), (Some(0), Some(0)));
    lab.guest_writes(0, 9, 4096, 4096);
    lab.guest_writes(0, 9, 3 * MIB, 512);
    lab.guest_writes(1, 9, 8192, 8192);
    assert_eq!((dirty(0), dirty(1)), (Some(8192), Some(8192)));
    assert_eq!(take(&lab, &tracker, &socket, 0), [(4096, 4096), (3 * MIB, 4096)]);
    assert_eq!((dirty(0), dirty(1)), (Some(0), Some(8192)));
    assert_eq!(take(&lab, &tracker, &socket, 0), []);
    // The export shows the current content, also of what was written since.
    assert_served(&socket, &tracker.export(0), 9, 4096, 4096);
    let output = lab.guest(0, "write -z 6M 1M");
    assert!(output.contains("wrote"), "{output}");
    assert_eq!(take(&lab, &tracker, &socket, 0), [(6 * MIB, MIB)]);
    assert_eq!(take(&lab, &tracker, &socket, 1), [(8192, 8192)]);
    tracker.stop(&*lab.monitor, &lab.clock).unwrap();
    assert_eq!(lab.everything(), before);
}

/// QEMU 10 does not describe a disk that it has given up for a migration, and takes it back for a new export.
#[test]
fn marks_that_could_not_be_read_are_exported_again() {
    let lab = QemuLab::new(&["qcow2"]);
    let before = lab.everything();
    let (tracker, socket) = start(&lab, RunId(7));
    let tracker = tracker.unwrap();
    lab.guest_writes(0, 9, 4096, 4096);
    let taken = tracker.take(&*lab.monitor, 0).unwrap();
    lab.execute("stop", Value::Null);
    if QemuVersion::query(&*lab.monitor).unwrap() >= QemuVersion::new(10, 0, 0) {
        let node = lab.disks()[0].node.clone();
        lab.execute("blockdev-set-active", json!({ "node-name": node, "active": false }));
    }
    let taken = tracker.export_again(&*lab.monitor, 0, taken).unwrap();
    assert_eq!(marked(&socket, &taken), [(4096, 4096)]);
    tracker.drop_marks(&*lab.monitor, &lab.clock, 0, &taken).unwrap();
    lab.execute("cont", Value::Null);
    tracker.stop(&*lab.monitor, &lab.clock).unwrap();
    assert_eq!(lab.everything(), before);
}

/// The marks of writes during a take are in that take or in the next one.
#[test]
fn writes_during_takes_are_not_lost() {
    let lab = QemuLab::new(&["raw"]);
    let (tracker, socket) = start(&lab, RunId(8));
    let tracker = tracker.unwrap();
    let mut found = vec![0_u32; usize::try_from(DISK_BYTES / 4096).unwrap()];
    let mut count = |marks: Vec<(u64, u64)>| {
        for (offset, length) in marks {
            for block in offset / 4096..(offset + length) / 4096 {
                found[usize::try_from(block).unwrap()] += 1;
            }
        }
    };
    for block in 0..200 {
        lab.guest(0, &format!("aio_write -P 5 {} 4096", block * 8192));
        if block % 10 == 0 {
            count(take(&lab, &tracker, &socket, 0));
        }
    }
    lab.guest(0, "aio_flush");
    count(take(&lab, &tracker, &socket, 0));
    for block in 0..200 {
        assert_eq!(found[block * 2], 1, "block {block}");
    }
    assert_eq!(found.iter().sum::<u32>(), 200);
    tracker.stop(&*lab.monitor, &lab.clock).unwrap();
}

#[test]
fn a_tracker_that_may_have_missed_writes_says_so() {
    let lab = QemuLab::new(&["qcow2"]);
    let (tracker, _) = start(&lab, RunId(9));
    let tracker = tracker.unwrap();
    let overlay = lab.path("overlay");
    lab.execute(
        "blockdev-snapshot-sync",
        json!({ "node-name": "format0", "snapshot-file": overlay, "snapshot-node-name": "above" }),
    );
    assert_eq!(tracker.dirty_bytes(&*lab.monitor, 0).unwrap(), None);
    // Its bitmap is below the node of the device now.
    assert_eq!(runs_in(&*lab.monitor).unwrap(), [RunId(9)].into());
    tracker.stop(&*lab.monitor, &lab.clock).unwrap();
    assert!(runs_in(&*lab.monitor).unwrap().is_empty());
}

#[test]
fn tracking_is_refused_beside_jobs_and_other_servers() {
    let lab = QemuLab::new(&["raw"]);
    let target = lab.path("target");
    run(
        "qemu-img",
        &["create", "-q", "-f", "raw", target.to_str().unwrap(), "16M"],
    );
    let other = lab.path("other");
    let address = json!({ "type": "unix", "data": { "path": other } });
    lab.execute("nbd-server-start", json!({ "addr": address }));
    lab.execute(
        "block-export-add",
        json!({ "type": "nbd", "id": "theirs", "node-name": "format0" }),
    );
    let before = lab.everything();
    let (refused, _) = start(&lab, RunId(10));
    assert!(matches!(refused.unwrap_err(), MonitorError::Busy { .. }));
    assert_eq!(lab.everything(), before, "the other server is left alone");
    lab.execute("nbd-server-stop", Value::Null);
    lab.execute(
        "blockdev-add",
        json!({ "driver": "raw", "node-name": "copy", "file": { "driver": "file", "filename": target } }),
    );
    let mirror = json!({ "job-id": "theirs", "device": "format0", "target": "copy", "sync": "full" });
    lab.execute("blockdev-mirror", mirror);
    let (refused, _) = start(&lab, RunId(11));
    assert!(matches!(refused.unwrap_err(), MonitorError::Busy { .. }));
    assert!(runs_in(&*lab.monitor).unwrap().is_empty());
}

/// The state after a kill at any step.
#[test]
fn what_a_killed_tracker_leaves_is_removed() {
    let lab = QemuLab::new(&["qcow2", "raw"]);
    let before = lab.everything();
    for step in 0..4 {
        let run = RunId(20 + step);
        let (tracker, _socket) = start(&lab, run);
        let tracker = tracker.unwrap();
        lab.guest_writes(0, 9, 0, 4096);
        match step {
            0 => {}
            // Marks that were not dropped.
            1 => drop(tracker.take(&*lab.monitor, 0).unwrap()),
            // A server without exports.
            2 => {
                for number in 0..2 {
                    let arguments = json!({ "id": tracker.export(number), "mode": "hard" });
                    lab.execute("block-export-del", arguments);
                }
            }
            // Bitmaps without a server.
            _ => drop(lab.execute("nbd-server-stop", Value::Null)),
        }
        drop(tracker);
        assert_eq!(runs_in(&*lab.monitor).unwrap(), [run].into(), "step {step}");
        remove_run(&*lab.monitor, &lab.clock, run).unwrap();
        assert_eq!(lab.everything(), before, "step {step}");
        // The server ended with the run.
        let listener = UnixListener::bind(lab.path(&format!("free-{step}"))).unwrap();
        let given = QmpCommand::new("getfd", json!({ "fdname": "free" })).with_file(listener.into());
        lab.monitor.execute(&given).unwrap();
        lab.execute(
            "nbd-server-start",
            json!({ "addr": { "type": "fd", "data": { "str": "free" } } }),
        );
        lab.execute("nbd-server-stop", Value::Null);
    }
}

#[test]
fn writes_are_limited_until_the_run_ends() {
    let lab = QemuLab::new(&["raw", "raw"]);
    let before = lab.everything();
    let (tracker, _) = start(&lab, RunId(30));
    let tracker = tracker.unwrap();
    let device = |number: usize| lab.disks()[number].device.clone();
    let limits = |number: usize| {
        let described = lab.execute("query-block", Value::Null);
        let inserted = &described[number]["inserted"];
        ["bps_wr", "iops_wr", "iops"].map(|limit| inserted[limit].as_u64().unwrap())
    };
    let limit = WriteLimit {
        bytes_per_s: 1 << 20,
        requests_per_s: 256,
    };
    assert!(limit_writes(&*lab.monitor, RunId(30), &device(0), limit).unwrap());
    assert_eq!((limits(0), limits(1)), ([1 << 20, 256, 0], [0, 0, 0]));
    let slower = WriteLimit {
        bytes_per_s: 1 << 19,
        requests_per_s: 128,
    };
    assert!(limit_writes(&*lab.monitor, RunId(30), &device(0), slower).unwrap());
    assert_eq!(limits(0), [1 << 19, 128, 0]);
    // The owner has limited the other one.
    let owned = json!({
        "id": device(1), "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 500, "iops_rd": 0, "iops_wr": 0,
    });
    lab.execute("block_set_io_throttle", owned);
    assert!(!limit_writes(&*lab.monitor, RunId(30), &device(1), limit).unwrap());
    assert_eq!(limits(1), [0, 0, 500]);
    drop(tracker);
    assert_eq!(runs_in(&*lab.monitor).unwrap(), [RunId(30)].into());
    remove_run(&*lab.monitor, &lab.clock, RunId(30)).unwrap();
    assert_eq!((limits(0), limits(1)), ([0, 0, 0], [0, 0, 500]));
    assert_eq!(lab.everything(), before);
}
