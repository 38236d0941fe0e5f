//! All messages, their numbers, and their payloads.

#![deny(clippy::indexing_slicing)]

use std::time::Duration;

use super::control::{
    Barrier, ErrorCode, LastPass, Ownership, PeerError, ReceiverTimes, RoundEnd, Seal, UnitComparison, UnitHash,
    UnitVerdict,
};
use super::field::{FieldReader, FieldWriter};
use super::greeting::{Accept, Hello, Offer, ReceiverId};
use super::range::{CompressedRange, RangeContent, RangeFrame};
use crate::digest::Digest;
use crate::{Error, Result};

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(
    missing_docs,
    reason = "docs/format/transfer.md describes each, and their contents are documented"
)]
pub enum Message {
    Hello(Hello),
    Offer(Offer),
    Accept(Accept),
    /// DATA, ZERO or HOLE.
    Range(RangeFrame),
    Compressed(CompressedRange),
    Hashes(UnitHash),
    Want(UnitVerdict),
    Round(RoundEnd),
    Sync {
        number: u64,
        barrier: Barrier,
    },
    Synced {
        number: u64,
        took: Duration,
    },
    FreezeIntent {
        predicted: Duration,
    },
    FreezeOk,
    Frozen,
    Last(LastPass),
    Seal(Seal),
    Sealed {
        number: u64,
    },
    Commit {
        seal: u64,
    },
    Committed {
        seal: u64,
    },
    OwnerQuery {
        receiver: ReceiverId,
    },
    OwnerAnswer(Ownership),
    Thaw,
    End {
        reason: String,
    },
    Error(PeerError),
    Ping {
        number: u64,
    },
    Pong {
        number: u64,
    },
    Credit {
        bytes: u64,
    },
    Times(ReceiverTimes),
    /// An optional message of an unknown kind.
    Skipped {
        kind: u8,
        payload: Vec<u8>,
    },
}

mod kind {
    pub(super) const HELLO: u8 = 1;
    pub(super) const OFFER: u8 = 2;
    pub(super) const ACCEPT: u8 = 3;
    pub(super) const DATA: u8 = 4;
    pub(super) const ZERO: u8 = 5;
    pub(super) const HOLE: u8 = 6;
    pub(super) const COMPRESSED: u8 = 7;
    pub(super) const HASHES: u8 = 8;
    pub(super) const WANT: u8 = 9;
    pub(super) const ROUND: u8 = 10;
    pub(super) const SYNC: u8 = 11;
    pub(super) const SYNCED: u8 = 12;
    pub(super) const FREEZE_INTENT: u8 = 13;
    pub(super) const FREEZE_OK: u8 = 14;
    pub(super) const FROZEN: u8 = 15;
    pub(super) const LAST: u8 = 16;
    pub(super) const SEAL: u8 = 17;
    pub(super) const SEALED: u8 = 18;
    pub(super) const COMMIT: u8 = 19;
    pub(super) const COMMITTED: u8 = 20;
    pub(super) const OWNER_QUERY: u8 = 21;
    pub(super) const OWNER_ANSWER: u8 = 22;
    pub(super) const THAW: u8 = 23;
    pub(super) const END: u8 = 24;
    pub(super) const ERROR: u8 = 25;
    pub(super) const PING: u8 = 26;
    pub(super) const PONG: u8 = 27;
    pub(super) const CREDIT: u8 = 28;
    pub(super) const TIMES: u8 = 29;
}

/// Bytes before the data of DATA.
pub(super) const DATA_FIELD_BYTES: u64 = 4 + 8;
/// Bytes of ZERO and HOLE.
pub(super) const ZERO_FIELD_BYTES: u64 = 4 + 8 + 8;

impl Message {
    /// The number of the kind.
    pub fn kind(&self) -> u8 {
        match self {
            Self::Hello(_) => kind::HELLO,
            Self::Offer(_) => kind::OFFER,
            Self::Accept(_) => kind::ACCEPT,
            Self::Range(frame) => match frame.content {
                RangeContent::Data(_) => kind::DATA,
                RangeContent::Zero => kind::ZERO,
                RangeContent::Hole => kind::HOLE,
            },
            Self::Compressed(_) => kind::COMPRESSED,
            Self::Hashes(_) => kind::HASHES,
            Self::Want(_) => kind::WANT,
            Self::Round(_) => kind::ROUND,
            Self::Sync { .. } => kind::SYNC,
            Self::Synced { .. } => kind::SYNCED,
            Self::FreezeIntent { .. } => kind::FREEZE_INTENT,
            Self::FreezeOk => kind::FREEZE_OK,
            Self::Frozen => kind::FROZEN,
            Self::Last(_) => kind::LAST,
            Self::Seal(_) => kind::SEAL,
            Self::Sealed { .. } => kind::SEALED,
            Self::Commit { .. } => kind::COMMIT,
            Self::Committed { .. } => kind::COMMITTED,
            Self::OwnerQuery { .. } => kind::OWNER_QUERY,
            Self::OwnerAnswer(_) => kind::OWNER_ANSWER,
            Self::Thaw => kind::THAW,
            Self::End { .. } => kind::END,
            Self::Error(_) => kind::ERROR,
            Self::Ping { .. } => kind::PING,
            Self::Pong { .. } => kind::PONG,
            Self::Credit { .. } => kind::CREDIT,
            Self::Times(_) => kind::TIMES,
            Self::Skipped { kind, .. } => *kind,
        }
    }

