//! Snapshots of a repository as files.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use rustix::fs::SeekFrom::{Data, Hole};
use rustix::process::{Pid, Signal, kill_process};

use holdfast_test_kit::copy_program;
use holdfast_test_kit::libvirt::LibvirtLab;

use crate::host::{system, text};
use crate::program::{stderr, stdout};
use crate::rig::{Rig, assert_code, noise};
use crate::schedules::wait_until;
use crate::verbs::refusals::open_to_all;

const MIB: usize = 1 << 20;
/// New snapshots appear within seconds; a busy host needs longer.
const PATIENCE: Duration = Duration::from_secs(120);

/// A mount point. Whatever is mounted there is unmounted on drop.
pub(crate) struct MountPoint(PathBuf);

impl MountPoint {
    pub(crate) fn new(rig: &Rig, name: &str) -> Self {
        let path = rig.path(name).canonicalize();
        Self(path.unwrap_or_else(|_| {
            std::fs::create_dir(rig.path(name)).unwrap();
            rig.path(name).canonicalize().unwrap()
        }))
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.0.join(below)
    }

    fn names(&self, below: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(below)).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    pub(crate) fn read(&self, below: &str) -> Vec<u8> {
        std::fs::read(self.path(below)).unwrap()
    }

    pub(crate) fn is_mounted(&self) -> bool {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        mounts
            .lines()
            .any(|line| line.contains(&format!(" {} ", text(&self.0))))
    }
}

impl Drop for MountPoint {
    fn drop(&mut self) {
        while self.is_mounted() {
            if system("umount", &["-l", text(&self.0)]).is_err() {
                return;
            }
        }
    }
}

/// Waits until `is_true` holds.
pub(crate) fn wait_for(what: &str, mut is_true: impl FnMut() -> bool) {
    let clock = SystemClock::new();
    while !is_true() {
        assert!(clock.now() < PATIENCE, "{what}");
        clock.sleep(Duration::from_millis(50));
    }
}

