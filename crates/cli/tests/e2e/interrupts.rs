//! Ctrl-C: the first signal sets a flag that jobs check, the second one ends the process.
//!
//! The job is this test program itself, started again as a child.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use holdfast_cli::process::interrupt::{end_by, listen};
use rustix::process::{Pid, Signal, kill_process};

use crate::rig::{Rig, assert_runs};

/// Longer than any successful step here, and less than the timeout of a pool.
const PATIENCE: Duration = Duration::from_secs(60);
const CHILD: &str = "HOLDFAST_TEST_INTERRUPT_CHILD";

/// A job that prints its start and the request to stop; then it ends, or continues like a hanging one.
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
fn the_first_signal_requests_a_stop_and_the_second_kills() {
    for (signal, number) in [(Signal::INT, 2), (Signal::TERM, 15)] {
        let (mut child, mut stdout) = start("stuck");
        let id = Pid::from_child(&child);
        wait_for(&mut stdout, "started");
        kill_process(id, signal).unwrap();
        wait_for(&mut stdout, "asked to stop");
        assert_runs(&mut child);
        kill_process(id, signal).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(number));
    }
}

/// Otherwise a loop in a shell would continue with its next iteration.
#[test]
fn a_stopped_job_exits_by_the_signal() {
    for (signal, number) in [(Signal::INT, 2), (Signal::TERM, 15)] {
        let (mut child, mut stdout) = start("obedient");
        wait_for(&mut stdout, "started");
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(number));
    }
}

/// The program waits minutes for a pool that does not answer, both when it checks the certificate before it asks for a
/// password, and when it logs in. The signal ends that.
#[test]
fn a_signal_ends_a_command_that_waits_for_a_silent_pool() {
    let rig = Rig::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let pool = format!("xen://root@{}", listener.local_addr().unwrap());
    let fingerprint = "ab".repeat(32);
    for words in [
        &["machines", &pool][..],
        &["machines", &pool, "--pool-certificate", &fingerprint],
        &["doctor", &pool],
    ] {
        let mut command = rig.command(words);
        let mut child = command.env("HOLDFAST_POOL_PASSWORD", "secret").spawn().unwrap();
        let (_silent, _) = listener.accept().unwrap();
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let clock = SystemClock::new();
        let start = clock.now();
        let ended = loop {
            let ended = child.try_wait().unwrap();
            if ended.is_some() || clock.now().saturating_sub(start) > PATIENCE {
                break ended;
            }
            clock.sleep(Duration::from_millis(20));
        };
        let status = ended.unwrap_or_else(|| {
            child.kill().unwrap();
            panic!("{words:?} did not end by the signal")
        });
        assert_eq!(status.signal(), Some(15), "{words:?}");
    }
}
