//! A running appliance.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use holdfast_guest_files::protocol::ReaderProcess;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;

use super::launch::{FILE_MARK, LaunchOrder, send_order};
use super::{APPLIANCE_INIT, ApplianceError, CHANNEL_NAME};
use holdfast_host::{PROGRAM_PATH, command};

const QEMU: &str = "qemu-system-x86_64";
/// Where distributions without QEMU's own name for it have it.
const QEMU_PATHS: [&str; 2] = ["/usr/libexec/qemu-kvm", "/usr/lib/qemu-kvm"];
/// User and group of QEMU if this process runs as root: the unprivileged ones of Debian.
const UNPRIVILEGED_ID: u32 = 65_534;
/// Bytes of the console that are kept for errors.
const CONSOLE_BYTES: usize = 16 << 10;
const CONSOLE_LINES: usize = 3;
/// How often the end of QEMU is looked for.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// How often a wait for an answer looks whether the disks are read.
const WAIT_STEP: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A disk of an appliance.
pub struct ApplianceDisk {
    /// The connection to an NBD server with one export of the empty name.
    pub socket: UnixStream,
}

/// What an appliance is started with.
pub struct ApplianceMachineOptions<'a> {
    /// The kernel.
    pub kernel: &'a super::ApplianceKernel,
    /// The initrd of [`build_initrd`](super::build_initrd).
    pub initrd: &'a [u8],
    /// The disks, in order.
    pub disks: Vec<ApplianceDisk>,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// The argument of this program that makes it call [`become_machine`](super::become_machine).
    pub launcher: OsString,
    /// Seconds without an answer and without a read of a disk after which the appliance has failed.
    pub idle_seconds_max: u64,
    /// Seconds without an answer after which the appliance has failed in any case.
    pub answer_seconds_max: u64,
    /// The number of reads of disks so far.
    pub reads: Box<dyn Fn() -> u64 + Send>,
}

/// A running appliance: reading and writing are its channel. Dropping this ends it.
pub struct ApplianceMachine {
    channel: UnixStream,
    stop: Option<Sender<()>>,
    keeper: Option<JoinHandle<Option<ExitStatus>>>,
    console: Console,
    idle_seconds_max: u64,
    answer_seconds_max: u64,
    reads: Box<dyn Fn() -> u64 + Send>,
}

/// The last bytes of the console.
type Console = Arc<Mutex<Vec<u8>>>;

/// The QEMU of this host.
fn find_qemu() -> Result<PathBuf, ApplianceError> {
    let folders = PROGRAM_PATH.split(':').map(|folder| PathBuf::from(folder).join(QEMU));
    let mut all = folders.chain(QEMU_PATHS.map(PathBuf::from));
    all.find(|path| path.is_file())
        .ok_or(ApplianceError::NoQemu { program: QEMU })
}

impl ApplianceMachine {
    /// An error if this host cannot run appliances.
    pub fn require_qemu() -> Result<(), ApplianceError> {
        if cfg!(not(target_arch = "x86_64")) {
            return Err(ApplianceError::Architecture);
        }
        find_qemu().map(drop)
    }

    /// Starts an appliance.
    pub fn start(options: ApplianceMachineOptions<'_>) -> Result<Self, ApplianceError> {
        Self::require_qemu()?;
        let qemu = find_qemu()?;
        let image = std::fs::read(&options.kernel.image)
            .map_err(|error| ApplianceError::file("read", &options.kernel.image, error))?;
        Self::start_with(&qemu.to_string_lossy(), &image, options).map_err(ApplianceError::Start)
    }

