//! After any death, `doctor --fix` once and the next backup succeed, and nothing of ours is left.

use std::process::Child;
use std::time::Duration;

use holdfast_block::Clock as _;
use holdfast_host::qmp::QmpCommand;
use serde_json::Value;

use super::doctors::{found, kill_with_watchdog};
use super::{World, at};

impl World {
    /// The labels of files that were handed to the machine's QEMU.
    fn files_in_qemu(&self) -> Vec<String> {
        let machine = self.machine();
        let sets = machine.monitor().execute(&QmpCommand::new("query-fdsets", Value::Null));
        let labels = |set: &Value| Some(set["fds"][0]["opaque"].as_str()?.to_owned());
        sets.unwrap().as_array().unwrap().iter().filter_map(labels).collect()
    }

    fn status(&self) -> String {
        let machine = self.machine();
        let status = machine.monitor().execute(&QmpCommand::new("query-status", Value::Null));
        status.unwrap()["status"].as_str().unwrap().to_owned()
    }

    fn begin(&self, words: &[&str]) -> Child {
        self.rig.command(&at(&self.lab.uri(), words)).spawn().unwrap()
    }

    /// Waits until `is_so`, with patience.
    fn wait_until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let start = self.lab.clock.now();
        while !is_so() {
            let waited = self.lab.clock.now().saturating_sub(start);
            assert!(waited < Duration::from_secs(60), "{what}");
            self.lab.clock.sleep(Duration::from_millis(5));
        }
    }
}

/// QEMU closes files only while the machine runs, and the state of a paused machine stays that of one that has sent its memory.
#[test]
fn a_paused_machine_is_backed_up_with_its_memory_and_nothing_of_it_is_in_the_way() {
    let mut world = World::new();
    let uri = world.lab.uri();
    world.lab.virsh(&["suspend", "web1"]);
    world.rig.ok(&at(&uri, &["backup", "web1", "--with-memory"]));
    assert!(world.journal().is_empty(), "{:#?}", world.journal());
    assert_eq!(found(&world.doctor(0, &["--fix"])), [""; 0]);
    // QEMU does not send it again, which is said before anything is done.
    let (_, said) = world.rig.error(1, &at(&uri, &["backup", "web1", "--with-memory"]));
    assert!(said.contains("let the machine run and pause it again"), "{said}");
    world.back_up();
    assert_eq!(found(&world.doctor(0, &[])), [""; 0]);
    world.lab.virsh(&["resume", "web1"]);
    world.write(0, 61, 0, 65_536);
    world.doctor(0, &["--fix"]);
    assert_eq!(world.files_in_qemu(), [""; 0]);
    world.back_up();
    world.assert_snapshot_is_right("after it ran on");
    world.rig.ok(&at(&uri, &["backup", "web1", "--with-memory"]));
    world.assert_runs_and_is_clean();
}

/// libvirt dies in the second in which the machine stands still for its memory.
#[test]
fn libvirt_dies_while_a_machine_stands_still_for_its_memory() {
    let mut world = World::new();
    world.back_up();
    for kills_backup in [false, true] {
        let mut child = world.begin(&["backup", "web1", "--with-memory=stopped"]);
        world.wait_until("it sends its memory", || {
            assert!(child.try_wait().unwrap().is_none(), "it ended before");
            world.journal().iter().any(|note| note["phase"] == "freezing")
                && ["finish-migrate", "postmigrate"].contains(&&world.status()[..])
        });
        world.lab.kill_daemon();
        if kills_backup {
            kill_with_watchdog(&mut child);
        }
        world.lab.clock.sleep(Duration::from_millis(500));
        world.lab.start_daemon();
        world.lab.connect();
        child.wait().unwrap();
        world.doctor(0, &["--fix"]);
        assert_eq!(found(&world.doctor(0, &[])), [""; 0]);
        world.wait_until("it runs on", || world.status() == "running");
        assert_eq!((world.files_in_qemu(), world.journal()), (vec![], vec![]));
        world.write(0, 62, 0, 65_536);
        world.back_up();
        world.assert_snapshot_is_right("after libvirt died");
        world.assert_runs_and_is_clean();
    }
}
