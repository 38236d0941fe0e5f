//! The only module that starts subprocesses.

mod at_terminal;
mod confined;
mod detached;
pub(crate) mod local_tools;
mod piped;
mod reader;
mod secrets;
mod tool;
mod worker;

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use holdfast_block::Clock;
use rustix::process::{Pid, Signal, kill_process_group};

pub(crate) use at_terminal::ask_at_terminal;
pub(crate) use detached::DetachedProcess;
pub use local_tools::LocalTools;
pub use piped::{Piped, PipedEnd, StreamTools};
pub use reader::ConfinedReader;
pub use secrets::command;
pub use tool::PATH as PROGRAM_PATH;
pub use tool::{Answer, ToolError, Tools};
pub use worker::{Worker, WorkerOutput, WorkerRequest};

/// A child process that exchanges lines of text with this one.
///
/// When this process ends for any reason, the standard input of the child is closed.
pub struct LineProcess {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl LineProcess {
    /// Starts a program, which inherits standard error.
    pub fn start(program: &OsString, arguments: &[OsString]) -> std::io::Result<Self> {
        let mut child = command(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take();
        let output = child.stdout.take();
        let (send, lines) = channel();
        std::thread::Builder::new().name("lines".to_owned()).spawn(move || {
            let Some(output) = output else { return };
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { child, input, lines })
    }

    /// Writes a line to the standard input of the child.
    pub fn send_line(&mut self, line: &str) -> std::io::Result<()> {
        let gone = || std::io::Error::new(std::io::ErrorKind::BrokenPipe, "its standard input is closed");
        let input = self.input.as_mut().ok_or_else(gone)?;
        input.write_all(format!("{line}\n").as_bytes())?;
        input.flush()
    }

    /// The next line of the child's standard output; none after the deadline, or when the output is closed.
    pub fn receive_line(&self, deadline: Duration) -> Option<String> {
        self.lines.recv_timeout(deadline).ok()
    }

    /// How the child ended; none if it still runs. A child that has closed its output gets a moment to end.
    pub fn status(&mut self, clock: &dyn Clock) -> std::io::Result<Option<ExitStatus>> {
        let mut waited = Duration::ZERO;
        loop {
            match self.child.try_wait()? {
                None if waited < STOP_GRACE => {
                    clock.sleep(POLL_INTERVAL);
                    waited += POLL_INTERVAL;
                }
                status => return Ok(status),
            }
        }
    }

    /// Closes the standard input of the child, and waits for it to exit.
    pub fn close(mut self) -> std::io::Result<()> {
        drop(self.input.take());
        self.child.wait().map(drop)
    }
}

/// A child process that gets two files of this process as its standard input and output. It continues when this process
/// ends.
pub struct HandedProcess {
    child: Child,
}

impl HandedProcess {
    /// Starts a program, which inherits standard error.
    pub fn start(program: &OsString, arguments: &[OsString], input: OwnedFd, output: OwnedFd) -> std::io::Result<Self> {
        let mut command = command(program);
        let child = command.args(arguments).stdin(input).stdout(output).spawn()?;
        Ok(Self { child })
    }

    /// How it ended; none while it runs.
    pub fn status(&mut self) -> std::io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Kills it, and waits for its end.
    pub fn kill(&mut self) -> std::io::Result<()> {
        self.child.kill()?;
        self.child.wait().map(drop)
    }
}

/// A short call of a program that captures its output.
pub struct Call<'a> {
    /// The program.
    pub program: &'a Path,
    /// The arguments.
    pub arguments: &'a [&'a str],
    /// Additional environment variables.
    pub variables: &'a [(&'static str, String)],
    /// Environment variables to remove, in addition to those with passwords.
    pub withheld: &'a [String],
    /// The standard input.
    pub input: &'a [u8],
    /// The timeout, after which the program is killed with its child processes.
    pub time_out: Duration,
    /// Whether the job was asked to stop after the call began. If so, the program is killed, too.
    pub is_stopped: &'a dyn Fn() -> bool,
}

/// How a call ended, and its output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallOutput {
    /// How the call ended.
    pub outcome: ProcessOutcome,
    /// The lines that the program wrote on standard output and standard error.
    pub lines: Vec<String>,
}

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessOutcome {
    /// The program exited with code 0.
    Success,
    /// The program exited with this code.
    ExitCode(i32),
    /// The program was killed by this signal.
    Signal(i32),
    /// The program exceeded the timeout, and was killed.
    TimedOut,
    /// The job was asked to stop. The program did not end soon after that, and was killed.
    Stopped,
}

