//! What can be wrong with an exchange of machines.

use crate::error::Error;

/// Why a machine cannot be imported or exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// The archive has no text that describes a machine, or several machines.
    #[error("the archive does not say what the machine consists of: {detail}")]
    NoMachine {
        /// What is there instead.
        detail: String,
    },
    /// A disk that an export is to have.
    #[error("{snapshot} has no disk")]
    NoDisk {
        /// The snapshot.
        snapshot: String,
    },
    /// Data of an archive that nobody has asked for.
    #[error("a part of {disk} was not read: this is a mistake of this program, and what was made is not whole")]
    NotRead {
        /// The disk.
        disk: String,
    },
    /// The folder that is to be made is there already.
    #[error("{} is there already, and is not empty", path.display())]
    FolderTaken {
        /// The folder.
        path: std::path::PathBuf,
    },
}

impl From<ExchangeError> for Error {
    fn from(error: ExchangeError) -> Self {
        Self::Exchange(Box::new(error))
    }
}
