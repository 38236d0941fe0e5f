//! The replies to each option.

use std::sync::Arc;

use super::super::export::Export;
use super::super::request::Terms;
use super::{HandshakeEnd, NbdSession, Progress, ServerHandshake, ServerState, TlsMode};
use crate::nbd::wire::{
    ClientFlags, ExportFlags, Fields, HeaderStyle, InfoKind, OPTION_REPLY_MAGIC, OptionKind, OptionReplyKind,
    PAYLOAD_BYTES_MAX, STRING_BYTES_MAX,
};

/// Limit of bytes of the reply to one `LIST`. Further exports are not listed, but can be opened.
const LIST_BYTES_MAX: usize = 4 << 20;
/// Zeroes after the reply to `EXPORT_NAME`, unless the client asked to omit them.
const EXPORT_NAME_ZEROES: usize = 124;

/// An error reply: its kind, and a message.
pub(super) type OptionError = (OptionReplyKind, String);

/// The reply to an unknown option.
pub(super) const UNSUPPORTED: (OptionReplyKind, &str) = (OptionReplyKind::ERR_UNSUP, "the option is unknown");

/// Whether this server supports `option`.
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

pub(super) fn option_error<T>(kind: OptionReplyKind, message: &str) -> Result<T, OptionError> {
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

impl ServerHandshake {
    pub(super) fn answer(
        &mut self,
        option: OptionKind,
        data: &[u8],
        server: ServerState<'_>,
        output: &mut Vec<u8>,
    ) -> Progress {
        if option == OptionKind::ABORT {
            reply(output, option, OptionReplyKind::ACK, &[]);
            return Progress::End(HandshakeEnd::Aborted);
        }
        if option == OptionKind::EXPORT_NAME {
            return self.export_name(data, server, output);
        }
        let answered = if server.is_stopping {
            option_error(OptionReplyKind::ERR_SHUTDOWN, "the server is being stopped")
        } else if self.wants_tls_first() && option != OptionKind::STARTTLS {
            option_error(OptionReplyKind::ERR_TLS_REQD, "TLS must be started first")
        } else {
            match option {
                OptionKind::LIST => list(data, server, output),
                OptionKind::STARTTLS => self.start_tls(data),
                OptionKind::INFO | OptionKind::GO => self.go(option, data, server, output),
                OptionKind::STRUCTURED_REPLY => self.structured_reply(data),
                OptionKind::EXTENDED_HEADERS => self.extended_headers(data),
                OptionKind::LIST_META_CONTEXT | OptionKind::SET_META_CONTEXT => {
                    self.meta_context(option, data, server, output)
                }
                _ => option_error(UNSUPPORTED.0, UNSUPPORTED.1),
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

    fn export_name(&mut self, data: &[u8], server: ServerState<'_>, output: &mut Vec<u8>) -> Progress {
        let end = |reason: &str| Progress::End(HandshakeEnd::Refused(reason.to_owned()));
        if server.is_stopping {
            return end("the server is being stopped");
        }
        if self.wants_tls_first() {
            return end("TLS must be started first");
        }
        // "a client that has used NBD_OPT_EXTENDED_HEADERS to negotiate extended headers MUST NOT use this option"
        if self.negotiated.style == HeaderStyle::Extended {
            return end("EXPORT_NAME after extended headers");
        }
        let opened = string(data).and_then(|name| Ok((name, self.open(name, server)?)));
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

    fn start_tls(&mut self, data: &[u8]) -> Result<Progress, OptionError> {
        no_data(data)?;
        if self.is_encrypted {
            return option_error(OptionReplyKind::ERR_INVALID, "TLS has already started");
        }
        // "The server MUST operate in NOTLS mode unless ... the client replied with NBD_FLAG_C_FIXED_NEWSTYLE"
        if self.tls_mode == TlsMode::Off || !self.client.has(ClientFlags::FIXED_NEWSTYLE) {
            return option_error(OptionReplyKind::ERR_POLICY, "this server has no TLS");
        }
        Ok(Progress::StartTls)
    }

    fn structured_reply(&mut self, data: &[u8]) -> Result<Progress, OptionError> {
        no_data(data)?;
        if self.negotiated.style == HeaderStyle::Extended {
            return option_error(
                OptionReplyKind::ERR_EXT_HEADER_REQD,
                "extended headers are agreed on already",
            );
        }
        self.negotiated.style = HeaderStyle::Structured;
        Ok(Progress::Continue)
    }

    fn extended_headers(&mut self, data: &[u8]) -> Result<Progress, OptionError> {
        no_data(data)?;
        self.negotiated.style = HeaderStyle::Extended;
        Ok(Progress::Continue)
    }

    fn go(
        &mut self,
        option: OptionKind,
        data: &[u8],
        server: ServerState<'_>,
        output: &mut Vec<u8>,
    ) -> Result<Progress, OptionError> {
        let mut parts = Parts(data);
        let name = parts.string()?;
        let wanted_count = parts.u16()?;
        if parts.0.len() != 2 * usize::from(wanted_count) {
            return option_error(
                OptionReplyKind::ERR_INVALID,
                "the list of information is not as long as it says",
            );
        }
        let wants = |kind: InfoKind| parts.0.chunks_exact(2).any(|bytes| Fields(bytes).u16() == kind.0);
        let export = self.open(name, server)?;
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

    /// Opens the export with the name `name`; an export that was just opened is not opened again.
    pub(super) fn open(&mut self, name: &str, server: ServerState<'_>) -> Result<Arc<Export>, OptionError> {
        if let Some((opened, export)) = &self.negotiated.opened
            && opened == name
        {
            return Ok(Arc::clone(export));
        }
        let export = match server.exports.open(name) {
            Ok(Some(export)) => export,
            Ok(None) => return option_error(OptionReplyKind::ERR_UNKNOWN, "there is no export of this name"),
            Err(error) => {
                (server.on_error)(name, &error);
                return option_error(OptionReplyKind::ERR_UNKNOWN, "the export cannot be opened");
            }
        };
        self.negotiated.opened = Some((name.to_owned(), Arc::clone(&export)));
        Ok(export)
    }

    fn session(&self, name: &str, export: Arc<Export>) -> NbdSession {
        let style = self.negotiated.style;
        let contexts = match &self.negotiated.contexts {
            Some((selected_for, contexts)) if selected_for == name => contexts.clone(),
            _ => Vec::new(),
        };
        let mut flags = export.flags(style);
        // "SHOULD NOT advertise this bit ... if the client does not negotiate metacontexts"
        if contexts.is_empty() {
            flags = flags.without(ExportFlags::BLOCK_STATUS_PAYLOAD);
        }
        let terms = Terms {
            style,
            flags,
            size_bytes: export.device().reader().size_bytes(),
            contexts,
        };
        NbdSession { export, terms }
    }
}

fn list(data: &[u8], server: ServerState<'_>, output: &mut Vec<u8>) -> Result<Progress, OptionError> {
    no_data(data)?;
    let start = output.len();
    for entry in server.exports.list() {
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

fn no_data(data: &[u8]) -> Result<(), OptionError> {
    if data.is_empty() {
        Ok(())
    } else {
        option_error(OptionReplyKind::ERR_INVALID, "the option has no data")
    }
}

/// The longest prefix of `text` that fits a string of the protocol.
pub(crate) fn bounded(text: &str) -> &str {
    let mut end = text.len().min(STRING_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// A string of the protocol: UTF-8 without NUL, of bounded length.
fn string(bytes: &[u8]) -> Result<&str, OptionError> {
    if bytes.len() > STRING_BYTES_MAX {
        return option_error(OptionReplyKind::ERR_TOO_BIG, "a string is longer than 4096 bytes");
    }
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => option_error(OptionReplyKind::ERR_INVALID, "a string is not text"),
    }
}

/// Parses the data of an option.
pub(super) struct Parts<'a>(pub(super) &'a [u8]);

impl<'a> Parts<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], OptionError> {
        let Some((taken, rest)) = self.0.split_at_checked(length) else {
            return option_error(OptionReplyKind::ERR_INVALID, "the option is shorter than it says");
        };
        self.0 = rest;
        Ok(taken)
    }

    fn u16(&mut self) -> Result<u16, OptionError> {
        self.take(2).map(|bytes| Fields(bytes).u16())
    }

    pub(super) fn u32(&mut self) -> Result<u32, OptionError> {
        self.take(4).map(|bytes| Fields(bytes).u32())
    }

    /// A string after its 32-bit length.
    pub(super) fn string(&mut self) -> Result<&'a str, OptionError> {
        let length = self.u32()?;
        string(self.take(holdfast_block::to_usize(u64::from(length)))?)
    }
}