/// Limit on the output that is kept; the rest is dropped.
const OUTPUT_BYTES_MAX: u64 = 64 << 10;
/// How often a call is polled for its exit.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How long to wait for the rest of the output after the exit: a child process that is still running may keep the
/// pipe open.
const OUTPUT_GRACE: Duration = Duration::from_millis(200);
/// How long the program may continue after the job was asked to stop.
const STOP_GRACE: Duration = Duration::from_millis(500);

impl Call<'_> {
    /// Runs the program, and waits until it has ended.
    ///
    /// The program gets a new process group, so it can be killed with its child processes, and Ctrl-C on the terminal
    /// does not reach it.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn run(&self, clock: &dyn Clock) -> std::io::Result<CallOutput> {
        // The arguments are not logged: an administrator may have put a secret there.
        log::debug!("runs {}", self.program.display());
        let (reader, writer) = std::io::pipe()?;
        let mut command = command(self.program);
        for name in self.withheld {
            command.env_remove(name);
        }
        command
            .args(self.arguments)
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stdin(if self.input.is_empty() {
                Stdio::null()
            } else {
                Stdio::piped()
            })
            .stdout(writer.try_clone()?)
            .stderr(writer)
            .process_group(0);
        let mut child = command.spawn()?;
        // The command holds this process's ends of the pipes.
        drop(command);
        if let Some(mut stdin) = child.stdin.take() {
            let input = self.input.to_vec();
            // A program need not read all of its input.
            let write = move || drop(stdin.write_all(&input));
            std::thread::Builder::new().name("input".to_owned()).spawn(write)?;
        }
        let (send, receiver) = channel();
        let listener = std::thread::Builder::new().name("hook".to_owned()).spawn(move || {
            let mut reader = BufReader::new(reader);
            for line in (&mut reader).take(OUTPUT_BYTES_MAX).split(b'\n').map_while(Result::ok) {
                send.send(String::from_utf8_lossy(&line).into_owned()).ok();
            }
            drop(send);
            // Reads the rest: a program that writes to a closed pipe is killed by SIGPIPE.
            std::io::copy(&mut reader, &mut std::io::sink()).ok();
        });
        let outcome = self.wait(&mut child, clock)?;
        listener?;
        let until = clock.now() + OUTPUT_GRACE;
        let mut lines = Vec::new();
        while let Ok(line) = receiver.recv_timeout(until.saturating_sub(clock.now())) {
            lines.push(line);
        }
        Ok(CallOutput { outcome, lines })
    }

    fn wait(&self, child: &mut Child, clock: &dyn Clock) -> std::io::Result<ProcessOutcome> {
        let mut until = clock.now() + self.time_out;
        let mut too_late = ProcessOutcome::TimedOut;
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(outcome_of(status));
            }
            let now = clock.now();
            if now >= until {
                // The process was not waited for yet, so its process id is still valid.
                kill_process_group(Pid::from_child(child), Signal::KILL)?;
                child.wait()?;
                return Ok(too_late);
            }
            if too_late == ProcessOutcome::TimedOut && (self.is_stopped)() {
                (until, too_late) = (until.min(now + STOP_GRACE), ProcessOutcome::Stopped);
            }
            clock.sleep(POLL_INTERVAL);
        }
    }
}

/// Runs a command of the user by a shell, without input.
///
/// # Errors
/// As text: how it ended, and what it printed.
pub fn run_shell_command(command: &str, time_max: Duration, clock: &dyn Clock) -> Result<(), String> {
    let call = Call {
        program: Path::new("/bin/sh"),
        arguments: &["-c", command],
        variables: &[],
        withheld: &[],
        input: &[],
        time_out: time_max,
        is_stopped: &|| false,
    };
    let CallOutput { outcome, lines } = call.run(clock).map_err(|error| error.to_string())?;
    let how = match outcome {
        ProcessOutcome::Success => return Ok(()),
        ProcessOutcome::TimedOut => format!("it did not end within {} s, and was killed", time_max.as_secs()),
        failure => failure.to_string(),
    };
    let lines = lines.iter().map(|line| line.trim().to_owned());
    let message: Vec<String> = std::iter::once(how)
        .chain(lines.filter(|line| !line.is_empty()))
        .collect();
    Err(message.join("; "))
}

