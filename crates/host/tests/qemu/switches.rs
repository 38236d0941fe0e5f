//! The point in time of several disks, and the commands within it.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use holdfast_host::qemu::{
    Pause, PausePolicy, PointInTime, PointInTimeEvent, PointInTimeRequest, RunId, remove_bitmap, remove_run, runs_in,
};
use holdfast_host::qmp::{Monitor, MonitorError, QmpCommand, QmpSocket, Result};
use serde_json::{Value, json};

use crate::cut::AtTheEnd;
use holdfast_test_kit::qemu::{DISK_BYTES, MIB, QemuLab, scratch};
use holdfast_test_kit::{assert_served, run};

/// Records the commands; refuses those of one name.
struct Recording<'a> {
    inner: &'a dyn Monitor,
    refused: &'static str,
    names: Mutex<Vec<&'static str>>,
}

impl<'a> Recording<'a> {
    fn new(inner: &'a dyn Monitor, refused: &'static str) -> Self {
        Self {
            inner,
            refused,
            names: Mutex::default(),
        }
    }

    /// The commands from the last `stop` to the next `cont`, without these two; none if the machine was not stopped.
    fn while_stopped(&self) -> Option<Vec<&'static str>> {
        let names = self.names.lock().unwrap();
        let stop = names.iter().rposition(|name| *name == "stop")?;
        let length = names[stop..].iter().position(|name| *name == "cont").unwrap();
        Some(names[stop + 1..stop + length].to_vec())
    }

    fn count(&self, wanted: &str) -> usize {
        self.names
            .lock()
            .unwrap()
            .iter()
            .filter(|name| **name == wanted)
            .count()
    }
}

impl Monitor for Recording<'_> {
    fn execute(&self, command: &QmpCommand) -> Result<Value> {
        self.names.lock().unwrap().push(command.name);
        if command.name == self.refused {
            return Err(MonitorError::Refused {
                command: command.name.to_owned(),
                class: "GenericError".to_owned(),
                description: "not today".to_owned(),
            });
        }
        self.inner.execute(command)
    }
}

fn with_bitmaps(mut request: PointInTimeRequest, round: usize) -> PointInTimeRequest {
    for disk in &mut request.disks {
        disk.next_bitmap = Some(format!("bitmap{round}"));
        disk.changes = round.checked_sub(1).map(|last| format!("bitmap{last}"));
    }
    request
}

/// The point in time of any number of disks is one command, also while the machine is paused for another reason.
#[test]
fn one_command_takes_the_point_in_time_of_all_disks() {
    let lab = QemuLab::new(&["qcow2", "raw", "qcow2", "raw"]);
    let before = lab.everything();
    for (round, disk_count) in [1, 2, 4, 2, 4].into_iter().enumerate() {
        let (mut request, socket) = lab.request(lab.directory.path());
        request.disks.truncate(disk_count);
        request.pause_policy = if round < 3 {
            PausePolicy::WhereNeeded
        } else {
            PausePolicy::Always
        };
        let is_stopped = request.pause_policy == PausePolicy::Always;
        let monitor = Recording::new(&*lab.monitor, "");
        let mut moments = Vec::new();
        let cut = PointInTime::make(&monitor, &lab.clock, request, &mut |moment| moments.push(moment)).unwrap();
        if is_stopped {
            assert_eq!(monitor.while_stopped().unwrap(), ["blockdev-reopen"]);
            assert_eq!(moments, [PointInTimeEvent::Stopped, PointInTimeEvent::Reached]);
        } else {
            assert_eq!((monitor.while_stopped(), &cut.pause), (None, &Pause::default()));
            assert_eq!(moments, [PointInTimeEvent::Reached]);
            assert_eq!(monitor.count("blockdev-reopen"), usize::from(disk_count > 1));
        }
        for (disk, export) in cut.exports.iter().enumerate() {
            lab.guest_writes(disk, 99, 4 * MIB, MIB);
            assert_served(&socket, export, disk + 1, 0, DISK_BYTES);
            lab.guest_writes(disk, u8::try_from(disk + 1).unwrap(), 4 * MIB, MIB);
        }
        cut.release(&monitor, &lab.clock).unwrap();
        assert_eq!(lab.everything(), before, "{disk_count} disks");
    }
}

