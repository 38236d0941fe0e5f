//! Other methods to read a running machine: their snapshots are correct, and the machine is unchanged afterwards.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom};
use holdfast_host::{DiskSource, MachineState};
use rustix::process::{Pid, Signal, kill_process};

use super::{World, at};
use crate::host::{loop_device, system, text};
use crate::rig::assert_runs;
use holdfast_test_kit::libvirt::LibvirtLab;

impl World {
    /// Asserts that the machine uses its own images, and that there are no other files.
    fn assert_is_as_before(&self) {
        self.assert_runs_and_is_clean();
        let sources = self.machine().describe().unwrap().disks;
        let sources = sources.into_iter().filter_map(|disk| match disk.source {
            DiskSource::File(path) => Some(path),
            _ => None,
        });
        let images = ["web1-a", "web1-b"].map(|name| self.lab.path(name));
        assert_eq!(sources.collect::<Vec<_>>(), images);
        assert_eq!(self.images(), images);
    }

    fn images(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.lab.folder.path()).unwrap().flatten();
        let mut images: Vec<_> = entries.map(|entry| entry.path()).collect();
        images.retain(|path| path.file_name().unwrap().to_string_lossy().contains("web1"));
        images.sort();
        images
    }
}

#[test]
fn a_machine_is_backed_up_by_overlays() {
    let mut world = World::new();
    world.write(0, 7, 65_536, 65_536);
    let report = world.back_up_by("overlay");
    assert!(report["paused_us"].as_u64().unwrap() > 0);
    world.assert_is_as_before();
    world.assert_snapshot_is_right("overlay");
    // A later snapshot has the later writes, by any method.
    world.write(1, 8, 1 << 20, 4096);
    assert_eq!(world.back_up()["method"], "filter");
    world.assert_snapshot_is_right("filter after overlay");
    // Without one of the disks.
    let uri = world.lab.uri();
    world
        .rig
        .ok(&at(&uri, &["backup", "web1", "--method=overlay", "--exclude", "vdb"]));
    world.assert_is_as_before();
}

#[test]
fn a_machine_is_backed_up_during_a_pause() {
    let mut world = World::new();
    world.write(0, 7, 65_536, 65_536);
    let report = world.back_up_by("pause");
    assert!(report["paused_us"].as_u64().unwrap() > 0);
    world.assert_is_as_before();
    world.assert_snapshot_is_right("pause");
    // A machine that its owner has paused stays paused.
    world.lab.virsh(&["suspend", "web1"]);
    assert!(world.back_up_by("pause")["paused_us"].is_null());
    let state = world.machine().describe().unwrap().summary.state;
    assert_eq!(state, MachineState::Paused);
    let (_, message) = world
        .rig
        .error(1, &at(&world.lab.uri(), &["backup", "web1", "--method=overlay"]));
    assert!(message.contains("only while the machine runs"), "{message}");
}

/// The disks are then not of one point in time.
#[test]
fn a_machine_resumed_by_another_program_during_the_pause_is_an_error() {
    let world = World::new();
    let words = ["backup", "web1", "--method=pause", "--bwlimit=3M"];
    let child = world.rig.command(&at(&world.lab.uri(), &words)).spawn().unwrap();
    while world.lab.virsh(&["domstate", "web1"]).trim() != "paused" {
        world.lab.clock.sleep(Duration::from_millis(5));
    }
    world.lab.virsh(&["resume", "web1"]);
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("it was resumed while it was read"), "{message}");
    assert_eq!(world.rig.snapshot_count(), 0);
    world.assert_is_as_before();
}

#[test]
fn a_machine_is_backed_up_by_reflinks_where_the_file_system_supports_them() {
    let mut mounted = None;
    let lab = LibvirtLab::prepared(|folder| mounted = Some(xfs_at(folder)));
    let mut world = World::of(lab);
    if let Some(Err(reason)) = &mounted {
        println!("no XFS: {reason}");
        let (_, message) = world
            .rig
            .error(1, &at(&world.lab.uri(), &["backup", "web1", "--method=reflink"]));
        assert!(message.contains("cannot clone files"), "{message}");
        return;
    }
    world.write(0, 7, 65_536, 65_536);
    world.back_up_by("reflink");
    world.assert_is_as_before();
    world.assert_snapshot_is_right("reflink");
}

/// A file system with clones of files, on a loop device; an error if that is not possible.
fn xfs_at(folder: &std::path::Path) -> Result<impl Drop + use<>, String> {
    struct Mount(
        PathBuf,
        #[expect(dead_code, reason = "what is mounted")] tempfile::TempDir,
    );
    impl Drop for Mount {
        fn drop(&mut self) {
            system("umount", &["-l", text(&self.0)]).ok();
        }
    }
    let place = tempfile::tempdir().map_err(|error| error.to_string())?;
    let device = loop_device(&place.path().join("xfs"), 400 << 20).ok_or("no loop device")?;
    system("mkfs.xfs", &["-q", "-m", "reflink=1", text(&device.path)])?;
    system("mount", &[text(&device.path), text(folder)])?;
    Ok(Mount(folder.to_owned(), place))
}