    /// Whether a side that does not know the message may skip it.
    pub(super) fn is_optional(&self) -> bool {
        matches!(self, Self::Times(_) | Self::Skipped { .. })
    }

    /// The size of the payload of a message with data, or of the largest others, in bytes.
    pub(super) fn payload_bytes(&self) -> u64 {
        match self {
            Self::Range(frame) => range_payload_bytes(&frame.content),
            Self::Compressed(frame) => frame.payload_bytes(),
            Self::Accept(accept) => accept.payload_bytes(),
            Self::Round(RoundEnd { barrier, .. }) => 20 + barrier.payload_bytes(),
            _ => {
                let mut payload = Vec::new();
                self.encode(&mut payload);
                payload.len() as u64
            }
        }
    }

    pub(super) fn encode(&self, output: &mut Vec<u8>) {
        let to = &mut FieldWriter(output);
        match self {
            Self::Hello(hello) => hello.encode(to),
            Self::Offer(offer) => offer.encode(to),
            Self::Accept(accept) => accept.encode(to),
            Self::Range(frame) => encode_range(frame, to),
            Self::Compressed(frame) => frame.encode(to),
            Self::Hashes(UnitHash { unit, digest }) => {
                to.u64(*unit);
                to.bytes(&digest.0);
            }
            Self::Want(verdict) => {
                to.u64(verdict.unit);
                to.u8(u8::from(verdict.content == UnitComparison::Different));
            }
            Self::Round(round) => {
                to.u32(round.round);
                to.u64(round.frame_count);
                to.u64(round.frame_bytes);
                round.barrier.encode(to);
            }
            Self::Sync { number, barrier } => {
                to.u64(*number);
                barrier.encode(to);
            }
            Self::Synced { number, took } => {
                to.u64(*number);
                to.duration(*took);
            }
            Self::FreezeIntent { predicted } => to.duration(*predicted),
            Self::Last(last) => {
                to.u32(last.attempt);
                to.u64(last.dirty_bytes);
            }
            Self::Seal(seal) => {
                to.u64(seal.number);
                to.u64(seal.sync);
                to.bytes(&seal.tree.0);
                seal.barrier.encode(to);
            }
            Self::Sealed { number }
            | Self::Commit { seal: number }
            | Self::Committed { seal: number }
            | Self::Ping { number }
            | Self::Pong { number }
            | Self::Credit { bytes: number } => to.u64(*number),
            Self::OwnerAnswer(owner) => to.u8(u8::from(*owner == Ownership::Receiver)),
            Self::End { reason } => to.text(reason),
            Self::Error(error) => {
                to.u16(error.code as u16);
                to.text(&error.text);
            }
            Self::Times(times) => {
                to.duration(times.identity);
                to.duration(times.flush);
                to.duration(times.journal);
            }
            Self::FreezeOk | Self::Frozen | Self::Thaw => {}
            Self::OwnerQuery { receiver } => to.bytes(&receiver.0),
            Self::Skipped { payload, .. } => to.bytes(payload),
        }
    }

