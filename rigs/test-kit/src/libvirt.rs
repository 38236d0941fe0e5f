//! A private libvirtd, and machines under it.

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

use crate::run;

/// The size of the disks that [`LibvirtLab::define`] creates.
pub const DISK_BYTES: u64 = 8 << 20;
/// How many times QEMU's help of 1.5 KiB is printed to fill a buffer of 4 KiB.
const HELPS_PER_BUFFER: usize = 4;

/// A libvirtd with its machines. They run until this is dropped.
#[derive(Debug)]
pub struct LibvirtLab {
    /// The folder for images, and in `libvirt` for the files of the daemon.
    pub folder: TempDir,
    /// The clock for waits.
    pub clock: SystemClock,
    daemon: Option<Child>,
}

impl LibvirtLab {
    /// Starts a daemon without machines; [`LibvirtLab::connect`] waits until it answers.
    #[expect(clippy::new_without_default, reason = "it starts a process")]
    pub fn new() -> Self {
        Self::prepared(|_| ())
    }

    /// Like [`LibvirtLab::new`], after `prepare` has prepared the folder. The daemon runs in its own mount namespace
    /// after that.
    pub fn prepared(prepare: impl FnOnce(&Path)) -> Self {
        let mut lab = Self {
            // A short path: the path of a socket may have at most 107 bytes.
            folder: tempfile::Builder::new().prefix("hf").tempdir_in("/tmp").unwrap(),
            clock: SystemClock::new(),
            daemon: None,
        };
        prepare(lab.folder.path());
        lab.start_daemon();
        lab
    }

    /// Starts the daemon again.
    pub fn start_daemon(&mut self) {
        self.seed_capabilities();
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

    /// Stops the daemon by SIGTERM; its machines continue to run.
    pub fn stop_daemon(&mut self) {
        self.end_daemon(rustix::process::Signal::TERM);
    }

    /// Kills the daemon; its machines continue to run.
    pub fn kill_daemon(&mut self) {
        self.end_daemon(rustix::process::Signal::KILL);
    }

    fn end_daemon(&mut self, signal: rustix::process::Signal) {
        let mut daemon = self.daemon.take().unwrap();
        let id = rustix::process::Pid::from_child(&daemon);
        rustix::process::kill_process(id, signal).unwrap();
        daemon.wait().unwrap();
        self.keep_capabilities();
    }

    /// Copies the capabilities of QEMU that an earlier daemon has detected: detecting them takes more than a second of
    /// processor time.
    ///
    /// libvirt checks that QEMU, libvirtd and the kernel have not changed.
    fn seed_capabilities(&self) {
        let own = self.capabilities();
        std::fs::create_dir_all(&own).unwrap();
        for entry in std::fs::read_dir(shared_capabilities()).into_iter().flatten().flatten() {
            std::fs::copy(entry.path(), own.join(entry.file_name())).ok();
        }
    }

    /// Stores the detected capabilities for later daemons; each file is replaced atomically.
    fn keep_capabilities(&self) {
        let shared = shared_capabilities();
        for entry in std::fs::read_dir(self.capabilities()).into_iter().flatten().flatten() {
            let found = std::fs::read(entry.path()).unwrap_or_default();
            let kept = shared.join(entry.file_name());
            if found.is_empty() || std::fs::read(&kept).is_ok_and(|bytes| bytes == found) {
                continue;
            }
            std::fs::create_dir_all(&shared).unwrap();
            let mut file = tempfile::NamedTempFile::new_in(shared.parent().unwrap()).unwrap();
            std::io::Write::write_all(&mut file, &found).unwrap();
            file.persist(kept).unwrap();
        }
    }

    /// The daemon's folder of detected capabilities.
    fn capabilities(&self) -> PathBuf {
        let is_root = rustix::process::geteuid().is_root();
        let of_user = if is_root {
            "libvirt/cache/qemu/capabilities"
        } else {
            "libvirt/cache/libvirt/qemu/cache/capabilities"
        };
        self.path(of_user)
    }

    /// The path of a file in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The daemon's connection URI.
    pub fn uri(&self) -> String {
        std::fs::read_to_string(self.path("libvirt/uri"))
            .unwrap()
            .trim()
            .to_owned()
    }

    /// Connects as soon as the daemon answers.
    pub fn connect(&self) -> Libvirt {
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

    /// Runs a command of virsh, which must succeed; returns its output.
    pub fn virsh(&self, words: &[&str]) -> String {
        let uri = self.uri();
        run("virsh", &[&["-q", "-c", &uri], words].concat())
    }

    /// Defines a machine with disks of these formats. Disk N is filled with the byte N + 1.
    pub fn define(&self, name: &str, formats: &[&str]) {
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

    /// Like [`LibvirtLab::define`] with existing images, which may be devices.
    pub fn define_on(&self, name: &str, images: &[(&str, PathBuf)]) {
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

    /// Defines a machine by its configuration.
    pub fn define_xml(&self, xml: &str) {
        let file = self.path("domain.xml");
        std::io::Write::write_all(&mut std::fs::File::create(&file).unwrap(), xml.as_bytes()).unwrap();
        self.virsh(&["define", file.to_str().unwrap()]);
    }

    /// Writes to a disk of a machine like its guest, and asserts that QEMU succeeded.
    pub fn guest_writes(&self, monitor: &dyn Monitor, disk: usize, byte: u8, offset: u64, length: u64) {
        let written = format!("wrote {length}/{length} bytes at offset {offset}\n");
        let output = self.guest_output(monitor, disk, &format!("write -P {byte} {offset} {length}"));
        assert!(output.contains(&written), "{output}");
    }

    /// Runs a command of `qemu-io` on a disk of a machine; returns its output, which QEMU prints to its log and not to
    /// the monitor.
    pub fn guest_output(&self, monitor: &dyn Monitor, disk: usize, command: &str) -> String {
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
        // QEMU may buffer its output to a file: its help fills the rest of the buffer.
        for _ in 0..HELPS_PER_BUFFER {
            let output = &in_log()[before..];
            if output.contains('\n') {
                return answer + output;
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

    /// A request to freeze all disks of a machine, and the socket that will serve them.
    pub fn request(&self, run: u32, machine: &dyn Machine) -> (PointInTimeRequest, PathBuf) {
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

impl Drop for LibvirtLab {
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

/// The folder with the capabilities that daemons of earlier tests have detected, next to the test program.
fn shared_capabilities() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    program.ancestors().nth(2).unwrap().join("libvirt-capabilities")
}
