//! Snapshots as block devices, opened by other programs.

use std::io::{BufRead as _, BufReader};
use std::process::Child;

use rustix::process::{Pid, Signal, kill_process};

use crate::host::{system, text};
use crate::rig::{Rig, noise};

const SIZE: usize = 3 << 20;

/// A server, stopped on drop.
pub(super) struct Serving {
    child: Child,
    pub(super) uris: Vec<String>,
}

impl Serving {
    /// Starts an NBD server, and waits for the lines of `count` disks.
    fn start(rig: &Rig, words: &[&str], count: usize) -> Self {
        let socket = rig.path("sock");
        Self::run(
            rig,
            &[&["serve", "nbd", "--socket", text(&socket)], words].concat(),
            count,
        )
    }

    /// Starts an iSCSI server on a port that the system chooses.
    fn start_iscsi(rig: &Rig, words: &[&str], count: usize) -> Self {
        Self::run(
            rig,
            &[&["serve", "iscsi", "--listen", "127.0.0.1:0"], words].concat(),
            count,
        )
    }

    pub(super) fn run(rig: &Rig, words: &[&str], count: usize) -> Self {
        let mut child = rig.command(words).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let uris = lines
            .take(count)
            .map(|line| line.unwrap().split("  ").next().unwrap().to_owned());
        let uris: Vec<String> = uris.collect();
        assert_eq!(uris.len(), count);
        Self { child, uris }
    }

    /// Stops the server as a user does; it must exit successfully.
    fn stop(self) {
        self.stop_with(0);
    }

    pub(super) fn stop_with(mut self, code: i32) {
        kill_process(Pid::from_child(&self.child), Signal::INT).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(code));
    }

    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn qemu_io(command: &str, uri: &str) -> String {
    let message = system("qemu-io", &["-f", "raw", "-c", command, uri]).unwrap();
    assert!(!message.contains("failed"), "{message}");
    message
}

#[test]
fn disks_of_snapshots_are_opened_by_qemu() {
    let rig = Rig::new();
    rig.write("vda.raw", &noise(SIZE, 1));
    rig.write("vdb.raw", &noise(SIZE - 100, 2));
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw", "vdb=vdb.raw"]);
    let serving = Serving::start(&rig, &["web1"], 2);
    for (name, uri) in ["vda", "vdb"].iter().zip(&serving.uris) {
        assert!(uri.contains(&format!("///web1/{name}?")), "{uri}");
        let out = rig.path("out.raw");
        system("nbdcopy", &[uri, text(&out)]).unwrap();
        assert!(rig.read("out.raw") == rig.read(&format!("{name}.raw")), "{name}");
        std::fs::remove_file(out).unwrap();
    }
    assert!(system("qemu-io", &["-f", "raw", "-c", "write 0 512", &serving.uris[0]]).is_err());
    serving.stop();
    assert!(!rig.path("sock").exists());
}

#[test]
fn writes_of_clients_are_discarded_or_kept_and_the_snapshot_is_unchanged() {
    let rig = Rig::new();
    rig.write("vda.raw", &noise(SIZE, 1));
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw"]);
    let serving = Serving::start(&rig, &["web1", "--writable"], 1);
    qemu_io("write -P 7 1M 4k", &serving.uris[0]);
    qemu_io("read -P 7 1M 4k", &serving.uris[0]);
    serving.stop();
    std::fs::create_dir(rig.path("kept")).unwrap();
    let words = ["web1:vda", "--overlay", text(&rig.path("kept")).to_owned().leak()];
    let serving = Serving::start(&rig, &words, 1);
    let original = system("qemu-io", &["-f", "raw", "-c", "read -P 7 1M 4k", &serving.uris[0]]);
    assert!(
        original.map_or(true, |message| message.contains("failed")),
        "the write was discarded"
    );
    qemu_io("write -P 8 2M 4k", &serving.uris[0]);
    qemu_io("flush", &serving.uris[0]);
    // Two servers with the same overlay would destroy it.
    let second = [&["serve", "nbd", "--socket", "second"][..], &words].concat();
    let output = rig.code(4, &second);
    assert!(crate::program::stderr(&output).contains("served already"));
    serving.stop();
    let serving = Serving::start(&rig, &words, 1);
    qemu_io("read -P 8 2M 4k", &serving.uris[0]);
    serving.stop();
    rig.ok(&["verify", "web1", "--against", "vda.raw"]);
}

