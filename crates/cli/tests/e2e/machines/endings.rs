//! Machines that end during their backup. The message is compared with the real cause: a crash is reported as a crash,
//! and no machine that is off is reported as running.

use std::time::Duration;

use holdfast_block::Clock as _;
use holdfast_host::qmp::QmpCommand;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::bare::Bare;
use super::{World, at};

/// Texts that are wrong for a machine that has ended.
const WRONG_TEXTS: [&str; 3] = ["runs", "stays in QEMU", "next backup tries again"];

/// How a machine ends, and the expected message.
const ENDINGS: [(&str, &str); 2] = [("destroy", "was switched off"), ("crash", "has crashed")];

impl World {
    fn qemu_process(&self) -> Pid {
        let file = self.lab.path("libvirt/run/qemu/web1.pid");
        let number = std::fs::read_to_string(file).unwrap();
        Pid::from_raw(number.trim().parse().unwrap()).unwrap()
    }

    fn end(&self, how: &str) {
        match how {
            "destroy" => drop(self.lab.virsh(&["destroy", "web1"])),
            _ => kill_process(self.qemu_process(), Signal::ABORT).unwrap(),
        }
    }

    fn has_exports(&self) -> bool {
        let exports = self
            .machine()
            .monitor()
            .execute(&QmpCommand::new("query-block-exports", Value::Null));
        exports.is_ok_and(|exports| exports.as_array().is_some_and(|exports| exports.len() == 2))
    }
}

fn assert_message(text: &str, expected: &str, what: &str) {
    assert!(text.contains(expected), "{what}: {text}");
    for wrong in WRONG_TEXTS {
        assert!(!text.contains(wrong), "{what}: {wrong}: {text}");
    }
}

#[test]
fn a_machine_that_ends_while_it_is_read_is_reported() {
    for (how, expected) in ENDINGS {
        let world = World::new();
        let uri = world.lab.uri();
        let child = world
            .rig
            .command(&at(&uri, &["backup", "web1", "--bwlimit", "2M"]))
            .spawn()
            .unwrap();
        while !world.has_exports() {
            world.lab.clock.sleep(Duration::from_millis(20));
        }
        world.end(how);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert_message(&crate::program::stderr(&output), expected, how);
        world.doctor(0, &[]);
        // It is now read from its images.
        assert_eq!(world.back_up()["method"], "images");
    }
}

/// The machine ends at the point in time itself, when a hook is called.
#[test]
fn a_machine_that_ends_at_the_point_in_time_is_reported() {
    for (how, expected) in ENDINGS {
        let world = World::new();
        let uri = world.lab.uri();
        let process = world.qemu_process().as_raw_nonzero();
        let end = match how {
            "destroy" => format!("virsh -q -c '{uri}' destroy web1"),
            _ => format!("kill -ABRT {process}"),
        };
        let script = format!("#!/bin/sh\n[ \"$1\" = pre-freeze ] && {end}\nexit 0\n");
        let hook = world.rig.write_program("hook", &script);
        let words = ["backup", "web1", "--hook", hook.to_str().unwrap()];
        let output = world.rig.code(1, &at(&uri, &words));
        assert_message(&crate::program::stderr(&output), expected, how);
        world.doctor(0, &[]);
    }
}

#[test]
fn a_killed_bare_qemu_is_reported() {
    let bare = Bare::new(&[]);
    let words = ["backup", &bare.source, "--bwlimit", "2M"];
    let child = bare.rig.command(&words).spawn().unwrap();
    let is_read = || {
        bare.lab
            .execute("query-block-exports", Value::Null)
            .as_array()
            .unwrap()
            .len()
            == 2
    };
    while !is_read() {
        bare.lab.clock.sleep(Duration::from_millis(20));
    }
    kill_process(bare.lab.process_id(), Signal::KILL).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_message(&crate::program::stderr(&output), "its QEMU exited", "killed");
}
