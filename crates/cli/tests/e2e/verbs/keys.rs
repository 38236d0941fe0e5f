//! Passwords and keys of a repository.

use std::os::unix::fs::PermissionsExt;

use crate::program::{stderr, stdout};
use crate::rig::{Rig, assert_code};

/// Runs the program with a password in its environment.
fn with(rig: &Rig, password: &str, words: &[&str]) -> std::process::Output {
    rig.command(words).env("HOLDFAST_PASSWORD", password).output().unwrap()
}

fn ok(rig: &Rig, password: &str, words: &[&str]) -> String {
    let output = with(rig, password, words);
    assert_code(&output, 0, words);
    stdout(&output)
}

#[test]
fn passwords_are_added_changed_and_removed() {
    let rig = Rig::empty();
    let (first, second, third) = ("correct horse", "battery staple", "zebra violin");
    let made = ok(&rig, first, &["init", "--paper-key"]);
    let paper = made
        .lines()
        .find_map(|line| line.trim().starts_with("HF1-").then(|| line.trim().to_owned()))
        .unwrap();
    rig.write("disk.raw", b"x");
    ok(&rig, first, &["backup", "disk.raw"]);

    let wrong = with(&rig, "not the password", &["list"]);
    assert_code(&wrong, 1, &["list"]);
    assert!(
        stderr(&wrong).contains("hint: check that this is the password"),
        "{}",
        stderr(&wrong)
    );

    rig.write("second", second.as_bytes());
    rig.write("third", third.as_bytes());
    for name in ["second", "third"] {
        std::fs::set_permissions(rig.path(name), PermissionsExt::from_mode(0o600)).unwrap();
    }
    ok(
        &rig,
        first,
        &["key", "add", "--new-password-file", "second", "--label", "alice"],
    );
    assert!(ok(&rig, second, &["list"]).contains("disk"));
    ok(&rig, second, &["key", "rotate", "--new-password-file", "third"]);
    assert_code(&with(&rig, second, &["list"]), 1, &[]);
    let keys = rig.report(&["key", "list"]);
    assert_eq!(keys["keys"].as_array().unwrap().len(), 2);
    let of_alice = keys["keys"]
        .as_array()
        .unwrap()
        .iter()
        .find(|key| key["label"] == "alice")
        .unwrap();
    let other = keys["keys"]
        .as_array()
        .unwrap()
        .iter()
        .find(|key| key["label"] == "first")
        .unwrap();

    let id = |key: &serde_json::Value| key["id"].as_str().unwrap().to_owned();
    ok(&rig, third, &["key", "remove", &id(other)]);
    assert_code(&with(&rig, first, &["list"]), 1, &[]);
    let last = with(&rig, third, &["key", "remove", &id(of_alice)]);
    assert_code(&last, 1, &[]);
    assert!(stderr(&last).contains("last"), "{}", stderr(&last));

    assert!(ok(&rig, &paper.to_lowercase(), &["list"]).contains("disk"));
    assert!(ok(&rig, third, &["key", "paper"]).contains(&paper));
    let mistyped = paper.replace("HF1-", "HF1-0");
    assert_code(&with(&rig, &mistyped, &["list"]), 1, &[]);
}

#[test]
fn weak_passwords_are_refused_at_init() {
    let rig = Rig::empty();
    for weak in ["short", "password", "aaaaaaaaaaaa"] {
        let output = with(&rig, weak, &["init"]);
        assert_code(&output, 1, &["init", weak]);
        assert!(stderr(&output).contains("too weak"), "{}", stderr(&output));
    }
    assert!(!rig.path("repo").exists());
    assert_eq!(rig.error(2, &["init"]).0, "no-password");
}

#[test]
fn an_unencrypted_repository_needs_and_accepts_no_password() {
    let rig = Rig::new();
    assert_eq!(rig.snapshot_count(), 0);
    // A password implies an encrypted repository: this one replaced it.
    assert_code(&with(&rig, "correct horse", &["list"]), 1, &[]);
    assert_code(&with(&rig, "correct horse", &["init", "--no-encryption"]), 2, &[]);
}
