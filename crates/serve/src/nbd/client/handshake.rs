//! The handshake as a pure state machine: which bytes to send, how many bytes to read, and their meaning.
//!
//! ```text
//! greeting -> [STARTTLS] -> [EXTENDED_HEADERS] -> [STRUCTURED_REPLY] -> [SET_META_CONTEXT] -> GO | EXPORT_NAME
//! ```
//!
//! A step in brackets is skipped if the server refuses it. `EXPORT_NAME` is the fallback for a server without `GO`, or
//! without options. If TLS is requested and refused, the handshake fails: there is no fallback to plain text. Limits on
//! the server: [`OPTION_BYTES_MAX`] for one reply; [`REPLY_COUNT_MAX`] replies and [`TEXT_BYTES_MAX`] of names for one
//! option.

mod options;

use std::sync::Arc;

use super::Error;
use super::export::{BlockSizes, ExportInfo, ListedExport, MetaContext, printable};
use super::option_names::{name_of, reason_of};
use super::violation::Violation;
use crate::nbd::wire::{
    ClientFlags, ExportFlags, Fields, GREETING_MAGIC, GreetingFlags, HeaderStyle, InfoKind, OPTION_BYTES_MAX,
    OPTION_MAGIC, OPTION_REPLY_MAGIC, OptionKind, OptionReplyKind,
};

const GREETING_BYTES: usize = 18;
const REPLY_HEADER_BYTES: usize = 20;
const EXPORT_REPLY_BYTES: usize = 10;
/// Zeroes after the reply to `EXPORT_NAME`, unless both sides agreed to omit them.
const EXPORT_PADDING_BYTES: usize = 124;
/// The second magic number of a server that uses the oldstyle handshake of before 2010.
const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// Limit of replies to one option.
const REPLY_COUNT_MAX: usize = 20_000;
/// Limit of bytes of names and descriptions in the replies to one option.
const TEXT_BYTES_MAX: usize = 8 << 20;

/// The purpose of the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Goal {
    /// Use the export, with those of the metadata contexts that the server offers.
    Transmit { contexts: Vec<String> },
    /// List the names of all exports.
    List,
    /// Describe the export and its contexts, without using it.
    Describe,
}

/// The result of the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) style: HeaderStyle,
    /// Present for the goals that concern one export.
    pub(super) export: Option<ExportInfo>,
    /// Granted or listed contexts, in the server's order.
    pub(super) contexts: Vec<MetaContext>,
    pub(super) exports: Vec<ListedExport>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpectedInput {
    Greeting,
    ReplyHeader,
    ReplyData { kind: OptionReplyKind, length: usize },
    ExportReply,
    Nothing,
}

/// Whether the connection is to be encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TlsState {
    None,
    Wanted,
    /// The server agreed to TLS; it starts now.
    Due,
}

/// One handshake, from the first byte of the server to the last byte before the first request.
#[derive(Debug)]
pub(super) struct ClientHandshake {
    server: Arc<str>,
    export: String,
    goal: Goal,
    tls: TlsState,
    expected: ExpectedInput,
    option: OptionKind,
    reply_count: usize,
    text_bytes: usize,
    output: Vec<u8>,
    padding_bytes: usize,
    size_and_flags: Option<(u64, ExportFlags)>,
    block_sizes: Option<BlockSizes>,
    description: Option<String>,
    outcome: Outcome,
}

impl ClientHandshake {
    /// A handshake about `export` with `server`, whose name is used in errors.
    pub(super) fn new(server: Arc<str>, export: &str, goal: Goal) -> Self {
        Self {
            server,
            export: export.to_owned(),
            goal,
            tls: TlsState::None,
            expected: ExpectedInput::Greeting,
            option: OptionKind(0),
            reply_count: 0,
            text_bytes: 0,
            output: Vec::new(),
            padding_bytes: EXPORT_PADDING_BYTES,
            size_and_flags: None,
            block_sizes: None,
            description: None,
            outcome: Outcome {
                style: HeaderStyle::Simple,
                export: None,
                contexts: Vec::new(),
                exports: Vec::new(),
            },
        }
    }

    /// Requires TLS.
    pub(super) fn over_tls(mut self) -> Self {
        self.tls = TlsState::Wanted;
        self
    }

    /// Whether TLS must start before anything else is sent or read.
    pub(super) fn is_tls_due(&self) -> bool {
        self.tls == TlsState::Due
    }

