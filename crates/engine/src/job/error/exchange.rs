//! Errors of import and export.

use super::Error;

/// Why a machine cannot be imported or exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// The archive describes no machine, or several machines.
    #[error("the archive does not say what the machine consists of: {detail}")]
    NoMachine {
        /// What was found instead.
        detail: String,
    },
    /// The machine or snapshot has no disk to export.
    #[error("{machine} has no disk")]
    NoDisk {
        /// The machine, or its snapshot.
        machine: String,
    },
    /// The snapshot does not have a disk that is to be excluded.
    #[error("{snapshot} has no disk {name}; it has {}", present.join(", "))]
    NoSuchDisk {
        /// The snapshot.
        snapshot: String,
        /// The disk.
        name: String,
        /// The disks of the snapshot.
        present: Vec<String>,
    },
    /// The name of the machine is not a valid name here.
    #[error("the machine in the archive is called {name:?}, which cannot be the name of a machine here")]
    Name {
        /// The name.
        name: String,
        /// Why it is not valid.
        source: crate::NameError,
    },
    /// An import reads data of the archive that it did not request.
    #[error("a part of {disk} was not read: this is a bug, and the output is incomplete")]
    NotRead {
        /// The disk.
        disk: String,
    },
    /// An error of a VirtualBox machine.
    #[error(transparent)]
    VirtualBox(super::virtualbox::VirtualBoxError),
    /// The import would create a second machine with the same addresses as an existing one.
    #[error("the pool {pool} has this machine: {name} ({uuid})")]
    Twin {
        /// The pool.
        pool: String,
        /// Name of the existing machine in the pool.
        name: String,
        /// Its UUID.
        uuid: String,
    },
    /// The whole machine was sent, but the result of the import is unknown.
    #[error("the machine was sent to {pool}, but it is unknown whether the pool imported it")]
    Outcome {
        /// The pool.
        pool: String,
        /// Why the pool cannot be queried.
        source: holdfast_host::xapi::XapiError,
    },
    /// The machine is to be resumed from memory that the snapshot does not have.
    #[error("{snapshot} has no memory that a pool can resume from{}", if *is_of_qemu { ": it is from QEMU" } else { "" })]
    NoMemory {
        /// The snapshot.
        snapshot: String,
        /// Whether the snapshot has the memory of a QEMU machine.
        is_of_qemu: bool,
    },
    /// The memory exists, but the pool's records of that point in time do not: older versions did not store them.
    #[error(
        "{snapshot} has the memory of the machine, but not the records that its pool had then, without which it cannot be resumed"
    )]
    NoSuspendedRecords {
        /// The snapshot.
        snapshot: String,
    },
    /// A machine that resumes from memory needs all of its disks.
    #[error("the machine cannot be resumed without the disk {disk}, which {}", if *is_left_out { "is to be left out" } else { "is not in the snapshot" })]
    DiskOfMemory {
        /// The disk.
        disk: String,
        /// Whether the disk exists but is excluded.
        is_left_out: bool,
    },
    /// The size in the pool's records differs from the stored size.
    #[error("{name} has {size_bytes} bytes, and the records of the machine say {said_bytes}")]
    SizeOfMemory {
        /// The disk, or the memory.
        name: String,
        /// Size in the records.
        said_bytes: u64,
        /// Stored size.
        size_bytes: u64,
    },
    /// A machine cannot resume on processors of another vendor.
    #[error("the machine was started on processors of {vendor}, and {pool} has those of {there}")]
    Processors {
        /// The pool.
        pool: String,
        /// Vendor of the pool's processors.
        there: String,
        /// Vendor of the processors on which the machine ran.
        vendor: String,
    },
    /// The archive to create exists already.
    #[error("{} already exists", path.display())]
    FileTaken {
        /// The file.
        path: std::path::PathBuf,
    },
    /// The folder to create exists already.
    #[error("{} already exists and is not empty", path.display())]
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
