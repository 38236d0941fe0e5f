//! Real file systems with snapshots, on loop devices and in files. They need root: otherwise a test prints why it is
//! skipped.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use holdfast_host::LocalTools;
use holdfast_host::provider::{Btrfs, Provider, Reflink, Zfs};

const PATH: &str = "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin";
const MIB: u64 = 1 << 20;
/// How a program reports a file on a FUSE file system whose server has ended.
const DEAD_SERVER: &str = "Transport endpoint is not connected";
/// How umount reports a file system that another process looks at, as programs do that look at all file systems.
const BUSY: &str = "target is busy";
/// How qemu-img reports that the clock of its processor time did not advance while it measured key derivation.
const UNMEASURED: &str = "Unable to get accurate CPU usage";
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a program of the system; returns its output.
///
/// # Errors
/// The program's error output.
pub fn system(program: &str, words: &[&str]) -> Result<String, String> {
    let clock = SystemClock::new();
    loop {
        match execute(program, words) {
            Err(reason) if is_passing(program, &reason) && clock.now() < PATIENCE => {
                clock.sleep(Duration::from_millis(200));
            }
            result => return result,
        }
    }
}

/// Whether a program has failed because of the load of this moment or of what other tests do.
fn is_passing(program: &str, reason: &str) -> bool {
    match program {
        // It looks at the files of all loop devices, also at one whose server another test has killed.
        "mkfs.btrfs" => reason.contains(DEAD_SERVER),
        "umount" => reason.contains(BUSY),
        "qemu-img" => reason.contains(UNMEASURED),
        _ => false,
    }
}

/// Limit of the time of a command of ZFS, in seconds.
const ZFS_TIME_MAX_S: &str = "120";

fn execute(program: &str, words: &[&str]) -> Result<String, String> {
    let mut command = match program {
        // They wait for zfs-fuse, which may have stopped to answer.
        "zfs" | "zpool" => {
            let mut command = Command::new(path_of("timeout"));
            command.args(["--kill-after=5", ZFS_TIME_MAX_S]).arg(path_of(program));
            command
        }
        _ => Command::new(path_of(program)),
    };
    let output = command.args(words).env("PATH", PATH).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{program} does not start: {error}"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }
}

/// The path of a program in [`PATH`].
///
/// To search a program in the `PATH` of the child, the standard library forks the whole test program with its hundreds of
/// megabytes. With a path, it does not.
fn path_of(program: &str) -> PathBuf {
    let mut paths = std::env::split_paths(PATH).map(|folder| folder.join(program));
    paths.find(|path| path.is_file()).unwrap_or_else(|| program.into())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The programs of the system that providers run.
pub fn tools() -> Arc<LocalTools> {
    Arc::new(LocalTools::new(Arc::new(SystemClock::new()), Duration::from_secs(60)))
}

/// A file system that exists until this is dropped.
pub trait FileSystem {
    /// The kind: "zfs", "btrfs", "xfs".
    fn name(&self) -> &'static str;
    /// The provider for host snapshots of the file system.
    fn provider(&self) -> Box<dyn Provider>;
    /// The name of a dataset in the file system, and its folder.
    fn dataset(&self) -> (String, PathBuf);
    /// A name for a clone that does not exist yet.
    fn clone_name(&self) -> String;
}

/// A new file system of `kind` on a loop device, mounted at `point`.
pub struct Mounted {
    kind: &'static str,
    point: PathBuf,
    device: String,
    place: tempfile::TempDir,
}

impl Mounted {
    /// # Errors
    /// The reason why this host cannot have such a file system, as text.
    pub fn at(kind: &'static str, point: &Path) -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("mounting a file system needs root".to_owned());
        }
        let place = tempfile::tempdir().map_err(|error| error.to_string())?;
        let file = place.path().join("device");
        let made = std::fs::File::create(&file).and_then(|file| file.set_len(400 * MIB));
        made.map_err(|error| error.to_string())?;
        let device = system("losetup", &["--find", "--show", text(&file)])?;
        let mounted = Self {
            kind,
            point: point.to_owned(),
            device,
            place,
        };
        system(&format!("mkfs.{kind}"), &["-q", &mounted.device])?;
        std::fs::create_dir_all(point).map_err(|error| error.to_string())?;
        system("mount", &[&mounted.device, text(point)])?;
        Ok(mounted)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        system("umount", &["--lazy", text(&self.point)]).ok();
        system("losetup", &["--detach", &self.device]).ok();
        drop(std::fs::remove_file(self.place.path().join("device")));
        remove_mount_point(&self.point);
    }
}

