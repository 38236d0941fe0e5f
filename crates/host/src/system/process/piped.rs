//! Programs that send or receive a stream: `zfs send`, `btrfs receive`, `ssh`.

use std::any::Any;
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use holdfast_block::Clock;
use rustix::process::{Pid, Signal, kill_process_group};

use super::tool::{OUTPUT_GRACE, STDERR_BYTES_MAX, SYSTEM_PROGRAM, ToolError, Tools, command, read_in_background};
use crate::system::waits::Wait;

/// Limit on the bytes of a short answer next to a stream.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
/// Poll interval for the end of a program.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Runs programs of a host, including those that send or receive a stream.
pub trait StreamTools: Tools {
    /// Starts `program` with pipes as standard input and output.
    fn start(&self, program: &str, arguments: &[&str]) -> Result<Piped, ToolError>;

    /// Starts a program of this host that receives a btrfs stream in `folder`. The program gets only the capabilities
    /// that it needs for this.
    fn start_receiver(&self, program: &str, arguments: &[&str], folder: &Path) -> Result<Piped, ToolError>;

    /// The host; none for this host.
    fn host(&self) -> Option<&str>;
}

/// A running program. Dropping this kills it, with its process group.
pub struct Piped {
    command_line: String,
    child: Option<Child>,
    stderr: Receiver<Vec<u8>>,
    ended: Option<PipedEnd>,
    /// A value that must live as long as the program.
    kept: Option<Box<dyn Any + Send>>,
}

/// How such a program ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipedEnd {
    /// The exit code; none if the program was killed.
    pub code: Option<i32>,
    /// The text that the program wrote on standard error.
    pub stderr: String,
}

impl PipedEnd {
    /// Whether the program exited with code 0.
    pub fn is_success(&self) -> bool {
        self.code == Some(0)
    }

    /// The message of the program; if there is none, how it ended.
    pub fn reason(&self) -> String {
        let lines = self.stderr.lines().map(str::trim).filter(|line| !line.is_empty());
        let message = lines.collect::<Vec<_>>().join("; ");
        match self.code {
            _ if !message.is_empty() => message,
            Some(code) => format!("it ended with code {code}"),
            None => "it was killed".to_owned(),
        }
    }
}

impl Piped {
    /// Starts a program of this host.
    pub(super) fn start(program: &str, arguments: &[&str]) -> Result<Self, ToolError> {
        let command_line = format!("{program} {}", arguments.join(" "));
        Self::of(command_line, command(program, arguments)).map_err(|source| ToolError::starting(program, source))
    }

    /// Starts a program of this host that writes its output and its messages to those of this process.
    pub(crate) fn start_shown(program: &str, arguments: &[&str]) -> Result<Self, ToolError> {
        let command_line = format!("{program} {}", arguments.join(" "));
        let mut command = command(program, arguments);
        command.stdout(Stdio::inherit()).stderr(Stdio::inherit());
        Self::of(command_line, command).map_err(|source| ToolError::starting(program, source))
    }

    /// Starts a program of this host in a folder.
    pub(super) fn start_in(folder: &Path, program: &str, arguments: &[&str]) -> std::io::Result<Self> {
        let command_line = format!("{program} {}", arguments.join(" "));
        let mut command = command(program, arguments);
        command.current_dir(folder);
        Self::of(command_line, command)
    }

    fn of(command_line: String, mut command: Command) -> std::io::Result<Self> {
        let mut child = command.stdin(Stdio::piped()).spawn()?;
        let stderr = read_in_background(child.stderr.take(), STDERR_BYTES_MAX)?;
        Ok(Self {
            command_line,
            child: Some(child),
            stderr,
            ended: None,
            kept: None,
        })
    }

    /// Adds a value that must live as long as the program.
    pub(crate) fn with(mut self, kept: impl Any + Send) -> Self {
        self.kept = Some(Box::new(kept));
        self
    }

    /// The command line.
    pub fn command_line(&self) -> &str {
        &self.command_line
    }

    /// Writes to the program's standard input before the stream.
    pub fn write_input(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        let input = self.child.as_mut().and_then(|child| child.stdin.as_mut());
        input.map_or(Ok(()), |input| input.write_all(bytes))
    }

    /// The standard input of the program. Available once. Dropping it ends the input.
    pub fn take_input(&mut self) -> Option<ChildStdin> {
        self.child.as_mut()?.stdin.take()
    }

    /// The standard output of the program. Available once.
    pub fn take_output(&mut self) -> Option<ChildStdout> {
        self.child.as_mut()?.stdout.take()
    }

