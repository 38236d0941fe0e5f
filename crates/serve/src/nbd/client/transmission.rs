//! The transmission phase as a pure state machine: bytes of the server in, parsed replies out.
//!
//! Every reply is checked against its request before anything is stored: data lies inside the request and arrives once,
//! a successful reply is complete, and lengths fit the kind of reply. A [`Violation`] ends the connection.

use std::collections::HashMap;
use std::time::Duration;

use holdfast_block::Request;

use super::command::ClientCommand;
use super::coverage::{Coverage, CoverageError};
use super::export::{MetaContext, printable};
use super::status::{self, Query, Status};
use super::violation::Violation;
use crate::nbd::wire::{
    ChunkHeader, ChunkKind, CommandFlags, CommandKind, EXTENDED_REPLY_MAGIC, Fields, HeaderStyle, ReplyFlags,
    RequestHeader, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC, STRING_BYTES_MAX, STRUCTURED_REPLY_MAGIC,
};

/// Limit of error chunks in the reply to one request.
const ERROR_COUNT_MAX: u32 = 1024;
/// Limit of bytes of an error chunk: the longest message and the fields, with space for kinds that are not known yet.
const ERROR_BYTES_MAX: u64 = STRING_BYTES_MAX as u64 + 1024;

/// The call that sent a request, and its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Ticket {
    pub(super) call: u64,
    pub(super) sent: Duration,
    pub(super) deadline: Duration,
}

/// An error reply of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ServerFailure {
    pub(super) number: u32,
    pub(super) message: String,
}

/// The result of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) ticket: Ticket,
    pub(super) command: ClientCommand,
    /// The statuses of a block status query; empty for other requests.
    pub(super) result: Result<Vec<Status>, ServerFailure>,
}

/// Whether more chunks of the reply follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChunkPosition {
    More,
    Last,
}

/// The meaning of the next bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReplyEvent {
    /// The input is incomplete: this many bytes are needed.
    NeedBytes(usize),
    /// `length` bytes of export data at `offset` follow. After the last chunk, the caller must call
    /// [`TransmissionState::complete`].
    Data {
        cookie: u64,
        ticket: Ticket,
        offset: u64,
        length: u64,
        position: ChunkPosition,
    },
    /// `length` bytes of the export at `offset` are zero.
    Zeroes {
        ticket: Ticket,
        offset: u64,
        length: u64,
        answer: Option<Answer>,
    },
    /// A request is complete.
    Answer(Answer),
    /// Some input was consumed; continue.
    Continue,
}

#[derive(Debug)]
struct Outstanding {
    ticket: Ticket,
    command: ClientCommand,
    coverage: Coverage,
    statuses: Vec<Status>,
    failure: Option<ServerFailure>,
    error_count: u32,
}

/// The requests in flight on one connection.
#[derive(Debug)]
pub(super) struct TransmissionState {
    style: HeaderStyle,
    contexts: Vec<MetaContext>,
    size_bytes: u64,
    next_cookie: u64,
    outstanding: HashMap<u64, Outstanding>,
    payload_bytes: u64,
}

impl TransmissionState {
    pub(super) fn new(style: HeaderStyle, contexts: Vec<MetaContext>, size_bytes: u64) -> Self {
        Self {
            style,
            contexts,
            size_bytes,
            // Not 0, to detect a server that answers with zeroes.
            next_cookie: 1,
            outstanding: HashMap::new(),
            payload_bytes: 0,
        }
    }

    /// Registers a request that lies inside the export, and returns its header.
    pub(super) fn ask(&mut self, command: ClientCommand, ticket: Ticket) -> RequestHeader {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        self.payload_bytes += command.payload_bytes();
        let outstanding = Outstanding {
            ticket,
            command,
            coverage: Coverage::default(),
            statuses: Vec::new(),
            failure: None,
            error_count: 0,
        };
        self.outstanding.insert(cookie, outstanding);
        let mut flags = command.flags;
        if self.style == HeaderStyle::Extended && command.kind == CommandKind::WRITE {
            flags |= CommandFlags::PAYLOAD_LENGTH;
        }
        RequestHeader {
            flags,
            kind: command.kind,
            cookie,
            offset: command.request.offset,
            length: command.request.length,
        }
    }

