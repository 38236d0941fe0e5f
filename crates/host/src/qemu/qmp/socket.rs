//! A connection to QEMU's monitor socket: `-qmp unix:PATH`.

use std::collections::{HashMap, VecDeque};
use std::io::{BufRead as _, BufReader, IoSlice, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::Value;

use super::logged::logged;
use super::message::{Event, MESSAGE_BYTES_MAX, Message, Refusal, answer, decode, encode};
use super::{MONITOR, Monitor, MonitorError, QmpCommand, Result};
use crate::system::waits::Wait;

/// Limit on the queued events; the oldest are dropped first.
const EVENT_COUNT_MAX: usize = 1000;
/// Limit on the files of one command: Holdfast's commands need at most one.
const FILE_COUNT_MAX: usize = 4;
/// Timeout of QEMU's greeting, which is its first message unless another client uses the monitor.
const GREETING_DEADLINE: Duration = Duration::from_secs(5);
const GREETING: &str = "greeting";

/// A connection to the monitor socket of a QEMU. It can be shared between threads.
pub struct QmpSocket {
    writer: Mutex<CommandWriter>,
    shared: Arc<Shared>,
    /// Limit on the timeout of an answer, whatever a command allows.
    answer_deadline_max: Duration,
}

struct CommandWriter {
    stream: UnixStream,
    next_number: u64,
}

#[derive(Default)]
struct Shared {
    state: Mutex<ConnectionState>,
    changed: Condvar,
}

#[derive(Default)]
struct ConnectionState {
    /// Received answers. A command that waits for its answer has an entry from the start.
    answers: HashMap<u64, Option<std::result::Result<Value, Refusal>>>,
    events: VecDeque<Event>,
    is_greeted: bool,
    /// Why the connection is lost.
    end: Option<String>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` returns a value, or the timeout expires.
    fn wait<T>(&self, deadline: Duration, mut ready: impl FnMut(&mut ConnectionState) -> Option<T>) -> Option<T> {
        let mut found = None;
        let guard = self.lock();
        drop(
            self.changed
                .wait_timeout_while(guard, deadline, |state| {
                    found = ready(state);
                    found.is_none()
                })
                .unwrap_or_else(PoisonError::into_inner),
        );
        found
    }
}

impl QmpSocket {
    /// Connects to the monitor at `path`.
    ///
    /// # Errors
    /// There is no socket, no process listens, or QEMU does not greet: it serves one client at a time.
    pub fn connect(path: &Path) -> Result<Self> {
        let gone = |source| MonitorError::Gone {
            during: format!("connecting to {}", path.display()),
            source: Some(source),
        };
        let _wait = Wait::for_answer(MONITOR);
        let stream = UnixStream::connect(path).map_err(gone)?;
        Self::over(stream).map_err(|error| match error {
            MonitorError::TimedOut { after, .. } => MonitorError::TimedOut {
                command: format!("the connection to {} (it serves one client at a time)", path.display()),
                after,
            },
            other => other,
        })
    }

    /// Limits the timeout of every answer to `deadline`, whatever a command allows.
    pub(crate) fn limit_deadlines(&mut self, deadline: Duration) {
        self.answer_deadline_max = deadline;
    }

    /// Uses a connected socket.
    pub fn over(stream: UnixStream) -> Result<Self> {
        let socket = Self::start(stream)?;
        socket.greet(GREETING_DEADLINE)?;
        Ok(socket)
    }

    /// Starts to read from a socket that QEMU may not have accepted yet: [`greet`](Self::greet) must precede the first
    /// command.
    pub(super) fn start(stream: UnixStream) -> Result<Self> {
        let gone = |source| MonitorError::Gone {
            during: GREETING.to_owned(),
            source: Some(source),
        };
        let reader = stream.try_clone().map_err(gone)?;
        let shared = Arc::new(Shared::default());
        let for_reader = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("qmp".to_owned())
            .spawn(move || read_all(reader, &for_reader))
            .map_err(gone)?;
        Ok(Self {
            writer: Mutex::new(CommandWriter { stream, next_number: 1 }),
            shared,
            answer_deadline_max: Duration::MAX,
        })
    }

    /// Waits for QEMU's greeting, and answers it.
    pub(super) fn greet(&self, deadline: Duration) -> Result<()> {
        let greeted = self.shared.wait(deadline, |state| {
            (state.is_greeted || state.end.is_some()).then_some(state.is_greeted)
        });
        match greeted {
            Some(true) => {}
            Some(false) => return Err(self.gone(GREETING)),
            None => {
                return Err(MonitorError::TimedOut {
                    command: GREETING.to_owned(),
                    after: deadline,
                });
            }
        }
        self.execute(&QmpCommand::new("qmp_capabilities", Value::Null))
            .map(drop)
    }

    /// The process at the other end, as the kernel reports it: the process that called listen.
    pub(crate) fn peer(&self) -> Option<rustix::process::Pid> {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let peer = rustix::net::sockopt::socket_peercred(&writer.stream).ok()?;
        Some(peer.pid)
    }

    /// Whether root has called listen at the other end.
    pub(crate) fn is_of_root(&self) -> bool {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let peer = rustix::net::sockopt::socket_peercred(&writer.stream);
        peer.is_ok_and(|peer| peer.uid.is_root())
    }

    /// The rights of the program at the other end.
    pub(crate) fn rights(&self) -> std::io::Result<crate::system::rights::Rights> {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        crate::system::rights::Rights::of_peer(&writer.stream)
    }

    /// The events since the last call, oldest first.
    pub fn take_events(&self) -> Vec<Event> {
        self.shared.lock().events.drain(..).collect()
    }

    /// Waits for an event that `wanted` selects, and drops earlier ones. None if the timeout expires or the
    /// connection is lost.
    pub fn wait_event(&self, deadline: Duration, wanted: impl Fn(&Event) -> bool) -> Option<Event> {
        self.shared
            .wait(deadline, |state| {
                while let Some(event) = state.events.pop_front() {
                    if wanted(&event) {
                        return Some(Some(event));
                    }
                }
                state.end.is_some().then_some(None)
            })
            .flatten()
    }

    fn gone(&self, during: &str) -> MonitorError {
        let end = self.shared.lock().end.clone();
        MonitorError::Gone {
            during: match end {
                Some(end) => format!("{during}: {end}"),
                None => during.to_owned(),
            },
            source: None,
        }
    }

    fn send(&self, command: &QmpCommand) -> Result<u64> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let number = writer.next_number;
        writer.next_number += 1;
        self.shared.lock().answers.insert(number, None);
        let sent = send_with_files(&writer.stream, &encode(command, number), &command.files);
        sent.map(|()| number).map_err(|source| {
            self.shared.lock().answers.remove(&number);
            MonitorError::Gone {
                during: command.name.to_owned(),
                source: Some(source),
            }
        })
    }
}

impl Monitor for QmpSocket {
    fn execute(&self, command: &QmpCommand) -> Result<Value> {
        logged(command, || self.ask(command))
    }
}

impl QmpSocket {
    fn ask(&self, command: &QmpCommand) -> Result<Value> {
        let _wait = Wait::for_answer(MONITOR);
        let number = self.send(command)?;
        let deadline = command.deadline.min(self.answer_deadline_max);
        let answered = self.shared.wait(deadline, |state| {
            match state.answers.get_mut(&number).and_then(Option::take) {
                Some(answer) => Some(Some(answer)),
                None => state.end.is_some().then_some(None),
            }
        });
        self.shared.lock().answers.remove(&number);
        match answered {
            Some(Some(found)) => answer(command.name, found),
            Some(None) => Err(self.gone(command.name)),
            None => Err(MonitorError::TimedOut {
                command: command.name.to_owned(),
                after: deadline,
            }),
        }
    }
}

impl Drop for QmpSocket {
    fn drop(&mut self) {
        let writer = self.writer.get_mut().unwrap_or_else(PoisonError::into_inner);
        // The reader sees the end of the stream and stops. The socket may be closed already.
        writer.stream.shutdown(std::net::Shutdown::Both).ok();
    }
}

/// Sends all of `bytes`, with the files attached to the first part.
fn send_with_files(stream: &UnixStream, bytes: &[u8], files: &[OwnedFd]) -> std::io::Result<()> {
    let mut rest = bytes;
    if !files.is_empty() {
        let files: Vec<BorrowedFd<'_>> = files.iter().map(OwnedFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILE_COUNT_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err(std::io::Error::other("more files than a command may carry"));
        }
        let count = sendmsg(stream, &[IoSlice::new(rest)], &mut control, SendFlags::NOSIGNAL)?;
        rest = &rest[count..];
    }
    std::io::Write::write_all(&mut &*stream, rest)
}

/// Reads until the connection ends, and distributes the messages.
fn read_all(stream: UnixStream, shared: &Shared) {
    let mut reader = BufReader::new(stream);
    let end = loop {
        let mut line = Vec::new();
        let limit = MESSAGE_BYTES_MAX as u64;
        match (&mut reader).take(limit).read_until(b'\n', &mut line) {
            Ok(0) => break "QEMU closed the connection".to_owned(),
            Ok(_) if line.last() != Some(&b'\n') => break "a message is incomplete".to_owned(),
            Ok(_) => {}
            Err(error) => break error.to_string(),
        }
        let message = match decode(&line) {
            Ok(message) => message,
            Err(detail) => break format!("a message is invalid: {detail}"),
        };
        let mut state = shared.lock();
        match message {
            Message::Greeting => state.is_greeted = true,
            Message::Event(event) => {
                if state.events.len() == EVENT_COUNT_MAX {
                    state.events.pop_front();
                }
                state.events.push_back(event);
            }
            Message::Answer(number, answer) => {
                // An answer without an entry arrived after its timeout.
                if let Some(waiting) = number.and_then(|number| state.answers.get_mut(&number)) {
                    *waiting = Some(answer);
                }
            }
        }
        drop(state);
        shared.changed.notify_all();
    };
    shared.lock().end = Some(end);
    shared.changed.notify_all();
}
