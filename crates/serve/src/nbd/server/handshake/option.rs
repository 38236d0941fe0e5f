//! What the server answers to each option.

use std::sync::Arc;

use super::super::export::Export;
use super::super::request::Terms;
use super::{Handshake, HandshakeEnd, Progress, Session, Surroundings, TlsMode};
use crate::nbd::wire::{
    ClientFlags, ExportFlags, Fields, HeaderStyle, InfoKind, OPTION_REPLY_MAGIC, OptionKind, OptionReplyKind,
    PAYLOAD_BYTES_MAX, STRING_BYTES_MAX,
};

/// Bytes of the answer to one `LIST`: what lies beyond is not listed, though it can be opened.
const LIST_BYTES_MAX: usize = 4 << 20;
/// Bytes of zeroes after the reply to `EXPORT_NAME`, where the client did not ask to leave them out.
const EXPORT_NAME_ZEROES: usize = 124;

/// An error reply: its kind, and a message for a person.
pub(super) type Refusal = (OptionReplyKind, String);

/// The answer to an option that this server does not know.
pub(super) const UNSUPPORTED: (OptionReplyKind, &str) = (OptionReplyKind::ERR_UNSUP, "the option is unknown");

/// Whether this server knows `option`, whatever it says to it.
pub(super) fn is_known(option: OptionKind) -> bool {
    matches!(
        option,
        OptionKind::LIST
            | OptionKind::STARTTLS
            | OptionKind::INFO
            | OptionKind::GO
            | OptionKind::STRUCTURED_REPLY
            | OptionKind::EXTENDED_HEADERS
            | OptionKind::LIST_META_CONTEXT
            | OptionKind::SET_META_CONTEXT
    )
}

pub(super) fn refusal<T>(kind: OptionReplyKind, message: &str) -> Result<T, Refusal> {
    Err((kind, message.to_owned()))
}

/// Appends one reply to an option.
pub(super) fn reply(output: &mut Vec<u8>, option: OptionKind, kind: OptionReplyKind, data: &[u8]) {
    let length = u32::try_from(data.len()).expect("replies are bounded");
    output.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    output.extend(option.0.to_be_bytes());
    output.extend(kind.0.to_be_bytes());
    output.extend(length.to_be_bytes());
    output.extend(data);
}

impl Handshake {
    pub(super) fn answer(
        &mut self,
        option: OptionKind,
        data: &[u8],
        surroundings: Surroundings<'_>,
        output: &mut Vec<u8>,
    ) -> Progress {
        if option == OptionKind::ABORT {
            reply(output, option, OptionReplyKind::ACK, &[]);
            return Progress::End(HandshakeEnd::Aborted);
        }
        if option == OptionKind::EXPORT_NAME {
            return self.export_name(data, surroundings, output);
        }
        let answered = if surroundings.stopping {
            refusal(OptionReplyKind::ERR_SHUTDOWN, "the server is being stopped")
        } else if self.wants_tls_first() && option != OptionKind::STARTTLS {
            refusal(OptionReplyKind::ERR_TLS_REQD, "TLS has to begin first")
        } else {
            match option {
                OptionKind::LIST => list(data, surroundings, output),
                OptionKind::STARTTLS => self.start_tls(data),
                OptionKind::INFO | OptionKind::GO => self.go(option, data, surroundings, output),
                OptionKind::STRUCTURED_REPLY => self.structured_reply(data),
                OptionKind::EXTENDED_HEADERS => self.extended_headers(data),
                OptionKind::LIST_META_CONTEXT | OptionKind::SET_META_CONTEXT => {
                    self.meta_context(option, data, surroundings, output)
                }
                _ => refusal(UNSUPPORTED.0, UNSUPPORTED.1),
            }
        };
        match answered {
            Ok(progress) => {
                reply(output, option, OptionReplyKind::ACK, &[]);
                progress
            }
            Err((kind, message)) => {
                reply(output, option, kind, message.as_bytes());
                Progress::Continue
            }
        }
    }