    /// Data bytes in flight, in both directions.
    pub(super) fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// The requests in flight.
    pub(super) fn outstanding(&self) -> impl Iterator<Item = (Ticket, Request)> + '_ {
        self.outstanding.values().map(|one| (one.ticket, one.command.request))
    }

    /// Parses the first bytes of the input; returns how many of them were consumed.
    pub(super) fn receive(&mut self, bytes: &[u8]) -> Result<(usize, ReplyEvent), Violation> {
        let Some(magic) = bytes.first_chunk().map(|magic| u32::from_be_bytes(*magic)) else {
            return Ok((0, ReplyEvent::NeedBytes(SIMPLE_REPLY_BYTES)));
        };
        if magic == SIMPLE_REPLY_MAGIC && self.style != HeaderStyle::Extended {
            return self.simple_reply(bytes);
        }
        // Checked before the rest of the header, which may never arrive.
        let is_right = match self.style {
            HeaderStyle::Simple => false,
            HeaderStyle::Structured => magic == STRUCTURED_REPLY_MAGIC,
            HeaderStyle::Extended => magic == EXTENDED_REPLY_MAGIC,
        };
        if !is_right {
            return Err(wrong_magic(magic));
        }
        let header_bytes = ChunkHeader::size_bytes(self.style);
        let Some((header, payload)) = bytes.split_at_checked(header_bytes) else {
            return Ok((0, ReplyEvent::NeedBytes(header_bytes)));
        };
        let header = ChunkHeader::decode(header, self.style).ok_or_else(|| wrong_magic(magic))?;
        let (payload_bytes, event) = self.chunk(&header, payload)?;
        match event {
            ReplyEvent::NeedBytes(payload_bytes) => Ok((0, ReplyEvent::NeedBytes(header_bytes + payload_bytes))),
            event => Ok((header_bytes + payload_bytes, event)),
        }
    }

    /// Completes a request after the data of its last chunk.
    pub(super) fn complete(&mut self, cookie: u64) -> Result<Answer, Violation> {
        let one = self
            .outstanding
            .remove(&cookie)
            .ok_or(Violation::UnknownCookie { cookie })?;
        self.payload_bytes -= one.command.payload_bytes();
        let Request { offset, length, .. } = one.command.request;
        if let Some(failure) = one.failure {
            return Ok(Answer {
                ticket: one.ticket,
                command: one.command,
                result: Err(failure),
            });
        }
        let received = one.coverage.length();
        if one.command.kind == CommandKind::READ && received != length {
            return Err(Violation::Incomplete {
                offset,
                length,
                received,
            });
        }
        if one.command.kind == CommandKind::BLOCK_STATUS {
            status::check_complete(&one.statuses, &self.contexts, offset)?;
        }
        Ok(Answer {
            ticket: one.ticket,
            command: one.command,
            result: Ok(one.statuses),
        })
    }

    fn simple_reply(&mut self, bytes: &[u8]) -> Result<(usize, ReplyEvent), Violation> {
        let Some(header) = bytes.get(..SIMPLE_REPLY_BYTES) else {
            return Ok((0, ReplyEvent::NeedBytes(SIMPLE_REPLY_BYTES)));
        };
        let mut fields = Fields(&header[4..]);
        let (number, cookie) = (fields.u32(), fields.u64());
        let one = find(&mut self.outstanding, cookie)?;
        let Request { offset, length, .. } = one.command.request;
        let carries_payload = matches!(one.command.kind, CommandKind::READ | CommandKind::BLOCK_STATUS);
        if self.style == HeaderStyle::Structured
            && (one.command.kind == CommandKind::READ || carries_payload && number == 0)
        {
            let request = one.command.name();
            return Err(Violation::SimpleReply { request });
        }
        if number != 0 {
            one.failure = Some(ServerFailure {
                number,
                message: String::new(),
            });
        } else if one.command.kind == CommandKind::READ {
            one.cover(offset, length)?;
            let event = ReplyEvent::Data {
                cookie,
                ticket: one.ticket,
                offset,
                length,
                position: ChunkPosition::Last,
            };
            return Ok((SIMPLE_REPLY_BYTES, event));
        }
        Ok((SIMPLE_REPLY_BYTES, ReplyEvent::Answer(self.complete(cookie)?)))
    }

    /// Parses a chunk; `payload` are the first bytes of its payload. Returns the number of consumed bytes and the
    /// event.
    fn chunk(&mut self, header: &ChunkHeader, payload: &[u8]) -> Result<(usize, ReplyEvent), Violation> {
        let cookie = header.cookie;
        let (style, size_bytes) = (self.style, self.size_bytes);
        let one = find(&mut self.outstanding, cookie)?;
        let request = one.command.request;
        if style == HeaderStyle::Extended && header.offset != request.offset {
            return Err(Violation::WrongOffset {
                expected: request.offset,
                found: header.offset,
            });
        }
        let needed = one.check_header(header, style)?;
        let Some(payload) = payload.get(..needed) else {
            return Ok((0, ReplyEvent::NeedBytes(needed)));
        };
        let position = if header.flags.has(ReplyFlags::DONE) {
            ChunkPosition::Last
        } else {
            ChunkPosition::More
        };
        let mut fields = Fields(payload);
        let mut zeroes = None;
        match header.kind {
            ChunkKind::NONE => {}
            ChunkKind::OFFSET_DATA => {
                let (offset, length) = (fields.u64(), header.length - needed as u64);
                one.cover(offset, length)?;
                let event = ReplyEvent::Data {
                    cookie,
                    ticket: one.ticket,
                    offset,
                    length,
                    position,
                };
                return Ok((needed, event));
            }
            ChunkKind::OFFSET_HOLE => {
                let (offset, length) = (fields.u64(), u64::from(fields.u32()));
                one.cover(offset, length)?;
                zeroes = Some((one.ticket, offset, length));
            }
            ChunkKind::BLOCK_STATUS | ChunkKind::BLOCK_STATUS_EXT => {
                let query = Query {
                    offset: request.offset,
                    length: request.length,
                    end: size_bytes,
                };
                let status = Status::decode(payload, style, query)?;
                one.add_status(status, &self.contexts)?;
            }
            kind => one.add_error(kind, payload)?,
        }
        let answer = match position {
            ChunkPosition::Last => Some(self.complete(cookie)?),
            ChunkPosition::More => None,
        };
        let event = match (zeroes, answer) {
            (Some((ticket, offset, length)), answer) => ReplyEvent::Zeroes {
                ticket,
                offset,
                length,
                answer,
            },
            (None, Some(answer)) => ReplyEvent::Answer(answer),
            (None, None) => ReplyEvent::Continue,
        };
        Ok((needed, event))
    }
}

