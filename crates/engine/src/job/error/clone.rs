//! Why an image cannot be cloned.

use std::path::PathBuf;

/// Why an image cannot be cloned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CloneError {
    /// An image cannot be cloned at once.
    #[error("{} cannot be cloned without copying it: {reason}", path.display())]
    NoClone {
        /// The image.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// An image that a machine writes to is not of one instant.
    #[error("{} is in use: a machine may write to it", path.display())]
    Written {
        /// The image.
        path: PathBuf,
    },
    /// What a guest believes itself to be cannot be made anew.
    #[error("the guest in {} cannot be given an identity of its own: {reason}", path.display())]
    GuestIdentity {
        /// The image.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
}
