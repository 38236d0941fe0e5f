//! Receivers that a command reaches, without ssh.

use super::MIB;
use crate::rig::{Rig, noise};
use crate::tls_link::TlsLink;

const PROGRAM: &str = env!("CARGO_BIN_EXE_holdfast");

#[test]
fn a_command_reaches_the_receiver() {
    let rig = Rig::empty();
    let there = tempfile::tempdir().unwrap();
    let folder = there.path().display();
    rig.write("disk.raw", &noise(3 * MIB, 60));
    let target = format!("{folder}/web1.raw");
    let command = format!("{PROGRAM} receive-disk 1 --below {folder}");
    let copy = |command: &str| rig.run(&["live-copy", "disk.raw", &target, "--connect-command", command]);
    // The link breaks in the middle.
    let cut = format!("dd bs=1024 count=1024 status=none | {command}");
    let output = rig.run(&[
        "live-copy",
        "disk.raw",
        &target,
        "--retry-for",
        "0s",
        "--connect-command",
        &cut,
    ]);
    assert!(!output.status.success(), "{output:?}");
    assert!(copy(&command).status.success());
    assert!(std::fs::read(&target).unwrap() == noise(3 * MIB, 60));
    let outside = ["live-copy", "disk.raw", "/srv/web1.raw", "--connect-command", &command];
    let (_, text) = rig.error(1, &outside);
    assert!(text.contains("is not below"), "{text}");
    // A command that fails is not repeated for ten minutes.
    let absent = [
        "live-copy",
        "disk.raw",
        "/srv/a",
        "--connect-command",
        "echo no route >&2; exit 3",
    ];
    let (_, text) = rig.error(1, &absent);
    assert!(text.contains("no route"), "{text}");
}

#[test]
fn a_disk_is_copied_by_tls_between_hosts_that_know_each_other() {
    let rig = Rig::empty();
    let there = tempfile::tempdir().unwrap();
    let copies = there.path();
    let link = TlsLink::to(&format!("{PROGRAM} receive-disk 1 --below {}", copies.display()), None);
    rig.write("disk.raw", &noise(3 * MIB, 61));
    let target = copies.join("web1.raw");
    let copy = |command: &str| {
        let target = target.to_str().unwrap();
        rig.run(&["live-copy", "disk.raw", target, "--connect-command", command])
    };
    for wrong in link.wrong_commands() {
        let output = copy(&wrong);
        assert!(!output.status.success(), "{output:?}");
        assert_eq!(std::fs::read_dir(copies).unwrap().count(), 0);
    }
    let output = copy(&link.command());
    assert!(output.status.success(), "{output:?}");
    assert!(std::fs::read(&target).unwrap() == noise(3 * MIB, 61));
}
