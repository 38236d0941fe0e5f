//! Snapshots copied to a second repository: identical, copied once, and listed in its status.

use std::os::unix::fs::PermissionsExt as _;

use serde_json::{Value, json};

use crate::program::stderr;
use crate::rig::{Rig, noise};

const MIB: usize = 1 << 20;

/// A rig with `web1` on two days, the first of which is tagged, and `db` once, whose disk shares much data with `web1`;
/// and the two images of `web1`.
pub(super) fn two_machines() -> (Rig, [Vec<u8>; 2]) {
    let rig = Rig::new();
    let mut bytes = noise(12 * MIB, 1);
    bytes.resize(20 * MIB + 1000, 0);
    let first = bytes.clone();
    rig.write("web1.raw", &bytes);
    rig.ok(&["backup", "web1.raw", "--tag", "kept", "--time", "2026-11-20T10:00:00Z"]);
    rig.ok(&["protect", "web1"]);
    bytes[5 * MIB..5 * MIB + 9000].copy_from_slice(&noise(9000, 2));
    rig.write("web1.raw", &bytes);
    rig.ok(&["backup", "web1.raw", "--time", "2026-11-21T10:00:00Z"]);
    rig.write("db.raw", &bytes[..8 * MIB]);
    rig.ok(&["backup", "db.raw", "--time", "2026-11-21T11:00:00Z"]);
    (rig, [first, bytes])
}

/// Restores both days of `web1` from a repository, and compares.
pub(super) fn assert_both_days(rig: &Rig, options: &[&str], images: &[Vec<u8>; 2]) {
    for (name, image) in ["web1@2026-11-20", "web1@2026-11-21"].into_iter().zip(images) {
        rig.ok(&[options, &["restore", name, "out.raw"]].concat());
        assert!(rig.read("out.raw") == *image, "{name} has other content");
        std::fs::remove_file(rig.path("out.raw")).unwrap();
    }
    rig.ok(&[options, &["verify"]].concat());
}

fn ids(rig: &Rig, options: &[&str]) -> Vec<String> {
    let list = rig.report(&[options, &["list"]].concat());
    let snapshots = list["snapshots"].as_array().unwrap().iter();
    snapshots
        .map(|snapshot| snapshot["id"].as_str().unwrap().to_owned())
        .collect()
}

fn outcomes(report: &Value) -> Vec<&str> {
    let snapshots = report["snapshots"].as_array().unwrap().iter();
    snapshots
        .map(|snapshot| snapshot["outcome"].as_str().unwrap())
        .collect()
}

#[test]
fn copies_are_identical_made_once_and_not_copied_back() {
    let (rig, images) = two_machines();
    rig.ok(&["init", "--no-encryption", "-r", "far"]);
    let all = ["copy", "--to", "far", "--all"];
    let planned = rig.report(&[&all[..], &["--dry-run"]].concat());
    assert_eq!(
        (&planned["dry_run"], outcomes(&planned)),
        (&json!(true), vec!["planned"; 3])
    );
    assert_eq!(ids(&rig, &["-r", "far"]), [""; 0]);
    assert_eq!(rig.names("repo/writers"), [""; 0]);
    let done = rig.report(&all);
    assert_eq!((outcomes(&done), &done["alike"]), (vec!["copied"; 3], &json!(false)));
    // For the second day of web1 only changes are read, and for db the data that web1 does not have.
    let bytes = |report: &Value, number: usize| report["snapshots"][number]["read_bytes"].as_u64().unwrap();
    assert!(
        bytes(&done, 0) > 12 * MIB as u64 && bytes(&done, 1) < MIB as u64,
        "{done}"
    );
    assert!(bytes(&done, 2) < MIB as u64, "{done}");
    assert_both_days(&rig, &["-r", "far"], &images);
    assert_eq!(rig.names("repo/writers"), [""; 0]);

    let shown = |options: &[&str]| rig.report(&[options, &["show", "web1@2026-11-20"]].concat())["snapshot"].clone();
    let (here, there) = (shown(&[]), shown(&["-r", "far"]));
    for field in [
        "machine",
        "time",
        "tags",
        "host",
        "program",
        "consistency",
        "method",
        "disks",
    ] {
        assert_eq!(here[field], there[field], "{field}");
    }
    assert_eq!(
        (&here["is_protected"], &there["is_protected"]),
        (&json!(true), &json!(false))
    );
    let origin = there["origin"].as_str().unwrap();
    assert!(
        origin.ends_with(&format!("/{}", here["id"].as_str().unwrap())),
        "{origin}"
    );

    let again = rig.report(&all);
    assert_eq!(
        (outcomes(&again), &again["stored_bytes"]),
        (vec!["present"; 3], &json!(0))
    );
    assert_eq!(again["read_bytes"], 0);
    let copy_back = rig.report(&["copy", "-r", "far", "--to", "repo", "--all"]);
    assert_eq!(outcomes(&copy_back), ["present"; 3]);
    // A third repository recognises the copies, from either of the two.
    rig.ok(&["init", "--no-encryption", "-r", "third"]);
    rig.ok(&["copy", "-r", "far", "--to", "third", "--machine", "web1"]);
    let direct = rig.report(&["copy", "--to", "third", "--all"]);
    assert_eq!(outcomes(&direct), ["present", "present", "copied"]);
    assert_both_days(&rig, &["-r", "third"], &images);
}

