//! Ctrl-C in the middle of a job: it ends by the signal, nothing half is left, and the next job works.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Output;
use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::program::{stderr, stdout};
use crate::rig::{Rig, noise};

const MIB: usize = 1 << 20;
/// A busy machine may let a job end before the signal comes, or keep it from starting.
const ATTEMPTS: usize = 30;

/// Runs the program until `has_begun`, and sends SIGINT; until that has come in the middle of the job.
///
/// `undo` takes back what a job that was too fast has done.
fn interrupt(rig: &Rig, words: &[&str], has_begun: impl Fn() -> bool, undo: impl Fn()) -> Output {
    let clock = SystemClock::new();
    for _ in 0..ATTEMPTS {
        let mut child = rig.command(words).spawn().unwrap();
        while !has_begun() && child.try_wait().unwrap().is_none() {
            clock.sleep(Duration::from_micros(200));
        }
        if child.try_wait().unwrap().is_none() {
            kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        }
        let output = child.wait_with_output().unwrap();
        if output.status.signal() == Some(2) {
            return output;
        }
        assert_eq!(output.status.code(), Some(0), "{words:?}: {}", stderr(&output));
        undo();
    }
    panic!("{words:?} was always done before the signal");
}

fn has_partial(rig: &Rig) -> bool {
    rig.names(".").iter().any(|name| name.ends_with(".partial"))
}

fn remove(rig: &Rig, name: &str) {
    std::fs::remove_file(rig.path(name)).unwrap();
}

#[test]
fn a_conversion_leaves_nothing() {
    let rig = Rig::empty();
    rig.write("disk.raw", &noise(64 * MIB, 1));
    for target in ["new.qcow2", "new.raw"] {
        let begun = || has_partial(&rig);
        let words = ["image", "convert", "disk.raw", target, "--verify"];
        let output = interrupt(&rig, &words, begun, || remove(&rig, target));
        assert!(stderr(&output).contains("interrupted"), "{}", stderr(&output));
        assert_eq!(rig.names("."), ["disk.raw"], "{target}");
        // With a data file, which has its name from the beginning.
        if target == "new.qcow2" {
            let words = [&words[..], &["--data-file", "new.data"]].concat();
            interrupt(&rig, &words, begun, || {
                remove(&rig, target);
                remove(&rig, "new.data");
            });
            assert_eq!(rig.names("."), ["disk.raw"]);
        }
    }
    rig.ok(&["image", "convert", "disk.raw", "new.qcow2"]);
}

#[test]
fn a_restore_leaves_nothing_new_and_tells_of_what_it_was_changing() {
    let rig = Rig::new();
    rig.write("web1.raw", &noise(96 * MIB, 2));
    rig.ok(&["backup", "web1.raw"]);
    for target in ["out.raw", "out.qcow2"] {
        let words = ["restore", "web1", target, "--json"];
        let output = interrupt(&rig, &words, || has_partial(&rig), || remove(&rig, target));
        let document: Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert_eq!(document["exit_code"], 130, "as docs/exit-codes.md has it");
        assert_eq!(document["error"]["kind"], "interrupted");
        assert_eq!(rig.names("."), ["repo", "web1.raw"]);
    }
    let begin = || rig.write("out.raw", &vec![0; 96 * MIB]);
    begin();
    let begun = || {
        let mut byte = [0];
        let file = std::fs::File::open(rig.path("out.raw")).unwrap();
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut byte, 4 << 20).unwrap();
        byte != [0]
    };
    let output = interrupt(&rig, &["restore", "web1", "out.raw", "--in-place"], begun, begin);
    assert!(stderr(&output).contains("restore again"), "{}", stderr(&output));
    rig.ok(&["restore", "web1", "out.raw", "--in-place"]);
    assert!(rig.read("out.raw") == rig.read("web1.raw"));
}

/// Enough snapshots that gc has something to look at, and packs that nobody needs.
fn rig_with_garbage(snapshots: u64) -> (Rig, Vec<u8>) {
    let rig = Rig::new();
    let mut bytes = noise(6 * MIB, 4);
    for number in 0..snapshots {
        bytes[..MIB].copy_from_slice(&noise(MIB, 1000 + number));
        rig.write("web1.raw", &bytes);
        rig.ok(&["backup", "web1.raw"]);
    }
    rig.ok(&["prune", "--keep-last", "1"]);
    (rig, bytes)
}

/// The rig is made anew for each attempt: what gc has done is done.
#[test]
fn gc_may_be_stopped_and_the_next_one_goes_on() {
    let clock = SystemClock::new();
    for attempt in 0..ATTEMPTS as u64 {
        let (rig, bytes) = rig_with_garbage(12);
        let child = rig.command(&["gc", "--json"]).spawn().unwrap();
        let announced = || rig.path("repo/writers").exists() && !rig.names("repo/writers").is_empty();
        let start = clock.now();
        while !announced() && clock.now().saturating_sub(start) < Duration::from_millis(100 + attempt) {
            clock.sleep(Duration::from_micros(100));
        }
        kill_process(Pid::from_child(&child), Signal::INT).ok();
        let output = child.wait_with_output().unwrap();
        let document: Value = serde_json::from_str(&stdout(&output)).unwrap();
        rig.ok(&["verify"]);
        let report = rig.report(&["gc"]);
        assert_eq!(report["done"]["waiting_for"].as_array().unwrap().len(), 0, "{report}");
        rig.ok(&["verify"]);
        rig.ok(&["restore", "web1", "out.raw"]);
        assert!(rig.read("out.raw") == bytes);
        if output.status.signal() == Some(2) {
            assert_eq!(
                (&document["exit_code"], &document["error"]["kind"]),
                (&130.into(), &"interrupted".into())
            );
            return;
        }
    }
    panic!("gc was always done before the signal");
}

#[test]
fn a_backup_commits_nothing_and_the_repository_is_usable() {
    let rig = Rig::new();
    rig.write("web1.raw", &noise(96 * MIB, 3));
    let begun = || rig.path("repo/writers").exists() && !rig.names("repo/writers").is_empty();
    let machine = std::cell::Cell::new(0);
    interrupt(&rig, &["backup", "web1.raw"], begun, || {
        // What is stored already would be done at once: other bytes for the next attempt.
        machine.set(machine.get() + 1);
        rig.write("web1.raw", &noise(96 * MIB, 100 + machine.get()));
    });
    assert_eq!(rig.names("repo/writers"), [""; 0], "it took its announcement back");
    let before = rig.snapshot_count();
    rig.ok(&["backup", "web1.raw"]);
    assert_eq!(rig.snapshot_count(), before + 1);
    rig.ok(&["verify"]);
    rig.ok(&["gc"]);
    rig.ok(&["restore", "web1", "out.raw"]);
    assert!(rig.read("out.raw") == rig.read("web1.raw"));
}
