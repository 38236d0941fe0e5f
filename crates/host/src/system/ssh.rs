//! Programs on another host, through the system's `ssh` with the user's configuration.
//!
//! All programs share one connection (`ControlMaster`). Its socket is in a separate folder that only this user can
//! access. ssh never prompts for a password: without a usable key, it fails. If this process is killed, the
//! connection is closed one minute after the last program has ended.
//!
//! Source: ssh(1), ssh_config(5); OpenSSH 9.2.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::Clock;

use crate::system::process::{Answer, LocalTools, PROGRAM_PATH, Piped, StreamTools, ToolError, Tools};

const SSH: &str = "ssh";
/// The exit code of ssh for its own failures.
const CODE_OF_SSH: i32 = 255;
/// Holdfast on the other host. A server that permits only this program must be able to recognize its command line, so
/// it is called without `env`.
const PROGRAM: &str = "holdfast";

/// The address of a host, and options for ssh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SshAddress {
    /// `host`, or `user@host`, as ssh understands it.
    pub destination: String,
    /// Options for `-o`.
    pub options: Vec<String>,
}

/// A connection to a host.
pub struct Ssh {
    address: SshAddress,
    folder: PathBuf,
    local: LocalTools,
    clock: Arc<dyn Clock>,
    time_out: Duration,
}

impl Ssh {
    /// Connects. The socket is in `folder`, which the caller created for it. `time_out` limits each call.
    pub fn connect(
        address: SshAddress,
        folder: PathBuf,
        clock: Arc<dyn Clock>,
        time_out: Duration,
    ) -> Result<Self, ToolError> {
        let made = std::fs::DirBuilder::new().mode(0o700).create(&folder);
        made.map_err(|source| ToolError::Io {
            program: SSH.to_owned(),
            source,
        })?;
        let ssh = Self {
            local: LocalTools::new(Arc::clone(&clock), time_out),
            address,
            folder,
            clock,
            time_out,
        };
        let mut words = ssh.words(&["ControlMaster=yes", "ControlPersist=60"]);
        words.extend(["-f", "-N", "--", &ssh.address.destination].map(str::to_owned));
        let answer = ssh.local.ask(SSH, &texts(&words))?;
        if answer.is_success {
            return Ok(ssh);
        }
        Err(ssh.no_connection(&answer.stderr))
    }

    /// Forwards connections to the new socket `here` to the socket `there` of the other host, as long as the connection to
    /// it exists.
    ///
    /// # Errors
    /// The server permits no forwarding, or a path has a colon.
    pub fn forward_socket(&self, here: &Path, there: &Path) -> Result<(), ToolError> {
        self.forward("-L", here, there)
    }

    /// Forwards connections to the new socket `there` of the other host to the socket `here`. The server may leave the
    /// socket behind.
    ///
    /// # Errors
    /// The server permits no forwarding, or a path has a colon.
    pub fn forward_socket_back(&self, there: &Path, here: &Path) -> Result<(), ToolError> {
        self.forward("-R", there, here)
    }

    fn forward(&self, direction: &str, from: &Path, to: &Path) -> Result<(), ToolError> {
        let (Some(from), Some(to)) = (from.to_str(), to.to_str()) else {
            return Err(self.no_connection("a path of a socket is not UTF-8"));
        };
        if from.contains(':') || to.contains(':') {
            return Err(self.no_connection("the path of a socket has a colon, which ssh cannot forward"));
        }
        let mut words = self.words(&["ExitOnForwardFailure=yes"]);
        let forward = format!("{from}:{to}");
        words.extend(["-O", "forward", direction, &forward, "--", &self.address.destination].map(str::to_owned));
        let answer = self.local.ask(SSH, &texts(&words))?;
        if answer.is_success {
            return Ok(());
        }
        Err(self.no_connection(&answer.stderr))
    }

    /// Starts a program there that writes its output and its messages to those of this process. Its input is a pipe.
    pub fn start_shown(&self, program: &str, arguments: &[&str]) -> Result<Piped, ToolError> {
        Piped::start_shown(SSH, &texts(&self.words_for(program, arguments)))
    }

    /// The words for ssh that run a program there.
    fn words_for(&self, program: &str, arguments: &[&str]) -> Vec<String> {
        let mut words = self.words(&["ControlMaster=no"]);
        words.extend(["-T", "--", &self.address.destination].map(str::to_owned));
        words.push(command_line(program, arguments));
        words
    }