impl Outstanding {
    /// Checks kind and length of a chunk; returns how many bytes of the payload are needed to parse it.
    fn check_header(&self, header: &ChunkHeader, style: HeaderStyle) -> Result<usize, Violation> {
        let length = header.length;
        let size = |what, allowed| {
            Err(Violation::Size {
                what,
                found: length,
                allowed,
            })
        };
        let whole = usize::try_from(length).unwrap_or(usize::MAX);
        match (header.kind, self.command.kind) {
            (ChunkKind::NONE, _) if length != 0 => size("the length of a chunk without content", "0"),
            (ChunkKind::NONE, _) if !header.flags.has(ReplyFlags::DONE) => {
                let what = "the end of the reply after a chunk without content";
                Err(Violation::Missing { what })
            }
            (ChunkKind::NONE, _) => Ok(0),
            (ChunkKind::OFFSET_DATA, CommandKind::READ) => {
                // Whether the hole lies inside the request is checked when its offset is known.
                if length < 9 || length - 8 > self.command.request.length {
                    return size(
                        "the length of a chunk of data",
                        "8 more than some of the bytes state_with_request for",
                    );
                }
                Ok(8)
            }
            (ChunkKind::OFFSET_HOLE, CommandKind::READ) if length == 12 => Ok(12),
            (ChunkKind::OFFSET_HOLE, CommandKind::READ) => size("the length of a chunk that is a hole", "12"),
            (ChunkKind::BLOCK_STATUS, CommandKind::BLOCK_STATUS) if style == HeaderStyle::Structured => {
                status::check_length(length, style).map(|()| whole)
            }
            (ChunkKind::BLOCK_STATUS_EXT, CommandKind::BLOCK_STATUS) if style == HeaderStyle::Extended => {
                status::check_length(length, style).map(|()| whole)
            }
            (kind, _) if kind.is_error() => {
                let least = if kind == ChunkKind::ERROR_OFFSET { 14 } else { 6 };
                if !(least..=ERROR_BYTES_MAX).contains(&length) {
                    return size("the length of an error chunk", "that of a number and a message");
                }
                if self.error_count == ERROR_COUNT_MAX {
                    return Err(Violation::Size {
                        what: "the number of error chunks of one reply",
                        found: u64::from(self.error_count) + 1,
                        allowed: "at most 1024",
                    });
                }
                Ok(whole)
            }
            (kind, _) => Err(Violation::WrongChunk {
                request: self.command.name(),
                kind: kind.0,
            }),
        }
    }

