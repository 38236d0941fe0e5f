//! Kinds of terminals and streams, and prompts.

use std::io::{IsTerminal, Stderr, Stdout};
use std::os::fd::AsFd;

use holdfast_host::Wait;
use zeroize::Zeroizing;

/// A terminal on which the user can be prompted.
pub trait Prompt {
    /// Shows `text` and reads a line without echo.
    ///
    /// # Errors
    /// Of the kind `NotFound` or `Unsupported` if there is no terminal.
    fn secret(&self, text: &str) -> std::io::Result<Zeroizing<Vec<u8>>>;
}

/// The controlling terminal of the process, even if its standard streams are redirected.
#[derive(Debug, Clone, Copy)]
pub struct ControllingTerminal;

impl Prompt for ControllingTerminal {
    fn secret(&self, text: &str) -> std::io::Result<Zeroizing<Vec<u8>>> {
        if std::fs::File::open("/dev/tty").is_err() {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        // If signals are stop requests already, a signal ends the wait for the user.
        let _wait = Wait::for_answer("the person at the terminal");
        let line = rpassword::prompt_password(text)?;
        Ok(Zeroizing::new(line.into_bytes()))
    }
}

/// The kind of a standard stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamKind {
    /// A file, a pipe, a journal: lines are not truncated.
    File,
    /// A terminal.
    Terminal {
        /// Characters per line.
        width: usize,
    },
}

impl StreamKind {
    /// Standard output.
    pub fn of_stdout(stdout: &Stdout) -> Self {
        Self::of(stdout)
    }

    /// Standard error.
    pub fn of_stderr(stderr: &Stderr) -> Self {
        Self::of(stderr)
    }

    fn of(stream: &(impl AsFd + IsTerminal)) -> Self {
        /// Width of a terminal that does not report its width.
        const WIDTH_DEFAULT: u16 = 80;
        if !stream.is_terminal() {
            return Self::File;
        }
        let width = rustix::termios::tcgetwinsize(stream).map_or(0, |size| size.ws_col);
        let width = if width == 0 { WIDTH_DEFAULT } else { width };
        Self::Terminal { width: width.into() }
    }

    /// Characters per line, if limited.
    pub fn width(self) -> Option<usize> {
        match self {
            Self::File => None,
            Self::Terminal { width } => Some(width),
        }
    }
}
