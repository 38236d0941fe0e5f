//! Errors of the program, and the advice on them.
//!
//! [`Error::advice`] (in `advice.rs`) is the only place that maps the errors of all crates to an exit code, a word for
//! scripts and a hint.

mod advice;
mod kind;
mod password_error;

use std::borrow::Cow;
use std::path::PathBuf;

use holdfast_engine::{Interrupted, NameError, ResolveError};
use holdfast_repo::key::KeyError;
use holdfast_repo::store::StoreError;

pub use advice::Advice;
pub(crate) use advice::device_advice as advice_on_device;
pub use kind::Kind;
pub use password_error::{PASSWORD_BYTES_MAX, PasswordError};

/// Any failure of a verb.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The verb needs a repository.
    #[error("no repository is given")]
    NoRepository,
    /// A word that is neither the path nor the name of a repository.
    #[error("there is no folder {name} here, and no repository of that name in {}", config.display())]
    NoRepositoryOfName {
        /// The word.
        name: String,
        /// The holdfast.toml.
        config: std::path::PathBuf,
    },
    /// Other users can change a file whose settings are executed.
    #[error("{} is not trusted: {why}", path.display())]
    NotObeyed {
        /// The file.
        path: std::path::PathBuf,
        /// The reason.
        why: String,
    },
    /// The verb's output is data, not a report.
    #[error("{command} prints data, which --json cannot hold")]
    NoJson {
        /// The verb.
        command: &'static str,
    },
    /// No password is available.
    #[error(transparent)]
    Password(#[from] PasswordError),
    /// The name of a machine, disk or snapshot is invalid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A name matches no snapshot, or more than one.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// The user stopped the job.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// A disk, an image or a snapshot cannot be read or written.
    #[error(transparent)]
    Device(#[from] holdfast_block::Error),
    /// The storage of the repository does not work as required.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The keys of the repository do not open it, or cannot be changed.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A job ended for another reason.
    #[error(transparent)]
    Engine(holdfast_engine::Error),
    /// Options that contradict each other.
    #[error("{what}")]
    Usage {
        /// The problem.
        what: Cow<'static, str>,
        /// What to do instead.
        hint: Cow<'static, str>,
    },
    /// The command line is valid, but the request can never succeed in the present state.
    #[error("{what}")]
    Refused {
        /// The kind for scripts.
        kind: Kind,
        /// Why.
        what: Cow<'static, str>,
        /// What to do instead.
        hint: Cow<'static, str>,
    },
    /// A running server has refused a request.
    #[error("{}", .0.messages.join(": "))]
    Server(holdfast_engine::ControlError),
    /// The retention cannot be simulated with these values.
    #[error(transparent)]
    Simulation(#[from] holdfast_policy::SimulationError),
    /// A pattern, a tag or "all" matches no machine.
    #[error("no machine at {uri} matches {said}")]
    NoMachines {
        /// The word as given.
        said: String,
        /// The address of libvirt.
        uri: String,
    },
    /// A file that the verb itself reads or writes.
    #[error("{action} {}", path.display())]
    File {
        /// The attempted action: "read", "write".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The answer cannot be written.
    #[error("write to standard output")]
    Stdout(#[source] std::io::Error),
    /// Standard input cannot be used.
    #[error("look at standard input")]
    Stdin(#[source] std::io::Error),
    /// The report cannot be converted to JSON.
    #[error("write the answer as JSON")]
    Json(#[source] serde_json::Error),
    /// The signal handlers cannot be installed.
    #[error("listen for Ctrl-C")]
    Signals(#[source] std::io::Error),
}

impl Error {
    /// An error for options that contradict each other: the problem and the solution.
    pub fn usage(what: impl Into<Cow<'static, str>>, hint: impl Into<Cow<'static, str>>) -> Self {
        Self::Usage {
            what: what.into(),
            hint: hint.into(),
        }
    }
}

impl Error {
    /// An error for a request that cannot succeed in the present state: its kind for scripts, the reason, and
    /// the solution.
    pub fn refused(kind: Kind, what: impl Into<Cow<'static, str>>, hint: impl Into<Cow<'static, str>>) -> Self {
        Self::Refused {
            kind,
            what: what.into(),
            hint: hint.into(),
        }
    }

    /// Whether the error means that a machine does not exist (any more).
    pub fn is_no_such_machine(&self) -> bool {
        let Self::Engine(holdfast_engine::Error::Host(error)) = self else {
            return false;
        };
        matches!(**error, holdfast_host::Error::NoSuchMachine { .. })
    }
}

/// The kind of an error does not depend on the number of levels it passed through.
impl From<holdfast_engine::Error> for Error {
    fn from(error: holdfast_engine::Error) -> Self {
        use holdfast_engine::Error as Job;
        use holdfast_repo::Error as Repository;
        match error {
            Job::Name(error) => Self::Name(error),
            Job::Resolve(error) => Self::Resolve(error),
            Job::Interrupted(error) => Self::Interrupted(error),
            Job::Device(error) => Self::Device(error),
            Job::Stdout(error) => Self::Stdout(error),
            Job::File { action, path, source } => Self::File { action, path, source },
            Job::Repository(Repository::Store(error)) => Self::Store(error),
            Job::Repository(Repository::Key(error)) => Self::Key(error),
            other => Self::Engine(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use holdfast_block::error_messages;

    use super::{Error, PasswordError};
    use crate::process::command::CommandError;

    #[test]
    fn the_chain_runs_from_what_to_why() {
        let reason = std::io::Error::new(ErrorKind::PermissionDenied, "permission denied");
        let error = Error::Password(PasswordError::Command(CommandError::Io(reason)));
        assert_eq!(
            error_messages(&error),
            ["run the password command", "permission denied"]
        );
    }
}
