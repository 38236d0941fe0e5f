//! Contents of the messages that control a copy.

#![deny(clippy::indexing_slicing)]

use std::time::Duration;

use super::field::{FieldReader, FieldWriter};
use crate::Result;
use crate::digest::Digest;

/// Largest number of streams of a connection.
pub const STREAM_COUNT_MAX: u16 = 64;

/// A point in the order of all streams: the frames before it are applied before those after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Barrier {
    /// Number of frames that were sent on each stream before the barrier, from stream 0.
    pub frame_counts: Vec<u64>,
}

impl Barrier {
    pub(super) fn encode(&self, to: &mut FieldWriter<'_>) {
        to.u16(u16::try_from(self.frame_counts.len()).expect("a connection has at most 64 streams"));
        self.frame_counts.iter().for_each(|count| to.u64(*count));
    }

    pub(super) fn decode(from: &mut FieldReader<'_>) -> Result<Self> {
        let stream_count = from.u16()?;
        if stream_count == 0 || stream_count > STREAM_COUNT_MAX {
            return Err(from.malformed("a barrier is not for 1 to 64 streams"));
        }
        let frame_counts = (0..stream_count).map(|_| from.u64()).collect::<Result<_>>()?;
        Ok(Self { frame_counts })
    }

    pub(super) fn payload_bytes(&self) -> u64 {
        2 + 8 * self.frame_counts.len() as u64
    }
}

/// The end of a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoundEnd {
    /// The number of the round; the first pass is round 0.
    pub round: u32,
    /// Number of frames with data in the round.
    pub frame_count: u64,
    /// Their bytes.
    pub frame_bytes: u64,
    /// The end of the pass.
    pub barrier: Barrier,
}

/// The start of the last pass: the guest is frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastPass {
    /// The first or the second attempt.
    pub attempt: u32,
    /// Bytes of the disk that follow.
    pub dirty_bytes: u64,
}

/// The sender has sent everything, and asks for the handover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seal {
    /// The number of the seal in the session, from 1.
    pub number: u64,
    /// The synchronization that the seal contains.
    pub sync: u64,
    /// The digest of the disk as sent.
    pub tree: Digest,
    /// The end of the pass.
    pub barrier: Barrier,
}

/// A unit and the hash of its content at the sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnitHash {
    /// The unit.
    pub unit: u64,
    /// The hash of its content.
    pub digest: Digest,
}

/// The answer to the hash of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnitVerdict {
    /// The unit.
    pub unit: u64,
    /// The comparison.
    pub content: UnitComparison,
}

/// Whether a unit has the same content on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnitComparison {
    /// It has.
    Same,
    /// It has not: the receiver wants the unit.
    Different,
}

/// Whether the receiver owns the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership {
    /// The sender owns it. The receiver has given up its seal and refuses a later COMMIT of it.
    Sender,
    /// The receiver owns it, durably.
    Receiver,
}

/// How long the receiver's parts of the seal took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReceiverTimes {
    /// The proof of identity.
    pub identity: Duration,
    /// Making the data durable.
    pub flush: Duration,
    /// Writing the journal.
    pub journal: Duration,
}

/// Why a side ends the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerError {
    /// The reason, for programs.
    pub code: ErrorCode,
    /// The reason, for people.
    pub text: String,
}

macro_rules! error_codes {
    ($($(#[$meta:meta])* $name:ident = $number:expr;)*) => {
        /// The reason of an ERROR message.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum ErrorCode {
            $($(#[$meta])* $name = $number,)*
        }

        impl ErrorCode {
            /// The reason with a number; an unknown one counts as [`Protocol`](Self::Protocol).
            pub(super) fn from_number(number: u16) -> Self {
                match number {
                    $($number => Self::$name,)*
                    _ => Self::Protocol,
                }
            }
        }
    };
}

error_codes! {
    /// A message was not allowed, or not valid.
    Protocol = 1;
    /// No version of the protocol is known to both sides.
    Version = 2;
    /// The receiver holds the copy of another session.
    WrongSession = 3;
    /// The receiver holds another disk, or one of other dimensions.
    WrongDisk = 4;
    /// The disk is too large for the target.
    TooLarge = 5;
    /// Reading, writing or making durable failed.
    Storage = 6;
    /// The receiver did not apply what was sent.
    WrongContent = 7;
    /// The file that was written is not the one that the hypervisor has open.
    WrongFile = 8;
    /// The receiver owns the disk already.
    AlreadyOwner = 9;
    /// The copy was not sealed, or the seal was given up.
    NotSealed = 10;
    /// The target is full.
    NoSpace = 11;
}

impl ErrorCode {
    /// Whether another attempt of the same copy can succeed.
    pub fn is_retriable(self) -> bool {
        matches!(self, Self::Storage | Self::WrongContent | Self::NotSealed)
    }
}
