//! Why a password is not available.

use std::path::PathBuf;

use crate::process::command::CommandError;

/// Longest password, in bytes.
pub const PASSWORD_BYTES_MAX: usize = 4096;

/// Why a password is not available.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PasswordError {
    /// Two sources are given, and it is unclear which one is meant.
    #[error("{first} and {second} are both given, and only one can hold the password")]
    Ambiguous {
        /// One source.
        first: &'static str,
        /// The other source.
        second: &'static str,
    },
    /// A file cannot be read.
    #[error("read the password from {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The command could not be run.
    #[error("run the password command")]
    Command(#[source] CommandError),
    /// The command failed.
    #[error("the password command failed ({status})")]
    CommandFailed {
        /// Its exit status.
        status: std::process::ExitStatus,
    },
    /// The first line is empty.
    #[error("the password from {origin} is empty")]
    Empty {
        /// The source.
        origin: String,
    },
    /// The first line is longer than any password.
    #[error("the password from {origin} is longer than {PASSWORD_BYTES_MAX} bytes")]
    TooLong {
        /// The source.
        origin: String,
    },
    /// No source is given, and there is no terminal to ask on.
    #[error("no password is given, and there is no terminal to ask on")]
    NoTerminal,
    /// The same, for a new password.
    #[error("no new password is given, and there is no terminal to ask on")]
    NoTerminalForNew,
    /// The same, for the password of another repository, which these options provide.
    #[error("no password of the other repository is given, and there is no terminal to ask on")]
    NoTerminalForOther {
        /// The options.
        options: &'static str,
    },
    /// The same, for the user of a pool.
    #[error("no password of the pool's user is given, and there is no terminal to ask on")]
    NoTerminalForPool,
    /// Reading from the terminal failed.
    #[error("ask for the password")]
    Prompt(#[source] std::io::Error),
    /// The two entries of a new password differ.
    #[error("the two passwords are not the same")]
    Mismatch,
}