#[test]
fn snapshots_removed_from_the_target_are_copied_again_only_on_request() {
    let (rig, images) = two_machines();
    rig.ok(&["init", "--no-encryption", "-r", "far"]);
    rig.ok(&["copy", "--to", "far", "--machine", "web1"]);
    rig.ok(&["-r", "far", "prune", "--keep-last", "1"]);
    rig.ok(&["-r", "far", "gc"]);
    let all = ["copy", "--to", "far", "--all"];
    assert_eq!(outcomes(&rig.report(&all)), ["removed", "present", "copied"]);
    let status = rig.report(&["copy", "--to", "far", "--status", "--machine", "web1"]);
    assert_eq!(status["machines"][0]["removed_count"], 1);
    assert_eq!(status["machines"][0]["behind_ms"], 0);
    // A snapshot that was also removed from the first repository is copied back on request.
    assert_eq!(
        outcomes(&rig.report(&["copy", "--to", "far", "web1@2026-11-20"])),
        ["copied"]
    );
    rig.ok(&["unprotect", "web1@2026-11-20"]);
    let first = ids(&rig, &[])[0].clone();
    rig.ok(&["forget", &first]);
    rig.ok(&["gc"]);
    let copy_back = ["copy", "-r", "far", "--to", "repo", "--machine", "web1"];
    assert_eq!(outcomes(&rig.report(&copy_back)), ["removed", "present"]);
    let wanted = rig.report(&[&copy_back[..], &["--again"]].concat());
    assert_eq!(outcomes(&wanted), ["copied", "present"]);
    assert_both_days(&rig, &[], &images);
    assert_eq!(
        outcomes(&rig.report(&all)),
        ["present"; 3],
        "the snapshot that was copied back is the same"
    );
    assert_eq!(ids(&rig, &["-r", "far"]).len(), 3);
}

