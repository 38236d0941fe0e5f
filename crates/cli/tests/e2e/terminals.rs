//! Output to a terminal: here the standard error of the program is a real terminal.

use std::fs::File;
use std::io::Read as _;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::program::{program, stderr};
use crate::rig::{Rig, noise};

/// A terminal: the controlling end, and the end for a program.
fn terminal() -> (File, File) {
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&controller).unwrap();
    unlockpt(&controller).unwrap();
    let name = ptsname(&controller, Vec::new()).unwrap().into_string().unwrap();
    let terminal = File::options().read(true).write(true).open(name).unwrap();
    (File::from(controller), terminal)
}

/// The output of a failing verb on a terminal, with these variables set.
fn error_on_terminal(variables: &[(&str, &str)]) -> String {
    let (mut controller, terminal) = terminal();
    let mut command = program(&["man", "/nonexistent/folder"]);
    command.envs(variables.iter().copied()).stderr(terminal);
    let status = command.status().unwrap();
    assert_eq!(status.code(), Some(1));
    drop(command);
    let mut text = Vec::new();
    // Once the last process has closed the terminal, reading ends with an error instead of an end of file.
    controller.read_to_end(&mut text).ok();
    String::from_utf8(text).unwrap()
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

/// Terminals interpret some bytes as commands, and the content of a disk is not readable text.
#[test]
fn disks_and_archives_do_not_go_to_a_terminal() {
    let rig = Rig::new();
    rig.write("web1.raw", &noise(70_000, 1));
    rig.ok(&["backup", "web1.raw"]);
    rig.code(3, &["export", "web1", "web1.xva.gz"]);
    for words in [
        &["restore", "web1", "-"][..],
        &["restore", "web1:web1", "-"],
        &["export", "web1", "-", "--format", "xva"],
        &["image", "convert", "web1.raw", "-"],
        &["image", "convert", "web1.raw", "-", "--to", "vmdk", "--compress"],
        &["archive", "read", "web1.xva.gz"],
        &["compress", "web1.raw"],
        &["compress", "--decompress", "web1.xva.gz"],
    ] {
        let (mut controller, terminal) = terminal();
        let mut command = rig.command(words);
        command.stdout(terminal);
        let output = command.output().unwrap();
        drop(command);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", stderr(&output));
        assert!(stderr(&output).contains("terminal"), "{words:?}: {}", stderr(&output));
        let mut shown = Vec::new();
        controller.read_to_end(&mut shown).ok();
        assert!(shown.is_empty(), "{words:?}: {} bytes", shown.len());
    }
}
