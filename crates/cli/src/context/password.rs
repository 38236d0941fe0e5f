//! The source of a password, and its protected memory.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use crate::args::{LikePasswordArgs, LuksArgs, NewPasswordArgs, PasswordArgs, PoolArgs, ToPasswordArgs};
use crate::errors::{PASSWORD_BYTES_MAX, PasswordError};
use crate::process::command::run_shell;
use crate::process::environment::{self, Environment};
use crate::process::terminal::Prompt;

/// The names of the sources of a password.
struct Places {
    options: [&'static str; 2],
    /// Variables for file, command and password.
    variables: [&'static str; 3],
    /// The systemd credential.
    credential: &'static str,
}

/// Sources for the repository of the command.
const PLACES: Places = Places {
    options: ["--password-file", "--password-command"],
    variables: [
        environment::PASSWORD_FILE,
        environment::PASSWORD_COMMAND,
        environment::PASSWORD,
    ],
    credential: "holdfast.password",
};

/// Sources for the repository that is copied to.
const PLACES_TO: Places = Places {
    options: ["--to-password-file", "--to-password-command"],
    variables: [
        environment::TO_PASSWORD_FILE,
        environment::TO_PASSWORD_COMMAND,
        environment::TO_PASSWORD,
    ],
    credential: "holdfast.to-password",
};

/// Sources for the user of a XenServer pool.
const PLACES_OF_POOL: Places = Places {
    options: ["--pool-password-file", "--pool-password-command"],
    variables: [
        environment::POOL_PASSWORD_FILE,
        environment::POOL_PASSWORD_COMMAND,
        environment::POOL_PASSWORD,
    ],
    credential: "holdfast.pool-password",
};

/// Sources for encrypted volumes of guests.
const PLACES_OF_LUKS: Places = Places {
    options: ["--luks-password-file", "--luks-password-command"],
    variables: [
        environment::LUKS_PASSWORD_FILE,
        environment::LUKS_PASSWORD_COMMAND,
        environment::LUKS_PASSWORD,
    ],
    credential: "holdfast.luks-password",
};

/// A password; its memory is overwritten when it is dropped.
///
/// Any bytes but line ends: a key file need not contain text.
#[derive(Clone, PartialEq, Eq)]
pub struct Password {
    bytes: Zeroizing<Vec<u8>>,
}

impl Password {
    /// The bytes that the key is derived from.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Accepts a line from `origin`, without its line end.
    pub fn from_line(mut bytes: Zeroizing<Vec<u8>>, origin: &str) -> Result<Self, PasswordError> {
        if bytes.last() == Some(&b'\r') {
            bytes.pop();
        }
        if bytes.is_empty() {
            return Err(PasswordError::Empty {
                origin: origin.to_owned(),
            });
        }
        if bytes.len() > PASSWORD_BYTES_MAX {
            return Err(PasswordError::TooLong {
                origin: origin.to_owned(),
            });
        }
        Ok(Self { bytes })
    }
}

impl std::fmt::Debug for Password {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Password(..)")
    }
}

/// The purpose of a password.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PasswordUse {
    /// To open something existing: entered once.
    Existing,
    /// To open a second repository.
    Other,
    /// To log in to a pool of XenServer.
    Pool,
    /// To open encrypted volumes of guests.
    Luks,
    /// To protect something from now on: entered twice.
    New,
}

/// The source of a password.
#[derive(Clone, PartialEq, Eq)]
pub enum PasswordSource {
    /// The first line of a file.
    File(PathBuf),
    /// The first line of a command's output.
    Command(OsString),
    /// The environment.
    Environment(Password),
    /// A credential of this systemd service.
    Credential(PathBuf),
    /// A prompt on the terminal.
    Prompt,
}

/// The options that name the source of a password.
#[derive(Clone, Copy)]
struct PasswordOptions<'a> {
    file: Option<&'a Path>,
    command: Option<&'a OsStr>,
}

