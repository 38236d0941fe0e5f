//! The server's parsers for fuzzing; see [`holdfast_block::hostile`].

use std::sync::Arc;

use holdfast_block::hostile::Outcome;
use holdfast_block::{DirtyBitmap, ManualClock, MemoryDevice, to_usize};

use super::execute::Executor;
use super::export::{Export, FixedExports};
use super::handshake::{NbdSession, Progress, ServerHandshake, ServerState, TlsMode};
use super::reply::{ReplyBuffer, ReplyTarget};
use super::request::{RequestError, Terms, Verdict, payload_bytes, validate};
use crate::nbd::wire::{
    ChunkHeader, ChunkKind, CommandFlags, CommandKind, Fields, HeaderStyle, OPTION_MAGIC, OptionKind, ReplyFlags,
    RequestHeader, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC,
};
use crate::server::export_device::ExportDevice;

const SIZE_BYTES: u64 = 100_001;

fn export() -> Export {
    let mut bitmap = DirtyBitmap::new(SIZE_BYTES, 4096).expect("a small bitmap");
    bitmap.set(5000..9000);
    let device = MemoryDevice::from_bytes(&vec![1; to_usize(SIZE_BYTES)]);
    Export::new("disk", ExportDevice::Writable(Arc::new(device))).with_bitmap("old", Arc::new(bitmap))
}

/// The input of a handshake. The first byte chooses whether TLS is required.
pub(crate) fn handshake(bytes: &[u8]) -> Outcome {
    let (mode, bytes) = match bytes.split_first() {
        Some((first, rest)) if first % 8 == 1 => (TlsMode::Required, rest),
        Some((first, rest)) if first % 8 == 2 => (TlsMode::Allowed, rest),
        Some((_, rest)) => (TlsMode::Off, rest),
        None => return Outcome::Refused,
    };
    let whole = drive(mode, bytes, bytes.len());
    let piecemeal = drive(mode, bytes, 7);
    assert_eq!(whole, piecemeal, "it depends on how the bytes arrive");
    if whole.0 { Outcome::Decoded } else { Outcome::Refused }
}

/// Runs a handshake on `bytes`, which arrive in pieces. Returns whether an export was entered, and all output.
fn drive(mode: TlsMode, bytes: &[u8], piece_length: usize) -> (bool, Vec<u8>) {
    let exports = FixedExports::new([export()]);
    let server = ServerState {
        exports: &exports,
        is_stopping: false,
        on_error: &|_, _| unreachable!("memory can be opened"),
    };
    let mut handshake = ServerHandshake::new(mode);
    let (mut start, mut end) = (0, 0);
    let mut output = Vec::new();
    loop {
        let before = output.len();
        let (used, progress) = handshake.step(&bytes[start..end], server, &mut output);
        assert!(used <= end - start, "it used more than there was");
        assert!(output.len() - before < 64 << 10, "the answer is out of proportion");
        start += used;
        match progress {
            Progress::NeedInput if end == bytes.len() => return (false, output),
            Progress::NeedInput => end = (end + piece_length).min(bytes.len()),
            Progress::Continue => assert!(used > 0, "it goes round in circles"),
            Progress::StartTls => handshake.encrypted(),
            Progress::Enter(_) => return (true, output),
            Progress::End(_) => return (false, output),
        }
    }
}

/// A stream of requests. The first byte chooses the style of headers.
pub(crate) fn requests(bytes: &[u8]) -> Outcome {
    let Some((first, mut bytes)) = bytes.split_first() else {
        return Outcome::Refused;
    };
    let style = match first % 3 {
        0 => HeaderStyle::Simple,
        1 => HeaderStyle::Structured,
        _ => HeaderStyle::Extended,
    };
    let export = export();
    let contexts = if style == HeaderStyle::Simple {
        vec![]
    } else {
        vec![0, 1]
    };
    let terms = Terms {
        style,
        flags: export.flags(style),
        size_bytes: SIZE_BYTES,
        contexts,
    };
    let session = NbdSession {
        export: Arc::new(export),
        terms: terms.clone(),
    };
    let executor = Executor::new(session, Arc::new(ManualClock::new()));
    let mut replies = ReplyBuffer::default();
    while !bytes.is_empty() {
        let Some((header, rest)) = bytes.split_at_checked(RequestHeader::size_bytes(style)) else {
            return Outcome::Refused;
        };
        let Some(header) = RequestHeader::decode(header, style) else {
            return Outcome::Refused;
        };
        let Some((payload, rest)) = rest.split_at_checked(to_usize(payload_bytes(&header, style))) else {
            return Outcome::Refused;
        };
        bytes = rest;
        replies.clear();
        match validate(&header, &terms) {
            Verdict::Accept(request) => {
                let done = executor.execute(&request, payload, &mut replies, None);
                assert!(
                    done.is_ok(),
                    "memory has no errors, and what was judged is in bounds: {done:?}"
                );
            }
            Verdict::Refuse(RequestError { error, reason }) => {
                let address = ReplyTarget {
                    cookie: header.cookie,
                    offset: header.offset,
                };
                replies.error(style, address, error, reason);
            }
            Verdict::Disconnect => return Outcome::Decoded,
            Verdict::End(_) => return Outcome::Refused,
        }
        check_reply(replies.as_slice(), &header, style);
    }
    assert_eq!(executor.session.export.device().reader().size_bytes(), SIZE_BYTES);
    Outcome::Decoded
}

