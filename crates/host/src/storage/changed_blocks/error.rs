//! Why the changes could not be determined.

use std::io;

/// Result of a comparison of extents.
pub type Result<T> = std::result::Result<T, ExtentError>;

/// Why two files cannot be compared by their extents. The fallback is to read them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExtentError {
    /// The file system is not one of those whose extents are known to be reliable.
    #[error("extents are not reliable on this file system (type {magic:#x}): only XFS and btrfs are supported")]
    FileSystem {
        /// The type in `statfs`.
        magic: u64,
    },
    /// The two files are not related, or not regular files.
    #[error("the two files cannot be compared by their extents: {reason}")]
    Unusable {
        /// The reason.
        reason: &'static str,
    },
    /// A file that should be a snapshot was written.
    #[error("the {which} file changed during the comparison: it is not a snapshot")]
    Written {
        /// `older` or `newer`.
        which: &'static str,
    },
    /// The file system's answer contradicts itself.
    #[error("the file system reports invalid extents at offset {offset}: {detail}")]
    Invalid {
        /// Offset in the file.
        offset: u64,
        /// What is wrong.
        detail: &'static str,
    },
    /// A system call failed.
    #[error("cannot {action}")]
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
    /// The stream cannot be read.
    #[error("cannot read the stream at offset {offset}")]
    Input {
        /// Offset in the stream.
        offset: u64,
        /// The reason.
        source: io::Error,
    },
    /// The stream was damaged in transit.
    #[error("the stream is damaged: its checksum at offset {offset} is wrong")]
    Damaged {
        /// Offset in the stream.
        offset: u64,
    },
    /// The stream has invalid content.
    #[error("the stream is invalid at offset {offset}: {detail}")]
    Invalid {
        /// Offset in the stream.
        offset: u64,
        /// What is wrong.
        detail: String,
    },
    /// The stream is valid, but unusable: it does not contain all differences, or may not contain all of them.
    #[error("the stream does not contain the changes: {reason}")]
    Unusable {
        /// The reason.
        reason: String,
    },
}