    fn export_name(&mut self, data: &[u8], surroundings: Surroundings<'_>, output: &mut Vec<u8>) -> Progress {
        let end = |reason: &str| Progress::End(HandshakeEnd::Refused(reason.to_owned()));
        if surroundings.stopping {
            return end("the server is being stopped");
        }
        if self.wants_tls_first() {
            return end("TLS has to begin first");
        }
        // "a client that has used NBD_OPT_EXTENDED_HEADERS to negotiate extended headers MUST NOT use this option"
        if self.agreed.style == HeaderStyle::Extended {
            return end("EXPORT_NAME after extended headers");
        }
        let opened = string(data).and_then(|name| Ok((name, self.open(name, surroundings)?)));
        let session = match opened {
            Ok((name, export)) => self.session(name, export),
            Err((_, message)) => return Progress::End(HandshakeEnd::Refused(message)),
        };
        output.extend(session.terms.size_bytes.to_be_bytes());
        output.extend(session.terms.flags.0.to_be_bytes());
        if !self.client.has(ClientFlags::NO_ZEROES) {
            output.extend([0; EXPORT_NAME_ZEROES]);
        }
        Progress::Enter(session)
    }

    fn start_tls(&mut self, data: &[u8]) -> Result<Progress, Refusal> {
        no_data(data)?;
        if self.is_encrypted {
            return refusal(OptionReplyKind::ERR_INVALID, "TLS has begun already");
        }
        // "The server MUST operate in NOTLS mode unless ... the client replied with NBD_FLAG_C_FIXED_NEWSTYLE"
        if self.tls_mode == TlsMode::Off || !self.client.has(ClientFlags::FIXED_NEWSTYLE) {
            return refusal(OptionReplyKind::ERR_POLICY, "this server has no TLS");
        }
        Ok(Progress::StartTls)
    }

    fn structured_reply(&mut self, data: &[u8]) -> Result<Progress, Refusal> {
        no_data(data)?;
        if self.agreed.style == HeaderStyle::Extended {
            return refusal(
                OptionReplyKind::ERR_EXT_HEADER_REQD,
                "extended headers are agreed on already",
            );
        }
        self.agreed.style = HeaderStyle::Structured;
        Ok(Progress::Continue)
    }

    fn extended_headers(&mut self, data: &[u8]) -> Result<Progress, Refusal> {
        no_data(data)?;
        self.agreed.style = HeaderStyle::Extended;
        Ok(Progress::Continue)
    }

    fn go(
        &mut self,
        option: OptionKind,
        data: &[u8],
        surroundings: Surroundings<'_>,
        output: &mut Vec<u8>,
    ) -> Result<Progress, Refusal> {
        let mut parts = Parts(data);
        let name = parts.string()?;
        let wanted_count = parts.u16()?;
        if parts.0.len() != 2 * usize::from(wanted_count) {
            return refusal(
                OptionReplyKind::ERR_INVALID,
                "the list of information is not as long as it says",
            );
        }
        let wants = |kind: InfoKind| parts.0.chunks_exact(2).any(|bytes| Fields(bytes).u16() == kind.0);
        let export = self.open(name, surroundings)?;
        let session = self.session(name, Arc::clone(&export));
        let mut info = |kind: InfoKind, payload: &[u8]| {
            let data = [&kind.0.to_be_bytes(), payload].concat();
            reply(output, option, OptionReplyKind::INFO, &data);
        };
        let Terms { size_bytes, flags, .. } = session.terms;
        info(
            InfoKind::EXPORT,
            &[&size_bytes.to_be_bytes()[..], &flags.0.to_be_bytes()].concat(),
        );
        if wants(InfoKind::NAME) {
            info(InfoKind::NAME, bounded(export.name()).as_bytes());
        }
        if wants(InfoKind::DESCRIPTION) && !export.description().is_empty() {
            info(InfoKind::DESCRIPTION, bounded(export.description()).as_bytes());
        }
        if wants(InfoKind::BLOCK_SIZE) {
            let sizes = [1, export.preferred_block_bytes(), PAYLOAD_BYTES_MAX];
            info(InfoKind::BLOCK_SIZE, &sizes.map(u32::to_be_bytes).concat());
        }
        Ok(match option {
            OptionKind::GO => Progress::Enter(session),
            _ => Progress::Continue,
        })
    }

