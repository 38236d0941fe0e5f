//! Freezing disks, reading them while the guest writes, and removing everything afterwards.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast_block::Clock as _;
use holdfast_host::qemu::{Pause, PausePolicy, PointInTime, PointInTimeEvent, RunId, runs_in};
use holdfast_host::qmp::{Monitor as _, QmpCommand, QmpSocket};
use serde_json::{Value, json};

use holdfast_test_kit::qemu::{DISK_BYTES, MIB, QemuLab};
use holdfast_test_kit::{assert_served, run};

#[test]
fn frozen_disks_do_not_change_and_nothing_is_left() {
    let lab = QemuLab::new(&["qcow2", "raw", "qcow2"]);
    let before = lab.everything();
    let (mut request, socket) = lab.request(lab.directory.path());
    request.pause_policy = PausePolicy::Always;
    let mut was_running_within = true;
    let cut = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| {
        was_running_within = lab.is_running();
    })
    .unwrap();
    assert!(
        !was_running_within && lab.is_running(),
        "the machine was paused and runs again"
    );
    assert!(cut.pause.total >= cut.pause.cut && cut.pause.cut > Duration::ZERO);
    for disk in 0..3 {
        lab.guest_writes(disk, 99, 4 * MIB, 2 * MIB);
        lab.guest_writes(disk, 98, 0, 512);
        lab.guest_writes(disk, 97, DISK_BYTES - 512, 512);
    }
    for (disk, export) in cut.exports.iter().enumerate() {
        assert_served(&socket, export, disk + 1, 0, DISK_BYTES);
    }
    cut.release(&*lab.monitor, &lab.clock).unwrap();
    assert_eq!(lab.everything(), before);
    for disk in 0..3 {
        let output = lab.guest(disk, "read -P 99 4M 2M");
        assert!(
            output.contains("read 2097152/2097152") && !output.contains("failed"),
            "{output}"
        );
    }
}

#[test]
fn a_paused_machine_stays_paused() {
    let lab = QemuLab::new(&["raw"]);
    lab.execute("stop", Value::Null);
    let (request, socket) = lab.request(lab.directory.path());
    let cut = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ()).unwrap();
    assert!(!lab.is_running());
    assert_eq!(cut.pause, holdfast_host::qemu::Pause::default());
    assert_served(&socket, &cut.exports[0], 1, 0, DISK_BYTES);
    cut.release(&*lab.monitor, &lab.clock).unwrap();
    assert!(!lab.is_running());
}

/// Asserts that the frozen first disk cannot be read any more, and that the guest can still write.
fn assert_broken_and_unharmed(lab: &QemuLab, socket: &std::path::Path, export: &str) {
    let uri = format!("nbd+unix:///{export}?socket={}", socket.display());
    let read = std::process::Command::new("qemu-io")
        .args(["-r", "-f", "raw", "-c", "read 8M 512", &uri])
        .output();
    let output = String::from_utf8(read.unwrap().stdout).unwrap();
    assert!(output.contains("read failed"), "a broken copy can be read: {output}");
    for number in 0..16 {
        lab.guest_writes(0, 60 + u8::try_from(number).unwrap(), number * MIB, MIB);
    }
}

/// Writes to the scratch file fail: the copy breaks, without effect on the guest.
#[test]
fn a_scratch_file_that_fails_breaks_the_copy_and_not_the_guest() {
    let lab = QemuLab::new(&["qcow2"]);
    let before = lab.everything();
    for round in 0..20 {
        let (mut request, socket) = lab.request(lab.directory.path());
        let sealed = rustix::fs::memfd_create("scratch", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&sealed, DISK_BYTES).unwrap();
        rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::WRITE).unwrap();
        request.disks[0].scratch = sealed;
        let cut = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ()).unwrap();
        lab.guest_writes(0, 200, round * 512 * 1024, 4096);
        assert_broken_and_unharmed(&lab, &socket, &cut.exports[0]);
        cut.release(&*lab.monitor, &lab.clock).unwrap();
        assert_eq!(lab.everything(), before);
    }
}

