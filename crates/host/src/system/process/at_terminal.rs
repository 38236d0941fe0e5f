//! Programs that may ask the user at the terminal.

use std::io::{Read as _, Write as _};

use super::tool::command_in_foreground;
use crate::system::waits::Wait;

/// The name of such programs in registered waits.
const PROGRAM: &str = "a program that asks at the terminal";

/// Limit on the bytes of an answer.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// Runs a program in the foreground with `input`, and returns its output; none if it fails, in which case the user
/// has already seen its message on the terminal.
///
/// The program is in the process group of this process: the terminal stops a background process that reads. So Ctrl-C
/// also ends the program, and it cannot hang for ever.
pub(crate) fn ask_at_terminal(program: &str, arguments: &[&str], input: &[u8]) -> std::io::Result<Option<String>> {
    // A signal to this process alone does not end the program, which waits for the user.
    let _wait = Wait::for_answer(PROGRAM);
    let mut child = command_in_foreground(program, arguments).spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // The input is small, and fits into the pipe. A program that does not read all of it reports this by its exit
        // code.
        drop(stdin.write_all(input));
    }
    let mut output = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        let mut bounded = stdout.take(ANSWER_BYTES_MAX);
        bounded.read_to_end(&mut output)?;
        std::io::copy(bounded.get_mut(), &mut std::io::sink())?;
    }
    let is_success = child.wait()?.success();
    Ok(is_success.then(|| String::from_utf8_lossy(&output).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::ask_at_terminal;

    #[test]
    fn a_program_gets_its_input_and_its_output_is_read() {
        let words = ["-c", "cat; exit 0"];
        assert_eq!(
            ask_at_terminal("sh", &words, b"typed").unwrap().as_deref(),
            Some("typed")
        );
        assert_eq!(
            ask_at_terminal("sh", &["-c", "cat >/dev/null; exit 3"], b"").unwrap(),
            None
        );
        assert!(ask_at_terminal("no-such-program", &[], b"").is_err());
    }
}