impl PasswordSource {
    /// Selects the source: options, environment, systemd credential, terminal, in this order.
    ///
    /// Two options, or two of the three environment variables, are an error, since one of them was probably
    /// forgotten.
    pub fn choose(args: &PasswordArgs, environment: &Environment) -> Result<Self, PasswordError> {
        let options = PasswordOptions {
            file: args.password_file.as_deref(),
            command: args.password_command.as_deref(),
        };
        Self::choose_from(&PLACES, options, environment)
    }

    /// The same for the repository that is copied to.
    pub fn choose_to(args: &ToPasswordArgs, environment: &Environment) -> Result<Self, PasswordError> {
        let options = PasswordOptions {
            file: args.to_password_file.as_deref(),
            command: args.to_password_command.as_deref(),
        };
        Self::choose_from(&PLACES_TO, options, environment)
    }

    /// The same for the user of a pool.
    pub fn choose_of_pool(args: &PoolArgs, environment: &Environment) -> Result<Self, PasswordError> {
        let options = PasswordOptions {
            file: args.pool_password_file.as_deref(),
            command: args.pool_password_command.as_deref(),
        };
        Self::choose_from(&PLACES_OF_POOL, options, environment)
    }

    /// The same for encrypted volumes of guests.
    pub fn choose_of_luks(args: &LuksArgs, environment: &Environment) -> Result<Self, PasswordError> {
        let options = PasswordOptions {
            file: args.luks_password_file.as_deref(),
            command: args.luks_password_command.as_deref(),
        };
        Self::choose_from(&PLACES_OF_LUKS, options, environment)
    }

    fn choose_from(
        places: &Places,
        options: PasswordOptions<'_>,
        environment: &Environment,
    ) -> Result<Self, PasswordError> {
        match (options.file, options.command) {
            (Some(_), Some(_)) => {
                let [first, second] = places.options;
                return Err(PasswordError::Ambiguous { first, second });
            }
            (Some(file), None) => return Ok(Self::File(file.to_owned())),
            (None, Some(command)) => return Ok(Self::Command(command.to_owned())),
            (None, None) => {}
        }
        let values = places
            .variables
            .map(|name| environment.get(name).map(|value| (name, value)));
        let mut set = values.into_iter().flatten();
        if let (Some((first, _)), Some((second, _))) = (set.next(), set.next()) {
            return Err(PasswordError::Ambiguous { first, second });
        }
        match values {
            [Some((_, file)), ..] => Ok(Self::File(file.into())),
            [_, Some((_, command)), _] => Ok(Self::Command(command.to_owned())),
            [.., Some((name, value))] => {
                let bytes = Zeroizing::new(value.as_bytes().to_vec());
                Password::from_line(bytes, name).map(Self::Environment)
            }
            [None, None, None] => Ok(credential(places.credential, environment).map_or(Self::Prompt, Self::Credential)),
        }
    }

    /// The same for the repository given by `--like`: the environment applies only to the new repository.
    pub fn choose_like(args: &LikePasswordArgs) -> Self {
        match (&args.like_password_file, &args.like_password_command) {
            (Some(file), _) => Self::File(file.clone()),
            (None, Some(command)) => Self::Command(command.clone()),
            (None, None) => Self::Prompt,
        }
    }

    /// The same for a new password in addition to the one that opens the repository: the environment applies only to
    /// the latter.
    pub fn choose_new(args: &NewPasswordArgs) -> Self {
        match (&args.new_password_file, &args.new_password_command) {
            (Some(file), _) => Self::File(file.clone()),
            (None, Some(command)) => Self::Command(command.clone()),
            (None, None) => Self::Prompt,
        }
    }

    /// Reads the password; `warn` receives warnings about how it is stored.
    pub fn read(
        &self,
        password_use: PasswordUse,
        prompt: &dyn Prompt,
        warn: &mut dyn FnMut(&str),
    ) -> Result<Password, PasswordError> {
        match self {
            Self::File(path) => read_file(path, warn),
            // systemd protects its credentials itself, and their modes do not show which users have access.
            Self::Credential(path) => read_file(path, &mut |_| {}),
            Self::Command(command) => read_command(command),
            Self::Environment(password) => Ok(password.clone()),
            Self::Prompt => ask(password_use, prompt),
        }
    }
}

