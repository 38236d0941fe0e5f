//! Validates the request headers of a client.

use std::ops::Range;

use crate::nbd::wire::{
    CommandFlags, CommandKind, ErrorNumber, ExportFlags, HeaderStyle, PAYLOAD_BYTES_MAX, RequestHeader,
};

/// Parameters of the session that the validation depends on.
#[derive(Debug, Clone)]
pub(crate) struct Terms {
    pub(crate) style: HeaderStyle,
    pub(crate) flags: ExportFlags,
    pub(crate) size_bytes: u64,
    /// The metadata contexts that the client selected, by number.
    pub(crate) contexts: Vec<u32>,
}

/// A valid request: its range lies within the export, which supports the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    /// Number of bytes of the export.
    pub(crate) length: u64,
    pub(crate) command: RequestCommand,
    pub(crate) durability: Durability,
}

impl Request {
    pub(crate) fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.length
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestCommand {
    Read(Fragments),
    Write,
    Flush,
    Trim,
    Cache,
    WriteZeroes(Zeroes),
    BlockStatus {
        extents: Extents,
        /// Whether the payload lists the contexts.
        contexts: Contexts,
    },
}

/// Whether the reply to a read may be split into several chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fragments {
    Any,
    One,
}

/// How zeroes are to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Zeroes {
    Any,
    /// Allocated, so that a later write has space.
    Provisioned,
    /// Only if writing zeroes is faster than writing data.
    Quick,
    /// Both: `Provisioned` and `Quick`.
    QuickProvisioned,
}

/// Whether the reply may have several extents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extents {
    Any,
    One,
}

/// Which contexts are requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contexts {
    Selected,
    /// The contexts that the payload lists after the length of the range.
    InPayload,
}

/// When a write is complete: when the device has the data, or when it is durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Durability {
    Later,
    BeforeReply,
}

/// Why a request is not executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestError {
    pub(crate) error: ErrorNumber,
    pub(crate) reason: &'static str,
}

/// How to handle a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Execute it, after receiving its payload.
    Accept(Request),
    /// Skip its payload, and reply with an error.
    Refuse(RequestError),
    /// The client disconnects: complete the requests in progress, and close the connection.
    Disconnect,
    /// The stream cannot be parsed any further.
    End(&'static str),
}

const fn refuse<T>(error: ErrorNumber, reason: &'static str) -> Result<T, RequestError> {
    Err(RequestError { error, reason })
}

/// Number of bytes that follow `header`.
///
/// A write always has a payload. QEMU 10.0 sends writes with extended headers without the flag for a payload, and its
/// own server accepts them.
pub(crate) fn payload_bytes(header: &RequestHeader, style: HeaderStyle) -> u64 {
    let is_announced = style == HeaderStyle::Extended && header.flags.has(CommandFlags::PAYLOAD_LENGTH);
    let has_payload = header.kind == CommandKind::WRITE || is_announced;
    if has_payload { header.length } else { 0 }
}

/// Validates a header.
pub(crate) fn validate(header: &RequestHeader, terms: &Terms) -> Verdict {
    if header.kind == CommandKind::DISCONNECT {
        return Verdict::Disconnect;
    }
    // "A server SHOULD initiate hard disconnect if a client sets the NBD_CMD_FLAG_PAYLOAD_LEN flag and uses a length
    // larger than a server's advertised or default maximum payload length". With 32 bits the payload is skipped
    // instead.
    if terms.style == HeaderStyle::Extended && payload_bytes(header, terms.style) > u64::from(PAYLOAD_BYTES_MAX) {
        return Verdict::End("a payload of absurd size");
    }
    match check(header, terms) {
        Ok(request) => Verdict::Accept(request),
        Err(refusal) => Verdict::Refuse(refusal),
    }
}

fn check(header: &RequestHeader, terms: &Terms) -> Result<Request, RequestError> {
    let command = command(header, terms)?;
    let durability = if header.flags.has(CommandFlags::FUA) {
        Durability::BeforeReply
    } else {
        Durability::Later
    };
    let request = Request {
        cookie: header.cookie,
        offset: header.offset,
        length: header.length,
        command,
        durability,
    };
    check_size(&request, terms)?;
    Ok(request)
}

