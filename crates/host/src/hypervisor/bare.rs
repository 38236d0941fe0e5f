//! A QEMU without a management layer, reached by its own monitor socket (`-qmp unix:PATH`): a hypervisor of one
//! machine.
//!
//! Such a socket serves one client at a time. The backup uses it while it works. Its watchdog is next in the queue
//! ([`QueuedSocket`]), with a [stand-in](BareQemu::stand_in) that has only the data about the machine that the backup
//! passed to it.

mod block;
mod command_line;
mod host;
mod receiving;
mod sending;
mod tpm;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use holdfast_block::Clock;
use serde_json::{Map, Value, json};

use self::block::Blocks;
pub use self::command_line::CommandLine;
pub use self::host::BareHost;
use crate::hypervisor::agent::socket::{AgentError, AgentSocket, ask};
use crate::hypervisor::error::{Error, Result};
use crate::hypervisor::exit_report::MachineEnd;
use crate::hypervisor::machine::{BackupMark, Description, MachineDisk, MachineState, MachineSummary};
use crate::hypervisor::traits::{Hypervisor, Machine};
use crate::qemu::disks;
use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand, QmpSocket, QueuedSocket};
use crate::qemu::qom::{agent_channel, text};
use crate::system::processes::Process;
use crate::system::rights::Rights;

/// The file of a machine's configuration that has the command line of its QEMU, as a list of strings.
const COMMAND_LINE: &str = "qemu-command-line.json";
/// The file of a machine's configuration that has QEMU's description of the machine.
const MACHINE: &str = "machine.json";
/// Prefix of the identifier of a machine without a UUID.
pub const WITHOUT_UUID: &str = "none@";
/// Hex digits of the host's id in that identifier, which distinguish hosts of the same name.
const HOST_DIGITS: usize = 8;

/// One QEMU, and the connection to its monitor. The machine shares the connection, which is closed with its last
/// user.
pub struct BareQemu {
    title: String,
    machine: Arc<BareConnection>,
}

struct BareConnection {
    name: String,
    /// The identifier of the machine if QEMU has no UUID.
    identifier: String,
    monitor: Box<dyn Monitor>,
    process: Option<Process>,
    rights: Rights,
    /// Whether root has started QEMU, which may have given up these rights.
    is_started_by_root: bool,
    agent: Option<PathBuf>,
    clock: Arc<dyn Clock>,
    next_id: AtomicU32,
}

/// The machine of a [`BareQemu`].
struct BareMachine(Arc<BareConnection>);

impl BareQemu {
    /// Connects to the monitor at `path`.
    ///
    /// # Errors
    /// No monitor listens, it does not answer, or another client is connected.
    pub fn connect(path: &Path, clock: Arc<dyn Clock>) -> Result<Self> {
        Self::connect_with_deadline(path, Duration::MAX, clock)
    }

    /// Connects like [`connect`](Self::connect). Afterwards no answer takes longer than `deadline`, whatever a
    /// command allows.
    pub fn connect_with_deadline(path: &Path, deadline: Duration, clock: Arc<dyn Clock>) -> Result<Self> {
        let unreachable = |source: MonitorError| Error::Unreachable {
            address: path.display().to_string(),
            source: Box::new(source),
        };
        let mut socket = QmpSocket::connect(path).map_err(|source| match source {
            MonitorError::TimedOut { .. } => Error::MonitorInUse {
                address: path.display().to_string(),
                source,
            },
            other => unreachable(other),
        })?;
        socket.limit_deadlines(deadline);
        let process = socket.peer().and_then(Process::of_qemu);
        let rights = socket.rights().map_err(|source| Error::Unreachable {
            address: path.display().to_string(),
            source: Box::new(source),
        })?;
        let name = name(&socket, path).map_err(unreachable)?;
        let agent = agent_socket(&socket).map_err(unreachable)?;
        let resolve = |path: PathBuf| process.as_ref().map_or(path.clone(), |process| process.resolve(&path));
        Ok(Self {
            title: format!("QEMU at {}", path.display()),
            machine: Arc::new(BareConnection {
                name,
                identifier: identifier_of(path),
                agent: agent.map(resolve),
                is_started_by_root: socket.is_of_root(),
                monitor: Box::new(socket),
                process,
                rights,
                next_id: first_id(&*clock),
                clock,
            }),
        })
    }

