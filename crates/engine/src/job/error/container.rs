//! Errors of containers.

use std::path::PathBuf;

/// Why a container cannot be mounted or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContainerError {
    /// The folder of a new container exists.
    #[error("{} exists already", folder.display())]
    Exists {
        /// The folder.
        folder: PathBuf,
    },
    /// Another process is creating the container, or was killed and its disk is still mounted.
    #[error("another process is creating {}, or was killed while it did", folder.display())]
    BeingCreated {
        /// The folder.
        folder: PathBuf,
    },
    /// The disk has none or several file systems.
    #[error("the disk of {} has {what}", container.display())]
    NoFileSystem {
        /// The container.
        container: PathBuf,
        /// What it has.
        what: &'static str,
    },
    /// A program of a file system is missing or has failed.
    #[error("{program} failed: {reason}")]
    Program {
        /// The program.
        program: String,
        /// The package that has it.
        package: &'static str,
        /// The reason.
        reason: String,
    },
    /// The disk cannot become a block device.
    #[error("make a block device of {}", file.display())]
    LoopDevice {
        /// The file.
        file: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The disk cannot become a block device of NBD.
    #[error("make an NBD device of {}", container.display())]
    NbdDevice {
        /// The container.
        container: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The file system cannot be mounted.
    #[error("mount the {kind} on {}", folder.display())]
    Mount {
        /// The folder.
        folder: PathBuf,
        /// The file system.
        kind: &'static str,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Programs use the file system.
    #[error("{} is in use", folder.display())]
    InUse {
        /// The mount point.
        folder: PathBuf,
    },
    /// The file system cannot be unmounted.
    #[error("unmount {}", folder.display())]
    Unmount {
        /// The mount point.
        folder: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The request needs a container that is not mounted.
    #[error("{} is mounted", container.display())]
    Mounted {
        /// The container.
        container: PathBuf,
    },
    /// The request needs a mounted container.
    #[error("{} is not mounted", container.display())]
    NotMounted {
        /// The container.
        container: PathBuf,
    },
    /// The container was migrated to another host.
    #[error("{} was migrated to {target}", container.display())]
    Relocated {
        /// The container.
        container: PathBuf,
        /// Its address now.
        target: String,
    },
    /// The container is in use, and its server cannot be asked.
    #[error("{} is in use, and its server does not answer", container.display())]
    NoAnswer {
        /// The container.
        container: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The server of the container has refused a request.
    #[error("{message}")]
    Server {
        /// The kind of the failure.
        failure: ServerFailure,
        /// The message of the server.
        message: String,
    },
    /// A snapshot of a mounted container cannot be consistent.
    #[error("the file system of {} cannot be frozen: {reason}", container.display())]
    NotFrozen {
        /// The container.
        container: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A snapshot of a repository has no container, or more than its disk.
    #[error("snapshot {snapshot} of {machine} is not of a container")]
    NotOfContainer {
        /// The machine.
        machine: String,
        /// The first digits of its id.
        snapshot: String,
    },
    /// The configuration in a snapshot is damaged, or of a later version.
    #[error("the stream {name} of the snapshot is not valid: {detail}")]
    Configuration {
        /// The stream.
        name: &'static str,
        /// The reason.
        detail: String,
    },
    /// A snapshot with the memory of processes cannot be taken or resumed.
    #[error("{what}")]
    Memory {
        /// What is the matter.
        problem: MemoryProblem,
        /// The message.
        what: String,
    },
    /// The server runs another version of the program.
    #[error("the server of {} runs another version of the program", container.display())]
    OtherVersion {
        /// The container.
        container: PathBuf,
    },
}

/// Why a snapshot with the memory of processes cannot be taken or resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryProblem {
    /// runc cannot be used.
    NoRunc,
    /// The program is another runtime.
    NotRunc,
    /// CRIU cannot be used.
    NoCriu,
    /// CRIU is too old.
    OldCriu,
    /// `criu check` has found that the kernel lacks something.
    CriuCheck,
    /// Another snapshot with memory is being taken.
    Busy,
    /// A path cannot be recorded.
    NoText,
    /// The container does not run.
    NotRunning,
    /// Its root file system is not on the disk.
    OtherDisk,
    /// Its memory could not be written.
    Checkpoint,
    /// It could not be resumed after a snapshot.
    StaysPaused,
    /// The current state is not based on a snapshot with memory.
    NoMemory,
    /// The disk was written after the switch.
    DiskChanged,
    /// The configuration of the bundle is another one than in the snapshot.
    ConfigChanged,
    /// A container of this name runs.
    IdInUse,
    /// Its processes could not be started from their memory.
    Restore,
}

/// The kind of a failure in the server of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServerFailure {
    /// A snapshot does not exist.
    NotFound,
    /// A name or a size is not valid.
    Invalid,
    /// The request does harm, or the format does not support it.
    Refused,
    /// A layer is in use.
    Locked,
    /// A layer is damaged.
    Damaged,
    /// The request was stopped.
    Interrupted,
    /// Reading or writing failed.
    Io,
    /// The file system cannot be frozen.
    NotFrozen,
}
