//! Short calls of programs of the system: `zfs`, `btrfs`.

use std::io::Read;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::secrets::command as new_command;

/// The name of such a program in notes of waits.
pub(super) const SYSTEM_PROGRAM: &str = "a program of the system";
/// Limit on the bytes of an answer: a hundred thousand snapshots with a dozen properties each.
pub(super) const ANSWER_BYTES_MAX: u64 = 256 << 20;
/// Limit on the bytes of error messages.
pub(super) const STDERR_BYTES_MAX: u64 = 64 << 10;
/// How long to wait for the rest of the output of a program that ended or was killed.
pub(super) const OUTPUT_GRACE: Duration = Duration::from_secs(2);
/// The folders with such programs. A user's PATH often lacks the latter half.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs programs of the system.
pub trait Tools: Send + Sync {
    /// Runs `program` to its end.
    fn ask(&self, program: &str, arguments: &[&str]) -> Result<Answer, ToolError>;
}

/// The output of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Whether the program exited with code 0.
    pub is_success: bool,
    /// The text that the program wrote on standard output.
    pub output: String,
    /// The text that the program wrote on standard error.
    pub stderr: String,
}

/// Why a program could not be run to its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// The program does not exist.
    #[error("there is no program {program} on this host")]
    NotFound {
        /// The name.
        program: String,
    },
    /// The program cannot be started, or its output cannot be read.
    #[error("cannot run {program}")]
    Io {
        /// The name.
        program: String,
        /// The reason.
        source: std::io::Error,
    },
    /// The program exceeded the timeout.
    #[error("{command_line:?} did not finish within {} s", .waited.as_secs())]
    TimedOut {
        /// The command line.
        command_line: String,
        /// The timeout.
        waited: Duration,
    },
    /// The host on which the program would run cannot be reached.
    #[error("no connection to {host}: {reason}")]
    NoConnection {
        /// The host.
        host: String,
        /// The message of ssh.
        reason: String,
    },
    /// The output exceeds the limit.
    #[error("the output of {command_line:?} has more than {ANSWER_BYTES_MAX} bytes")]
    Flood {
        /// The command line.
        command_line: String,
    },
}

impl ToolError {
    pub(super) fn starting(program: &str, source: std::io::Error) -> Self {
        let program = program.to_owned();
        match source.kind() {
            std::io::ErrorKind::NotFound => Self::NotFound { program },
            _ => Self::Io { program, source },
        }
    }
}

/// A program with English messages, in a separate process group so that it can be killed with its child processes.
pub(super) fn command(program: &str, arguments: &[&str]) -> Command {
    log::debug!("runs {program} {}", arguments.join(" "));
    let mut command = new_command(program);
    command
        .args(arguments)
        .env("PATH", PATH)
        .env("LC_ALL", "C")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    command
}

/// A program that can interact with the user at the terminal, in the user's language.
pub(super) fn command_in_foreground(program: &str, arguments: &[&str]) -> Command {
    log::debug!("runs {program} {} in the foreground", arguments.join(" "));
    let mut command = new_command(program);
    command
        .args(arguments)
        .env("PATH", PATH)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit());
    command
}

/// Reads to the end. Bytes over `bytes_max` are discarded.
pub(super) fn read_in_background(
    from: Option<impl Read + Send + 'static>,
    bytes_max: u64,
) -> std::io::Result<Receiver<Vec<u8>>> {
    let (send, receiver) = channel();
    std::thread::Builder::new().name("tool".to_owned()).spawn(move || {
        let Some(mut from) = from else { return };
        let mut bytes = Vec::new();
        (&mut from).take(bytes_max).read_to_end(&mut bytes).ok();
        send.send(bytes).ok();
        std::io::copy(&mut from, &mut std::io::sink()).ok();
    })?;
    Ok(receiver)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use holdfast_block::SystemClock;

    use super::{ToolError, Tools as _};
    use crate::system::process::local_tools::LocalTools;

    fn tools(time_out: Duration) -> LocalTools {
        LocalTools::new(Arc::new(SystemClock::new()), time_out)
    }

    #[test]
    fn output_and_errors_of_a_tool_are_in_english() {
        let tools = tools(Duration::from_secs(30));
        let answer = tools
            .ask("sh", &["-c", "echo yes $LC_ALL; echo no >&2; exit 3"])
            .unwrap();
        assert_eq!(
            (answer.is_success, &answer.output[..], &answer.stderr[..]),
            (false, "yes C\n", "no\n")
        );
        assert!(tools.ask("true", &[]).unwrap().is_success);
        let answer = tools.ask("sh", &["-c", "kill -9 $$"]).unwrap();
        assert!(!answer.is_success && answer.stderr.contains("sh was killed by signal 9"));
        let tools = tools.with_variable("SAID", "a b".into());
        assert_eq!(tools.ask("sh", &["-c", "echo $SAID"]).unwrap().output, "a b\n");
        let missing = tools.ask("holdfast-has-no-such-tool", &[]);
        assert!(matches!(missing, Err(ToolError::NotFound { .. })));
    }

    #[test]
    fn a_tool_that_hangs_times_out() {
        let answer = tools(Duration::from_millis(50)).ask("sleep", &["60"]);
        assert!(matches!(answer, Err(ToolError::TimedOut { command_line, .. }) if command_line == "sleep 60"));
    }

    #[test]
    fn long_output_is_read_completely() {
        let answer = tools(Duration::from_secs(30))
            .ask("head", &["-c", "3000000", "/dev/zero"])
            .unwrap();
        assert_eq!(answer.output.len(), 3_000_000);
    }
}
