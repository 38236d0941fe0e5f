//! Names of missing things are errors: a script with a typo does not succeed.

use crate::rig::{Rig, noise};

fn rig() -> Rig {
    let rig = Rig::new();
    for (name, seed) in [("web1", 1), ("web2", 2), ("db", 3)] {
        rig.write(&format!("{name}.raw"), &noise(5000, seed));
        rig.ok(&["backup", &format!("{name}.raw"), "--tag", &format!("tag-{name}")]);
    }
    rig.ok(&["init", "--no-encryption", "--repository", "other"]);
    rig
}

#[test]
fn names_patterns_and_tags_without_matches_are_errors() {
    let rig = rig();
    std::fs::create_dir(rig.path("empty")).unwrap();
    for words in [
        &["list", "wbe1"][..],
        &["list", "web1", "wbe1"],
        &["list", "x*"],
        &["list", "--tag", "tag-wbe1"],
        &["prune", "wbe1", "--keep-last", "1"],
        &["prune", "web1", "x*", "--keep-last", "1"],
        &["copy", "--to", "other", "--machine", "wbe1"],
        &["copy", "--to", "other", "--tag", "tag-wbe1"],
        &["copy", "--to", "other", "--machine", "x*", "--status"],
        &["forget", "wbe1"],
        &["verify", "wbe1"],
        &["protect", "wbe1"],
        &["unprotect", "wbe1"],
        &["copy", "--to", "other", "wbe1"],
        &["show", "wbe1"],
        &["template", "list", "wbe1"],
        &["runs", "--job", "wbe1", "--state", "state"],
        &["mount", "wbe1", "empty"],
        &["files", "ls", "wbe1"],
        &["host", "remove", "wbe1"],
    ] {
        let (kind, text) = rig.error(1, words);
        assert_eq!(kind, "not-found", "{words:?}: {text}");
        let is_of_repository = !["template", "runs", "host"].contains(&words[0]);
        if is_of_repository && !text.contains("x*") {
            assert!(text.contains("web1"), "{words:?}: {text}");
        }
    }
    assert_eq!(rig.snapshot_count(), 3);
    let output = rig.code(2, &["monitor", "machines", "--within", "1h", "wbe1"]);
    assert!(
        crate::program::stdout(&output).contains("wbe1"),
        "a check says CRITICAL"
    );
}

#[test]
fn unknown_disks_are_errors() {
    let rig = rig();
    for verb in ["verify", "show"] {
        let (kind, text) = rig.error(1, &[verb, "web1:vda"]);
        assert!(
            kind == "not-found" && text.contains("has no disk"),
            "{verb}: {kind}: {text}"
        );
        rig.ok(&[verb, "web1:web1"]);
    }
}

/// A folder has the name of a machine.
#[test]
fn a_folder_is_refused_as_an_image_with_a_hint_to_the_machine() {
    let rig = rig();
    std::fs::create_dir(rig.path("vm7")).unwrap();
    let (_, text) = rig.error(1, &["backup", "vm7"]);
    assert!(
        text.contains("vm7 is a folder") && text.contains("libvirt:vm7"),
        "{text}"
    );
}

#[test]
fn patterns_select_machines_as_in_backup() {
    let rig = rig();
    let count = |words: &[&str]| rig.report(words)["snapshots"].as_array().unwrap().len();
    assert_eq!(count(&["list", "web*"]), 2);
    assert_eq!(count(&["list", "web[2-9]", "db"]), 2);
    assert_eq!(
        count(&["list", "web*", "--tag", "tag-db"]),
        0,
        "both conditions must match"
    );
    assert_eq!(rig.report(&["prune", "web*", "--keep-last", "1"])["kept_count"], 2);
    assert_eq!(count(&["copy", "--to", "other", "--machine", "web*"]), 2);
}

#[test]
fn unprotect_by_name_selects_the_protected_snapshot() {
    let rig = rig();
    rig.ok(&["protect", "web1"]);
    let first = rig.report(&["show", "web1"])["snapshot"]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    rig.ok(&["backup", "web1.raw"]);
    let second = rig.report(&["show", "web1"])["snapshot"]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    // An explicit "latest" means the newest snapshot, which is not protected.
    assert_eq!(rig.error(1, &["unprotect", "web1@latest"]).0, "not-found");
    assert_eq!(rig.error(1, &["unprotect", &second]).0, "not-found");
    // With one wrong name, nothing is changed.
    assert_eq!(rig.error(1, &["unprotect", "web1", &second]).0, "not-found");
    assert_eq!(rig.report(&["show", &first])["snapshot"]["is_protected"], true);
    let text = rig.ok(&["unprotect", "web1"]);
    assert!(text.contains(&first[..8]), "{text}");
    assert_eq!(rig.report(&["show", &first])["snapshot"]["is_protected"], false);
    assert_eq!(rig.error(1, &["unprotect", "web1"]).0, "not-found");
    rig.ok(&["protect", &first, &second]);
    let (kind, text) = rig.error(1, &["unprotect", "web1"]);
    assert!(
        kind == "ambiguous" && text.contains(&first[..8]) && text.contains(&second[..8]),
        "{text}"
    );
    rig.ok(&["unprotect", &first, &second]);
}
