//! The built program, run without the environment of the user.

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The program with `words`, without environment and without input.
#[expect(clippy::disallowed_methods, reason = "these tests run the program from outside")]
pub(crate) fn program(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
    command.args(words).env_clear().stdin(Stdio::null());
    command
}

/// The same, in the mount namespace of a process and in the folder `folder`.
#[expect(clippy::disallowed_methods, reason = "these tests run the program from outside")]
pub(crate) fn program_inside(process: u32, folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new("/usr/bin/nsenter");
    command
        .arg(format!("--mount=/proc/{process}/ns/mnt"))
        .arg(format!("--wdns={}", folder.display()))
        .args(["--", env!("CARGO_BIN_EXE_holdfast")])
        .args(words)
        .env_clear()
        .stdin(Stdio::null());
    command
}

/// Runs the program to its end.
pub(crate) fn run(words: &[&str]) -> Output {
    program(words).output().unwrap()
}

/// Its standard output.
pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Its standard error.
pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}