/// The file system of the scratch file is full. Needs root for a small file system.
#[test]
fn a_full_scratch_file_system_breaks_the_copy_and_not_the_guest() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root mounts a small file system");
        return;
    }
    let lab = QemuLab::new(&["raw"]);
    let small = lab.path("small");
    std::fs::create_dir(&small).unwrap();
    run(
        "mount",
        &["-t", "tmpfs", "-o", "size=2m", "small", small.to_str().unwrap()],
    );
    let (request, socket) = lab.request(&small);
    let cut = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ()).unwrap();
    lab.guest_writes(0, 9, 0, MIB);
    assert_served(&socket, &cut.exports[0], 1, 0, DISK_BYTES);
    lab.guest_writes(0, 9, 4 * MIB, 2 * MIB);
    assert_broken_and_unharmed(&lab, &socket, &cut.exports[0]);
    cut.release(&*lab.monitor, &lab.clock).unwrap();
    run("umount", &[small.to_str().unwrap()]);
}

/// Ranges that the reader discards are no longer saved.
#[test]
fn discarded_ranges_use_no_scratch_space() {
    let lab = QemuLab::new(&["raw"]);
    let (mut request, socket) = lab.request(lab.directory.path());
    let scratch = lab.path("scratch");
    let file = std::fs::File::create_new(&scratch).unwrap();
    file.set_len(DISK_BYTES).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&scratch).unwrap();
    request.disks[0].scratch = file.into();
    let cut = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ()).unwrap();
    let blocks = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&scratch).unwrap());
    lab.guest_writes(0, 9, 0, MIB);
    let with_one = blocks();
    assert!(with_one >= MIB / 512, "{with_one}");
    let uri = format!("nbd+unix:///{}?socket={}", cut.exports[0], socket.display());
    run("qemu-io", &["-d", "unmap", "-f", "raw", "-c", "discard 0 8M", &uri]);
    lab.guest_writes(0, 9, 4 * MIB, MIB);
    assert!(blocks() < with_one, "{} {with_one}", blocks());
    assert_served(&socket, &cut.exports[0], 1, 8 * MIB, MIB);
    cut.release(&*lab.monitor, &lab.clock).unwrap();
}

/// A bitmap of the last run contains the changes until the point in time, and no later ones.
#[test]
fn bitmaps_contain_the_changes_between_two_points_in_time() {
    let lab = QemuLab::new(&["qcow2", "raw"]);
    let (mut request, _) = lab.request(lab.directory.path());
    for disk in &mut request.disks {
        disk.next_bitmap = Some("first".to_owned());
    }
    let cut = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ()).unwrap();
    cut.release(&*lab.monitor, &lab.clock).unwrap();
    for disk in 0..2 {
        lab.guest_writes(disk, 50, 2 * MIB, 64 << 10);
    }
    let (mut request, socket) = lab.request(lab.directory.path());
    for disk in &mut request.disks {
        assert_eq!(disk.disk.bitmaps[0].name, "first");
        assert!(disk.disk.bitmaps[0].is_recording);
        assert_eq!(disk.disk.bitmaps[0].is_persistent, disk.disk.driver == "qcow2");
        disk.next_bitmap = Some("second".to_owned());
        disk.changes = Some("first".to_owned());
    }
    let cut = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ()).unwrap();
    for disk in 0..2 {
        lab.guest_writes(disk, 51, 8 * MIB, 64 << 10);
        let context = cut.change_contexts[disk].as_deref().unwrap();
        let uri = format!("nbd+unix:///{}?socket={}", cut.exports[disk], socket.display());
        let map: Value = serde_json::from_str(&run("nbdinfo", &[&format!("--map={context}"), "--json", &uri])).unwrap();
        let dirty: Vec<(u64, u64)> = map
            .as_array()
            .unwrap()
            .iter()
            .filter(|extent| extent["type"] == json!(1))
            .map(|extent| (extent["offset"].as_u64().unwrap(), extent["length"].as_u64().unwrap()))
            .collect();
        assert_eq!(dirty, [(2 * MIB, 64 << 10)]);
    }
    cut.release(&*lab.monitor, &lab.clock).unwrap();
    for disk in lab.disks() {
        let names: Vec<&str> = disk.bitmaps.iter().map(|bitmap| &bitmap.name[..]).collect();
        assert!(
            names.contains(&"first") && names.contains(&"second") && names.len() == 2,
            "{names:?}"
        );
    }
}

