//! Tags of templates: moved only on request, and never back.

use serde_json::Value;

use crate::program::stderr;
use crate::templates::{assert_pulls, assert_refused, image, pull_words, push, rig};

#[test]
fn a_tag_moves_only_on_request_and_the_old_template_stays() {
    let rig = rig();
    let first = image(&rig, "debian.raw", 1);
    let one = push(&rig, "debian:stable", "debian.raw", "anna", &[]);
    // A second push of the same disk has the same content.
    push(&rig, "debian:stable", "debian.raw", "anna", &[]);
    let second = image(&rig, "debian.raw", 2);
    let words = ["template", "push", "debian:stable", "debian.raw", "--sign", "anna"];
    assert_refused(&rig, &words, 1, "exists", "with other content");
    let two = push(&rig, "debian:stable", "debian.raw", "anna", &["--replace"]);
    assert_eq!(two["before"], one["content"]);
    assert_pulls(&rig, "debian:stable", &second);
    let before = format!("debian@{}", &one["content"].as_str().unwrap()[..12]);
    assert_pulls(&rig, &before, &first);
    assert_refused(
        &rig,
        &pull_words("debian@00000000", "x.raw"),
        1,
        "not-found",
        "there is no template",
    );
    assert_refused(
        &rig,
        &pull_words("debian:old", "x.raw"),
        1,
        "not-found",
        "there is debian:stable",
    );
    let output = rig.code(2, &pull_words("debian@12", "x.raw"));
    assert!(stderr(&output).contains("8 hexadecimal digits"), "{}", stderr(&output));

    // The tag returns to the earlier template by a new statement.
    let tag = [
        "template",
        "tag",
        &before,
        "debian:stable",
        "--sign",
        "bert",
        "--allowed-signers",
        "signers",
    ];
    assert_refused(&rig, &tag, 1, "exists", "with other content");
    rig.ok(&[&tag[..], &["--replace"]].concat());
    assert_pulls(&rig, "debian:stable", &first);
    let listed = rig.report(&["template", "list", "debian", "--all"]);
    let times: Vec<&str> = listed["templates"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["time"].as_str().unwrap())
        .collect();
    assert_eq!(times.len(), 4);
    assert!(times.is_sorted_by(|one, other| one < other), "{times:?}");
    assert_eq!(
        rig.report(&["template", "list"])["templates"].as_array().unwrap().len(),
        1
    );
}

#[test]
fn a_tag_is_given_only_to_a_template_with_a_trusted_signature() {
    let rig = rig();
    let bytes = image(&rig, "debian.raw", 1);
    push(&rig, "debian", "debian.raw", "eve", &[]);
    let tag = [
        "template",
        "tag",
        "debian",
        "debian:stable",
        "--sign",
        "anna",
        "--allowed-signers",
        "signers",
    ];
    assert_refused(&rig, &tag, 1, "refused", "does not count");
    push(&rig, "debian", "debian.raw", "anna", &["--description", "new"]);
    let tagged = rig.report(&tag);
    assert_eq!(
        (tagged["tag"].as_str(), tagged["description"].as_str()),
        (Some("stable"), Some("new"))
    );
    assert_eq!(tagged["own_bytes"], 0);
    assert_pulls(&rig, "debian:stable", &bytes);
}

/// If the tag returned to its earlier template, this would be an unrequested rollback.
#[test]
fn removing_a_template_never_restores_the_earlier_meaning_of_a_tag() {
    let rig = rig();
    image(&rig, "debian.raw", 1);
    let one = push(&rig, "debian", "debian.raw", "anna", &[]);
    image(&rig, "debian.raw", 2);
    let two = push(&rig, "debian", "debian.raw", "anna", &["--replace"]);
    let name = |pushed: &Value| format!("debian@{}", &pushed["content"].as_str().unwrap()[..16]);
    assert_refused(
        &rig,
        &["template", "remove", &name(&two)],
        1,
        "refused",
        "debian:latest currently refers to",
    );
    let planned = rig.report(&["template", "remove", "debian", "--dry-run"]);
    assert_eq!(planned["templates"].as_array().unwrap().len(), 2);
    rig.ok(&["template", "remove", &name(&one)]);
    assert_refused(
        &rig,
        &pull_words(&name(&one), "x.raw"),
        1,
        "not-found",
        "there is no template",
    );
    rig.ok(&pull_words("debian", "x.raw"));
    rig.ok(&["template", "remove", "debian"]);
    assert_refused(
        &rig,
        &["template", "remove", "debian"],
        1,
        "not-found",
        "there is no template",
    );
    push(&rig, "debian:a", "debian.raw", "anna", &[]);
    push(&rig, "debian:b", "debian.raw", "anna", &[]);
    assert_eq!(
        rig.report(&["template", "remove", "debian", "--all"])["templates"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    rig.ok(&["gc", "--repack-below", "0"]);
    assert!(rig.names("repo/snapshots").is_empty());
    assert!(rig.names("repo/protected").is_empty());
}

#[test]
fn concurrent_pushes_of_one_tag_leave_one_template() {
    let rig = rig();
    let images: Vec<Vec<u8>> = (0..4)
        .map(|seed| image(&rig, &format!("{seed}.raw"), seed + 1))
        .collect();
    let children: Vec<_> = (0..4)
        .map(|seed| {
            let source = format!("{seed}.raw");
            rig.command(&["template", "push", "debian", &source, "--sign", "anna"])
                .spawn()
                .unwrap()
        })
        .collect();
    let codes: Vec<Option<i32>> = children
        .into_iter()
        .map(|child| child.wait_with_output().unwrap().status.code())
        .collect();
    assert_eq!(codes.iter().filter(|code| **code == Some(0)).count(), 1, "{codes:?}");
    assert!(codes.iter().all(|code| matches!(code, Some(0 | 1 | 4))), "{codes:?}");
    let winner = codes.iter().position(|code| *code == Some(0)).unwrap();
    assert_pulls(&rig, "debian", &images[winner]);
    assert_eq!(
        rig.report(&["template", "list", "--all"])["templates"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    assert_eq!(rig.names("repo/snapshots").len(), 1);
    assert!(rig.names("repo/writers").is_empty());
}
