//! Clones of containers.

use serde_json::{Value, json};

use super::containers::{Container, is_root};
use crate::host::text as path_text;
use crate::rig::{Rig, noise};

fn read(container: &Container<'_>, name: &str) -> Vec<u8> {
    std::fs::read(container.point.path(name)).unwrap_or_default()
}

#[test]
fn a_clone_of_a_used_container_is_a_container_of_its_own() {
    if !is_root() {
        return;
    }
    let rig = Rig::empty();
    rig.ok(&["container", "create", "web1", "64M"]);
    let source = Container::mount(&rig, "web1");
    let (old, new) = (noise(1 << 20, 3), noise(2 << 20, 4));
    source.write("file", &old);
    rig.ok(&["container", "snapshot", "web1", "before"]);
    source.write("file", &new);
    let plan = rig.report(&["container", "clone", "web1", "web2", "--dry-run"]);
    assert_eq!(
        (&plan["dry_run"], &plan["id"]),
        (&true.into(), &serde_json::Value::Null)
    );
    let made = rig.report(&["container", "clone", "web1", "web2", "--require-freeze"]);
    assert_eq!(made["consistency"], "frozen");
    assert!(made["paused_ms"].as_f64().unwrap() > 0.0);
    let of_snapshot = rig.report(&["container", "clone", "web1", "web3", "--snapshot", "before"]);
    assert_eq!(of_snapshot["consistency"], serde_json::Value::Null);
    assert_ne!(made["id"], of_snapshot["id"]);
    // Both have the snapshot; the one for the clone is in neither.
    for name in ["web1", "web2", "web3"] {
        let snapshots = rig.report(&["container", "snapshots", name]);
        let names: Vec<_> = snapshots["snapshots"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| &one["name"])
            .collect();
        assert_eq!(names, ["before"], "{name}");
    }
    source.write("file", b"gone on");
    let (_, text) = rig.error(2, &["clone", "web1", "web4"]);
    assert!(text.contains("holdfast container clone"), "{text}");
    let (_, text) = rig.error(2, &["unmount", path_text(&source.point.path("."))]);
    assert!(text.contains("holdfast container unmount"), "{text}");
    let clone = Container::mount(&rig, "web2");
    let of_before = Container::mount(&rig, "web3");
    assert!(read(&clone, "file") == new);
    assert!(read(&of_before, "file") == old);
    clone.write("other", &old);
    clone.unmount();
    rig.ok(&["container", "merge", "web2", "--all"]);
    rig.ok(&["container", "check", "web2"]);
    rig.ok(&["container", "delete", "web1", "before"]);
    let clone = Container::mount(&rig, "web2");
    assert!(read(&clone, "file") == new && read(&clone, "other") == old);
    assert_eq!(read(&source, "file"), b"gone on");
}

#[test]
fn a_container_that_is_not_mounted_is_cloned_by_any_user() {
    let rig = Rig::empty();
    let words = [
        "container",
        "create",
        "web1",
        "8M",
        "--filesystem",
        "none",
        "--format",
        "parallels",
    ];
    rig.ok(&words);
    let made = rig.report(&["container", "clone", "web1", "web2"]);
    assert_eq!(
        (&made["consistency"], &made["size_bytes"]),
        (&"unmounted".into(), &(8 << 20).into())
    );
    rig.ok(&["container", "check", "web2"]);
    let snapshots = rig.report(&["container", "snapshots", "web1"]);
    assert_eq!(snapshots["snapshots"].as_array().unwrap().len(), 0);
    for words in [
        &["container", "clone", "web1", "web2"][..],
        &["container", "clone", "web1", "web2", "--dry-run"],
        &["container", "clone", "web1", "absent/web3"],
        &["container", "clone", "web1", "web3", "--snapshot", "absent"],
        &["container", "clone", "absent", "web3"],
    ] {
        assert!(!rig.run(words).status.success(), "{words:?}");
    }
    assert!(rig.names(".").iter().all(|name| !name.contains("web3")));
}

#[test]
fn doctor_deletes_the_snapshot_that_a_killed_clone_has_taken() {
    let rig = Rig::empty();
    rig.ok(&["container", "create", "web1", "8M", "--filesystem", "none"]);
    rig.ok(&["container", "snapshot", "web1", "kept"]);
    rig.ok(&["container", "snapshot", "web1", "left"]);
    let mut document: Value = serde_json::from_slice(&rig.read("web1/container.json")).unwrap();
    let snapshots = document["snapshots"].as_array_mut().unwrap();
    let left = snapshots.iter_mut().find(|one| one["name"] == "left").unwrap();
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let dead = json!({"host": host.trim(), "boot": "before", "namespace": "1", "process": 1, "started": 1});
    left["properties"]["clone.process"] = dead.to_string().into();
    rig.write("web1/container.json", document.to_string().as_bytes());
    let names = || -> Vec<String> {
        let snapshots = rig.report(&["container", "snapshots", "web1"]);
        let snapshots = snapshots["snapshots"].as_array().unwrap().iter();
        snapshots.map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    };
    let found = rig.json(3, &["doctor", "container:web1"]);
    let finding = &found["report"]["findings"][0];
    assert_eq!(finding["kind"], "container-snapshot");
    assert!(
        finding["what"]
            .as_str()
            .unwrap()
            .contains("that a killed clone has taken"),
        "{finding}"
    );
    assert_eq!(names(), ["kept", "left"]);
    // There is no repository.
    let repaired = rig.json(3, &["doctor", "container:web1", "--fix"]);
    assert_eq!(repaired["report"]["is_healthy"], true, "{repaired}");
    assert_eq!(names(), ["kept"]);
    rig.ok(&["container", "check", "web1"]);
}
