//! Advice on missing or unreadable passwords.

use super::Advice;
use super::{advice, plain};
use crate::errors::Kind;
use crate::errors::PasswordError;
use crate::exit::Exit;
use crate::process::environment;

pub(super) fn password_advice(error: &PasswordError) -> Advice {
    match error {
        PasswordError::Ambiguous { first, second } => {
            advice(Exit::Usage, Kind::Usage, format!("leave out {first} or {second}"))
        }
        PasswordError::NoTerminal => advice(
            Exit::Usage,
            Kind::NoPassword,
            format!(
                "use --password-file FILE or --password-command COMMAND, set {} or {}, or add the systemd credential holdfast.password",
                environment::PASSWORD_FILE,
                environment::PASSWORD_COMMAND
            ),
        ),
        PasswordError::NoTerminalForNew => advice(
            Exit::Usage,
            Kind::NoPassword,
            "use --new-password-file FILE or --new-password-command COMMAND",
        ),
        PasswordError::NoTerminalForPool => advice(
            Exit::Usage,
            Kind::NoPassword,
            "use --pool-password-file or --pool-password-command, or set HOLDFAST_POOL_PASSWORD_FILE",
        ),
        PasswordError::NoTerminalForOther { options } => {
            advice(Exit::Usage, Kind::NoPassword, format!("give {options}"))
        }
        PasswordError::File { .. } | PasswordError::Prompt(_) => plain(Exit::Error, Kind::Password),
        PasswordError::Command(_) | PasswordError::CommandFailed { .. } => advice(
            Exit::Error,
            Kind::Password,
            "run the command alone by /bin/sh -c, and read its messages",
        ),
        PasswordError::Empty { .. } | PasswordError::TooLong { .. } => {
            advice(Exit::Error, Kind::Password, "the password is all of the first line")
        }
        PasswordError::Mismatch => advice(Exit::Error, Kind::Password, "nothing was changed; try again"),
    }
}