/// The credential's file, if systemd provides one.
fn credential(name: &str, environment: &Environment) -> Option<PathBuf> {
    let path = Path::new(environment.get(environment::CREDENTIALS_DIRECTORY)?).join(name);
    path.exists().then_some(path)
}

fn read_file(path: &Path, warn: &mut dyn FnMut(&str)) -> Result<Password, PasswordError> {
    let failed = |source| PasswordError::File {
        path: path.to_owned(),
        source,
    };
    let mut file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let mode = metadata.permissions().mode() & 0o777;
    if metadata.is_file()
        && let Some(warning) = private_file_warning(path, mode, "password file")
    {
        warn(&warning);
    }
    let line = first_line(&mut file).map_err(failed)?;
    if let Some(warning) = untypable_warning(path, &line) {
        warn(&warning);
    }
    Password::from_line(line, &path.display().to_string())
}

/// Warns of invisible bytes in the password: a byte order mark, or blanks at its start or end.
fn untypable_warning(path: &Path, line: &[u8]) -> Option<String> {
    const MARK: &[u8] = "\u{feff}".as_bytes();
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let has_blank = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_whitespace);
    let what = match line {
        marked if marked.starts_with(MARK) => "begins with a byte order mark",
        blank if has_blank(blank.first()) => "begins with a blank",
        blank if has_blank(blank.last()) => "ends with a blank",
        _ => return None,
    };
    Some(format!(
        "the password in {} {what}, which is part of it: typed without that, it does not open",
        path.display()
    ))
}

/// Warns if the mode of a file with a secret is too open.
pub fn private_file_warning(path: &Path, mode: u32, what: &str) -> Option<String> {
    let (read, written) = (mode & 0o044 != 0, mode & 0o022 != 0);
    let can_be = match (read, written) {
        (false, false) => return None,
        (true, false) => "read",
        (false, true) => "written",
        (true, true) => "read and written",
    };
    Some(format!(
        "the {what} {} can be {can_be} by others (mode {mode:03o}); chmod 600 would keep it private",
        path.display()
    ))
}

fn read_command(command: &OsStr) -> Result<Password, PasswordError> {
    let finished = run_shell(command, first_line).map_err(PasswordError::Command)?;
    if !finished.status.success() {
        return Err(PasswordError::CommandFailed {
            status: finished.status,
        });
    }
    Password::from_line(finished.output, "the password command")
}

fn ask(password_use: PasswordUse, prompt: &dyn Prompt) -> Result<Password, PasswordError> {
    let entry = |text: &str| {
        let line = prompt.secret(text).map_err(|error| match error.kind() {
            ErrorKind::NotFound | ErrorKind::Unsupported => PasswordError::NoTerminal,
            _ => PasswordError::Prompt(error),
        })?;
        Password::from_line(line, "the terminal")
    };
    match password_use {
        PasswordUse::Existing => entry("Password: "),
        PasswordUse::Other => entry("Password of the other repository: "),
        PasswordUse::Luks => entry("Passphrase of the encrypted volume: "),
        PasswordUse::Pool => entry("Password of the pool's user: "),
        PasswordUse::New => {
            let first = entry("New password: ")?;
            let second = entry("New password again: ")?;
            if first == second {
                Ok(first)
            } else {
                Err(PasswordError::Mismatch)
            }
        }
    }
}

/// Reads up to the first line end into one buffer that is never reallocated, so that no copy remains in
/// memory.
///
/// A line that is too long is returned truncated, but longer than [`PASSWORD_BYTES_MAX`].
fn first_line(reader: &mut dyn Read) -> std::io::Result<Zeroizing<Vec<u8>>> {
    let mut buffer = Zeroizing::new(vec![0; PASSWORD_BYTES_MAX + 2]);
    let mut filled = 0;
    while filled < buffer.len() {
        let count = match reader.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let end = buffer[filled..filled + count].iter().position(|&byte| byte == b'\n');
        filled += end.unwrap_or(count);
        if end.is_some() {
            break;
        }
    }
    buffer.truncate(filled);
    Ok(buffer)
}

#[cfg(test)]
mod tests;
