//! A restore, its server or its machine is killed while the images are filled: writes of the guest are kept.

use std::path::Path;
use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom};
use holdfast_host::{DiskSource, ExecutionState, Hypervisor as _, LiveDisks as _};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::instant::{NAME, kill_servers, servers};
use super::{World, at};
use crate::rig::assert_runs;

#[test]
fn writes_of_the_guest_survive_the_death_of_restore_and_server() {
    let mut world = World::new();
    world.back_up();
    let folder = world.begun();
    world.restored_writes(0, 77, 65_536, 4096);
    world.restored_writes(1, 78, 3 << 20, 65_536);
    kill_servers(&folder);
    let findings = world.doctor(3, &[])["findings"].clone();
    assert_eq!(findings[0]["kind"], "instant-restore", "{findings:#}");
    let advice = findings[0]["advice"].as_str().unwrap_or_default();
    assert!(advice.contains("holdfast resume web1-restored"), "{findings:#}");
    assert_eq!(world.doctor(3, &["--fix"])["findings"], findings);
    let id = world.rig.report(&["list"])["snapshots"][0]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let (_, text) = world.rig.error(1, &["forget", &id]);
    assert!(text.contains("is protected"), "{text}");
    assert_eq!(world.resume()["machines"][0]["machine"], NAME);
    world.assert_is_whole();
    world.rig.ok(&["forget", &id]);
}

/// If writes of the guest are missing, the machine must not be filled from the snapshot again.
#[test]
fn a_restore_is_not_resumed_without_the_writes_of_the_guest() {
    let mut world = World::new();
    world.back_up();
    let folder = world.begun();
    world.restored_writes(0, 80, 65_536, 4096);
    world.lab.virsh(&["destroy", NAME]);
    kill_servers(&folder);
    let (written, away) = (folder.join("written"), world.rig.path("written-away"));
    std::fs::rename(&written, &away).unwrap();
    let (_, text) = world.rig.error(1, &at(&world.lab.uri(), &["resume", NAME]));
    assert!(text.contains("server"), "{text}");
    assert!(servers(&folder).is_empty());
    std::fs::remove_dir_all(&written).ok();
    std::fs::rename(&away, &written).unwrap();
    world.resume();
    world.assert_is_whole();
}

/// The firmware reads a disk whose server is dead, and gets no error: the machine is paused, and repeats the request
/// when it is resumed.
#[test]
fn a_machine_is_paused_when_its_server_dies_and_can_be_resumed() {
    let world = World::new();
    world.back_up();
    let mut attempts = 0..5;
    // The boot disk may already be on its image.
    while attempts.next().is_some() {
        let folder = world.begun();
        kill_servers(&folder);
        let disks = world.restored().describe().unwrap().disks;
        if matches!(disks[0].source, DiskSource::Other(_)) {
            break;
        }
        world.resume();
        world.start_check_and_remove();
    }
    let libvirt = world.lab.connect();
    let start = world.lab.clock.now();
    // On a busy host, the firmware needs time until it reads its disk.
    let (mut reset_after, mut patience) = (Duration::ZERO, Duration::from_secs(20));
    loop {
        let waited = world.lab.clock.now().saturating_sub(start);
        match libvirt.execution_state(NAME).unwrap() {
            ExecutionState::StoppedByDisk => break,
            // After a reset, the firmware reads its disk again.
            ExecutionState::Running if waited >= reset_after => {
                world.lab.virsh(&["reset", NAME]);
                patience *= 2;
                reset_after = waited + patience;
            }
            // The machine was paused at the reset, and the reason of the pause is lost.
            ExecutionState::Paused => drop(world.lab.virsh(&["resume", NAME])),
            ExecutionState::Running | ExecutionState::ShutOff => {}
        }
        assert!(waited < Duration::from_secs(300), "the machine does not read its disk");
        world.lab.clock.sleep(Duration::from_millis(20));
    }
    world.resume();
    world.assert_is_whole();
}

/// A restore whose server dies starts a new one.
#[test]
fn a_dead_server_is_restarted() {
    let world = World::new();
    world.back_up();
    let folder = world.lab.path(&format!(".{NAME}.holdfast"));
    let words = ["restore", "web1", "--to-machine", "--live"];
    let child = world.rig.command(&at(&world.lab.uri(), &words)).spawn().unwrap();
    let libvirt = world.lab.connect();
    while libvirt.execution_state(NAME).ok() != Some(ExecutionState::Running) {
        world.lab.clock.sleep(Duration::from_millis(2));
    }
    for server in servers(&folder) {
        kill_process(server, Signal::KILL).unwrap();
    }
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{message}");
    world.assert_is_whole();
}

