//! Errors of a backup of a machine in a XenServer pool.

use holdfast_host::xapi::XapiError;

use super::Error;

/// Why a machine of a pool cannot be backed up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum XenBackupError {
    /// An error of the pool.
    #[error(transparent)]
    Pool(#[from] XapiError),
    /// The name of the machine is not a valid name here.
    #[error("the machine is called {name:?}, which cannot be the name of a machine here")]
    Name {
        /// Its name.
        name: String,
        /// Why it is not valid.
        source: crate::NameError,
    },
    /// The disks cannot be read in the requested way.
    #[error("the disks of {machine} cannot be read by {way}: {reason}")]
    NoWay {
        /// The machine.
        machine: String,
        /// The requested way.
        way: &'static str,
        /// Why not.
        reason: String,
    },
    /// The snapshot lacks a disk of the machine.
    #[error("the snapshot that the pool has taken of {machine} lacks the disk {device}")]
    DiskMissing {
        /// The machine.
        machine: String,
        /// The disk.
        device: String,
    },
    /// A disk was added or resized between the query of the pool and the snapshot.
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

/// The archive reader also reads disks from a pool. Its errors then concern the pool, not an archive.
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