    fn start_with(qemu: &str, image: &[u8], options: ApplianceMachineOptions<'_>) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut files: Vec<OwnedFd> = vec![in_memory(image)?, in_memory(options.initrd)?, theirs.into()];
        let disk_count = options.disks.len();
        files.extend(options.disks.into_iter().map(|disk| OwnedFd::from(disk.socket)));
        let words = qemu_words(qemu, options.memory_bytes, disk_count);
        let (orders, orders_end) = UnixStream::pair()?;
        let (started, start) = channel();
        let (stop, stopped) = channel();
        let launcher = options.launcher;
        // The process ends with the thread that started it: so this thread lives as long as the process.
        let keeper = std::thread::Builder::new()
            .name("appliance".to_owned())
            .spawn(move || {
                let child = spawn(launcher, orders_end);
                keep(child, &started, &stopped)
            })?;
        let mut output = start.recv().map_err(io::Error::other)??;
        let console = Console::default();
        let kept = Arc::clone(&console);
        std::thread::Builder::new().name("console".to_owned()).spawn(move || {
            let mut part = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut part) {
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                kept.extend_from_slice(part.get(..count).unwrap_or_default());
                let excess = kept.len().saturating_sub(CONSOLE_BYTES);
                kept.drain(..excess);
            }
        })?;
        let machine = Self {
            channel: ours,
            stop: Some(stop),
            keeper: Some(keeper),
            console,
            idle_seconds_max: options.idle_seconds_max,
            answer_seconds_max: options.answer_seconds_max,
            reads: options.reads,
        };
        let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        send_order(
            &orders,
            &LaunchOrder {
                parent: std::process::id(),
                memory_bytes: options.memory_bytes,
                words: &words,
                files: &borrowed,
            },
        )?;
        machine.channel.set_nonblocking(true)?;
        Ok(machine)
    }

    /// Waits until the channel is ready.
    fn wait(&self, flags: PollFlags) -> io::Result<()> {
        let (mut idle, mut waited, mut reads) = (0, 0, (self.reads)());
        loop {
            match poll(&mut [PollFd::new(&self.channel, flags)], Some(&WAIT_STEP)) {
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                Ok(0) => {
                    let now = (self.reads)();
                    idle = if now == reads { idle + 1 } else { 0 };
                    reads = now;
                    waited += 1;
                    if idle >= self.idle_seconds_max || waited >= self.answer_seconds_max {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                }
                Ok(_) => return Ok(()),
            }
        }
    }

    /// Ends QEMU; returns how it ended.
    fn finish(&mut self) -> Option<ExitStatus> {
        drop(self.stop.take());
        self.keeper.take().and_then(|keeper| keeper.join().ok()).flatten()
    }

    /// The last lines of the console.
    fn last_lines(&self) -> String {
        let console = self.console.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&console).into_owned();
        let text: String = text
            .chars()
            .filter(|letter| !letter.is_control() || *letter == '\n')
            .collect();
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        lines
            .get(lines.len().saturating_sub(CONSOLE_LINES)..)
            .unwrap_or_default()
            .join("; ")
    }
}

/// Starts this program, as a user without rights if this process is root.
fn spawn(launcher: OsString, orders: UnixStream) -> io::Result<Child> {
    // The program can be in a folder that another user cannot enter.
    let mut child = command("/proc/self/exe");
    child
        .arg(launcher)
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(OwnedFd::from(orders)))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        // Ctrl-C interrupts this process, which then ends the child.
        .process_group(0);
    if rustix::process::geteuid().is_root() {
        // The group of the device keeps the right to use the processor's virtualization.
        let group = std::fs::metadata("/dev/kvm").map_or(UNPRIVILEGED_ID, |metadata| metadata.gid());
        child
            .gid(if group == 0 { UNPRIVILEGED_ID } else { group })
            .uid(UNPRIVILEGED_ID);
    }
    child.spawn()
}

/// Waits for the end of a process, or for the order to kill it.
fn keep(
    child: io::Result<Child>,
    started: &Sender<io::Result<std::process::ChildStderr>>,
    stopped: &Receiver<()>,
) -> Option<ExitStatus> {
    let mut child = match child {
        Ok(child) => child,
        Err(error) => {
            started.send(Err(error)).ok();
            return None;
        }
    };
    let output = child
        .stderr
        .take()
        .ok_or_else(|| io::Error::other("the process has no pipe"));
    started.send(output).ok();
    loop {
        let is_stopped = !matches!(stopped.recv_timeout(LOOK_INTERVAL), Err(RecvTimeoutError::Timeout));
        let status = child.try_wait().ok().flatten();
        if is_stopped {
            child.kill().ok();
            child.wait().ok();
        }
        if is_stopped || status.is_some() {
            return status;
        }
    }
}

