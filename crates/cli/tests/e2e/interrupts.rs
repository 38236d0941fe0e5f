//! Ctrl-C: the first signal sets the flag that a job looks at, the second ends the process.
//!
//! The job is this test program itself, started again as a child.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ChildStdout, Command, Stdio};

use holdfast_cli::interrupt::{end_by, listen};
use rustix::process::{Pid, Signal, kill_process};

const CHILD: &str = "HOLDFAST_TEST_INTERRUPT_CHILD";

/// A job that tells of its start and of the request to stop; then it obeys, or goes on as a stuck one would.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let listener = listen().unwrap();
    let mut stdout = std::io::stdout();
    writeln!(stdout, "\nstarted").unwrap();
    while listener.interrupt().check().is_ok() {
        std::thread::yield_now();
    }
    writeln!(stdout, "\nasked to stop").unwrap();
    if std::env::var_os(CHILD).is_some_and(|kind| kind == "obedient") {
        end_by(listener.signal().unwrap()).unwrap();
    }
    loop {
        std::thread::park();
    }
}

#[expect(clippy::disallowed_methods, reason = "the job has to be a process of its own")]
fn start(kind: &str) -> (Child, BufReader<ChildStdout>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "interrupts::child", "--nocapture"])
        .env(CHILD, kind)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    (child, stdout)
}

fn wait_for(stdout: &mut BufReader<ChildStdout>, wanted: &str) {
    let mut line = String::new();
    while line.trim_end() != wanted {
        line.clear();
        assert_ne!(stdout.read_line(&mut line).unwrap(), 0, "ended before {wanted:?}");
    }
}

#[test]
fn the_first_signal_asks_and_the_second_ends() {
    for (signal, number) in [(Signal::INT, 2), (Signal::TERM, 15)] {
        let (mut child, mut stdout) = start("stuck");
        let id = Pid::from_child(&child);
        wait_for(&mut stdout, "started");
        kill_process(id, signal).unwrap();
        wait_for(&mut stdout, "asked to stop");
        assert!(child.try_wait().unwrap().is_none(), "still running after the first");
        kill_process(id, signal).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(number));
    }
}

/// Else a shell would go on with the next round of its loop.
#[test]
fn a_job_that_obeys_ends_by_the_signal() {
    for (signal, number) in [(Signal::INT, 2), (Signal::TERM, 15)] {
        let (mut child, mut stdout) = start("obedient");
        wait_for(&mut stdout, "started");
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(number));
    }
}
