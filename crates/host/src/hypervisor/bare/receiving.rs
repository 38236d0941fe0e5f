//! A QEMU that is started to receive the memory of a machine.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast_block::Clock;
use serde_json::json;

use super::BareConnection;
use super::command_line::{CommandLine, RECEIVING};
use crate::qemu::qmp::QmpCommand;
use crate::system::process::DetachedProcess;
use crate::system::processes::UserIdentity;
use crate::system::rights::Rights;

/// How long QEMU may take until its monitor answers.
const START_PATIENCE: Duration = Duration::from_secs(30);
const START_INTERVAL: Duration = Duration::from_millis(10);
/// Interval of looking for the connection with the memory.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(5);
/// QEMU's name for that connection.
const CONNECTION: &str = "hf-migration";
/// Bytes of QEMU's messages that are shown.
const MESSAGE_BYTES_MAX: u64 = 4096;

/// A machine that comes, and has not started here. Dropping it ends the wait for its memory, and not its QEMU.
pub(super) struct ReceivedMachine {
    is_over: Arc<AtomicBool>,
    socket: PathBuf,
}

/// Connects to the monitor; none if it does not listen yet.
type Connect<'a> = dyn Fn() -> Result<Option<Arc<BareConnection>>, String> + 'a;

impl ReceivedMachine {
    /// Starts a QEMU that waits for the memory, which comes to the socket.
    ///
    /// # Errors
    /// Why it does not start, for users.
    pub(super) fn start(
        line: &CommandLine,
        memory_socket: &Path,
        clock: &dyn Clock,
        connect: &Connect<'_>,
    ) -> Result<Self, String> {
        line.prepare_files()?;
        let messages = tempfile::tempfile().map_err(|error| format!("a file for its messages: {error}"))?;
        let mut process = line.spawn(&messages)?;
        let qemu = wait_for_monitor(&mut process, clock, connect).map_err(|reason| {
            process.kill();
            with_messages(reason, &messages)
        })?;
        let received = listen(qemu, memory_socket);
        received.map_err(|error| {
            process.kill();
            format!("{}: {error}", memory_socket.display())
        })
    }
}

impl Drop for ReceivedMachine {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        std::fs::remove_file(&self.socket).ok();
    }
}

fn wait_for_monitor(
    process: &mut DetachedProcess,
    clock: &dyn Clock,
    connect: &Connect<'_>,
) -> Result<Arc<BareConnection>, String> {
    let until = clock.now() + START_PATIENCE;
    loop {
        if let Some(qemu) = connect()? {
            return Ok(qemu);
        }
        // With -daemonize, the first process ends well.
        let ended = process.status().map_err(|error| error.to_string())?;
        if let Some(status) = ended.filter(|status| !status.success()) {
            return Err(format!("its QEMU does not start ({status})"));
        }
        if clock.now() >= until {
            return Err("its QEMU has started, and its monitor does not answer".to_owned());
        }
        clock.sleep(START_INTERVAL);
    }
}

/// Waits for the connection in another thread. QEMU may run as a user that cannot listen.
fn listen(qemu: Arc<BareConnection>, path: &Path) -> std::io::Result<ReceivedMachine> {
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    let is_over = Arc::new(AtomicBool::new(false));
    let received = ReceivedMachine {
        is_over: Arc::clone(&is_over),
        socket: path.to_owned(),
    };
    let (clock, socket) = (Arc::clone(&qemu.clock), path.to_owned());
    std::thread::Builder::new().name("memory".to_owned()).spawn(move || {
        while !is_over.load(Ordering::Acquire) {
            match listener.accept() {
                Ok((stream, _)) => {
                    // While it has its name and no listener, it is one that a killed process has left.
                    std::fs::remove_file(&socket).ok();
                    return hand_over(&qemu, stream);
                }
                Err(_) => clock.sleep(ACCEPT_INTERVAL),
            }
        }
    })?;
    Ok(received)
}

/// A failure ends the connection, which the sender sees.
fn hand_over(qemu: &BareConnection, stream: UnixStream) {
    let named = QmpCommand::new("getfd", json!({ "fdname": CONNECTION })).with_file(OwnedFd::from(stream));
    let uri = json!({ "uri": format!("fd:{CONNECTION}") });
    let begun = qemu
        .monitor
        .execute(&named)
        .and_then(|_| qemu.monitor.execute(&QmpCommand::new("migrate-incoming", uri)));
    if let Err(error) = begun {
        log::debug!("QEMU does not receive the memory: {error}");
    }
}

fn with_messages(reason: String, mut messages: &File) -> String {
    let mut text = String::new();
    let read = messages
        .rewind()
        .and_then(|()| messages.take(MESSAGE_BYTES_MAX).read_to_string(&mut text));
    match (read, text.trim()) {
        (Err(_), _) | (_, "") => reason,
        (Ok(_), text) => format!("{reason}: {}", text.lines().collect::<Vec<_>>().join("; ")),
    }
}

impl CommandLine {
    /// Starts the machine, paused and without its memory.
    fn spawn(&self, messages: &File) -> Result<DetachedProcess, String> {
        let failed = |error: std::io::Error| format!("{}: {error}", self.program.display());
        let mut words: Vec<OsString> = Vec::new();
        if let Some((user, group)) = self.user {
            words.push("setpriv".into());
            words.extend([format!("--reuid={user}"), format!("--regid={group}")].map(OsString::from));
            words.extend(["--init-groups", "--"].map(OsString::from));
        }
        words.push(self.program.clone().into());
        words.extend(self.arguments.iter().map(OsString::from));
        words.extend(RECEIVING.map(OsString::from));
        let program = words.remove(0);
        let messages = messages.try_clone().map_err(failed)?;
        DetachedProcess::start(&program, &words, &self.folder, messages).map_err(failed)
    }

    /// Makes the variables of the firmware, and gives the disks to the user of the machine, who has chosen all paths but those of
    /// the disks.
    fn prepare_files(&self) -> Result<(), String> {
        if let Some((path, size_bytes)) = &self.variables {
            // QEMU writes its content, which comes with the memory.
            let made = self.rights().exercise(|| make_file(path, *size_bytes));
            made.and_then(|made| made)
                .map_err(|error| format!("{}: {error}", path.display()))?;
        }
        let Some((user, group)) = self.user else { return Ok(()) };
        for path in &self.disks {
            let given = open_regular(path).and_then(|file| std::os::unix::fs::fchown(file, Some(user), Some(group)));
            given.map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(())
    }

    fn rights(&self) -> Rights {
        self.user.map_or(Rights::Own, |(user, group)| {
            Rights::of(UserIdentity {
                user,
                group,
                groups: Vec::new(),
            })
        })
    }
}

fn make_file(path: &Path, size_bytes: u64) -> std::io::Result<()> {
    let mut options = File::options();
    let file = options
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)?;
    file.set_len(size_bytes)
}

fn open_regular(path: &Path) -> std::io::Result<File> {
    let flags = rustix::fs::OFlags::NOFOLLOW.bits();
    let file = File::options()
        .read(true)
        .custom_flags(flags.cast_signed())
        .open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(std::io::Error::other("it is not a file"))
}