/// The guest has frozen file systems only in the middle stage, so slow work is done before and after it.
#[test]
fn slow_work_is_done_before_and_after_the_point_in_time() {
    let lab = QemuLab::new(&["qcow2", "raw", "qcow2"]);
    let before = lab.everything();
    for disk_count in [1, 3] {
        let (mut request, socket) = lab.request(lab.directory.path());
        request.disks.truncate(disk_count);
        let nodes: Vec<String> = request.disks.iter().map(|disk| disk.disk.node.clone()).collect();
        let monitor = Recording::new(&*lab.monitor, "");
        let prepared = PointInTime::prepare(&monitor, &lab.clock, with_bitmaps(request, 0)).unwrap();
        let first = monitor.names.lock().unwrap().len();
        let taken = prepared.take(&mut |_| ()).unwrap();
        let within = monitor.names.lock().unwrap()[first..].to_vec();
        let is_quick = |name: &&str| {
            let changes = ["transaction", "qom-set", "blockdev-reopen"];
            changes.contains(name) || name.contains("query-")
        };
        assert!(
            within.iter().all(is_quick) && within.len() <= 6,
            "{disk_count} disks: {within:?}"
        );
        for disk in 0..disk_count {
            lab.guest_writes(disk, 99, 4 * MIB, MIB);
        }
        let cut = taken.serve().unwrap();
        for (disk, export) in cut.exports.iter().enumerate() {
            assert_served(&socket, export, disk + 1, 0, DISK_BYTES);
            lab.guest_writes(disk, u8::try_from(disk + 1).unwrap(), 4 * MIB, MIB);
        }
        cut.release(&monitor, &lab.clock).unwrap();
        for node in &nodes {
            remove_bitmap(&monitor, node, "bitmap0").unwrap();
        }
        assert_eq!(lab.everything(), before, "{disk_count} disks");
    }
}

/// If the guest cannot be frozen, the point in time is abandoned.
#[test]
fn an_abandoned_preparation_leaves_nothing() {
    let lab = QemuLab::new(&["qcow2", "raw"]);
    let before = lab.everything();
    let (request, _) = lab.request(lab.directory.path());
    let prepared = PointInTime::prepare(&*lab.monitor, &lab.clock, with_bitmaps(request, 0)).unwrap();
    assert_ne!(lab.everything(), before);
    prepared.abandon().unwrap();
    assert_eq!(lab.everything(), before);
}

/// If the switches cannot be used, the machine is paused, and devices are moved to their filters one by one.
#[test]
fn a_qemu_that_cannot_turn_switches_is_paused() {
    let lab = QemuLab::new(&["qcow2", "raw"]);
    let before = lab.everything();
    for pause_policy in [PausePolicy::WhereNeeded, PausePolicy::Always] {
        let (mut request, socket) = lab.request(lab.directory.path());
        request.pause_policy = pause_policy;
        let monitor = Recording::new(&*lab.monitor, "blockdev-reopen");
        let cut = PointInTime::make(&monitor, &lab.clock, request, &mut |_| ()).unwrap();
        let within = monitor.while_stopped().unwrap();
        assert_eq!(within.iter().filter(|name| **name == "qom-set").count(), 2);
        assert!(within.len() <= 3 && lab.is_running(), "{within:?}");
        for (disk, export) in cut.exports.iter().enumerate() {
            lab.guest_writes(disk, 99, 4 * MIB, MIB);
            assert_served(&socket, export, disk + 1, 0, DISK_BYTES);
            lab.guest_writes(disk, u8::try_from(disk + 1).unwrap(), 4 * MIB, MIB);
        }
        cut.release(&monitor, &lab.clock).unwrap();
        assert_eq!(lab.everything(), before);
    }
}

/// Disks that are copied get all their nodes while the machine is paused, and nothing else is done meanwhile.
#[test]
fn copied_disks_take_three_commands_each_during_the_pause() {
    let lab = QemuLab::new(&["qcow2", "raw"]);
    let before = lab.everything();
    let (mut request, _) = lab.request(lab.directory.path());
    for disk in &mut request.disks {
        disk.spool = Some(scratch(lab.directory.path(), DISK_BYTES));
    }
    let monitor = Recording::new(&*lab.monitor, "");
    let cut = PointInTime::make(&monitor, &lab.clock, with_bitmaps(request, 0), &mut |_| ()).unwrap();
    let filters = ["blockdev-add", "blockdev-add", "query-block", "qom-set", "qom-set"];
    let frozen = ["blockdev-add", "blockdev-add"];
    assert_eq!(monitor.while_stopped().unwrap(), [&filters[..], &frozen].concat());
    cut.release(&monitor, &lab.clock).unwrap();
    for disk in 0..2 {
        let arguments = json!({ "node": format!("format{disk}"), "name": "bitmap0" });
        lab.execute("block-dirty-bitmap-remove", arguments);
    }
    assert_eq!(lab.everything(), before);
}

