//! The handshake as a state machine: bytes in, bytes and a verdict out.
//!
//! Only the fixed newstyle is spoken. Whatever a client asks gets an answer, an error if nothing better; the session ends only
//! where the protocol leaves no other way: client flags that are unknown, an option without its magic number, an `EXPORT_NAME`
//! that cannot be satisfied (it has no errors), and a client that goes on asking without end.

mod context;
mod option;

use std::sync::Arc;

pub(crate) use option::bounded;

use super::export::{Export, Exports};
use super::request::Terms;
use crate::nbd::wire::{
    ClientFlags, Fields, GREETING_MAGIC, GreetingFlags, HeaderStyle, OPTION_BYTES_MAX, OPTION_MAGIC, OptionKind,
    OptionReplyKind,
};

/// Options that one client may send; far more than any needs.
const OPTION_COUNT_MAX: u32 = 1000;
const OPTION_HEADER_BYTES: usize = 16;

/// Bytes of input that one step of the handshake may need to have at once.
pub(crate) const INPUT_BYTES_MAX: usize = OPTION_HEADER_BYTES + OPTION_BYTES_MAX;

/// Whether clients talk in the clear or encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TlsMode {
    /// There is no TLS.
    Off,
    /// Clients may ask for TLS.
    Allowed,
    /// Clients get nothing before they asked for TLS.
    Required,
}

/// Why the handshake ended without a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandshakeEnd {
    /// The client said goodbye.
    Aborted,
    /// The client asked, by an option that knows no errors, for what it cannot have.
    Refused(String),
    /// What came is not the protocol.
    Nonsense(&'static str),
}

/// What is next after a step.
#[derive(Debug)]
pub(crate) enum Progress {
    /// More input is needed.
    NeedInput,
    /// Something was done; there may be more input already.
    Continue,
    /// TLS begins after the output was sent.
    StartTls,
    /// After the output was sent, requests follow.
    Enter(Session),
    /// The connection is to be closed after the output was sent.
    End(HandshakeEnd),
}

/// What a client agreed on with the server.
#[derive(Debug, Clone)]
pub(crate) struct Session {
    pub(crate) export: Arc<Export>,
    pub(crate) terms: Terms,
}

/// What the server is at the moment.
#[derive(Clone, Copy)]
pub(crate) struct Surroundings<'a> {
    pub(crate) exports: &'a dyn Exports,
    /// Whether the server is being stopped.
    pub(crate) stopping: bool,
    /// Told when an export could not be opened: its name, and why.
    pub(crate) on_error: &'a dyn Fn(&str, &holdfast_block::Error),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    ClientFlags,
    Options,
    /// Bytes of the data of an option that is too big, which are thrown away.
    Skipping(OptionKind, u64),
}

/// One client's handshake.
#[derive(Debug)]
pub(crate) struct Handshake {
    phase: Phase,
    tls_mode: TlsMode,
    is_encrypted: bool,
    client: ClientFlags,
    option_count: u32,
    agreed: Agreed,
}

/// What options have settled so far; TLS begins with none of it.
#[derive(Debug)]
struct Agreed {
    style: HeaderStyle,
    /// The export that was opened last, under the name that was asked for.
    opened: Option<(String, Arc<Export>)>,
    /// Metadata contexts, and the export that they were selected for.
    contexts: Option<(String, Vec<u32>)>,
}

impl Default for Agreed {
    fn default() -> Self {
        Self {
            style: HeaderStyle::Simple,
            opened: None,
            contexts: None,
        }
    }
}

impl Handshake {
    pub(crate) fn new(tls_mode: TlsMode) -> Self {
        Self {
            phase: Phase::ClientFlags,
            tls_mode,
            is_encrypted: false,
            client: ClientFlags::default(),
            option_count: 0,
            agreed: Agreed::default(),
        }
    }

    /// Appends what the server says first.
    pub(crate) fn greet(output: &mut Vec<u8>) {
        output.extend(GREETING_MAGIC.to_be_bytes());
        output.extend(OPTION_MAGIC.to_be_bytes());
        let flags = GreetingFlags::FIXED_NEWSTYLE | GreetingFlags::NO_ZEROES;
        output.extend(flags.0.to_be_bytes());
    }

