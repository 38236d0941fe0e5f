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
    #[error("{machine} has no disk")]
    NoDisk {
        /// The machine, or its snapshot.
        machine: String,
    },
    /// A disk that an export is to leave out.
    #[error("{snapshot} has no disk {name}; it has {}", present.join(", "))]
    NoSuchDisk {
        /// The snapshot.
        snapshot: String,
        /// The disk.
        name: String,
        /// Those that there are.
        present: Vec<String>,
    },
    /// A machine that is called in a way in which no machine is called here.
    #[error("the machine in the archive is called {name:?}, and cannot be listed so")]
    Name {
        /// Its name.
        name: String,
        /// Why.
        source: crate::NameError,
    },
    /// Data of an archive that nobody has asked for.
    #[error("a part of {disk} was not read: this is a mistake of this program, and what was made is not whole")]
    NotRead {
        /// The disk.
        disk: String,
    },
    /// A machine of VirtualBox.
    #[error(transparent)]
    VirtualBox(super::virtualbox::VirtualBoxError),
    /// A machine that is there would get a twin with the same addresses.
    #[error("the pool {pool} has this machine: {name} ({uuid})")]
    Twin {
        /// The pool.
        pool: String,
        /// What it is called there.
        name: String,
        /// Its UUID.
        uuid: String,
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