/// A file without a name.
fn in_memory(bytes: &[u8]) -> io::Result<OwnedFd> {
    let file = memfd_create("appliance", MemfdFlags::CLOEXEC)?;
    let mut file = File::from(file);
    file.write_all(bytes)?;
    Ok(file.into())
}

/// Whether the processor is not itself one of a virtual machine. There KVM can exist and hang, or be slower than
/// emulation.
fn has_own_processor() -> bool {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut flags = text.lines().filter(|line| line.starts_with("flags"));
    flags
        .next()
        .is_some_and(|line| !line.split_whitespace().any(|flag| flag == "hypervisor"))
}

/// The command line of QEMU. The files are the kernel, the initrd, the channel and the disks.
fn qemu_words(qemu: &str, memory_bytes: u64, disk_count: usize) -> Vec<String> {
    let file = |number: usize| format!("{FILE_MARK}{number}@");
    let kernel = format!(
        "console=ttyS0 quiet loglevel=3 panic=-1 oops=panic edd=off no_timer_check tsc=reliable \
         random.trust_cpu=on mitigations=off nokaslr \
         DM_DISABLE_UDEV=1 LVM_SUPPRESS_FD_WARNINGS=1 -- {APPLIANCE_INIT}"
    );
    let mut words: Vec<String> = vec![qemu.to_owned()];
    let mut add = |option: &str, value: String| words.extend([option.to_owned(), value]);
    add(
        "-machine",
        "q35,usb=off,vmport=off,smbus=off,sata=off,graphics=off".to_owned(),
    );
    if has_own_processor() && File::options().read(true).write(true).open("/dev/kvm").is_ok() {
        add("-accel", "kvm".to_owned());
    }
    add("-accel", "tcg,tb-size=64".to_owned());
    add("-cpu", "max".to_owned());
    add("-smp", "1".to_owned());
    add("-m", format!("{}M", memory_bytes >> 20));
    add("-kernel", format!("/proc/self/fd/{}", file(0)));
    add("-initrd", format!("/proc/self/fd/{}", file(1)));
    add("-append", kernel);
    add("-display", "none".to_owned());
    add(
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny".to_owned(),
    );
    add("-chardev", "stdio,id=console,signal=off".to_owned());
    add("-serial", "chardev:console".to_owned());
    add("-chardev", format!("socket,id=channel,fd={}", file(2)));
    add("-device", "virtio-serial-pci".to_owned());
    add("-device", format!("virtserialport,chardev=channel,name={CHANNEL_NAME}"));
    for number in 0..disk_count {
        let socket = file(3 + number);
        let server = format!(r#"{{"type":"fd","str":"{socket}"}}"#);
        add(
            "-blockdev",
            format!(r#"{{"driver":"nbd","node-name":"n{number}","server":{server},"export":""}}"#),
        );
        add("-device", format!("virtio-blk-pci,drive=n{number},serial=d{number}"));
    }
    words.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(str::to_owned));
    words
}

impl Read for ApplianceMachine {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.wait(PollFlags::IN)?;
        self.channel.read(buffer)
    }
}

impl Write for ApplianceMachine {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        loop {
            match self.channel.write(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(PollFlags::OUT)?,
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl ReaderProcess for ApplianceMachine {
    fn end(&mut self, error: &io::Error) -> String {
        let status = self.finish();
        let how = match (error.kind(), status) {
            (io::ErrorKind::TimedOut, _) => "in the appliance does not answer".to_owned(),
            (_, Some(status)) => match (status.signal(), status.code()) {
                (Some(signal), _) => format!("in the appliance was ended by signal {signal}"),
                (None, code) => format!("in the appliance ended with exit code {}", code.unwrap_or(0)),
            },
            (_, None) => format!("in the appliance ended: {error}"),
        };
        match self.last_lines() {
            words if words.is_empty() => how,
            words => format!("{how} ({words})"),
        }
    }
}

impl Drop for ApplianceMachine {
    fn drop(&mut self) {
        self.finish();
    }
}