#[test]
fn repositories_initialized_alike_share_chunks() {
    let (rig, images) = two_machines();
    for (name, word) in [
        ("near-key", "four horses eat soup\n"),
        ("far-key", "five cows drink tea\n"),
    ] {
        rig.write(name, word.as_bytes());
        std::fs::set_permissions(rig.path(name), std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    let near = ["-r", "near", "--password-file", "near-key"];
    let far = ["-r", "far", "--password-file", "far-key"];
    rig.ok(&[&["init"], &near[..]].concat());
    let like = ["--like", "near", "--like-password-file", "near-key"];
    let made = rig.report(&[&["init"], &far[..], &like].concat());
    assert_eq!(made["like"].as_str().unwrap().len(), 32);
    // Each repository has backups of its own, of the same disk.
    rig.ok(&[&["backup", "web1.raw"], &near[..]].concat());
    rig.ok(&[&["backup", "-m", "other", "web1.raw"], &far[..]].concat());
    let to_far = ["--to", "far", "--to-password-file", "far-key"];
    let done = rig.report(&[&["copy", "web1"], &near[..], &to_far].concat());
    assert_eq!(
        (&done["alike"], &done["read_bytes"]),
        (&json!(true), &json!(0)),
        "{done}"
    );
    assert_eq!(outcomes(&done), ["copied"]);
    // The password of one repository does not open the other.
    let (kind, _) = rig.error(1, &["list", "-r", "far", "--password-file", "near-key"]);
    assert_eq!(kind, "wrong-password");
    // From an unencrypted repository to an encrypted one, configured by the environment.
    let words = ["copy", "--all", "--json"];
    let mut command = rig.command(&words);
    command.env("HOLDFAST_TO_REPOSITORY", rig.path("far"));
    let refused = command.output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "there is no terminal for a prompt");
    assert!(stderr(&refused).contains("--to-password-file"), "{}", stderr(&refused));
    command.env("HOLDFAST_TO_PASSWORD_FILE", rig.path("far-key"));
    assert_eq!(command.output().unwrap().status.code(), Some(0));
    std::fs::remove_file(rig.path("web1.raw")).unwrap();
    rig.ok(&[&["forget"], &far[..], &[&ids(&rig, &far)[3]]].concat());
    assert_both_days(&rig, &far, &images);
    rig.ok(&[&["scrub"], &far[..]].concat());
    rig.ok(&[&["gc"], &far[..]].concat());
    assert_both_days(&rig, &far, &images);
}

#[test]
fn the_status_shows_which_snapshots_are_where_and_the_lag() {
    let (rig, _) = two_machines();
    rig.ok(&["init", "--no-encryption", "-r", "far"]);
    let status = ["copy", "--to", "far", "--status"];
    rig.ok(&["copy", "--to", "far", "web1@2026-11-20"]);
    rig.ok(&[
        "-r",
        "far",
        "backup",
        "-m",
        "theirs",
        "db.raw",
        "--time",
        "2026-11-22T10:00:00Z",
    ]);
    let report = rig.report(&status);
    let machine = |number: usize| report["machines"][number].clone();
    assert_eq!(
        machine(0),
        json!({ "machine": "db", "distinction": null, "newest_here": "2026-11-21T11:00:00Z", "here_count": 1, "newest_there": null, "there_count": 0,
                "newest_common": null, "missing_count": 1, "removed_count": 0, "behind_ms": null })
    );
    assert_eq!(
        (&machine(1)["machine"], &machine(1)["here_count"]),
        (&json!("theirs"), &json!(0))
    );
    assert_eq!(
        machine(2),
        json!({ "machine": "web1", "distinction": null, "newest_here": "2026-11-21T10:00:00Z", "here_count": 2,
                "newest_there": "2026-11-20T10:00:00Z", "there_count": 1, "newest_common": "2026-11-20T10:00:00Z",
                "missing_count": 1, "removed_count": 0, "behind_ms": 86_400_000 })
    );
    let text = rig.ok(&status);
    assert!(text.contains("1 d") && text.contains("not here"), "{text}");
    rig.ok(&["copy", "--to", "far", "--all"]);
    assert_eq!(rig.report(&status)["machines"][2]["behind_ms"], 0);
    assert_eq!(
        rig.report(&[&status[..], &["--tag", "kept"]].concat())["machines"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
}

#[test]
fn contradictory_command_lines_change_nothing() {
    let (rig, _) = two_machines();
    rig.ok(&["init", "--no-encryption", "-r", "far"]);
    for words in [
        &["copy", "--to", "far"][..],
        &["copy", "--all"],
        &["copy", "--to", "./repo", "--all"],
        &["copy", "--to", "far", "--all", "--machine", "web1"],
        &["copy", "--to", "far", "web1:web1"],
    ] {
        assert_eq!(rig.error(2, words).0, "usage", "{words:?}");
    }
    assert_eq!(rig.error(1, &["copy", "--to", "far", "missing"]).0, "not-found");
    assert_eq!(
        rig.error(1, &["copy", "--to", "nowhere", "--all"]).0,
        "no-such-repository"
    );
    assert_eq!(ids(&rig, &["-r", "far"]), [""; 0]);
}