/// QEMU flushes a node that it deletes, and the guest would wait for that: so scratch files are never flushed.
#[test]
fn scratch_files_are_not_flushed() {
    let lab = QemuLab::new(&["qcow2", "raw"]);
    let (request, _) = lab.request(lab.directory.path());
    let cut = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ()).unwrap();
    let nodes = lab.execute("query-named-block-nodes", json!({ "flat": true }));
    let of_scratch = nodes.as_array().unwrap().iter().filter(|node| {
        let file = node["file"].as_str().unwrap_or_default();
        file.starts_with("/dev/fdset/") && node["drv"] != "copy-before-write" && node["drv"] != "snapshot-access"
    });
    let flushed: Vec<(&Value, &Value)> = of_scratch
        .map(|node| (&node["drv"], &node["cache"]["no-flush"]))
        .collect();
    assert_eq!(flushed.len(), 4, "{flushed:?}");
    assert!(
        flushed.iter().all(|(_, is_not_flushed)| **is_not_flushed == true),
        "{flushed:?}"
    );
    cut.release(&*lab.monitor, &lab.clock).unwrap();
}

const PLACES: u8 = 16;
const PLACE_BYTES: u64 = 64 << 10;

/// The first byte of each place of a frozen disk.
fn held(lab: &QemuLab, socket: &Path, export: &str) -> Vec<u8> {
    let uri = format!("nbd+unix:///{export}?socket={}", socket.display());
    let image = lab.path("held");
    run(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "raw", &uri, image.to_str().unwrap()],
    );
    let bytes = std::fs::read(&image).unwrap();
    let step = usize::try_from(PLACE_BYTES).unwrap();
    bytes
        .chunks(step)
        .take(usize::from(PLACES))
        .map(|place| place[0])
        .collect()
}

/// The places that are clean in a bitmap.
fn clean_places(socket: &Path, export: &str, context: &str) -> BTreeSet<u64> {
    let uri = format!("nbd+unix:///{export}?socket={}", socket.display());
    let map = run("nbdinfo", &[&format!("--map={context}"), "--json", &uri]);
    let map: Value = serde_json::from_str(&map).unwrap();
    let number = |extent: &Value, key: &str| extent[key].as_u64().unwrap();
    let clean = map
        .as_array()
        .unwrap()
        .iter()
        .filter(|extent| extent["type"] == json!(0));
    clean
        .flat_map(|extent| {
            let start = number(extent, "offset");
            (start / PLACE_BYTES)..((start + number(extent, "length")) / PLACE_BYTES).min(u64::from(PLACES))
        })
        .collect()
}

/// The machine writes a number to a place of the first disk, then of the second and third, then the next number. Only
/// one sequence is possible for each point in time, and the bitmaps contain every change.
#[test]
fn several_disks_are_frozen_between_two_writes_of_a_running_machine() {
    let lab = QemuLab::with(
        &["qcow2", "raw", "qcow2"],
        &["-qmp", "unix:{}/writer,server=on,wait=off"],
    );
    let writer = QmpSocket::connect(&lab.path("writer")).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0_u64.. {
                for disk in 0..3 {
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    let (byte, place) = (
                        10 + round / u64::from(PLACES) % 200,
                        round % u64::from(PLACES) * PLACE_BYTES,
                    );
                    let device = format!("/machine/peripheral/disk{disk}/virtio-backend");
                    let line = format!("qemu-io -d {device} \"write -P {byte} {place} 64k\"");
                    let arguments = json!({ "command-line": line });
                    writer
                        .execute(&QmpCommand::new("human-monitor-command", arguments))
                        .unwrap();
                }
            }
        });
        // Ends the writer even if an assertion fails: otherwise it would run for ever.
        let _over = AtTheEnd(&is_over);
        let mut last: Vec<Vec<u8>> = Vec::new();
        for round in 0..6 {
            let (request, socket) = lab.request(lab.directory.path());
            let cut = PointInTime::make(&*lab.monitor, &lab.clock, with_bitmaps(request, round), &mut |_| ()).unwrap();
            assert_eq!(cut.pause, Pause::default());
            let now: Vec<Vec<u8>> = cut.exports.iter().map(|export| held(&lab, &socket, export)).collect();
            // The next disk is at most one place behind.
            let places: Vec<(usize, usize)> = (0..3)
                .flat_map(|disk| (0..usize::from(PLACES)).map(move |place| (place, disk)))
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect();
            let sequence: Vec<u8> = places.iter().map(|(place, disk)| now[*disk][*place]).collect();
            let turn = sequence.iter().position(|byte| *byte != sequence[0]);
            let (turn, rest) = sequence.split_at(turn.unwrap_or(sequence.len()));
            let is_of_the_turn_before = |byte: &u8| byte + 1 == turn[0] || turn[0] == 10 && *byte < 4;
            assert!(
                rest.iter().all(is_of_the_turn_before),
                "not of one point in time: {sequence:?}"
            );
            for (disk, context) in cut.change_contexts.iter().enumerate() {
                let Some(context) = context else { continue };
                for place in clean_places(&socket, &cut.exports[disk], context) {
                    let place = usize::try_from(place).unwrap();
                    assert_eq!(
                        now[disk][place], last[disk][place],
                        "place {place} of disk {disk} has changed"
                    );
                }
            }
            last = now;
            cut.release(&*lab.monitor, &lab.clock).unwrap();
        }
    });
    assert!(lab.is_running() && runs_in(&*lab.monitor).unwrap().is_empty());
}

