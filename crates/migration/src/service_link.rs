//! Connections to services of another host.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_host::{Piped, PipedEnd, StreamTools};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::{Error, Result};
use crate::streams::copy_bytes;

/// Words after which the program serves one connection: `holdfast receive-migration 1`.
pub const RECEIVE_MIGRATION_COMMAND: [&str; 2] = ["receive-migration", "1"];

/// How long a program whose output has ended may take to say why.
const END_PATIENCE: Duration = Duration::from_millis(500);
const END_INTERVAL: Duration = Duration::from_millis(10);

/// Reaches services of another host.
pub trait ServiceLink: Send + Sync {
    /// Opens a connection that begins with `line`, and joins it with `stream` until both have ended.
    ///
    /// # Errors
    /// The host cannot be reached.
    fn join(&self, line: &[u8], stream: UnixStream) -> Result<()>;
}

/// A program that connects its standard input and output to a `holdfast receive-migration`.
pub struct ServiceProgram {
    pub(crate) tools: Arc<dyn StreamTools>,
    /// The host, for people.
    pub(crate) name: String,
    pub(crate) program: &'static str,
    pub(crate) arguments: Vec<String>,
    pub(crate) clock: Arc<dyn Clock>,
}

impl ServiceProgram {
    /// The `holdfast` of the host of `tools`. `uri` is the address of its hypervisor.
    pub fn of_host(tools: Arc<dyn StreamTools>, uri: &str, clock: Arc<dyn Clock>) -> Self {
        let [verb, version] = RECEIVE_MIGRATION_COMMAND;
        Self {
            name: tools.host().unwrap_or("this host").to_owned(),
            tools,
            program: "holdfast",
            arguments: [verb, version, "--connect", uri].map(str::to_owned).into(),
            clock,
        }
    }
}

impl ServiceLink for ServiceProgram {
    fn join(&self, line: &[u8], stream: UnixStream) -> Result<()> {
        let failed = |reason: String| Error::FarHost {
            host: self.name.clone(),
            reason,
        };
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        let mut program = self
            .tools
            .start(self.program, &arguments)
            .map_err(|error| failed(error.to_string()))?;
        // If the program has ended, its end says why.
        program.write_input(line).ok();
        self.join_program(&stream, &mut program);
        match self.end_of(&mut program).map_err(|error| failed(error.to_string()))? {
            Some(end) if !end.is_success() => Err(failed(end.reason())),
            _ => Ok(()),
        }
    }
}

impl ServiceProgram {
    /// Forwards bytes between a stream and the standard input and output of a program, until both have ended. If the stream was
    /// closed, the program is killed when it does not end soon: the other host may not answer any more.
    fn join_program(&self, stream: &UnixStream, program: &mut Piped) {
        let Some((input, output)) = program.take_input().zip(program.take_output()) else {
            return;
        };
        std::thread::scope(|scope| {
            scope.spawn(move || {
                if copy_bytes(stream, input).is_err() {
                    stream.shutdown(Shutdown::Read).ok();
                }
                if is_closed(stream) && matches!(self.end_of(program), Ok(None)) {
                    program.kill();
                }
            });
            copy_bytes(output, stream).ok();
            stream.shutdown(Shutdown::Write).ok();
        });
    }

    /// How a program has ended; none if it does not end soon.
    fn end_of(&self, program: &mut Piped) -> std::io::Result<Option<PipedEnd>> {
        let until = self.clock.now() + END_PATIENCE;
        loop {
            let end = program.try_end()?;
            if end.is_some() || self.clock.now() > until {
                return Ok(end);
            }
            self.clock.sleep(END_INTERVAL);
        }
    }
}

/// Whether both directions of a stream have ended.
fn is_closed(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::empty())];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&at_once)).is_ok() && polled[0].revents().contains(PollFlags::HUP)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::time::Duration;

    use holdfast_block::SystemClock;
    use holdfast_host::LocalTools;

    use super::{ServiceLink as _, ServiceProgram};

    fn shell(command: &str) -> ServiceProgram {
        let clock = Arc::new(SystemClock::new());
        ServiceProgram {
            tools: Arc::new(LocalTools::new(Arc::clone(&clock) as _, Duration::from_secs(60))),
            name: "host2".to_owned(),
            program: "/bin/sh",
            arguments: vec!["-c".to_owned(), command.to_owned()],
            clock,
        }
    }

    #[test]
    fn a_half_that_ends_leaves_the_other_one_open() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let joining = std::thread::spawn(|| shell("cat; sleep 1; echo more").join(b"line\n", theirs));
        ours.write_all(b"bytes\n").unwrap();
        ours.shutdown(Shutdown::Write).unwrap();
        let mut text = String::new();
        ours.read_to_string(&mut text).unwrap();
        assert_eq!(text, "line\nbytes\nmore\n");
        joining.join().unwrap().unwrap();
    }

    #[test]
    fn a_program_that_does_not_end_with_its_stream_is_killed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let kept = theirs.try_clone().unwrap();
        let joining = std::thread::spawn(|| shell("exec sleep 1000").join(b"line\n", theirs));
        kept.shutdown(Shutdown::Both).unwrap();
        joining.join().unwrap().unwrap_err();
        drop(ours);
    }

    #[test]
    fn the_reason_of_a_program_is_reported() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let joining = std::thread::spawn(|| shell("echo no such host >&2; exit 1").join(b"", theirs));
        assert_eq!(ours.read(&mut [0]).unwrap(), 0);
        drop(ours);
        let error = joining.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("no such host"), "{error}");
    }
}
