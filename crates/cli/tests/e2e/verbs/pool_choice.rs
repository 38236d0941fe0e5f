//! Listing and selection of machines in a pool.

use holdfast_xapi_server::{NewDisk, NewVm};

use super::pools::{MIB, World};
use crate::program::stderr;

#[test]
fn machines_with_special_characters_in_their_names_are_found() {
    let world = World::new();
    for name in ["with \"quotes\"", "back\\slash", "a/b"] {
        world.pool.add_vm(&NewVm {
            name: name.to_owned(),
            disks: Vec::new(),
            power_state: String::new(),
        });
        let report = world.report(&["machines", &format!("{}/{name}", world.address())]);
        assert_eq!(report["machines"][0]["name"], name);
    }
}

#[test]
fn machines_are_listed_and_selected() {
    let world = World::new();
    world.pool.add_vm(&NewVm {
        name: "db1".to_owned(),
        disks: vec![NewDisk::new("xvda", MIB)],
        power_state: String::new(),
    });
    let address = world.address();
    let report = world.report(&["machines", &address]);
    let names: Vec<&str> = report["machines"]
        .as_array()
        .unwrap()
        .iter()
        .map(|machine| machine["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["db1", "web1"]);
    assert_eq!(report["machines"][1]["disks"][0]["size_bytes"], 12 * MIB);
    let report = world.report(&["backup", &address, "--exclude-machine", "web*"]);
    assert_eq!(report["machines"].as_array().unwrap().len(), 1);
    assert_eq!(report["machines"][0]["consistency"], "shut off");
    let (_, message) = world.fails(1, &["backup", &format!("{address}/missing")]);
    assert!(
        message.contains("has no machine") && message.contains("missing"),
        "{message}"
    );
    // A name with special characters of patterns selects the machine with exactly this name.
    for name in ["db[1]", "db*"] {
        world.pool.add_vm(&NewVm {
            name: name.to_owned(),
            disks: Vec::new(),
            power_state: String::new(),
        });
        let report = world.report(&["machines", &format!("{address}/{name}")]);
        assert_eq!(report["machines"].as_array().unwrap().len(), 1, "{report}");
        assert_eq!(report["machines"][0]["name"], name);
    }
    let report = world.report(&["backup", &world.machine(), "--exclude", "xvdb"]);
    assert_eq!(report["machines"][0]["disks"].as_array().unwrap().len(), 1);
    let (_, message) = world.fails(1, &["backup", &world.machine(), "--include", "xvdz"]);
    assert!(message.contains("xvdz"), "{message}");
}

#[test]
fn machines_with_the_same_name_are_refused() {
    let world = World::new();
    let namesake = world.pool.add_vm(&NewVm {
        name: "web1".to_owned(),
        disks: vec![NewDisk::new("xvda", MIB)],
        power_state: "Halted".to_owned(),
    });
    world.pool.add_vm(&NewVm {
        name: "web2".to_owned(),
        disks: vec![NewDisk::new("xvda", MIB)],
        power_state: "Halted".to_owned(),
    });
    let address = world.address();
    let output = world.run(&["backup", &address]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains(&namesake), "{}", stderr(&output));
    // The other machines are backed up nevertheless.
    assert_eq!(world.rig.snapshot_count(), 1);
    let by_uuid = format!("{address}/{namesake}");
    world.report(&["backup", &by_uuid, "--machine", "web1-old"]);
    assert_eq!(world.rig.snapshot_count(), 2);
}

/// A missing machine or an unreachable pool does not prevent the backup of others.
#[test]
fn a_missing_machine_or_pool_does_not_prevent_other_backups() {
    let world = World::new();
    let missing = format!("{}/gone", world.address());
    let machine = world.machine();
    for words in [[&missing[..], &machine], [&machine[..], "xen://127.0.0.1:1/web9"]] {
        let before = world.rig.snapshot_count();
        let output = world.run(&[&["backup"], &words[..]].concat());
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert_eq!(world.rig.snapshot_count(), before + 1, "{}", stderr(&output));
    }
    // If no other machine was requested, this is the only error.
    let (kind, message) = world.fails(1, &["backup", &missing]);
    assert!(kind == "not-found" && message.contains("gone"), "{kind}: {message}");
}
