//! After the death of any process, one `doctor --fix` and the next backup succeed, and nothing is left.

use std::process::Child;
use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom};
use holdfast_host::processes_named;
use holdfast_host::qmp::QmpCommand;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::doctors::{found, kill_with_watchdog};
use super::{World, at};
use crate::rig::assert_runs;

impl World {
    /// The labels of files that were passed to the machine's QEMU.
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

    /// Waits until `is_so`, with a timeout.
    fn wait_until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let start = self.lab.clock.now();
        while !is_so() {
            let waited = self.lab.clock.now().saturating_sub(start);
            assert!(waited < Duration::from_secs(60), "{what}");
            self.lab.clock.sleep(Duration::from_millis(5));
        }
    }
}

fn names_in(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.collect()
}

/// QEMU closes files only while the machine is running, and a paused machine whose memory was sent keeps that migration
/// state.
#[test]
fn a_backup_of_a_paused_machine_with_memory_leaves_nothing_behind() {
    let mut world = World::new();
    let uri = world.lab.uri();
    world.lab.virsh(&["suspend", "web1"]);
    world.rig.ok(&at(&uri, &["backup", "web1", "--with-memory"]));
    assert!(world.journal().is_empty(), "{:#?}", world.journal());
    assert_eq!(found(&world.doctor(0, &["--fix"])), [""; 0]);
    // QEMU does not send the memory again: the backup is refused before it starts.
    let (_, text) = world.rig.error(1, &at(&uri, &["backup", "web1", "--with-memory"]));
    assert!(text.contains("let the machine run and pause it again"), "{text}");
    world.back_up();
    assert_eq!(found(&world.doctor(0, &[])), [""; 0]);
    world.lab.virsh(&["resume", "web1"]);
    world.write(0, 61, 0, 65_536);
    world.doctor(0, &["--fix"]);
    assert_eq!(world.files_in_qemu(), [""; 0]);
    world.back_up();
    world.assert_snapshot_is_right("after it was resumed");
    world.rig.ok(&at(&uri, &["backup", "web1", "--with-memory"]));
    world.assert_runs_and_is_clean();
}

/// libvirtd is killed while the machine is paused for its memory.
#[test]
fn a_crash_of_libvirtd_during_a_pause_leaves_nothing() {
    let mut world = World::new();
    world.back_up();
    for kills_backup in [false, true] {
        let mut child = world.begin(&["backup", "web1", "--with-memory=stopped"]);
        world.wait_until("it sends its memory", || {
            assert_runs(&mut child);
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
        world.wait_until("it runs again", || world.status() == "running");
        assert_eq!((world.files_in_qemu(), world.journal()), (vec![], vec![]));
        world.write(0, 62, 0, 65_536);
        world.back_up();
        world.assert_snapshot_is_right("after libvirt died");
        world.assert_runs_and_is_clean();
    }
}

/// Kills the servers of instant restores whose folders are below `place`.
fn kill_servers(place: &str) {
    for process in processes_named("holdfast").unwrap_or_default() {
        let is_server = process.arguments.iter().any(|word| word == "live-server");
        if is_server && process.arguments.iter().any(|word| word.starts_with(place)) {
            let id = Pid::from_raw(i32::try_from(process.pid).unwrap()).unwrap();
            kill_process(id, Signal::KILL).ok();
        }
    }
}

/// The host is reset during an instant restore in a folder without images of machines.
#[test]
fn an_instant_restore_killed_with_its_server_leaves_nothing_in_any_folder() {
    const NAME: &str = "web1-restored";
    let world = World::new();
    world.back_up();
    let uri = world.lab.uri();
    std::fs::create_dir(world.lab.path("elsewhere")).unwrap();
    std::fs::create_dir_all(world.rig.path("state/holdfast/places")).unwrap();
    let place = world.lab.path("elsewhere").canonicalize().unwrap();
    let place = place.to_str().unwrap();
    let mut random = SeededRandom::new(5);
    let (mut left_count, mut whole_us) = (0, 400_000);
    for round in 0..16 {
        let mut child = world.begin(&["restore", "web1", "--to-machine", "--live", "--storage", place]);
        let start = world.lab.clock.now();
        if round % 2 == 0 {
            world.lab.clock.sleep(Duration::from_micros(random.below(whole_us)));
        } else {
            world.wait_until("something is there", || {
                !names_in(place).is_empty() || child.try_wait().unwrap().is_some()
            });
            world.lab.clock.sleep(Duration::from_micros(random.below(20_000)));
        }
        kill_process(Pid::from_child(&child), Signal::KILL).ok();
        let is_done = child.wait().unwrap().code() == Some(0);
        kill_servers(place);
        if is_done {
            whole_us = u64::try_from(world.lab.clock.now().saturating_sub(start).as_micros()).unwrap();
        }
        let is_known = world.lab.virsh(&["list", "--all", "--name"]).contains(NAME);
        if is_known {
            // The restore was complete, or its images are still being filled.
            if !is_done {
                world.rig.run(&at(&uri, &["resume", NAME]));
            }
            let state = world.lab.virsh(&["domstate", NAME]);
            if !state.contains("shut off") {
                world.lab.virsh(&["destroy", NAME]);
            }
            world.lab.virsh(&["undefine", NAME]);
            std::fs::remove_dir_all(place).unwrap();
            std::fs::create_dir(place).unwrap();
        } else {
            left_count += usize::from(!names_in(place).is_empty());
        }
        world.doctor(0, &["--fix"]);
        assert_eq!(names_in(place), [""; 0], "round {round}");
        assert_eq!(found(&world.doctor(0, &[])), [""; 0], "round {round}");
        assert_eq!(world.rig.names("state/holdfast/places"), [""; 0], "round {round}");
        let listed = world.rig.report(&["list"]);
        assert_eq!(
            listed["snapshots"][0]["is_protected"], false,
            "round {round}: {listed:#}"
        );
    }
    assert!(left_count > 2, "{left_count} of the kills left something");
}

/// Also outside of the folders of machines.
#[test]
fn a_partial_file_in_any_folder_is_found() {
    let world = World::new();
    world.back_up();
    for words in [
        &["restore", "web1:vda", "elsewhere/vda.qcow2"][..],
        &["export", "web1", "elsewhere/web1.xva"],
        &["image", "convert", "elsewhere/source.raw", "elsewhere/target.qcow2"],
    ] {
        std::fs::create_dir_all(world.rig.path("elsewhere")).unwrap();
        let source = std::fs::File::create(world.rig.path("elsewhere/source.raw")).unwrap();
        source.set_len(1 << 30).unwrap();
        let mut child = world.rig.command(words).spawn().unwrap();
        let is_half = |name: &String| name.ends_with(".partial");
        world.wait_until("half of it is there", || {
            world.rig.names("elsewhere").iter().any(is_half) || child.try_wait().unwrap().is_some()
        });
        kill_process(Pid::from_child(&child), Signal::KILL).ok();
        let is_done = child.wait().unwrap().code() == Some(0);
        let half: Vec<String> = world.rig.names("elsewhere").into_iter().filter(is_half).collect();
        assert_eq!(is_done, half.is_empty(), "{words:?}: {half:?}");
        if !is_done {
            let report = world.doctor(0, &["--fix"]);
            assert!(found(&report).contains(&"leftover"), "{report:#}");
        }
        assert!(!world.rig.names("elsewhere").iter().any(is_half), "{words:?}");
        assert_eq!(found(&world.doctor(0, &[])), [""; 0]);
        std::fs::remove_dir_all(world.rig.path("elsewhere")).unwrap();
    }
}
