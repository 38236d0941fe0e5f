//! The password command.

use std::ffi::OsStr;
use std::io::Read;
use std::process::{ExitStatus, Stdio};

use holdfast_host::{Wait, command};

/// Maximum bytes of output of a command; a password needs far fewer.
const OUTPUT_BYTES_MAX: u64 = 1 << 20;

/// The exit status of a command and its processed output.
#[derive(Debug)]
pub struct Finished<T> {
    /// The exit status.
    pub status: ExitStatus,
    /// The result of the reader.
    pub output: T,
}

/// Why a command did not finish.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The shell does not start, or its output cannot be read.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// It wrote more than the limit, and was killed.
    #[error("it wrote more than {OUTPUT_BYTES_MAX} bytes and was stopped")]
    TooMuchOutput,
}

/// Runs `words` with `/bin/sh -c`, passes its output to `reader`, and waits for it.
///
/// Its standard input is empty, since that of this process may be the disk to back up; it inherits standard error, so
/// that it can prompt the user. It does not get the password variables. It has no time limit, since it may be asking a
/// question.
pub fn run_shell<T>(
    words: &OsStr,
    reader: impl FnOnce(&mut dyn Read) -> std::io::Result<T>,
) -> Result<Finished<T>, CommandError> {
    let _wait = Wait::for_answer("the password command");
    let mut child = command("/bin/sh")
        .arg("-c")
        .arg(words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()?;
    let stdout = child.stdout.take().expect("standard output is piped");
    let mut bounded = stdout.take(OUTPUT_BYTES_MAX + 1);
    let read = reader(&mut bounded);
    // If the reader closed the pipe early, the command would die of SIGPIPE and look as if it had failed.
    let drained = std::io::copy(&mut bounded, &mut std::io::sink());
    if bounded.limit() == 0 {
        child.kill()?;
        child.wait()?;
        return Err(CommandError::TooMuchOutput);
    }
    drop(bounded);
    let status = child.wait()?;
    drained?;
    Ok(Finished { status, output: read? })
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::io::Read;

    use super::{CommandError, run_shell};

    fn first_byte(reader: &mut dyn Read) -> std::io::Result<u8> {
        let mut byte = [0];
        reader.read_exact(&mut byte)?;
        Ok(byte[0])
    }

    #[test]
    fn output_beyond_what_is_read_does_not_fail_the_command() {
        let finished = run_shell(OsStr::new("head -c 500000 /dev/zero"), first_byte).unwrap();
        assert!(finished.status.success());
        assert_eq!(finished.output, 0);
    }

    #[test]
    fn a_flood_is_stopped() {
        let error = run_shell(OsStr::new("cat /dev/zero"), first_byte).unwrap_err();
        assert!(matches!(error, CommandError::TooMuchOutput));
    }

    #[test]
    fn standard_input_is_empty() {
        let finished = run_shell(OsStr::new("wc -c"), |reader| {
            let mut text = String::new();
            reader.read_to_string(&mut text).map(|_| text)
        })
        .unwrap();
        assert_eq!(finished.output.trim(), "0");
    }
}
