//! Why something cannot be served.

/// Why a disk or an image cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServingError {
    /// An export of the server has this name already.
    #[error("an export is named {name:?} already")]
    NameInUse {
        /// The name.
        name: String,
    },
    /// There is no such image format.
    #[error("{name:?} is not an image format")]
    UnknownFormat {
        /// The name.
        name: String,
    },
    /// Standard input cannot be served: clients read at any offset.
    #[error("standard input cannot be served")]
    StandardInput,
    /// A snapshot is served only if a repository is open.
    #[error("snapshots need a repository, and the server has none")]
    NoRepository,
    /// Another process serves the disks of a machine to the host where it runs.
    #[error("the disks are served to the other host already: {} is in use", record.display())]
    PullInProgress {
        /// The record of the move.
        record: std::path::PathBuf,
    },
    /// The exports of a server could not be changed.
    #[error(transparent)]
    Registry(#[from] holdfast_serve::registry::RegistryError),
}

impl From<holdfast_serve::registry::RegistryError> for super::Error {
    fn from(error: holdfast_serve::registry::RegistryError) -> Self {
        Self::Serving(error.into())
    }
}
