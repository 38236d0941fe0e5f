//! Host snapshots, and backups from them, with failures of the file system.

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::Clock as _;
use serde_json::json;

use super::at;
use super::host_snapshots::{MachineSetup, machine_on};
use holdfast_test_kit::file_systems::system;

impl MachineSetup {
    /// The folder of the host snapshots.
    fn snapshots(&self) -> PathBuf {
        self.world.lab.folder.path().join(".holdfast/snapshots")
    }

    /// The dataset with the disks of the machine.
    fn dataset(&self) -> String {
        let report = self
            .world
            .rig
            .report(&at(&self.world.lab.uri(), &["host", "list", "web1"]));
        report["datasets"][0]["dataset"].as_str().unwrap().to_owned()
    }

    /// The names of the complete snapshots, oldest first.
    fn complete_names(&self) -> Vec<serde_json::Value> {
        self.listed(&["web1"]).iter().map(|one| one["name"].clone()).collect()
    }

    /// All entries of the folder, hidden or not.
    fn entries(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.snapshots()) else {
            return Vec::new();
        };
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

/// Another program removes the snapshot that a backup reads. The backup fails with the reason, and the next one
/// succeeds.
fn removed_while_it_is_read(kind: &'static str, remove: fn(&Path)) {
    let Some(mut setup) = machine_on(kind) else { return };
    let uri = setup.world.lab.uri();
    setup.world.write(0, 60, 0, 8 << 20);
    let words = at(&uri, &["backup", "web1", "--method", "snapshot", "--bwlimit", "1M"]);
    let child = setup.world.rig.command(&words).spawn().unwrap();
    let clock = &setup.world.lab.clock;
    while setup.listed(&["web1"]).is_empty() {
        clock.sleep(Duration::from_millis(10));
    }
    clock.sleep(Duration::from_millis(200));
    remove(
        &setup
            .snapshots()
            .join(setup.listed(&["web1"])[0]["name"].as_str().unwrap()),
    );
    assert_eq!(setup.entries(), [""; 0]);
    let output = child.wait_with_output().unwrap();
    // Open files can still be read: then the backup is complete.
    if output.status.success() {
        setup.world.assert_snapshot_is_right("of what was removed");
    } else {
        assert_eq!(setup.world.rig.snapshot_count(), 0);
    }
    setup.world.write(1, 61, 0, 65_536);
    let done = setup
        .world
        .rig
        .report(&at(&uri, &["backup", "web1", "--method", "snapshot"]));
    assert_eq!(done["machines"][0]["method"], "snapshot");
    setup.world.assert_snapshot_is_right("the next one");
    setup.world.assert_runs_and_is_clean();
}

#[test]
fn a_host_snapshot_on_btrfs_may_be_removed_during_a_backup() {
    removed_while_it_is_read("btrfs", |snapshot| {
        system("btrfs", &["property", "set", snapshot.to_str().unwrap(), "ro", "false"]).unwrap();
        system("btrfs", &["subvolume", "delete", snapshot.to_str().unwrap()]).unwrap();
    });
}

#[test]
fn a_host_snapshot_on_xfs_may_be_removed_during_a_backup() {
    removed_while_it_is_read("xfs", |snapshot| std::fs::remove_dir_all(snapshot).unwrap());
}

/// Writes until the file system is full.
fn fill(folder: &Path) -> PathBuf {
    let path = folder.join("filling");
    let mut file = File::create(&path).unwrap();
    // Each write is synced, because ZFS allocates space only then: few and large writes first.
    for length in [8 << 20, 1 << 20, 128 << 10, 16 << 10, 4096] {
        let bytes = vec![7; length];
        let refused = (0..100_000).find_map(|_| file.write_all(&bytes).and_then(|()| file.sync_data()).err());
        assert_eq!(refused.unwrap().kind(), ErrorKind::StorageFull);
    }
    path
}

/// The host snapshot is complete, or it is absent and the error says why; the machine keeps running in both cases.
fn on_a_full_file_system(kind: &'static str) {
    let Some(mut setup) = machine_on(kind) else { return };
    setup.world.write(0, 62, 0, 1 << 20);
    setup.take(0, &["web1", "--name", "before"]);
    let filling = fill(setup.world.lab.folder.path());
    let uri = setup.world.lab.uri();
    let words = at(&uri, &["snapshot", "web1", "--name", "full", "--json"]);
    let output = setup.world.rig.run(&words);
    let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    if output.status.success() {
        assert_eq!(setup.complete_names(), ["before", "full"], "{kind}");
    } else {
        assert!(
            text.contains("no space is left") && !text.contains("/proc/"),
            "{kind}: {text}"
        );
        assert_eq!(setup.complete_names(), ["before"], "{kind}");
    }
    assert!(
        setup.entries().iter().all(|name| !name.starts_with('.')),
        "{kind}: {:?}",
        setup.entries()
    );
    setup.world.assert_runs_and_is_clean();
    // A host snapshot uses space until it is removed: that must work on a full file system.
    if output.status.success() {
        setup
            .world
            .rig
            .ok(&["host", "remove", &format!("{}@full", setup.dataset())]);
    }
    // With free space, everything works again.
    std::fs::remove_file(filling).unwrap();
    // btrfs frees removed data with a delay.
    let words = at(&uri, &["snapshot", "web1", "--name", "after"]);
    let is_taken = (0..100).any(|_| {
        setup.world.lab.clock.sleep(Duration::from_millis(300));
        setup.world.rig.run(&words).status.success()
    });
    assert!(is_taken, "{kind}");
    assert_eq!(setup.complete_names().last(), Some(&json!("after")));
    setup.world.write(1, 63, 0, 65_536);
    setup.world.back_up();
    setup.world.assert_snapshot_is_right(kind);
}

#[test]
fn a_snapshot_on_a_full_file_system_is_complete_or_absent() {
    for kind in ["btrfs", "xfs", "zfs"] {
        on_a_full_file_system(kind);
    }
}
