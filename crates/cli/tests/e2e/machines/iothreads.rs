//! Machines with disks in iothreads, on every bus that supports them, and others: they keep running, and restores are
//! correct.

use std::path::Path;

use holdfast_host::qmp::{Monitor, QmpCommand};
use serde_json::{Value, json};

use super::bare::Bare;
use super::{World, at};
use crate::rig::Rig;
use holdfast_test_kit::libvirt::LibvirtLab;
use holdfast_test_kit::run;

const DISK_LENGTH: usize = 8 << 20;
/// How long the watchdog may take, which waits ten seconds before it resumes a paused machine.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(40);

/// A disk of the machine in its configuration.
#[derive(Clone, Copy)]
struct Attachment {
    target: &'static str,
    bus: &'static str,
    /// The iothread of the device or its controller.
    iothread: Option<u32>,
}

impl Attachment {
    const fn new(target: &'static str, bus: &'static str, iothread: Option<u32>) -> Self {
        Self { target, bus, iothread }
    }
}

/// The disks of the machine, with their devices in QEMU.
const DISKS: [(Attachment, &str); 4] = [
    (Attachment::new("vda", "virtio", Some(1)), "virtio-disk0/virtio-backend"),
    (Attachment::new("vdb", "virtio", Some(2)), "virtio-disk1/virtio-backend"),
    (Attachment::new("sda", "scsi", Some(1)), "scsi0-0-0-0"),
    (Attachment::new("sdb", "sata", None), "sata0-0-1"),
];

/// A running machine with those disks, and their expected content.
struct Threads {
    lab: LibvirtLab,
    rig: Rig,
    disks: Vec<(&'static str, &'static str, Vec<u8>)>,
}

fn create(image: &Path, format: &str, byte: u8) {
    let image = image.to_str().unwrap();
    run("qemu-img", &["create", "-q", "-f", format, image, "8M"]);
    run(
        "qemu-io",
        &["-f", format, "-c", &format!("write -P {byte} 0 8M"), image],
    );
}

/// The XML element of a disk in libvirt's configuration.
fn disk_element(lab: &LibvirtLab, attachment: Attachment, format: &str) -> String {
    let Attachment { target, bus, iothread } = attachment;
    let image = lab.path(target);
    // On a SCSI bus, the controller has the iothread.
    let thread = iothread.filter(|_| bus == "virtio");
    let thread = thread.map_or(String::new(), |thread| format!(" iothread='{thread}'"));
    format!(
        "<disk type='file' device='disk'><driver name='qemu' type='{format}'{thread}/><source file='{}'/>\
         <target dev='{target}' bus='{bus}'/></disk>",
        image.display()
    )
}

impl Threads {
    fn new() -> Self {
        let lab = LibvirtLab::new();
        lab.connect();
        let mut devices = String::new();
        let mut disks = Vec::new();
        for (byte, (attachment, device)) in (1..).zip(DISKS) {
            let target = attachment.target;
            let format = if target == "vdb" { "raw" } else { "qcow2" };
            create(&lab.path(target), format, byte);
            devices.push_str(&disk_element(&lab, attachment, format));
            disks.push((target, device, vec![byte; DISK_LENGTH]));
        }
        let xml = format!(
            "<domain type='qemu'><name>web1</name><memory unit='MiB'>16</memory><vcpu>1</vcpu><iothreads>2</iothreads>\
             <os><type arch='x86_64' machine='pc'>hvm</type></os><features><acpi/></features><devices>\
             <controller type='scsi' index='0' model='virtio-scsi'><driver iothread='1'/></controller>{devices}\
             <memballoon model='none'/></devices></domain>"
        );
        lab.define_xml(&xml);
        lab.virsh(&["start", "web1"]);
        Self {
            lab,
            rig: Rig::new(),
            disks,
        }
    }

    fn hmp(&self, line: &str) -> String {
        let machine = holdfast_host::Hypervisor::machine(&self.lab.connect(), "web1").unwrap();
        hmp(machine.monitor(), line)
    }

