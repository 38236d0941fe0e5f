//! Copies that are stopped or killed, run out of space, or read damaged or removed data.

use std::os::unix::process::ExitStatusExt as _;
use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom, SystemClock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::copies::{assert_both_days, two_machines};
use crate::host::small_file_system;
use crate::program::stderr;
use crate::rig::{Rig, noise};

const MIB: usize = 1 << 20;
/// Number of copies that are killed.
const KILLS: usize = 12;
const ALL: [&str; 4] = ["copy", "--to", "far", "--all"];

fn count(rig: &Rig) -> usize {
    rig.report(&["-r", "far", "list"])["snapshots"]
        .as_array()
        .unwrap()
        .len()
}

#[test]
fn a_killed_copy_is_completed_by_the_next_one() {
    let seed = std::env::var("HOLDFAST_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(20_261_122);
    println!("HOLDFAST_SEED={seed}");
    let mut random = SeededRandom::new(seed);
    let clock = SystemClock::new();
    for like in [false, true] {
        let (rig, images) = two_machines();
        let init = |name| {
            let alike: &[&str] = if like { &["--like", "repo"] } else { &[] };
            rig.ok(&[&["init", "--no-encryption", "-r", name], alike].concat());
        };
        init("measured");
        let start = clock.now();
        rig.ok(&["copy", "--to", "measured", "--all"]);
        let whole_us = u64::try_from(clock.now().saturating_sub(start).as_micros()).unwrap();
        init("far");
        let mut committed = 0;
        for _ in 0..KILLS {
            let mut child = rig.command(&ALL).spawn().unwrap();
            clock.sleep(Duration::from_micros(random.below(whole_us)));
            child.kill().unwrap();
            child.wait().unwrap();
            let now = count(&rig);
            assert!((committed..=3).contains(&now), "{now} after {committed}");
            committed = now;
        }
        // The leases of killed copies do not block gc in either repository.
        rig.ok(&["gc"]);
        let done = rig.report(&ALL);
        assert_eq!(done["copied_count"].as_u64().unwrap() + committed as u64, 3);
        assert_eq!(count(&rig), 3);
        assert_both_days(&rig, &["-r", "far"], &images);
        rig.ok(&["-r", "far", "gc"]);
        assert_both_days(&rig, &["-r", "far"], &images);
        assert_eq!(rig.names("repo/writers"), [""; 0]);
    }
}

/// A copy that is slow enough for actions during the copy.
fn slow_copy(rig: &Rig) -> std::process::Child {
    let child = rig.command(&[&ALL[..], &["--bwlimit", "4M"]].concat()).spawn().unwrap();
    let clock = SystemClock::new();
    // The copy is reading when its marker exists in the target, which is created after the one in the source.
    let is_there = || std::fs::read_dir(rig.path("far/writers")).is_ok_and(|mut entries| entries.next().is_some());
    while !is_there() {
        clock.sleep(Duration::from_micros(200));
    }
    child
}

#[test]
fn ctrl_c_stops_a_copy_and_releases_its_leases() {
    let (rig, images) = two_machines();
    rig.ok(&["init", "--no-encryption", "-r", "far"]);
    let child = slow_copy(&rig);
    assert_eq!(rig.names("repo/writers").len(), 1);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(2), "{}", stderr(&output));
    assert_eq!(count(&rig), 0);
    assert_eq!((rig.names("repo/writers"), rig.names("far/writers")), (vec![], vec![]));
    rig.ok(&ALL);
    assert_both_days(&rig, &["-r", "far"], &images);
}

/// A snapshot removed while it is being copied is copied completely, because gc keeps its data; one that is removed
/// before its turn is reported.
#[test]
fn snapshots_removed_during_a_copy_arrive_or_are_reported() {
    let (rig, images) = two_machines();
    rig.ok(&["unprotect", "web1@2026-11-20"]);
    rig.ok(&["init", "--no-encryption", "-r", "far"]);
    let child = slow_copy(&rig);
    for name in ["web1@2026-11-20", "db@2026-11-21"] {
        rig.ok(&["forget", name]);
    }
    let gc = rig.report(&["gc"]);
    assert_eq!(gc["done"]["waiting_for"].as_array().unwrap().len(), 1, "{gc}");
    rig.ok(&["-r", "far", "gc"]);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert!(String::from_utf8_lossy(&output.stdout).contains("it was removed here meanwhile"));
    assert_both_days(&rig, &["-r", "far"], &images);
    assert_eq!(count(&rig), 2);
    rig.ok(&["gc"]);
    rig.ok(&["verify"]);
}

#[test]
fn concurrent_copies_store_each_snapshot_once() {
    let (rig, images) = two_machines();
    rig.ok(&["init", "--no-encryption", "-r", "far"]);
    for _ in 0..3 {
        let children = [(); 3].map(|()| rig.command(&ALL).spawn().unwrap());
        for child in children {
            let output = child.wait_with_output().unwrap();
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        }
        assert_eq!(count(&rig), 3);
        assert_both_days(&rig, &["-r", "far"], &images);
        for snapshot in rig.report(&["-r", "far", "list"])["snapshots"].as_array().unwrap() {
            rig.ok(&["-r", "far", "forget", snapshot["id"].as_str().unwrap()]);
        }
        rig.ok(&["-r", "far", "gc"]);
    }
}

