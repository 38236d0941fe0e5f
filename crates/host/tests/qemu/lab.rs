//! A QEMU with disks, its monitor, and a look at what a frozen disk holds.

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

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const DISK_BYTES: u64 = 16 * MIB;

/// The format of an image, and its file.
pub(crate) type Image = (String, PathBuf);

/// How a QEMU ends.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ending {
    /// It is asked to, and stores what it keeps in images.
    Quit,
    Killed,
}

/// A QEMU that runs until it is dropped.
pub(crate) struct Lab {
    pub(crate) directory: TempDir,
    pub(crate) monitor: Arc<QmpSocket>,
    pub(crate) clock: SystemClock,
    process: Child,
    runs: AtomicU32,
}

pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = match Process::new(program).args(arguments).output() {
        Ok(output) => output,
        Err(error) => panic!("these tests need {program} (scripts/setup installs it): {error}"),
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {text}");
    text
}

impl Lab {
    /// A machine with disks of these formats, disk N full of the byte N + 1.
    pub(crate) fn new(formats: &[&str]) -> Self {
        Self::with(formats, &[])
    }

    /// The same with more words on QEMU's command line, in which `{}` is the folder.
    pub(crate) fn with(formats: &[&str], words: &[&str]) -> Self {
        Self::prepared(formats, words, |_| ())
    }

    /// The same in a folder that is something special: `prepare` sees to that.
    pub(crate) fn prepared(formats: &[&str], words: &[&str], prepare: impl FnOnce(&Path)) -> Self {
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
        let (process, monitor) = start(directory.path(), "qmp", (&images, words), clock);
        Self {
            monitor,
            directory,
            clock,
            process,
            runs: AtomicU32::new(1),
        }
    }

    /// Another QEMU takes the place of this one, which ends as told.
    pub(crate) fn restart(&mut self, (images, words): (&[Image], &[&str]), ending: Ending) {
        match ending {
            Ending::Quit => drop(self.execute("quit", Value::Null)),
            Ending::Killed => self.process.kill().unwrap(),
        }
        self.process.wait().unwrap();
        let started = start(self.directory.path(), "qmp", (images, words), self.clock);
        (self.process, self.monitor) = started;
    }

    /// The machine goes on in another QEMU, which has the same images. Where it cannot, it goes on here.
    pub(crate) fn migrate(&mut self, (images, words): (&[Image], &[&str]), capabilities: &Value) -> Result<(), String> {
        let number = self.runs.fetch_add(1, Ordering::Relaxed);
        let words = [words, &["-incoming", "defer"]].concat();
        let socket = format!("qmp-{number}");
        let (mut process, monitor) = start(self.directory.path(), &socket, (images, &words), self.clock);
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
                    Some("completed") => return Ok(()),
                    Some("failed" | "cancelled") => return Err(state.to_string()),
                    _ => self.clock.sleep(Duration::from_millis(20)),
                }
            }
        };
        if let Err(error) = migrate() {
            process.kill().unwrap();
            process.wait().unwrap();
            return Err(error);
        }
        self.execute("quit", Value::Null);
        self.process.wait().unwrap();
        (self.process, self.monitor) = (process, monitor);
        while !self.is_running() {
            self.clock.sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    pub(crate) fn execute(&self, name: &'static str, arguments: Value) -> Value {
        self.monitor.execute(&QmpCommand::new(name, arguments)).unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// What a guest would do with its disk: "write -P 9 4M 1M". Gives what QEMU says of it.
    pub(crate) fn guest(&self, disk: usize, command: &str) -> String {
        self.guest_at(&format!("/machine/peripheral/disk{disk}/virtio-backend"), command)
    }

    /// The same at a device by its path in QEMU's object model.
    pub(crate) fn guest_at(&self, device: &str, command: &str) -> String {
        let line = format!("qemu-io -d {device} \"{command}\"");
        let said = || std::fs::read_to_string(self.path("said")).unwrap();
        let before = said().len();
        let complaint = self.execute("human-monitor-command", json!({ "command-line": line }));
        said()[before..].to_owned() + complaint.as_str().unwrap()
    }

    pub(crate) fn guest_writes(&self, disk: usize, byte: u8, offset: u64, length: u64) {
        let said = self.guest(disk, &format!("write -P {byte} {offset} {length}"));
        assert!(said.contains(&format!("wrote {length}/{length}")), "{said}");
    }

    pub(crate) fn disks(&self) -> Vec<QemuDisk> {
        disks(&*self.monitor).unwrap()
    }

    pub(crate) fn process_id(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.process)
    }

    pub(crate) fn is_running(&self) -> bool {
        self.execute("query-status", Value::Null)["running"].as_bool().unwrap()
    }

    /// A new run's request to freeze all disks, its files in `folder`; and the socket at which they will be served.
    pub(crate) fn request(&self, folder: &Path) -> (PointInTimeRequest, PathBuf) {
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

    /// What would be left of a run in QEMU: nodes, exports, files, bitmaps, and what is under the devices.
    pub(crate) fn everything(&self) -> Value {
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
fn start(
    folder: &Path,
    socket: &str,
    (images, words): (&[Image], &[&str]),
    clock: SystemClock,
) -> (Child, Arc<QmpSocket>) {
    let mut arguments: Vec<String> = ["-accel", "tcg", "-nodefaults", "-display", "none", "-m", "16"]
        .map(str::to_owned)
        .to_vec();
    let socket = folder.join(socket);
    arguments.extend([
        "-qmp".to_owned(),
        format!("unix:{},server=on,wait=off", socket.display()),
    ]);
    for (number, (format, image)) in images.iter().enumerate() {
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
    arguments.extend(words.iter().map(|word| word.replace("{}", folder_name)));
    // What qemu-io says goes to QEMU's own standard output, which a file gets by the line only with some help.
    let said = File::options().create(true).append(true).open(folder.join("said"));
    let process = Process::new("stdbuf")
        .args(["--output=L", "qemu-system-x86_64"])
        .args(&arguments)
        .stdin(Stdio::null())
        .stdout(said.unwrap())
        .spawn()
        .expect("these tests need qemu-system-x86_64 (scripts/setup installs it)");
    let monitor = (0..200).find_map(|_| {
        clock.sleep(Duration::from_millis(50));
        QmpSocket::connect(&socket).ok()
    });
    (process, Arc::new(monitor.expect("QEMU answers within ten seconds")))
}

/// A sparse file without a name.
pub(crate) fn scratch(folder: &Path, size_bytes: u64) -> OwnedFd {
    let file: File = tempfile::tempfile_in(folder).unwrap();
    file.set_len(size_bytes).unwrap();
    OwnedFd::from(file)
}

/// Asserts that a served disk holds `byte` from `offset` on.
pub(crate) fn assert_served(socket: &Path, export: &str, byte: usize, offset: u64, length: u64) {
    let uri = format!("nbd+unix:///{export}?socket={}", socket.display());
    let said = run(
        "qemu-io",
        &[
            "-r",
            "-f",
            "raw",
            "-c",
            &format!("read -P {byte} {offset} {length}"),
            &uri,
        ],
    );
    assert!(
        said.contains(&format!("read {length}/{length}")) && !said.contains("failed"),
        "{said}"
    );
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}