    /// Records that `length` bytes at `offset` have arrived.
    fn cover(&mut self, offset: u64, length: u64) -> Result<(), Violation> {
        let request = self.command.request;
        let end = offset.checked_add(length);
        let is_inside =
            length > 0 && offset >= request.offset && end.is_some_and(|end| end <= request.offset + request.length);
        if !is_inside {
            return Err(Violation::Outside {
                offset,
                length,
                request_offset: request.offset,
                request_length: request.length,
            });
        }
        self.coverage
            .add(offset..offset + length)
            .map_err(|refusal| match refusal {
                CoverageError::Overlap => Violation::Overlap { offset, length },
                CoverageError::Fragmented => Violation::Size {
                    what: "the number of gaps in its reply to a read",
                    found: request.length,
                    allowed: "less than 1024",
                },
            })
    }

    fn add_status(&mut self, status: Status, contexts: &[MetaContext]) -> Result<(), Violation> {
        let offset = self.command.request.offset;
        if !contexts.iter().any(|context| context.id == status.context_id) {
            let what = "the number of a metadata context that was not granted";
            return Err(Violation::Extents { offset, what });
        }
        if self.statuses.iter().any(|known| known.context_id == status.context_id) {
            let what = "the same metadata context twice";
            return Err(Violation::Extents { offset, what });
        }
        self.statuses.push(status);
        Ok(())
    }

    fn add_error(&mut self, kind: ChunkKind, payload: &[u8]) -> Result<(), Violation> {
        self.error_count += 1;
        let mut fields = Fields(payload);
        let (number, message_length) = (fields.u32(), fields.u16());
        let tail_bytes = if kind == ChunkKind::ERROR_OFFSET { 8 } else { 0 };
        let Some((message, tail)) = fields
            .0
            .split_at_checked(usize::from(message_length))
            .filter(|(_, tail)| tail.len() >= tail_bytes)
        else {
            return Err(Violation::Size {
                what: "the length of an error's message",
                found: u64::from(message_length),
                allowed: "inside its chunk",
            });
        };
        if number == 0 {
            let what = "the number of an error";
            return Err(Violation::Missing { what });
        }
        let request = self.command.request;
        if kind == ChunkKind::ERROR_OFFSET {
            let offset = Fields(tail).u64();
            if offset < request.offset || offset - request.offset > request.length {
                return Err(Violation::Outside {
                    offset,
                    length: 0,
                    request_offset: request.offset,
                    request_length: request.length,
                });
            }
        }
        // The first error is the cause; later errors are often its effects.
        self.failure.get_or_insert_with(|| ServerFailure {
            number,
            message: printable(message),
        });
        Ok(())
    }
}

