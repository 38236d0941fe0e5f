//! Commands of the user that freeze and thaw what writes to a source.
//!
//! Another process calls them. It thaws when its input ends, for whatever reason, and when a freeze lasts too long.

use std::io::{BufRead, Write};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_host::{LineProcess, run_shell_command};

use crate::error::{Error, Result};
use crate::source::Freezer;

const FREEZE: &str = "freeze";
const THAW: &str = "thaw";
/// The source stays frozen, and is not thawed when the process ends.
const LEAVE: &str = "leave";
const DONE: &str = "done";
/// How much longer than its command the other process may take to answer.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// Attempts to thaw when nothing else will.
const THAW_COUNT: u32 = 30;
const THAW_INTERVAL: Duration = Duration::from_secs(1);

/// Starts the process that calls the commands.
pub type FreezeLauncher = dyn Fn() -> std::io::Result<LineProcess> + Send + Sync;

/// The commands, in the hands of another process.
pub struct CommandFreezer {
    process: Mutex<LineProcess>,
    launch: Box<FreezeLauncher>,
    command_time_max: Duration,
}

impl CommandFreezer {
    /// Starts the process, whose commands may take `command_time_max`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(launch: Box<FreezeLauncher>, command_time_max: Duration) -> std::io::Result<Self> {
        Ok(Self {
            process: Mutex::new(launch()?),
            launch,
            command_time_max,
        })
    }

    /// Ends the process, and leaves the source frozen.
    ///
    /// # Errors
    /// The process has ended before: it has thawed the source, or tried to.
    pub fn leave_frozen(&self) -> Result<()> {
        self.ask(&mut self.process.lock().unwrap_or_else(PoisonError::into_inner), LEAVE)
    }

    fn ask(&self, process: &mut LineProcess, word: &'static str) -> Result<()> {
        ask(process, word, self.command_time_max + ANSWER_TIME)
    }
}

fn ask(process: &mut LineProcess, word: &'static str, patience: Duration) -> Result<()> {
    let failed = |reason: String| Error::Command {
        command: format!("the {word} command"),
        reason,
    };
    process.send_line(word).map_err(|error| failed(error.to_string()))?;
    match process.receive_line(patience) {
        Some(answer) if answer == DONE => Ok(()),
        Some(reason) => Err(failed(reason)),
        None => Err(failed("the process that calls it has ended".to_owned())),
    }
}

impl Freezer for CommandFreezer {
    fn freeze(&self) -> Result<()> {
        self.ask(&mut self.process.lock().unwrap_or_else(PoisonError::into_inner), FREEZE)
    }

    fn thaw(&self) -> Result<()> {
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        self.ask(&mut process, THAW).or_else(|error| {
            // It may have been killed. It thaws when it ends otherwise; thawing twice does no harm.
            let Ok(mut other) = (self.launch)() else {
                return Err(error);
            };
            self.ask(&mut other, THAW)?;
            *process = other;
            Ok(())
        })
    }
}

/// The commands of a user, and how long a freeze may last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FreezeCommands {
    /// Freezes, for `sh -c`.
    pub freeze: String,
    /// Thaws. It is also called after a freeze that failed.
    pub thaw: String,
    /// After this time, the source is thawed in any case.
    pub frozen_max: Duration,
    /// How long a command may take.
    pub command_time_max: Duration,
}

/// Calls the commands as the lines of `input` request it: the work of the other process.
///
/// # Errors
/// The source cannot be thawed at the end.
pub fn serve_freeze_commands(
    commands: &FreezeCommands,
    mut input: impl BufRead + Send + 'static,
    output: &mut dyn Write,
    clock: &Arc<dyn Clock>,
) -> Result<()> {
    let (lines, inbox) = channel();
    let reading = std::thread::Builder::new().name("requests".to_owned()).spawn(move || {
        let mut line = String::new();
        while input.read_line(&mut line).is_ok_and(|count| count > 0) {
            if lines.send(line.trim_end().to_owned()).is_err() {
                return;
            }
            line.clear();
        }
    });
    reading.map_err(|error| Error::Command {
        command: "a thread".to_owned(),
        reason: error.to_string(),
    })?;
    let mut state = FreezeState::Unknown;
    loop {
        let next = match state {
            FreezeState::Frozen => inbox.recv_timeout(commands.frozen_max),
            FreezeState::Unknown | FreezeState::Thawed => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        let done = match next.as_deref() {
            Ok(FREEZE) => {
                state = FreezeState::Frozen;
                let frozen = commands.call(&commands.freeze, &**clock);
                if frozen.is_err() && commands.call(&commands.thaw, &**clock).is_ok() {
                    state = FreezeState::Thawed;
                }
                frozen
            }
            Ok(THAW) if state == FreezeState::Thawed => Ok(()),
            Ok(THAW) => commands
                .call(&commands.thaw, &**clock)
                .inspect(|()| state = FreezeState::Thawed),
            Ok(LEAVE) => {
                state = FreezeState::Thawed;
                Ok(())
            }
            Ok(other) => Err(Error::Request {
                reason: format!("{other:?} is not a request"),
            }),
            Err(RecvTimeoutError::Timeout) => {
                thaw_patiently(commands, &**clock)?;
                state = FreezeState::Thawed;
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        };
        let answer = done.map_or_else(|error| error.to_string().replace('\n', "; "), |()| DONE.to_owned());
        if writeln!(output, "{answer}").and_then(|()| output.flush()).is_err() {
            break;
        }
    }
    match state {
        FreezeState::Frozen => thaw_patiently(commands, &**clock),
        FreezeState::Unknown | FreezeState::Thawed => Ok(()),
    }
}

/// What the process knows about the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FreezeState {
    /// A predecessor may have frozen it.
    Unknown,
    Frozen,
    Thawed,
}

fn thaw_patiently(commands: &FreezeCommands, clock: &dyn Clock) -> Result<()> {
    let mut result = commands.call(&commands.thaw, clock);
    for _ in 1..THAW_COUNT {
        if result.is_ok() {
            break;
        }
        clock.sleep(THAW_INTERVAL);
        result = commands.call(&commands.thaw, clock);
    }
    result
}

impl FreezeCommands {
    /// Calls one of the commands by a shell.
    fn call(&self, command: &str, clock: &dyn Clock) -> Result<()> {
        run_shell_command(command, self.command_time_max, clock).map_err(|reason| Error::Command {
            command: command.to_owned(),
            reason,
        })
    }
}
