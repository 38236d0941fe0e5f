//! Copies that a user makes of disks that Holdfast keeps in a pool belong to the user, although XAPI copies their
//! marks.

use holdfast_xapi_server::{NbdPurpose, NewVm, VdiInfo};
use serde_json::json;

use super::pools::{MIB, World};

impl World {
    /// The disks that the pool keeps for the next backup.
    fn bases(&self) -> Vec<VdiInfo> {
        let vdis = self.pool.vdis().into_iter();
        vdis.filter(|vdi| vdi.is_a_snapshot).collect()
    }

    fn disk_is_there(&self, uuid: &str) -> bool {
        self.pool.record("VDI", uuid).is_some()
    }

    /// Calls a method as a user would; returns the reference and the UUID of the created disk.
    fn create_disk(&self, method: &str, of: &str) -> (String, String) {
        let made = self.pool.call(method, &[json!(of), json!({})]).unwrap();
        let made = made.as_str().unwrap();
        let vdis = self.pool.vdis();
        let vdi = vdis.iter().find(|vdi| vdi.reference == made).unwrap();
        (vdi.reference.clone(), vdi.uuid.clone())
    }

    /// Creates a machine with this disk, as a user would.
    fn put_into_machine(&self, name: &str, disk: &str) -> String {
        let vm = self.pool.add_vm(&NewVm {
            name: name.to_owned(),
            ..NewVm::default()
        });
        let vms = self.pool.vms();
        let reference = &vms.iter().find(|one| one.uuid == vm).unwrap().reference;
        let vbd = json!({
            "VM": reference, "VDI": disk, "userdevice": "0", "mode": "RW", "type": "Disk", "bootable": false,
            "empty": false, "unpluggable": true, "other_config": {}, "qos_algorithm_type": "", "qos_algorithm_params": {},
        });
        self.pool.call("VBD.create", &[vbd]).unwrap();
        vm
    }

    /// Removes marks that older versions of the program did not write.
    fn remove_newer_marks(&self) {
        for vdi in self.pool.vdis() {
            let mut marks = self.pool.record("VDI", &vdi.uuid).unwrap()["other_config"].clone();
            marks.as_object_mut().unwrap().remove("holdfast-base-of");
            self.pool.set_field("VDI", &vdi.uuid, "other_config", marks);
        }
    }
}

/// Regression: the next backup and the doctor removed clones of a kept disk.
#[test]
fn a_copy_that_a_user_made_of_a_kept_disk_is_kept() {
    for is_older in [false, true] {
        let world = World::new();
        world.pool.set_nbd_purpose(NbdPurpose::None);
        world.back_up(&[]);
        let bases = world.bases();
        assert_eq!(bases.len(), 2);
        if is_older {
            world.remove_newer_marks();
        }
        let (clone, clone_uuid) = world.create_disk("VDI.clone", &bases[0].reference);
        world.put_into_machine("rescue", &clone);
        let (_, loose) = world.create_disk("VDI.clone", &bases[1].reference);
        let (_, of_clone) = world.create_disk("VDI.snapshot", &clone);
        let user_disks = [clone_uuid, loose, of_clone];
        let assert_user_disks_exist = || {
            for uuid in &user_disks {
                assert!(world.disk_is_there(uuid), "older marks: {is_older}");
            }
        };
        let marks = world.pool.record("VDI", &user_disks[0]).unwrap()["other_config"].clone();
        assert!(marks["holdfast-base"].is_string(), "XAPI copies it: {marks}");

        // The next backup uses the kept disks, whichever version created them, and then removes them.
        world.write("xvda", 9 * MIB, 512, 4);
        let next = world.back_up(&[]);
        assert_eq!(next["disks"][1]["dirty_bytes"], 0, "{next}");
        for base in &bases {
            assert!(!world.disk_is_there(&base.uuid), "older marks: {is_older}");
        }
        assert_user_disks_exist();

        // The doctor neither reports the copies nor removes them.
        assert_eq!(world.finds(0, &["--fix"]), [""; 0]);
        let snapshots = world.rig.report(&["list"])["snapshots"].clone();
        for snapshot in snapshots.as_array().unwrap() {
            world.rig.ok(&["forget", snapshot["id"].as_str().unwrap()]);
        }
        assert_eq!(world.finds(0, &["--fix"]), ["pool-base"]);
        assert_eq!(world.bases().len(), 1, "the base of the clone is kept");
        assert_user_disks_exist();
        assert_eq!(world.finds(0, &[]), [""; 0]);
    }
}

/// A user has attached a kept disk, and one of a leftover snapshot, to another machine.
#[test]
fn a_kept_disk_in_use_by_a_machine_is_kept() {
    let world = World::new();
    world.pool.set_nbd_purpose(NbdPurpose::None);
    world.back_up(&[]);
    let base = world.bases()[0].clone();
    world.put_into_machine("rescue", &base.reference);
    world.back_up(&[]);
    world.finds(0, &["--fix"]);
    assert!(world.disk_is_there(&base.uuid));

    world.back_up_and_leave();
    assert_eq!(world.snapshot_count(), 1);
    let snapshot = world.pool.vms().into_iter().find(|vm| vm.is_a_snapshot).unwrap();
    let attached = world.pool.record("VM", &snapshot.uuid).unwrap()["VBDs"].clone();
    assert_ne!(attached, json!([]));
    // A copy of the snapshot by the user has the same name, and is a machine.
    let copy = world.pool.add_vm(&NewVm {
        name: snapshot.name.clone(),
        ..NewVm::default()
    });
    world
        .pool
        .set_field("VM", &copy, "snapshot_of", json!(snapshot.snapshot_of));
    world.back_up(&[]);
    assert_eq!(world.snapshot_count(), 0);
    assert!(world.pool.record("VM", &copy).is_some());
}
