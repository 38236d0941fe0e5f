//! Why the changes could not be determined.

use std::io;

/// Result of a comparison of extents.
pub type Result<T> = std::result::Result<T, ExtentError>;

/// Why two files cannot be compared by their extents. The fallback is to read them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExtentError {
    /// The file system is not one of those whose extents are known to be reliable.
    #[error(
        "where files lie tells nothing on this file system (type {magic:#x}): only XFS and btrfs are known to be right"
    )]
    FileSystem {
        /// Its type in `statfs`.
        magic: u64,
    },
    /// The two files are not related, or not regular files.
    #[error("the two files cannot be compared by where they lie: {reason}")]
    Unfit {
        /// The reason.
        reason: &'static str,
    },
    /// A file that should be a snapshot was written.
    #[error("the {which} file changed while it was looked at: it is no snapshot")]
    Written {
        /// `older` or `newer`.
        which: &'static str,
    },
    /// The file system's answer contradicts itself.
    #[error("the file system says what cannot be about offset {offset}: {detail}")]
    Senseless {
        /// Offset in the file.
        offset: u64,
        /// What is wrong.
        detail: &'static str,
    },
    /// A system call failed.
    #[error("{action}")]
    Io {
        /// The action.
        action: &'static str,
        /// The reason.
        source: io::Error,
    },
}

/// Why a stream does not provide the changes. The fallback is to read everything.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendStreamError {
    /// The stream is incomplete.
    #[error("the stream ends at offset {offset}, before its last record")]
    Short {
        /// Offset in the stream.
        offset: u64,
    },
    /// It cannot be read.
    #[error("read the stream at offset {offset}")]
    Input {
        /// Offset in the stream.
        offset: u64,
        /// The reason.
        source: io::Error,
    },
    /// It was damaged in transit.
    #[error("the stream is damaged: its checksum at offset {offset} is wrong")]
    Damaged {
        /// Offset in the stream.
        offset: u64,
    },
    /// It has invalid content.
    #[error("the stream makes no sense at offset {offset}: {detail}")]
    Senseless {
        /// Offset in the stream.
        offset: u64,
        /// What is wrong.
        detail: String,
    },
    /// It is valid, but unusable: it does not contain all differences, or may not.
    #[error("the stream does not tell what changed: {reason}")]
    Unfit {
        /// The reason.
        reason: String,
    },
}
