//! What the program's terminal is, and asking a person on it.

use std::io::{IsTerminal, Stderr, Stdout};
use std::os::fd::AsFd;

use holdfast_host::Wait;
use zeroize::Zeroizing;

/// A terminal whose user can be asked.
pub trait Prompt {
    /// Shows `text` and reads a line without showing it.
    ///
    /// Answers with an error of the kind `NotFound` or `Unsupported` where there is no terminal.
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
        // Where signals are requests to stop already, one ends the wait for the person.
        let _wait = Wait::for_answer("the person at the terminal");
        let line = rpassword::prompt_password(text)?;
        Ok(Zeroizing::new(line.into_bytes()))
    }
}

/// A standard stream, as far as it matters for what is written to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamKind {
    /// A file, a pipe, a journal: lines are not cut.
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
        /// What a terminal that does not know its width gets.
        const WIDTH_DEFAULT: u16 = 80;
        if !stream.is_terminal() {
            return Self::File;
        }
        let width = rustix::termios::tcgetwinsize(stream).map_or(0, |size| size.ws_col);
        let width = if width == 0 { WIDTH_DEFAULT } else { width };
        Self::Terminal { width: width.into() }
    }

    /// Characters per line, where lines have an end.
    pub fn width(self) -> Option<usize> {
        match self {
            Self::File => None,
            Self::Terminal { width } => Some(width),
        }
    }
}