    /// The export called `name`; one that was opened just before is not opened again.
    pub(super) fn open(&mut self, name: &str, surroundings: Surroundings<'_>) -> Result<Arc<Export>, Refusal> {
        if let Some((opened, export)) = &self.agreed.opened
            && opened == name
        {
            return Ok(Arc::clone(export));
        }
        let export = match surroundings.exports.open(name) {
            Ok(Some(export)) => export,
            Ok(None) => return refusal(OptionReplyKind::ERR_UNKNOWN, "there is no export of this name"),
            Err(error) => {
                (surroundings.on_error)(name, &error);
                return refusal(OptionReplyKind::ERR_UNKNOWN, "the export cannot be opened");
            }
        };
        self.agreed.opened = Some((name.to_owned(), Arc::clone(&export)));
        Ok(export)
    }

    fn session(&self, name: &str, export: Arc<Export>) -> Session {
        let style = self.agreed.style;
        let contexts = match &self.agreed.contexts {
            Some((selected_for, contexts)) if selected_for == name => contexts.clone(),
            _ => Vec::new(),
        };
        let mut flags = export.flags(style);
        // "SHOULD NOT advertise this bit ... if the client does not negotiate metacontexts"
        if contexts.is_empty() {
            flags = flags.beyond(ExportFlags::BLOCK_STATUS_PAYLOAD);
        }
        let terms = Terms {
            style,
            flags,
            size_bytes: export.device().reader().size_bytes(),
            contexts,
        };
        Session { export, terms }
    }
}

fn list(data: &[u8], surroundings: Surroundings<'_>, output: &mut Vec<u8>) -> Result<Progress, Refusal> {
    no_data(data)?;
    let start = output.len();
    for entry in surroundings.exports.list() {
        if entry.name.len() > STRING_BYTES_MAX || output.len() - start > LIST_BYTES_MAX {
            continue;
        }
        let length = u32::try_from(entry.name.len()).expect("at most 4096 bytes");
        let description = bounded(&entry.description).as_bytes();
        let data = [&length.to_be_bytes(), entry.name.as_bytes(), description].concat();
        reply(output, OptionKind::LIST, OptionReplyKind::SERVER, &data);
    }
    Ok(Progress::Continue)
}

fn no_data(data: &[u8]) -> Result<(), Refusal> {
    if data.is_empty() {
        Ok(())
    } else {
        refusal(OptionReplyKind::ERR_INVALID, "the option has no data")
    }
}

/// The longest start of `text` that the protocol allows as a string.
pub(crate) fn bounded(text: &str) -> &str {
    let mut end = text.len().min(STRING_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// A string of the protocol: UTF-8 without NUL, of bounded length.
fn string(bytes: &[u8]) -> Result<&str, Refusal> {
    if bytes.len() > STRING_BYTES_MAX {
        return refusal(OptionReplyKind::ERR_TOO_BIG, "a string is longer than 4096 bytes");
    }
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => refusal(OptionReplyKind::ERR_INVALID, "a string is no text"),
    }
}

/// Takes the data of an option apart.
pub(super) struct Parts<'a>(pub(super) &'a [u8]);

impl<'a> Parts<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Refusal> {
        let Some((taken, rest)) = self.0.split_at_checked(length) else {
            return refusal(OptionReplyKind::ERR_INVALID, "the option is shorter than it says");
        };
        self.0 = rest;
        Ok(taken)
    }

    fn u16(&mut self) -> Result<u16, Refusal> {
        self.take(2).map(|bytes| Fields(bytes).u16())
    }

    pub(super) fn u32(&mut self) -> Result<u32, Refusal> {
        self.take(4).map(|bytes| Fields(bytes).u32())
    }

    /// A string after its length of 32 bits.
    pub(super) fn string(&mut self) -> Result<&'a str, Refusal> {
        let length = self.u32()?;
        string(self.take(holdfast_block::to_usize(u64::from(length)))?)
    }
}
