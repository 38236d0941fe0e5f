//! Freezing the disks of a libvirt machine, together with libvirt's own block jobs.

use holdfast_host::qemu::{PointInTime, RunId, remove_run, runs_in};
use holdfast_host::qmp::MonitorError;
use holdfast_host::{Hypervisor as _, MachineState};

use holdfast_test_kit::libvirt::{DISK_BYTES, LibvirtLab};
use holdfast_test_kit::{assert_served, run};

/// Asserts with two read commands of `qemu-io` what the first image of the machine holds.
fn assert_image(lab: &LibvirtLab, [first, second]: [&str; 2]) {
    let image = lab.path("web1-a");
    let words = ["-f", "qcow2", "-c", first, "-c", second, image.to_str().unwrap()];
    let output = run("qemu-io", &words);
    assert!(!output.contains("failed"), "{output}");
}

#[test]
fn disks_freeze_under_libvirt_without_confusing_it() {
    let lab = LibvirtLab::new();
    let libvirt = lab.connect();
    lab.define("web1", &["qcow2", "raw"]);
    lab.virsh(&["start", "web1"]);
    let machine = libvirt.machine("web1").unwrap();
    let before = lab.virsh(&["dumpxml", "web1"]);
    let (request, socket) = lab.request(1, &*machine);
    let cut = PointInTime::make(machine.monitor(), &lab.clock, request, &mut |_| ()).unwrap();
    assert_eq!(machine.describe().unwrap().summary.state, MachineState::Running);
    for disk in 0..2 {
        lab.guest_writes(machine.monitor(), disk, 99, 1 << 20, 1 << 20);
        assert_served(&socket, &cut.exports[disk], disk + 1, 0, DISK_BYTES);
    }
    cut.release(machine.monitor(), &lab.clock).unwrap();
    assert_eq!(lab.virsh(&["dumpxml", "web1"]), before);
    // The writes are in the right images, and libvirt's own block jobs still work.
    let overlay = lab.path("overlay");
    let spec = format!("vda,file={}", overlay.display());
    lab.virsh(&[
        "snapshot-create-as",
        "web1",
        "s",
        "--disk-only",
        "--no-metadata",
        "--diskspec",
        &spec,
        "--diskspec",
        "vdb,snapshot=no",
    ]);
    lab.virsh(&["blockcommit", "web1", "vda", "--active", "--pivot", "--wait"]);
    lab.virsh(&["destroy", "web1"]);
    assert_image(&lab, ["read -P 99 1M 1M", "read -P 1 2M 6M"]);
}

/// Jobs that libvirt refuses while a filter is in place give a clear error, and the machine keeps running; jobs that it
/// allows are correct.
#[test]
fn block_jobs_of_others_are_refused_or_correct() {
    let lab = LibvirtLab::new();
    let libvirt = lab.connect();
    lab.define("web1", &["qcow2"]);
    lab.virsh(&["start", "web1"]);
    let machine = libvirt.machine("web1").unwrap();
    let (request, socket) = lab.request(7, &*machine);
    let cut = PointInTime::make(machine.monitor(), &lab.clock, request, &mut |_| ()).unwrap();
    let overlay = lab.path("overlay");
    let spec = format!("vda,file={}", overlay.display());
    lab.virsh(&[
        "snapshot-create-as",
        "web1",
        "s",
        "--disk-only",
        "--no-metadata",
        "--diskspec",
        &spec,
    ]);
    lab.guest_writes(machine.monitor(), 0, 77, 0, 1 << 20);
    assert_served(&socket, &cut.exports[0], 1, 0, DISK_BYTES);
    let uri = lab.uri();
    let commit = [
        "-c",
        &uri,
        "blockcommit",
        "web1",
        "vda",
        "--active",
        "--pivot",
        "--wait",
    ];
    let refused = std::process::Command::new("virsh").args(commit).output().unwrap();
    assert!(
        !refused.status.success(),
        "a commit below the filter would pull the disk from under it"
    );
    assert_eq!(machine.describe().unwrap().summary.state, MachineState::Running);
    cut.release(machine.monitor(), &lab.clock).unwrap();
    lab.virsh(&["blockcommit", "web1", "vda", "--active", "--pivot", "--wait"]);
    lab.virsh(&["destroy", "web1"]);
    assert_image(&lab, ["read -P 77 0 1M", "read -P 1 1M 7M"]);
}

/// libvirtd ends while disks are frozen. The machine keeps running, the exports still work, and the next connection
/// cleans up.
#[test]
fn a_restart_of_libvirtd_leaves_nothing_behind() {
    let mut lab = LibvirtLab::new();
    let libvirt = lab.connect();
    lab.define("web1", &["qcow2", "raw"]);
    lab.virsh(&["start", "web1"]);
    let machine = libvirt.machine("web1").unwrap();
    let (request, socket) = lab.request(0xabc, &*machine);
    let cut = PointInTime::make(machine.monitor(), &lab.clock, request, &mut |_| ()).unwrap();
    let exports = cut.exports.clone();
    lab.stop_daemon();
    assert!(matches!(
        cut.release(machine.monitor(), &lab.clock),
        Err(MonitorError::Transport { .. } | MonitorError::Gone { .. })
    ));
    assert_served(&socket, &exports[1], 2, 0, DISK_BYTES);
    lab.start_daemon();
    let libvirt = lab.connect();
    let machine = libvirt.machine("web1").unwrap();
    assert_eq!(machine.describe().unwrap().summary.state, MachineState::Running);
    assert_eq!(runs_in(machine.monitor()).unwrap(), [RunId(0xabc)].into());
    lab.guest_writes(machine.monitor(), 1, 9, 0, 1 << 20);
    assert_served(&socket, &exports[1], 2, 0, DISK_BYTES);
    remove_run(machine.monitor(), &lab.clock, RunId(0xabc)).unwrap();
    assert!(runs_in(machine.monitor()).unwrap().is_empty());
    lab.guest_writes(machine.monitor(), 1, 10, 0, 1 << 20);
}