fn snapshot_ids(rig: &Rig) -> Vec<String> {
    let list = rig.report(&["list"]);
    let snapshots = list["snapshots"].as_array().unwrap();
    snapshots
        .iter()
        .map(|snapshot| snapshot["id"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn a_repository_is_mounted_with_all_its_snapshots() {
    let rig = Rig::new();
    let (first, second) = (noise(3 * MIB + 100, 1), noise(MIB, 2));
    rig.write("vda.raw", &first);
    rig.write("vdb.raw", &second);
    rig.ok(&["backup", "-m", "web1", "--tag", "nightly", "vda=vda.raw", "vdb=vdb.raw"]);
    rig.ok(&["backup", "-m", "mail", "vdb.raw"]);
    let point = MountPoint::new(&rig, "mnt");
    let report = rig.report(&["mount", text(&point.0)]);
    assert_eq!(
        (&report["snapshot"], report["snapshot_count"].as_u64()),
        (&serde_json::Value::Null, Some(2))
    );
    assert_eq!(point.names("."), ["machines", "snapshots", "tags"]);
    assert_eq!(point.names("machines"), ["mail", "web1"]);
    let times = point.names("machines/web1");
    assert!(
        times.len() == 2 && times[1] == "latest" && times[0].starts_with("20"),
        "{times:?}"
    );
    let latest = point.names("machines/web1/latest");
    assert_eq!(latest, ["snapshot.json", "vda.raw", "vdb.raw"]);
    assert!(point.read("machines/web1/latest/vda.raw") == first);
    assert!(point.read(&format!("machines/web1/{}/vdb.raw", times[0])) == second);
    assert!(point.read(&format!("tags/nightly/web1_{}/vdb.raw", times[0])) == second);
    let id = &snapshot_ids(&rig)[0];
    let link = format!("snapshots/{}", &id[..8]);
    assert!(point.read(&format!("{link}/vda.raw")) == first);
    let description: serde_json::Value = serde_json::from_slice(&point.read(&format!("{link}/snapshot.json"))).unwrap();
    assert_eq!(
        (&description["id"], &description["machine"]),
        (&id[..].into(), &"web1".into())
    );
    // Nothing can be written, not even by root.
    let written = File::options()
        .write(true)
        .open(point.path("machines/web1/latest/vda.raw"));
    assert_eq!(written.unwrap_err().kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    rig.ok(&["unmount", text(&point.0)]);
    assert!(!point.is_mounted());
    assert_eq!(point.names("."), [""; 0]);
}

#[test]
fn a_mounted_repository_shows_new_snapshots_and_drops_removed_ones() {
    let rig = Rig::new();
    rig.write("vda.raw", &noise(MIB, 1));
    rig.ok(&["backup", "-m", "web1", "vda.raw"]);
    let point = MountPoint::new(&rig, "mnt");
    rig.ok(&["mount", text(&point.0)]);
    let mut open = File::open(point.path("machines/web1/latest/vda.raw")).unwrap();
    let changed = noise(MIB, 2);
    rig.write("vda.raw", &changed);
    rig.ok(&["backup", "-m", "web1", "vda.raw"]);
    wait_for("the new snapshot", || point.names("snapshots").len() == 2);
    assert!(point.read("machines/web1/latest/vda.raw") == changed);
    let id = snapshot_ids(&rig)[0].clone();
    rig.ok(&["forget", &id]);
    // A file that is open keeps its data.
    rig.ok(&["gc"]);
    wait_for("the removal", || point.names("snapshots").len() == 1);
    let mut bytes = Vec::new();
    open.read_to_end(&mut bytes).unwrap();
    assert!(bytes == noise(MIB, 1));
    drop(open);
    rig.ok(&["unmount", text(&point.0)]);
}

/// The disk of a snapshot is a file system that the kernel mounts without a copy.
#[test]
fn a_file_is_read_from_a_disk_of_a_mounted_snapshot() {
    let rig = Rig::new();
    rig.write("content/etc/web.conf", b"listen 192.0.2.7\n");
    let (content, image) = (rig.path("content"), rig.path("web.raw"));
    let words = ["-q", "-d", text(&content), text(&image), "16M"];
    system("mkfs.ext4", &words).unwrap();
    rig.ok(&["backup", "-m", "web1", "vda=web.raw"]);
    let (point, inside) = (MountPoint::new(&rig, "mnt"), MountPoint::new(&rig, "inside"));
    let report = rig.report(&["mount", "web1", text(&point.0)]);
    assert_eq!(report["snapshot"], snapshot_ids(&rig)[0][..8]);
    let disk = point.path("vda.raw");
    let words = ["-o", "ro,loop,noload", text(&disk), text(&inside.0)];
    system("mount", &words).unwrap();
    assert_eq!(inside.read("etc/web.conf"), b"listen 192.0.2.7\n");
    // The loop device uses the file.
    let (kind, message) = rig.error(4, &["unmount", text(&point.0)]);
    assert!(kind == "locked" && message.contains("is in use"), "{kind}: {message}");
    system("umount", &[text(&inside.0)]).unwrap();
    rig.ok(&["unmount", text(&point.0)]);
    // One disk alone.
    rig.ok(&["mount", "web1:vda", text(&point.0)]);
    assert_eq!(point.names("."), ["vda.raw"]);
    rig.ok(&["unmount", text(&point.0)]);
}

/// Programs that copy sparse files skip the holes.
#[test]
fn holes_of_disks_are_holes_of_files() {
    let rig = Rig::new();
    let mut bytes = vec![0; 8 * MIB];
    bytes[..4096].fill(1);
    bytes[6 * MIB..7 * MIB].copy_from_slice(&noise(MIB, 3));
    rig.write("vda.raw", &bytes);
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw"]);
    let point = MountPoint::new(&rig, "mnt");
    rig.ok(&["mount", "web1", text(&point.0)]);
    let file = File::open(point.path("vda.raw")).unwrap();
    let seek = |whence| rustix::fs::seek(file.as_fd(), whence);
    assert_eq!(seek(Data(0)), Ok(0));
    assert_eq!(seek(Hole(0)), Ok(4096));
    assert_eq!(seek(Data(4096)), Ok(6 << 20));
    assert_eq!(seek(Hole(6 << 20)), Ok(7 << 20));
    assert_eq!(seek(Data(7 << 20)), Err(rustix::io::Errno::NXIO));
    let (from, to) = (point.path("vda.raw"), rig.path("copy.raw"));
    system("cp", &["--sparse=auto", text(&from), text(&to)]).unwrap();
    assert!(rig.read("copy.raw") == bytes);
    drop(file);
    rig.ok(&["unmount", text(&point.0)]);
}

#[test]
fn a_mounted_snapshot_can_be_read_after_its_removal() {
    let rig = Rig::new();
    let bytes = noise(2 * MIB, 1);
    rig.write("vda.raw", &bytes);
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw"]);
    let point = MountPoint::new(&rig, "mnt");
    rig.ok(&["mount", "web1", text(&point.0)]);
    rig.ok(&["forget", &snapshot_ids(&rig)[0]]);
    rig.ok(&["gc"]);
    assert!(point.read("vda.raw") == bytes);
    rig.ok(&["unmount", text(&point.0)]);
}

/// Many programs at once, at all places.
#[test]
fn files_are_read_by_many_programs_at_once() {
    let rig = Rig::new();
    let bytes = noise(24 * MIB, 4);
    rig.write("vda.raw", &bytes);
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw"]);
    let point = MountPoint::new(&rig, "mnt");
    rig.ok(&["mount", "web1", text(&point.0)]);
    std::thread::scope(|scope| {
        for thread in 0..8_usize {
            let (bytes, path) = (&bytes, point.path("vda.raw"));
            scope.spawn(move || {
                let file = File::open(path).unwrap();
                let mut buffer = vec![0; 300_000];
                for step in 0..40_usize {
                    let at = (thread * 7_654_321 + step * 1_234_567) % (bytes.len() - buffer.len());
                    file.read_exact_at(&mut buffer, at as u64).unwrap();
                    assert!(buffer == bytes[at..at + buffer.len()], "{at}");
                }
            });
        }
    });
    rig.ok(&["unmount", text(&point.0)]);
}

/// A user without the right to mount needs fusermount3, and only this user can read the files.
#[test]
fn a_user_without_rights_mounts_with_a_helper() {
    const OTHER_USER: u32 = 65_534;
    if !rustix::process::geteuid().is_root() {
        // All other tests of mounts are this test.
        return;
    }
    let is_open_to_all = Path::new("/dev/fuse").metadata().unwrap().mode() & 0o006 == 0o006;
    let rig = rig_with_snapshot();
    let point = MountPoint::new(&rig, "mnt");
    open_to_all(&rig.path("."));
    copy_program(Path::new(env!("CARGO_BIN_EXE_holdfast")), &rig.path("program"));
    std::os::unix::fs::chown(&point.0, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
    let run_as_other = |words: &[&str]| {
        #[expect(clippy::disallowed_methods, reason = "the program runs as another user")]
        let mut command = Command::new(rig.path("program"));
        command.args(words).env_clear().env("PATH", "/usr/bin:/bin");
        command
            .env("HOLDFAST_REPOSITORY", rig.path("repo"))
            .current_dir(rig.path("."));
        command.uid(OTHER_USER).gid(OTHER_USER).output().unwrap()
    };
    if !is_open_to_all {
        println!("skipped: /dev/fuse cannot be opened by all users");
        let output = run_as_other(&["mount", "web1", text(&point.0)]);
        assert!(stderr(&output).contains("chmod 666 /dev/fuse"), "{}", stderr(&output));
        return;
    }
    let run = |words: &[&str]| assert_code(&run_as_other(words), 0, words);
    run(&["mount", "web1", text(&point.0)]);
    assert!(point.is_mounted());
    // Not even root.
    let error = std::fs::read_dir(&point.0).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
    run(&["unmount", text(&point.0)]);
    assert!(!point.is_mounted());
}

/// A server in the foreground, which has mounted.
fn in_foreground(rig: &Rig, point: &MountPoint) -> Child {
    let words = ["mount", "--foreground", "web1", text(&point.0)];
    let mut child = rig.command(&words).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    assert!(
        line.ends_with(&format!("is mounted at {}, read-only\n", text(&point.0))),
        "{line}"
    );
    child
}

fn rig_with_snapshot() -> Rig {
    let rig = Rig::new();
    rig.write("vda.raw", &noise(MIB, 1));
    rig.ok(&["backup", "-m", "web1", "vda=vda.raw"]);
    rig
}

#[test]
fn a_mount_in_the_foreground_ends_with_ctrl_c_or_unmount() {
    let rig = rig_with_snapshot();
    let point = MountPoint::new(&rig, "mnt");
    let mut child = in_foreground(&rig, &point);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(!point.is_mounted());
    let mut child = in_foreground(&rig, &point);
    rig.ok(&["unmount", text(&point.0)]);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    // What is in use is detached, with a warning.
    let child = in_foreground(&rig, &point);
    let open = File::open(point.path("vda.raw")).unwrap();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(
        stderr(&output).contains("programs still use files below"),
        "{}",
        stderr(&output)
    );
    assert!(!point.is_mounted());
    assert!(open.read_exact_at(&mut [0], 0).is_err(), "the server has ended");
}

/// A process with its own mounts, which other tests do not see.
struct Namespace(Child);

impl Namespace {
    fn new() -> Self {
        #[expect(clippy::disallowed_methods, reason = "a program of the test")]
        let mut program = Command::new("/usr/bin/unshare");
        // Not private: a copy of the mounts of other tests would keep them in use.
        program.args([
            "--mount",
            "--propagation",
            "slave",
            "sh",
            "-c",
            "echo ready; exec sleep 600",
        ]);
        let mut child = program.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }

    fn path(&self, path: &Path) -> PathBuf {
        Path::new(&format!("/proc/{}/root", self.0.id())).join(path.strip_prefix("/").unwrap())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[test]
fn a_mount_whose_server_was_killed_is_unmounted_by_hand_or_by_doctor() {
    let mut rig = rig_with_snapshot();
    let (lab, namespace) = (LibvirtLab::new(), Namespace::new());
    lab.connect();
    rig.see_files_of(namespace.0.id());
    let point = MountPoint::new(&rig, "mnt");
    let inside = namespace.path(&point.0);
    let folder = text(&point.0);
    let is_dead = || std::fs::read_dir(&inside).err().and_then(|error| error.raw_os_error());
    for words in [&["unmount", folder][..], &["doctor", "--connect", &lab.uri(), "--fix"]] {
        let mut child = in_foreground(&rig, &point);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(is_dead(), Some(rustix::io::Errno::NOTCONN.raw_os_error()));
        let found = stdout(&rig.code(3, &["doctor", "--connect", &lab.uri()]));
        assert!(found.contains("without the process that served it"), "{found}");
        rig.run(words);
        assert_eq!(is_dead(), None, "{words:?}");
    }
}

#[test]
fn what_cannot_be_mounted_is_refused_before_a_server_starts() {
    let rig = rig_with_snapshot();
    rig.write("full/file", b"something");
    let point = MountPoint::new(&rig, "mnt");
    let folder = text(&point.0);
    for (code, kind, words) in [
        (1, "exists", &["mount", "web1", "full"][..]),
        (1, "io", &["mount", "web1", "absent"]),
        (1, "not-found", &["mount", "web2", folder]),
        (1, "not-found", &["mount", "web1:vdb", folder]),
        (2, "usage", &["mount", "web1:", folder]),
        (2, "usage", &["mount", "--foreground", "tank/vm@daily", folder]),
        (1, "refused", &["unmount", folder]),
    ] {
        let (found, message) = rig.error(code, words);
        assert_eq!(found, kind, "{words:?}: {message}");
        assert!(!point.is_mounted(), "{words:?}");
    }
}

/// The server's own error is the command's.
#[test]
fn a_server_that_cannot_mount_ends_the_command() {
    let rig = rig_with_snapshot();
    std::fs::create_dir(rig.path("mnt")).unwrap();
    let mut command = rig.command(&["mount", "web1", text(&rig.path("mnt")), "--json"]);
    // Without a helper program.
    command.env("PATH", rig.path("no-programs"));
    let output = without_right_to_mount(&command).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("only root can mount"), "{message}");
    assert!(answer["error"]["hint"].as_str().unwrap().contains("fuse3"));
}

/// The same command without the capability to mount.
fn without_right_to_mount(command: &Command) -> Command {
    #[expect(clippy::disallowed_methods, reason = "a program of the test")]
    let mut restricted = Command::new("/usr/bin/setpriv");
    restricted
        .args(["--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", "--"])
        .arg(command.get_program())
        .args(command.get_args())
        .current_dir(command.get_current_dir().unwrap());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => restricted.env(name, value),
            None => restricted.env_remove(name),
        };
    }
    restricted
}

#[test]
fn an_image_of_any_format_is_mounted_as_a_raw_disk() {
    let rig = Rig::empty();
    let mut bytes = vec![0; 4 * MIB];
    bytes[..MIB].copy_from_slice(&noise(MIB, 1));
    rig.write("web1.raw", &bytes);
    let point = MountPoint::new(&rig, "mnt");
    let folder = text(&point.0);
    for format in ["qcow2", "vmdk", "vdi", "vhdx", "vhd"] {
        let image = format!("web1.{format}");
        rig.ok(&["image", "convert", "web1.raw", &image]);
        let before = rig.read(&image);
        let report = rig.report(&["image", "mount", &image, folder]);
        assert_eq!(report["format"], format);
        assert_eq!(report["file"], text(&point.path("web1.raw")));
        assert!(point.read("web1.raw")[..bytes.len()] == bytes, "{format}");
        rig.ok(&["unmount", folder]);
        assert!(rig.read(&image) == before, "{format}");
    }
}

#[test]
fn an_image_is_mounted_with_its_backing_images() {
    let rig = Rig::empty();
    let bytes = noise(2 * MIB, 1);
    rig.write("base/base.raw", &bytes);
    let (base, point) = (rig.path("base/base.raw"), MountPoint::new(&rig, "mnt"));
    let words = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", text(&base)];
    system("qemu-img", &[&words[..], &[text(&rig.path("top.qcow2"))]].concat()).unwrap();
    let words = ["image", "mount", "top.qcow2", text(&point.0)];
    // The backing image is in another folder.
    let (kind, message) = rig.error(1, &words);
    assert_eq!(kind, "refused", "{message}");
    assert!(!point.is_mounted());
    rig.ok(&[&words[..], &["--allow-dir", "base"]].concat());
    assert!(point.read("top.raw") == bytes);
    rig.ok(&["unmount", text(&point.0)]);
    assert_eq!(
        rig.error(1, &["image", "mount", "absent.qcow2", text(&point.0)]).0,
        "io"
    );
}

/// A mounted image and an ext4 file system in its disk, which is mounted too.
struct MountedFileSystem {
    image: String,
    inside: MountPoint,
    point: MountPoint,
    supervisor: Child,
    /// Dropped last: its folder has the mount points.
    rig: Rig,
}

impl MountedFileSystem {
    fn new(format: &str) -> Self {
        let rig = Rig::empty();
        rig.write("content/first", b"content");
        let (content, raw) = (rig.path("content"), rig.path("web1.raw"));
        let words = ["-q", "-d", text(&content), text(&raw), "64M"];
        system("mkfs.ext4", &words).unwrap();
        let image = format!("image.{format}");
        rig.ok(&["image", "convert", "web1.raw", &image]);
        let (point, inside) = (MountPoint::new(&rig, "mnt"), MountPoint::new(&rig, "inside"));
        let words = ["image", "mount", "--writable", "--foreground", &image, text(&point.0)];
        let mut supervisor = rig.command(&words).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(supervisor.stdout.as_mut().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert!(line.ends_with(", writable\n"), "{line}");
        let disk = point.path("image.raw");
        system("mount", &["-o", "loop", text(&disk), text(&inside.0)]).unwrap();
        Self {
            image,
            inside,
            point,
            supervisor,
            rig,
        }
    }

    /// Kills the worker, the only child of the supervisor, and waits for the next one.
    fn kill_worker(&self) {
        let id = self.supervisor.id();
        let child = || {
            let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
            children.trim().parse().ok().and_then(Pid::from_raw)
        };
        let worker = child().unwrap();
        kill_process(worker, Signal::KILL).unwrap();
        wait_until("another worker runs", || child().is_some_and(|next| next != worker));
    }

    /// Unmounts, and returns the warnings.
    fn close(self) -> (Rig, String, String) {
        system("umount", &[text(&self.inside.0)]).unwrap();
        self.rig.ok(&["unmount", text(&self.point.0)]);
        let output = self.supervisor.wait_with_output().unwrap();
        assert!(matches!(output.status.code(), Some(0 | 3)), "{}", stderr(&output));
        let messages = stderr(&output);
        drop((self.inside, self.point));
        (self.rig, self.image, messages)
    }
}

/// Whether the kernel sends unanswered requests again (Linux 6.9).
pub(crate) fn kernel_has_resend() -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 9)
}

/// The programs above see no error, and the file system and all files are whole.
fn survives_kills(format: &str) {
    if !kernel_has_resend() {
        return;
    }
    let mounted = MountedFileSystem::new(format);
    let clock = SystemClock::new();
    let (is_done, written) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::SeqCst) {
                let count = written.load(Ordering::SeqCst);
                let bytes = noise(150_000, count);
                let mut file = File::create(mounted.inside.path(&format!("file{}", count % 100))).unwrap();
                file.write_all(&bytes).unwrap();
                if count % 3 == 0 {
                    file.sync_all().unwrap();
                }
                written.store(count + 1, Ordering::SeqCst);
            }
        });
        for _ in 0..8 {
            clock.sleep(Duration::from_millis(300));
            mounted.kill_worker();
        }
        wait_until("every file was written", || written.load(Ordering::SeqCst) > 100);
        is_done.store(true, Ordering::SeqCst);
    });
    let written = written.into_inner();
    let newest: Vec<(String, u64)> = (written.saturating_sub(100)..written)
        .map(|count| (format!("file{}", count % 100), count))
        .collect();
    for (name, count) in &newest {
        assert!(mounted.inside.read(name) == noise(150_000, *count), "{name} of {count}");
    }
    let (rig, image, messages) = mounted.close();
    assert_eq!(messages.matches("another one continues").count(), 8, "{messages}");
    // Without the caches of the kernel.
    rig.ok(&["image", "convert", &image, "after.raw", "--force"]);
    system("fsck.ext4", &["-fn", text(&rig.path("after.raw"))]).unwrap();
    let inside = MountPoint::new(&rig, "inside");
    let words = ["-o", "ro,loop", text(&rig.path("after.raw")), text(&inside.0)].map(str::to_owned);
    system("mount", &words.each_ref().map(String::as_str)).unwrap();
    for (name, count) in &newest {
        assert!(inside.read(name) == noise(150_000, *count), "{name} of {count}");
    }
    // Clusters that were allocated by a killed worker may be left over.
    let check = rig.run(&["image", "check", &image, "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&check.stdout).unwrap();
    assert_eq!(report["report"]["corruption_count"], 0, "{report}");
}

#[test]
fn a_file_system_in_a_qcow2_survives_kills_of_its_server() {
    survives_kills("qcow2");
}

#[test]
fn a_file_system_in_a_vdi_survives_kills_of_its_server() {
    survives_kills("vdi");
}

#[test]
fn a_mounted_image_is_written_and_locked() {
    let rig = Rig::empty();
    rig.write("web1.raw", &noise(MIB, 1));
    rig.ok(&["image", "convert", "web1.raw", "web1.qcow2"]);
    let point = MountPoint::new(&rig, "mnt");
    let words = ["image", "mount", "--writable", "web1.qcow2", text(&point.0)];
    let report = rig.report(&words);
    assert_eq!(report["is_writable"], true);
    let second = MountPoint::new(&rig, "second");
    for words in [
        &["image", "mount", "--writable", "web1.qcow2", text(&second.0)][..],
        &["image", "resize", "web1.qcow2", "2M"],
    ] {
        assert_eq!(rig.error(4, words).0, "locked", "{words:?}");
    }
    let bytes = noise(MIB, 2);
    let file = File::options().write(true).open(point.path("web1.raw")).unwrap();
    file.write_all_at(&bytes, 0).unwrap();
    // A file of fixed size.
    assert!(file.write_all_at(b"x", MIB as u64).is_err());
    assert!(file.set_len(0).is_err());
    drop(file);
    rig.ok(&["unmount", text(&point.0)]);
    // The server has ended, so the image is free at once.
    rig.ok(&["image", "convert", "web1.qcow2", "after.raw"]);
    assert!(rig.read("after.raw") == bytes);
    rig.ok(&["image", "resize", "web1.qcow2", "2M"]);
}

/// Data that was written before is in the image.
#[test]
fn an_interrupted_mount_is_served_until_it_is_unused() {
    let mounted = MountedFileSystem::new("qcow2");
    let write = |name: &str| {
        let mut file = File::create(mounted.inside.path(name)).unwrap();
        file.write_all(name.as_bytes()).unwrap();
    };
    write("late");
    kill_process(Pid::from_child(&mounted.supervisor), Signal::INT).unwrap();
    wait_for("the mount is detached", || !mounted.point.is_mounted());
    write("later");
    system("umount", &[text(&mounted.inside.0)]).unwrap();
    let output = mounted.supervisor.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert!(stderr(&output).contains("are served until the programs close them"));
    let rig = &mounted.rig;
    rig.ok(&["image", "convert", "image.qcow2", "after.raw"]);
    system(
        "mount",
        &["-o", "ro,loop", text(&rig.path("after.raw")), text(&mounted.inside.0)],
    )
    .unwrap();
    assert_eq!(mounted.inside.read("later"), b"later");
}

/// The worker continues alone, and the image stays locked.
#[test]
fn an_image_stays_locked_if_its_supervisor_is_killed() {
    let mut mounted = MountedFileSystem::new("qcow2");
    mounted.supervisor.kill().unwrap();
    mounted.supervisor.wait().unwrap();
    let rig = &mounted.rig;
    let resize = ["image", "resize", "image.qcow2", "65M"];
    assert_eq!(rig.error(4, &resize).0, "locked");
    let mut file = File::create(mounted.inside.path("alone")).unwrap();
    file.write_all(b"alone").unwrap();
    drop(file);
    system("umount", &[text(&mounted.inside.0)]).unwrap();
    rig.ok(&["unmount", text(&mounted.point.0)]);
    wait_for("the worker has ended", || rig.run(&resize).status.success());
    rig.ok(&["image", "convert", "image.qcow2", "after.raw"]);
    system(
        "mount",
        &["-o", "ro,loop", text(&rig.path("after.raw")), text(&mounted.inside.0)],
    )
    .unwrap();
    assert_eq!(mounted.inside.read("alone"), b"alone");
}
