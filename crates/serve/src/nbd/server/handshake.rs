//! The handshake as a state machine: bytes in, bytes and a decision out.
//!
//! Only the fixed newstyle is supported. Every option gets a reply, at least an error. The session ends only if the
//! protocol requires it: after unknown client flags, an option without its magic number, or an `EXPORT_NAME` that
//! cannot be satisfied (it has no error reply), and if a client sends too many options.

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

/// Limit of options of one client; far more than a client needs.
const OPTION_COUNT_MAX: u32 = 1000;
const OPTION_HEADER_BYTES: usize = 16;

/// Number of input bytes that one step of the handshake may need at once.
pub(crate) const INPUT_BYTES_MAX: usize = OPTION_HEADER_BYTES + OPTION_BYTES_MAX;

/// Whether connections are encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TlsMode {
    /// There is no TLS.
    Off,
    /// Clients may request TLS.
    Allowed,
    /// Clients must start TLS first.
    Required,
}

/// Why the handshake ended without a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandshakeEnd {
    /// The client aborted.
    Aborted,
    /// The client requested something unavailable by an option that has no error reply.
    Refused(String),
    /// The input is not valid NBD.
    Malformed(&'static str),
}

/// The next action after a step.
#[derive(Debug)]
pub(crate) enum Progress {
    /// More input is needed.
    NeedInput,
    /// A step was executed; there may be more input already.
    Continue,
    /// Start TLS after sending the output.
    StartTls,
    /// Send the output, then receive requests.
    Enter(NbdSession),
    /// Close the connection after sending the output.
    End(HandshakeEnd),
}

/// The result of the handshake.
#[derive(Debug, Clone)]
pub(crate) struct NbdSession {
    pub(crate) export: Arc<Export>,
    pub(crate) terms: Terms,
}

/// State of the server that a step depends on.
#[derive(Clone, Copy)]
pub(crate) struct ServerState<'a> {
    pub(crate) exports: &'a dyn Exports,
    /// Whether the server is being stopped.
    pub(crate) is_stopping: bool,
    /// Called when an export could not be opened, with its name and the error.
    pub(crate) on_error: &'a dyn Fn(&str, &holdfast_block::Error),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    ClientFlags,
    Options,
    /// Skips the remaining bytes of an oversized option.
    Skipping(OptionKind, u64),
}

/// One client's handshake.
#[derive(Debug)]
pub(crate) struct ServerHandshake {
    phase: Phase,
    tls_mode: TlsMode,
    is_encrypted: bool,
    client: ClientFlags,
    option_count: u32,
    negotiated: Negotiated,
}

/// Results of the options so far; reset when TLS starts.
#[derive(Debug)]
struct Negotiated {
    style: HeaderStyle,
    /// The export that was opened last, and its requested name.
    opened: Option<(String, Arc<Export>)>,
    /// Selected metadata contexts, and the export that they were selected for.
    contexts: Option<(String, Vec<u32>)>,
}

impl Default for Negotiated {
    fn default() -> Self {
        Self {
            style: HeaderStyle::Simple,
            opened: None,
            contexts: None,
        }
    }
}

impl ServerHandshake {
    pub(crate) fn new(tls_mode: TlsMode) -> Self {
        Self {
            phase: Phase::ClientFlags,
            tls_mode,
            is_encrypted: false,
            client: ClientFlags::default(),
            option_count: 0,
            negotiated: Negotiated::default(),
        }
    }

    /// Appends the greeting.
    pub(crate) fn greet(output: &mut Vec<u8>) {
        output.extend(GREETING_MAGIC.to_be_bytes());
        output.extend(OPTION_MAGIC.to_be_bytes());
        let flags = GreetingFlags::FIXED_NEWSTYLE | GreetingFlags::NO_ZEROES;
        output.extend(flags.0.to_be_bytes());
    }

    /// Resets the negotiation after TLS was started.
    pub(crate) fn encrypted(&mut self) {
        self.is_encrypted = true;
        self.negotiated = Negotiated::default();
    }

    /// Executes one step with `input` and returns how many bytes it used; appends replies to `output`.
    pub(crate) fn step(&mut self, input: &[u8], server: ServerState<'_>, output: &mut Vec<u8>) -> (usize, Progress) {
        match self.phase {
            Phase::ClientFlags => self.take_client_flags(input),
            Phase::Options => self.take_option(input, server, output),
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
        if !self.client.without(known).is_empty() {
            return (4, Progress::End(HandshakeEnd::Malformed("unknown client flags")));
        }
        (4, Progress::Continue)
    }

    fn take_option(&mut self, input: &[u8], server: ServerState<'_>, output: &mut Vec<u8>) -> (usize, Progress) {
        let Some((header, rest)) = input.split_first_chunk::<OPTION_HEADER_BYTES>() else {
            return (0, Progress::NeedInput);
        };
        let mut fields = Fields(header);
        if fields.u64() != OPTION_MAGIC {
            let reason = HandshakeEnd::Malformed("an option without its magic number");
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
            Progress::End(HandshakeEnd::Malformed("options without end"))
        } else {
            self.answer(kind, data, server, output)
        };
        (OPTION_HEADER_BYTES + length, progress)
    }

    fn refuse_oversize(&mut self, kind: OptionKind, output: &mut Vec<u8>) -> Progress {
        self.option_count += 1;
        if kind == OptionKind::EXPORT_NAME || self.option_count > OPTION_COUNT_MAX {
            return Progress::End(HandshakeEnd::Malformed("an option of absurd size"));
        }
        if kind == OptionKind::ABORT {
            option::reply(output, kind, OptionReplyKind::ACK, &[]);
            return Progress::End(HandshakeEnd::Aborted);
        }
        let (error, message) = if self.wants_tls_first() {
            (OptionReplyKind::ERR_TLS_REQD, "TLS must be started first")
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
