//! What can go wrong in the program, and what to tell a person about it.
//!
//! [`Error::advice`] is the one place that turns the kinds of errors of all crates into an exit code, a word for scripts
//! and a hint what to do next.

use std::path::PathBuf;

use holdfast_engine::{Interrupted, NameError, ResolveError};

use crate::environment;
use crate::exit::Exit;
use crate::password::PasswordError;

/// Any failure of a verb.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The verb needs a repository.
    #[error("no repository is given")]
    NoRepository,
    /// The verb's answer is data, not a report.
    #[error("{command} prints data, which --json cannot hold")]
    NoJson {
        /// The verb.
        command: &'static str,
    },
    /// There is no password.
    #[error(transparent)]
    Password(#[from] PasswordError),
    /// A machine, disk or snapshot is called what none can be called.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A name means no snapshot, or more than one.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// A person stopped the job.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// A file that the verb itself reads or writes.
    #[error("{action} {}", path.display())]
    File {
        /// What was tried: "read", "write".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// The answer cannot be written.
    #[error("write to standard output")]
    Stdout(#[source] std::io::Error),
    /// The answer has no JSON form.
    #[error("write the answer as JSON")]
    Json(#[source] serde_json::Error),
    /// The operating system refuses to tell of signals.
    #[error("listen for Ctrl-C")]
    Signals(#[source] std::io::Error),
}

/// What to make of an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// How the program ends.
    pub exit: Exit,
    /// A stable word for scripts.
    pub kind: &'static str,
    /// What a person may do next.
    pub hint: Option<String>,
}

impl Error {
    /// What to make of it.
    pub fn advice(&self) -> Advice {
        match self {
            Self::NoRepository => advice(
                Exit::Usage,
                "no-repository",
                format!("give --repository LOCATION, or set {}", environment::REPOSITORY),
            ),
            Self::NoJson { .. } => advice(Exit::Usage, "usage", "leave --json out"),
            Self::Password(error) => password_advice(error),
            Self::Name(_) => advice(
                Exit::Usage,
                "bad-name",
                "a snapshot is named by its id, or as MACHINE, MACHINE@latest or MACHINE@2026-11-20T10:00, and a disk of it with :DISK",
            ),
            Self::Resolve(error) => resolve_advice(error),
            Self::Interrupted(_) => plain(Exit::Error, "interrupted"),
            Self::File { source, .. } | Self::Stdout(source) => io_advice(source),
            Self::Json(_) | Self::Signals(_) => plain(Exit::Error, "io"),
        }
    }
}

fn password_advice(error: &PasswordError) -> Advice {
    match error {
        PasswordError::Ambiguous { first, second } => {
            advice(Exit::Usage, "usage", format!("leave out {first} or {second}"))
        }
        PasswordError::NoTerminal => advice(
            Exit::Usage,
            "no-password",
            format!(
                "give --password-file FILE or --password-command COMMAND, set {} or {}, or add the systemd credential holdfast.password",
                environment::PASSWORD_FILE,
                environment::PASSWORD_COMMAND
            ),
        ),
        PasswordError::File { .. } | PasswordError::Prompt(_) => plain(Exit::Error, "password"),
        PasswordError::Command(_) | PasswordError::CommandFailed { .. } => advice(
            Exit::Error,
            "password",
            "run the command by itself with /bin/sh -c and see what it says",
        ),
        PasswordError::Empty { .. } | PasswordError::TooLong { .. } => {
            advice(Exit::Error, "password", "the password is all of the first line")
        }
        PasswordError::Mismatch => advice(Exit::Error, "password", "nothing was changed; try again"),
    }
}

fn resolve_advice(error: &ResolveError) -> Advice {
    match error {
        ResolveError::Ambiguous { .. } => advice(Exit::Error, "ambiguous", "give more digits of the id"),
        ResolveError::NoSnapshots => advice(Exit::Error, "not-found", "holdfast backup makes one"),
        ResolveError::PrefixTooShort { .. } => plain(Exit::Usage, "bad-name"),
        _ => advice(Exit::Error, "not-found", "holdfast list shows what there is"),
    }
}

fn io_advice(error: &std::io::Error) -> Advice {
    use std::io::ErrorKind;
    let hint = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "make room on the target and try again",
        ErrorKind::PermissionDenied => "try as a user who may do that",
        ErrorKind::NotFound => "check the spelling; folders must exist",
        _ => return plain(Exit::Error, "io"),
    };
    advice(Exit::Error, "io", hint)
}

fn advice(exit: Exit, kind: &'static str, hint: impl Into<String>) -> Advice {
    Advice {
        exit,
        kind,
        hint: Some(hint.into()),
    }
}

fn plain(exit: Exit, kind: &'static str) -> Advice {
    Advice { exit, kind, hint: None }
}

/// The messages of `error` and of its causes, from the outermost to the innermost; never empty.
///
/// A cause that says the same as what it caused is left out.
pub fn chain(error: &dyn std::error::Error) -> Vec<String> {
    let mut messages = vec![error.to_string()];
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if messages.last() != Some(&message) {
            messages.push(message);
        }
        cause = error.source();
    }
    messages
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::{Error, chain};
    use crate::command::CommandError;
    use crate::exit::Exit;
    use crate::password::PasswordError;

    #[test]
    fn the_chain_runs_from_what_to_why() {
        let reason = std::io::Error::new(ErrorKind::PermissionDenied, "permission denied");
        let error = Error::Password(PasswordError::Command(CommandError::Io(reason)));
        assert_eq!(chain(&error), ["run the password command", "permission denied"]);
    }

    #[test]
    fn what_a_person_can_mend_has_a_hint() {
        let full = Error::Stdout(ErrorKind::StorageFull.into());
        assert_eq!(
            full.advice().hint.as_deref(),
            Some("make room on the target and try again")
        );
        let lost = Error::Password(PasswordError::NoTerminal).advice();
        assert_eq!((lost.exit, lost.kind), (Exit::Usage, "no-password"));
        for way in [
            "--password-file",
            "--password-command",
            "HOLDFAST_PASSWORD_FILE",
            "systemd",
        ] {
            assert!(lost.hint.as_deref().unwrap().contains(way), "{way}");
        }
    }
}