impl FileSystem for Mounted {
    fn name(&self) -> &'static str {
        self.kind
    }

    fn provider(&self) -> Box<dyn Provider> {
        match self.kind {
            "btrfs" => Box::new(Btrfs::new(tools())),
            _ => Box::new(Reflink::default()),
        }
    }

    fn dataset(&self) -> (String, PathBuf) {
        let folder = self.point.join("vms");
        if self.kind == "btrfs" && !folder.exists() {
            system("btrfs", &["subvolume", "create", text(&folder)]).unwrap();
        }
        std::fs::create_dir_all(&folder).unwrap();
        (text(&folder).to_owned(), folder)
    }

    fn clone_name(&self) -> String {
        text(&self.point.join("clone")).to_owned()
    }
}

/// One pool at a time: zfs-fuse hangs when two file systems are mounted at the same time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A ZFS pool in a file, by the kernel's ZFS if it is loaded, otherwise by zfs-fuse.
pub struct Pool {
    name: String,
    point: PathBuf,
    place: tempfile::TempDir,
    /// zfs-fuse; `None` if the kernel has ZFS.
    daemon: Option<Child>,
    // Must be dropped after the daemon.
    _turn_of_programs: std::fs::File,
    _turn: MutexGuard<'static, ()>,
}

impl Pool {
    /// A pool whose root is mounted at `point`.
    ///
    /// # Errors
    /// The reason why this host cannot have a pool, as text.
    pub fn at(point: &Path) -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("a pool needs root".to_owned());
        }
        let place = tempfile::tempdir().map_err(|error| error.to_string())?;
        let file = place.path().join("device");
        let made = std::fs::File::create(&file).and_then(|file| file.set_len(300 * MIB));
        made.map_err(|error| error.to_string())?;
        // A test that failed has removed its pool, too.
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let turn_of_programs = turn_of_programs().map_err(|error| error.to_string())?;
        let daemon = start_daemon()?;
        let letters = place.path().file_name().unwrap_or_default().to_string_lossy();
        let letters: String = letters.chars().filter(char::is_ascii_alphanumeric).collect();
        let pool = Self {
            name: format!("holdfast-test-{letters}"),
            point: point.to_owned(),
            place,
            daemon,
            _turn_of_programs: turn_of_programs,
            _turn: turn,
        };
        let mount_point = text(point);
        system(
            "zpool",
            &[
                "create",
                "-o",
                "cachefile=none",
                "-m",
                mount_point,
                &pool.name,
                text(&file),
            ],
        )?;
        Ok(pool)
    }
}

impl Pool {
    /// Whether ZFS runs in the kernel: zfs-fuse has no volumes, and cannot list holds.
    pub fn is_in_kernel() -> bool {
        Path::new("/sys/module/zfs").exists()
    }