    /// Says that TLS is there: what was agreed on before no longer counts.
    pub(crate) fn encrypted(&mut self) {
        self.is_encrypted = true;
        self.agreed = Agreed::default();
    }

    /// Takes one step with `input`, of which it used as many bytes as it says; appends answers to `output`.
    pub(crate) fn step(
        &mut self,
        input: &[u8],
        surroundings: Surroundings<'_>,
        output: &mut Vec<u8>,
    ) -> (usize, Progress) {
        match self.phase {
            Phase::ClientFlags => self.take_client_flags(input),
            Phase::Options => self.take_option(input, surroundings, output),
            Phase::Skipping(kind, rest) => {
                let used = input.len().min(holdfast_block::to_usize(rest));
                let rest = rest - used as u64;
                if rest > 0 {
                    self.phase = Phase::Skipping(kind, rest);
                    return (used, Progress::NeedInput);
                }
                self.phase = Phase::Options;
                (used, self.refuse_oversize(kind, output))
            }
        }
    }

    fn take_client_flags(&mut self, input: &[u8]) -> (usize, Progress) {
        let Some(bytes) = input.first_chunk::<4>() else {
            return (0, Progress::NeedInput);
        };
        self.client = ClientFlags(u32::from_be_bytes(*bytes));
        self.phase = Phase::Options;
        // "the server MUST drop the TCP connection if the client sets an unknown flag"
        let known = ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES;
        if !self.client.beyond(known).is_empty() {
            return (
                4,
                Progress::End(HandshakeEnd::Nonsense("client flags that are unknown")),
            );
        }
        (4, Progress::Continue)
    }

    fn take_option(&mut self, input: &[u8], surroundings: Surroundings<'_>, output: &mut Vec<u8>) -> (usize, Progress) {
        let Some((header, rest)) = input.split_first_chunk::<OPTION_HEADER_BYTES>() else {
            return (0, Progress::NeedInput);
        };
        let mut fields = Fields(header);
        if fields.u64() != OPTION_MAGIC {
            let reason = HandshakeEnd::Nonsense("an option without its magic number");
            return (0, Progress::End(reason));
        }
        let kind = OptionKind(fields.u32());
        let length = holdfast_block::to_usize(u64::from(fields.u32()));
        if length > OPTION_BYTES_MAX {
            self.phase = Phase::Skipping(kind, length as u64);
            return (OPTION_HEADER_BYTES, Progress::Continue);
        }
        let Some(data) = rest.get(..length) else {
            return (0, Progress::NeedInput);
        };
        self.option_count += 1;
        let progress = if self.option_count > OPTION_COUNT_MAX {
            Progress::End(HandshakeEnd::Nonsense("options without end"))
        } else {
            self.answer(kind, data, surroundings, output)
        };
        (OPTION_HEADER_BYTES + length, progress)
    }

    fn refuse_oversize(&mut self, kind: OptionKind, output: &mut Vec<u8>) -> Progress {
        self.option_count += 1;
        if kind == OptionKind::EXPORT_NAME || self.option_count > OPTION_COUNT_MAX {
            return Progress::End(HandshakeEnd::Nonsense("an option of absurd size"));
        }
        if kind == OptionKind::ABORT {
            option::reply(output, kind, OptionReplyKind::ACK, &[]);
            return Progress::End(HandshakeEnd::Aborted);
        }
        let (error, message) = if self.wants_tls_first() {
            (OptionReplyKind::ERR_TLS_REQD, "TLS has to begin first")
        } else if option::is_known(kind) {
            (OptionReplyKind::ERR_TOO_BIG, "the option is too big")
        } else {
            option::UNSUPPORTED
        };
        option::reply(output, kind, error, message.as_bytes());
        Progress::Continue
    }

    fn wants_tls_first(&self) -> bool {
        self.tls_mode == TlsMode::Required && !self.is_encrypted
    }
}

#[cfg(test)]
mod tests;
