//! Why an image cannot be cloned.

use std::path::PathBuf;

/// Why an image cannot be cloned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CloneError {
    /// The file system cannot clone the image.
    #[error("{} cannot be cloned without copying it: {reason}", path.display())]
    NoClone {
        /// The image.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A machine writes to the image, so the clone would not be of one point in time.
    #[error("{} is in use: a machine may write to it", path.display())]
    Written {
        /// The image.
        path: PathBuf,
    },
    /// The guest cannot be given a new identity.
    #[error("the guest in {} cannot be given an identity of its own: {reason}", path.display())]
    GuestIdentity {
        /// The image.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
}
