//! A child process that reads what is not trusted, and exchanges messages with this one.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::thread::CapabilitySet;

use super::confined::start_with;
use super::secrets::command;

/// A child process without capabilities and without an environment.
///
/// Reading is reading its standard output, and writing is writing to its standard input. Dropping this ends the process.
pub struct ConfinedReader {
    child: Child,
    input: ChildStdin,
    output: ChildStdout,
    patience: Duration,
}

impl ConfinedReader {
    /// Starts this program with other arguments. A read fails if no byte arrives for as long as `patience`.
    ///
    /// The child is started without rights, and has to give up what is left by [`confine`](crate::confine).
    pub fn start(arguments: &[OsString], patience: Duration) -> io::Result<Self> {
        let program = std::env::current_exe()?;
        let mut child = start_with(CapabilitySet::empty(), || {
            command(&program)
                .args(arguments)
                .env_clear()
                .current_dir("/")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                // Ctrl-C interrupts this process, which then ends the child.
                .process_group(0)
                .spawn()
        })?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(input), Some(output)) => {
                // A child that stops reading must not block this process.
                fcntl_setfl(&input, fcntl_getfl(&input)? | OFlags::NONBLOCK)?;
                Ok(Self {
                    child,
                    input,
                    output,
                    patience,
                })
            }
            _ => Err(io::Error::other("the process has no pipes")),
        }
    }

    /// Ends the process; returns how it ended if it had ended by itself.
    pub fn end(&mut self) -> Option<String> {
        // A process that closed its output ends at once; one that hangs is killed.
        let status = self.child.try_wait().ok().flatten();
        if status.is_none() {
            self.child.kill().ok();
            self.child.wait().ok();
        }
        let status = status?;
        Some(match (status.signal(), status.code()) {
            (Some(signal), _) => format!("ended by signal {signal}"),
            (None, Some(code)) => format!("ended with exit code {code}"),
            (None, None) => "ended".to_owned(),
        })
    }
}

/// Waits until a pipe is ready; an error after `patience`.
fn wait(pipe: &impl AsFd, flags: PollFlags, patience: Duration) -> io::Result<()> {
    let timeout = Timespec {
        tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: patience.subsec_nanos().into(),
    };
    loop {
        match poll(&mut [PollFd::new(pipe, flags)], Some(&timeout)) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
        }
    }
}

impl Read for ConfinedReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        wait(&self.output, PollFlags::IN, self.patience)?;
        self.output.read(buffer)
    }
}

impl Write for ConfinedReader {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        loop {
            match self.input.write(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait(&self.input, PollFlags::OUT, self.patience)?;
                }
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.input.flush()
    }
}

impl Drop for ConfinedReader {
    fn drop(&mut self) {
        self.end();
    }
}
