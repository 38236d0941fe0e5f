//! What is different when a person watches: the program's standard error is a real terminal here.

use std::fs::File;
use std::io::Read as _;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::program::program;

/// What a failing verb says on a terminal, with these variables set.
fn error_on_terminal(variables: &[(&str, &str)]) -> String {
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&controller).unwrap();
    unlockpt(&controller).unwrap();
    let name = ptsname(&controller, Vec::new()).unwrap().into_string().unwrap();
    let terminal = File::options().read(true).write(true).open(name).unwrap();
    let mut command = program(&["man", "/nonexistent/folder"]);
    command.envs(variables.iter().copied()).stderr(terminal);
    let status = command.status().unwrap();
    assert_eq!(status.code(), Some(1));
    drop(command);
    let mut said = Vec::new();
    let mut controller = File::from(controller);
    // Once nobody holds the terminal any more, reading ends with an error instead of an end.
    controller.read_to_end(&mut said).ok();
    String::from_utf8(said).unwrap()
}

#[test]
fn a_terminal_shows_colours_unless_they_are_not_wanted() {
    let plain = "holdfast: write /nonexistent/folder/holdfast.1: No such file or directory (os error 2)\r\n\
                 hint: check the spelling; folders must exist\r\n";
    let colored = error_on_terminal(&[("TERM", "xterm")]);
    assert!(colored.starts_with("\u{1b}[1;31mholdfast: write "), "{colored:?}");
    assert_eq!(colored.replace("\u{1b}[1;31m", "").replace("\u{1b}[0m", ""), plain);
    assert_eq!(error_on_terminal(&[("NO_COLOR", "1")]), plain);
    assert_eq!(error_on_terminal(&[("TERM", "dumb")]), plain);
}
