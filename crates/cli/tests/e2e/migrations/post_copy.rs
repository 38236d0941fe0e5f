//! `migrate --post-copy`: a machine runs at the other host before its disks are complete there.

use std::path::Path;

use serde_json::Value;

use super::TwoHosts;
use crate::writing_guest::assert_one_moment;

const POST_COPY: [&str; 3] = ["--post-copy", "--max-frozen", "20s"];

/// What the image of the machine there has as backing file.
fn backing_there(hosts: &TwoHosts) -> Option<String> {
    let image = hosts.there.path("images/web1.qcow2");
    let info = holdfast_test_kit::run("qemu-img", &["info", "-U", "--output=json", image.to_str().unwrap()]);
    let info: Value = serde_json::from_str(&info).unwrap();
    info["backing-filename"].as_str().map(str::to_owned)
}

/// The disk there is complete, and continues what the machine wrote here.
fn assert_complete(hosts: &TwoHosts) {
    assert_eq!(hosts.states(), ["shut off", "running"]);
    assert_eq!(backing_there(hosts), None);
    hosts.console.wait_for_more(50);
    hosts.console.assert_no_mismatch();
    for words in [&["dumpxml", "web1"] as &[&str], &["dumpxml", "--inactive", "web1"]] {
        let text = hosts.there.virsh(words);
        assert!(!text.contains("nbd") && text.contains("web1.qcow2"), "{text}");
    }
    let kept = hosts.there.virsh(&["dumpxml", "--inactive", "web1"]);
    assert!(!kept.contains("error_policy"), "{kept}");
    let raw = |image: &Path, name: &str| {
        let raw = hosts.rig.path(name);
        holdfast_test_kit::run(
            "qemu-img",
            &["convert", "-O", "raw", image.to_str().unwrap(), raw.to_str().unwrap()],
        );
        std::fs::read(raw).unwrap()
    };
    let here = raw(&hosts.image, "here.raw");
    let stopped_at = assert_one_moment(&here);
    hosts.there.virsh(&["destroy", "web1"]);
    let there = raw(&hosts.there.path("images/web1.qcow2"), "there.raw");
    assert!(assert_one_moment(&there) > stopped_at);
    assert!(here[32 << 20..] == there[32 << 20..], "what the guest has not written");
    hosts.assert_no_sockets();
    assert_eq!(hosts.names_there(), ["web1.qcow2"]);
}

#[test]
fn a_machine_runs_there_before_its_disk_is_complete() {
    let Some(hosts) = TwoHosts::new() else { return };
    let plan = hosts.moved(&["--post-copy", "--dry-run"]);
    assert!(
        plan["disks"][0]["path"].as_str().unwrap().ends_with("/web1.qcow2"),
        "{plan}"
    );
    assert!(plan["notes"][0].as_str().unwrap().contains("needs this host"), "{plan}");
    let boot = hosts.console.last().unwrap().boot;
    let report = hosts.moved(&POST_COPY);
    assert_eq!(report["pulled_disks"][0]["disk"], "vda", "{report}");
    assert!(
        report["pulled_disks"][0]["read_bytes"].as_u64().unwrap() >= 16 << 20,
        "{report}"
    );
    assert_eq!(report["disks"], Value::Array(Vec::new()));
    let last_phase = report["phases"].as_array().unwrap().last().unwrap();
    assert_eq!(last_phase["phase"], "pull", "{report}");
    assert_eq!(hosts.console.wait_for_more(20).boot, boot, "the guest has booted again");
    assert_complete(&hosts);
}
