//! Environment variables that subprocesses do not get.

use std::ffi::OsStr;
use std::process::Command;

/// Prefix of Holdfast's variables, and a part of the names of variables with passwords.
const PREFIX: &str = "HOLDFAST_";
const PASSWORD_PART: &str = "PASSWORD";

/// A program that gets the environment of this process, except for the variables with passwords. A hook, ssh or curl
/// does not need them, and could print its environment or write it to a log. All programs except Holdfast itself are
/// started by this function.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = command_with_secrets(program);
    for (name, _) in std::env::vars_os() {
        if is_password_variable(&name) {
            command.env_remove(name);
        }
    }
    command
}

/// Holdfast itself, as a job of the daemon. It needs the passwords to open the repository.
pub(super) fn command_with_secrets(program: impl AsRef<OsStr>) -> Command {
    #[expect(clippy::disallowed_methods, reason = "this is the place")]
    Command::new(program)
}

fn is_password_variable(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name.starts_with(PREFIX) && name.contains(PASSWORD_PART)
}

#[cfg(test)]
mod tests {
    use super::is_password_variable;

    #[test]
    fn all_variables_about_passwords_are_secrets() {
        for name in [
            "HOLDFAST_PASSWORD",
            "HOLDFAST_TO_PASSWORD",
            "HOLDFAST_POOL_PASSWORD",
            "HOLDFAST_PASSWORD_COMMAND",
            "HOLDFAST_NEXT_YEARS_PASSWORD_FILE",
        ] {
            assert!(is_password_variable(name.as_ref()), "{name}");
        }
        for name in ["PATH", "HOLDFAST_REPOSITORY", "POSTGRES_PASSWORD"] {
            assert!(!is_password_variable(name.as_ref()), "{name}");
        }
    }
}
