//! Disks in iothreads. QEMU before 8.2.3 aborts when an NBD client disconnects from such an export, so these disks are
//! copied.

use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use holdfast_host::qemu::{
    Danger, DiskContext, NotServed, PointInTime, PointInTimeRequest, QemuVersion, remove_run, runs_in,
};
use holdfast_host::qmp::{Monitor as _, MonitorError, QmpCommand};
use serde_json::{Value, json};

use crate::faults::{Fault, Faulty};
use holdfast_test_kit::qemu::{DISK_BYTES, MIB, QemuLab};
use holdfast_test_kit::{assert_served, run};

const SCSI: &str = "/machine/peripheral/scsi0";

/// A machine with disks in the main loop and in two iothreads, with `scsi0` full of the byte 7.
fn lab() -> QemuLab {
    let words = [
        "-object",
        "iothread,id=io1",
        "-object",
        "iothread,id=io2",
        "-device",
        "virtio-scsi-pci,id=controller,iothread=io1",
        "-blockdev",
        "driver=qcow2,node-name=scsi,file.driver=file,file.filename={}/scsi",
        "-device",
        "scsi-hd,id=scsi0,drive=scsi,bus=controller.0",
        "-device",
        "ahci,id=ahci",
        "-blockdev",
        "driver=raw,node-name=sata,file.driver=file,file.filename={}/sata",
        "-device",
        "ide-hd,id=sata0,drive=sata,bus=ahci.0",
        "-blockdev",
        "driver=raw,node-name=blk,file.driver=file,file.filename={}/blk",
        "-device",
        "virtio-blk-pci,id=blk0,drive=blk,iothread=io2",
    ];
    QemuLab::prepared(&["qcow2"], &words, |folder| {
        for (name, format) in [("scsi", "qcow2"), ("sata", "raw"), ("blk", "raw")] {
            let image = folder.join(name);
            let image = image.to_str().unwrap();
            run("qemu-img", &["create", "-q", "-f", format, image, "16M"]);
            run("qemu-io", &["-f", format, "-c", "write -P 7 0 16M", image]);
        }
    })
}

fn is_affected(lab: &QemuLab) -> bool {
    let version = QemuVersion::query(&*lab.monitor).unwrap();
    let dangers = [Danger::NbdClientOfIothread, Danger::NodeOnBusyIothread];
    dangers.iter().any(|danger| version.defect(*danger).is_some())
}

fn guest_writes(lab: &QemuLab, byte: u8, offset: u64, length: u64) {
    let output = lab.guest_at(SCSI, &format!("write -P {byte} {offset} {length}"));
    assert!(output.contains(&format!("wrote {length}/{length}")), "{output}");
}

/// A request for the disk `scsi0` alone, the socket of its server, and its spool file.
fn request(lab: &QemuLab, folder: &Path) -> (PointInTimeRequest, std::path::PathBuf, File) {
    let (mut request, socket) = lab.request(folder);
    request.disks.retain(|disk| disk.disk.is_called("scsi0"));
    let spool = tempfile::tempfile_in(folder).unwrap();
    spool.set_len(DISK_BYTES).unwrap();
    request.disks[0].spool = Some(OwnedFd::from(spool.try_clone().unwrap()));
    (request, socket, spool)
}

/// Requests a range by writing zeroes to the export.
fn mark(socket: &Path, export: &str, offset: u64, length: u64) {
    let uri = format!("nbd+unix:///{export}?socket={}", socket.display());
    run(
        "qemu-io",
        &["-f", "raw", "-c", &format!("write -z {offset} {length}"), &uri],
    );
}