/// Kills a restore whose server has started; whether its machine was not defined yet. Otherwise, removes the machine.
fn kill_before_definition(world: &World, folder: &Path) -> bool {
    let words = ["restore", "web1", "--to-machine", "--live"];
    let mut child = world.rig.command(&at(&world.lab.uri(), &words)).spawn().unwrap();
    while servers(folder).is_empty() {
        assert_runs(&mut child);
        world.lab.clock.sleep(Duration::from_millis(1));
    }
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    child.wait().unwrap();
    if world.lab.connect().machine(NAME).is_err() {
        return true;
    }
    // Its images may be filled already; then there is nothing to resume.
    world.rig.run(&at(&world.lab.uri(), &["resume", NAME]));
    world.start_check_and_remove();
    false
}

/// The doctor removes the files of a machine that was never defined, and nothing else.
#[test]
fn a_restore_killed_before_its_machine_is_defined_is_cleaned_up() {
    let world = World::new();
    world.back_up();
    let folder = world.lab.path(&format!(".{NAME}.holdfast"));
    let turn = World::other_doctors_wait();
    let was_early = (0..20).any(|_| kill_before_definition(&world, &folder));
    assert!(was_early, "the machine was always defined before the kill");
    assert!(!folder.join("begun").exists() && world.files().contains(&"web1-restored-a".to_owned()));
    let findings = world.doctor(3, &[])["findings"].clone();
    assert_eq!(findings[0]["kind"], "instant-restore", "{findings:#}");
    // The server may be starting and write to the folder, so only this field is compared.
    assert_eq!(world.doctor(3, &[])["findings"][0]["what"], findings[0]["what"]);
    world.repair_alone(turn);
    assert_eq!(world.doctor(0, &[])["findings"], json!([]));
    assert!(servers(&folder).is_empty() && !folder.exists());
    assert_eq!(world.files(), ["domain.xml", "web1-a", "web1-b"]);
    world.rig.ok(&[
        "restore",
        "web1",
        "--to-machine",
        "--live",
        "--connect",
        &world.lab.uri(),
    ]);
    world.assert_is_whole();
}

/// Restore and server are killed at random moments: the doctor cleans up, or `resume` continues, and then the machine
/// is complete.
#[test]
fn a_restore_killed_at_any_moment_can_be_resumed_or_leaves_nothing() {
    let mut world = World::new();
    let mut random = SeededRandom::new(11);
    world.write(0, 7, 1 << 20, 65_536);
    world.back_up();
    let folder = world.lab.path(&format!(".{NAME}.holdfast"));
    // The first run is slower.
    let mut whole_ms = u64::MAX;
    for _ in 0..2 {
        whole_ms = whole_ms.min(world.restore(&["--live"])["duration_ms"].as_u64().unwrap());
        world.start_check_and_remove();
    }
    for round in 0..8 {
        let words = ["restore", "web1", "--to-machine", "--live"];
        let mut child = world.rig.command(&at(&world.lab.uri(), &words)).spawn().unwrap();
        let piece_ms = whole_ms / 8 + 1;
        let after_ms = piece_ms * round + random.below(piece_ms);
        world.lab.clock.sleep(Duration::from_millis(after_ms));
        kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
        child.wait().unwrap();
        if round % 2 == 0 {
            for server in servers(&folder) {
                kill_process(server, Signal::KILL).ok();
            }
        }
        world.doctor_answers(&["--fix"]);
        if world
            .lab
            .virsh(&["list", "--all", "--name"])
            .lines()
            .any(|name| name == NAME)
        {
            world.rig.report(&at(&world.lab.uri(), &["resume"]));
            world.start_check_and_remove();
        } else {
            assert!(servers(&folder).is_empty() && !folder.exists(), "after {after_ms} ms");
            // The next restore to the same names deletes partial files.
            let is_complete = |name: &String| !name.ends_with(".partial") && !name.contains(".holdfast.");
            let files = world.files().into_iter().filter(is_complete);
            let files: Vec<String> = files.collect();
            assert_eq!(files, ["domain.xml", "web1-a", "web1-b"], "after {after_ms} ms");
        }
    }
}

/// The situation after a power failure of the host.
#[test]
fn a_restore_resumes_after_machine_and_server_were_killed() {
    let mut world = World::new();
    world.back_up();
    let folder = world.begun();
    world.restored_writes(0, 79, 0, 8192);
    kill_servers(&folder);
    world.lab.virsh(&["destroy", NAME]);
    let planned = world.rig.report(&at(&world.lab.uri(), &["resume", "--dry-run"]));
    assert_eq!(
        (&planned["dry_run"], &planned["planned"][0]["machine"]),
        (&true.into(), &NAME.into()),
        "{planned}"
    );
    assert!(servers(&folder).is_empty(), "a dry run starts no server");
    assert_eq!(world.lab.virsh(&["domstate", NAME]).trim(), "shut off");
    world.resume();
    world.assert_is_whole();
}
