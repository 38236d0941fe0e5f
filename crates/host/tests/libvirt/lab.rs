//! A libvirtd of our own, and machines under it.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, Stdio};
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use holdfast_host::qemu::{DiskRequest, PausePolicy, PointInTimeRequest, RunId, disks};
use holdfast_host::qmp::{Monitor, QmpCommand};
use holdfast_host::{Hypervisor as _, Libvirt, Machine};
use serde_json::json;
use tempfile::TempDir;

pub(crate) const DISK_BYTES: u64 = 8 << 20;
/// How often QEMU's help, of 1.5 KiB, is asked for until a buffer of 4 KiB is full.
const HELPS_PER_BUFFER: usize = 4;

/// A libvirtd that runs until this is dropped, with all machines that were made.
pub(crate) struct Lab {
    pub(crate) folder: TempDir,
    pub(crate) clock: SystemClock,
    daemon: Option<Child>,
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
    pub(crate) fn new() -> Self {
        Self::prepared(|_| ())
    }

    /// One whose folder is something special: `prepare` sees to that before the daemon starts, which has mounts of its own from
    /// then on.
    pub(crate) fn prepared(prepare: impl FnOnce(&Path)) -> Self {
        let mut lab = Self {
            // Short: the path of a socket has room for 107 bytes.
            folder: tempfile::Builder::new().prefix("hf").tempdir_in("/tmp").unwrap(),
            clock: SystemClock::new(),
            daemon: None,
        };
        prepare(lab.folder.path());
        lab.start_daemon();
        lab
    }

