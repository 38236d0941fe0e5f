//! The iSCSI initiator of the kernel (open-iscsi) on served disks. It must be loaded, and its daemon must run:
//! `make test-kernel`.

use std::fs::File;
use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};

use super::mounts::{MountPoint, wait_for};
use super::serving::Serving;
use crate::host::{skipped, system, text};
use crate::rig::{Rig, noise};

const TARGET: &str = "iqn.2026-01.org.holdfast:web1";
/// The exit code of a server that has warned that anyone can read the disks.
const WARNED: i32 = 3;

/// Whether this kernel has a working initiator; prints the reason if not.
fn has_initiator() -> bool {
    if !rustix::process::geteuid().is_root() {
        skipped("the initiator of the kernel needs root");
        return false;
    }
    for needed in ["/sys/module/iscsi_tcp", "/run/iscsid.pid"] {
        if !Path::new(needed).exists() {
            skipped(&format!(
                "no initiator of the kernel ({needed} is absent): make test-kernel"
            ));
            return false;
        }
    }
    true
}

/// A free port of this host, for a server that is started again.
fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

/// A target that the initiator knows. It is logged out and forgotten on drop.
struct Node {
    portal: String,
}

impl Node {
    /// Finds the target by a discovery without authentication.
    fn discover(portal: &str) -> Self {
        let found = system("iscsiadm", &["-m", "discovery", "-t", "sendtargets", "-p", portal]).unwrap();
        assert!(found.contains(&format!("{portal},1 {TARGET}")), "{found}");
        Self::known(portal)
    }

    /// A target whose record exists.
    fn known(portal: &str) -> Self {
        let node = Self {
            portal: portal.to_owned(),
        };
        // The mounts of a test outlive a server that is started again.
        node.set("node.session.timeo.replacement_timeout", "600");
        node
    }

    fn run(&self, words: &[&str]) -> Result<String, String> {
        system(
            "iscsiadm",
            &[&["-m", "node", "-T", TARGET, "-p", &self.portal], words].concat(),
        )
    }

    fn set(&self, name: &str, value: &str) {
        self.run(&["-o", "update", "-n", name, "-v", value]).unwrap();
    }

    fn set_all(&self, values: &[(&str, &str)]) {
        for (name, value) in values {
            self.set(name, value);
        }
    }

    fn log_in(&self) {
        self.run(&["--login"]).unwrap();
    }

    fn log_out(&self) {
        self.run(&["--logout"]).unwrap();
    }

    /// The folder of the session in sysfs.
    fn session(&self) -> Option<PathBuf> {
        let port = self.portal.rsplit(':').next().unwrap();
        let sessions = std::fs::read_dir("/sys/class/iscsi_session").ok()?;
        sessions.map(|entry| entry.unwrap()).find_map(|entry| {
            let number = entry.file_name().into_string().unwrap().replace("session", "");
            let connection = format!("/sys/class/iscsi_connection/connection{number}:0");
            let found = std::fs::read_to_string(format!("{connection}/persistent_port")).unwrap_or_default();
            (found.trim() == port).then(|| entry.path())
        })
    }

    /// What the connection of the session has agreed on.
    fn agreed(&self, name: &str) -> String {
        let session = self.session().unwrap();
        let number = session.file_name().unwrap().to_str().unwrap().replace("session", "");
        let file = format!("/sys/class/iscsi_connection/connection{number}:0/{name}");
        std::fs::read_to_string(file).unwrap().trim().to_owned()
    }

    /// The folder of a unit in sysfs, when the kernel has found it.
    fn find_unit(&self, lun: u32) -> Option<PathBuf> {
        let device = self.session()?.join("device");
        let targets = std::fs::read_dir(device).ok()?.map(|entry| entry.unwrap());
        let mut targets = targets.filter(|entry| entry.file_name().to_string_lossy().starts_with("target"));
        let target = targets.next()?.path();
        let end = format!(":{lun}");
        let units = std::fs::read_dir(target).ok()?.map(|entry| entry.unwrap());
        let mut units = units.filter(|entry| entry.file_name().to_string_lossy().ends_with(&end));
        Some(units.next()?.path())
    }

    /// The block device of a unit.
    fn device(&self, lun: u32) -> PathBuf {
        let mut found = None;
        wait_for("the block device of the unit", || {
            let block = self.find_unit(lun).map(|unit| unit.join("block"));
            let mut names = block
                .and_then(|block| std::fs::read_dir(block).ok())
                .into_iter()
                .flatten();
            found = names
                .next()
                .map(|entry| Path::new("/dev").join(entry.unwrap().file_name()));
            found.as_ref().is_some_and(|path| path.exists())
        });
        system("udevadm", &["settle"]).ok();
        found.unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.run(&["--logout"]).ok();
        self.run(&["-o", "delete"]).ok();
        let forget = [
            "-m",
            "discoverydb",
            "-t",
            "sendtargets",
            "-p",
            &self.portal,
            "-o",
            "delete",
        ];
        system("iscsiadm", &forget).ok();
    }
}