    /// How the program ended; none while it is running.
    pub fn try_end(&mut self) -> std::io::Result<Option<PipedEnd>> {
        if let Some(ended) = &self.ended {
            return Ok(Some(ended.clone()));
        }
        let Some(child) = &mut self.child else { return Ok(None) };
        let Some(status) = child.try_wait()? else {
            return Ok(None);
        };
        let stderr = self.stderr.recv_timeout(OUTPUT_GRACE).unwrap_or_default();
        let ended = PipedEnd {
            code: status.code(),
            stderr: String::from_utf8_lossy(&stderr).into_owned(),
        };
        self.ended = Some(ended.clone());
        Ok(Some(ended))
    }

    /// Closes the input, and waits for the output and the end of the program.
    ///
    /// # Errors
    /// The program exceeds the timeout, or the limit on the output.
    pub fn answer(mut self, clock: &dyn Clock, time_out: Duration) -> Result<(PipedEnd, Vec<u8>), ToolError> {
        let io = |source| ToolError::starting("", source);
        drop(self.take_input());
        let output = read_in_background(self.take_output(), ANSWER_BYTES_MAX).map_err(io)?;
        let until = clock.now() + time_out;
        let _wait = Wait::for_work(SYSTEM_PROGRAM);
        loop {
            if let Some(ended) = self.try_end().map_err(io)? {
                return Ok((ended, output.recv_timeout(OUTPUT_GRACE).unwrap_or_default()));
            }
            if clock.now() >= until {
                return Err(ToolError::TimedOut {
                    command_line: self.command_line.clone(),
                    waited: time_out,
                });
            }
            clock.sleep(POLL_INTERVAL);
        }
    }

    /// Kills the program with its child processes.
    pub fn kill(&mut self) {
        if let Some(child) = self.child.as_ref().filter(|_| self.ended.is_none()) {
            // The process was not waited for yet, so its process id is still valid.
            kill_process_group(Pid::from_child(child), Signal::KILL).ok();
        }
    }
}

impl Drop for Piped {
    fn drop(&mut self) {
        self.kill();
        let Some(mut child) = self.child.take().filter(|_| self.ended.is_none()) else {
            return;
        };
        // The process may be blocked in the kernel. A thread waits for it, so that it does not remain a zombie.
        let waiting = std::thread::Builder::new().name("reaper".to_owned());
        let kept = self.kept.take();
        drop(waiting.spawn(move || {
            drop((child.stdin.take(), child.stdout.take()));
            child.wait().ok();
            drop(kept);
        }));
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::sync::Arc;
    use std::time::Duration;

    use holdfast_block::{Clock as _, SystemClock};

    use super::super::LocalTools;
    use super::{Piped, StreamTools as _};

    const LONG: Duration = Duration::from_secs(30);

    fn start(script: &str) -> Piped {
        let tools = LocalTools::new(Arc::new(SystemClock::new()), LONG);
        tools.start("sh", &["-c", script]).unwrap()
    }

    #[test]
    fn a_stream_is_piped_through_and_errors_are_kept() {
        let mut piped = start("tr a-z A-Z; echo late >&2; exit 3");
        let mut input = piped.take_input().unwrap();
        input.write_all(b"some text").unwrap();
        drop(input);
        let mut message = String::new();
        piped.take_output().unwrap().read_to_string(&mut message).unwrap();
        let (ended, rest) = piped.answer(&SystemClock::new(), LONG).unwrap();
        assert_eq!(
            (message.as_str(), ended.code, &ended.reason()[..]),
            ("SOME TEXT", Some(3), "late")
        );
        assert!(rest.is_empty() && !ended.is_success());
        let (ended, answer) = start("cat; echo done").answer(&SystemClock::new(), LONG).unwrap();
        assert!(ended.is_success() && answer == b"done\n");
    }

    #[test]
    fn dropping_kills_the_process_group_without_a_zombie() {
        let mut piped = start("sleep 60 & echo $!; wait");
        let mut line = [0; 16];
        let length = piped.take_output().unwrap().read(&mut line).unwrap();
        let child: u32 = std::str::from_utf8(&line[..length]).unwrap().trim().parse().unwrap();
        drop(piped);
        let clock = SystemClock::new();
        let is_gone = || {
            let stat = std::fs::read_to_string(format!("/proc/{child}/stat"));
            stat.is_err() || stat.is_ok_and(|stat| stat.contains(") Z"))
        };
        while !is_gone() {
            assert!(clock.now() < LONG);
            clock.sleep(Duration::from_millis(5));
        }
    }
}
