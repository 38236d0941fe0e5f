//! A backup that is stopped, or killed at any moment, leaves no visible data, and the next one works.

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Stdio;
use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom, SystemClock, to_usize};
use rustix::process::{Pid, Signal, kill_process};

use crate::program::stderr;
use crate::rig::{Rig, noise};

const MIB: usize = 1 << 20;
/// Number of backups that are killed.
const KILLS: usize = 20;

#[test]
fn ctrl_c_commits_nothing_and_the_next_run_succeeds() {
    let rig = Rig::new();
    let bytes = noise(20 * MIB, 1);
    let mut child = rig
        .command(&["backup", "-m", "web1", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(&bytes).unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    // The stream continues until the program stops reading it.
    while stdin.write_all(&bytes).is_ok() {}
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("interrupted"), "{}", stderr(&output));
    assert_eq!(rig.snapshot_count(), 0);
    assert_eq!(rig.names("repo/writers"), [""; 0], "the announcement was removed");
    rig.write("web1.raw", &bytes);
    rig.ok(&["backup", "web1.raw"]);
    rig.ok(&["verify", "web1", "--against", "web1.raw"]);
}

/// Ctrl-C also ends the program that writes to the pipe: the end of the stream is not its real end.
#[test]
fn a_stream_that_ends_after_ctrl_c_is_no_snapshot() {
    let rig = Rig::new();
    let mut child = rig
        .command(&["backup", "-m", "web1", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // When the marker of a writer exists, the backup is reading and handles signals.
    stdin.write_all(&noise(MIB, 1)).unwrap();
    while rig.names("repo/writers") == [""; 0] {
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(2), "{}", stderr(&output));
    assert_eq!(rig.snapshot_count(), 0);
}

#[test]
fn the_backup_after_a_killed_one_works() {
    let seed = std::env::var("HOLDFAST_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(20_261_121);
    println!("HOLDFAST_SEED={seed}");
    let mut random = SeededRandom::new(seed);
    let rig = Rig::new();
    let clock = SystemClock::new();
    let mut bytes = noise(24 * MIB, seed);
    rig.write("web1.raw", &bytes);
    let start = clock.now();
    rig.ok(&["backup", "web1.raw"]);
    let whole_us = u64::try_from(clock.now().saturating_sub(start).as_micros()).unwrap();
    let mut committed = 1;
    for _ in 0..KILLS {
        let fresh = noise(12 * MIB, random.below(u64::MAX));
        let at = to_usize(random.below(12 * MIB as u64));
        bytes[at..at + fresh.len()].copy_from_slice(&fresh);
        rig.write("web1.raw", &bytes);
        let mut child = rig.command(&["backup", "web1.raw"]).spawn().unwrap();
        clock.sleep(Duration::from_micros(random.below(whole_us)));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        let count = rig.snapshot_count();
        // The backup may have ended before the kill; a snapshot is complete or absent.
        let done = usize::from(status.success());
        assert!(
            count == committed + done || (done == 0 && count == committed + 1),
            "{count} after {committed}"
        );
        committed = count;
    }
    rig.ok(&["backup", "web1.raw"]);
    rig.ok(&["verify", "web1", "--against", "web1.raw"]);
    rig.ok(&["verify"]);
    rig.ok(&["gc"]);
    rig.ok(&["verify"]);
    rig.ok(&["restore", "web1", "out.raw"]);
    assert!(rig.read("out.raw") == bytes);
}

/// A killed restore leaves a file with a temporary name; the next restore to the same target removes it, with a
/// message.
#[test]
fn leftovers_of_a_killed_restore_are_removed_by_the_next_one() {
    let rig = Rig::new();
    rig.write("web1.raw", &noise(96 * MIB, 5));
    rig.ok(&["backup", "web1.raw"]);
    let clock = SystemClock::new();
    let partial = || rig.names(".").into_iter().find(|name| name.ends_with(".partial"));
    for target in ["out.raw", "out.qcow2"] {
        for attempt in 0.. {
            assert!(attempt < 30, "every restore ended before the kill");
            let mut child = rig.command(&["restore", "web1", target]).spawn().unwrap();
            while partial().is_none() && child.try_wait().unwrap().is_none() {
                clock.sleep(Duration::from_micros(200));
            }
            child.kill().unwrap();
            if !child.wait().unwrap().success() {
                break;
            }
            std::fs::remove_file(rig.path(target)).unwrap();
        }
        let left = partial().unwrap();
        let output = rig.run(&["restore", "web1", target]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(stderr(&output).contains(&left), "{}", stderr(&output));
        assert_eq!(partial(), None);
    }
    assert!(rig.read("out.raw") == rig.read("web1.raw"));
}
