//! A sender that may only add host snapshots: all other requests are refused.

use serde_json::{Value, json};

use super::sshd::{Program, Sshd, texts};
use super::{World, zfs};
use crate::rig::noise;
use holdfast_test_kit::file_systems::system;

const PROGRAM: &str = env!("CARGO_BIN_EXE_holdfast");

/// An sshd that runs only `holdfast receive --append-only` for the folder or dataset of the copy.
pub(super) fn append_only_sshd(world: &World) -> Option<Sshd> {
    Sshd::start(
        Program::NotFound,
        Some(&format!("{PROGRAM} receive --append-only {}", world.above())),
    )
}

pub(super) fn replicate(world: &World, sshd: &Sshd, code: i32) -> Value {
    let far = format!("127.0.0.1:{}", world.target);
    let options = sshd.options();
    let words = [&["replicate", &world.source, &far][..], &texts(&options)].concat();
    world.rig.json(code, &words)["report"]["datasets"][0].clone()
}

/// Sends a request that `holdfast` never sends, and asserts that it is refused; returns the answer.
pub(super) fn assert_refused(sshd: &Sshd, kind: &str, request: &Value, stream: &[u8]) -> String {
    let line = format!("{}\n", json!({ "kind": kind, "ask": request }));
    let (code, text) = sshd.run("holdfast peer 1", &[line.as_bytes(), stream].concat());
    let is_refused = code != Some(0) || text.contains("\"refused\"");
    assert!(is_refused, "{request}: {text}");
    text
}

pub(super) fn receiving(dataset: &str) -> Value {
    json!({ "receive": { "dataset": dataset, "snapshots": [], "is_packed": false } })
}

fn keeping(dataset: &str, tag: &str, means: &str) -> Value {
    json!({ "keep": { "dataset": dataset, "snapshot": "a", "tag": tag, "means": means } })
}

fn assert_other_requests_are_refused(world: &World, sshd: &Sshd, kind: &str, outside: &str) {
    for command in [
        "",
        "true",
        "zfs destroy -r tank",
        "holdfast peer 2",
        "holdfast peer 1; true",
        "holdfast host remove x",
        " holdfast peer 1",
    ] {
        let (code, text) = sshd.run(command, b"rm -rf /\n");
        assert!(matches!(code, Some(1 | 2)), "{command:?}: {text}");
        assert!(
            text.contains("refused") || text.contains("there is no command from ssh"),
            "{command:?}: {text}"
        );
    }
    let above = world.above();
    let elsewhere = [
        outside.to_owned(),
        format!("{above}x"),
        format!("{above}/../x"),
        format!("{above}/.holdfast"),
        format!("{above}//x"),
        format!("{above}/a@b"),
        format!("{above}/-F"),
        String::new(),
    ];
    for dataset in &elsewhere {
        for request in [
            json!({ "datasets": { "name": dataset, "is_tree": true } }),
            json!({ "discard": { "dataset": dataset } }),
            receiving(dataset),
            keeping(dataset, "holdfast-replicate-1", "Hold"),
        ] {
            let text = assert_refused(sshd, kind, &request, b"");
            assert!(text.contains("nothing else"), "{request}: {text}");
        }
    }
    let sending = json!({ "dataset": world.target, "base": null, "to": "a", "is_joined": false, "form": "Plain",
        "token": null, "packing": "Never" });
    for request in [
        json!({ "send": sending }),
        json!({ "estimate": sending }),
        keeping(&world.target, "holdfast-replicate-1", "Bookmark"),
        keeping(&world.target, "somebody", "Hold"),
        keeping(&world.target, "holdfast-replicate-/../x", "Hold"),
        json!({ "destroy": { "dataset": world.target } }),
        json!({ "receive": { "dataset": world.target, "snapshots": [], "is_packed": false, "force": true } }),
        json!(7),
    ] {
        assert_refused(sshd, kind, &request, b"");
    }
    let other_kind = if kind == "zfs" { "btrfs" } else { "zfs" };
    assert_refused(sshd, other_kind, &receiving(&world.target), b"");
    assert_refused(sshd, kind, &receiving(&format!("{above}/new")), b"no stream at all");
    let (code, _) = sshd.run("holdfast peer 1", &vec![b'x'; 100_000]);
    assert_eq!(code, Some(1));
}

