//! The doctor finds the leftovers of backups in a pool, and removes only those that no repository can need.

use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use serde_json::Value;

use super::pools::{World, with_login};
use crate::program::{stderr, stdout};

impl World {
    /// The report of the doctor. While backups of other tests are running, the owner of a snapshot is unknown, and the
    /// doctor is run again.
    pub(super) fn doctor(&self, code: i32, words: &[&str]) -> Value {
        let fingerprint = self.pool.fingerprint();
        let address = self.address();
        let words = [&["doctor", &address, "--json"][..], words].concat();
        let words = with_login(&words, &fingerprint);
        let (clock, mut waited) = (SystemClock::new(), 0);
        loop {
            let output = self.rig.run(&words);
            let report = serde_json::from_str::<Value>(&stdout(&output)).unwrap()["report"].clone();
            if waited < 600 && report["notes"].to_string().contains("is not known whether") {
                clock.sleep(Duration::from_millis(100));
                waited += 1;
                continue;
            }
            assert_eq!(output.status.code(), Some(code), "{report}\n{}", stderr(&output));
            return report;
        }
    }

    /// The kinds of the doctor's findings.
    pub(super) fn finds(&self, code: i32, words: &[&str]) -> Vec<String> {
        let report = self.doctor(code, words);
        let kinds = report["findings"].as_array().unwrap().iter();
        kinds
            .map(|finding| finding["kind"].as_str().unwrap().to_owned())
            .collect()
    }

    /// A backup whose snapshot cannot be removed.
    pub(super) fn back_up_and_leave(&self) {
        let faults = self.pool.faults();
        faults.fail_call("VM.destroy", &["OTHER_OPERATION_IN_PROGRESS", "VM", "OpaqueRef:x"]);
        let output = self.run(&["backup", &self.machine()]);
        assert!(stderr(&output).contains("cannot be removed"), "{}", stderr(&output));
    }

    pub(super) fn snapshot_count(&self) -> usize {
        self.pool.vms().iter().filter(|vm| vm.is_a_snapshot).count()
    }
}

#[test]
fn a_leftover_snapshot_is_found_and_removed() {
    let world = World::new();
    assert_eq!(world.finds(0, &[]), [""; 0]);
    world.back_up_and_leave();

    // A backup of the machine is running.
    let lock = world.rig.path(&format!("state/holdfast/machines/{}.backup", world.vm));
    let lock = std::fs::File::open(lock).unwrap();
    lock.lock().unwrap();
    let report = world.doctor(0, &["--fix"]);
    assert!(report["notes"].to_string().contains("a backup of web1 "), "{report}");
    assert_eq!(world.snapshot_count(), 1);
    lock.unlock().unwrap();

    let report = world.doctor(3, &[]);
    let finding = &report["findings"][0];
    assert_eq!(
        (&finding["kind"], &finding["machine"]),
        (&"pool-snapshot".into(), &"web1".into())
    );
    assert!(finding["since"].is_string(), "{finding}");
    assert_eq!(report["machines"], serde_json::json!(["web1"]));
    assert_eq!(world.snapshot_count(), 1);
    let report = world.doctor(0, &["--fix"]);
    assert!(
        report["findings"][0]["repaired"].to_string().contains("removed"),
        "{report}"
    );
    // The disks for the next incremental backup are kept.
    world.assert_clean(2);
    let next = world.back_up(&[]);
    assert!(next["disks"].to_string().contains("\"dirty_bytes\":0"), "{next}");
    world.assert_clean(2);
}

/// The snapshot may belong to another user of this host, or to another host of the same name: it is reported and kept.
#[test]
fn a_snapshot_of_another_host_or_user_is_kept() {
    let world = World::new();
    world.back_up_and_leave();
    let fingerprint = world.pool.fingerprint();
    let address = world.address();
    let words = with_login(&["doctor", &address, "--fix", "--json"], &fingerprint);
    let mut command = world.rig.command(&words);
    let output = command
        .env("XDG_STATE_HOME", world.rig.path("elsewhere"))
        .output()
        .unwrap();
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("by another host or user"), "{text}");
    assert_eq!(world.snapshot_count(), 1);
}

#[test]
fn disks_kept_for_a_forgotten_repository_are_found_and_removed() {
    let world = World::new();
    world.back_up(&[]);
    let report = world.doctor(0, &[]);
    assert_eq!(
        report["notes"].as_array().unwrap().len(),
        1,
        "the repository needs the disks: {report}"
    );

    // Another repository, which the doctor only knows from the marks in the pool.
    world.rig.ok(&["init", "-r", "other", "--no-encryption"]);
    world.back_up(&["-r", "other"]);
    world.assert_clean(4);
    let notes = world.doctor(0, &[])["notes"].to_string();
    let id = notes
        .split("--forget-repository ")
        .nth(1)
        .unwrap()
        .split(' ')
        .next()
        .unwrap();
    assert!(notes.contains("snapshots of 2 disks"), "{notes}");
    assert_eq!(world.finds(3, &["--forget-repository", id]), ["pool-base"]);
    assert_eq!(world.finds(3, &["--forget-repository", &id[..8]]), ["pool-base"]);
    let notes = world.doctor(0, &["--forget-repository", "deadbeef"])["notes"].to_string();
    assert!(notes.contains("nothing for a repository deadbeef"), "{notes}");
    for wrong in ["zz", "", "deadbee", "everything"] {
        let output = world.run(&["doctor", &world.address(), "--forget-repository", wrong]);
        assert_eq!(output.status.code(), Some(2), "{wrong}: {output:?}");
    }
    world.assert_clean(4);
    world.finds(0, &["--forget-repository", id, "--fix"]);
    world.assert_clean(2);

    // The snapshot that could be compared with the kept disks is removed.
    let snapshots = world.rig.report(&["list"])["snapshots"].clone();
    world.rig.ok(&["forget", snapshots[0]["id"].as_str().unwrap()]);
    assert_eq!(world.finds(3, &[]), ["pool-base"]);
    world.back_up(&[]);
    assert_eq!(world.finds(0, &[]), [""; 0]);

    world.pool.set_power_state(&world.vm, "Halted");
    world.pool.destroy(&world.vm).unwrap();
    world.assert_clean(2);
    assert_eq!(world.finds(3, &[]), ["pool-base"]);
    world.finds(0, &["--fix"]);
    world.assert_clean(0);
}
