//! A QEMU with disks, its monitor, and checks of the content of frozen disks.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use holdfast_host::qemu::{DiskRequest, PausePolicy, PointInTimeRequest, QemuDisk, RunId, disks};
use holdfast_host::qmp::{Monitor, QmpCommand, QmpSocket};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::run;

/// 1 MiB in bytes.
pub const MIB: u64 = 1 << 20;
/// The size of the disks that [`QemuLab::new`] creates.
pub const DISK_BYTES: u64 = 16 * MIB;

/// The format of an image, and its file.
pub type Image = (String, PathBuf);

/// How a QEMU is stopped.
#[derive(Debug, Clone, Copy)]
pub enum Ending {
    /// By `quit`: QEMU writes persistent bitmaps to the images.
    Quit,
    /// By SIGKILL.
    Killed,
}

/// The images of a QEMU, and additional arguments, in which `{}` is replaced by its folder.
#[derive(Debug, Clone, Copy)]
pub struct QemuSetup<'a> {
    /// Disk N has the node `formatN` on the node `fileN`.
    pub images: &'a [Image],
    /// Additional arguments.
    pub words: &'a [&'a str],
}

/// A QEMU that runs until it is dropped.
pub struct QemuLab {
    /// The folder for images, sockets and the output of `qemu-io`.
    pub directory: TempDir,
    /// The monitor.
    pub monitor: Arc<QmpSocket>,
    /// The clock for waits.
    pub clock: SystemClock,
    process: Child,
    runs: AtomicU32,
}

impl QemuLab {
    /// A machine with disks of these formats. Disk N is filled with the byte N + 1.
    pub fn new(formats: &[&str]) -> Self {
        Self::with(formats, &[])
    }

    /// Like [`QemuLab::new`] with additional arguments for QEMU, in which `{}` is replaced by the folder.
    pub fn with(formats: &[&str], words: &[&str]) -> Self {
        Self::prepared(formats, words, |_| ())
    }

    /// Like [`QemuLab::with`], after `prepare` has prepared the folder, for example by a mount.
    pub fn prepared(formats: &[&str], words: &[&str], prepare: impl FnOnce(&Path)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        prepare(directory.path());
        let images = formats.iter().enumerate().map(|(number, format)| {
            let image = directory.path().join(format!("disk{number}"));
            let path = image.to_str().unwrap();
            run("qemu-img", &["create", "-q", "-f", format, path, "16M"]);
            let line = format!("write -P {} 0 16M", number + 1);
            run("qemu-io", &["-f", format, "-c", &line, path]);
            ((*format).to_owned(), image)
        });
        let images: Vec<Image> = images.collect();
        let clock = SystemClock::new();
        let (process, monitor) = start(directory.path(), "qmp", QemuSetup { images: &images, words }, clock);
        Self {
            monitor,
            directory,
            clock,
            process,
            runs: AtomicU32::new(1),
        }
    }

    /// Stops this QEMU and starts another one instead.
    pub fn restart(&mut self, setup: QemuSetup<'_>, ending: Ending) {
        match ending {
            Ending::Quit => drop(self.execute("quit", Value::Null)),
            Ending::Killed => self.process.kill().unwrap(),
        }
        self.process.wait().unwrap();
        let started = start(self.directory.path(), "qmp", setup, self.clock);
        (self.process, self.monitor) = started;
    }

    /// Migrates the machine to another QEMU with the same images.
    ///
    /// # Errors
    /// QEMU's error, as text: the machine then continues to run here.
    pub fn migrate(&mut self, setup: QemuSetup<'_>, capabilities: &Value) -> Result<(), String> {
        let number = self.runs.fetch_add(1, Ordering::Relaxed);
        let words = [setup.words, &["-incoming", "defer"]].concat();
        let setup = QemuSetup { words: &words, ..setup };
        let socket = format!("qmp-{number}");
        let (mut process, monitor) = start(self.directory.path(), &socket, setup, self.clock);
        let uri = json!({ "uri": format!("unix:{}", self.path(&format!("migration-{number}")).display()) });
        let ask = |monitor: &QmpSocket, name, arguments: &Value| {
            let answer = monitor.execute(&QmpCommand::new(name, arguments.clone()));
            answer.map_err(|error| error.to_string())
        };
        let migrate = || {
            for monitor in [&self.monitor, &monitor] {
                ask(monitor, "migrate-set-capabilities", capabilities)?;
            }
            ask(&monitor, "migrate-incoming", &uri)?;
            ask(&self.monitor, "migrate", &uri)?;
            loop {
                let state = ask(&self.monitor, "query-migrate", &Value::Null)?;
                match state["status"].as_str() {
                    Some("completed") => break,
                    Some("failed" | "cancelled") => return Err(state.to_string()),
                    _ => self.clock.sleep(Duration::from_millis(20)),
                }
            }
            // QEMU 10.0 has been seen to remain in the state "inmigrate" after a migration from the status "completed".
            for _ in 0..500 {
                if ask(&monitor, "query-status", &Value::Null)?["running"] == true {
                    return Ok(());
                }
                self.clock.sleep(Duration::from_millis(20));
            }
            Err("the destination does not start".to_owned())
        };
        if let Err(error) = migrate() {
            process.kill().unwrap();
            process.wait().unwrap();
            // After a completed migration the source is paused.
            if !self.is_running() {
                self.execute("cont", Value::Null);
            }
            return Err(error);
        }
        self.execute("quit", Value::Null);
        self.process.wait().unwrap();
        (self.process, self.monitor) = (process, monitor);
        Ok(())
    }

