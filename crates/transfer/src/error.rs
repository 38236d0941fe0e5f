//! The errors of this crate.

use thiserror::Error;

/// Why bytes or a message of the peer are refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Error {
    /// A frame announces more bytes than any frame may have.
    #[error("a frame announces {length} bytes, at most {limit} are allowed")]
    FrameTooLong {
        /// The announced length of the payload, in bytes.
        length: u64,
        /// The limit, in bytes.
        limit: u64,
    },
    /// The checksum of a frame is wrong.
    #[error("the checksum of frame {sequence} of stream {stream} is wrong")]
    FrameDamaged {
        /// The stream, as the frame says.
        stream: u16,
        /// The number of the frame, as the frame says.
        sequence: u64,
    },
    /// A message of an unknown kind that must not be skipped.
    #[error("message of unknown kind {kind}, which must not be skipped")]
    UnknownMessage {
        /// The number of the kind.
        kind: u8,
    },
    /// The content of a message is not valid.
    #[error("message {message}: {detail}")]
    Malformed {
        /// The name of the message.
        message: &'static str,
        /// What is wrong.
        detail: &'static str,
    },
    /// The size of a disk, or of its units, is out of bounds.
    #[error(
        "a disk of {size_bytes} bytes cannot be copied in units of {unit_bytes} bytes: a unit is a power of two from 4 KiB to 1 MiB, and a disk has 1 to 2^25 units"
    )]
    Layout {
        /// Size of the disk, in bytes.
        size_bytes: u64,
        /// Size of a unit, in bytes.
        unit_bytes: u32,
    },
    /// A journal has a version that this program does not know.
    #[error("the journal has version {found}, this program knows version {known}")]
    JournalVersion {
        /// The version of the journal.
        found: u16,
        /// The version that is known.
        known: u16,
    },
    /// An entry of a journal has a valid checksum and an impossible content.
    #[error("journal entry at byte {offset}: {detail}")]
    Journal {
        /// Where the entry begins in the journal, in bytes.
        offset: u64,
        /// What is wrong.
        detail: &'static str,
    },
}

/// A result with the errors of this crate.
pub type Result<T> = std::result::Result<T, Error>;