/// Damages the pack of a repository that contains the first day of web1.
pub(super) fn damage_largest_pack(rig: &Rig, repository: &str) {
    let mut packs = Vec::new();
    for folder in rig.names(&format!("{repository}/packs")) {
        let files = rig.names(&format!("{repository}/packs/{folder}"));
        packs.extend(
            files
                .into_iter()
                .map(|name| format!("{repository}/packs/{folder}/{name}")),
        );
    }
    let largest = packs.into_iter().max_by_key(|name| rig.read(name).len()).unwrap();
    let mut bytes = rig.read(&largest);
    bytes[500] ^= 1;
    std::fs::remove_file(rig.path(&largest)).unwrap();
    rig.write(&largest, &bytes);
}

/// A copy from the intact repository repairs the damaged one, for all snapshots with the damaged chunks.
#[test]
fn a_damaged_repository_is_repaired_by_a_copy() {
    for (like, damaged) in [(true, "far"), (true, "repo"), (false, "far")] {
        let (rig, images) = two_machines();
        let alike: &[&str] = if like { &["--like", "repo"] } else { &[] };
        rig.ok(&[&["init", "--no-encryption", "-r", "far"], alike].concat());
        rig.ok(&ALL);
        damage_largest_pack(&rig, damaged);
        rig.code(5, &["-r", damaged, "scrub"]);
        rig.code(5, &["-r", damaged, "verify"]);
        rig.ok(&["-r", damaged, "forget", "web1@2026-11-21"]);
        let good = if damaged == "far" { "repo" } else { "far" };
        rig.ok(&["-r", good, "copy", "--to", damaged, "web1@2026-11-21"]);
        assert_both_days(&rig, &["-r", damaged], &images);
    }
}

#[test]
fn damaged_snapshots_are_named_and_the_others_are_copied() {
    let (rig, images) = two_machines();
    rig.write("mail.raw", &noise(3 * MIB, 77));
    rig.ok(&["backup", "mail.raw"]);
    rig.ok(&["init", "--no-encryption", "-r", "far", "--like", "repo"]);
    rig.ok(&["copy", "--to", "far", "web1"]);
    damage_largest_pack(&rig, "repo");
    rig.ok(&["init", "--no-encryption", "-r", "strange"]);
    let document = rig.json(5, &["copy", "--to", "strange", "--all"]);
    let report = &document["report"];
    assert_eq!(document["status"], "damage");
    assert_eq!(
        (&report["copied_count"], &report["failed_count"]),
        (&json!(1), &json!(3)),
        "{report}"
    );
    let failed = &report["snapshots"][0];
    assert_eq!(failed["outcome"], "failed");
    let reason = failed["reason"].as_str().unwrap();
    assert!(reason.contains("disk web1") && reason.contains("packs/"), "{reason}");
    let listed = rig.report(&["-r", "strange", "list"]);
    assert_eq!(listed["snapshots"][0]["machine"], "mail");
    rig.ok(&["-r", "strange", "verify"]);
    // Damaged chunks are not needed if the target already has intact ones.
    let done = rig.report(&["copy", "--to", "far", "--machine", "db"]);
    assert_eq!(done["copied_count"], 1, "{done}");
    assert!(done["read_bytes"].as_u64().unwrap() < MIB as u64, "{done}");
    rig.ok(&["-r", "far", "restore", "web1", "out.raw"]);
    assert!(rig.read("out.raw") == images[1]);
}

#[test]
fn a_full_target_and_a_read_only_source_are_handled() {
    let (rig, images) = two_machines();
    let Some(small) = small_file_system(&rig.path("small"), 40 << 20) else {
        return;
    };
    std::fs::create_dir(rig.path("small/repo")).unwrap();
    rig.ok(&["init", "--no-encryption", "-r", "small/repo"]);
    rig.write("small/filler", &noise(24 * MIB, 5));
    let all = ["copy", "--to", "small/repo", "--all"];
    let (kind, text) = rig.error(1, &all);
    assert_eq!(kind, "no-space", "{text}");
    assert!(text.contains("small/repo"), "{text}");
    assert_eq!(
        (rig.names("small/repo/writers"), rig.names("repo/writers")),
        (vec![], vec![])
    );
    std::fs::remove_file(rig.path("small/filler")).unwrap();
    rig.ok(&all);
    assert_both_days(&rig, &["-r", "small/repo"], &images);
    small.remount("ro");
    rig.ok(&["init", "--no-encryption", "-r", "far"]);
    rig.ok(&["copy", "-r", "small/repo", "--to", "far", "--all"]);
    assert_both_days(&rig, &["-r", "far"], &images);
    rig.ok(&["-r", "far", "backup", "-m", "new", "db.raw"]);
    let (kind, text) = rig.error(1, &["copy", "-r", "far", "--to", "small/repo", "--machine", "new"]);
    assert_eq!(kind, "permission", "{text}");
}
