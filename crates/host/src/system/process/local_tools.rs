//! Programs of this host.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use holdfast_block::{Clock, to_usize};
use rustix::process::{Pid, Signal, kill_process_group};

use super::confined::{FOR_RECEIVING, start_with};
use super::tool::{
    ANSWER_BYTES_MAX, OUTPUT_GRACE, PATH, STDERR_BYTES_MAX, SYSTEM_PROGRAM, command, read_in_background,
};
use super::{Answer, POLL_INTERVAL, Piped, StreamTools, ToolError, Tools};
use crate::system::waits::Wait;

/// Poll interval for the end of a program that has closed its output.
const END_INTERVAL: Duration = Duration::from_micros(200);

/// Programs of this host.
pub struct LocalTools {
    clock: Arc<dyn Clock>,
    time_out: Duration,
    variables: Vec<(&'static str, OsString)>,
}

impl LocalTools {
    /// `time_out` limits each program: with a suspended pool, programs hang and cannot even be killed.
    pub fn new(clock: Arc<dyn Clock>, time_out: Duration) -> Self {
        Self {
            clock,
            time_out,
            variables: Vec::new(),
        }
    }

    /// Lets programs be found in `folder` before those of the system.
    #[must_use]
    pub fn with_program_folder(self, folder: &Path) -> Self {
        let mut path = folder.as_os_str().to_owned();
        path.push(":");
        path.push(PATH);
        self.with_variable("PATH", path)
    }

    /// Adds an environment variable.
    #[must_use]
    pub fn with_variable(mut self, name: &'static str, value: OsString) -> Self {
        self.variables.push((name, value));
        self
    }
}

impl Tools for LocalTools {
    fn ask(&self, program: &str, arguments: &[&str]) -> Result<Answer, ToolError> {
        let _wait = Wait::for_work(SYSTEM_PROGRAM);
        let io = |source| ToolError::starting(program, source);
        let command_line = || format!("{program} {}", arguments.join(" "));
        let mut command = command(program, arguments);
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        let mut child = command.stdin(Stdio::null()).spawn().map_err(io)?;
        let output = read_in_background(child.stdout.take(), ANSWER_BYTES_MAX).map_err(io)?;
        let stderr = read_in_background(child.stderr.take(), STDERR_BYTES_MAX).map_err(io)?;
        let Some((status, output)) = self.wait(&mut child, &output).map_err(io)? else {
            return Err(ToolError::TimedOut {
                command_line: command_line(),
                waited: self.time_out,
            });
        };
        if output.len() >= to_usize(ANSWER_BYTES_MAX) {
            return Err(ToolError::Flood {
                command_line: command_line(),
            });
        }
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let mut stderr = text(stderr.recv_timeout(OUTPUT_GRACE).unwrap_or_default());
        if let Some(signal) = status.signal() {
            // A killed program cannot report this itself.
            stderr = format!("{stderr}\n{program} was killed by signal {signal}\n");
        }
        Ok(Answer {
            is_success: status.success(),
            output: text(output),
            stderr,
        })
    }
}

impl StreamTools for LocalTools {
    fn start(&self, program: &str, arguments: &[&str]) -> Result<Piped, ToolError> {
        Piped::start(program, arguments)
    }

    fn start_receiver(&self, program: &str, arguments: &[&str], folder: &Path) -> Result<Piped, ToolError> {
        let start = || Piped::start_in(folder, program, arguments);
        start_with(FOR_RECEIVING, start).map_err(|source| ToolError::starting(program, source))
    }

    fn host(&self) -> Option<&str> {
        None
    }
}

impl LocalTools {
    /// Waits for a program, and returns its exit status and output; none if it exceeded the timeout and was killed.
    ///
    /// Waits for the end of the output instead of polling the process, since file systems may be frozen in the
    /// meantime.
    fn wait(&self, child: &mut Child, output: &Receiver<Vec<u8>>) -> std::io::Result<Option<(ExitStatus, Vec<u8>)>> {
        let until = self.clock.now() + self.time_out;
        let (mut received, mut is_killed) = (None, false);
        loop {
            if let Some(status) = child.try_wait()? {
                // Output that was not read to its end is not an answer.
                let received = received.or_else(|| output.recv_timeout(OUTPUT_GRACE).ok());
                return Ok(received.filter(|_| !is_killed).map(|received| (status, received)));
            }
            let now = self.clock.now();
            if is_killed && now >= until + OUTPUT_GRACE {
                // The program is blocked in the kernel and cannot be killed, so it is not waited for.
                return Ok(None);
            }
            if !is_killed && now >= until {
                // The process was not waited for yet, so its process id is still valid.
                kill_process_group(Pid::from_child(child), Signal::KILL)?;
                is_killed = true;
            }
            if received.is_some() {
                self.clock.sleep(END_INTERVAL);
            } else {
                received = output.recv_timeout(POLL_INTERVAL).ok();
            }
        }
    }
}
