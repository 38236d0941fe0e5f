//! Errors of volumes and of the files in them.

use std::borrow::Cow;

/// Result of reading a volume or a file in it.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a volume, of its file system, or of a file in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The disk below cannot be read.
    #[error(transparent)]
    Device(#[from] holdfast_block::Error),
    /// A structure contradicts itself or its checksum.
    #[error("{what} is damaged: {detail}")]
    Damaged {
        /// The structure: "inode", "GPT header".
        what: Cow<'static, str>,
        /// Where it is, and what is wrong with it.
        detail: String,
    },
    /// A valid structure that the readers do not understand. Reading on would return wrong bytes.
    #[error("{what} is not supported{}", detail_of(detail))]
    Unsupported {
        /// The feature: "NTFS encryption".
        what: String,
        /// Where it is used; may be empty.
        detail: String,
    },
    /// The directory has no entry of this name.
    #[error("no such file or directory")]
    NotFound,
    /// A directory was expected.
    #[error("not a directory")]
    NotADirectory,
    /// A regular file was expected.
    #[error("not a regular file")]
    NotAFile,
    /// A path contains more symbolic links than are followed.
    #[error("too many symbolic links")]
    LinkLoop,
    /// A structure is larger than any that is accepted.
    #[error("{what} is too large: more than {limit}")]
    TooLarge {
        /// The structure.
        what: Cow<'static, str>,
        /// The bound.
        limit: u64,
    },
    /// The process that reads the file system ended, or broke the protocol.
    #[error("the reader of the file system {0}")]
    Reader(String),
}

fn detail_of(detail: &str) -> String {
    if detail.is_empty() {
        String::new()
    } else {
        format!(": {detail}")
    }
}

impl Error {
    pub(crate) fn damaged(what: &'static str, detail: impl Into<String>) -> Self {
        Self::Damaged {
            what: what.into(),
            detail: detail.into(),
        }
    }

    pub(crate) fn unsupported(what: impl Into<String>) -> Self {
        Self::Unsupported {
            what: what.into(),
            detail: String::new(),
        }
    }
}