fn find(outstanding: &mut HashMap<u64, Outstanding>, cookie: u64) -> Result<&mut Outstanding, Violation> {
    outstanding.get_mut(&cookie).ok_or(Violation::UnknownCookie { cookie })
}

fn wrong_magic(found: u32) -> Violation {
    Violation::Magic {
        what: "a reply",
        found: u64::from(found),
    }
}

#[cfg(test)]
mod tests {
    use holdfast_block::{Request, RequestKind};

    use super::super::command::ClientCommand;
    use super::super::export::MetaContext;
    use super::super::status::Descriptor;
    use super::super::violation::Violation;
    use super::{Answer, ChunkPosition, ReplyEvent, Ticket, TransmissionState};
    use crate::nbd::wire::{CommandFlags, HeaderStyle};

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        digits.chunks(2).map(byte).collect()
    }

    /// A state for an export of 1 MiB with one request in flight: cookie 1, 0x200 bytes at 0x1000.
    fn state_with_request(style: HeaderStyle, kind: RequestKind) -> TransmissionState {
        let contexts = vec![
            MetaContext {
                id: 5,
                name: "base:allocation".to_owned(),
            },
            MetaContext {
                id: 6,
                name: "qemu:dirty-bitmap:b".to_owned(),
            },
        ];
        let mut transmission = TransmissionState::new(style, contexts, 1 << 20);
        transmission.ask(ClientCommand::of(Request::new(kind, 0x1000, 0x200)), Ticket::default());
        transmission
    }

    /// Parses all bytes of `hex`; zeroes of the same length stand for data.
    fn receive_all(transmission: &mut TransmissionState, hex: &str) -> Result<Vec<ReplyEvent>, Violation> {
        let received = bytes(hex);
        let (mut at, mut events) = (0, Vec::new());
        while at < received.len() {
            let (consumed, event) = transmission.receive(&received[at..])?;
            at += consumed;
            match event {
                ReplyEvent::NeedBytes(count) => {
                    assert!(count > received.len() - at, "more is wanted than is missing");
                    events.push(ReplyEvent::NeedBytes(count));
                    break;
                }
                ReplyEvent::Data {
                    cookie,
                    length,
                    position,
                    ..
                } => {
                    at += usize::try_from(length).unwrap();
                    events.push(event);
                    if position == ChunkPosition::Last {
                        events.push(ReplyEvent::Answer(transmission.complete(cookie)?));
                    }
                }
                event => events.push(event),
            }
        }
        Ok(events)
    }

    fn last_answer(events: Vec<ReplyEvent>) -> Answer {
        match events.into_iter().last() {
            Some(
                ReplyEvent::Answer(answer)
                | ReplyEvent::Zeroes {
                    answer: Some(answer), ..
                },
            ) => answer,
            other => panic!("no answer but {other:?}"),
        }
    }

    #[test]
    fn simple_replies() {
        let mut transmission = state_with_request(HeaderStyle::Simple, RequestKind::Read);
        let data = "00".repeat(0x200);
        let events = receive_all(&mut transmission, &format!("67446698 00000000 0000000000000001 {data}")).unwrap();
        assert!(matches!(
            events[0],
            ReplyEvent::Data {
                offset: 0x1000,
                length: 0x200,
                position: ChunkPosition::Last,
                ..
            }
        ));
        assert_eq!(last_answer(events).result, Ok(vec![]));
        assert_eq!(transmission.payload_bytes(), 0);
        let again = receive_all(&mut transmission, "67446698 00000000 0000000000000001");
        assert_eq!(again, Err(Violation::UnknownCookie { cookie: 1 }));

        let mut transmission = state_with_request(HeaderStyle::Structured, RequestKind::Write);
        let answer = last_answer(receive_all(&mut transmission, "67446698 0000001c 0000000000000001").unwrap());
        assert_eq!(answer.result.unwrap_err().number, 28);

        for part in ["67446698 000000", "67446698 00000000 00000000000000"] {
            let mut transmission = state_with_request(HeaderStyle::Structured, RequestKind::Write);
            assert_eq!(
                receive_all(&mut transmission, part),
                Ok(vec![ReplyEvent::NeedBytes(16)])
            );
        }
    }

    #[test]
    fn chunks_of_data_and_holes_in_any_order() {
        let mut transmission = state_with_request(HeaderStyle::Structured, RequestKind::Read);
        let data = format!(
            "668e33ef 0000 0001 0000000000000001 00000088 0000000000001180 {}",
            "00".repeat(0x80)
        );
        let hole = "668e33ef 0000 0002 0000000000000001 0000000c 0000000000001000 00000180";
        let end = "668e33ef 0001 0000 0000000000000001 00000000";
        let events = receive_all(&mut transmission, &[&data, hole, end].concat()).unwrap();
        assert!(matches!(
            events[0],
            ReplyEvent::Data {
                offset: 0x1180,
                length: 0x80,
                position: ChunkPosition::More,
                ..
            }
        ));
        assert!(matches!(
            events[1],
            ReplyEvent::Zeroes {
                offset: 0x1000,
                length: 0x180,
                answer: None,
                ..
            }
        ));
        assert_eq!(last_answer(events).result, Ok(vec![]));

        let mut transmission = state_with_request(HeaderStyle::Extended, RequestKind::Read);
        let hole = "6e8a278c 0001 0002 0000000000000001 0000000000001000 000000000000000c 0000000000001000 00000200";
        assert_eq!(
            last_answer(receive_all(&mut transmission, hole).unwrap()).result,
            Ok(vec![])
        );
    }

    #[test]
    fn errors_with_words() {
        let mut transmission = state_with_request(HeaderStyle::Structured, RequestKind::Read);
        let first = "668e33ef 0000 8002 0000000000000001 00000010 00000005 0002 6f1b 0000000000001010";
        let unknown_kind = "668e33ef 0001 8077 0000000000000001 00000007 00000016 0000 ff";
        let failure = last_answer(receive_all(&mut transmission, &[first, unknown_kind].concat()).unwrap())
            .result
            .unwrap_err();
        assert_eq!((failure.number, failure.message.as_str()), (5, "o\u{fffd}"));
    }

    #[test]
    fn block_status_of_all_contexts() {
        let mut transmission = state_with_request(HeaderStyle::Structured, RequestKind::Extents);
        let first = "668e33ef 0000 0005 0000000000000001 0000000c 00000006 00000100 00000001";
        let second = "668e33ef 0001 0005 0000000000000001 00000014 00000005 00000100 00000000 fffff000 00000003";
        let statuses = last_answer(receive_all(&mut transmission, &[first, second].concat()).unwrap())
            .result
            .unwrap();
        assert_eq!((statuses[0].context_id, statuses[1].context_id), (6, 5));
        let expected = [
            Descriptor {
                length: 0x100,
                flags: 0,
            },
            // The status is truncated at the end of the export.
            Descriptor {
                length: 0xf_ef00,
                flags: 3,
            },
        ];
        assert_eq!(statuses[1].descriptors, expected);

        let mut transmission = state_with_request(HeaderStyle::Extended, RequestKind::Extents);
        let chunk = |context: u32, flags: u16, length: u64| {
            format!(
                "6e8a278c {flags:04x} 0006 0000000000000001 0000000000001000 0000000000000018 \
                 {context:08x} 00000001 {length:016x} 8000000000000001"
            )
        };
        let received = receive_all(&mut transmission, &[chunk(5, 0, 1 << 40), chunk(6, 1, 0x200)].concat()).unwrap();
        let statuses = last_answer(received).result.unwrap();
        let expected = Descriptor {
            length: (1 << 20) - 0x1000,
            flags: 0x8000_0000_0000_0001,
        };
        assert_eq!(statuses[0].descriptors, [expected]);
    }

    #[test]
    fn writes_say_that_they_carry_data_where_headers_are_extended() {
        let request = Request::new(RequestKind::Write, 0, 512);
        let flags_of = |style| {
            TransmissionState::new(style, vec![], 4096)
                .ask(ClientCommand::of(request), Ticket::default())
                .flags
        };
        assert_eq!(flags_of(HeaderStyle::Structured), CommandFlags::default());
        assert_eq!(flags_of(HeaderStyle::Extended), CommandFlags::PAYLOAD_LENGTH);
    }

    #[test]
    fn hostile_replies_to_reads_are_errors() {
        use Violation as V;
        let of = |hex: &str| {
            receive_all(&mut state_with_request(HeaderStyle::Structured, RequestKind::Read), hex).unwrap_err()
        };
        assert!(matches!(of("12345678 0000"), V::Magic { .. }));
        assert!(matches!(
            of("67446698 00000000 0000000000000001"),
            V::SimpleReply { .. }
        ));
        assert!(matches!(
            of("67446698 00000005 0000000000000001"),
            V::SimpleReply { .. }
        ));
        let chunk = |tail: &str| of(&format!("668e33ef {tail}"));
        assert!(matches!(
            chunk("0001 0000 0000000000000000 00000000"),
            V::UnknownCookie { cookie: 0 }
        ));
        // A successful reply without data.
        assert!(matches!(
            chunk("0001 0000 0000000000000001 00000000"),
            V::Incomplete { received: 0, .. }
        ));
        assert!(matches!(
            chunk("0000 0000 0000000000000001 00000000"),
            V::Missing { .. }
        ));
        assert!(matches!(
            chunk("0001 0000 0000000000000001 00000004 00000000"),
            V::Size { .. }
        ));
        // No data, too much data, data before and after the request, and offsets that overflow.
        assert!(matches!(
            chunk("0000 0001 0000000000000001 00000008 0000000000001000"),
            V::Size { .. }
        ));
        assert!(matches!(
            chunk("0000 0001 0000000000000001 ffffffff 0000000000001000"),
            V::Size { .. }
        ));
        assert!(matches!(
            chunk("0000 0001 0000000000000001 00000009 0000000000000fff 00"),
            V::Outside { .. }
        ));
        assert!(matches!(
            chunk("0000 0001 0000000000000001 00000009 0000000000001200 00"),
            V::Outside { .. }
        ));
        assert!(matches!(
            chunk("0000 0001 0000000000000001 0000000a ffffffffffffffff 0000"),
            V::Outside { .. }
        ));
        // Holes of no bytes, holes of another length, and holes that are too long.
        assert!(matches!(
            chunk("0000 0002 0000000000000001 0000000c 0000000000001000 00000000"),
            V::Outside { .. }
        ));
        assert!(matches!(
            chunk("0000 0002 0000000000000001 0000000d 0000000000001000 00000001"),
            V::Size { .. }
        ));
        assert!(matches!(
            chunk("0000 0002 0000000000000001 0000000c 0000000000001000 00000201"),
            V::Outside { .. }
        ));
        let hole = "0000 0002 0000000000000001 0000000c 0000000000001000 00000002";
        let overlap = "0000 0002 0000000000000001 0000000c 0000000000001001 00000002";
        assert!(matches!(
            of(&format!("668e33ef {hole} 668e33ef {overlap}")),
            V::Overlap { .. }
        ));
        // Chunks of kinds that do not fit the request, or do not exist.
        let status = "0001 0005 0000000000000001 0000000c 00000005 00000100 00000001";
        assert!(matches!(chunk(status), V::WrongChunk { kind: 5, .. }));
        assert!(matches!(
            chunk("0001 0077 0000000000000001 00000000"),
            V::WrongChunk { kind: 0x77, .. }
        ));
    }

    #[test]
    fn hostile_errors_are_errors() {
        use Violation as V;
        let of = |hex: &str| {
            let hex = format!("668e33ef {hex}");
            receive_all(
                &mut state_with_request(HeaderStyle::Structured, RequestKind::Read),
                &hex,
            )
            .unwrap_err()
        };
        assert!(matches!(
            of("0001 8001 0000000000000001 00000005 0000000500"),
            V::Size { .. }
        ));
        assert!(matches!(
            of("0001 8002 0000000000000001 0000000d 00000005000000000000000010"),
            V::Size { .. }
        ));
        assert!(matches!(
            of("0001 8001 0000000000000001 00000006 00000000 0000"),
            V::Missing { .. }
        ));
        assert!(matches!(
            of("0001 8001 0000000000000001 00000006 00000005 0001"),
            V::Size { .. }
        ));
        assert!(matches!(
            of("0001 8001 0000000000000001 00002000 00000005 0001"),
            V::Size { .. }
        ));
        assert!(matches!(
            of("0001 8002 0000000000000001 0000000e 00000005 0000 0000000000001201"),
            V::Outside { .. }
        ));
        let endless = "668e33ef 0000 8001 0000000000000001 00000006 00000005 0000".repeat(1025);
        let received = receive_all(
            &mut state_with_request(HeaderStyle::Structured, RequestKind::Write),
            &endless,
        );
        assert!(matches!(received, Err(V::Size { .. })));
    }

    #[test]
    fn hostile_block_status_is_an_error() {
        use Violation as V;
        let of = |hex: &str| {
            let hex = format!("668e33ef {hex}");
            receive_all(
                &mut state_with_request(HeaderStyle::Structured, RequestKind::Extents),
                &hex,
            )
            .unwrap_err()
        };
        assert!(matches!(
            of("0001 0000 0000000000000001 00000000"),
            V::ContextForgotten { .. }
        ));
        let first_only = of("0001 0005 0000000000000001 0000000c 00000005 00000100 00000001");
        let named = "its block status at offset 4096 omits the metadata context \"qemu:dirty-bitmap:b\"";
        assert_eq!(first_only.to_string(), named);
        assert!(matches!(
            of("0001 0005 0000000000000001 00000004 00000005"),
            V::Size { .. }
        ));
        assert!(matches!(
            of("0001 0005 0000000000000001 0000000d 00000005 00000100 00000001 00"),
            V::Size { .. }
        ));
        assert!(matches!(
            of("0001 0005 0000000000000001 0080000c 00000005"),
            V::Size { .. }
        ));
        assert!(matches!(
            of("0001 0006 0000000000000001 00000018 00000005"),
            V::WrongChunk { .. }
        ));
        assert!(matches!(
            of("0001 0001 0000000000000001 00000018 0000000000001000"),
            V::WrongChunk { .. }
        ));
        let extents = |hex: &str| matches!(of(hex), V::Extents { .. });
        assert!(
            extents("0001 0005 0000000000000001 0000000c 00000007 00000100 00000001"),
            "unknown context"
        );
        assert!(
            extents("0001 0005 0000000000000001 0000000c 00000005 00000000 00000001"),
            "no bytes"
        );
        let beyond = "0001 0005 0000000000000001 00000014 00000005 00000200 00000001 00000001 00000000";
        assert!(extents(beyond), "past the query");
        let twice = "0000 0005 0000000000000001 0000000c 00000005 00000100 00000001";
        assert!(extents(&format!("{twice} 668e33ef {twice}")));
        let of_extended = |tail: &str| {
            let hex = format!("6e8a278c 0001 0006 0000000000000001 {tail}");
            receive_all(
                &mut state_with_request(HeaderStyle::Extended, RequestKind::Extents),
                &hex,
            )
            .unwrap_err()
        };
        let wrong_offset = "0000000000001001 0000000000000018 00000005 00000001 0000000000000001 0000000000000000";
        assert!(matches!(of_extended(wrong_offset), V::WrongOffset { .. }));
        let count = "0000000000001000 0000000000000018 00000005 00000002 0000000000000001 0000000000000000";
        assert!(matches!(of_extended(count), V::Extents { .. }));
        let overflow = "0000000000001000 0000000000000028 00000005 00000002 \
                        0000000000000001 0000000000000000 ffffffffffffffff 0000000000000000";
        assert!(matches!(of_extended(overflow), V::Extents { .. }));
        assert!(matches!(
            of_extended("0000000000001000 ffffffffffffffff"),
            V::Size { .. }
        ));
        let simple = receive_all(
            &mut state_with_request(HeaderStyle::Extended, RequestKind::Extents),
            "67446698 00000000 0000000000000001",
        );
        assert!(matches!(simple, Err(V::Magic { .. })));
    }
}