/// Regression: a prune and a gc ran while a client read a snapshot. Reads failed, and the log reported damage.
#[test]
fn a_served_snapshot_can_be_read_after_its_removal() {
    let rig = Rig::new();
    rig.write("vda.raw", &noise(SIZE, 1));
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw"]);
    let id = rig.report(&["list"])["snapshots"][0]["id"].as_str().unwrap().to_owned();
    let serving = Serving::start(&rig, &["web1"], 1);
    rig.ok(&["forget", &id]);
    rig.ok(&["gc"]);
    let out = rig.path("out.raw");
    system("nbdcopy", &[&serving.uris[0], text(&out)]).unwrap();
    assert!(rig.read("out.raw") == rig.read("vda.raw"));
    serving.stop();
    let pack_count = || -> usize {
        let folders = rig.names("repo/packs");
        folders
            .iter()
            .map(|folder| rig.names(&format!("repo/packs/{folder}")).len())
            .sum()
    };
    let kept = pack_count();
    rig.ok(&["gc"]);
    let left = pack_count();
    assert!(left < kept, "{left} packs of {kept} are left");
}

#[test]
fn missing_and_unknown_arguments_are_refused() {
    let rig = Rig::new();
    rig.write("a.raw", &noise(5000, 1));
    rig.ok(&["backup", "a.raw"]);
    let output = rig.code(2, &["serve", "nbd", "a"]);
    assert!(crate::program::stderr(&output).contains("--socket"));
    assert_eq!(rig.error(2, &["serve", "nbd", "a", "--socket", "s"]).0, "usage");
    assert_eq!(rig.code(1, &["serve", "nbd", "missing", "--socket", "s"]).stdout, b"");
}

#[test]
fn disks_of_snapshots_are_served_over_iscsi() {
    /// The command warned that anyone can read the disks.
    const WARNED: i32 = 3;
    let rig = Rig::new();
    rig.write("vda.raw", &noise(SIZE, 1));
    rig.write("vdb.raw", &noise(1 << 20, 2));
    rig.ok(&["backup", "-m", "Web 1", "vda=vda.raw", "vdb=vdb.raw"]);
    let serving = Serving::start_iscsi(&rig, &["Web 1"], 2);
    for (lun, (name, url)) in ["vda", "vdb"].iter().zip(&serving.uris).enumerate() {
        assert!(
            url.ends_with(&format!("/iqn.2026-01.org.holdfast:web-1/{lun}")),
            "{url}"
        );
        let out = rig.path("out.raw");
        system("qemu-img", &["convert", "-f", "raw", "-O", "raw", url, text(&out)]).unwrap();
        assert!(rig.read("out.raw") == rig.read(&format!("{name}.raw")), "{name}");
    }
    let denied = system("qemu-io", &["-f", "raw", "-c", "write 0 512", &serving.uris[0]]);
    assert!(denied.map_or(true, |printed| printed.contains("write protected")));
    serving.stop_with(WARNED);
    let options = [
        "Web 1:vda",
        "--writable",
        "--sector-size",
        "4096",
        "--max-size",
        "2M",
        "--authority",
        "iqn.2000-01.a.b",
    ];
    let serving = Serving::start_iscsi(&rig, &options, 1);
    let url = &serving.uris[0];
    assert!(url.ends_with("/iqn.2000-01.a.b:web-1/0"), "{url}");
    qemu_io("write -P 7 1M 4k", url);
    qemu_io("read -P 7 1M 4k", url);
    let info = system("qemu-img", &["info", "-f", "raw", url]).unwrap();
    assert!(info.contains("2 MiB"), "{info}");
    serving.stop_with(WARNED);
    rig.ok(&["verify", "Web 1:vda", "--against", "vda.raw"]);
}