    /// The guest writes to each of its disks, at a new offset.
    fn write(&mut self, byte: u8) {
        let offset = usize::from(byte) << 16;
        for number in 0..self.disks.len() {
            let device = self.disks[number].1;
            let line = format!("qemu-io -d /machine/peripheral/{device} \"write -P {byte} {offset} 4096\"");
            let text = self.hmp(&line);
            assert!(!text.contains("rror"), "{text}");
            self.disks[number].2[offset..offset + 4096].fill(byte);
        }
    }

    /// Whether a backup is reading the disks.
    fn is_read(&self) -> bool {
        let machine = holdfast_host::Hypervisor::machine(&self.lab.connect(), "web1").unwrap();
        let exports = machine
            .monitor()
            .execute(&QmpCommand::new("query-block-exports", Value::Null));
        exports.is_ok_and(|exports| {
            exports
                .as_array()
                .is_some_and(|exports| exports.len() == self.disks.len())
        })
    }

    fn report(&self, words: &[&str]) -> Value {
        self.rig.report(&at(&self.lab.uri(), words))["machines"][0].clone()
    }

    fn assert_snapshot_is_right(&self, what: &str) {
        for (target, _, bytes) in &self.disks {
            let name = format!("web1@latest:{target}");
            self.rig.ok(&["restore", "--force", &name, "restored"]);
            assert!(self.rig.read("restored") == *bytes, "{what}: {target}");
        }
    }

    /// Waits for the watchdog: a backup killed at the point in time leaves the machine paused.
    fn wait_until_it_runs(&self) {
        let clock = holdfast_block::SystemClock::new();
        let start = holdfast_block::Clock::now(&clock);
        loop {
            match self.lab.virsh(&["domstate", "web1"]).trim() {
                "running" => return,
                "paused" => {}
                other => panic!("the machine is {other}"),
            }
            let waited = holdfast_block::Clock::now(&clock).saturating_sub(start);
            assert!(waited < PATIENCE, "the machine is still paused after {waited:?}");
            holdfast_block::Clock::sleep(&clock, std::time::Duration::from_millis(50));
        }
    }

    fn assert_runs_and_is_clean(&self, what: &str) {
        assert_eq!(self.lab.virsh(&["domstate", "web1"]).trim(), "running", "{what}");
        let machine = holdfast_host::Hypervisor::machine(&self.lab.connect(), "web1").unwrap();
        let left = holdfast_host::qemu::runs_in(machine.monitor()).unwrap();
        assert!(left.is_empty(), "{what}: {left:?}");
    }
}

fn hmp(monitor: &dyn Monitor, line: &str) -> String {
    let command = QmpCommand::new("human-monitor-command", json!({ "command-line": line }));
    monitor.execute(&command).unwrap().as_str().unwrap().to_owned()
}

/// Asserts that only the changes of each disk were read.
fn assert_by_bitmap(report: &Value) {
    for disk in report["disks"].as_array().unwrap() {
        assert_eq!(disk["is_incremental"], true, "{disk}");
    }
}

