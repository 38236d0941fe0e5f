//! Programs that may ask whoever sits at the terminal.

use std::io::{Read as _, Write as _};

use super::tool::command_in_foreground;
use crate::system::waits::Wait;

/// What notes of waits call it.
const PROGRAM: &str = "a program that asks at the terminal";

/// Bytes of an answer, at most.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// Starts a program in the foreground, where it can talk to a person, gives it `input`, and waits until it has ended. Its output; none where
/// it says that it did not go well, which it has told the person.
///
/// It stays in our process group: one in the background is stopped when it asks. So Ctrl-C ends it, too, and nothing waits for ever.
pub(crate) fn ask_at_terminal(program: &str, arguments: &[&str], input: &[u8]) -> std::io::Result<Option<String>> {
    // A signal to this process alone does not end the program, which waits for a person.
    let _wait = Wait::for_answer(PROGRAM);
    let mut child = command_in_foreground(program, arguments).spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // It is small, and fits into the pipe. A program that does not read to the end says so by how it ends.
        drop(stdin.write_all(input));
    }
    let mut output = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        let mut bounded = stdout.take(ANSWER_BYTES_MAX);
        bounded.read_to_end(&mut output)?;
        std::io::copy(bounded.get_mut(), &mut std::io::sink())?;
    }
    let is_well = child.wait()?.success();
    Ok(is_well.then(|| String::from_utf8_lossy(&output).into_owned()))
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