#[test]
fn initiators_need_the_secret_of_a_private_file() {
    let rig = Rig::new();
    rig.write("a.raw", &noise(1 << 20, 1));
    rig.ok(&["backup", "-m", "web1", "a=a.raw"]);
    rig.write("chap", b"mary a-secret-of-mary\n");
    let chmod = |mode: &str| system("chmod", &[mode, text(&rig.path("chap"))]).unwrap();
    chmod("644");
    let words = [
        "serve",
        "iscsi",
        "web1",
        "--listen",
        "127.0.0.1:0",
        "--chap-file",
        "chap",
    ];
    let refused = rig.code(2, &words);
    assert!(crate::program::stderr(&refused).contains("accessible by others"));
    chmod("600");
    let serving = Serving::start_iscsi(&rig, &["web1", "--chap-file", "chap"], 1);
    let url = &serving.uris[0];
    let open = |url: &str| system("qemu-img", &["info", "-f", "raw", url]).is_ok();
    assert!(!open(url));
    assert!(!open(&url.replace("//", "//mary%wrong-secret-of-mary@")));
    assert!(open(&url.replace("//", "//mary%a-secret-of-mary@")));
    serving.stop();
    let output = rig.code(2, &["serve", "iscsi", "web1"]);
    assert!(crate::program::stderr(&output).contains("--listen"));
    rig.code(
        2,
        &[
            "serve",
            "iscsi",
            "web1",
            "--listen",
            "127.0.0.1:0",
            "--authority",
            "disk",
        ],
    );
}

/// A boot sector that copies itself to the second sector, prints BOOTED on the first serial port, and powers off.
const BOOT_CODE: &[u8] = &[
    0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, // xor ax, ax; mov ds, ax; mov es, ax
    0xb8, 0x01, 0x03, 0xbb, 0x00, 0x7c, 0xb9, 0x02, 0x00, 0xb6, 0x00, // write one sector from 7c00 to sector 2
    0xcd, 0x13, 0x72, 0x0e, // int 13h; if it failed, power off
    0xbe, 0x2d, 0x7c, 0xac, 0x84, 0xc0, 0x74, 0x06, 0xba, 0xf8, 0x03, 0xee, 0xeb, 0xf5, // print the text
    0xba, 0x04, 0x06, 0xb8, 0x00, 0x20, 0xef, 0xf4, 0xeb, 0xfd, // power off
    b'B', b'O', b'O', b'T', b'E', b'D', b'\n', 0,
];

fn boot_sector() -> Vec<u8> {
    let mut sector = BOOT_CODE.to_vec();
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    sector
}

/// Starts a machine from a vhost-user socket until it powers off; returns what it prints.
fn boot(socket: &str) -> String {
    let chardev = format!("socket,id=disk,path={socket}");
    let words = [
        "100",
        "qemu-system-x86_64",
        "-accel",
        "tcg",
        "-M",
        "q35,memory-backend=mem",
        "-m",
        "32",
        "-object",
        "memory-backend-memfd,id=mem,size=32M,share=on",
        "-display",
        "none",
        "-nodefaults",
        "-serial",
        "stdio",
        "-chardev",
        &chardev,
        "-device",
        "vhost-user-blk-pci,chardev=disk,bootindex=1",
    ];
    system("timeout", &words).unwrap()
}