fn outcome_of(status: ExitStatus) -> ProcessOutcome {
    match (status.code(), status.signal()) {
        (Some(0), _) => ProcessOutcome::Success,
        (Some(code), _) => ProcessOutcome::ExitCode(code),
        (None, signal) => ProcessOutcome::Signal(signal.unwrap_or_default()),
    }
}

impl std::fmt::Display for ProcessOutcome {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Success => formatter.write_str("it succeeded"),
            Self::ExitCode(code) => write!(formatter, "it ended with code {code}"),
            Self::Signal(signal) => write!(formatter, "it was killed by signal {signal}"),
            Self::TimedOut => formatter.write_str("it exceeded its time limit, and was killed"),
            Self::Stopped => formatter.write_str("it was killed because the job was stopped"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use holdfast_block::{Clock as _, SystemClock};

    use super::{Call, CallOutput, ProcessOutcome, run_shell_command};

    fn call(script: &str, time_out: Duration) -> CallOutput {
        Call {
            program: Path::new("/bin/sh"),
            arguments: &["-c", script, "sh", "word"],
            variables: &[("SAID", "a b".to_owned())],
            withheld: &["PATH".to_owned()],
            input: b"typed",
            time_out,
            is_stopped: &|| false,
        }
        .run(&SystemClock::new())
        .unwrap()
    }

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn a_failed_shell_command_says_how_it_ended_and_what_it_printed() {
        let run = |command| run_shell_command(command, LONG, &SystemClock::new());
        assert_eq!(run("echo ready"), Ok(()));
        let failed = run("echo; echo ' no such disk'; echo code >&2; exit 4");
        assert_eq!(failed, Err("it ended with code 4; no such disk; code".to_owned()));
        let killed = run_shell_command("sleep 60", Duration::from_secs(1), &SystemClock::new());
        assert_eq!(killed, Err("it did not end within 1 s, and was killed".to_owned()));
    }

    /// The program has a short grace period in which it can end by itself.
    #[test]
    fn a_stop_request_kills_a_running_call() {
        let outcome = |script: &str| {
            let call = Call {
                program: Path::new("/bin/sh"),
                arguments: &["-c", script],
                variables: &[],
                withheld: &[],
                input: b"",
                time_out: Duration::from_secs(600),
                is_stopped: &|| true,
            };
            call.run(&SystemClock::new()).unwrap().outcome
        };
        assert_eq!(outcome("sleep 600"), ProcessOutcome::Stopped);
        assert_eq!(outcome("exit 3"), ProcessOutcome::ExitCode(3));
    }

    #[test]
    fn a_call_gets_arguments_and_input_and_returns_output() {
        let called = call(
            "echo \"$1 $SAID $(/bin/cat)\"; echo \"[$(env | grep ^PATH)]\" >&2; exit 3",
            LONG,
        );
        assert_eq!(called.outcome, ProcessOutcome::ExitCode(3));
        assert_eq!(called.lines, ["word a b typed", "[]"]);
        assert_eq!(call("exit 0", LONG).outcome, ProcessOutcome::Success);
        assert_eq!(call("kill -9 $$", LONG).outcome, ProcessOutcome::Signal(9));
    }

    #[test]
    fn a_call_that_hangs_is_killed_with_its_children() {
        let folder = tempfile::tempdir().unwrap();
        let alive = folder.path().join("alive");
        let start = SystemClock::new();
        let script = format!("(/bin/sleep 3; echo > {}) & /bin/sleep 100", alive.display());
        let called = call(&script, Duration::from_millis(200));
        assert_eq!(called.outcome, ProcessOutcome::TimedOut);
        assert!(start.now() < Duration::from_secs(3));
        start.sleep(Duration::from_secs(4));
        assert!(!alive.exists());
    }

    #[test]
    fn leftover_children_are_not_waited_for_and_output_is_bounded() {
        let start = SystemClock::new();
        let called = call("/bin/sleep 20 & echo done", LONG);
        assert_eq!(
            (called.outcome, &called.lines[..]),
            (ProcessOutcome::Success, &["done".to_owned()][..])
        );
        assert!(start.now() < Duration::from_secs(10));
        let called = call("/usr/bin/head -c 10000000 /dev/zero", LONG);
        assert_eq!(called.outcome, ProcessOutcome::Success);
        assert!(called.lines.iter().map(String::len).sum::<usize>() <= 3 * 65_536);
    }
}
