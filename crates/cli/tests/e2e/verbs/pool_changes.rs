//! Changes of a machine in a pool while its backup waits, and of its repository between two backups.

use std::process::Stdio;

use holdfast_xapi_server::NbdPurpose;
use serde_json::{Value, json};

use super::copy_mishaps::damage_largest_pack;
use super::pools::{MIB, World, with_login};
use crate::schedules::wait_until;

impl World {
    /// Attaches another disk to the running machine.
    fn attach(&self, place: &str, size_bytes: u64) {
        let vms = self.pool.vms();
        let vm = vms.iter().find(|vm| vm.uuid == self.vm).unwrap();
        let old = &self.pool.vdis()[0].uuid;
        let mut vdi = self.pool.record("VDI", old).unwrap();
        vdi["virtual_size"] = json!(size_bytes.to_string());
        vdi["name_label"] = json!("added");
        vdi["other_config"] = json!({});
        let vdi = self.pool.call("VDI.create", &[vdi]).unwrap();
        let vbd = json!({
            "VM": vm.reference, "VDI": vdi, "userdevice": place, "mode": "RW", "type": "Disk", "bootable": false,
            "empty": false, "unpluggable": true, "other_config": {}, "qos_algorithm_type": "", "qos_algorithm_params": {},
        });
        self.pool.call("VBD.create", &[vbd]).unwrap();
    }
}

/// Regression: a backup that waited for another one used the list of disks from before.
#[test]
fn a_backup_that_has_waited_reads_the_current_disks() {
    let world = World::new();
    let fingerprint = world.pool.fingerprint();
    let machine = world.machine();
    let start = |options: &[&str]| {
        let words = [&["--json", "backup", &machine[..]], options].concat();
        let mut command = world.rig.command(&with_login(&words, &fingerprint));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let first = start(&["--bwlimit", "2M"]);
    wait_until("the first snapshot", || {
        world.pool.vms().iter().any(|vm| vm.is_a_snapshot)
    });
    world.pool.forget_calls();
    let second = start(&["--wait", "300"]);
    wait_until("the second one to look at the machine", || {
        let calls = world.pool.calls();
        let logins = calls.iter().position(|call| call.contains("session.login"));
        logins.is_some_and(|at| calls[at..].iter().any(|call| call.contains("VBD.get_all_records")))
    });
    world.attach("7", 3 * MIB);
    assert!(first.wait_with_output().unwrap().status.success());
    let output = second.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let disks = report["report"]["machines"][0]["disks"].as_array().unwrap();
    assert_eq!(disks.len(), 3, "{report:#}");
}

/// Regression: with VHDs, unchanged blocks come from the repository: if that was damaged, every further backup failed.
#[test]
fn a_damaged_repository_is_repaired_by_the_next_backup() {
    let world = World::new();
    world.pool.set_nbd_purpose(NbdPurpose::None);
    world.back_up(&[]);
    damage_largest_pack(&world.rig, "repo");
    world.rig.code(5, &["scrub"]);
    world.write("xvda", 9 * MIB, 512, 5);
    let report = world.back_up(&[]);
    let reason = report["disks"][0].to_string();
    assert!(reason.contains("the repository has known damage"), "{report:#}");
    world.rig.run(&["repair"]);
    world.rig.ok(&["verify"]);
    assert_eq!(world.back_up(&[])["disks"][0]["dirty_bytes"], json!(0));
}
