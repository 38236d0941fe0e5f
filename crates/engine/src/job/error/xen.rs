//! What can be wrong with a backup of a machine of a pool.

use holdfast_host::xapi::XapiError;

use super::Error;

/// Why a machine of a pool cannot be backed up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum XenBackupError {
    /// What the pool says.
    #[error(transparent)]
    Pool(#[from] XapiError),
    /// A machine that is called in a way in which no machine is called here.
    #[error("the machine is called {name:?}, and cannot be listed so")]
    Name {
        /// Its name.
        name: String,
        /// Why.
        source: crate::NameError,
    },
    /// The disks cannot be read in the way that was asked for.
    #[error("the disks of {machine} cannot be read by {way}: {reason}")]
    NoWay {
        /// The machine.
        machine: String,
        /// The way.
        way: &'static str,
        /// Why not.
        reason: String,
    },
    /// The snapshot has not what the machine has.
    #[error("the snapshot that the pool has taken of {machine} lacks the disk {device}")]
    DiskMissing {
        /// The machine.
        machine: String,
        /// The disk.
        device: String,
    },
    /// The machine was given another disk, or another size of one, between what the pool said of it and its snapshot.
    #[error("the disk {device} of {machine} has changed while the pool took its snapshot")]
    DiskChanged {
        /// The machine.
        machine: String,
        /// The disk.
        device: String,
    },
}

impl From<XenBackupError> for Error {
    fn from(error: XenBackupError) -> Self {
        Self::Xen(Box::new(error))
    }
}

impl From<XapiError> for Error {
    fn from(error: XapiError) -> Self {
        match error {
            XapiError::Interrupted => Self::from(crate::Interrupted),
            error => XenBackupError::Pool(error).into(),
        }
    }
}

/// What breaks a disk that comes from a pool is about the pool, and not about an archive, as which it is read.
impl From<holdfast_archive::Error> for Error {
    fn from(error: holdfast_archive::Error) -> Self {
        match error {
            holdfast_archive::Error::Read { offset, source } => match source.downcast::<XapiError>() {
                Ok(error) => error.into(),
                Err(source) => Self::Archive(holdfast_archive::Error::Read { offset, source }),
            },
            other => Self::Archive(other),
        }
    }
}