    /// Executes a command of the monitor, which must succeed.
    pub fn execute(&self, name: &'static str, arguments: Value) -> Value {
        self.monitor.execute(&QmpCommand::new(name, arguments)).unwrap()
    }

    /// The path of a file in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs a command of `qemu-io` on a disk, like a guest: "write -P 9 4M 1M". Returns its output.
    pub fn guest(&self, disk: usize, command: &str) -> String {
        self.guest_at(&format!("/machine/peripheral/disk{disk}/virtio-backend"), command)
    }

    /// Like [`QemuLab::guest`], on a device named by its path in QEMU's object model.
    pub fn guest_at(&self, device: &str, command: &str) -> String {
        let line = format!("qemu-io -d {device} \"{command}\"");
        let output = || std::fs::read_to_string(self.path("output")).unwrap();
        let before = output().len();
        let stderr = self.execute("human-monitor-command", json!({ "command-line": line }));
        output()[before..].to_owned() + stderr.as_str().unwrap()
    }

    /// Fills a range of a disk with a byte, like a guest.
    pub fn guest_writes(&self, disk: usize, byte: u8, offset: u64, length: u64) {
        let output = self.guest(disk, &format!("write -P {byte} {offset} {length}"));
        assert!(output.contains(&format!("wrote {length}/{length}")), "{output}");
    }

    /// The disks, as Holdfast detects them.
    pub fn disks(&self) -> Vec<QemuDisk> {
        disks(&*self.monitor).unwrap()
    }

    /// The process of QEMU.
    pub fn process_id(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.process)
    }

    /// Whether the processors are running.
    pub fn is_running(&self) -> bool {
        self.execute("query-status", Value::Null)["running"].as_bool().unwrap()
    }

    /// A request of a new run to freeze all disks, with scratch files in `folder`, and the socket that will serve them.
    pub fn request(&self, folder: &Path) -> (PointInTimeRequest, PathBuf) {
        let run = RunId(self.runs.fetch_add(1, Ordering::Relaxed));
        let socket = self.path(&format!("nbd-{run}"));
        let listener = UnixListener::bind(&socket).unwrap();
        let disks = self.disks().into_iter().map(|disk| DiskRequest {
            scratch: scratch(folder, disk.size_bytes),
            spool: None,
            disk,
            next_bitmap: None,
            changes: None,
            changes_below: None,
        });
        let request = PointInTimeRequest {
            run,
            disks: disks.collect(),
            write_deadline: Duration::from_secs(2),
            listener: OwnedFd::from(listener),
            memory: None,
            pause_policy: PausePolicy::WhereNeeded,
        };
        (request, socket)
    }

    /// Everything that a run could leave behind: nodes, exports, files, bitmaps, and the nodes of devices.
    pub fn everything(&self) -> Value {
        let mut nodes: Vec<String> = self
            .execute("query-named-block-nodes", json!({ "flat": true }))
            .as_array()
            .unwrap()
            .iter()
            .map(|node| node["node-name"].to_string())
            .collect();
        nodes.sort_unstable();
        let disks: Vec<String> = self
            .disks()
            .iter()
            .map(|disk| {
                format!(
                    "{} {} {:?}",
                    disk.device,
                    disk.node,
                    disk.bitmaps.iter().map(|bitmap| &bitmap.name)
                )
            })
            .collect();
        json!({
            "nodes": nodes,
            "disks": disks,
            "exports": self.execute("query-block-exports", Value::Null),
            "files": self.execute("query-fdsets", Value::Null),
            "running": self.is_running(),
        })
    }
}

/// Starts a QEMU in a folder, with its monitor at `socket`.
fn start(folder: &Path, socket: &str, setup: QemuSetup<'_>, clock: SystemClock) -> (Child, Arc<QmpSocket>) {
    let mut arguments: Vec<String> = ["-accel", "tcg", "-nodefaults", "-display", "none", "-m", "16"]
        .map(str::to_owned)
        .to_vec();
    let socket = folder.join(socket);
    arguments.extend([
        "-qmp".to_owned(),
        format!("unix:{},server=on,wait=off", socket.display()),
    ]);
    for (number, (format, image)) in setup.images.iter().enumerate() {
        arguments.extend([
            "-blockdev".to_owned(),
            format!("driver=file,filename={},node-name=file{number}", image.display()),
            "-blockdev".to_owned(),
            format!("driver={format},file=file{number},node-name=format{number}"),
            "-device".to_owned(),
            format!("virtio-blk-pci,drive=format{number},id=disk{number}"),
        ]);
    }
    let folder_name = folder.to_str().unwrap();
    arguments.extend(setup.words.iter().map(|word| word.replace("{}", folder_name)));
    // The output of qemu-io goes to QEMU's standard output, which is line-buffered only with `stdbuf`.
    let output = File::options().create(true).append(true).open(folder.join("output"));
    let process = Process::new("stdbuf")
        .args(["--output=L", "qemu-system-x86_64"])
        .args(&arguments)
        .stdin(Stdio::null())
        .stdout(output.unwrap())
        .spawn()
        .expect("these tests need qemu-system-x86_64 (scripts/setup installs it)");
    let monitor = (0..200).find_map(|_| {
        clock.sleep(Duration::from_millis(50));
        QmpSocket::connect(&socket).ok()
    });
    (process, Arc::new(monitor.expect("QEMU answers within ten seconds")))
}

/// A sparse file without a directory entry.
pub fn scratch(folder: &Path, size_bytes: u64) -> OwnedFd {
    let file: File = tempfile::tempfile_in(folder).unwrap();
    file.set_len(size_bytes).unwrap();
    OwnedFd::from(file)
}

impl Drop for QemuLab {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}
