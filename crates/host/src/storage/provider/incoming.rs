//! Gated streams from another host into programs that execute them: `btrfs receive`, `zfs receive`.
//!
//! Such a program runs as root and executes the commands of the stream. So every stream first passes a
//! [`StreamGate`], which reads it command by command and passes on only harmless commands that fit the announcement.
//! A receiving program is accessible only through [`Incoming`], which returns its input together with the gate.

use std::io;
use std::io::Read;
use std::process::ChildStdin;
use std::sync::{Arc, Mutex, PoisonError};

use super::ProviderResult;
use crate::system::process::{Piped, PipedEnd};

/// The reason why a stream was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the stream is refused: {reason}")]
pub struct StreamRefusal {
    /// What was refused, and why.
    pub reason: String,
}

impl StreamRefusal {
    pub(super) fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into() }
    }

    /// The refusal in an error of a gated stream, if there is one.
    pub fn of(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }
}

impl From<StreamRefusal> for io::Error {
    fn from(refusal: StreamRefusal) -> Self {
        Self::new(io::ErrorKind::InvalidData, refusal)
    }
}

/// Whether a stream continues after a piece of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    /// There may be more data.
    More,
    /// No more data: the stream has ended, or was truncated.
    End,
}

/// Decides which parts of a stream are passed to a program.
pub(super) trait StreamGate: Send {
    /// Reads the next piece of `from`, of bounded size, and appends the accepted part to `passed`.
    ///
    /// # Errors
    /// A [`StreamRefusal`], or `from` cannot be read. A truncated stream is not an error here: no end is passed on,
    /// and the receiving program reports the missing end.
    fn pass(&mut self, from: &mut dyn Read, passed: &mut Vec<u8>) -> io::Result<Flow>;
}

/// The part of a stream that has passed its gate.
struct Gated {
    from: Box<dyn Read + Send>,
    gate: Box<dyn StreamGate>,
    passed: Vec<u8>,
    taken: usize,
    flow: Flow,
}

impl Read for Gated {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.taken == self.passed.len() {
            if self.flow == Flow::End {
                return Ok(0);
            }
            self.passed.clear();
            self.taken = 0;
            match self.gate.pass(&mut self.from, &mut self.passed) {
                Ok(flow) => self.flow = flow,
                Err(error) => {
                    // The output before the error belongs to the refused command.
                    self.passed.clear();
                    self.flow = Flow::End;
                    return Err(error);
                }
            }
        }
        let length = buffer.len().min(self.passed.len() - self.taken);
        buffer[..length].copy_from_slice(&self.passed[self.taken..self.taken + length]);
        self.taken += length;
        Ok(length)
    }
}

/// The gate of one stream. [`StreamCheck::guard`] applies it.
pub struct StreamCheck(Option<Box<dyn StreamGate>>);

impl StreamCheck {
    #[cfg(any(test, feature = "hostile"))]
    pub(super) fn of(gate: Box<dyn StreamGate>) -> Self {
        Self(Some(gate))
    }

    /// The accepted part of `from`. The stream is read in small pieces, so `from` should be buffered.
    pub fn guard(self, from: Box<dyn Read + Send>) -> Box<dyn Read + Send> {
        match self.0 {
            None => from,
            Some(gate) => Box::new(Gated {
                from,
                gate,
                passed: Vec::new(),
                taken: 0,
                flow: Flow::More,
            }),
        }
    }
}

/// Notes about the stream, collected by the gate.
pub(super) type Notes = Arc<Mutex<Vec<String>>>;
type Finish = Box<dyn FnOnce() -> ProviderResult<()> + Send>;

/// A program that receives a stream.
pub struct Incoming {
    piped: Piped,
    gate: Option<Box<dyn StreamGate>>,
    notes: Notes,
    finish: Option<Finish>,
}

impl Incoming {
    /// A receiver on another host, where a `holdfast` checks the stream.
    pub fn checked_elsewhere(piped: Piped) -> Self {
        Self {
            piped,
            gate: None,
            notes: Notes::default(),
            finish: None,
        }
    }

    /// A receiver behind `gate`. `finish` checks the result after the program has succeeded.
    pub(super) fn gated(
        piped: Piped,
        gate: Box<dyn StreamGate>,
        notes: Notes,
        finish: impl FnOnce() -> ProviderResult<()> + Send + 'static,
    ) -> Self {
        Self {
            piped,
            gate: Some(gate),
            notes,
            finish: Some(Box::new(finish)),
        }
    }

    /// The program.
    pub fn program(&mut self) -> &mut Piped {
        &mut self.piped
    }

    /// The input of the program, with the check of everything that is written to it. Available once.
    pub fn take_input(&mut self) -> Option<(ChildStdin, StreamCheck)> {
        Some((self.piped.take_input()?, StreamCheck(self.gate.take())))
    }

    /// Checks the received snapshots, gives them their names, and returns what was left out of the stream. The program
    /// must have succeeded.
    ///
    /// # Errors
    /// The snapshots do not fit the announcement. No host snapshot was added.
    pub fn finish(mut self) -> ProviderResult<Vec<String>> {
        if let Some(finish) = self.finish.take() {
            finish()?;
        }
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::take(&mut notes))
    }

    /// See [`Piped::try_end`].
    pub fn try_end(&mut self) -> io::Result<Option<PipedEnd>> {
        self.piped.try_end()
    }
}

/// Fills `buffer` from a stream; false if the stream ends before that.
pub(super) fn fill(from: &mut dyn Read, buffer: &mut [u8]) -> io::Result<bool> {
    match from.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether a stream is at its end.
pub(super) fn is_at_end(from: &mut dyn Read) -> io::Result<bool> {
    Ok(!fill(from, &mut [0])?)
}