    /// Continues the handshake after TLS was started.
    pub(super) fn tls_has_begun(&mut self) {
        self.tls = TlsState::None;
        self.send_first_option();
    }

    /// Removes and returns the bytes to send.
    pub(super) fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// Number of bytes that the next [`feed`](Self::feed) needs; 0 when the handshake is complete.
    pub(super) fn wanted_bytes(&self) -> usize {
        match self.expected {
            ExpectedInput::Greeting => GREETING_BYTES,
            ExpectedInput::ReplyHeader => REPLY_HEADER_BYTES,
            ExpectedInput::ReplyData { length, .. } => length,
            ExpectedInput::ExportReply => EXPORT_REPLY_BYTES + self.padding_bytes,
            ExpectedInput::Nothing => 0,
        }
    }

    /// The result, when the handshake is complete.
    pub(super) fn into_outcome(self) -> Outcome {
        self.outcome
    }

    /// Processes bytes of the server: exactly [`wanted_bytes`](Self::wanted_bytes) of them.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Result<(), Error> {
        assert_eq!(
            bytes.len(),
            self.wanted_bytes(),
            "the driver reads exactly the wanted bytes"
        );
        match self.expected {
            ExpectedInput::Greeting => self.greeting(Fields(bytes)),
            ExpectedInput::ReplyHeader => self.reply_header(Fields(bytes)),
            ExpectedInput::ReplyData { kind, .. } => {
                self.expected = ExpectedInput::ReplyHeader;
                self.reply(kind, bytes)
            }
            ExpectedInput::ExportReply => self.export_reply(Fields(bytes)),
            ExpectedInput::Nothing => Ok(()),
        }
    }

    fn broken<T>(&self, violation: Violation) -> Result<T, Error> {
        Err(Error::Violation {
            server: self.server.to_string(),
            violation,
        })
    }

    fn checked<T>(&self, result: Result<T, Violation>) -> Result<T, Error> {
        result.or_else(|violation| self.broken(violation))
    }

    fn greeting(&mut self, mut fields: Fields) -> Result<(), Error> {
        let (magic, option_magic) = (fields.u64(), fields.u64());
        if magic != GREETING_MAGIC {
            return self.broken(Violation::Greeting { found: magic });
        }
        match option_magic {
            OPTION_MAGIC => {}
            OLDSTYLE_MAGIC => return self.broken(Violation::Oldstyle),
            found => {
                let what = "the second half of its greeting";
                return self.broken(Violation::Magic { what, found });
            }
        }
        let offered = GreetingFlags(fields.u16());
        let mut flags = ClientFlags::default();
        if offered.has(GreetingFlags::NO_ZEROES) {
            flags |= ClientFlags::NO_ZEROES;
            self.padding_bytes = 0;
        }
        let is_fixed = offered.has(GreetingFlags::FIXED_NEWSTYLE);
        if is_fixed {
            flags |= ClientFlags::FIXED_NEWSTYLE;
        }
        self.output.extend(flags.0.to_be_bytes());
        if self.tls == TlsState::Wanted && is_fixed {
            self.send_option(OptionKind::STARTTLS, &[]);
            return Ok(());
        }
        let option = match self.goal {
            Goal::Transmit { .. } if !is_fixed && self.tls == TlsState::None => {
                // Without the fixed newstyle, the server may close the connection after an unknown option: it is only
                // certain to know EXPORT_NAME.
                self.send_export_name();
                return Ok(());
            }
            _ if is_fixed => {
                self.send_first_option();
                return Ok(());
            }
            Goal::Transmit { .. } => "STARTTLS",
            Goal::List => "LIST",
            Goal::Describe => "INFO",
        };
        self.refuse(option, "it uses the unfixed newstyle handshake", String::new())
    }

    fn reply_header(&mut self, mut fields: Fields) -> Result<(), Error> {
        let magic = fields.u64();
        if magic != OPTION_REPLY_MAGIC {
            let what = "its reply to an option";
            return self.broken(Violation::Magic { what, found: magic });
        }
        let option = OptionKind(fields.u32());
        if option != self.option {
            return self.broken(Violation::WrongOption {
                expected: self.option.0,
                found: option.0,
            });
        }
        let kind = OptionReplyKind(fields.u32());
        let length = fields.u32();
        let length_bytes = usize::try_from(length).unwrap_or(usize::MAX);
        if length_bytes > OPTION_BYTES_MAX {
            return self.broken(Violation::Size {
                what: "the length of its reply to an option",
                found: u64::from(length),
                allowed: "at most 256 KiB",
            });
        }
        self.reply_count += 1;
        if self.reply_count > REPLY_COUNT_MAX {
            return self.size_violation(
                "the number of its replies to one option",
                self.reply_count,
                "at most 20000",
            );
        }
        self.text_bytes += length_bytes;
        if self.text_bytes > TEXT_BYTES_MAX {
            return self.size_violation(
                "the length of all its replies to one option",
                self.text_bytes,
                "at most 8 MiB",
            );
        }
        if length_bytes == 0 {
            return self.reply(kind, &[]);
        }
        self.expected = ExpectedInput::ReplyData {
            kind,
            length: length_bytes,
        };
        Ok(())
    }

    fn size_violation(&self, what: &'static str, found: usize, allowed: &'static str) -> Result<(), Error> {
        self.broken(Violation::Size {
            what,
            found: found as u64,
            allowed,
        })
    }

    fn reply(&mut self, kind: OptionReplyKind, data: &[u8]) -> Result<(), Error> {
        if kind.is_error() {
            return self.refused(kind, printable(data));
        }
        if kind == OptionReplyKind::ACK && !data.is_empty() {
            return self.size_violation("the length of an acknowledgement", data.len(), "0");
        }
        match (self.option, kind) {
            (OptionKind::STARTTLS, OptionReplyKind::ACK) => {
                self.tls = TlsState::Due;
                self.expected = ExpectedInput::Nothing;
            }
            (OptionKind::EXTENDED_HEADERS, OptionReplyKind::ACK) => {
                self.outcome.style = HeaderStyle::Extended;
                self.send_context_queries();
            }
            (OptionKind::STRUCTURED_REPLY, OptionReplyKind::ACK) => {
                self.outcome.style = HeaderStyle::Structured;
                self.send_context_queries();
            }
            (OptionKind::SET_META_CONTEXT | OptionKind::LIST_META_CONTEXT, OptionReplyKind::META_CONTEXT) => {
                let context = self.checked(MetaContext::decode(data))?;
                return self.context(context);
            }
            (OptionKind::SET_META_CONTEXT | OptionKind::LIST_META_CONTEXT, OptionReplyKind::ACK) => {
                self.send_go_or_info();
            }
            (OptionKind::LIST, OptionReplyKind::SERVER) => {
                let export = self.checked(ListedExport::decode(data))?;
                self.outcome.exports.push(export);
            }
            (OptionKind::LIST, OptionReplyKind::ACK) => self.send_abort(),
            (OptionKind::GO | OptionKind::INFO, OptionReplyKind::INFO) => return self.info(data),
            (OptionKind::GO | OptionKind::INFO, OptionReplyKind::ACK) => return self.accepted(),
            (option, kind) => {
                return self.broken(Violation::WrongReply {
                    option: option.0,
                    kind: kind.0,
                });
            }
        }
        Ok(())
    }

    fn context(&mut self, context: MetaContext) -> Result<(), Error> {
        if let Goal::Transmit { contexts } = &self.goal {
            if !contexts.contains(&context.name) {
                return self.broken(Violation::ForeignContext { name: context.name });
            }
            let known = &self.outcome.contexts;
            if known
                .iter()
                .any(|known| known.name == context.name || known.id == context.id)
            {
                let what = "a metadata context, or its number,";
                return self.broken(Violation::Twice { what });
            }
        }
        self.outcome.contexts.push(context);
        Ok(())
    }

    fn info(&mut self, data: &[u8]) -> Result<(), Error> {
        let Some((kind, rest)) = data.split_first_chunk() else {
            return self.size_violation("the length of its information on the export", data.len(), "at least 2");
        };
        match InfoKind(u16::from_be_bytes(*kind)) {
            InfoKind::EXPORT => {
                if rest.len() != EXPORT_REPLY_BYTES {
                    return self.size_violation("the length of its information on the export", data.len(), "12");
                }
                if self.size_and_flags.is_some() {
                    let what = "the size of the export";
                    return self.broken(Violation::Twice { what });
                }
                let size_and_flags = self.size_and_flags(Fields(rest))?;
                self.size_and_flags = Some(size_and_flags);
            }
            InfoKind::BLOCK_SIZE => self.block_sizes = Some(self.checked(BlockSizes::decode(rest))?),
            InfoKind::DESCRIPTION => self.description = Some(printable(rest)),
            // "The client MUST ignore information replies it does not understand". The name is the requested one
            // anyway.
            _ => {}
        }
        Ok(())
    }

    fn size_and_flags(&self, mut fields: Fields) -> Result<(u64, ExportFlags), Error> {
        let (size_bytes, flags) = (fields.u64(), ExportFlags(fields.u16()));
        if i64::try_from(size_bytes).is_err() {
            return self.broken(Violation::Size {
                what: "the size of the export",
                found: size_bytes,
                allowed: "less than 2^63 bytes",
            });
        }
        Ok((size_bytes, flags))
    }

    fn accepted(&mut self) -> Result<(), Error> {
        let Some((size_bytes, flags)) = self.size_and_flags else {
            let what = "the size of the export";
            return self.broken(Violation::Missing { what });
        };
        self.outcome.export = Some(ExportInfo::new(
            self.export.clone(),
            size_bytes,
            flags,
            self.block_sizes,
            self.description.take(),
        ));
        match self.goal {
            Goal::Transmit { .. } => self.expected = ExpectedInput::Nothing,
            Goal::List | Goal::Describe => self.send_abort(),
        }
        Ok(())
    }

    fn export_reply(&mut self, fields: Fields) -> Result<(), Error> {
        self.size_and_flags = Some(self.size_and_flags(fields)?);
        self.accepted()
    }

    fn refused(&mut self, kind: OptionReplyKind, message: String) -> Result<(), Error> {
        let server = self.server.to_string();
        match kind {
            OptionReplyKind::ERR_TLS_REQD => return Err(Error::TlsRequired { server, message }),
            OptionReplyKind::ERR_SHUTDOWN => {
                return self.refuse(name_of(self.option), reason_of(kind), message);
            }
            _ => {}
        }
        match self.option {
            OptionKind::EXTENDED_HEADERS => self.send_option(OptionKind::STRUCTURED_REPLY, &[]),
            // Without structured replies there is no block status.
            OptionKind::STRUCTURED_REPLY => self.send_go_or_info(),
            OptionKind::SET_META_CONTEXT | OptionKind::LIST_META_CONTEXT => {
                self.outcome.contexts.clear();
                self.send_go_or_info();
            }
            OptionKind::GO if kind == OptionReplyKind::ERR_UNSUP && self.outcome.style != HeaderStyle::Extended => {
                self.size_and_flags = None;
                self.send_export_name();
            }
            OptionKind::GO | OptionKind::INFO if kind == OptionReplyKind::ERR_UNKNOWN => {
                return Err(Error::NoSuchExport {
                    server,
                    export: self.export.clone(),
                    message,
                });
            }
            option => return self.refuse(name_of(option), reason_of(kind), message),
        }
        Ok(())
    }

    fn refuse(&self, option: &'static str, reason: &'static str, message: String) -> Result<(), Error> {
        Err(Error::Refused {
            server: self.server.to_string(),
            option,
            reason,
            message,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::violation::Violation;
    use super::{ClientHandshake, Goal, Outcome};
    use crate::nbd::client::Error;
    use crate::nbd::wire::HeaderStyle;

    const GREETING: &str = "S 4e42444d41474943 49484156454f5054 0003";
    const FLAGS: &str = "C 00000003";
    const EXTENDED: &str = "C 49484156454f5054 0000000b 00000000";
    const STRUCTURED: &str = "C 49484156454f5054 00000008 00000000";
    /// A query for base:allocation of the export "ab".
    const CONTEXTS: &str =
        "C 49484156454f5054 0000000a 0000001d 00000002 6162 00000001 0000000f 626173653a616c6c6f636174696f6e";
    /// A query for the export "ab" with its name, description and block sizes.
    const GO: &str = "C 49484156454f5054 00000007 0000000e 00000002 6162 0003 0001 0002 0003";
    /// An export of 1 MiB, with flags.
    const EXPORT: &str = "S 0003e889045565a9 00000007 00000003 0000000c 0000 0000000000100000 0105";
    const GO_ACK: &str = "S 0003e889045565a9 00000007 00000001 00000000";

    /// A reply without data to the option `option`.
    fn reply(option: u32, kind: u32) -> String {
        format!("S 0003e889045565a9 {option:08x} {kind:08x} 00000000")
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        digits.chunks(2).map(byte).collect()
    }

    fn transmit() -> Goal {
        Goal::Transmit {
            contexts: vec!["base:allocation".to_owned()],
        }
    }

    /// Runs a handshake line by line: the client must send exactly the given bytes.
    fn play(goal: Goal, lines: &[&str]) -> Result<Outcome, Error> {
        let mut handshake = ClientHandshake::new("test".into(), "ab", goal);
        let mut said = Vec::new();
        for (number, line) in lines.iter().enumerate() {
            let (who, hex) = line.split_at(1);
            let mut rest = &bytes(hex)[..];
            if who == "C" {
                let expected = rest;
                assert_eq!(
                    said.drain(..rest.len().min(said.len())).collect::<Vec<u8>>(),
                    expected,
                    "line {number}"
                );
                continue;
            }
            assert!(said.is_empty(), "line {number}: the client said more: {said:02x?}");
            while !rest.is_empty() {
                let (now, later) = rest.split_at(handshake.wanted_bytes());
                handshake.feed(now)?;
                rest = later;
            }
            said = handshake.take_output();
        }
        assert_eq!(said, [], "the client says more");
        assert_eq!(handshake.wanted_bytes(), 0, "the handshake is not over");
        Ok(handshake.into_outcome())
    }

    #[test]
    fn everything_is_granted() {
        let context = "S 0003e889045565a9 0000000a 00000004 00000013 00000007 626173653a616c6c6f636174696f6e";
        let sizes = "S 0003e889045565a9 00000007 00000003 0000000e 0003 00000200 00001000 00200000";
        let description = "S 0003e889045565a9 00000007 00000003 00000005 0002 6f1b6b";
        let unknown = "S 0003e889045565a9 00000007 00000003 00000003 00ff 00";
        let (granted, set) = (reply(11, 1), reply(10, 1));
        let lines = [
            GREETING,
            FLAGS,
            EXTENDED,
            &granted,
            CONTEXTS,
            context,
            &set,
            GO,
            sizes,
            description,
            unknown,
            EXPORT,
            GO_ACK,
        ];
        let outcome = play(transmit(), &lines).unwrap();
        assert_eq!(outcome.style, HeaderStyle::Extended);
        assert_eq!(
            (outcome.contexts[0].id, outcome.contexts[0].name.as_str()),
            (7, "base:allocation")
        );
        let export = outcome.export.unwrap();
        assert_eq!((export.size_bytes(), export.name()), (1 << 20, "ab"));
        assert_eq!(export.description(), "o\u{fffd}k", "an escape would command a terminal");
        assert!(export.is_multi_connection() && export.can_flush() && !export.is_read_only());
        let sizes = export.block_sizes();
        assert_eq!(
            (sizes.minimum_bytes, sizes.preferred_bytes, sizes.payload_max_bytes),
            (512, 4096, 2 << 20)
        );
    }

    #[test]
    fn every_refusal_is_passed_over() {
        const UNKNOWN: u32 = 0x8000_0001;
        let (extended, structured) = (reply(11, UNKNOWN), reply(8, UNKNOWN));
        let lines = [
            GREETING,
            FLAGS,
            EXTENDED,
            &extended,
            STRUCTURED,
            &structured,
            GO,
            EXPORT,
            GO_ACK,
        ];
        let outcome = play(transmit(), &lines).unwrap();
        assert_eq!((outcome.style, outcome.contexts.len()), (HeaderStyle::Simple, 0));

        let (granted, contexts) = (reply(8, 1), reply(10, 0x8000_0003));
        let lines = [
            GREETING, FLAGS, EXTENDED, &extended, STRUCTURED, &granted, CONTEXTS, &contexts, GO, EXPORT, GO_ACK,
        ];
        let outcome = play(transmit(), &lines).unwrap();
        assert_eq!((outcome.style, outcome.contexts.len()), (HeaderStyle::Structured, 0));

        let go = reply(7, UNKNOWN);
        let export_name = "C 49484156454f5054 00000001 00000002 6162";
        let lines = [
            GREETING,
            FLAGS,
            EXTENDED,
            &extended,
            STRUCTURED,
            &structured,
            GO,
            &go,
            export_name,
            "S 0000000000001000 0003",
        ];
        let export = play(transmit(), &lines).unwrap().export.unwrap();
        assert!(export.size_bytes() == 4096 && export.is_read_only());
    }

    #[test]
    fn a_server_without_options_is_asked_for_the_export_at_once() {
        let greeting = "S 4e42444d41474943 49484156454f5054 0000";
        let export_name = "C 00000000 49484156454f5054 00000001 00000002 6162";
        let export = format!("S 0000000000001000 0001 {}", "00".repeat(124));
        let outcome = play(transmit(), &[greeting, export_name, &export]).unwrap();
        assert_eq!(
            (outcome.style, outcome.export.unwrap().size_bytes()),
            (HeaderStyle::Simple, 4096)
        );
        assert!(matches!(
            play(Goal::List, &[greeting]),
            Err(Error::Refused { option: "LIST", .. })
        ));
    }

    #[test]
    fn exports_are_listed_and_described() {
        let ask = "C 49484156454f5054 00000003 00000000";
        let first = "S 0003e889045565a9 00000003 00000002 00000008 00000002 6162 6364";
        let second = "S 0003e889045565a9 00000003 00000002 00000004 00000000";
        let (end, abort) = (reply(3, 1), "C 49484156454f5054 00000002 00000000");
        let outcome = play(Goal::List, &[GREETING, FLAGS, ask, first, second, &end, abort]).unwrap();
        let listed: Vec<_> = outcome
            .exports
            .iter()
            .map(|one| (one.name.as_str(), one.description.as_str()))
            .collect();
        assert_eq!(listed, [("ab", "cd"), ("", "")]);

        let list = "C 49484156454f5054 00000009 0000000a 00000002 6162 00000000";
        let context = "S 0003e889045565a9 00000009 00000004 00000007 00000000 713a78";
        let info = "C 49484156454f5054 00000006 0000000e 00000002 6162 0003 0001 0002 0003";
        let export = "S 0003e889045565a9 00000006 00000003 0000000c 0000 0000000000100000 0105";
        let (structured, listed, described) = (reply(8, 1), reply(9, 1), reply(6, 1));
        let lines = [
            GREETING,
            FLAGS,
            STRUCTURED,
            &structured,
            list,
            context,
            context,
            &listed,
            info,
            export,
            &described,
            abort,
        ];
        let outcome = play(Goal::Describe, &lines).unwrap();
        assert_eq!(
            (outcome.contexts[1].name.as_str(), outcome.export.unwrap().size_bytes()),
            ("q:x", 1 << 20)
        );
    }

    #[test]
    fn unrecoverable_refusals_are_errors() {
        let structured = reply(8, 1);
        let (extended, set) = (reply(11, 0x8000_0001), reply(10, 1));
        let begin = [
            GREETING,
            FLAGS,
            EXTENDED,
            &extended,
            STRUCTURED,
            &structured,
            CONTEXTS,
            &set,
            GO,
        ];
        let outcome_of = |last: &str| play(transmit(), &[&begin[..], &[last]].concat()).unwrap_err();
        let unknown = outcome_of("S 0003e889045565a9 00000007 80000006 00000004 676f6e65");
        assert!(matches!(&unknown, Error::NoSuchExport { .. }), "{unknown:?}");
        assert_eq!(unknown.to_string(), "test has no export \"ab\" (gone)");
        assert!(matches!(outcome_of(&reply(7, 0x8000_0005)), Error::TlsRequired { .. }));
        assert!(matches!(
            outcome_of(&reply(7, 0x8000_0002)),
            Error::Refused { option: "GO", .. }
        ));
        let shutdown = reply(11, 0x8000_0007);
        let error = play(transmit(), &[GREETING, FLAGS, EXTENDED, &shutdown]).unwrap_err();
        assert!(matches!(error, Error::Refused { .. }));
        // With extended headers there is no fallback to EXPORT_NAME.
        let (granted, go) = (reply(11, 1), reply(7, 0x8000_0001));
        let lines = [GREETING, FLAGS, EXTENDED, &granted, CONTEXTS, &set, GO, &go];
        assert!(matches!(
            play(transmit(), &lines),
            Err(Error::Refused { option: "GO", .. })
        ));
    }

    /// The violation that the last line causes.
    fn violation(goal: Goal, lines: &[&str]) -> Violation {
        match play(goal, lines) {
            Err(Error::Violation { violation, .. }) => violation,
            other => panic!("no violation but {other:?}"),
        }
    }

    #[test]
    fn a_hostile_greeting_is_an_error() {
        use Violation as V;
        let of = |line: &str| violation(transmit(), &[line]);
        assert!(matches!(
            of("S 5353482d322e302d 4f70656e5353485f 392e"),
            V::Greeting { .. }
        ));
        assert_eq!(of("S 4e42444d41474943 0000420281861253 0000"), V::Oldstyle);
        assert!(matches!(
            of("S 4e42444d41474943 49484156454f5055 0003"),
            V::Magic { .. }
        ));
    }

    #[test]
    fn hostile_option_replies_are_errors() {
        use Violation as V;
        let of = |last: &[&str]| violation(transmit(), &[&[GREETING, FLAGS, EXTENDED][..], last].concat());
        assert!(matches!(
            of(&["S 0003e889045565aa 0000000b 00000001 00000000"]),
            V::Magic { .. }
        ));
        assert!(matches!(of(&[&reply(8, 1)]), V::WrongOption { expected: 11, found: 8 }));
        assert!(matches!(of(&[&reply(11, 2)]), V::WrongReply { .. }));
        assert!(matches!(
            of(&["S 0003e889045565a9 0000000b 00000001 00040001"]),
            V::Size { .. }
        ));
        assert!(matches!(
            of(&["S 0003e889045565a9 0000000b 00000001 ffffffff"]),
            V::Size { .. }
        ));
        assert!(matches!(
            of(&["S 0003e889045565a9 0000000b 00000001 00000001 00"]),
            V::Size { .. }
        ));
        let granted = reply(11, 1);
        let context = |name: &str| {
            let line = format!(
                "S 0003e889045565a9 0000000a 00000004 {:08x} 00000007 {name}",
                4 + name.len() / 2
            );
            of(&[&granted, CONTEXTS, &line])
        };
        assert!(matches!(context("626173653a"), V::ForeignContext { .. }));
        assert!(matches!(context("ff"), V::NotText { .. }));
        assert!(matches!(context(&"61".repeat(4097)), V::Size { .. }));
        let allocation = "S 0003e889045565a9 0000000a 00000004 00000013 00000007 626173653a616c6c6f636174696f6e";
        assert!(matches!(
            of(&[&granted, CONTEXTS, allocation, allocation]),
            V::Twice { .. }
        ));
        let go = |lines: &[&str]| {
            let set = reply(10, 1);
            of(&[&[&granted, CONTEXTS, &set, GO][..], lines].concat())
        };
        assert!(matches!(go(&[GO_ACK]), V::Missing { .. }));
        assert!(matches!(go(&[EXPORT, EXPORT]), V::Twice { .. }));
        let info = |data: &str| {
            let length = data.len() / 2;
            go(&[&format!("S 0003e889045565a9 00000007 00000003 {length:08x} {data}")])
        };
        assert!(matches!(info("00"), V::Size { .. }));
        assert!(matches!(info("0000"), V::Size { .. }));
        assert!(matches!(info("000080000000000000000105"), V::Size { .. }));
        assert!(matches!(info("0003000000000000100000200000"), V::Size { .. }));
        assert!(matches!(info("0003000002010000100000200000"), V::Size { .. }));
        assert!(matches!(info("0003000200000002000000200000"), V::Size { .. }));
        assert!(matches!(info("00030000020000001000000001ff"), V::Size { .. }));
    }

    #[test]
    fn a_list_without_an_end_is_an_error() {
        let mut handshake = ClientHandshake::new("test".into(), "", Goal::List);
        handshake.feed(&bytes(GREETING)).unwrap();
        let entry = bytes("S 0003e889045565a9 00000003 00000002 00000004 00000000");
        let mut count = 0;
        let error = loop {
            let fed = handshake.feed(&entry[..20]).and_then(|()| handshake.feed(&entry[20..]));
            if let Err(error) = fed {
                break error;
            }
            count += 1;
        };
        assert_eq!(count, 20_000);
        assert!(matches!(
            error,
            Error::Violation {
                violation: Violation::Size { .. },
                ..
            }
        ));
        for entry in [
            "00000000",
            "00000001 000000",
            "00000004 00000001",
            "00000006 00000002 0061",
            "00000005 00000001 ff",
        ] {
            let line = format!("S 0003e889045565a9 00000003 00000002 {entry}");
            let ask = "C 49484156454f5054 00000003 00000000";
            violation(Goal::List, &[GREETING, FLAGS, ask, &line]);
        }
    }
}
