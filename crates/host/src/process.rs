//! The one place that starts a subprocess.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// A process that runs beside this one, and is told and tells things by the line.
///
/// When this one ends, however it does, the other's standard input ends.
pub struct Companion {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Companion {
    /// Starts a program; what it says on standard error goes where ours goes.
    pub fn start(program: &OsString, arguments: &[OsString]) -> std::io::Result<Self> {
        #[expect(clippy::disallowed_methods, reason = "this is the place")]
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take();
        let output = child.stdout.take();
        let (send, lines) = channel();
        std::thread::Builder::new()
            .name("companion".to_owned())
            .spawn(move || {
                let Some(output) = output else { return };
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if send.send(line).is_err() {
                        return;
                    }
                }
            })?;
        Ok(Self { child, input, lines })
    }

    /// Tells it something.
    pub fn tell(&mut self, line: &str) -> std::io::Result<()> {
        let gone = || std::io::Error::new(std::io::ErrorKind::BrokenPipe, "it has been told to end");
        let input = self.input.as_mut().ok_or_else(gone)?;
        input.write_all(format!("{line}\n").as_bytes())?;
        input.flush()
    }

    /// The next thing that it tells; none where the time is over, or it has ended.
    pub fn hear(&self, deadline: Duration) -> Option<String> {
        self.lines.recv_timeout(deadline).ok()
    }

    /// Ends its input, and waits until it has ended.
    pub fn end(mut self) -> std::io::Result<()> {
        drop(self.input.take());
        self.child.wait().map(drop)
    }
}
