//! What programs that are started do not learn.

use std::ffi::OsStr;
use std::process::Command;

/// How the variables of ours begin that have to do with passwords, and what is in their names.
const OURS: &str = "HOLDFAST_";
const ABOUT_PASSWORDS: &str = "PASSWORD";

/// A program that gets our environment, but none of its variables that are about passwords: a hook, ssh or curl needs none of them, and
/// might show its environment, or leave it in a log. All programs are started by this, but the program itself.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = command_with_secrets(program);
    for (name, _) in std::env::vars_os() {
        if is_about_passwords(&name) {
            command.env_remove(name);
        }
    }
    command
}

/// The program itself, as a job of a daemon: it opens the repository.
pub(super) fn command_with_secrets(program: impl AsRef<OsStr>) -> Command {
    #[expect(clippy::disallowed_methods, reason = "this is the place")]
    Command::new(program)
}

fn is_about_passwords(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name.starts_with(OURS) && name.contains(ABOUT_PASSWORDS)
}

#[cfg(test)]
mod tests {
    use super::is_about_passwords;

    #[test]
    fn all_variables_about_passwords_are_secrets() {
        for name in [
            "HOLDFAST_PASSWORD",
            "HOLDFAST_TO_PASSWORD",
            "HOLDFAST_POOL_PASSWORD",
            "HOLDFAST_PASSWORD_COMMAND",
            "HOLDFAST_NEXT_YEARS_PASSWORD_FILE",
        ] {
            assert!(is_about_passwords(name.as_ref()), "{name}");
        }
        for name in ["PATH", "HOLDFAST_REPOSITORY", "POSTGRES_PASSWORD"] {
            assert!(!is_about_passwords(name.as_ref()), "{name}");
        }
    }
}