    /// The machine `name` at `path`, for a client that waits until the monitor is free. `agent` is the socket of the
    /// guest agent.
    ///
    /// # Errors
    /// No process listens at `path`.
    pub fn stand_in(path: &Path, name: &str, agent: Option<&Path>, clock: Arc<dyn Clock>) -> Result<Box<dyn Machine>> {
        let queued = QueuedSocket::connect(path).map_err(|source| Error::Unreachable {
            address: path.display().to_string(),
            source: Box::new(source),
        })?;
        let rights = queued.rights().map_err(|source| Error::Unreachable {
            address: path.display().to_string(),
            source: Box::new(source),
        })?;
        Ok(Box::new(BareMachine(Arc::new(BareConnection {
            name: name.to_owned(),
            identifier: identifier_of(path),
            rights,
            is_started_by_root: false,
            monitor: Box::new(queued),
            process: None,
            agent: agent.map(Path::to_owned),
            next_id: first_id(&*clock),
            clock,
        }))))
    }

    /// The socket of the guest agent, if the machine has a channel for it.
    pub fn agent_socket(&self) -> Option<&Path> {
        self.machine.agent.as_deref()
    }

    /// The machine of this QEMU.
    pub fn only_machine(&self) -> Box<dyn Machine> {
        Box::new(BareMachine(Arc::clone(&self.machine)))
    }
}

/// The first request id. It differs between processes, so that an answer to another process is not accepted.
fn first_id(clock: &dyn Clock) -> AtomicU32 {
    AtomicU32::new(std::process::id().rotate_left(12) ^ clock.now().subsec_nanos())
}

impl Hypervisor for BareQemu {
    fn title(&self) -> &str {
        &self.title
    }

    fn rights(&self) -> Rights {
        self.machine.rights.clone()
    }

    fn machines(&self) -> Result<Vec<MachineSummary>> {
        Ok(vec![self.machine.summary()?])
    }

    fn machine(&self, name: &str) -> Result<Box<dyn Machine>> {
        if name == self.machine.name || name == self.machine.summary()?.uuid {
            return Ok(self.only_machine());
        }
        Err(Error::NoSuchMachine {
            hypervisor: self.title.clone(),
            name: name.to_owned(),
        })
    }
}

impl BareConnection {
    fn failed(&self, source: MonitorError) -> Error {
        Error::Monitor {
            machine: self.name.clone(),
            source,
        }
    }

    fn ask(&self, command: &'static str, arguments: Value) -> Result<Value> {
        let answer = self.monitor.execute(&QmpCommand::new(command, arguments));
        answer.map_err(|error| self.failed(error))
    }

    fn query(&self, command: &'static str) -> Result<Value> {
        self.ask(command, Value::Null)
    }

    fn summary(&self) -> Result<MachineSummary> {
        let uuid = text(&self.query("query-uuid")?, "UUID").filter(|uuid| is_set(uuid));
        Ok(MachineSummary {
            name: self.name.clone(),
            uuid: uuid.unwrap_or_else(|| self.identifier.clone()),
            state: state(&text(&self.query("query-status")?, "status").unwrap_or_default()),
        })
    }

    fn blocks(&self) -> Result<Blocks> {
        let resolve = |path: &Path| match &self.process {
            Some(process) => process.resolve(path),
            None => path.to_owned(),
        };
        Blocks::query(&*self.monitor, &resolve).map_err(|error| self.failed(error))
    }