fn bytes_at(spool: &File, offset: u64) -> [u8; 4096] {
    let mut bytes = [0; 4096];
    spool.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

#[test]
fn the_iothread_of_a_disk_follows_from_its_device_or_controller() {
    let lab = lab();
    let contexts: Vec<(String, DiskContext)> = lab
        .disks()
        .into_iter()
        .map(|disk| {
            let context = DiskContext::query(&*lab.monitor, &disk.device).unwrap();
            (disk.device, context)
        })
        .collect();
    let context = |id: &str| {
        let found = contexts.iter().find(|(device, _)| device.contains(id));
        found.unwrap_or_else(|| panic!("{id} in {contexts:?}")).1.clone()
    };
    assert_eq!(context("disk0"), DiskContext::MainLoop);
    assert_eq!(context("sata0"), DiskContext::MainLoop);
    assert_eq!(context("scsi0"), DiskContext::Iothread("/objects/io1".to_owned()));
    assert_eq!(context("blk0"), DiskContext::Iothread("/objects/io2".to_owned()));
    let unknown = DiskContext::query(&*lab.monitor, "/machine/peripheral/none").unwrap();
    assert_eq!(unknown, DiskContext::Unknown);
}

#[test]
fn a_disk_in_an_iothread_is_not_exported_if_qemu_would_crash() {
    let lab = lab();
    let before = lab.everything();
    let disks = lab.disks();
    let not_served = NotServed::query(&*lab.monitor, &disks.iter().collect::<Vec<_>>()).unwrap();
    let found = disks.iter().zip(&not_served).filter(|(_, why)| why.is_some());
    let found: Vec<&str> = found.map(|(disk, _)| &disk.device[..]).collect();
    let (request, socket) = lab.request(lab.directory.path());
    let made = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ());
    if is_affected(&lab) {
        assert_eq!(found.len(), 2, "{found:?}");
        let error = made.unwrap_err();
        assert!(matches!(error, MonitorError::Dangerous { .. }), "{error}");
    } else {
        assert!(found.is_empty(), "{found:?}");
        let cut = made.unwrap();
        for (disk, export) in lab.disks().iter().zip(&cut.exports) {
            assert_served(
                &socket,
                export,
                if disk.device.contains("disk0") { 1 } else { 7 },
                0,
                DISK_BYTES,
            );
        }
        cut.release(&*lab.monitor, &lab.clock).unwrap();
    }
    assert_eq!(lab.everything(), before);
}

/// The reader requests ranges in any order, and gets them as of the point in time.
#[test]
fn ranges_of_a_disk_in_an_iothread_are_copied_as_of_the_point_in_time() {
    let lab = lab();
    let folder = lab.directory.path();
    let before = lab.everything();
    let bitmap = json!({ "node": "scsi", "name": "since" });
    lab.execute("block-dirty-bitmap-add", bitmap.clone());
    guest_writes(&lab, 9, 3 * MIB, MIB);
    let (mut request, socket, spool) = request(&lab, folder);
    request.disks[0].changes = Some("since".to_owned());
    let cut = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ()).unwrap();
    guest_writes(&lab, 99, 0, 5 * MIB);
    let copier = cut.copiers[0].as_ref().unwrap();
    let copy = || copier.copy(&*lab.monitor, &lab.clock, &|| true);
    // The bitmap with the changes until the point in time is exported as well.
    let export = &cut.exports[0];
    let map = run(
        "qemu-img",
        &[
            "map",
            "--output=json",
            "--image-opts",
            &format!(
                "driver=nbd,server.type=unix,server.path={},export={export},x-dirty-bitmap={}",
                socket.display(),
                cut.change_contexts[0].as_ref().unwrap()
            ),
        ],
    );
    let map: Value = serde_json::from_str(&map).unwrap();
    let dirty = map.as_array().unwrap().iter().filter(|range| range["data"] == false);
    let dirty: Vec<_> = dirty
        .map(|range| (range["start"].as_u64(), range["length"].as_u64()))
        .collect();
    assert_eq!(dirty, [(Some(3 * MIB), Some(MIB))]);
    mark(&socket, export, 3 * MIB, MIB);
    copy().unwrap();
    assert_eq!(bytes_at(&spool, 3 * MIB), [9; 4096]);
    assert_eq!(bytes_at(&spool, 0), [0; 4096], "the rest was not requested");
    mark(&socket, export, 0, 64 << 10);
    mark(&socket, export, DISK_BYTES - MIB, MIB);
    copy().unwrap();
    for offset in [0, DISK_BYTES - MIB, DISK_BYTES - 4096] {
        assert_eq!(bytes_at(&spool, offset), [7; 4096], "{offset}");
    }
    cut.release(&*lab.monitor, &lab.clock).unwrap();
    lab.execute("block-dirty-bitmap-remove", bitmap);
    assert_eq!(lab.everything(), before);
    let output = lab.guest_at(SCSI, "read -P 99 0 5M");
    assert!(
        output.contains("read 5242880/5242880") && !output.contains("failed"),
        "{output}"
    );
}