/// A single disk is frozen while the machine runs: it contains every earlier write and no later one, and ranges outside
/// of the bitmaps have not changed.
#[test]
fn one_disk_is_frozen_between_two_writes_of_a_running_machine() {
    const PLACES: u64 = 64;
    let lab = QemuLab::with(&["qcow2"], &["-qmp", "unix:{}/writer,server=on,wait=off"]);
    let writer = QmpSocket::connect(&lab.path("writer")).unwrap();
    let is_over = AtomicBool::new(false);
    let (mut last_bitmap, mut last_held) = (None, vec![1; 64]);
    std::thread::scope(|scope| {
        // Place N contains the number of the last round, so that only one sequence is possible for each point in time.
        scope.spawn(|| {
            for round in 0_u64.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                let (byte, place) = (2 + round / PLACES % 200, round % PLACES * (64 << 10));
                let line =
                    format!("qemu-io -d /machine/peripheral/disk0/virtio-backend \"write -P {byte} {place} 64k\"");
                let arguments = json!({ "command-line": line });
                writer
                    .execute(&QmpCommand::new("human-monitor-command", arguments))
                    .unwrap();
            }
        });
        // Ends the writer even if an assertion fails: otherwise it would run for ever.
        let _over = AtTheEnd(&is_over);
        for round in 0..6 {
            let (mut request, socket) = lab.request(lab.directory.path());
            let next = format!("bitmap{round}");
            request.disks[0].next_bitmap = Some(next.clone());
            request.disks[0].changes = last_bitmap.replace(next);
            let mut moments = Vec::new();
            let cut =
                PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |moment| moments.push(moment)).unwrap();
            assert_eq!(
                (moments, cut.pause),
                (vec![PointInTimeEvent::Reached], Pause::default())
            );
            lab.clock.sleep(Duration::from_millis(20));
            let uri = format!("nbd+unix:///{}?socket={}", cut.exports[0], socket.display());
            let image = lab.path("held");
            run(
                "qemu-img",
                &["convert", "-f", "raw", "-O", "raw", &uri, image.to_str().unwrap()],
            );
            let held = std::fs::read(&image).unwrap();
            let held: Vec<u8> = held.chunks(64 << 10).take(64).map(|place| place[0]).collect();
            // The places with the number of this round come first, then those with the number of the previous one.
            let turn = held.iter().position(|byte| *byte != held[0]).unwrap_or(held.len());
            assert!(held[turn..].iter().all(|byte| *byte == held[turn.min(63)]), "{held:?}");
            assert!(turn == 64 || held[0] == held[63] + 1 || held[0] == 2, "{held:?}");
            if let Some(context) = &cut.change_contexts[0] {
                let map = run("nbdinfo", &[&format!("--map={context}"), "--json", &uri]);
                let map: Value = serde_json::from_str(&map).unwrap();
                let number = |extent: &Value, key: &str| extent[key].as_u64().unwrap();
                let clean = map
                    .as_array()
                    .unwrap()
                    .iter()
                    .filter(|extent| extent["type"] == json!(0));
                for place in clean.flat_map(|extent| {
                    let start = number(extent, "offset");
                    (start >> 16)..((start + number(extent, "length")) >> 16).min(PLACES)
                }) {
                    let place = usize::try_from(place).unwrap();
                    assert_eq!(held[place], last_held[place], "place {place} has changed");
                }
            }
            last_held = held;
            cut.release(&*lab.monitor, &lab.clock).unwrap();
        }
    });
    assert!(lab.is_running());
}

pub(crate) struct AtTheEnd<'a>(pub(crate) &'a AtomicBool);

impl Drop for AtTheEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Another client takes a snapshot of the machine while we read: the frozen disk is unchanged, and the overlay stays
/// active.
#[test]
fn an_overlay_of_another_client_survives() {
    let lab = QemuLab::new(&["qcow2"]);
    let (request, socket) = lab.request(lab.directory.path());
    let run_id = request.run;
    let cut = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ()).unwrap();
    assert_eq!(runs_in(&*lab.monitor).unwrap(), [run_id].into());
    let overlay = lab.path("overlay");
    let overlay = overlay.to_str().unwrap();
    run("qemu-img", &["create", "-q", "-f", "qcow2", overlay, "16M"]);
    let file = json!({ "driver": "file", "filename": overlay });
    let arguments = json!({ "driver": "qcow2", "node-name": "overlay", "file": file, "backing": null });
    lab.execute("blockdev-add", arguments);
    lab.execute("blockdev-snapshot", json!({ "node": "format0", "overlay": "overlay" }));
    lab.guest_writes(0, 77, 0, MIB);
    assert_served(&socket, &cut.exports[0], 1, 0, DISK_BYTES);
    cut.release(&*lab.monitor, &lab.clock).unwrap();
    assert_eq!(lab.disks()[0].node, "overlay");
    assert!(lab.guest(0, "read -P 77 0 1M").contains("read 1048576/1048576"));
    assert_eq!(
        runs_in(&*lab.monitor).unwrap(),
        std::collections::BTreeSet::<RunId>::new()
    );
}