/// The command, if the export supports it with these flags.
fn command(header: &RequestHeader, terms: &Terms) -> Result<RequestCommand, RequestError> {
    let offered = |flags| terms.flags.has(flags);
    let flags = header.flags;
    let needs = |flag: ExportFlags| {
        if offered(flag) {
            Ok(())
        } else if offered(ExportFlags::READ_ONLY) && flag != ExportFlags::FLUSH {
            refuse(ErrorNumber::EPERM, "the export is read-only")
        } else {
            refuse(ErrorNumber::EINVAL, "the export does not offer this command")
        }
    };
    let command = match header.kind {
        CommandKind::READ => RequestCommand::Read(if flags.has(CommandFlags::DONT_FRAGMENT) {
            Fragments::One
        } else {
            Fragments::Any
        }),
        CommandKind::WRITE => {
            if offered(ExportFlags::READ_ONLY) {
                return refuse(ErrorNumber::EPERM, "the export is read-only");
            }
            RequestCommand::Write
        }
        CommandKind::FLUSH => needs(ExportFlags::FLUSH).map(|()| RequestCommand::Flush)?,
        CommandKind::TRIM => needs(ExportFlags::TRIM).map(|()| RequestCommand::Trim)?,
        CommandKind::CACHE => needs(ExportFlags::CACHE).map(|()| RequestCommand::Cache)?,
        CommandKind::WRITE_ZEROES => {
            needs(ExportFlags::WRITE_ZEROES)?;
            let no_hole = flags.has(CommandFlags::NO_HOLE);
            RequestCommand::WriteZeroes(match (no_hole, flags.has(CommandFlags::FAST_ZERO)) {
                (false, false) => Zeroes::Any,
                (true, false) => Zeroes::Provisioned,
                (false, true) => Zeroes::Quick,
                (true, true) => Zeroes::QuickProvisioned,
            })
        }
        CommandKind::BLOCK_STATUS => block_status(flags, terms)?,
        _ => return refuse(ErrorNumber::EINVAL, "the command is unknown"),
    };
    if flags.without(known_flags(command, terms)).is_empty() {
        Ok(command)
    } else {
        refuse(ErrorNumber::EINVAL, "the command does not know these flags")
    }
}

fn block_status(flags: CommandFlags, terms: &Terms) -> Result<RequestCommand, RequestError> {
    if terms.contexts.is_empty() {
        return refuse(ErrorNumber::EINVAL, "no metadata context is selected");
    }
    Ok(RequestCommand::BlockStatus {
        extents: if flags.has(CommandFlags::REQUEST_ONE) {
            Extents::One
        } else {
            Extents::Any
        },
        contexts: if flags.has(CommandFlags::PAYLOAD_LENGTH) {
            Contexts::InPayload
        } else {
            Contexts::Selected
        },
    })
}

/// The flags that `command` may have. FUA "is valid for all commands", if the export supports it.
fn known_flags(command: RequestCommand, terms: &Terms) -> CommandFlags {
    let when = |flag: ExportFlags, then: CommandFlags| {
        if terms.flags.has(flag) {
            then
        } else {
            CommandFlags::default()
        }
    };
    let own = match command {
        RequestCommand::Read(_) => when(ExportFlags::DONT_FRAGMENT, CommandFlags::DONT_FRAGMENT),
        RequestCommand::Write if terms.style == HeaderStyle::Extended => CommandFlags::PAYLOAD_LENGTH,
        RequestCommand::WriteZeroes(_) => CommandFlags::NO_HOLE | when(ExportFlags::FAST_ZERO, CommandFlags::FAST_ZERO),
        RequestCommand::BlockStatus { .. } => {
            CommandFlags::REQUEST_ONE | when(ExportFlags::BLOCK_STATUS_PAYLOAD, CommandFlags::PAYLOAD_LENGTH)
        }
        RequestCommand::Write | RequestCommand::Flush | RequestCommand::Trim | RequestCommand::Cache => {
            CommandFlags::default()
        }
    };
    own | when(ExportFlags::FUA, CommandFlags::FUA)
}

/// Checks the length of the request for its command.
fn check_size(request: &Request, terms: &Terms) -> Result<(), RequestError> {
    let payload_max = u64::from(PAYLOAD_BYTES_MAX);
    match request.command {
        RequestCommand::Flush => {
            return if request.offset == 0 && request.length == 0 {
                Ok(())
            } else {
                refuse(ErrorNumber::EINVAL, "a flush has no range")
            };
        }
        // The range is in the payload; the length in the header is that of the payload.
        RequestCommand::BlockStatus {
            contexts: Contexts::InPayload,
            ..
        } => return Ok(()),
        RequestCommand::Read(_) if request.length > payload_max => {
            // "SHOULD NOT return NBD_EOVERFLOW except as documented in response to NBD_CMD_READ when DF is supported"
            let error = match terms.style {
                HeaderStyle::Simple => ErrorNumber::EINVAL,
                HeaderStyle::Structured | HeaderStyle::Extended => ErrorNumber::EOVERFLOW,
            };
            return refuse(error, "the read is longer than 32 MiB");
        }
        RequestCommand::Write if request.length > payload_max => {
            return refuse(ErrorNumber::EINVAL, "the write is longer than 32 MiB");
        }
        RequestCommand::Cache if request.length > payload_max => {
            return refuse(ErrorNumber::EOVERFLOW, "the range is longer than 32 MiB");
        }
        _ => {}
    }
    check_range(request, terms)
}

