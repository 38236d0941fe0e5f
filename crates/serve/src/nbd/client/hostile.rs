//! The client's parsers for fuzzing; see [`holdfast_block::hostile`].
//!
//! The first byte of the input chooses the request; the rest is what the server sends.

use holdfast_block::hostile::{Outcome, Parser};
use holdfast_block::{Request, RequestKind};

use super::command::ClientCommand;
use super::export::MetaContext;
use super::handshake::{ClientHandshake, Goal};
use super::read_ahead::{StatusCache, Visit};
use super::transmission::{ChunkPosition, ReplyEvent, Ticket, TransmissionState};
use super::{NbdUri, status::Status};
use crate::nbd::wire::{
    ChunkHeader, ChunkKind, GREETING_MAGIC, HeaderStyle, OPTION_MAGIC, OPTION_REPLY_MAGIC, ReplyFlags,
    SIMPLE_REPLY_MAGIC,
};

/// The parsers of the client.
pub const PARSERS: &[Parser] = &[
    Parser {
        name: "nbd_handshake",
        feed: handshake,
    },
    Parser {
        name: "nbd_replies",
        feed: replies,
    },
    Parser {
        name: "nbd_uri",
        feed: uri,
    },
];

const SIZE_BYTES: u64 = 1 << 20;
const GOALS: u8 = 3;

/// The handshake. The input is accepted if the handshake completes.
pub fn handshake(bytes: &[u8]) -> Outcome {
    let Some((&choice, mut bytes)) = bytes.split_first() else {
        return Outcome::Refused;
    };
    let goal = match choice % GOALS {
        0 => Goal::Transmit {
            contexts: vec!["base:allocation".to_owned()],
        },
        1 => Goal::List,
        _ => Goal::Describe,
    };
    let mut handshake = ClientHandshake::new("hostile".into(), "disk", goal);
    loop {
        drop(handshake.take_output());
        let wanted = handshake.wanted_bytes();
        if wanted == 0 {
            let outcome = handshake.into_outcome();
            let size_bytes = outcome.export.map_or(0, |export| export.size_bytes());
            assert!(i64::try_from(size_bytes).is_ok(), "sizes are checked");
            return Outcome::Decoded;
        }
        let Some((now, later)) = bytes.split_at_checked(wanted) else {
            return Outcome::Refused;
        };
        if handshake.feed(now).is_err() {
            return Outcome::Refused;
        }
        bytes = later;
    }
}

/// Replies to one request of each kind. The input is accepted if all of them complete without a protocol violation.
pub fn replies(bytes: &[u8]) -> Outcome {
    let Some((&choice, mut bytes)) = bytes.split_first() else {
        return Outcome::Refused;
    };
    let style = [HeaderStyle::Simple, HeaderStyle::Structured, HeaderStyle::Extended][usize::from(choice % 3)];
    let mut transmission = TransmissionState::new(style, contexts(), SIZE_BYTES);
    for kind in KINDS {
        if kind != RequestKind::Extents || style != HeaderStyle::Simple {
            transmission.ask(ClientCommand::of(Request::new(kind, OFFSET, LENGTH)), Ticket::default());
        }
    }
    let mut data_bytes = 0;
    while transmission.outstanding().next().is_some() {
        let Ok((consumed, event)) = transmission.receive(bytes) else {
            return Outcome::Refused;
        };
        bytes = &bytes[consumed..];
        match event {
            ReplyEvent::NeedBytes(count) => {
                assert!(count > bytes.len(), "what is there is enough");
                return Outcome::Refused;
            }
            ReplyEvent::Data {
                cookie,
                offset,
                length,
                position,
                ..
            } => {
                assert!(
                    offset >= OFFSET && offset + length <= OFFSET + LENGTH,
                    "data lie outside"
                );
                data_bytes += length;
                let Some(rest) = bytes.get(holdfast_block::to_usize(length)..) else {
                    return Outcome::Refused;
                };
                bytes = rest;
                if position == ChunkPosition::Last && transmission.complete(cookie).is_err() {
                    return Outcome::Refused;
                }
            }
            ReplyEvent::Zeroes {
                offset, length, answer, ..
            } => {
                assert!(
                    offset >= OFFSET && offset + length <= OFFSET + LENGTH,
                    "zeroes lie outside"
                );
                data_bytes += length;
                drop(answer.map(|answer| answer.result.map(use_statuses)));
            }
            ReplyEvent::Answer(answer) => drop(answer.result.map(use_statuses)),
            ReplyEvent::Continue => {}
        }
        assert!(data_bytes <= LENGTH, "more data than were asked for");
    }
    Outcome::Decoded
}

/// Reads the statuses of a reply in the same way as the device.
fn use_statuses(statuses: Vec<Status>) {
    for status in statuses {
        let mut cache = StatusCache::default();
        cache.add(OFFSET, status.descriptors);
        let mut end = OFFSET;
        let (stopped, _) = cache.visit_known(OFFSET, SIZE_BYTES, &mut |offset, descriptor| {
            assert!(offset == end && descriptor.length > 0, "extents have a gap");
            end += descriptor.length;
            Visit::Continue
        });
        assert!(
            stopped == end && end > OFFSET && end <= SIZE_BYTES,
            "extents end nowhere"
        );
    }
}

/// The text of a URI.
pub fn uri(bytes: &[u8]) -> Outcome {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return Outcome::Refused;
    };
    match text.parse::<NbdUri>() {
        Ok(uri) => {
            assert!(
                !uri.export.contains('\0') && uri.export.len() <= text.len(),
                "names are checked"
            );
            Outcome::Decoded
        }
        Err(_) => Outcome::Refused,
    }
}