/// A number of a block device in sysfs.
fn queue(device: &Path, name: &str) -> u64 {
    let folder = Path::new("/sys/class/block").join(device.file_name().unwrap());
    let number = std::fs::read_to_string(folder.join("queue").join(name)).unwrap();
    number.trim().parse().unwrap()
}

fn size_of(device: &Path) -> u64 {
    let size = system("blockdev", &["--getsize64", text(device)]).unwrap();
    size.parse().unwrap()
}

fn allocated_bytes(path: &Path) -> u64 {
    path.metadata().unwrap().blocks() * 512
}

fn write(path: &Path, bytes: &[u8]) {
    let mut file = File::create(path).unwrap();
    file.write_all(bytes).unwrap();
    file.sync_all().unwrap();
}

fn serve(rig: &Rig, address: &str, words: &[&str], count: usize) -> Serving {
    Serving::run(rig, &[&["serve", "iscsi", "--listen", address], words].concat(), count)
}

fn create_raw(rig: &Rig, name: &str, size_bytes: u64) {
    File::create(rig.path(name)).unwrap().set_len(size_bytes).unwrap();
}

/// Makes a file system, uses it, and gives its space back; all through the session.
fn a_file_system_lives_on(device: &Path, image: &Path, rig: &Rig) {
    let point = MountPoint::new(rig, "mnt");
    let mount = || system("mount", &[text(device), text(&point.path("."))]).unwrap();
    let unmount = || system("umount", &[text(&point.path("."))]).unwrap();
    let check = || system("e2fsck", &["-fn", text(device)]).unwrap();
    system("mkfs.ext4", &["-q", "-F", text(device)]).unwrap();
    mount();
    write(&point.path("kept"), &noise(3 << 20, 1));
    write(&point.path("deleted"), &noise(20 << 20, 2));
    unmount();
    check();
    system("blockdev", &["--flushbufs", text(device)]).unwrap();
    mount();
    assert!(point.read("kept") == noise(3 << 20, 1) && point.read("deleted") == noise(20 << 20, 2));
    let before = allocated_bytes(image);
    std::fs::remove_file(point.path("deleted")).unwrap();
    system("sync", &[]).unwrap();
    system("fstrim", &[text(&point.path("."))]).unwrap();
    let after = allocated_bytes(image);
    assert!(after + (16 << 20) < before, "UNMAP released {before} - {after} bytes");
    unmount();
    check();
}

#[test]
fn the_kernel_initiator_uses_writable_units_of_both_sector_sizes() {
    if !has_initiator() {
        return;
    }
    for sector_size in ["512", "4096"] {
        let rig = Rig::empty();
        create_raw(&rig, "a.raw", 64 << 20);
        rig.ok(&["image", "create", "b.qcow2", "32M"]);
        let address = free_address();
        let words = [
            "-m",
            "web1",
            "vda=a.raw",
            "vdb=b.qcow2",
            "--writable",
            "--sector-size",
            sector_size,
        ];
        let serving = serve(&rig, &address, &words, 2);
        let node = Node::discover(&address);
        node.set_all(&[
            ("node.conn[0].iscsi.HeaderDigest", "CRC32C"),
            ("node.conn[0].iscsi.DataDigest", "CRC32C"),
        ]);
        node.log_in();
        assert_eq!(
            (node.agreed("header_digest"), node.agreed("data_digest")),
            ("1".into(), "1".into())
        );
        let (first, second) = (node.device(0), node.device(1));
        for (device, size_bytes) in [(&first, 64 << 20), (&second, 32 << 20)] {
            assert_eq!(queue(device, "logical_block_size").to_string(), sector_size);
            assert!(queue(device, "discard_max_bytes") > 0);
            assert_eq!(size_of(device), size_bytes);
        }
        a_file_system_lives_on(&first, &rig.path("a.raw"), &rig);
        // A unit in another format, with writes past the cache of the kernel.
        rig.write("pattern", &noise(8 << 20, 3));
        let (from, to) = (
            format!("if={}", text(&rig.path("pattern"))),
            format!("of={}", text(&second)),
        );
        system("dd", &[&from, &to, "bs=1M", "oflag=direct", "conv=fsync"]).unwrap();
        system("blkdiscard", &["--offset", "1M", "--length", "2M", text(&second)]).unwrap();
        let read = |to: &str| {
            let (from, to) = (format!("if={}", text(&second)), format!("of={}", text(&rig.path(to))));
            system("dd", &[&from, &to, "bs=1M", "count=8", "iflag=direct"]).unwrap();
        };
        read("back");
        let mut expected = noise(8 << 20, 3);
        expected[1 << 20..3 << 20].fill(0);
        assert!(rig.read("back") == expected);
        // A reset of the unit ends no request with an error.
        system("sg_reset", &["--device", text(&second)]).unwrap();
        read("back");
        assert!(rig.read("back") == expected);
        node.log_out();
        assert!(node.session().is_none());
        serving.stop_with(WARNED);
        // The images have what was written.
        system("e2fsck", &["-fn", text(&rig.path("a.raw"))]).unwrap();
        system("qemu-img", &["check", "-q", text(&rig.path("b.qcow2"))]).unwrap();
        let (image, raw) = (rig.path("b.qcow2"), rig.path("b.raw"));
        system("qemu-img", &["convert", "-O", "raw", text(&image), text(&raw)]).unwrap();
        assert!(rig.read("b.raw")[..8 << 20] == expected);
    }
}