    /// Creates a volume; returns its device once that exists.
    ///
    /// # Errors
    /// The reason, as text.
    pub fn volume(&self, name: &str, size: &str) -> Result<PathBuf, String> {
        let name = format!("{}/{name}", self.name);
        system("zfs", &["create", "-V", size, &name])?;
        let device = Path::new("/dev/zvol").join(&name);
        let clock = SystemClock::new();
        for _ in 0..600 {
            if device.exists() {
                return Ok(device);
            }
            clock.sleep(Duration::from_millis(100));
        }
        Err(format!("{} does not appear", device.display()))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let clock = SystemClock::new();
        // Another process may have it open for a moment.
        let is_destroyed = (0..50).any(|attempt| {
            if attempt > 0 {
                clock.sleep(Duration::from_millis(100));
            }
            system("zpool", &["destroy", "-f", &self.name]).is_ok()
        });
        drop(std::fs::remove_file(self.place.path().join("device")));
        if let Some(mut daemon) = self.daemon.take() {
            if is_destroyed {
                // Without a pool it has nothing to write, and its orderly exit takes seconds.
                daemon.kill().ok();
            } else {
                // SIGTERM: zfs-fuse exports its pools.
                system("kill", &[&daemon.id().to_string()]).ok();
                let has_ended = (0..300).any(|_| {
                    clock.sleep(Duration::from_millis(100));
                    daemon.try_wait().is_ok_and(|status| status.is_some())
                });
                if !has_ended {
                    // It has been seen to hang.
                    daemon.kill().ok();
                }
            }
            daemon.wait().ok();
        }
        remove_mount_point(&self.point);
    }
}

/// Removes a mount point that is the folder of a test: the test could not remove it while the file system was mounted.
fn remove_mount_point(point: &Path) {
    std::fs::remove_dir(point).ok();
}

/// Locks out the other test programs on this host, which can run only one zfs-fuse.
fn turn_of_programs() -> std::io::Result<std::fs::File> {
    let path = std::env::temp_dir().join("holdfast-test-zfs.lock");
    let file = std::fs::File::options().create(true).append(true).open(path)?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)?;
    Ok(file)
}

/// Starts zfs-fuse, unless the kernel has ZFS.
fn start_daemon() -> Result<Option<Child>, String> {
    if system("zpool", &["list"]).is_ok() {
        return Ok(None);
    }
    std::fs::create_dir_all("/run/zfs").map_err(|error| error.to_string())?;
    let mut command = Command::new(path_of("zfs-fuse"));
    command.args(["--no-daemon", "--no-kstat-mount"]).env("PATH", PATH);
    let started = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut daemon = started.map_err(|error| format!("zfs-fuse does not start: {error}"))?;
    let clock = SystemClock::new();
    for _ in 0..100 {
        if system("zpool", &["list"]).is_ok() {
            return Ok(Some(daemon));
        }
        clock.sleep(Duration::from_millis(50));
    }
    daemon.kill().ok();
    daemon.wait().ok();
    Err("zfs-fuse does not answer".to_owned())
}

impl FileSystem for Pool {
    fn name(&self) -> &'static str {
        "zfs"
    }

    fn provider(&self) -> Box<dyn Provider> {
        Box::new(Zfs::new(
            tools(),
            self.place.path().join("views"),
            Arc::new(SystemClock::new()),
        ))
    }

    fn dataset(&self) -> (String, PathBuf) {
        let name = format!("{}/vms", self.name);
        if system("zfs", &["list", &name]).is_err() {
            system("zfs", &["create", &name]).unwrap();
        }
        let folder = system("zfs", &["get", "-H", "-o", "value", "mountpoint", &name]).unwrap();
        (name, folder.into())
    }

    fn clone_name(&self) -> String {
        format!("{}/clone", self.name)
    }
}

/// Calls `test` with a new file system of each kind; prints why a kind is skipped.
#[expect(clippy::print_stdout, reason = "a test that is skipped says why")]
pub fn with_each(test: impl Fn(&dyn FileSystem)) {
    let mut count = 0;
    for kind in ["zfs", "btrfs", "xfs"] {
        let place = tempfile::tempdir().unwrap();
        let point = place.path().join("mounted");
        let made: Result<Box<dyn FileSystem>, String> = match kind {
            "zfs" => Pool::at(&point).map(|pool| Box::new(pool) as _),
            _ => Mounted::at(kind, &point).map(|mounted| Box::new(mounted) as _),
        };
        match made {
            Ok(file_system) => test(&*file_system),
            Err(reason) => println!("skipped: no {kind}: {reason}"),
        }
        count += 1;
    }
    assert_eq!(count, 3);
}