/// Checks that the range lies within the export.
pub(crate) fn check_range(request: &Request, terms: &Terms) -> Result<(), RequestError> {
    let end = request.offset.checked_add(request.length);
    if end.is_none_or(|end| end > terms.size_bytes) {
        let error = match request.command {
            RequestCommand::Write | RequestCommand::WriteZeroes(_) => ErrorNumber::ENOSPC,
            _ => ErrorNumber::EINVAL,
        };
        return refuse(error, "the request reaches past the end of the export");
    }
    // Every chunk of block status has at least one extent, and no extent is empty.
    if matches!(request.command, RequestCommand::BlockStatus { .. }) && request.length == 0 {
        return refuse(ErrorNumber::EINVAL, "an empty range has no block status");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{
        Durability, Fragments, Request, RequestCommand, RequestError, Terms, Verdict, Zeroes, payload_bytes, validate,
    };
    use crate::nbd::wire::{CommandFlags, CommandKind, ErrorNumber, ExportFlags, HeaderStyle, RequestHeader};

    fn terms(flags: ExportFlags) -> Terms {
        Terms {
            style: HeaderStyle::Structured,
            flags: ExportFlags::HAS_FLAGS | flags,
            size_bytes: 10_000,
            contexts: Vec::new(),
        }
    }

    fn header(kind: CommandKind, flags: CommandFlags, offset: u64, length: u64) -> RequestHeader {
        RequestHeader {
            flags,
            kind,
            cookie: 1,
            offset,
            length,
        }
    }

    fn error(verdict: Verdict) -> Option<ErrorNumber> {
        match verdict {
            Verdict::Refuse(RequestError { error, .. }) => Some(error),
            _ => None,
        }
    }

    #[test]
    fn unsupported_requests_are_refused_with_a_reason() {
        let none = CommandFlags::default();
        let read_only = terms(ExportFlags::READ_ONLY);
        for kind in [CommandKind::WRITE, CommandKind::TRIM, CommandKind::WRITE_ZEROES] {
            // The command is checked before the range: the client does not learn whether the range is valid.
            for length in [512, 1 << 40] {
                let verdict = validate(&header(kind, none, 0, length), &read_only);
                assert_eq!(error(verdict), Some(ErrorNumber::EPERM), "{kind:?}");
            }
        }
        let plain = terms(ExportFlags::default());
        for kind in [
            CommandKind::FLUSH,
            CommandKind::TRIM,
            CommandKind::CACHE,
            CommandKind::BLOCK_STATUS,
        ] {
            let verdict = validate(&header(kind, none, 0, 0), &plain);
            assert_eq!(error(verdict), Some(ErrorNumber::EINVAL), "{kind:?}");
        }
        let durable = header(CommandKind::WRITE, CommandFlags::FUA, 0, 512);
        assert_eq!(error(validate(&durable, &plain)), Some(ErrorNumber::EINVAL));
    }

    #[test]
    fn flags_are_decoded() {
        let offers = ExportFlags::FUA | ExportFlags::WRITE_ZEROES | ExportFlags::FAST_ZERO | ExportFlags::DONT_FRAGMENT;
        let zeroes = header(
            CommandKind::WRITE_ZEROES,
            CommandFlags::NO_HOLE | CommandFlags::FUA,
            100,
            9900,
        );
        let request = Request {
            cookie: 1,
            offset: 100,
            length: 9900,
            command: RequestCommand::WriteZeroes(Zeroes::Provisioned),
            durability: Durability::BeforeReply,
        };
        assert_eq!(validate(&zeroes, &terms(offers)), Verdict::Accept(request));
        let read = header(CommandKind::READ, CommandFlags::DONT_FRAGMENT, 0, 1);
        let Verdict::Accept(request) = validate(&read, &terms(offers)) else {
            unreachable!("it is offered");
        };
        assert_eq!(request.command, RequestCommand::Read(Fragments::One));
        assert_eq!(
            error(validate(&read, &terms(ExportFlags::FUA))),
            Some(ErrorNumber::EINVAL)
        );
    }

    #[test]
    fn a_payload_follows_writes_and_extended_requests_with_its_flag() {
        let none = CommandFlags::default();
        let write = header(CommandKind::WRITE, none, 0, 77);
        let read = header(CommandKind::READ, CommandFlags::PAYLOAD_LENGTH, 0, 77);
        assert_eq!(payload_bytes(&write, HeaderStyle::Simple), 77);
        assert_eq!(payload_bytes(&read, HeaderStyle::Structured), 0);
        assert_eq!(payload_bytes(&write, HeaderStyle::Extended), 77);
        assert_eq!(payload_bytes(&read, HeaderStyle::Extended), 77);
        let extended = Terms {
            style: HeaderStyle::Extended,
            ..terms(ExportFlags::default())
        };
        for flags in [none, CommandFlags::PAYLOAD_LENGTH] {
            let write = header(CommandKind::WRITE, flags, 0, 77);
            assert!(matches!(validate(&write, &extended), Verdict::Accept(_)), "{flags:?}");
            let absurd = header(CommandKind::WRITE, flags, 0, u64::MAX);
            assert!(matches!(validate(&absurd, &extended), Verdict::End(_)), "{flags:?}");
        }
    }
}
