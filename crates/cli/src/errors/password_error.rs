//! Why there is no password.

use std::path::PathBuf;

use crate::process::command::CommandError;

/// Longest password, in bytes.
pub const PASSWORD_BYTES_MAX: usize = 4096;

/// Why there is no password.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PasswordError {
    /// Two places to take it from, and no way to tell which is meant.
    #[error("{first} and {second} are both given, and only one can hold the password")]
    Ambiguous {
        /// One place.
        first: &'static str,
        /// The other.
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
    /// The command did not run.
    #[error("run the password command")]
    Command(#[source] CommandError),
    /// The command says that it failed.
    #[error("the password command failed ({status})")]
    CommandFailed {
        /// How it ended.
        status: std::process::ExitStatus,
    },
    /// The first line is empty.
    #[error("the password from {origin} is empty")]
    Empty {
        /// Where it came from.
        origin: String,
    },
    /// The first line is longer than any password.
    #[error("the password from {origin} is longer than {PASSWORD_BYTES_MAX} bytes")]
    TooLong {
        /// Where it came from.
        origin: String,
    },
    /// Nothing is given, and there is no terminal to ask on.
    #[error("no password is given, and there is no terminal to ask on")]
    NoTerminal,
    /// The same, for a password that is to be new.
    #[error("no new password is given, and there is no terminal to ask on")]
    NoTerminalForNew,
    /// The same, for the password of another repository, which these options give.
    #[error("no password of the other repository is given, and there is no terminal to ask on")]
    NoTerminalForOther {
        /// The options.
        options: &'static str,
    },
    /// The same, for the user of a pool.
    #[error("no password of the pool's user is given, and there is no terminal to ask on")]
    NoTerminalForPool,
    /// The terminal broke off.
    #[error("ask for the password")]
    Prompt(#[source] std::io::Error),
    /// The two entries of a new password differ.
    #[error("the two passwords are not the same")]
    Mismatch,
}
