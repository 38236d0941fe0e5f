//! Creations of containers that are killed.

use std::io::Write as _;
use std::process::Stdio;

use holdfast_test_kit::libvirt::LibvirtLab;
use rustix::process::{Pid, Signal, kill_process};

use super::containers::is_root;
use super::mounts::wait_for;
use crate::rig::Rig;

/// The server of the disk does not end with the process that fills the new container.
#[test]
fn the_disk_of_a_creation_that_was_killed_is_unmounted_by_doctor() {
    if !is_root() {
        return;
    }
    let rig = Rig::new();
    let lab = LibvirtLab::new();
    lab.connect();
    let create = ["container", "create", "web1", "32M"];
    let words = [&create[..], &["--from", "-"]].concat();
    let mut creation = rig.command(&words).stdin(Stdio::piped()).spawn().unwrap();
    // It waits for the rest of the archive.
    let mut input = creation.stdin.take().unwrap();
    input.write_all(&[0; 100]).unwrap();
    let has_file_system = || {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        let is_ext4 = |name: &String| {
            mounts
                .lines()
                .any(|line| line.contains(name) && line.contains(" ext4 "))
        };
        rig.runtime_names().iter().any(is_ext4)
    };
    wait_for("the new file system is mounted", has_file_system);
    kill_process(Pid::from_child(&creation), Signal::KILL).unwrap();
    creation.wait().unwrap();
    let (kind, text) = rig.error(4, &create);
    assert!(kind == "locked" && text.contains("holdfast doctor --fix"), "{text}");
    rig.run(&["doctor", "--connect", &lab.uri(), "--fix"]);
    assert_eq!(rig.runtime_names(), [""; 0]);
    assert!(!rig.path(".web1.holdfast-new").exists());
    rig.ok(&create);
}
