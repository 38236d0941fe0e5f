//! Disks on every bus of QEMU, in every configuration: all are backed up, incrementally, and restored correctly.

use std::path::Path;

use holdfast_block::Clock as _;
use serde_json::{Value, json};

use super::bare::Bare;
use crate::host::system;
use crate::rig::assert_runs;
use holdfast_test_kit::run;

const DISK_LENGTH: usize = 4 << 20;
const SECRET: &str = "secret,id=secret0,data=matrix";
/// How long a backup may take to freeze the disks of a busy host.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

/// A configuration of a disk.
struct Setup {
    /// The `id` of the device.
    id: &'static str,
    format: &'static str,
    /// The `-blockdev` or `-drive` option of the disk.
    drive: Drive,
    /// The device without its drive and id, as JSON.
    device: &'static str,
    /// The backend of the device if it is a child of the device.
    backend: &'static str,
    /// The first major version of QEMU that supports this.
    since: u64,
}

enum Drive {
    /// `-blockdev`, with options.
    Node(&'static str),
    /// `-drive`, with options.
    Old(&'static str),
}

const fn setup(id: &'static str, format: &'static str, device: &'static str) -> Setup {
    Setup {
        id,
        format,
        drive: Drive::Node(""),
        device,
        backend: "",
        since: 0,
    }
}

const fn virtio(id: &'static str, format: &'static str, device: &'static str, drive: Drive) -> Setup {
    Setup {
        id,
        format,
        drive,
        device,
        backend: "/virtio-backend",
        since: 0,
    }
}

const CONTROLLERS: [&str; 9] = [
    r#"{"driver":"virtio-scsi-pci","id":"scsi","num_queues":2}"#,
    r#"{"driver":"ahci","id":"ahci"}"#,
    r#"{"driver":"lsi","id":"lsi"}"#,
    r#"{"driver":"megasas","id":"megasas"}"#,
    r#"{"driver":"mptsas1068","id":"mptsas"}"#,
    r#"{"driver":"pvscsi","id":"pvscsi"}"#,
    r#"{"driver":"qemu-xhci","id":"usb"}"#,
    r#"{"driver":"usb-bot","id":"bot","bus":"usb.0"}"#,
    r#"{"driver":"usb-uas","id":"uas","bus":"usb.0"}"#,
];

/// Disks in QEMU's main loop.
const MAIN_LOOP: [Setup; 17] = [
    setup("ide", "qcow2", r#"{"driver":"ide-hd","bus":"ide.0"}"#),
    setup("sata", "raw", r#"{"driver":"ide-hd","bus":"ahci.0"}"#),
    setup("virtio-scsi", "qcow2", r#"{"driver":"scsi-hd","bus":"scsi.0"}"#),
    setup("lsi-disk", "qcow2", r#"{"driver":"scsi-hd","bus":"lsi.0"}"#),
    setup("megasas-disk", "raw", r#"{"driver":"scsi-hd","bus":"megasas.0"}"#),
    setup("mptsas-disk", "qcow2", r#"{"driver":"scsi-hd","bus":"mptsas.0"}"#),
    setup("pvscsi-disk", "qcow2", r#"{"driver":"scsi-hd","bus":"pvscsi.0"}"#),
    setup("bot-disk", "qcow2", r#"{"driver":"scsi-hd","bus":"bot.0"}"#),
    setup("uas-disk", "qcow2", r#"{"driver":"scsi-hd","bus":"uas.0"}"#),
    setup("nvme", "qcow2", r#"{"driver":"nvme","serial":"1"}"#),
    virtio("plain", "qcow2", r#"{"driver":"virtio-blk-pci"}"#, Drive::Node("")),
    virtio(
        "queues",
        "raw",
        r#"{"driver":"virtio-blk-pci","num-queues":4,"packed":true,"write-cache":"off"}"#,
        Drive::Node(""),
    ),
    virtio(
        "discard",
        "qcow2",
        r#"{"driver":"virtio-blk-pci"}"#,
        Drive::Node(",discard=unmap,detect-zeroes=unmap,lazy-refcounts=on"),
    ),
    virtio(
        "luks",
        "luks",
        r#"{"driver":"virtio-blk-pci"}"#,
        Drive::Node(",key-secret=secret0"),
    ),
    virtio(
        "iotune",
        "qcow2",
        r#"{"driver":"virtio-blk-pci"}"#,
        Drive::Old(",throttling.iops-total=2000,throttling.bps-total=100000000"),
    ),
    virtio(
        "copy-on-read",
        "qcow2",
        r#"{"driver":"virtio-blk-pci"}"#,
        Drive::Old(",copy-on-read=on"),
    ),
    virtio(
        "sectors",
        "raw",
        r#"{"driver":"virtio-blk-pci","logical_block_size":4096,"physical_block_size":4096}"#,
        Drive::Node(""),
    ),
];

const THREAD_CONTROLLERS: [&str; 2] = [
    r#"{"driver":"virtio-scsi-pci","id":"scsi1","iothread":"io1"}"#,
    r#"{"driver":"virtio-scsi-pci","id":"scsi2","iothread":"io2","num_queues":4}"#,
];
/// Since QEMU 10.
const MAPPED_CONTROLLER: &str = r#"{"driver":"virtio-scsi-pci","id":"scsi3","num_queues":2,
    "iothread-vq-mapping":[{"iothread":"io1"},{"iothread":"io2"}]}"#;

/// Disks in iothreads, and one in the main loop.
const THREADS: [Setup; 9] = [
    virtio(
        "first",
        "qcow2",
        r#"{"driver":"virtio-blk-pci","iothread":"io1"}"#,
        Drive::Node(""),
    ),
    virtio(
        "beside",
        "raw",
        r#"{"driver":"virtio-blk-pci","iothread":"io1","num-queues":4}"#,
        Drive::Node(""),
    ),
    virtio(
        "second",
        "luks",
        r#"{"driver":"virtio-blk-pci","iothread":"io2"}"#,
        Drive::Node(",key-secret=secret0"),
    ),
    virtio("none", "qcow2", r#"{"driver":"virtio-blk-pci"}"#, Drive::Node("")),
    setup("scsi-first", "qcow2", r#"{"driver":"scsi-hd","bus":"scsi1.0"}"#),
    setup("scsi-beside", "raw", r#"{"driver":"scsi-hd","bus":"scsi1.0"}"#),
    setup("scsi-second", "qcow2", r#"{"driver":"scsi-hd","bus":"scsi2.0"}"#),
    Setup {
        since: 9,
        ..virtio(
            "mapped",
            "qcow2",
            r#"{"driver":"virtio-blk-pci","num-queues":4,"iothread-vq-mapping":[{"iothread":"io1"},{"iothread":"io2"}]}"#,
            Drive::Node(""),
        )
    },
    Setup {
        since: 10,
        ..setup("scsi-mapped", "qcow2", r#"{"driver":"scsi-hd","bus":"scsi3.0"}"#)
    },
];

/// The major version of the tested QEMU.
fn version() -> u64 {
    let text = run("qemu-system-x86_64", &["--version"]);
    let number = text
        .split_whitespace()
        .find_map(|word| word.split_once('.')?.0.parse().ok());
    number.unwrap_or_else(|| panic!("{text}"))
}

/// A running QEMU with these disks, and their expected content.
struct Matrix {
    bare: Bare,
    disks: Vec<(&'static Setup, Vec<u8>)>,
}

fn create(folder: &Path, setup: &Setup, byte: u8) {
    let image = folder.join(setup.id);
    let image = image.to_str().unwrap();
    if setup.format == "luks" {
        let options = "key-secret=secret0,iter-time=10";
        let words = [
            "create", "-q", "--object", SECRET, "-f", "luks", "-o", options, image, "4M",
        ];
        system("qemu-img", &words).unwrap();
        let options = format!("driver=luks,key-secret=secret0,file.filename={image}");
        let write = format!("write -P {byte} 0 4M");
        run("qemu-io", &["--object", SECRET, "--image-opts", &options, "-c", &write]);
        return;
    }
    run("qemu-img", &["create", "-q", "-f", setup.format, image, "4M"]);
    run(
        "qemu-io",
        &["-f", setup.format, "-c", &format!("write -P {byte} 0 4M"), image],
    );
}

/// How much of a disk a backup reads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reading {
    Everything,
    Changes,
}

impl Matrix {
    fn new(setups: &'static [Setup], controllers: &[&str]) -> Self {
        let version = version();
        let setups: Vec<&Setup> = setups.iter().filter(|setup| setup.since <= version).collect();
        let mut words: Vec<String> = [
            "-object",
            SECRET,
            "-object",
            "iothread,id=io1",
            "-object",
            "iothread,id=io2",
        ]
        .map(str::to_owned)
        .to_vec();
        for controller in controllers {
            words.extend(["-device".to_owned(), (*controller).to_owned()]);
        }
        for Setup {
            id,
            format,
            drive,
            device,
            ..
        } in setups.iter().copied()
        {
            words.extend(match drive {
                Drive::Node(options) => [
                    "-blockdev".to_owned(),
                    format!("driver={format},node-name=n-{id},file.driver=file,file.filename={{}}/{id}{options}"),
                ],
                Drive::Old(options) => [
                    "-drive".to_owned(),
                    format!("if=none,id=n-{id},format={format},file={{}}/{id}{options}"),
                ],
            });
            let mut device: Value = serde_json::from_str(device).unwrap();
            device["id"] = json!(id);
            device["drive"] = json!(format!("n-{id}"));
            words.extend(["-device".to_owned(), device.to_string()]);
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let bare = Bare::prepared(&words, |folder| {
            for (setup, byte) in setups.iter().zip(101..) {
                create(folder, setup, byte);
            }
        });
        let disks = setups.into_iter().zip(101..);
        Self {
            bare,
            disks: disks.map(|(setup, byte)| (setup, vec![byte; DISK_LENGTH])).collect(),
        }
    }

    /// The guest writes to all of its disks, at a new offset.
    fn write(&mut self, byte: u8) {
        let offset = usize::from(byte) << 16;
        for (setup, bytes) in &mut self.disks {
            let device = format!("/machine/peripheral/{}{}", setup.id, setup.backend);
            let text = self
                .bare
                .lab
                .guest_at(&device, &format!("write -P {byte} {offset} 4096"));
            assert!(text.contains("wrote 4096/4096"), "{}: {text}", setup.id);
            bytes[offset..offset + 4096].fill(byte);
        }
    }

    fn assert_right(&self, what: &str) {
        for (setup, bytes) in &self.disks {
            let name = format!("web1@latest:{}", setup.id);
            self.bare.rig.ok(&["restore", "--force", &name, "restored"]);
            assert!(self.bare.rig.read("restored") == *bytes, "{what}: {}", setup.id);
        }
        self.bare.wait_until_clean(what);
    }

    /// Backs up, and asserts that every disk is read completely or incrementally, as expected.
    fn assert_backed_up(&self, what: &str, expected: Reading) {
        let report = self.bare.back_up(&[]);
        for (setup, _) in &self.disks {
            let disks = report["disks"].as_array().unwrap();
            let disk = disks.iter().find(|disk| disk["name"] == setup.id);
            let disk = disk.unwrap_or_else(|| panic!("{what}: {} is not in {report}", setup.id));
            assert_eq!(disk["is_incremental"], expected == Reading::Changes, "{what}: {disk}");
        }
        self.assert_right(what);
    }

    fn assert_all_right(mut self) {
        self.assert_backed_up("first", Reading::Everything);
        self.write(1);
        self.assert_backed_up("second", Reading::Changes);
        self.bare.lab.execute("system_reset", Value::Null);
        self.write(2);
        self.assert_backed_up("after a reset", Reading::Changes);
        self.assert_changes_meanwhile_are_not_in_it();
    }

    /// Writes, resets and adds a disk during a backup.
    fn assert_changes_meanwhile_are_not_in_it(&mut self) {
        let before: Vec<Vec<u8>> = self.disks.iter().map(|(_, bytes)| bytes.clone()).collect();
        let source = self.bare.source.clone();
        let words = ["backup", &source, "--no-parent", "--bwlimit", "8M"];
        let mut backup = self.bare.rig.command(&words).spawn().unwrap();
        let lab = &self.bare.lab;
        let start = lab.clock.now();
        while lab.execute("query-block-exports", Value::Null) == json!([]) {
            assert!(
                lab.clock.now().saturating_sub(start) < PATIENCE,
                "no disk is exported in time"
            );
            assert_runs(&mut backup);
            lab.clock.sleep(std::time::Duration::from_millis(5));
        }
        self.write(3);
        let lab = &self.bare.lab;
        lab.execute("system_reset", Value::Null);
        run(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", lab.path("hot").to_str().unwrap(), "4M"],
        );
        let node =
            json!({ "driver": "qcow2", "node-name": "hot", "file": { "driver": "file", "filename": lab.path("hot") } });
        lab.execute("blockdev-add", node);
        lab.execute("object-add", json!({ "qom-type": "iothread", "id": "io-hot" }));
        let device = json!({ "driver": "virtio-blk-pci", "drive": "hot", "id": "hot", "iothread": "io-hot" });
        lab.execute("device_add", device);
        self.write(4);
        let output = backup.wait_with_output().unwrap();
        crate::rig::assert_code(&output, 0, &words);
        let now: Vec<Vec<u8>> = self.disks.iter().map(|(_, bytes)| bytes.clone()).collect();
        self.set(before);
        self.assert_right("meanwhile");
        self.set(now);
        let next = self.bare.back_up(&[]);
        let disks = next["disks"].as_array().unwrap();
        assert!(disks.iter().any(|disk| disk["name"] == "hot"), "{next}");
        self.assert_right("afterwards");
    }

    fn set(&mut self, contents: Vec<Vec<u8>>) {
        for ((_, bytes), content) in self.disks.iter_mut().zip(contents) {
            *bytes = content;
        }
    }
}

#[test]
fn disks_in_the_main_loop_on_every_bus_are_backed_up() {
    Matrix::new(&MAIN_LOOP, &CONTROLLERS).assert_all_right();
}

#[test]
fn disks_in_iothreads_on_every_bus_are_backed_up() {
    let mut controllers = THREAD_CONTROLLERS.to_vec();
    if version() >= 10 {
        controllers.push(MAPPED_CONTROLLER);
    }
    Matrix::new(&THREADS, &controllers).assert_all_right();
}