#[test]
fn an_append_only_sender_to_zfs_can_only_add() {
    let Some(world) = World::on_zfs() else { return };
    zfs(&["create", "-p", "-o", "canmount=off", &world.above()]);
    let Some(sshd) = append_only_sshd(&world) else { return };
    world.write("disk", 1, 1_000_000);
    for name in ["a", "b", "c"] {
        world.take(name);
    }
    let done = replicate(&world, &sshd, 0);
    // One stream per snapshot: a stream of several could contain more than snapshots.
    assert_eq!(
        (&done["outcome"], done["streams"].as_array().unwrap().len()),
        (&json!("sent"), 3),
        "{done}"
    );
    let before = (
        world.held(&world.target),
        system("zfs", &["list", "-H", "-o", "name"]).unwrap(),
    );
    let pool = world.source.split_once('/').unwrap().0;
    assert_other_requests_are_refused(&world, &sshd, "zfs", &world.source);
    assert_refused(&sshd, "zfs", &receiving(pool), b"");

    // Streams of several snapshots, and one over existing snapshots.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("stream");
    for words in [
        format!("-R {}@c", world.source),
        format!("-I @a {}@c", world.source),
        format!("{}@a", world.source),
    ] {
        system("sh", &["-c", &format!("zfs send {words} > {}", file.display())]).unwrap();
        let stream = std::fs::read(&file).unwrap();
        let to = if words.ends_with("@a") {
            &world.target
        } else {
            &format!("{}/new", world.above())
        };
        let text = assert_refused(&sshd, "zfs", &receiving(to), &stream);
        let expected = if words.ends_with("@a") {
            "exists"
        } else {
            "exactly one snapshot"
        };
        assert!(text.contains(expected), "{words}: {text}");
    }
    assert_eq!(
        (
            world.held(&world.target),
            system("zfs", &["list", "-H", "-o", "name"]).unwrap()
        ),
        before
    );
    // The next replication works as before.
    world.take("d");
    assert_eq!(replicate(&world, &sshd, 0)["outcome"], "sent");
    assert_eq!(world.names(&world.target), ["a", "b", "c", "d"]);
    assert!(world.received("d", "disk") == noise(1_000_000, 1));
}

#[test]
fn an_append_only_sender_to_btrfs_can_only_add() {
    let Some(world) = World::on_btrfs() else { return };
    let Some(sshd) = append_only_sshd(&world) else { return };
    world.write("disk", 1, 1_000_000);
    world.take("a");
    world.take("b");
    assert_eq!(replicate(&world, &sshd, 0)["outcome"], "sent");
    let before = world.held(&world.target);
    assert_other_requests_are_refused(&world, &sshd, "btrfs", &world.source);
    // A received snapshot may contain a link, and a path may lead through it.
    let link = format!("{}/link", world.above());
    std::os::unix::fs::symlink(&world.source, &link).unwrap();
    let text = assert_refused(&sshd, "btrfs", &receiving(&link), b"");
    assert!(text.contains("a link is on the way"), "{text}");
    // The record of a snapshot cannot be changed, because retention uses its time.
    let report = world.rig.report(&["host", "list", &format!("btrfs:{}", world.target)]);
    let shown = system(
        "btrfs",
        &["subvolume", "show", &format!("{}/.holdfast/snapshots/a", world.target)],
    )
    .unwrap();
    let uuid = shown
        .lines()
        .find_map(|line| line.trim().strip_prefix("Received UUID:"))
        .unwrap()
        .trim();
    let forged =
        json!({ "name": "a", "identity": uuid, "time_s": 1, "is_bookmark": false, "hold_count": 0, "record": "{}" });
    let request = json!({ "settle": { "dataset": world.target, "snapshots": [forged], "is_packed": false } });
    let line = format!("{}\n", json!({ "kind": "btrfs", "ask": request }));
    let (code, text) = sshd.run("holdfast peer 1", line.as_bytes());
    assert_eq!(code, Some(0), "{text}");
    assert_eq!(
        world.rig.report(&["host", "list", &format!("btrfs:{}", world.target)]),
        report
    );
    assert_eq!(world.held(&world.target), before);
    world.take("c");
    assert_eq!(replicate(&world, &sshd, 0)["outcome"], "sent");
    assert_eq!(world.names(&world.target), ["a", "b", "c"]);
}

#[test]
fn receive_without_ssh_explains_its_setup() {
    let rig = crate::rig::Rig::empty();
    let (kind, text) = rig.error(2, &["receive", "--append-only", "tank/backup/web"]);
    assert!(kind == "usage" && text.contains("authorized_keys"), "{text}");
}