    fn words(&self, more: &[&str]) -> Vec<String> {
        let socket = format!("ControlPath={}", self.folder.join("socket").display());
        // If an option is repeated, ssh uses the first value.
        let ours = ["BatchMode=yes", &socket].into_iter().chain(more.iter().copied());
        let theirs = self.address.options.iter().map(String::as_str);
        let defaults = ["ServerAliveInterval=15", "ServerAliveCountMax=4", "LogLevel=ERROR"];
        let options = ours.chain(theirs).chain(defaults);
        options
            .flat_map(|option| ["-o".to_owned(), option.to_owned()])
            .collect()
    }

    fn no_connection(&self, stderr: &str) -> ToolError {
        let lines = stderr.lines().map(str::trim).filter(|line| !line.is_empty());
        ToolError::NoConnection {
            host: self.address.destination.clone(),
            reason: lines.collect::<Vec<_>>().join("; "),
        }
    }
}

impl Tools for Ssh {
    fn ask(&self, program: &str, arguments: &[&str]) -> Result<Answer, ToolError> {
        let (ended, output) = self.start(program, arguments)?.answer(&*self.clock, self.time_out)?;
        match ended.code {
            Some(CODE_OF_SSH) => Err(self.no_connection(&ended.stderr)),
            // "Command not found", in every shell.
            Some(127) => Err(ToolError::NotFound {
                program: format!("{program} at {}", self.address.destination),
            }),
            _ => Ok(Answer {
                is_success: ended.is_success(),
                output: String::from_utf8_lossy(&output).into_owned(),
                stderr: ended.stderr,
            }),
        }
    }
}

impl StreamTools for Ssh {
    fn start(&self, program: &str, arguments: &[&str]) -> Result<Piped, ToolError> {
        self.local.start(SSH, &texts(&self.words_for(program, arguments)))
    }

    fn start_receiver(&self, program: &str, _arguments: &[&str], _folder: &Path) -> Result<Piped, ToolError> {
        // On another host, a holdfast receives streams instead.
        Err(ToolError::NotFound {
            program: format!("{program} by way of a shell"),
        })
    }

    fn host(&self) -> Option<&str> {
        Some(&self.address.destination)
    }
}

impl Drop for Ssh {
    fn drop(&mut self) {
        let mut words = self.words(&[]);
        words.extend(["-O", "exit", "--", &self.address.destination].map(str::to_owned));
        self.local.ask(SSH, &texts(&words)).ok();
        std::fs::remove_file(self.folder.join("socket")).ok();
        std::fs::remove_dir(&self.folder).ok();
    }
}

fn texts(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

/// The command line for the shell at the other end.
fn command_line(program: &str, arguments: &[&str]) -> String {
    let path = format!("PATH={PROGRAM_PATH}");
    let before: &[&str] = if program == PROGRAM {
        &[]
    } else {
        &["env", "LC_ALL=C", &path]
    };
    let words = before.iter().copied().chain([program]).chain(arguments.iter().copied());
    shell_line(words)
}

/// Quotes arguments for a shell.
pub fn shell_line<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    words.into_iter().map(quoted).collect::<Vec<_>>().join(" ")
}

/// Quotes one argument.
fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_./:@#%+=,-".contains(&byte);
    if !word.is_empty() && word.bytes().all(is_plain) && !word.starts_with('#') {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use holdfast_block::SystemClock;
    use proptest::prelude::*;

    use super::{command_line, shell_line};
    use crate::system::process::{LocalTools, Tools as _};

    #[test]
    fn our_own_program_is_called_without_env() {
        assert_eq!(command_line("holdfast", &["peer", "1"]), "holdfast peer 1");
        let line = command_line("zfs", &["get", "-Hp", "type", "tank/a b"]);
        assert!(
            line.starts_with("env LC_ALL=C PATH=/") && line.ends_with(" zfs get -Hp type 'tank/a b'"),
            "{line}"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

        /// A real shell splits the line into the original arguments.
        #[test]
        fn quoted_arguments_survive_a_shell(words in prop::collection::vec("[ -~äß\n\t]{0,12}", 1..6)) {
            let tools = LocalTools::new(Arc::new(SystemClock::new()), Duration::from_secs(30));
            let line = shell_line(["printf", "<%s>"].into_iter().chain(words.iter().map(String::as_str)));
            let answer = tools.ask("sh", &["-c", &line]).unwrap();
            let expected = format!("<{}>", words.join("><"));
            prop_assert_eq!(answer.output, expected);
        }
    }
}