#[test]
fn machines_start_from_snapshots_and_images_over_vhost_user() {
    let rig = Rig::new();
    let original = [boot_sector(), noise(SIZE - 512, 1)].concat();
    rig.write("vda.raw", &original);
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw"]);
    let start = |words: &[&str]| {
        let socket = rig.path("vhost");
        Serving::run(
            &rig,
            &[&["serve", "vhost-user", "--socket", text(&socket)], words].concat(),
            1,
        )
    };
    let changed = [boot_sector(), boot_sector(), original[1024..].to_vec()].concat();
    // A snapshot never changes.
    let serving = start(&["web1:vda", "--writable"]);
    assert!(boot(&serving.uris[0]).contains("BOOTED"));
    serving.stop();
    rig.ok(&["verify", "web1", "--against", "vda.raw"]);
    // An overlay has the writes the next time.
    std::fs::create_dir(rig.path("kept")).unwrap();
    let kept = rig.path("kept");
    for _ in 0..2 {
        let serving = start(&["web1", "--overlay", text(&kept)]);
        assert!(boot(&serving.uris[0]).contains("BOOTED"));
        serving.stop();
    }
    // Images of two formats, in place.
    let image = rig.path("vda.raw");
    let qcow2 = rig.path("vda.qcow2");
    system(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "qcow2", text(&image), text(&qcow2)],
    )
    .unwrap();
    for path in [&image, &qcow2] {
        let serving = start(&[text(path), "--writable"]);
        assert!(boot(&serving.uris[0]).contains("BOOTED"));
        // It is locked meanwhile.
        rig.code(
            4,
            &["serve", "vhost-user", "--socket", "other", text(path), "--writable"],
        );
        serving.stop();
        system(
            "qemu-img",
            &["convert", "-O", "raw", text(path), text(&rig.path("out.raw"))],
        )
        .unwrap();
        assert!(rig.read("out.raw") == changed, "{}", path.display());
    }
    // A guest that cannot write.
    let serving = start(&[text(&image)]);
    assert!(
        !boot(&serving.uris[0]).contains("BOOTED"),
        "the boot sector cannot write"
    );
    serving.stop();
    assert!(!rig.path("vhost").exists());
}

#[test]
fn each_disk_has_a_vhost_user_socket() {
    let rig = Rig::new();
    rig.write("a.raw", &noise(SIZE, 1));
    rig.write("b.raw", &noise(SIZE, 2));
    rig.ok(&["backup", "-m", "web1", "vda=a.raw", "vdb=b.raw"]);
    let refused = rig.code(2, &["serve", "vhost-user", "web1", "--socket", "one"]);
    assert!(crate::program::stderr(&refused).contains("2 disks"));
    std::fs::create_dir(rig.path("sockets")).unwrap();
    let folder = rig.path("sockets");
    let words = ["serve", "vhost-user", "web1", "./a.raw", "--sockets", text(&folder)];
    let serving = Serving::run(&rig, &words, 9);
    let mut names = rig.names("sockets");
    names.sort_unstable();
    assert_eq!(names, ["a.sock", "web1-vda.sock", "web1-vdb.sock"]);
    let listed = rig.report(&["serve", "list"]);
    let server = &listed["servers"][0];
    assert_eq!(
        server["vhost_user"],
        serde_json::json!([format!("vhost-user:{}", folder.display())])
    );
    assert_eq!(
        server["exports"][0]["addresses"],
        serde_json::json!([folder.join("web1-vda.sock")])
    );
    rig.ok(&["serve", "remove", "web1/vda"]);
    assert!(!folder.join("web1-vda.sock").exists());
    rig.ok(&["serve", "add", "--discard", "./b.raw"]);
    assert!(folder.join("b.sock").exists());
    assert!(
        serving.uris[1].contains("QEMU:") || serving.uris[1].is_empty(),
        "{:?}",
        serving.uris
    );
    serving.stop();
    assert!(rig.names("sockets").is_empty());
    rig.code(2, &["serve", "vhost-user", "web1"]);
    rig.code(
        2,
        &["serve", "vhost-user", "web1:vda", "--socket", "s", "--queues", "0"],
    );
    rig.code(1, &["serve", "vhost-user", "./missing.raw", "--socket", "s"]);
}