/// A node that QEMU always waits for is in an iothread: no node is inserted above it.
#[test]
fn a_throttle_node_in_an_iothread_gets_no_filter_if_qemu_would_crash() {
    let words = [
        "-object",
        "iothread,id=io1",
        "-object",
        "throttle-group,id=slow,x-iops-total=1000",
        "-device",
        "virtio-scsi-pci,id=controller,iothread=io1",
        "-blockdev",
        "driver=throttle,throttle-group=slow,node-name=scsi,file.driver=raw,file.file.driver=file,file.file.filename={}/scsi",
        "-device",
        "scsi-hd,id=scsi0,drive=scsi,bus=controller.0",
    ];
    let lab = QemuLab::prepared(&["qcow2"], &words, |folder| {
        run("truncate", &["-s", "16M", folder.join("scsi").to_str().unwrap()]);
    });
    let before = lab.everything();
    let (request, _socket, _spool) = request(&lab, lab.directory.path());
    let made = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ());
    match made {
        Ok(cut) if !is_affected(&lab) => cut.release(&*lab.monitor, &lab.clock).unwrap(),
        Err(MonitorError::Dangerous { .. }) if is_affected(&lab) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(lab.everything(), before);
    assert!(lab.is_running());
}

/// Requests of the guest are in flight when the disk is frozen, repeatedly.
#[test]
fn a_busy_disk_in_an_iothread_is_frozen() {
    let lab = lab();
    let before = lab.everything();
    for round in 0..10 {
        for request in 0..10u64 {
            lab.guest_at(
                SCSI,
                &format!("aio_write -q -P 9 {} 65536", (request * 10 + round) * 65_536),
            );
        }
        let (request, socket, spool) = request(&lab, lab.directory.path());
        let cut = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ()).unwrap();
        mark(&socket, &cut.exports[0], 8 * MIB, MIB);
        let copier = cut.copiers[0].as_ref().unwrap();
        copier.copy(&*lab.monitor, &lab.clock, &|| true).unwrap();
        assert_eq!(bytes_at(&spool, 8 * MIB), [7; 4096]);
        cut.release(&*lab.monitor, &lab.clock).unwrap();
        assert!(lab.is_running());
    }
    lab.guest_at(SCSI, "aio_flush");
    assert_eq!(lab.everything(), before);
}

/// Any command of a copy may fail: the guest keeps running, and the range can be copied again.
#[test]
fn a_copy_can_be_repeated_after_a_fault_at_any_command() {
    let lab = lab();
    let before = lab.everything();
    for fault in [Fault::Refused, Fault::AnswerLost] {
        for at in 1.. {
            let (request, socket, spool) = request(&lab, lab.directory.path());
            let cut = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ()).unwrap();
            let copier = cut.copiers[0].as_ref().unwrap();
            mark(&socket, &cut.exports[0], 0, DISK_BYTES);
            let monitor = Faulty::new(&*lab.monitor, fault, at);
            let copied = copier.copy(&monitor, &lab.clock, &|| true);
            if copied.is_err() {
                copier.abandon(&*lab.monitor, &lab.clock).unwrap();
                mark(&socket, &cut.exports[0], 0, DISK_BYTES);
                copier.copy(&*lab.monitor, &lab.clock, &|| true).unwrap();
            }
            assert!(lab.is_running());
            for offset in [0, DISK_BYTES - 4096] {
                assert_eq!(bytes_at(&spool, offset), [7; 4096], "{fault:?} at command {at}");
            }
            cut.release(&*lab.monitor, &lab.clock).unwrap();
            assert_eq!(lab.everything(), before, "{fault:?} at command {at}");
            if copied.is_ok() {
                assert!(at > 4, "a copy has fewer commands than expected");
                break;
            }
        }
    }
}

/// A dead reader leaves its job behind, running or ended: it is removed by the number of the run.
#[test]
fn a_copy_job_of_a_dead_reader_is_removed() {
    let lab = lab();
    let folder = lab.directory.path();
    let before = lab.everything();
    for speed in [0, 1] {
        let (request, socket, _spool) = request(&lab, folder);
        let run_id = request.run;
        let cut = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ()).unwrap();
        mark(&socket, &cut.exports[0], 0, DISK_BYTES);
        let job = json!({
            "job-id": format!("hf-{run_id}-copy0"),
            "device": format!("hf-{run_id}-0-frozen"),
            "target": format!("hf-{run_id}-0-spool"),
            "sync": "full",
            "auto-dismiss": false,
            "speed": speed,
        });
        lab.execute("blockdev-backup", job);
        guest_writes(&lab, 5, 0, MIB);
        remove_run(&*lab.monitor, &lab.clock, run_id).unwrap();
        assert!(runs_in(&*lab.monitor).unwrap().is_empty());
        assert_eq!(lab.everything(), before);
        let output = lab.guest_at(SCSI, "read -P 5 0 1M");
        assert!(
            output.contains("read 1048576/1048576") && !output.contains("failed"),
            "{output}"
        );
    }
}