const OFFSET: u64 = 4096;
const LENGTH: u64 = 1024;
const KINDS: [RequestKind; 3] = [RequestKind::Read, RequestKind::Write, RequestKind::Extents];

fn contexts() -> Vec<MetaContext> {
    vec![MetaContext {
        id: 3,
        name: "base:allocation".to_owned(),
    }]
}

/// Valid bytes for every parser: name of the parser, name of the seed, bytes.
pub fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let uris = ["nbd://[::1]:10809/disk%20one", "nbd+unix:///disk?socket=/run/nbd.sock"];
    vec![
        ("nbd_handshake", "transmit", handshake_seed(0)),
        ("nbd_handshake", "list", handshake_seed(1)),
        ("nbd_handshake", "describe", handshake_seed(2)),
        ("nbd_replies", "simple", replies_seed(HeaderStyle::Simple)),
        ("nbd_replies", "structured", replies_seed(HeaderStyle::Structured)),
        ("nbd_replies", "extended", replies_seed(HeaderStyle::Extended)),
        ("nbd_uri", "tcp", uris[0].as_bytes().to_vec()),
        ("nbd_uri", "unix", uris[1].as_bytes().to_vec()),
    ]
}

fn handshake_seed(goal: u8) -> Vec<u8> {
    let mut bytes = vec![goal];
    bytes.extend(GREETING_MAGIC.to_be_bytes());
    bytes.extend(OPTION_MAGIC.to_be_bytes());
    bytes.extend([0, 3]);
    let mut reply = |option: u32, kind: u32, data: &[&[u8]]| {
        let data = data.concat();
        bytes.extend(OPTION_REPLY_MAGIC.to_be_bytes());
        bytes.extend(option.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(u32::try_from(data.len()).expect("a few bytes").to_be_bytes());
        bytes.extend(data);
    };
    let export: [&[u8]; 2] = [&[0, 0], &[0, 0, 0, 0, 0, 16, 0, 0, 1, 5]];
    let block_sizes: [&[u8]; 2] = [&[0, 3], &[0, 0, 2, 0, 0, 0, 16, 0, 2, 0, 0, 0]];
    match goal {
        0 => {
            reply(11, 0x8000_0001, &[b"unknown"]);
            reply(8, 1, &[]);
            reply(10, 4, &[&[0, 0, 0, 3], b"base:allocation"]);
            reply(10, 1, &[]);
            reply(7, 3, &export);
            reply(7, 3, &block_sizes);
            reply(7, 1, &[]);
        }
        1 => {
            reply(3, 2, &[&[0, 0, 0, 4], b"disk", b"the first one"]);
            reply(3, 2, &[&[0, 0, 0, 0]]);
            reply(3, 1, &[]);
        }
        _ => {
            reply(8, 1, &[]);
            reply(9, 4, &[&[0, 0, 0, 0], b"qemu:dirty-bitmap:b"]);
            reply(9, 1, &[]);
            reply(6, 3, &export);
            reply(6, 3, &[&[0, 2], b"the first one"]);
            reply(6, 1, &[]);
        }
    }
    bytes
}

fn replies_seed(style: HeaderStyle) -> Vec<u8> {
    let mut bytes = vec![match style {
        HeaderStyle::Simple => 0,
        HeaderStyle::Structured => 1,
        HeaderStyle::Extended => 2,
    }];
    if style == HeaderStyle::Simple {
        for (cookie, length) in [(1u64, LENGTH), (2, 0)] {
            bytes.extend(SIMPLE_REPLY_MAGIC.to_be_bytes());
            bytes.extend([0; 4]);
            bytes.extend(cookie.to_be_bytes());
            bytes.resize(bytes.len() + holdfast_block::to_usize(length), 7);
        }
        return bytes;
    }
    let mut chunk = |flags, kind, cookie, payload: &[&[u8]]| {
        let payload = payload.concat();
        let header = ChunkHeader {
            flags,
            kind,
            cookie,
            offset: OFFSET,
            length: payload.len() as u64,
        };
        header.encode(style, &mut bytes);
        bytes.extend(payload);
    };
    let (more, done) = (ReplyFlags::default(), ReplyFlags::DONE);
    chunk(
        more,
        ChunkKind::OFFSET_HOLE,
        1,
        &[&(OFFSET + 512).to_be_bytes(), &512u32.to_be_bytes()],
    );
    let failure: [&[u8]; 2] = [&[0, 0, 0, 28, 0, 4], b"full"];
    chunk(done, ChunkKind::ERROR, 2, &failure);
    chunk(more, ChunkKind::OFFSET_DATA, 1, &[&OFFSET.to_be_bytes(), &[7; 512]]);
    let numbers = |numbers: &[u64]| -> Vec<u8> { numbers.iter().flat_map(|number| number.to_be_bytes()).collect() };
    if style == HeaderStyle::Extended {
        let descriptors = numbers(&[512, 0, 1 << 30, 3]);
        chunk(
            done,
            ChunkKind::BLOCK_STATUS_EXT,
            3,
            &[&[0, 0, 0, 3, 0, 0, 0, 2], &descriptors],
        );
    } else {
        // Each 64-bit number consists of two numbers of 32 bits.
        let descriptors = numbers(&[512 << 32, 1 << 62 | 3]);
        chunk(done, ChunkKind::BLOCK_STATUS, 3, &[&[0, 0, 0, 3], &descriptors]);
    }
    chunk(done, ChunkKind::NONE, 1, &[]);
    bytes
}
