//! A machine is exported from libvirt as an archive for XenServer, imported again, and runs.

use super::{World, at};

#[test]
fn an_imported_machine_runs() {
    let mut world = World::new();
    world.write(0, 7, 1 << 20, 65_536);
    world.write(1, 9, 3000, 100_000);
    world.back_up();
    let uri = world.lab.uri();
    let report = world.rig.report(&["export", "web1", "web1.xva.zst", "--name", "moved"]);
    assert_eq!(report["name"], "moved");
    let report = world.rig.report(&["import", "web1.xva.zst", "--domain-type", "qemu"]);
    assert_eq!(report["snapshot"]["machine"], "moved");
    let [old, new] = ["web1", "moved"].map(|machine| {
        let list = world.rig.report(&["show", machine]);
        list["snapshot"]["disks"].as_array().map_or(0, Vec::len)
    });
    assert!(old > 2 && new > 2, "disks and configurations: {old} and {new}");
    let storage = world.lab.path("moved");
    std::fs::create_dir(&storage).unwrap();
    let words = [
        "restore",
        "moved",
        "--to-machine",
        "--name",
        "moved",
        "--start",
        "--storage",
    ];
    let words = [&words[..], &[storage.to_str().unwrap()]].concat();
    let report = world.rig.report(&at(&uri, &words));
    assert_eq!(report["target_machine"]["is_started"], true, "{report}");
    assert_eq!(world.lab.virsh(&["domstate", "moved"]).trim(), "running");
    world.assert_holds("moved");
    world.assert_runs_and_is_clean();
}
