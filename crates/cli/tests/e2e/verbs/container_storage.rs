//! Containers whose files are on ext4, XFS, btrfs and NFS. NFS needs a server in the kernel: `make test-kernel`.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::mounts::{MountPoint, wait_for};
use crate::host::{file_system, skipped, system, text};
use crate::rig::{Rig, noise};

const STORAGE_BYTES: u64 = 512 << 20;

fn write(path: &Path, bytes: &[u8]) {
    let mut file = File::create(path).unwrap();
    file.write_all(bytes).unwrap();
    file.sync_all().unwrap();
}

/// A container of a failed test must not keep its storage in use.
struct Unmounted<'a> {
    rig: &'a Rig,
    name: &'a str,
}

impl Drop for Unmounted<'_> {
    fn drop(&mut self) {
        self.rig.run(&["container", "unmount", self.name]);
    }
}

/// What users do with a container, from its creation to a switch back.
fn a_container_lives_at(rig: &Rig, container: &Path, more: &[&str]) {
    let name = text(container);
    let _end = Unmounted { rig, name };
    let point = MountPoint::new(rig, "mnt");
    let folder = point.path(".");
    let mount = || rig.ok(&["container", "mount", name, text(&folder)]);
    let layer_count = || {
        let info = rig.report(&["container", "info", name]);
        info["layers"].as_array().unwrap().len()
    };
    rig.ok(&[&["container", "create", name, "64M"], more].concat());
    mount();
    write(&point.path("first"), b"one");
    write(&point.path("kept"), &noise(2 << 20, 1));
    let taken = rig.report(&["container", "snapshot", name, "monday"]);
    assert_eq!(taken["consistency"], "frozen", "{taken}");
    write(&point.path("first"), b"two");
    write(&point.path("second"), &noise(1 << 20, 2));
    rig.ok(&["container", "snapshot", name, "tuesday"]);
    std::fs::remove_file(point.path("second")).unwrap();
    let past = MountPoint::new(rig, "past");
    rig.ok(&[
        "container",
        "mount",
        name,
        text(&past.path(".")),
        "--snapshot",
        "tuesday",
    ]);
    assert!(past.read("second") == noise(1 << 20, 2) && past.read("first") == b"two");
    // The layers of a mounted snapshot are locked.
    let (kind, message) = rig.error(4, &["container", "delete", name, "tuesday"]);
    assert_eq!(kind, "locked", "{message}");
    rig.ok(&["container", "unmount", text(&past.path("."))]);
    // So is the container itself.
    let other = MountPoint::new(rig, "other");
    let (kind, message) = rig.error(4, &["container", "mount", name, text(&other.path("."))]);
    assert_eq!(kind, "locked", "{message}");
    rig.ok(&["container", "merge", name]);
    assert_eq!(layer_count(), 2);
    // Without the right CAP_SYS_RESOURCE, an ext4 grows with the next mount, and the command warns.
    let grown = rig.run(&["container", "resize", name, "96M"]);
    assert!(matches!(grown.status.code(), Some(0 | 3)), "{grown:?}");
    write(&point.path("third"), &noise(16 << 20, 3));
    rig.ok(&["container", "trim", name]);
    rig.ok(&["container", "merge", name, "--all"]);
    assert_eq!(layer_count(), 1);
    rig.ok(&["container", "snapshot", name, "wednesday"]);
    write(&point.path("first"), b"three");
    rig.ok(&["container", "unmount", name]);
    rig.ok(&["container", "check", name]);
    rig.ok(&["container", "switch", name, "wednesday", "--keep-as", "late"]);
    mount();
    let size = rustix::fs::statvfs(&folder).unwrap();
    assert!(size.f_blocks * size.f_frsize > 80 << 20);
    assert_eq!(point.read("first"), b"two");
    assert!(point.read("kept") == noise(2 << 20, 1) && point.read("third") == noise(16 << 20, 3));
    rig.ok(&["container", "unmount", name]);
    // NFS keeps files that were deleted while they were open.
    wait_for("deleted files are gone", || {
        let names = std::fs::read_dir(container).unwrap();
        let mut names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.all(|name| !name.starts_with(".nfs"))
    });
    rig.ok(&["container", "check", name]);
}

/// A container in a file system of this kind.
fn a_container_lives_on(kind: &str) {
    let rig = Rig::empty();
    let Some(storage) = file_system(kind, &rig.path("storage"), STORAGE_BYTES) else {
        return;
    };
    for format in ["qcow2", "parallels"] {
        a_container_lives_at(&rig, &storage.path.join(format), &["--format", format]);
    }
}

#[test]
fn container_storage_can_be_ext4() {
    a_container_lives_on("ext4");
}

#[test]
fn container_storage_can_be_xfs() {
    a_container_lives_on("xfs");
}

#[test]
fn container_storage_can_be_btrfs() {
    a_container_lives_on("btrfs");
}

/// A folder that this host exports to itself.
struct NfsExport {
    /// The folder on the server.
    folder: PathBuf,
    /// Where the client has mounted it.
    point: PathBuf,
}

