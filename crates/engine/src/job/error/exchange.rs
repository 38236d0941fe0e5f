//! What can be wrong with an exchange of machines.

use super::Error;

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
    /// Data of an archive that was not requested.
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
    /// All of a machine was sent, and what became of it is not known.
    #[error("the machine was sent to {pool}, and whether that has taken it in is not known")]
    Outcome {
        /// The pool.
        pool: String,
        /// Why it cannot be asked.
        source: holdfast_host::xapi::XapiError,
    },
    /// A machine is to go on from memory that the snapshot does not have.
    #[error("{snapshot} has no memory that a pool could go on from{}", if *is_of_qemu { ": it is of QEMU" } else { "" })]
    NoMemory {
        /// The snapshot.
        snapshot: String,
        /// Whether it has the memory of a machine of QEMU.
        is_of_qemu: bool,
    },
    /// The memory is there, and what the pool knew beside it is not: older versions did not keep that.
    #[error(
        "{snapshot} has the memory of the machine, but not what its pool knew of it at that instant, without which it does not go on"
    )]
    NoSuspendedRecords {
        /// The snapshot.
        snapshot: String,
    },
    /// A machine that goes on knows all of its disks.
    #[error("the machine cannot go on without the disk {disk}, which {}", if *is_left_out { "is to be left out" } else { "is not in the snapshot" })]
    DiskOfMemory {
        /// The disk.
        disk: String,
        /// Whether it is there, and excluded.
        is_left_out: bool,
    },
    /// What the pool knew of a disk, and what is stored, do not belong together.
    #[error("{name} has {size_bytes} bytes, and the records of the machine say {said_bytes}")]
    SizeOfMemory {
        /// The disk, or the memory.
        name: String,
        /// By the records.
        said_bytes: u64,
        /// As stored.
        size_bytes: u64,
    },
    /// A machine does not go on on processors of another make.
    #[error("the machine was started on processors of {vendor}, and {pool} has those of {there}")]
    Processors {
        /// The pool.
        pool: String,
        /// Whose processors it has.
        there: String,
        /// Whose processors the machine knows.
        vendor: String,
    },
    /// The archive that is to be made is there already.
    #[error("{} is there already", path.display())]
    FileTaken {
        /// The file.
        path: std::path::PathBuf,
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
