//! The monitor's socket: one client at a time, one object per line, and passed files.

use std::collections::VecDeque;
use std::io::{IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};

use crate::commands::CommandContext;
use crate::fault::{FaultKind, FaultPlan};
use crate::refusal::{Answer, Refusal};
use crate::state::State;

const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}}, "capabilities": []}}"#;
const BUFFER_BYTES: usize = 64 << 10;
/// Maximum number of files in one read.
const FILE_COUNT_MAX: usize = 16;

/// State that the threads of a model share.
pub(crate) struct Shared {
    pub(crate) state: Arc<Mutex<State>>,
    pub(crate) faults: Mutex<FaultPlan>,
    pub(crate) connections: Mutex<Connections>,
}

#[derive(Default)]
pub(crate) struct Connections {
    /// The current client.
    pub(crate) current: Option<UnixStream>,
    /// Connections of killed clients. They stay open, so that the threads of these clients keep waiting.
    pub(crate) killed: Vec<UnixStream>,
}

/// Whether a connection continues after a command.
enum Next {
    Command,
    End,
    Killed,
}

impl Shared {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn faults(&self) -> MutexGuard<'_, FaultPlan> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves one client after the other, until the model is dropped.
    pub(crate) fn accept(&self, listener: &UnixListener) {
        while let Ok((stream, _)) = listener.accept() {
            let mut connections = self.connections();
            connections.current = stream.try_clone().ok();
            drop(connections);
            self.state().client_count += 1;
            let is_killed = self.serve(&stream).unwrap_or(false);
            let mut state = self.state();
            state.client_count -= 1;
            state.close_unused_files();
            state.generation += u64::from(is_killed);
            drop(state);
            let mut connections = self.connections();
            connections.current = None;
            if is_killed {
                connections.killed.push(stream);
            }
        }
    }

    /// Serves one client until it disconnects; returns whether it counts as killed.
    fn serve(&self, stream: &UnixStream) -> std::io::Result<bool> {
        send(stream, GREETING)?;
        let mut client = Client {
            shared: self,
            stream,
            files: VecDeque::new(),
            late: None,
            is_hung: false,
        };
        let mut pending = Vec::new();
        loop {
            let count = receive(stream, &mut pending, &mut client.files)?;
            if count == 0 {
                client.do_late();
                return Ok(false);
            }
            while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = pending.drain(..=end).collect();
                match client.command(&serde_json::from_slice(&line)?)? {
                    Next::Command => {}
                    Next::End => return Ok(false),
                    Next::Killed => return Ok(true),
                }
            }
        }
    }
}

struct Client<'a> {
    shared: &'a Shared,
    stream: &'a UnixStream,
    files: VecDeque<OwnedFd>,
    /// A command that is executed when the next one arrives.
    late: Option<Value>,
    is_hung: bool,
}

impl Client<'_> {
    fn command(&mut self, command: &Value) -> std::io::Result<Next> {
        if self.is_hung {
            return Ok(Next::Command);
        }
        if let Some(answer) = self.do_late() {
            send(self.stream, &answer)?;
        }
        let name = command["execute"].as_str().unwrap_or_default();
        // This command is part of the greeting, and not counted: a client may have to wait for it until another client
        // has disconnected.
        let fault = (name != "qmp_capabilities")
            .then(|| self.shared.faults().next(name))
            .flatten();
        match fault {
            None => send(self.stream, &self.answer(command))?,
            Some(FaultKind::Refused) => {
                self.files.clear();
                send(self.stream, &answer_of(command, Err(Refusal::generic("not today"))))?;
            }
            Some(FaultKind::Late) => self.late = Some(command.clone()),
            Some(FaultKind::Hung) => self.is_hung = true,
            Some(FaultKind::LostBefore) => return self.end(),
            Some(FaultKind::LostAfter) => {
                self.answer(command);
                return self.end();
            }
            Some(FaultKind::Killed) => {
                self.answer(command);
                return Ok(Next::Killed);
            }
        }
        if self.shared.state().aborted.is_some() {
            return self.end();
        }
        Ok(Next::Command)
    }

    fn end(&self) -> std::io::Result<Next> {
        self.stream.shutdown(std::net::Shutdown::Both)?;
        Ok(Next::End)
    }

    fn do_late(&mut self) -> Option<String> {
        let command = self.late.take()?;
        Some(self.answer(&command))
    }

    /// Executes a command; returns the answer as a line.
    fn answer(&mut self, command: &Value) -> String {
        let name = command["execute"].as_str().unwrap_or_default();
        let weak = Arc::downgrade(&self.shared.state);
        let mut context = CommandContext {
            files: &mut self.files,
            shared: &weak,
            stopped: None,
        };
        let done = self.shared.state().execute(name, &command["arguments"], &mut context);
        // Dropped without the lock: the server's clients may wait for the state.
        drop(context.stopped);
        answer_of(command, done)
    }
}

fn answer_of(command: &Value, done: Answer<Value>) -> String {
    let mut answer = match done {
        Ok(value) => json!({ "return": value }),
        Err(refusal) => json!({ "error": refusal.to_value() }),
    };
    answer["id"] = command["id"].clone();
    answer.to_string()
}

fn send(mut stream: &UnixStream, line: &str) -> std::io::Result<()> {
    stream.write_all(format!("{line}\r\n").as_bytes())
}

fn receive(stream: &UnixStream, bytes: &mut Vec<u8>, files: &mut VecDeque<OwnedFd>) -> std::io::Result<usize> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILE_COUNT_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut buffer)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    for received in control.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = received {
            files.extend(sent);
        }
    }
    bytes.extend_from_slice(&buffer[..message.bytes]);
    Ok(message.bytes)
}