/// The reader stops: the job ends, and the next one can start.
#[test]
fn a_cancelled_copy_ends() {
    let lab = lab();
    let (request, socket, spool) = request(&lab, lab.directory.path());
    let cut = PointInTime::make(&*lab.monitor, &lab.clock, request, &mut |_| ()).unwrap();
    let copier = cut.copiers[0].as_ref().unwrap();
    mark(&socket, &cut.exports[0], 0, DISK_BYTES);
    // A fast job may have ended before the check.
    copier.copy(&*lab.monitor, &lab.clock, &|| false).ok();
    mark(&socket, &cut.exports[0], 0, DISK_BYTES);
    copier.copy(&*lab.monitor, &lab.clock, &|| true).unwrap();
    assert_eq!(bytes_at(&spool, DISK_BYTES - 4096), [7; 4096]);
    cut.release(&*lab.monitor, &lab.clock).unwrap();
}

/// Adds a filter to the disk `scsi0` and deletes it, while requests of the guest are in flight; false if QEMU is gone.
fn filter_comes_and_goes(lab: &QemuLab) -> bool {
    let scratch = json!({ "driver": "null-co", "node-name": "scratch", "size": DISK_BYTES });
    let filter = json!({ "driver": "copy-before-write", "node-name": "filter", "file": "scsi", "target": "scratch" });
    let commands = [
        ("blockdev-add", scratch),
        ("blockdev-add", filter),
        ("blockdev-del", json!({ "node-name": "filter" })),
        ("blockdev-del", json!({ "node-name": "scratch" })),
    ];
    let answers = commands.map(|(name, arguments)| lab.monitor.execute(&QmpCommand::new(name, arguments)));
    let is_gone = |error: &MonitorError| matches!(error, MonitorError::Gone { .. });
    let [added, ..] = &answers;
    assert!(added.is_ok() || added.as_ref().is_err_and(is_gone), "{added:?}");
    !answers.iter().any(|answer| answer.as_ref().is_err_and(is_gone))
}

/// Runs `work` while other threads use all processors.
fn on_a_busy_host<T>(work: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..=std::thread::available_parallelism().map_or(1, NonZeroUsize::get) {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        is_over.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Why filters of such disks are added only while the machine is paused: see `Danger::NodeOnBusyIothread`.
#[test]
fn a_filter_on_a_busy_iothread_crashes_qemu_before_9() {
    let lab = lab();
    let version = QemuVersion::query(&*lab.monitor).unwrap();
    let is_affected = version.defect(Danger::NodeOnBusyIothread).is_some();
    let write = |round: u64| {
        for piece in 0..4 {
            let offset = (round * 4 + piece) % 128 * (64 << 10);
            let line = format!("qemu-io -d {SCSI} \"aio_write -P 5 {offset} 64k\"");
            lab.execute("human-monitor-command", json!({ "command-line": line }));
        }
    };
    // The requests of a guest begin in the iothread. Those of `qemu-io` are scheduled there from the main loop. If a stop
    // comes before they begin, QEMU holds them back while it waits for all requests, and they run although the machine
    // is paused: without the read, 3 of 466 such QEMUs crashed on a busy host. The read begins after them.
    for round in 0..20 {
        write(round);
        lab.guest_at(SCSI, "read 0 512");
        lab.execute("stop", Value::Null);
        assert!(
            filter_comes_and_goes(&lab),
            "QEMU {version} ended although it was paused"
        );
        lab.execute("cont", Value::Null);
    }
    let survives = |round| {
        write(round);
        filter_comes_and_goes(&lab)
    };
    // On an idle host all requests are completed before the filter is added. How soon an affected QEMU crashes depends on
    // what else the host does.
    let rounds = if is_affected { 5000 } else { 100 };
    let survived_all = on_a_busy_host(|| (0..rounds).all(survives));
    assert_eq!(survived_all, !is_affected, "QEMU {version}");
}