#[test]
fn the_kernel_initiator_authenticates_one_way_and_mutually() {
    if !has_initiator() {
        return;
    }
    let rig = Rig::empty();
    create_raw(&rig, "web1.raw", 8 << 20);
    rig.write("chap", b"mary a-secret-of-mary\n");
    rig.write("chap-target", b"holdfast another-secret\n");
    system(
        "chmod",
        &["600", text(&rig.path("chap")), text(&rig.path("chap-target"))],
    )
    .unwrap();
    let address = free_address();
    let words = ["./web1.raw", "--chap-file", "chap", "--chap-target-file", "chap-target"];
    let serving = serve(&rig, &address, &words, 1);
    let database = |words: &[&str]| {
        let record = ["-m", "discoverydb", "-t", "sendtargets", "-p", &address];
        system("iscsiadm", &[&record, words].concat())
    };
    database(&["-o", "new"]).unwrap();
    assert!(database(&["--discover"]).is_err(), "a discovery needs the secret, too");
    for (name, value) in [
        ("discovery.sendtargets.auth.authmethod", "CHAP"),
        ("discovery.sendtargets.auth.username", "mary"),
        ("discovery.sendtargets.auth.password", "a-secret-of-mary"),
    ] {
        database(&["-o", "update", "-n", name, "-v", value]).unwrap();
    }
    let found = database(&["--discover"]).unwrap();
    assert!(found.contains(TARGET), "{found}");
    let node = Node::known(&address);
    // A refused login is tried again for minutes otherwise.
    node.set_all(&[
        ("node.session.initial_login_retry_max", "1"),
        ("node.session.auth.authmethod", "None"),
    ]);
    assert!(node.run(&["--login"]).is_err(), "no secret");
    node.set_all(&[
        ("node.session.auth.authmethod", "CHAP"),
        ("node.session.auth.username", "mary"),
        ("node.session.auth.password", "wrong-secret-of-mary"),
    ]);
    assert!(node.run(&["--login"]).is_err(), "a wrong secret");
    node.set("node.session.auth.password", "a-secret-of-mary");
    node.log_in();
    node.device(0);
    node.log_out();
    node.set_all(&[
        ("node.session.auth.username_in", "holdfast"),
        ("node.session.auth.password_in", "not-that-secret"),
    ]);
    assert!(node.run(&["--login"]).is_err(), "a target with a wrong secret");
    node.set("node.session.auth.password_in", "another-secret");
    node.log_in();
    let device = node.device(0);
    assert_eq!(size_of(&device), 8 << 20);
    // Without an option, the disk is read-only.
    let read_only = system("blockdev", &["--getro", text(&device)]).unwrap();
    assert_eq!(read_only, "1");
    node.log_out();
    serving.stop_with(0);
}

