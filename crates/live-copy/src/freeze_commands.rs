//! Commands of the user that freeze and thaw what writes to a source.
//!
//! Another process calls them. It thaws when its input ends, for whatever reason, and when a freeze lasts too long.

use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_host::{Call, LineProcess, ProcessOutcome};

use crate::error::{Error, Result};
use crate::source::Freezer;

const FREEZE: &str = "freeze";
const THAW: &str = "thaw";
const DONE: &str = "done";
/// Limit of the time of a command.
const COMMAND_TIME_MAX: Duration = Duration::from_secs(60);
/// How long the other process may take to answer.
const PATIENCE: Duration = Duration::from_secs(70);
/// Attempts to thaw when nothing else will.
const THAW_COUNT: u32 = 30;
const THAW_INTERVAL: Duration = Duration::from_secs(1);

/// Starts the process that calls the commands.
pub type FreezeLauncher = dyn Fn() -> std::io::Result<LineProcess> + Send + Sync;

/// The commands, in the hands of another process.
pub struct CommandFreezer {
    process: Mutex<LineProcess>,
    launch: Box<FreezeLauncher>,
}

impl CommandFreezer {
    /// Starts the process.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(launch: Box<FreezeLauncher>) -> std::io::Result<Self> {
        Ok(Self {
            process: Mutex::new(launch()?),
            launch,
        })
    }
}

fn ask(process: &mut LineProcess, word: &'static str) -> Result<()> {
    let failed = |reason: String| Error::Command {
        command: format!("the {word} command"),
        reason,
    };
    process.send_line(word).map_err(|error| failed(error.to_string()))?;
    match process.receive_line(PATIENCE) {
        Some(answer) if answer == DONE => Ok(()),
        Some(reason) => Err(failed(reason)),
        None => Err(failed("the process that calls it has ended".to_owned())),
    }
}

impl Freezer for CommandFreezer {
    fn freeze(&self) -> Result<()> {
        ask(&mut self.process.lock().unwrap_or_else(PoisonError::into_inner), FREEZE)
    }

    fn thaw(&self) -> Result<()> {
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        ask(&mut process, THAW).or_else(|error| {
            // It may have been killed. It thaws when it ends otherwise; thawing twice does no harm.
            let Ok(mut other) = (self.launch)() else {
                return Err(error);
            };
            ask(&mut other, THAW)?;
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
                let frozen = call(&commands.freeze, &**clock);
                if frozen.is_err() && call(&commands.thaw, &**clock).is_ok() {
                    state = FreezeState::Thawed;
                }
                frozen
            }
            Ok(THAW) if state == FreezeState::Thawed => Ok(()),
            Ok(THAW) => call(&commands.thaw, &**clock).inspect(|()| state = FreezeState::Thawed),
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
    let mut result = call(&commands.thaw, clock);
    for _ in 1..THAW_COUNT {
        if result.is_ok() {
            break;
        }
        clock.sleep(THAW_INTERVAL);
        result = call(&commands.thaw, clock);
    }
    result
}

/// Calls a command by a shell.
fn call(command: &str, clock: &dyn Clock) -> Result<()> {
    let failed = |reason: String| Error::Command {
        command: command.to_owned(),
        reason,
    };
    let call = Call {
        program: Path::new("/bin/sh"),
        arguments: &["-c", command],
        variables: &[],
        withheld: &[],
        input: &[],
        time_out: COMMAND_TIME_MAX,
        is_stopped: &|| false,
    };
    let output = call.run(clock).map_err(|error| failed(error.to_string()))?;
    let how = match output.outcome {
        ProcessOutcome::Success => return Ok(()),
        ProcessOutcome::ExitCode(code) => format!("it ended with code {code}"),
        ProcessOutcome::Signal(signal) => format!("signal {signal} ended it"),
        ProcessOutcome::TimedOut | ProcessOutcome::Stopped => {
            format!("it did not end within {} s", COMMAND_TIME_MAX.as_secs())
        }
    };
    let lines = output
        .lines
        .iter()
        .map(|line| line.trim())
        .filter(|line| !line.is_empty());
    let message: Vec<&str> = [&how[..]].into_iter().chain(lines).collect();
    Err(failed(message.join("; ")))
}