impl NfsExport {
    /// `None`, with the reason printed, if this kernel serves no NFS.
    fn mount(rig: &Rig, version: &str) -> Option<Self> {
        let threads = std::fs::read_to_string("/proc/fs/nfsd/threads").unwrap_or_default();
        let has_server = threads.trim().parse().is_ok_and(|count: u32| count > 0);
        if !has_server || !rustix::process::geteuid().is_root() {
            skipped("no NFS server in this kernel: make test-kernel");
            return None;
        }
        let export = Self {
            folder: rig.path("exported"),
            point: rig.path("storage"),
        };
        std::fs::create_dir(&export.folder).unwrap();
        std::fs::create_dir(&export.point).unwrap();
        let source = format!("127.0.0.1:{}", text(&export.folder));
        system(
            "exportfs",
            &["-o", "rw,no_root_squash,insecure,no_subtree_check", &source],
        )
        .unwrap();
        let options = format!("vers={version},proto=tcp,addr=127.0.0.1");
        system("mount", &["-t", "nfs", "-o", &options, &source, text(&export.point)]).unwrap();
        Some(export)
    }
}

impl Drop for NfsExport {
    fn drop(&mut self) {
        system("umount", &["--lazy", text(&self.point)]).ok();
        system("exportfs", &["-u", &format!("127.0.0.1:{}", text(&self.folder))]).ok();
    }
}

fn a_container_lives_on_nfs(version: &str) {
    let rig = Rig::empty();
    let Some(export) = NfsExport::mount(&rig, version) else {
        return;
    };
    for format in ["qcow2", "parallels"] {
        a_container_lives_at(&rig, &export.point.join(format), &["--format", format]);
    }
}

#[test]
fn container_storage_can_be_nfs_4_2() {
    a_container_lives_on_nfs("4.2");
}

#[test]
fn container_storage_can_be_nfs_3() {
    a_container_lives_on_nfs("3");
}

/// The lock of a container on NFS is one of the server, so that another host respects it: here the server itself.
///
/// While a client held a delegation, the server itself could not open the file of the lock (`EAGAIN`).
fn a_container_on_nfs_is_mounted_once(version: &str) {
    let rig = Rig::empty();
    let Some(export) = NfsExport::mount(&rig, version) else {
        return;
    };
    let (ours, theirs) = (export.point.join("web1"), export.folder.join("web1"));
    rig.ok(&["container", "create", text(&ours), "8M", "--filesystem", "none"]);
    let (point, other) = (MountPoint::new(&rig, "mnt"), MountPoint::new(&rig, "other"));
    let (folder, other) = (point.path("."), other.path("."));
    for (first, second) in [(&ours, &theirs), (&theirs, &ours)] {
        rig.ok(&["container", "mount", text(first), text(&folder), "--disk"]);
        let (kind, message) = rig.error(4, &["container", "mount", text(second), text(&other), "--disk"]);
        assert_eq!(kind, "locked", "{message}");
        assert!(message.contains("web1"), "{message}");
        rig.ok(&["container", "unmount", text(first)]);
    }
}

#[test]
fn container_storage_on_nfs_4_2_is_locked_for_all_hosts() {
    a_container_on_nfs_is_mounted_once("4.2");
}

#[test]
fn container_storage_on_nfs_3_is_locked_for_all_hosts() {
    a_container_on_nfs_is_mounted_once("3");
}

/// A program that holds leases on files, and gives them back a moment after another program opens one of them.
const LEASE_HOLDER: &str = r#"
import fcntl, os, signal, sys, time
files = []
def give_back(*_):
    time.sleep(0.2)
    for file in files:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
signal.signal(signal.SIGIO, give_back)
for path in sys.argv[1:]:
    files.append(os.open(path, os.O_RDWR))
    fcntl.fcntl(files[-1], fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
while True:
    signal.pause()
"#;

/// Leases on all files of a container.
struct Leases(Child);

impl Leases {
    #[expect(clippy::disallowed_methods, reason = "another program must hold the leases")]
    fn take(container: &Path) -> Self {
        let files = std::fs::read_dir(container).unwrap().map(|entry| entry.unwrap().path());
        let mut holder = Command::new("/usr/bin/python3")
            .args(["-c", LEASE_HOLDER])
            .args(files)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(holder.stdout.as_mut().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line, "held\n");
        Self(holder)
    }
}

impl Drop for Leases {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// NFS and Samba servers hold such leases for their clients. Files are opened without waiting, which the system answered
/// with `EAGAIN` instead: the commands reported an error of the medium.
#[test]
fn container_storage_with_leases_of_a_server_is_opened() {
    let rig = Rig::empty();
    rig.ok(&["container", "create", "web1", "8M", "--filesystem", "none"]);
    let container = rig.path("web1");
    let point = MountPoint::new(&rig, "mnt");
    let layers = rig.report(&["container", "info", "web1"])["layers"].clone();
    let layer = layers[0]["file"].as_str().unwrap().to_owned();
    let disk = point.path(".");
    for words in [
        &["container", "info", "web1"][..],
        &["container", "check", "web1"],
        &["container", "snapshot", "web1", "monday"],
        &["image", "info", &layer],
        &["container", "mount", "web1", text(&disk), "--disk"],
    ] {
        let _leases = Leases::take(&container);
        rig.ok(words);
    }
    rig.ok(&["container", "unmount", "web1"]);
}
