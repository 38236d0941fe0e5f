//! Backups of machines from host snapshots, on real file systems.

use std::time::Duration;

use holdfast_block::Clock as _;
use rustix::process::{Pid, Signal, kill_process};

use super::at;
use super::host_snapshots::{MachineSetup, machine_on};
use crate::rig::assert_runs;

impl MachineSetup {
    fn back_up(&self) -> serde_json::Value {
        let words = ["backup", "web1", "--method", "snapshot"];
        self.world.rig.report(&at(&self.world.lab.uri(), &words))["machines"][0].clone()
    }

    /// Asserts that every disk was compared with the previous snapshot, and how much changed.
    fn assert_incremental(&self, done: &serde_json::Value, dirty_bytes_max: u64) {
        for disk in done["disks"].as_array().unwrap() {
            let dirty_bytes = disk["dirty_bytes"].as_u64();
            let is_right = disk["is_incremental"] == true && dirty_bytes.is_some_and(|bytes| bytes <= dirty_bytes_max);
            assert!(is_right, "{}: {disk}", self.file_system.name());
        }
    }

    /// Asserts that everything was read, for this reason.
    fn assert_everything_was_read(&self, done: &serde_json::Value, reason: &str) {
        for disk in done["disks"].as_array().unwrap() {
            let text = disk["reason"].as_str().unwrap_or_default();
            assert!(text.contains(reason), "{}: {disk}", self.file_system.name());
        }
    }
}

pub(super) fn a_machine_is_backed_up_from_host_snapshots(kind: &'static str) {
    let Some(mut setup) = machine_on(kind) else { return };
    let first = setup.back_up();
    assert_eq!(
        (&first["method"], &first["consistency"]),
        (&"snapshot".into(), &"crash".into())
    );
    setup.assert_everything_was_read(&first, "no earlier snapshot");
    setup.world.assert_snapshot_is_right("first");
    let kept = |setup: &MachineSetup| {
        setup
            .listed(&["web1"])
            .into_iter()
            .map(|one| one["name"].clone())
            .collect::<Vec<_>>()
    };
    let after_first = kept(&setup);
    assert_eq!(after_first.len(), 1);

    setup.world.write(0, 50, 1 << 20, 65_536);
    setup.world.write(1, 51, 3 << 20, 4096);
    let second = setup.back_up();
    setup.world.assert_snapshot_is_right("second");
    setup.world.assert_runs_and_is_clean();
    setup.assert_incremental(&second, 1 << 20);
    let after_second = kept(&setup);
    assert!(
        after_second.len() == 1 && after_second != after_first,
        "{after_second:?}"
    );
    assert_eq!(setup.listed(&["web1"])[0]["hold_count"], 1);

    // Nothing has changed, and hardly anything is read.
    setup.assert_incremental(&setup.back_up(), 256 << 10);
    setup.world.assert_snapshot_is_right("third");

    // Another program removes the parent of the next snapshot.
    let newest = setup.listed(&["web1"])[0]["name"].as_str().unwrap().to_owned();
    for name in setup.full_names(&newest) {
        setup.world.rig.ok(&["host", "release", &name]);
        setup.world.rig.ok(&["host", "remove", &name]);
    }
    setup.world.write(1, 52, 0, 65_536);
    setup.assert_everything_was_read(&setup.back_up(), "is gone");
    setup.world.assert_snapshot_is_right("fourth");

    // A machine that is shut off is read in the same way, incrementally.
    setup.world.virsh_off();
    let off = setup.back_up();
    assert_eq!(off["consistency"], "shut off");
    setup.assert_incremental(&off, 1 << 20);
    setup.world.rig.ok(&["verify"]);
}

#[test]
fn a_machine_on_zfs_is_backed_up_from_host_snapshots() {
    a_machine_is_backed_up_from_host_snapshots("zfs");
}

#[test]
fn a_machine_on_btrfs_is_backed_up_from_host_snapshots() {
    a_machine_is_backed_up_from_host_snapshots("btrfs");
}

#[test]
fn a_machine_on_xfs_is_backed_up_from_host_snapshots() {
    a_machine_is_backed_up_from_host_snapshots("xfs");
}

#[test]
fn a_machine_on_ext4_is_not_backed_up_from_host_snapshots() {
    let Some(setup) = machine_on("ext4") else { return };
    let uri = setup.world.lab.uri();
    let words = at(&uri, &["backup", "web1", "--method", "snapshot"]);
    let (_, text) = setup.world.rig.error(1, &words);
    assert!(text.contains("snapshot: disk vda") && text.contains("ext4"), "{text}");
    setup.world.virsh_off();
    let (_, text) = setup.world.rig.error(1, &words);
    assert!(text.contains("snapshot: disk vda"), "{text}");
}

/// A killed backup leaves a host snapshot, which the next one removes; the previous one is still there for comparison.
#[test]
fn the_backup_after_a_killed_one_is_incremental() {
    let Some(mut setup) = machine_on("btrfs") else { return };
    setup.back_up();
    let uri = setup.world.lab.uri();
    setup.world.write(1, 53, 0, 4 << 20);
    let words = at(&uri, &["backup", "web1", "--method", "snapshot", "--bwlimit", "1M"]);
    let mut child = setup.world.rig.command(&words).spawn().unwrap();
    while setup.listed(&["web1"]).len() < 2 {
        assert_runs(&mut child);
    }
    setup.world.lab.clock.sleep(Duration::from_millis(300));
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    child.wait().unwrap();
    assert_eq!(setup.listed(&["web1"]).len(), 2);
    let done = setup.back_up();
    setup.assert_incremental(&done, 6 << 20);
    assert_eq!(setup.listed(&["web1"]).len(), 1);
    setup.world.assert_snapshot_is_right("after the kill");
    setup.world.assert_runs_and_is_clean();
}
