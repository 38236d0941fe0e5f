//! What can go wrong with providers.

use std::path::PathBuf;

use crate::system::process::ToolError;

/// An error of a provider.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProviderError {
    /// Its program is there, and what does its work is not.
    #[error("{provider} does not answer on this host: {reason}")]
    NoService {
        /// Who.
        provider: &'static str,
        /// Its words.
        reason: String,
    },
    /// There is no such dataset, or host snapshot.
    #[error("there is no {what}")]
    NotThere {
        /// What was looked for.
        what: String,
    },
    /// One of this name is there already.
    #[error("{what} is there already")]
    Exists {
        /// What.
        what: String,
    },
    /// Another one has its name since it was looked at.
    #[error("{what} is not the one that was inspected: it was replaced since by another one of the same name")]
    Replaced {
        /// What.
        what: String,
    },
    /// Somebody holds it.
    #[error("{what} is held: {reason}")]
    Held {
        /// What.
        what: String,
        /// By whom, as far as is known.
        reason: String,
    },
    /// There are clones of it, which need it.
    #[error("{what} has clones, which need it: {clones}")]
    HasClones {
        /// What.
        what: String,
        /// Which, as far as is known.
        clones: String,
    },
    /// There is no room.
    #[error("{action} {what}: no space is left")]
    Full {
        /// What was tried.
        action: &'static str,
        /// With what.
        what: String,
    },
    /// The pool takes no I/O.
    #[error("{action} {what}: its pool is suspended, since devices of it are gone or fail")]
    Suspended {
        /// What was tried.
        action: &'static str,
        /// With what.
        what: String,
    },
    /// A name that the provider cannot have.
    #[error("{name:?} cannot be the name of a host snapshot: {reason}")]
    Name {
        /// The name.
        name: String,
        /// Why not.
        reason: &'static str,
    },
    /// The provider refuses, or fails.
    #[error("{action} {what}: {reason}")]
    Refused {
        /// What was tried.
        action: &'static str,
        /// With what.
        what: String,
        /// The provider's words.
        reason: String,
    },
    /// What the provider says makes no sense.
    #[error("{program} answers what makes no sense: {detail}")]
    Senseless {
        /// Who.
        program: &'static str,
        /// What.
        detail: String,
    },
    /// A program did not answer.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// A file or folder.
    #[error("cannot {action} {}", .path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}