    /// QEMU's description of its machine, for users and for rebuilding the machine.
    fn query_description(&self) -> Result<Value> {
        let mut description = Map::new();
        description.insert("name".to_owned(), self.name.clone().into());
        let queries = [
            ("uuid", "query-uuid", Value::Null),
            ("qemu", "query-version", Value::Null),
            ("status", "query-status", Value::Null),
            (
                "machine_type",
                "qom-get",
                json!({ "path": "/machine", "property": "type" }),
            ),
            ("memory", "query-memory-size-summary", Value::Null),
            ("cpus", "query-cpus-fast", Value::Null),
            ("block", "query-block", Value::Null),
            ("pci", "query-pci", Value::Null),
            ("tpm", "query-tpm", Value::Null),
            ("chardevs", "query-chardev", Value::Null),
        ];
        for (key, command, arguments) in queries {
            let answer = self.monitor.execute(&QmpCommand::new(command, arguments));
            let answer = match answer {
                // Not every machine has every device, and not every QEMU supports every query.
                Err(error) if error.is_refusal() => Value::Null,
                other => other.map_err(|error| self.failed(error))?,
            };
            description.insert(key.to_owned(), answer);
        }
        Ok(Value::Object(description))
    }
}

impl Machine for BareMachine {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn rights(&self) -> Rights {
        self.0.rights.clone()
    }

    fn describe(&self) -> Result<Description> {
        let blocks = self.0.blocks()?;
        Ok(Description {
            summary: self.0.summary()?,
            disks: blocks.disks,
            nvram: blocks.nvram,
            tpm: tpm::find(&self.0.query("query-tpm")?, self.0.process.as_ref()),
            has_agent_channel: self.0.agent.is_some(),
            mark: BackupMark::default(),
        })
    }

    fn size_of(&self, disk: &MachineDisk) -> Option<u64> {
        let alias = disk.alias.as_deref()?;
        let present = disks(self.monitor()).ok()?;
        present
            .iter()
            .find(|device| device.is_called(alias))
            .map(|device| device.size_bytes)
    }

    fn ended(&self) -> Option<MachineEnd> {
        let is_gone = matches!(
            self.0.monitor.execute(&QmpCommand::new("query-status", Value::Null)),
            Err(MonitorError::Gone { .. })
        );
        // A connection may be lost while QEMU is still running.
        let is_dead = self.0.process.as_ref().is_some_and(Process::has_ended);
        (is_gone && is_dead).then_some(MachineEnd::Gone)
    }

    fn configuration(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let pretty = |value: &Value| format!("{value:#}\n").into_bytes();
        let mut files = vec![(MACHINE.to_owned(), pretty(&self.0.query_description()?))];
        let words = self.0.process.as_ref().and_then(Process::command_line);
        files.extend(words.map(|words| (COMMAND_LINE.to_owned(), pretty(&Value::from(words)))));
        Ok(files)
    }

    fn monitor(&self) -> &dyn Monitor {
        &*self.0.monitor
    }

    fn ask_agent(&self, command: &str, deadline: Duration) -> Result<String> {
        let refused = |reason: String| Error::Refused {
            action: "ask the guest agent of",
            machine: self.0.name.clone(),
            reason,
        };
        let Some(path) = &self.0.agent else {
            return Err(refused("it has no channel for the agent".to_owned()));
        };
        let number = self.0.next_id.fetch_add(1, Ordering::Relaxed);
        let agent = AgentSocket {
            path,
            rights: &self.0.rights,
        };
        let answer = ask(&agent, command, number, deadline, &*self.0.clock);
        answer.map_err(|error: AgentError| refused(error.to_string()))
    }
}

/// Whether QEMU has a UUID. It returns only zeroes if none is configured.
fn is_set(uuid: &str) -> bool {
    uuid.chars().any(|character| !matches!(character, '0' | '-'))
}

/// The identifier of a machine without a UUID: its host, and the socket of its monitor, as one word in lower case.
fn identifier_of(socket: &Path) -> String {
    let content = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let (host, machine_id) = (content("/proc/sys/kernel/hostname"), content("/etc/machine-id"));
    let digits: String = machine_id.trim().chars().take(HOST_DIGITS).collect();
    let socket = socket.canonicalize().or_else(|_| std::path::absolute(socket));
    let socket = socket.unwrap_or_default();
    let socket = word(socket.as_os_str().as_encoded_bytes());
    let (host, digits) = (word(host.trim().as_bytes()), word(digits.as_bytes()));
    format!("{WITHOUT_UUID}{host}.{digits}:{socket}")
}

/// Encodes bytes as a part of a word: unusual ones as `%` and two hex digits.
fn word(bytes: &[u8]) -> String {
    let mut word = String::new();
    for byte in bytes {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' => word.push(char::from(*byte)),
            other => {
                // Writing to a string does not fail.
                write!(word, "%{other:02x}").ok();
            }
        }
    }
    word
}

