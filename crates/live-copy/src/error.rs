//! The errors of this crate.

use std::path::PathBuf;

use holdfast_host::ToolError;
use holdfast_serve::nbd::client::Error as NbdError;
use holdfast_transfer::{Forecast, StorageFailure};

use crate::request::RefusalKind;

/// Result of a live copy.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a live copy failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error that other jobs have, too.
    #[error(transparent)]
    Engine(holdfast_engine::Error),
    /// A connection to the receiver could not be made, or ended before it was used.
    #[error("{place}: the connection to the receiver failed")]
    Connection {
        /// Where the receiver is.
        place: String,
        /// Why.
        source: std::io::Error,
    },
    /// The program of the receiver ended.
    #[error("{place}: {reason}")]
    ConnectionRefused {
        /// Where the receiver is.
        place: String,
        /// Its reason.
        reason: String,
    },
    /// The program of the receiver could not be started.
    #[error("{place}: the receiver cannot be started")]
    Program {
        /// Where.
        place: String,
        /// Why.
        source: ToolError,
    },
    /// The receiver cannot take the disk.
    #[error("{}{reason}", at(.place))]
    Refused {
        /// Where the receiver is.
        place: String,
        /// The kind of the reason.
        kind: RefusalKind,
        /// Its reason.
        reason: String,
    },
    /// No connection could be made for too long.
    #[error("the connection to {place} was lost, and could not be made again within {waited_s} s: {reason}")]
    GivenUp {
        /// Where the receiver is.
        place: String,
        /// For how long it was tried.
        waited_s: u64,
        /// The last reason.
        reason: String,
    },
    /// The source writes faster than it is copied.
    #[error(
        "the copy does not converge: after round {}, {} bytes are left to send, which takes {} ms at {} MiB/s, and the source \
         may be frozen for {} ms",
        .0.round, .0.measured.dirty_bytes, .0.frozen.as_millis(), .0.bandwidth_bytes_per_s >> 20, .0.frozen_max.as_millis()
    )]
    NotConverging(Box<Forecast>),
    /// Every attempt would have frozen the source for too long.
    #[error("each of {attempt_count} attempts would have frozen the source for longer than {frozen_max_ms} ms")]
    FrozenTooLong {
        /// Number of attempts.
        attempt_count: u32,
        /// The limit.
        frozen_max_ms: u128,
    },
    /// The tracker of writes does not work.
    #[error("the tracker has missed writes, or the source is written although it is frozen")]
    TrackerInvalid,
    /// The source cannot be read, tracked or frozen.
    #[error("the source failed: {reason}")]
    Source {
        /// Why.
        reason: String,
    },
    /// The peer does not follow the protocol.
    #[error("{place}: the receiver does not follow the protocol: {reason}")]
    Protocol {
        /// Where the receiver is.
        place: String,
        /// What is wrong.
        reason: String,
    },
    /// A target exists.
    #[error("{} exists already", .path.display())]
    TargetExists {
        /// The target.
        path: PathBuf,
    },
    /// A target that is neither a file nor a block device, or a path without a file name.
    #[error("{} is neither a file nor a block device", .path.display())]
    TargetKind {
        /// The target.
        path: PathBuf,
    },
    /// The target cannot have the format that was asked for.
    #[error("{}: {reason}", .path.display())]
    TargetFormat {
        /// The target.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The image of an interrupted copy cannot be continued.
    #[error("the interrupted copy {} cannot be continued: {reason}", .path.display())]
    PartialImage {
        /// The image, by its temporary name.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// An export that is a target exists in any case.
    #[error("the copy overwrites the content of {address}")]
    ExportOverwritten {
        /// Its address.
        address: String,
    },
    /// The server of an export cannot make writes durable.
    #[error("the server of {address} offers no flush: what is written could be lost by a power failure at any time")]
    ExportNotDurable {
        /// Its address.
        address: String,
    },
    /// The server of an export that is the target cannot be reached, or refuses.
    #[error(transparent)]
    Export(NbdError),
    /// A seed cannot be read.
    #[error("the seed {} cannot be used: {reason}", .path.display())]
    Seed {
        /// The seed.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A seed does not fit beside what is at the target.
    #[error("the seed {} cannot be copied to the target: no space is left there", .path.display())]
    SeedNoSpace {
        /// The seed.
        path: PathBuf,
    },
    /// A target outside the folder that the receiver is restricted to.
    #[error("{} is not below {}, where this host receives disks", .path.display(), .folder.display())]
    TargetElsewhere {
        /// The target.
        path: PathBuf,
        /// The folder.
        folder: PathBuf,
    },
    /// The file system of the target is too small.
    #[error("{} bytes are needed at {}, {available_bytes} are available", .needed_bytes, .path.display())]
    NoSpace {
        /// The target.
        path: PathBuf,
        /// Bytes that the copy needs.
        needed_bytes: u64,
        /// Bytes that are available.
        available_bytes: u64,
    },
    /// Another process receives a disk at the same target.
    #[error("another process receives a disk at {}", .path.display())]
    TargetBusy {
        /// The target.
        path: PathBuf,
    },
    /// Another process uses the file that is to be replaced.
    #[error("another process uses {}, which would be replaced", .path.display())]
    TargetInUse {
        /// The target.
        path: PathBuf,
    },
    /// The target cannot be written or read.
    #[error("the target failed: {reason}")]
    Target {
        /// Why.
        reason: String,
    },
    /// An interrupted copy of another disk is at the target.
    #[error("{} holds an interrupted copy of a disk of {found_bytes} bytes, this disk has {size_bytes}", .path.display())]
    OtherSize {
        /// The target.
        path: PathBuf,
        /// Size of the interrupted copy.
        found_bytes: u64,
        /// Size of the disk.
        size_bytes: u64,
    },
    /// A file of the target.
    #[error("cannot {action} {}", .path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The journal of the target cannot be read.
    #[error("{}: {reason}", .path.display())]
    Journal {
        /// The journal.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The request of a sender is not valid.
    #[error("the request of the sender is not valid: {reason}")]
    Request {
        /// Why.
        reason: String,
    },
    /// A command to freeze or thaw the source.
    #[error("{command}: {reason}")]
    Command {
        /// The command.
        command: String,
        /// Why.
        reason: String,
    },
}

/// Begins an error of another host with its name.
fn at(place: &str) -> String {
    if place == THIS_HOST {
        String::new()
    } else {
        format!("{place}: ")
    }
}

/// The place of a receiver in this process.
pub(crate) const THIS_HOST: &str = "this host";

impl Error {
    /// The kind of an error of a receiver that has not begun.
    pub(crate) fn refusal_kind(&self) -> RefusalKind {
        use holdfast_engine::Error as Job;
        match self {
            Self::TargetExists { .. } | Self::ExportOverwritten { .. } | Self::Engine(Job::DeviceExists { .. }) => {
                RefusalKind::Exists
            }
            Self::NoSpace { .. } | Self::SeedNoSpace { .. } | Self::Engine(Job::TargetTooSmall { .. }) => {
                RefusalKind::NoSpace
            }
            Self::TargetBusy { .. } | Self::TargetInUse { .. } | Self::Engine(Job::DeviceInUse { .. }) => {
                RefusalKind::Locked
            }
            Self::OtherSize { .. } | Self::Journal { .. } | Self::PartialImage { .. } => RefusalKind::OtherCopy,
            Self::TargetKind { .. } | Self::TargetElsewhere { .. } | Self::TargetFormat { .. } => {
                RefusalKind::NotAllowed
            }
            Self::Seed { .. } => RefusalKind::Seed,
            Self::Request { .. } => RefusalKind::OtherVersion,
            _ => RefusalKind::Io,
        }
    }

    /// The kind of an error of a receiver that writes its target.
    pub(crate) fn storage_failure(&self) -> StorageFailure {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        let is_full = match self {
            Self::Engine(holdfast_engine::Error::Device(error)) => error.is_no_space(),
            Self::File { source, .. } => matches!(source.kind(), StorageFull | QuotaExceeded),
            _ => false,
        };
        if is_full {
            StorageFailure::NoSpace
        } else {
            StorageFailure::Other
        }
    }
}

impl From<holdfast_engine::Error> for Error {
    fn from(error: holdfast_engine::Error) -> Self {
        Self::Engine(error)
    }
}

impl From<holdfast_block::Error> for Error {
    fn from(error: holdfast_block::Error) -> Self {
        Self::Engine(error.into())
    }
}

impl From<holdfast_image::Error> for Error {
    fn from(error: holdfast_image::Error) -> Self {
        Self::Engine(error.into())
    }
}

impl From<NbdError> for Error {
    fn from(error: NbdError) -> Self {
        Self::Export(error)
    }
}
