//! Signals that request a status: SIGUSR1 prints the progress of the job, and neither SIGUSR1 nor SIGUSR2 ends the
//! program.

use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::program::{stderr, stdout};
use crate::rig::Rig;

/// Sends signals until a line of standard error satisfies `is_answer`.
fn ask(child: &mut Child, lines: &mut impl BufRead, is_answer: impl Fn(&str) -> bool) -> String {
    let id = Pid::from_child(child);
    kill_process(id, Signal::USR2).unwrap();
    loop {
        kill_process(id, Signal::USR1).unwrap();
        let mut line = String::new();
        assert_ne!(
            lines.read_line(&mut line).unwrap(),
            0,
            "the program ended: {:?}",
            child.wait()
        );
        if is_answer(&line) {
            return line;
        }
    }
}

/// The backup waits for input that does not come.
#[test]
fn a_quiet_backup_prints_its_progress_on_request_and_continues() {
    for options in [&[][..], &["--quiet"], &["--no-progress"]] {
        let rig = Rig::new();
        let words = [&["backup", "--machine", "web1", "vda=-"], options].concat();
        let mut child = rig.command(&words).stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(&vec![7; 100_000]).unwrap();
        // The backup has begun when it reads its input, and handles the signals from its start on.
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let answer = ask(&mut child, &mut lines, |line| line.contains("backing up web1"));
        assert!(answer.starts_with("holdfast: "), "{answer}");
        drop(stdin);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{} {}", stdout(&output), stderr(&output));
        rig.ok(&["verify"]);
    }
}

#[test]
fn a_status_signal_does_not_end_a_server() {
    let rig = Rig::new();
    rig.write("web1.raw", &[7; 5000]);
    rig.ok(&["backup", "web1.raw"]);
    let socket = rig.path("nbd").display().to_string();
    let mut child = rig
        .command(&["serve", "nbd", "web1", "--socket", &socket])
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut served = BufReader::new(child.stdout.take().unwrap());
    served.read_line(&mut line).unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    ask(&mut child, &mut lines, |line| line.starts_with("holdfast: "));
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