/// Checks that a client can parse the reply to a request.
fn check_reply(mut reply: &[u8], request: &RequestHeader, style: HeaderStyle) {
    if style == HeaderStyle::Simple {
        let mut fields = Fields(reply);
        assert_eq!(fields.u32(), SIMPLE_REPLY_MAGIC);
        let is_read = fields.u32() == 0 && request.kind == CommandKind::READ;
        assert_eq!(fields.u64(), request.cookie);
        let data = if is_read { to_usize(request.length) } else { 0 };
        assert_eq!(reply.len(), SIMPLE_REPLY_BYTES + data);
        return;
    }
    let mut covered = 0;
    let mut error = false;
    loop {
        let (header, rest) = reply.split_at(ChunkHeader::size_bytes(style));
        let header = ChunkHeader::decode(header, style).expect("a chunk");
        assert_eq!(header.cookie, request.cookie);
        let (payload, rest) = rest.split_at(to_usize(header.length));
        covered += match header.kind {
            ChunkKind::OFFSET_DATA => header.length - 8,
            ChunkKind::OFFSET_HOLE => u64::from(Fields(&payload[8..]).u32()),
            _ => 0,
        };
        error |= header.kind.is_error();
        reply = rest;
        if header.flags.has(ReplyFlags::DONE) {
            break;
        }
    }
    assert!(reply.is_empty(), "bytes follow the last chunk");
    assert!(
        error || request.kind != CommandKind::READ || covered == request.length,
        "{covered} of {} bytes came",
        request.length
    );
}

/// Valid bytes: name of the parser, name of the seed, bytes.
pub(crate) fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let mut seeds = Vec::new();
    for (name, style) in [
        ("simple", HeaderStyle::Simple),
        ("structured", HeaderStyle::Structured),
        ("extended", HeaderStyle::Extended),
    ] {
        seeds.push(("nbd_server_handshake", name, handshake_seed(style)));
        seeds.push(("nbd_server_requests", name, requests_seed(style)));
    }
    seeds
}

fn handshake_seed(style: HeaderStyle) -> Vec<u8> {
    let mut bytes = vec![0];
    bytes.extend(3_u32.to_be_bytes());
    let mut option = |kind: OptionKind, data: &[u8]| {
        bytes.extend(OPTION_MAGIC.to_be_bytes());
        bytes.extend(kind.0.to_be_bytes());
        bytes.extend(u32::try_from(data.len()).expect("a short option").to_be_bytes());
        bytes.extend(data);
    };
    option(OptionKind::LIST, &[]);
    option(OptionKind::INFO, b"\0\0\0\x04disk\0\x03\0\0\0\x01\0\x03");
    match style {
        HeaderStyle::Simple => option(OptionKind::EXPORT_NAME, b"disk"),
        HeaderStyle::Structured => {
            option(OptionKind::STRUCTURED_REPLY, &[]);
            option(
                OptionKind::LIST_META_CONTEXT,
                b"\0\0\0\x04disk\0\0\0\x01\0\0\0\x05qemu:",
            );
            option(
                OptionKind::SET_META_CONTEXT,
                b"\0\0\0\x04disk\0\0\0\x01\0\0\0\x0fbase:allocation",
            );
            option(OptionKind::GO, b"\0\0\0\x04disk\0\0");
        }
        HeaderStyle::Extended => {
            option(OptionKind::STARTTLS, &[]);
            option(OptionKind::EXTENDED_HEADERS, &[]);
            option(OptionKind::GO, b"\0\0\0\0\0\0");
        }
    }
    bytes
}

fn requests_seed(style: HeaderStyle) -> Vec<u8> {
    let mut bytes = vec![match style {
        HeaderStyle::Simple => 0,
        HeaderStyle::Structured => 1,
        HeaderStyle::Extended => 2,
    }];
    let mut request = |kind: CommandKind, flags: CommandFlags, offset: u64, length: u64, payload: &[u8]| {
        let flags = if style == HeaderStyle::Extended && !payload.is_empty() {
            flags | CommandFlags::PAYLOAD_LENGTH
        } else {
            flags
        };
        let header = RequestHeader {
            flags,
            kind,
            cookie: length,
            offset,
            length,
        };
        header.encode(style, &mut bytes);
        bytes.extend(payload);
    };
    let none = CommandFlags::default();
    request(CommandKind::READ, none, 0, SIZE_BYTES, &[]);
    request(CommandKind::WRITE, CommandFlags::FUA, 4095, 20, &[7; 20]);
    request(CommandKind::WRITE_ZEROES, CommandFlags::NO_HOLE, 100, 9000, &[]);
    request(CommandKind::WRITE_ZEROES, CommandFlags::FAST_ZERO, 100, 9000, &[]);
    request(CommandKind::TRIM, none, 8192, 40_000, &[]);
    request(CommandKind::CACHE, none, 0, 5, &[]);
    request(CommandKind::BLOCK_STATUS, none, 1, 99_000, &[]);
    request(CommandKind::BLOCK_STATUS, CommandFlags::REQUEST_ONE, 1, 99_000, &[]);
    if style == HeaderStyle::Extended {
        let filter = [99_000_u64.to_be_bytes().as_slice(), &1_u32.to_be_bytes()].concat();
        request(CommandKind::BLOCK_STATUS, none, 1, 12, &filter);
    }
    request(CommandKind::FLUSH, none, 0, 0, &[]);
    request(CommandKind::READ, none, 4000, 70_000, &[]);
    bytes
}