    pub(crate) fn start_daemon(&mut self) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/private-libvirtd");
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.path("libvirtd.log"))
            .unwrap();
        let daemon = Process::new(script)
            .arg(self.path("libvirt"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.daemon = Some(daemon);
    }

    /// Ends the daemon; its machines run on.
    pub(crate) fn stop_daemon(&mut self) {
        self.end_daemon(rustix::process::Signal::TERM);
    }

    /// Kills the daemon; its machines run on.
    #[allow(dead_code, reason = "the tests of this crate kill no daemon")]
    pub(crate) fn kill_daemon(&mut self) {
        self.end_daemon(rustix::process::Signal::KILL);
    }

    fn end_daemon(&mut self, signal: rustix::process::Signal) {
        let mut daemon = self.daemon.take().unwrap();
        let id = rustix::process::Pid::from_child(&daemon);
        rustix::process::kill_process(id, signal).unwrap();
        daemon.wait().unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn uri(&self) -> String {
        std::fs::read_to_string(self.path("libvirt/uri"))
            .unwrap()
            .trim()
            .to_owned()
    }

    /// Connects, as soon as the daemon answers.
    pub(crate) fn connect(&self) -> Libvirt {
        for _ in 0..300 {
            if self.path("libvirt/uri").exists()
                && let Ok(libvirt) = Libvirt::connect(&self.uri())
            {
                return libvirt;
            }
            self.clock.sleep(Duration::from_millis(100));
        }
        let log = std::fs::read_to_string(self.path("libvirtd.log")).unwrap();
        panic!("libvirtd does not answer: {log}");
    }

    pub(crate) fn virsh(&self, words: &[&str]) -> String {
        let uri = self.uri();
        run("virsh", &[&["-q", "-c", &uri], words].concat())
    }

    /// Defines a machine with disks of these formats, disk N full of the byte N + 1.
    pub(crate) fn define(&self, name: &str, formats: &[&str]) {
        let images = formats.iter().zip('a'..).map(|(format, letter)| {
            let image = self.path(&format!("{name}-{letter}"));
            run(
                "qemu-img",
                &["create", "-q", "-f", format, image.to_str().unwrap(), "8M"],
            );
            (*format, image)
        });
        self.define_on(name, &images.collect::<Vec<_>>());
    }

    /// The same, with images that are there; they may be devices.
    pub(crate) fn define_on(&self, name: &str, images: &[(&str, PathBuf)]) {
        let mut devices = String::new();
        for ((number, (format, image)), letter) in images.iter().enumerate().zip('a'..) {
            let (kind, source) = if image.starts_with("/dev") {
                ("block", "dev")
            } else {
                ("file", "file")
            };
            let image = image.to_str().unwrap();
            run(
                "qemu-io",
                &["-f", format, "-c", &format!("write -P {} 0 8M", number + 1), image],
            );
            let disk = format!(
                "<disk type='{kind}' device='disk'><driver name='qemu' type='{format}'/><source {source}='{image}'/>\
                 <target dev='vd{letter}' bus='virtio'/></disk>"
            );
            devices.push_str(&disk);
        }
        let xml = format!(
            "<domain type='qemu'><name>{name}</name><memory unit='MiB'>16</memory><vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='pc'>hvm</type></os><features><acpi/></features><devices>{devices}\
             <disk type='file' device='cdrom'><target dev='sda' bus='scsi'/><readonly/></disk>\
             <memballoon model='none'/></devices></domain>"
        );
        self.define_xml(&xml);
    }

    pub(crate) fn define_xml(&self, xml: &str) {
        let file = self.path("domain.xml");
        std::io::Write::write_all(&mut std::fs::File::create(&file).unwrap(), xml.as_bytes()).unwrap();
        self.virsh(&["define", file.to_str().unwrap()]);
    }

    /// Writes to a disk of a machine as its guest would, and asserts that QEMU could write it.
    pub(crate) fn guest_writes(&self, monitor: &dyn Monitor, disk: usize, byte: u8, offset: u64, length: u64) {
        let written = format!("wrote {length}/{length} bytes at offset {offset}\n");
        let said = self.guest_says(monitor, disk, &format!("write -P {byte} {offset} {length}"));
        assert!(said.contains(&written), "{said}");
    }

    /// What `qemu-io` says of a command at a disk of a machine. QEMU prints it to its log and not to the monitor.
    pub(crate) fn guest_says(&self, monitor: &dyn Monitor, disk: usize, command: &str) -> String {
        let execute = |name, arguments| monitor.execute(&QmpCommand::new(name, arguments)).unwrap();
        let name = execute("query-name", serde_json::Value::Null);
        let log = self.log_of(name["name"].as_str().unwrap());
        let in_log = || String::from_utf8_lossy(&std::fs::read(&log).unwrap()).into_owned();
        let device = format!("/machine/peripheral/virtio-disk{disk}/virtio-backend");
        let run = |command: &str| {
            let line = format!("qemu-io -d {device} \"{command}\"");
            let answer = execute("human-monitor-command", json!({ "command-line": line }));
            answer.as_str().unwrap().to_owned()
        };
        let before = in_log().len();
        let answer = run(command);
        // QEMU may write to a file by the buffer: its help fills what is left of one.
        for _ in 0..HELPS_PER_BUFFER {
            let said = &in_log()[before..];
            if said.contains('\n') {
                return answer + said;
            }
            run("help");
        }
        answer + &in_log()[before..]
    }

    /// The log of a machine's QEMU.
    fn log_of(&self, name: &str) -> PathBuf {
        let folders = ["libvirt/log/libvirt/qemu", "libvirt/cache/libvirt/qemu/log"];
        let logs = folders.map(|folder| self.path(folder).join(format!("{name}.log")));
        logs.into_iter().find(|log| log.exists()).unwrap()
    }

    /// A request to freeze all disks of a machine; and the socket at which they will be served.
    pub(crate) fn request(&self, run: u32, machine: &dyn Machine) -> (PointInTimeRequest, PathBuf) {
        let socket = self.path(&format!("nbd-{run}"));
        let listener = UnixListener::bind(&socket).unwrap();
        let disks = disks(machine.monitor()).unwrap().into_iter().map(|disk| {
            let scratch = tempfile::tempfile_in(self.folder.path()).unwrap();
            scratch.set_len(disk.size_bytes).unwrap();
            DiskRequest {
                scratch: scratch.into(),
                spool: None,
                disk,
                next_bitmap: None,
                changes: None,
                changes_below: None,
            }
        });
        let request = PointInTimeRequest {
            run: RunId(run),
            disks: disks.collect(),
            write_deadline: Duration::from_secs(2),
            listener: OwnedFd::from(listener),
            memory: None,
            pause_policy: PausePolicy::WhereNeeded,
        };
        (request, socket)
    }
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
        if self.daemon.is_none() || !self.path("libvirt/uri").exists() {
            return;
        }
        if let Ok(libvirt) = Libvirt::connect(&self.uri()) {
            for machine in libvirt.machines().unwrap_or_default() {
                let words = ["-q", "-c", &self.uri(), "destroy", &machine.name];
                Process::new("virsh").args(words).output().ok();
            }
        }
        self.stop_daemon();
    }
}
