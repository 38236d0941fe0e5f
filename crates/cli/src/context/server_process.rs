//! Server processes that outlive the command that starts them. They get the key of the repository through a pipe, and
//! report when they are ready.

use std::ffi::OsString;
use std::io::{BufRead as _, Read as _, Write as _};
use std::os::fd::AsFd;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_host::LineProcess;
use rustix::process::setsid;
use zeroize::Zeroizing;

use super::password::Password;
use crate::errors::Error;
use crate::exit::Exit;

const READY: &str = "ready";
/// Time limit for opening the repository, which connects to no server.
const READY_DEADLINE: Duration = Duration::from_secs(120);
/// Maximum bytes of the line with the key.
const LINE_BYTES_MAX: u64 = 1 << 10;

/// How a server process began.
#[derive(Debug, PartialEq, Eq)]
pub enum ServerStart {
    /// It serves.
    Ready,
    /// It did not answer in time.
    Silent,
    /// It has ended. Its messages are on standard error.
    Ended {
        /// How it ended; a signal counts as an error.
        exit: Exit,
        /// What it printed on standard output.
        output: Vec<String>,
    },
}

/// Starts this program as a server, which outlives this process. `secret` is passed through a pipe only, as the first
/// line of its standard input.
pub fn start_server(words: &[OsString], secret: Option<&str>, clock: &dyn Clock) -> std::io::Result<ServerStart> {
    let program = std::env::current_exe()?;
    let mut process = LineProcess::start(&program.into(), words)?;
    if let Some(secret) = secret {
        process.send_line(secret)?;
    }
    let mut output = Vec::new();
    loop {
        match process.receive_line(READY_DEADLINE) {
            Some(line) if line == READY => return Ok(ServerStart::Ready),
            Some(line) => output.push(line),
            None => break,
        }
    }
    match process.status(clock)? {
        Some(status) => {
            let code = status.code();
            let exit = Exit::ALL.into_iter().find(|exit| Some(exit.code().into()) == code);
            // A server that ends without an error was not asked to serve.
            let exit = exit.filter(|exit| *exit != Exit::Ok).unwrap_or(Exit::Error);
            Ok(ServerStart::Ended { exit, output })
        }
        None => Ok(ServerStart::Silent),
    }
}

/// Called by a server first. Interrupting the command that started it from a terminal, or killing its group, must not
/// end the server.
pub fn leave_group() {
    setsid().ok();
}

/// Called by a server: reads the paper key of the repository from the first line of standard input.
///
/// The command that started it has already derived the key from the password, which is slow by design and may have
/// required a prompt.
pub fn received_key(sender: &'static str) -> Result<Password, Error> {
    leave_group();
    let mut line = Zeroizing::new(String::new());
    let read = std::io::stdin().lock().take(LINE_BYTES_MAX).read_line(&mut line);
    read.map_err(|source| Error::File {
        action: "read",
        path: "/dev/stdin".into(),
        source,
    })?;
    let bytes = Zeroizing::new(line.trim_end().as_bytes().to_vec());
    Ok(Password::from_line(bytes, sender)?)
}

/// Called by a server: reports to the command that started it that it is ready, and detaches from its terminal and
/// pipes. Later output goes to `log`.
pub fn report_ready(log: impl AsFd) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{READY}").and_then(|()| stdout.flush())?;
    rustix::stdio::dup2_stdout(&log)?;
    rustix::stdio::dup2_stderr(&log)?;
    Ok(())
}
