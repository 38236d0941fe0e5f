//! Host snapshots of machines whose images have base images in other places.

use serde_json::Value;

use super::at;
use super::host_snapshots::{MachineSetup, machine_on};
use holdfast_test_kit::file_systems::system;

impl MachineSetup {
    /// Defines a machine that is shut off, and creates its image with `base` as base.
    fn define_on_base(&self, name: &str, base: &str) {
        self.world.lab.define(name, &["qcow2"]);
        let image = self.world.lab.path(&format!("{name}-a"));
        std::fs::remove_file(&image).unwrap();
        if !std::path::Path::new(base).exists() {
            system("qemu-img", &["create", "-q", "-f", "qcow2", base, "8M"]).unwrap();
        }
        let image = image.to_str().unwrap();
        system(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", image],
        )
        .unwrap();
    }

    fn report(&self, code: i32, words: &[&str]) -> Value {
        let uri = self.world.lab.uri();
        self.world.rig.json(code, &at(&uri, &[&["snapshot"], words].concat()))["report"].clone()
    }
}

#[test]
fn the_base_of_an_image_is_snapshotted_with_it_once() {
    let Some(setup) = machine_on("btrfs") else { return };
    let folder = setup.world.lab.folder.path().to_str().unwrap().to_owned();
    let templates = format!("{folder}/templates");
    system("btrfs", &["subvolume", "create", &templates]).unwrap();
    setup.define_on_base("web2", &format!("{templates}/base"));
    let both = serde_json::json!([format!("btrfs:{folder}@one"), format!("btrfs:{templates}@one")]);
    let planned = setup.report(0, &["web2", "--name", "one", "--dry-run"]);
    assert_eq!(planned["cuts"][0]["snapshots"], both);
    let done = setup.report(0, &["web2", "--name", "one"]);
    assert_eq!(done["cuts"][0]["snapshots"], both);
    assert!(std::path::Path::new(&format!("{templates}/.holdfast/snapshots/one/base")).exists());
    let listed = setup
        .world
        .rig
        .report(&at(&setup.world.lab.uri(), &["host", "list", "web2"]));
    assert_eq!(listed["datasets"].as_array().unwrap().len(), 2);

    // A snapshot of a named dataset does not include the other one, which is reported as a warning.
    let of_dataset = setup.report(0, &[&folder, "--name", "two"]);
    assert_eq!(of_dataset["cuts"][0]["snapshots"].as_array().unwrap().len(), 1);
    let left_out = of_dataset["cuts"][0]["left_out"].as_array().unwrap();
    let is_warned = |one: &Value| one["machine"] == "web2" && one["reason"].as_str().unwrap().contains("templates");
    assert!(left_out.iter().any(is_warned), "{of_dataset}");
    // The machine does not write to its base, and need not be paused for a snapshot of the base.
    let of_templates = setup.report(0, &[&templates, "--name", "three"]);
    assert_eq!(of_templates["cuts"][0]["machines"], serde_json::json!([]));
    // A rollback is possible even if the base has no snapshot of that name.
    setup
        .world
        .rig
        .ok(&at(&setup.world.lab.uri(), &["rollback", "web2@two", "--dry-run"]));
}

/// An absolute path in the image leads to the current base: instead, the base in the host snapshot is read and
/// compared.
#[test]
fn the_base_of_an_image_is_backed_up_from_the_host_snapshot() {
    let Some(setup) = machine_on("btrfs") else { return };
    let base = setup.world.lab.path("base").to_str().unwrap().to_owned();
    setup.define_on_base("web2", &base);
    let write = |file: &str, byte: u8| {
        let line = format!("write -P {byte} 1M 64k");
        system("qemu-io", &["-f", "qcow2", "-c", &line, file]).unwrap();
    };
    write(&base, 1);
    let uri = setup.world.lab.uri();
    let back_up = || {
        let words = at(&uri, &["backup", "web2", "--method", "snapshot"]);
        setup.world.rig.report(&words)["machines"][0]["disks"][0].clone()
    };
    let assert_holds = |byte: u8| {
        setup
            .world
            .rig
            .ok(&["restore", "--force", "web2@latest:vda", "vda.raw"]);
        let restored = setup.world.rig.read("vda.raw");
        assert!(
            restored[1 << 20..(1 << 20) + 65_536].iter().all(|found| *found == byte),
            "{byte}"
        );
    };
    back_up();
    assert_holds(1);
    // The base is changed between two backups: only the changes are read.
    write(&base, 2);
    let second = back_up();
    assert_eq!(second["is_incremental"], true, "{second:#}");
    assert!(second["dirty_bytes"].as_u64().unwrap() < 1 << 20, "{second:#}");
    assert_holds(2);

    // A base that is outside of the host snapshot is read in its current state, and completely, with the reason.
    let templates = setup.world.lab.path("templates").to_str().unwrap().to_owned();
    system("btrfs", &["subvolume", "create", &templates]).unwrap();
    setup.define_on_base("web3", &format!("{templates}/base"));
    let words = at(&uri, &["backup", "web3", "--method", "snapshot"]);
    for expected in ["no earlier snapshot", "which is not in the host snapshot"] {
        let disk = setup.world.rig.report(&words)["machines"][0]["disks"][0].clone();
        assert!(disk["reason"].as_str().unwrap().contains(expected), "{disk:#}");
    }
}

#[test]
fn a_base_that_cannot_be_snapshotted_is_warned_about() {
    let Some(setup) = machine_on("btrfs") else { return };
    // Outside of this file system, in the folder of the test's files.
    let base = setup.world.rig.path("base");
    if !matches!(
        holdfast_host::provider::locate(setup.world.rig.path("").as_path(), "test"),
        Ok(holdfast_host::provider::Located::Nowhere(_))
    ) {
        return;
    }
    setup.define_on_base("web2", base.to_str().unwrap());
    let done = setup.report(3, &["web2", "--name", "one"]);
    assert_eq!(done["cuts"][0]["snapshots"].as_array().unwrap().len(), 1);
    let left_out = done["cuts"][0]["left_out"].as_array().unwrap();
    let is_warned = |one: &Value| one["disk"] == "vda" && one["reason"].as_str().unwrap().contains("its base");
    assert!(left_out.iter().any(is_warned), "{done}");
}