    /// Decodes the payload of a message of the kind with number `number`.
    pub(super) fn decode(number: u8, payload: &[u8]) -> Result<Self> {
        let mut reader = FieldReader::new(payload, name_of(number));
        let from = &mut reader;
        let message = match number {
            kind::HELLO => Self::Hello(Hello::decode(from)?),
            kind::OFFER => Self::Offer(Offer::decode(from)?),
            kind::ACCEPT => Self::Accept(Accept::decode(from)?),
            kind::DATA | kind::ZERO | kind::HOLE => Self::Range(decode_range(number, from)?),
            kind::COMPRESSED => Self::Compressed(CompressedRange::decode(from)?),
            kind::HASHES => Self::Hashes(UnitHash {
                unit: from.u64()?,
                digest: Digest(from.array()?),
            }),
            kind::WANT => Self::Want(UnitVerdict {
                unit: from.u64()?,
                content: match from.u8()? {
                    0 => UnitComparison::Same,
                    1 => UnitComparison::Different,
                    _ => return Err(from.malformed("a verdict is neither 0 nor 1")),
                },
            }),
            kind::FREEZE_INTENT => Self::FreezeIntent {
                predicted: from.duration()?,
            },
            kind::FREEZE_OK => Self::FreezeOk,
            kind::FROZEN => Self::Frozen,
            kind::LAST => Self::Last(LastPass {
                attempt: from.u32()?,
                dirty_bytes: from.u64()?,
            }),
            kind::SEALED => Self::Sealed { number: from.u64()? },
            kind::COMMIT => Self::Commit { seal: from.u64()? },
            kind::COMMITTED => Self::Committed { seal: from.u64()? },
            kind::OWNER_QUERY => Self::OwnerQuery {
                receiver: ReceiverId(from.array()?),
            },
            kind::OWNER_ANSWER => Self::OwnerAnswer(match from.u8()? {
                0 => Ownership::Sender,
                1 => Ownership::Receiver,
                _ => return Err(from.malformed("the owner is neither 0 nor 1")),
            }),
            kind::THAW => Self::Thaw,
            kind::END => Self::End { reason: from.text()? },
            kind::ERROR => Self::Error(PeerError {
                code: ErrorCode::from_number(from.u16()?),
                text: from.text()?,
            }),
            kind::PING => Self::Ping { number: from.u64()? },
            kind::PONG => Self::Pong { number: from.u64()? },
            kind::CREDIT => Self::Credit { bytes: from.u64()? },
            kind::TIMES => Self::Times(ReceiverTimes {
                identity: from.duration()?,
                flush: from.duration()?,
                journal: from.duration()?,
            }),
            kind::SYNCED => Self::Synced {
                number: from.u64()?,
                took: from.duration()?,
            },
            _ => decode_barrier(number, from)?,
        };
        reader.finish()?;
        Ok(message)
    }
}

/// The messages that end a pass.
fn decode_barrier(number: u8, from: &mut FieldReader<'_>) -> Result<Message> {
    Ok(match number {
        kind::ROUND => Message::Round(RoundEnd {
            round: from.u32()?,
            frame_count: from.u64()?,
            frame_bytes: from.u64()?,
            barrier: Barrier::decode(from)?,
        }),
        kind::SYNC => Message::Sync {
            number: from.u64()?,
            barrier: Barrier::decode(from)?,
        },
        kind::SEAL => Message::Seal(Seal {
            number: from.u64()?,
            sync: from.u64()?,
            tree: Digest(from.array()?),
            barrier: Barrier::decode(from)?,
        }),
        kind => return Err(Error::UnknownMessage { kind }),
    })
}

fn encode_range(frame: &RangeFrame, to: &mut FieldWriter<'_>) {
    to.u32(frame.pass);
    to.u64(frame.range.start);
    match &frame.content {
        RangeContent::Data(bytes) => to.bytes(bytes),
        RangeContent::Zero | RangeContent::Hole => to.u64(frame.range.end - frame.range.start),
    }
}

fn decode_range(number: u8, from: &mut FieldReader<'_>) -> Result<RangeFrame> {
    let (pass, start) = (from.u32()?, from.u64()?);
    let (length, content) = if number == kind::DATA {
        let bytes = from.rest();
        (bytes.len() as u64, RangeContent::Data(bytes.to_vec()))
    } else if number == kind::ZERO {
        (from.u64()?, RangeContent::Zero)
    } else {
        (from.u64()?, RangeContent::Hole)
    };
    let end = start.checked_add(length).filter(|end| *end > start);
    let end = end.ok_or(from.malformed("the range is empty or too long"))?;
    Ok(RangeFrame {
        pass,
        range: start..end,
        content,
    })
}

/// The size of the payload of a frame with data, in bytes.
fn range_payload_bytes(content: &RangeContent) -> u64 {
    match content {
        RangeContent::Data(bytes) => DATA_FIELD_BYTES + bytes.len() as u64,
        RangeContent::Zero | RangeContent::Hole => ZERO_FIELD_BYTES,
    }
}

/// The name of a kind of message, for errors.
fn name_of(number: u8) -> &'static str {
    const NAMES: [&str; 30] = [
        "0",
        "HELLO",
        "OFFER",
        "ACCEPT",
        "DATA",
        "ZERO",
        "HOLE",
        "COMPRESSED",
        "HASHES",
        "WANT",
        "ROUND",
        "SYNC",
        "SYNCED",
        "FREEZE_INTENT",
        "FREEZE_OK",
        "FROZEN",
        "LAST",
        "SEAL",
        "SEALED",
        "COMMIT",
        "COMMITTED",
        "OWNER_QUERY",
        "OWNER_ANSWER",
        "THAW",
        "ABORT",
        "ERROR",
        "PING",
        "PONG",
        "CREDIT",
        "TIMES",
    ];
    NAMES.get(usize::from(number)).copied().unwrap_or("unknown")
}