#[test]
fn a_machine_with_iothreads_is_backed_up_repeatedly_and_keeps_running() {
    let mut threads = Threads::new();
    threads.write(10);
    let first = threads.report(&["backup", "web1"]);
    assert_eq!(first["method"], "filter");
    threads.assert_runs_and_is_clean("first");
    threads.assert_snapshot_is_right("first");
    for byte in 11..13 {
        threads.write(byte);
        let next = threads.report(&["backup", "web1"]);
        assert_by_bitmap(&next);
        threads.assert_runs_and_is_clean("incremental");
        threads.assert_snapshot_is_right("incremental");
    }
    threads.hmp("system_reset");
    threads.write(13);
    let after_reset = threads.report(&["backup", "web1", "--with-memory"]);
    assert_eq!(after_reset["consistency"], "memory");
    threads.assert_runs_and_is_clean("memory");
    threads.assert_snapshot_is_right("memory");
    // A disk that is attached while the machine is running.
    create(&threads.lab.path("vdc"), "qcow2", 9);
    let hot = threads.lab.path("hot.xml");
    std::io::Write::write_all(
        &mut std::fs::File::create(&hot).unwrap(),
        disk_element(&threads.lab, Attachment::new("vdc", "virtio", Some(2)), "qcow2").as_bytes(),
    )
    .unwrap();
    threads
        .lab
        .virsh(&["attach-device", "web1", hot.to_str().unwrap(), "--live"]);
    threads
        .disks
        .push(("vdc", "virtio-disk2/virtio-backend", vec![9; DISK_LENGTH]));
    threads.write(14);
    threads.report(&["backup", "web1"]);
    threads.assert_runs_and_is_clean("hot plug");
    threads.assert_snapshot_is_right("hot plug");
    let uri = threads.lab.uri();
    threads.rig.ok(&at(
        &uri,
        &[
            "export",
            "--now",
            "web1",
            "folder",
            "--format",
            "dir",
            "--disk-format",
            "raw",
        ],
    ));
    threads.assert_runs_and_is_clean("export");
    for (target, _, bytes) in &threads.disks {
        assert!(threads.rig.read(&format!("folder/{target}.raw")) == *bytes, "{target}");
    }
}

/// With little space for scratch files, disks are copied in several small parts, whose space is freed once they were
/// read. Most parts of a mostly empty disk are zero.
#[test]
fn a_disk_is_copied_in_several_parts_completely_and_incrementally() {
    let mut threads = Threads::new();
    let sparse = threads.lab.path("sparse");
    let image = sparse.to_str().unwrap();
    run("qemu-img", &["create", "-q", "-f", "qcow2", image, "64M"]);
    let writes = [
        "-c",
        "write -P 5 1M 64k",
        "-c",
        "write -P 6 40M 3M",
        "-c",
        "write -P 7 67100672 8192",
    ];
    run("qemu-io", &[&["-f", "qcow2"], &writes[..], &[image]].concat());
    let hot = threads.lab.path("hot.xml");
    let element = disk_element(&threads.lab, Attachment::new("sparse", "virtio", Some(1)), "qcow2")
        .replace("dev='sparse'", "dev='vdc'");
    std::io::Write::write_all(&mut std::fs::File::create(&hot).unwrap(), element.as_bytes()).unwrap();
    threads
        .lab
        .virsh(&["attach-device", "web1", hot.to_str().unwrap(), "--live"]);
    let mut bytes = vec![0; 64 << 20];
    bytes[1 << 20..][..65_536].fill(5);
    bytes[40 << 20..][..3 << 20].fill(6);
    bytes[67_100_672..].fill(7);
    threads.disks.push(("vdc", "virtio-disk2/virtio-backend", bytes));
    let words = ["backup", "web1", "--scratch-max", "16M"];
    let first = threads.report(&words);
    let scratch_bytes = first["load"]["scratch_bytes"].as_u64().unwrap();
    assert!(scratch_bytes < 16 << 20, "{scratch_bytes}");
    threads.assert_snapshot_is_right("parts");
    for byte in [30, 100] {
        threads.write(byte);
    }
    assert_by_bitmap(&threads.report(&words));
    threads.assert_snapshot_is_right("changes of parts");
    threads.assert_runs_and_is_clean("parts");
}

/// libvirtd is restarted while QEMU copies, as in an update of the host.
#[test]
fn libvirtd_may_be_restarted_while_disks_are_copied() {
    let mut threads = Threads::new();
    let uri = threads.lab.uri();
    let words = at(&uri, &["backup", "web1", "--bwlimit", "3M", "--scratch-max", "16M"]);
    let child = threads.rig.command(&words).spawn().unwrap();
    let clock = holdfast_block::SystemClock::new();
    let sleep = |ms| holdfast_block::Clock::sleep(&clock, std::time::Duration::from_millis(ms));
    while !threads.is_read() {
        sleep(20);
    }
    threads.lab.stop_daemon();
    sleep(500);
    threads.lab.start_daemon();
    threads.lab.connect();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", crate::program::stderr(&output));
    threads.assert_runs_and_is_clean("over a restart");
    threads.assert_snapshot_is_right("over a restart");
    threads.write(40);
    assert_by_bitmap(&threads.report(&["backup", "web1"]));
    threads.assert_snapshot_is_right("after a restart");
}