#[test]
fn impossible_methods_are_refused_with_a_reason() {
    let world = World::new();
    let uri = world.lab.uri();
    let refused = |words: &[&str]| world.rig.error(1, &at(&uri, &[&["backup", "web1"], words].concat())).1;
    // The folder of temporary files may be on any file system.
    let message = world.rig.run(&at(&uri, &["backup", "web1", "--method=reflink"]));
    if message.status.code() == Some(1) {
        let message = String::from_utf8_lossy(&message.stderr).into_owned();
        assert!(message.contains("cannot clone files"), "{message}");
    }
    for method in ["reflink", "overlay", "pause"] {
        let message = refused(&["--with-memory", "--method", method]);
        assert!(
            message.contains("memory is taken together with the filter only"),
            "{message}"
        );
    }
    world
        .rig
        .error(2, &at(&uri, &["backup", "web1", "--method=pause", "--quiesce=require"]));
    world.assert_is_as_before();
}

/// The doctor detects the overlays of a killed backup, and commits them.
#[test]
fn the_doctor_commits_the_overlays_of_a_killed_backup() {
    let mut world = World::new();
    let uri = world.lab.uri();
    let words = ["backup", "web1", "--method=overlay", "--bwlimit", "1M"];
    let mut child = world.rig.command(&at(&uri, &words)).spawn().unwrap();
    while world.images().len() < 4 {
        assert_runs(&mut child);
        world.lab.clock.sleep(Duration::from_millis(5));
    }
    world.lab.clock.sleep(Duration::from_millis(300));
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    child.wait().unwrap();
    world.write(0, 9, 0, 65_536);
    let (_, message) = world.rig.error(1, &at(&uri, &["backup", "web1", "--method=overlay"]));
    assert!(message.contains("holdfast doctor --fix"), "{message}");
    let findings = world.doctor(3, &[])["findings"].clone();
    let overlays = findings
        .as_array()
        .unwrap()
        .iter()
        .filter(|one| one["kind"] == "overlay");
    assert_eq!(overlays.count(), 2, "{findings:#}");
    world.doctor(0, &["--fix"]);
    world.assert_is_as_before();
    world.back_up();
    world.assert_snapshot_is_right("after the doctor");
}

/// The backup is killed before the overlays exist, while they are read, or while they are committed.
#[test]
fn the_doctor_repairs_an_overlay_backup_killed_at_any_moment() {
    let mut world = World::new();
    let uri = world.lab.uri();
    let mut random = SeededRandom::new(3);
    let start = world.lab.clock.now();
    world.back_up_by("overlay");
    let whole_us = u64::try_from(world.lab.clock.now().saturating_sub(start).as_micros()).unwrap();
    for round in 0..8 {
        world.write(round % 2, 100 + u8::try_from(round).unwrap(), 65_536 * round, 65_536);
        let words = ["backup", "web1", "--method=overlay"];
        let mut child = world.rig.command(&at(&uri, &words)).spawn().unwrap();
        world.lab.clock.sleep(Duration::from_micros(random.below(whole_us)));
        kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
        child.wait().unwrap();
        let dead_since = world.lab.clock.now();
        // The doctor leaves a running watchdog and an ongoing job of libvirt alone.
        loop {
            let fixed = world.doctor_answers(&["--fix"]);
            if fixed.status.code() == Some(0) && world.images().len() == 2 {
                break;
            }
            let waited = world.lab.clock.now().saturating_sub(dead_since);
            let message = String::from_utf8_lossy(&fixed.stdout).into_owned();
            assert!(
                waited < Duration::from_secs(30),
                "round {round}: {:?} {message}",
                world.images()
            );
            world.lab.clock.sleep(Duration::from_millis(100));
        }
        world.assert_is_as_before();
    }
    world.back_up();
    world.assert_snapshot_is_right("after eight kills");
}

/// Ctrl-C ends the reading, and the machine nevertheless gets back its images.
#[test]
fn an_interrupted_backup_commits_its_overlays() {
    let world = World::new();
    let uri = world.lab.uri();
    let words = ["backup", "web1", "--method=overlay", "--bwlimit", "1M"];
    let mut child = world.rig.command(&at(&uri, &words)).spawn().unwrap();
    while world.images().len() < 4 {
        assert_runs(&mut child);
        world.lab.clock.sleep(Duration::from_millis(5));
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert!(!child.wait().unwrap().success());
    world.assert_is_as_before();
}

/// If a machine writes faster than its overlay is committed, the machine is paused for the rest, and no write is lost.
#[test]
fn an_overlay_that_never_converges_is_committed_during_a_pause() {
    let mut world = World::new();
    let uri = world.lab.uri();
    let machine = world.machine();
    let is_over = AtomicBool::new(false);
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            // Large writes: also on a busy host, one takes less than a second.
            for byte in (100..200).cycle() {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                world.lab.guest_writes(machine.monitor(), 0, byte, 0, 4 << 20);
            }
        });
        let output = world.rig.run(&at(
            &uri,
            &["backup", "web1", "--method=overlay", "--bwlimit=4M", "--json"],
        ));
        is_over.store(true, Ordering::Relaxed);
        output
    });
    let message = String::from_utf8_lossy(&report.stdout).into_owned();
    assert_eq!(report.status.code(), Some(3), "{message}");
    assert!(message.contains("was paused for"), "{message}");
    world.assert_is_as_before();
    // Its last write is in the next backup.
    world.write(0, 250, 0, 4 << 20);
    world.back_up();
    world.assert_snapshot_is_right("after the pause");
}