/// Another client takes a snapshot right after the point in time, before the bitmaps are copied: the next backup would
/// miss the changes in its overlay, so this one fails.
#[test]
fn a_snapshot_of_another_client_during_the_freeze_is_detected() {
    let lab = QemuLab::new(&["qcow2", "qcow2"]);
    let overlay = lab.path("overlay");
    let overlay = overlay.to_str().unwrap();
    run("qemu-img", &["create", "-q", "-f", "qcow2", overlay, "16M"]);
    let file = json!({ "driver": "file", "filename": overlay });
    let arguments = json!({ "driver": "qcow2", "node-name": "overlay", "file": file, "backing": null });
    lab.execute("blockdev-add", arguments);
    let (request, _) = lab.request(lab.directory.path());
    let made = PointInTime::make(&*lab.monitor, &lab.clock, with_bitmaps(request, 0), &mut |_| {
        lab.execute("blockdev-snapshot", json!({ "node": "format1", "overlay": "overlay" }));
    });
    assert!(matches!(made, Err(MonitorError::Busy { .. })), "{made:?}");
    assert_eq!(runs_in(&*lab.monitor).unwrap(), BTreeSet::<RunId>::new());
    let nodes: Vec<String> = lab.disks().into_iter().map(|disk| disk.node).collect();
    assert_eq!(nodes, ["format0", "overlay"]);
    lab.guest_writes(1, 77, 0, MIB);
    assert!(lab.guest(1, "read -P 77 0 1M").contains("read 1048576/1048576"));
}

/// Switches of a dead run, above the disks or already above the filters, are removed by its name.
#[test]
fn leftover_switches_are_removed() {
    let lab = QemuLab::new(&["qcow2", "raw"]);
    let before = lab.everything();
    for is_moved in [false, true] {
        let run_id = RunId(0x77);
        let node = |disk: usize, role: &str| format!("hf-{run_id}-{disk}-{role}");
        for disk in 0..2 {
            let image = format!("format{disk}");
            let scratch = json!({ "driver": "null-co", "node-name": node(disk, "scratch"), "size": DISK_BYTES });
            lab.execute("blockdev-add", scratch);
            let filter = json!({
                "driver": "copy-before-write", "node-name": node(disk, "filter"), "file": image,
                "target": node(disk, "scratch"),
            });
            lab.execute("blockdev-add", filter);
            let switch = json!({ "driver": "raw", "node-name": node(disk, "switch"), "file": image });
            lab.execute("blockdev-add", switch);
            let device = format!("/machine/peripheral/disk{disk}/virtio-backend");
            let arguments = json!({ "path": device, "property": "drive", "value": node(disk, "switch") });
            lab.execute("qom-set", arguments);
        }
        if is_moved {
            let switch =
                |disk| json!({ "driver": "raw", "node-name": node(disk, "switch"), "file": node(disk, "filter") });
            lab.execute("blockdev-reopen", json!({ "options": [switch(0), switch(1)] }));
        }
        assert_eq!(runs_in(&*lab.monitor).unwrap(), [run_id].into());
        remove_run(&*lab.monitor, &lab.clock, run_id).unwrap();
        assert_eq!(lab.everything(), before, "moved: {is_moved}");
        for disk in 0..2 {
            lab.guest_writes(disk, 5, 0, MIB);
        }
    }
}
