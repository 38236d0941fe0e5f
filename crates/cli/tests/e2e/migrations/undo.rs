//! `migrate --undo`.

use std::time::Duration;

use holdfast_block::Clock as _;
use holdfast_test_kit::run;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::TwoHosts;
use crate::rig::document_of;

/// The other host migrates the machine back over the connection of this one, which it could not reach by itself.
#[test]
fn a_move_is_undone_from_this_host() {
    let Some(hosts) = TwoHosts::new() else { return };
    let boot = hosts.console.last().unwrap().boot;
    let words = hosts.words(&["--undo"]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (kind, text) = hosts.rig.error(1, &words);
    assert!(
        kind == "refused" && text.contains("web1 is running here"),
        "{kind}: {text}"
    );
    // What is sent depends on the speed of the link, which decides about compression.
    let sent = |report: &Value| report["disks"][0]["uncompressed_bytes"].as_u64().unwrap();
    let first = hosts.moved(&["--max-frozen", "20s"]);
    assert_eq!(first["source"], Value::Null, "{first}");
    let plan = hosts.moved(&["--undo", "--dry-run"]);
    assert_eq!(plan["disks"][0]["seed"], hosts.image.to_str().unwrap(), "{plan}");
    // The other host shows what it does as it is asked to here.
    let back = hosts.migrate(&[
        "--max-frozen",
        "20s",
        "--undo",
        "--delete-former",
        "--progress",
        "json",
        "--json",
    ]);
    let events = String::from_utf8(back.stderr).unwrap();
    assert!(
        events.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()),
        "{events}"
    );
    assert!(events.contains("sending the memory"), "{events}");
    let back = document_of(&String::from_utf8(back.stdout).unwrap())["report"].clone();
    assert_eq!(hosts.states(), ["running", "shut off"]);
    assert_eq!(back["source"], hosts.destination(), "{back}");
    assert_eq!(back["destination"], Value::Null, "{back}");
    assert!(sent(&back) * 2 < sent(&first), "{first} {back}");
    // The disk is in the folder in which it was, and the former one is deleted.
    let disk = hosts.image.with_extension("raw");
    assert_eq!(back["disks"][0]["path"], disk.to_str().unwrap(), "{back}");
    assert!(disk.exists() && !hosts.image.exists());
    let later = hosts.console.wait_for_more(50);
    assert_eq!(later.boot, boot, "the guest has booted again");
    hosts.console.assert_no_mismatch();
    hosts.assert_no_sockets();
}

/// The program here is interrupted, or killed: the other host notices it.
#[test]
fn an_undo_that_is_ended_leaves_the_machine_on_one_host() {
    let Some(hosts) = TwoHosts::new() else { return };
    hosts.moved(&["--max-frozen", "20s"]);
    let words = hosts.words(&["--accept-incomplete-memory", "--max-frozen", "20s", "--undo"]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    for (delay_ms, signal) in [
        (700, Signal::INT),
        (1200, Signal::KILL),
        (2000, Signal::KILL),
        (2600, Signal::TERM),
    ] {
        let mut ended = hosts.rig.command(&words).spawn().unwrap();
        hosts.here.clock.sleep(Duration::from_millis(delay_ms));
        kill_process(Pid::from_child(&ended), signal).unwrap();
        ended.wait().unwrap();
        hosts.wait_for_one_owner();
        hosts.console.wait_for_more(20);
        if hosts.states()[0] == "running" {
            break;
        }
    }
    if hosts.states()[1] == "running" {
        hosts.moved(&["--max-frozen", "20s", "--undo"]);
    }
    assert_eq!(hosts.states(), ["running", "shut off"]);
    hosts.console.wait_for_more(50);
    hosts.console.assert_no_mismatch();
}

#[test]
fn a_machine_that_is_shut_off_is_brought_back() {
    let Some(hosts) = TwoHosts::new() else { return };
    hosts.here.virsh(&["destroy", "web1"]);
    hosts.moved(&[]);
    assert_eq!(hosts.states(), ["shut off", "shut off"]);
    // What the machine does there comes back.
    let there = hosts.there.path("images/web1.raw");
    let write = ["-f", "raw", "-c", "write -P 90 40M 64k", there.to_str().unwrap()];
    run("qemu-io", &write);
    let back = hosts.moved(&["--undo"]);
    assert_eq!(back["state"], "shut-off", "{back}");
    assert_eq!(hosts.states(), ["shut off", "shut off"]);
    let disk = hosts.image.with_extension("raw");
    let compare = [
        "compare",
        "-f",
        "raw",
        "-F",
        "raw",
        there.to_str().unwrap(),
        disk.to_str().unwrap(),
    ];
    run("qemu-img", &compare);
    assert!(hosts.here.virsh(&["dumpxml", "web1"]).contains(disk.to_str().unwrap()));
    // The former disk is kept.
    assert!(hosts.image.exists());
    hosts.assert_no_sockets();
}
