//! `migrate --connect-command`: the other host is reached by a command instead of ssh.

use super::containers::{Hosts, folder};
use super::two_hosts::{TwoHosts, process_of};
use crate::host::text;
use crate::rig::Rig;
use crate::tls_link::TlsLink;

const PROGRAM: &str = env!("CARGO_BIN_EXE_holdfast");

#[test]
fn a_machine_moves_by_tls_between_hosts_that_know_each_other() {
    let Some(hosts) = TwoHosts::new() else { return };
    let receiver = format!("{PROGRAM} receive-migration 1 --connect '{}'", hosts.there.uri());
    let link = TlsLink::to(&receiver, Some(process_of(&hosts.there)));
    let images = hosts.there.path("images");
    let (uri, images) = (hosts.here.uri(), text(&images).to_owned());
    let words = ["migrate", "web1", &images, "--connect", &uri];
    let words = [&words[..], &["--accept-incomplete-memory", "--max-frozen", "20s"]].concat();
    for wrong in link.wrong_commands() {
        let (_, error) = hosts
            .rig
            .error(1, &[&words[..], &["--connect-command", &wrong]].concat());
        assert!(error.contains("does not answer"), "{error}");
    }
    assert_eq!(hosts.states(), ["running", "absent"]);
    let boot = hosts.console.last().unwrap().boot;
    let command = link.command();
    let report = hosts
        .rig
        .report(&[&words[..], &["--connect-command", &command]].concat());
    assert_eq!(report["destination"], format!("the other host:{images}"), "{report}");
    assert_eq!(hosts.states(), ["shut off", "running"]);
    let later = hosts.console.wait_for_more(100);
    assert_eq!(later.boot, boot, "the guest has booted again");
    hosts.console.assert_no_mismatch();
    hosts.assert_no_sockets();
}

#[test]
fn a_machine_whose_disks_follow_it_moves_by_tls() {
    let Some(hosts) = TwoHosts::new() else { return };
    let receiver = format!("{PROGRAM} receive-migration 1 --connect '{}'", hosts.there.uri());
    let link = TlsLink::to(&receiver, Some(process_of(&hosts.there)));
    let images = hosts.there.path("images");
    let words = ["migrate", "web1", text(&images), "--connect", &hosts.here.uri()];
    let command = link.command();
    let more = [
        "--accept-incomplete-memory",
        "--max-frozen",
        "20s",
        "--post-copy",
        "--connect-command",
    ];
    let report = hosts.rig.report(&[&words[..], &more, &[&command]].concat());
    assert_eq!(report["pulled_disks"][0]["disk"], "vda", "{report}");
    assert_eq!(hosts.states(), ["shut off", "running"]);
    hosts.console.wait_for_more(50);
    hosts.console.assert_no_mismatch();
    hosts.assert_no_sockets();
}

#[test]
fn a_container_moves_by_a_command() {
    let rig = Rig::new();
    let Some(hosts) = Hosts::new(&rig) else { return };
    let (start, stop) = (
        hosts.service("start", &hosts.there),
        hosts.service("stop", &hosts.container.point),
    );
    let point = folder(&hosts.there);
    let receiver = format!("{PROGRAM} receive-migration 1");
    let there = rig.path("there");
    let words = ["migrate", "web1", text(&there), "--connect-command", &receiver];
    let service = [
        "--stop-command",
        &stop,
        "--start-command",
        &start,
        "--mount-on",
        text(&point),
    ];
    let report = rig.report(&[&words[..], &service].concat());
    let address = format!("the other host:{}/web1", there.display());
    assert_eq!(report["destination"], address, "{report}");
    hosts.assert_serves(&hosts.there);
    // It is not brought back by a command, but by ssh.
    let (_, error) = rig.error(2, &[&words[..], &["--undo"]].concat());
    assert!(error.contains("--undo"), "{error}");
}