/// A backup is killed while QEMU copies: the machine keeps running, and the next backup removes the leftovers.
#[test]
fn a_killed_backup_of_iothreads_leaves_nothing_after_the_next_one() {
    let mut threads = Threads::new();
    let uri = threads.lab.uri();
    threads.report(&["backup", "web1"]);
    let clock = holdfast_block::SystemClock::new();
    for (number, wait_ms) in [300, 600, 900, 1200, 1600, 2000].into_iter().enumerate() {
        threads.write(20 + u8::try_from(number).unwrap());
        let words = at(&uri, &["backup", "web1", "--no-parent", "--bwlimit", "8M"]);
        let mut child = threads.rig.command(&words).spawn().unwrap();
        holdfast_block::Clock::sleep(&clock, std::time::Duration::from_millis(wait_ms));
        child.kill().unwrap();
        child.wait().unwrap();
        threads.wait_until_it_runs();
    }
    threads.report(&["backup", "web1"]);
    threads.assert_runs_and_is_clean("after kills");
    threads.assert_snapshot_is_right("after kills");
}

#[test]
fn a_bare_qemu_with_iothreads_is_backed_up_and_keeps_running() {
    let words = [
        "-object",
        "iothread,id=io1",
        "-device",
        "virtio-scsi-pci,id=controller,iothread=io1",
        "-blockdev",
        "driver=qcow2,node-name=scsi,file.driver=file,file.filename={}/scsi",
        "-device",
        "scsi-hd,id=scsi0,drive=scsi,bus=controller.0",
    ];
    let bare = Bare::prepared(&words, |folder| create(&folder.join("scsi"), "qcow2", 7));
    let restored = |what: &str, byte: u8| {
        bare.rig.ok(&["restore", "--force", "web1@latest:scsi0", "restored"]);
        assert!(bare.rig.read("restored") == vec![byte; DISK_LENGTH], "{what}");
        bare.assert_snapshot_is_right(what);
        bare.wait_until_clean(what);
    };
    bare.back_up(&[]);
    restored("first", 7);
    let text = bare.lab.guest_at("/machine/peripheral/scsi0", "write -P 8 0 8M");
    assert!(text.contains("wrote 8388608/8388608"), "{text}");
    let next = bare.back_up(&[]);
    assert_by_bitmap(&next);
    restored("incremental", 8);
    bare.back_up(&["--with-memory"]);
    restored("memory", 8);
}

/// QEMU exports the disks of a machine without iothreads directly, without a warning.
#[test]
fn disks_in_the_main_loop_are_exported_without_a_warning() {
    let world = World::new();
    let uri = world.lab.uri();
    let output = world.rig.code(0, &at(&uri, &["backup", "web1"]));
    let text = crate::program::stderr(&output);
    assert!(!text.contains("iothread"), "{text}");
}

/// The image of the previous backup is below overlays, and QEMU must not export it here: such disks are read
/// completely, once.
#[test]
fn a_snapshot_of_another_program_between_two_backups_of_iothreads_loses_nothing() {
    let mut threads = Threads::new();
    threads.report(&["backup", "web1"]);
    threads.write(10);
    let words = [
        "snapshot-create-as",
        "web1",
        "s1",
        "--disk-only",
        "--atomic",
        "--no-metadata",
    ];
    threads.lab.virsh(&words);
    threads.write(11);
    threads.report(&["backup", "web1"]);
    threads.assert_snapshot_is_right("a snapshot of others");
    threads.write(12);
    assert_by_bitmap(&threads.report(&["backup", "web1"]));
    threads.assert_snapshot_is_right("on the overlays");
    threads.assert_runs_and_is_clean("on the overlays");
}