#[test]
fn the_kernel_initiator_finds_its_writes_in_an_overlay_again() {
    if !has_initiator() {
        return;
    }
    let rig = Rig::new();
    create_raw(&rig, "vda.raw", 64 << 20);
    system("mkfs.ext4", &["-q", "-F", text(&rig.path("vda.raw"))]).unwrap();
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw"]);
    std::fs::create_dir(rig.path("kept")).unwrap();
    let address = free_address();
    let point = MountPoint::new(&rig, "mnt");
    let mount = |device: &Path| system("mount", &[text(device), text(&point.path("."))]).unwrap();
    for round in 0..2 {
        let serving = serve(&rig, &address, &["web1", "--overlay", "kept"], 1);
        let node = Node::discover(&address);
        node.log_in();
        let device = node.device(0);
        system("e2fsck", &["-fn", text(&device)]).unwrap();
        mount(&device);
        if round > 0 {
            assert!(point.read("file") == noise(5 << 20, 1));
        }
        write(&point.path("file"), &noise(5 << 20, 1));
        system("umount", &[text(&point.path("."))]).unwrap();
        node.log_out();
        serving.stop_with(WARNED);
    }
    rig.ok(&["verify", "web1", "--against", "vda.raw"]);
}

/// The session logs in again to the next server, and the file system above sees no error.
#[test]
fn the_kernel_initiator_continues_with_the_successor_of_a_killed_server() {
    const KILLS: u32 = 3;
    if !has_initiator() {
        return;
    }
    let rig = Rig::empty();
    create_raw(&rig, "web1.raw", 96 << 20);
    let address = free_address();
    let start = || serve(&rig, &address, &["./web1.raw", "--writable"], 1);
    let mut serving = start();
    let node = Node::discover(&address);
    node.log_in();
    let device = node.device(0);
    system("mkfs.ext4", &["-q", "-F", text(&device)]).unwrap();
    let point = MountPoint::new(&rig, "mnt");
    system(
        "mount",
        &["-o", "errors=remount-ro", text(&device), text(&point.path("."))],
    )
    .unwrap();
    let clock = SystemClock::new();
    let is_done = AtomicBool::new(false);
    let written = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut count = 0_u64;
            while !is_done.load(Ordering::SeqCst) {
                write(&point.path(&format!("file{}", count % 50)), &noise(300_000, count));
                count += 1;
            }
            count
        });
        for _ in 0..KILLS {
            clock.sleep(Duration::from_secs(3));
            serving.kill();
            clock.sleep(Duration::from_secs(1));
            serving = start();
            let state = node.session().unwrap().join("state");
            wait_for("the session is logged in again", || {
                std::fs::read_to_string(&state).is_ok_and(|state| state.trim() == "LOGGED_IN")
            });
        }
        clock.sleep(Duration::from_secs(2));
        is_done.store(true, Ordering::SeqCst);
        writer.join().unwrap()
    });
    assert!(written > 0);
    system("umount", &[text(&point.path("."))]).unwrap();
    system("blockdev", &["--flushbufs", text(&device)]).unwrap();
    system("e2fsck", &["-fn", text(&device)]).unwrap();
    system("mount", &[text(&device), text(&point.path("."))]).unwrap();
    for count in written.saturating_sub(50)..written {
        assert!(
            point.read(&format!("file{}", count % 50)) == noise(300_000, count),
            "{count}"
        );
    }
    system("umount", &[text(&point.path("."))]).unwrap();
    node.log_out();
    serving.stop_with(WARNED);
}

/// A unit is exchanged for a larger one while another one of the session is in use.
#[test]
fn the_kernel_initiator_adopts_a_new_size_by_a_rescan() {
    if !has_initiator() {
        return;
    }
    let rig = Rig::empty();
    create_raw(&rig, "a.raw", 64 << 20);
    create_raw(&rig, "b.raw", 16 << 20);
    let address = free_address();
    let serving = serve(
        &rig,
        &address,
        &["-m", "web1", "vda=a.raw", "vdb=b.raw", "--writable"],
        2,
    );
    let node = Node::discover(&address);
    node.log_in();
    let (first, second) = (node.device(0), node.device(1));
    system("mkfs.ext4", &["-q", "-F", text(&first)]).unwrap();
    let point = MountPoint::new(&rig, "mnt");
    system("mount", &[text(&first), text(&point.path("."))]).unwrap();
    rig.ok(&["serve", "remove", "--force", "web1/vdb"]);
    write(&point.path("file"), &noise(1 << 20, 1));
    rig.ok(&["image", "resize", "b.raw", "48M"]);
    rig.ok(&["serve", "add", "--writable", "-m", "web1", "vdb=b.raw"]);
    node.run(&["--rescan"]).unwrap();
    wait_for("the new size", || size_of(&second) == 48 << 20);
    system(
        "dd",
        &[
            "if=/dev/zero",
            &format!("of={}", text(&second)),
            "bs=1M",
            "count=48",
            "oflag=direct",
        ],
    )
    .unwrap();
    assert!(point.read("file") == noise(1 << 20, 1));
    system("umount", &[text(&point.path("."))]).unwrap();
    node.log_out();
    serving.stop_with(WARNED);
}
