//! Why nobody can say what changed.

use std::io;

/// Result of comparing where two files lie.
pub type Result<T> = std::result::Result<T, ExtentError>;

/// Why two files cannot be compared by where they lie. The way out is always to read them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExtentError {
    /// The file system is none of those that were found to tell the truth.
    #[error(
        "where files lie tells nothing on this file system (type {magic:#x}): only XFS and btrfs are known to be right"
    )]
    FileSystem {
        /// Its type, as `statfs` has it.
        magic: u64,
    },
    /// The two files have nothing to do with one another, or are no files.
    #[error("the two files cannot be compared by where they lie: {reason}")]
    Unfit {
        /// Why.
        reason: &'static str,
    },
    /// Somebody writes to a file that should be a snapshot.
    #[error("the {which} file changed while it was looked at: it is no snapshot")]
    Written {
        /// `older` or `newer`.
        which: &'static str,
    },
    /// The file system says what cannot be.
    #[error("the file system says what cannot be about offset {offset}: {detail}")]
    Senseless {
        /// Offset in the file.
        offset: u64,
        /// What is wrong.
        detail: &'static str,
    },
    /// The kernel refuses.
    #[error("{action}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// Why a stream does not tell what changed. The way out is always to read everything.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendStreamError {
    /// The stream ends before its end.
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
        /// Why not.
        source: io::Error,
    },
    /// It was damaged on its way.
    #[error("the stream is damaged: its checksum at offset {offset} is wrong")]
    Damaged {
        /// Offset in the stream.
        offset: u64,
    },
    /// It says what no sender says.
    #[error("the stream makes no sense at offset {offset}: {detail}")]
    Senseless {
        /// Offset in the stream.
        offset: u64,
        /// What is wrong.
        detail: String,
    },
    /// It is right, and of no use: it does not hold all differences, or nobody here knows that it does.
    #[error("the stream does not tell what changed: {reason}")]
    Unfit {
        /// Why.
        reason: String,
    },
}