fn name(monitor: &dyn Monitor, path: &Path) -> std::result::Result<String, MonitorError> {
    let answer = monitor.execute(&QmpCommand::new("query-name", Value::Null))?;
    let stem = || path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    Ok(text(&answer, "name").or_else(stem).unwrap_or_else(|| "qemu".to_owned()))
}

/// The state of a machine, from QEMU's status.
///
/// During a migration, its disks may belong to another host. In every other state but `running`, they do not change.
fn state(word: &str) -> MachineState {
    match word {
        "running" => MachineState::Running,
        "inmigrate" | "postmigrate" | "finish-migrate" | "save-vm" | "restore-vm" | "colo" | "" => {
            MachineState::Between
        }
        _ => MachineState::Paused,
    }
}

/// The socket at which QEMU accepts a client of the guest agent.
fn agent_socket(monitor: &dyn Monitor) -> std::result::Result<Option<PathBuf>, MonitorError> {
    let Some(label) = agent_channel(monitor)? else {
        return Ok(None);
    };
    let chardevs = monitor.execute(&QmpCommand::new("query-chardev", Value::Null))?;
    let chardevs = chardevs.as_array().cloned().unwrap_or_default();
    let its = chardevs
        .iter()
        .find(|chardev| text(chardev, "label") == Some(label.clone()));
    Ok(its.and_then(|chardev| listening_path(&text(chardev, "filename")?)))
}

/// The path in QEMU's description of a character device, if it is a UNIX socket at which QEMU listens:
/// "disconnected:unix:/run/web1.qga,server=on", and "unix:/run/web1.qga,server=on" while a client is connected.
fn listening_path(description: &str) -> Option<PathBuf> {
    let address = description.strip_prefix("disconnected:").unwrap_or(description);
    let (path, options) = address.strip_prefix("unix:")?.rsplit_once(",server")?;
    let listens = options.is_empty() || options.starts_with("=on") || options.starts_with(" <->");
    listens.then(|| path.into())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{WITHOUT_UUID, identifier_of, is_set, listening_path, state};
    use crate::hypervisor::machine::MachineState;

    #[test]
    fn a_machine_without_a_uuid_is_known_by_its_host_and_its_socket() {
        assert!(is_set("11111111-1111-4111-8111-111111111111"));
        assert!(!is_set("00000000-0000-0000-0000-000000000000") && !is_set(""));
        let one = identifier_of(Path::new("/nonexistent/A b%.qmp"));
        assert!(
            one.starts_with(WITHOUT_UUID) && one.ends_with(":/nonexistent/%41%20b%25.qmp"),
            "{one}"
        );
        assert_ne!(one, identifier_of(Path::new("/nonexistent/a b%.qmp")));
        assert_eq!(
            identifier_of(Path::new("/tmp/../tmp")),
            identifier_of(Path::new("/tmp"))
        );
    }

    #[test]
    fn the_agents_socket_is_read_from_the_description_of_its_channel() {
        let path = |text| listening_path(text);
        let found = Some(Path::new("/run/a,b").to_owned());
        assert_eq!(path("disconnected:unix:/run/a,b,server=on"), found);
        assert_eq!(path("unix:/run/a,b,server=on"), found);
        assert_eq!(path("unix:/run/a,b,server"), found);
        assert_eq!(path("unix:/run/a,b"), None);
        assert_eq!(path("disconnected:tcp:127.0.0.1:4,server=on"), None);
        assert_eq!(path("pty:/dev/pts/1"), None);
    }

    #[test]
    fn a_machine_whose_disks_another_host_may_have_is_in_between() {
        assert_eq!(state("running"), MachineState::Running);
        for word in [
            "paused",
            "prelaunch",
            "io-error",
            "guest-panicked",
            "suspended",
            "shutdown",
        ] {
            assert_eq!(state(word), MachineState::Paused, "{word}");
        }
        for word in ["inmigrate", "postmigrate", "finish-migrate", ""] {
            assert_eq!(state(word), MachineState::Between, "{word}");
        }
    }
}
