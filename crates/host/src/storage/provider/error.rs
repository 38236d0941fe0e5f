//! Errors of providers.

use std::path::PathBuf;

use crate::system::process::ToolError;

/// An error of a provider.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProviderError {
    /// The program exists, but its kernel module or service does not run.
    #[error("{provider} does not answer on this host: {reason}")]
    NoService {
        /// The provider.
        provider: &'static str,
        /// The message of the program.
        reason: String,
    },
    /// There is no such dataset or host snapshot.
    #[error("there is no {what}")]
    NotFound {
        /// The missing object.
        what: String,
    },
    /// The name is in use.
    #[error("{what} already exists")]
    Exists {
        /// The existing object.
        what: String,
    },
    /// Another object got the name after the object was inspected.
    #[error("{what} is not the one that was inspected: it was replaced since by another one of the same name")]
    Replaced {
        /// The object.
        what: String,
    },
    /// The object has holds.
    #[error("{what} is held: {reason}")]
    Held {
        /// The object.
        what: String,
        /// The holders, if known.
        reason: String,
    },
    /// The object has clones, which depend on it.
    #[error("{what} has clones, which need it: {clones}")]
    HasClones {
        /// The object.
        what: String,
        /// The clones, if known.
        clones: String,
    },
    /// There is no space left.
    #[error("cannot {action} {what}: no space is left")]
    Full {
        /// The action.
        action: &'static str,
        /// The object.
        what: String,
    },
    /// The pool is suspended.
    #[error("cannot {action} {what}: its pool is suspended because devices are missing or fail")]
    Suspended {
        /// The action.
        action: &'static str,
        /// The object.
        what: String,
    },
    /// A name that the provider does not permit.
    #[error("{name:?} cannot be the name of a host snapshot: {reason}")]
    Name {
        /// The name.
        name: String,
        /// The reason.
        reason: &'static str,
    },
    /// The provider refuses, or fails.
    #[error("cannot {action} {what}: {reason}")]
    Refused {
        /// The action.
        action: &'static str,
        /// The object.
        what: String,
        /// The provider's message.
        reason: String,
    },
    /// The provider's output is invalid.
    #[error("the output of {program} is invalid: {detail}")]
    Invalid {
        /// The program.
        program: &'static str,
        /// What is wrong with the output.
        detail: String,
    },
    /// A program could not be run.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// An operation on a file or folder failed.
    #[error("cannot {action} {}", .path.display())]
    File {
        /// The action.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
}
