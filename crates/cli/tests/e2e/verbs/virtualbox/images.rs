//! Machines that are shut off, read from their images, and restored or exported.

use std::path::Path;

use super::{LAB, MIB, NAME, World};
use crate::host::{system, text};
use crate::program::{stderr, stdout};
use crate::rig::noise;

#[test]
fn a_machine_that_is_off_is_backed_up_and_restored() {
    let world = World::new();
    let listed = world.json(0, &["machines", "vbox:"])["report"]["machines"][0].clone();
    assert_eq!(
        (
            &listed["name"],
            &listed["state"],
            &listed["hypervisor"],
            &listed["uuid"]
        ),
        (&NAME.into(), &"shut off".into(), &"virtualbox".into(), &LAB.into())
    );
    assert_eq!(listed["disks"][0]["size_bytes"], 6 * MIB, "{listed}");
    if !Path::new("/run/libvirt/libvirt-sock").exists() {
        let all = world.json(0, &["machines"])["report"]["machines"].clone();
        assert!(all.as_array().unwrap().contains(&listed), "{all}");
    }

    let report = world.back_up(0, &[&format!("vbox:{NAME}"), "--tag", "a"])["report"].clone();
    let machine = &report["machines"][0];
    assert_eq!(
        (&machine["method"], &machine["consistency"]),
        (&"images".into(), &"shut off".into())
    );
    let disks = [("sda", &world.disks[0][..]), ("sdb", &world.disks[1][..])];
    world.assert_holds(NAME, &disks);
    world.assert_holds(
        NAME,
        &[
            ("virtualbox.nvram", b"variables"),
            ("original-machine.vbox", &world.rig.read("vms/lab/lab.vbox")),
        ],
    );
    assert!(!world.requests().contains("take"), "{}", world.requests());
    // The snapshot can be restored to libvirt as well.
    let domain = world.rig.run(&["restore", &format!("{NAME}:domain.xml"), "-"]);
    assert!(
        stdout(&domain).contains("<domain") && stdout(&domain).contains("sdb"),
        "{}",
        stdout(&domain)
    );
    // A second backup, with the machine selected in other ways, stores nothing new.
    for word in [
        format!("vbox:{LAB}"),
        format!("vbox:{{{LAB}}}"),
        "vbox:vms/lab/lab.vbox".to_owned(),
        "vbox:lab*".to_owned(),
    ] {
        let report = world.back_up(0, &[&word])["report"].clone();
        let disks = &report["machines"][0]["snapshot"]["disks"];
        assert_eq!(
            (&disks[0]["new_bytes"], &disks[1]["unchanged_bytes"]),
            (&0.into(), &(3 * MIB).into()),
            "{report}"
        );
    }

    // With its old identity, VirtualBox registers it only if the original is gone.
    let report = world.json(3, &["export", NAME, "back", "--format", "vbox", "--register"]);
    assert!(report["warnings"].to_string().contains("already exists"), "{report}");
    world.register(&[]);
    std::fs::remove_dir_all(world.rig.path("back")).unwrap();
    let report = world.json(0, &["export", NAME, "back", "--format", "vbox", "--register"])["report"].clone();
    assert_eq!(report["is_registered"], true, "{report}");
    assert!(
        report["settings"].as_str().unwrap().starts_with('/'),
        "VBoxManage works in another folder: {report}"
    );
    assert_eq!(report["dropped"].to_string(), "[]");
    assert_eq!(
        world.rig.names("back"),
        [
            "lab 'one' _x_-sda.vdi",
            "lab 'one' _x_-sdb.vdi",
            "lab 'one' _x_.nvram",
            "lab 'one' _x_.vbox"
        ]
    );
    let listed = world.json(0, &["machines", "vbox:"])["report"]["machines"][0].clone();
    assert_eq!((&listed["name"], &listed["uuid"]), (&NAME.into(), &LAB.into()));
    let text = String::from_utf8(world.rig.read("back/lab 'one' _x_.vbox")).unwrap();
    for kept in [
        "SharedFolder name=\"home\"",
        "VMSVGA",
        "DO NOT EDIT",
        "080027BB1475",
        " _x_.nvram\"",
    ] {
        assert!(text.contains(kept), "{kept}: {text}");
    }
    for id in ["vms/lab/lab.vdi", "vms/lab/data.vdi"].map(|image| world.id(image)) {
        assert!(
            !text.contains(&id),
            "VirtualBox refuses two images with one UUID: {text}"
        );
    }
    world.back_up(0, &[&format!("vbox:{NAME}"), "--machine", "again"]);
    world.assert_holds("again", &disks);
}

#[test]
fn without_vboxmanage_a_machine_is_read_if_no_process_writes_its_images() {
    let mut world = World::new();
    world.has_manager = false;
    let output = world.run(0, &["backup", "vbox:"]);
    assert!(stderr(&output).contains("cannot be asked"), "{}", stderr(&output));
    world.assert_holds(NAME, &[("sdb", &world.disks[1])]);
    // A process that writes without a lock, as VirtualBox does.
    let held = std::fs::File::options()
        .append(true)
        .open(world.rig.path("vms/lab/data.vdi"))
        .unwrap();
    let (kind, message) = world.refused(4, &[&format!("vbox:{LAB}")]);
    assert!(
        kind == "locked" && message.contains("is in use by process") && message.contains("is not there"),
        "{message}"
    );
    let listed = world.json(0, &["machines", "vbox:"])["report"]["machines"][0].clone();
    assert_eq!(listed["state"], "running");
    drop(held);
    world.back_up(0, &["vbox:"]);
    let document = world.json(1, &["export", NAME, "back", "--format", "vbox", "--register"]);
    assert!(document["error"].to_string().contains("no VBoxManage"), "{document}");
    // A copy of the folder has the same UUID, under which VBoxManage knows the original.
    world.has_manager = true;
    world.state("running");
    let (from, to) = (world.rig.path("vms/lab"), world.rig.path("vms/copy"));
    system("/bin/cp", &["-r", text(&from), text(&to)]).unwrap();
    let report = world.back_up(0, &["vbox:vms/copy/lab.vbox", "--machine", "copy"])["report"].clone();
    assert_eq!(report["machines"][0]["method"], "images");
}

#[test]
fn disks_excluded_from_snapshots_are_read_while_off() {
    let world = World::new();
    let ids = ["vms/lab/lab.vdi", "vms/lab/data.vdi"].map(|image| world.id(image));
    for kind in ["Writethrough", "Shareable"] {
        world.write_settings(
            "vms/lab/lab.vbox",
            LAB,
            NAME,
            &[("lab.vdi", &ids[0], "Immutable"), ("data.vdi", &ids[1], kind)],
        );
        world.state("running");
        let report =
            world.back_up(0, &["vbox:", "--include", "sda", "--include", "sdb", "--machine", kind])["report"].clone();
        let left_out = &report["machines"][0]["left_out"];
        assert!(
            left_out[0]["name"] == "sdb" && left_out.to_string().contains("leaves such a disk alone"),
            "{report}"
        );
        assert_eq!(world.refused(1, &["vbox:", "--include", "sdb"]).0, "refused");
        world.state("poweroff");
        world.back_up(0, &["vbox:", "--include", "sdb", "--machine", kind]);
        world.assert_holds(kind, &[("sdb", &world.disks[1])]);
    }
    // Shared disks are left out unless they are named.
    let report = world.back_up(0, &["vbox:"])["report"].clone();
    assert!(
        report["machines"][0]["left_out"]
            .to_string()
            .contains("other machines can write to it"),
        "{report}"
    );
    assert_eq!(world.refused(1, &["vbox:", "--include", "vdz"]).0, "not-found");
}

/// The memory of a saved machine is in a file, which belongs to the current content of its disks.
#[test]
fn a_saved_machine_is_stored_with_its_memory() {
    let world = World::new();
    world.state("saved");
    let text = world
        .settings()
        .replace(" lastStateChange", " stateFile=\"Snapshots/x.sav\" lastStateChange");
    world.rig.write("vms/lab/lab.vbox", text.as_bytes());
    world.rig.write("vms/lab/Snapshots/x.sav", &noise(100_000, 5));
    let report = world.back_up(0, &["vbox:"])["report"].clone();
    let machine = &report["machines"][0];
    assert_eq!(
        (&machine["consistency"], &machine["memory_bytes"]),
        (&"memory".into(), &100_000.into())
    );
    world.assert_holds(NAME, &[("saved-state.sav", &noise(100_000, 5))]);
    let report = world.json(0, &["export", NAME, "back", "--format", "vbox"])["report"].clone();
    assert!(report["dropped"].to_string().contains("adoptstate"), "{report}");
    let written = String::from_utf8(world.rig.read("back/lab 'one' _x_.vbox")).unwrap();
    assert!(!written.contains("stateFile"), "{written}");
}

/// Machines of other hypervisors can be exported to VirtualBox.
#[test]
fn a_machine_of_another_hypervisor_is_exported_to_virtualbox() {
    let world = World::new();
    world.rig.ok(&["backup", "--machine", "web1", "vda=a.raw", "vdb=b.raw"]);
    // Only the disks are known.
    let report = world.json(3, &["export", "web1", "out", "--format", "vbox", "--register"])["report"].clone();
    assert_eq!(report["is_registered"], true, "{report}");
    assert_eq!(world.rig.names("out"), ["web1-vda.vdi", "web1-vdb.vdi", "web1.vbox"]);
    world.back_up(0, &["vbox:web1", "--machine", "back"]);
    world.assert_holds("back", &[("sda", &world.disks[0]), ("sdb", &world.disks[1])]);
    for words in [
        &["export", "web1", "x.xva", "--register"][..],
        &["export", "web1", "-", "--format", "vbox"],
        &["export", "web1", "x", "--format", "vbox", "--gzip"],
    ] {
        world.run(2, words);
    }
}

/// Images in VMware's format, whose parents VirtualBox finds by UUID only: the image of the disk is in another folder
/// than its base.
#[test]
fn a_chain_of_vmdks_is_read() {
    let world = World::new();
    world.rig.ok(&["image", "convert", "a.raw", "vms/lab/base.vmdk"]);
    let base = world.id("vms/lab/base.vmdk");
    world.rig.ok(&[
        "image",
        "create",
        "vms/lab/Snapshots/top.vmdk",
        "--parent",
        "vms/lab/base.vmdk",
        "--format",
        "vmdk",
    ]);
    let mut bytes = world.rig.read("vms/lab/Snapshots/top.vmdk");
    for (key, new) in [
        ("parentCID=", "parentCID=ffffffff"),
        ("parentFileNameHint", "#arentFileNameHint"),
    ] {
        let at = bytes
            .windows(key.len())
            .position(|window| window == key.as_bytes())
            .unwrap();
        bytes[at..at + new.len()].copy_from_slice(new.as_bytes());
    }
    world.rig.write("vms/lab/Snapshots/top.vmdk", &bytes);
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let (_, rest) = text.split_once("ddb.uuid.image=\"").unwrap();
    let top = &rest[..36];
    world.write_settings("vms/lab/lab.vbox", LAB, "lab", &[("base.vmdk", &base, "")]);
    let settings = world
        .settings()
        .replace("format=\"VDI\" type=\"Normal\"/>", &format!(
            "format=\"VMDK\" type=\"Normal\"><HardDisk uuid=\"{{{top}}}\" location=\"Snapshots/top.vmdk\" format=\"VMDK\"/></HardDisk>"
        ))
        .replace(&format!("<Image uuid=\"{{{base}}}\"/>"), &format!("<Image uuid=\"{{{top}}}\"/>"));
    world.rig.write("vms/lab/lab.vbox", settings.as_bytes());
    world.back_up(0, &["vbox:lab"]);
    world.assert_holds("lab", &[("sda", &world.disks[0])]);
    let shown = world.rig.report(&["show", "lab:sda"]);
    assert_eq!(shown["snapshot"]["disks"][0]["notes"]["format"], "vmdk");
}

/// By default VirtualBox has a CD drive on IDE before the disks: each disk keeps its name and its position.
#[test]
fn disks_beside_ide_keep_their_names_and_positions() {
    let world = World::new();
    let drive = "<StorageController name=\"IDE\" type=\"PIIX4\" PortCount=\"2\" Bootable=\"true\">\
                 <AttachedDevice passthrough=\"false\" type=\"DVD\" hotpluggable=\"false\" port=\"0\" device=\"0\"/></StorageController>";
    let settings = world.settings();
    let with_drive = settings.replace("<StorageControllers>", &format!("<StorageControllers>{drive}"));
    // A disk on IDE with UEFI firmware, whose board has no IDE.
    let with_disk = settings.replace("name=\"SATA\" type=\"AHCI\"", "name=\"IDE\" type=\"PIIX4\"");
    for (number, text) in [with_drive, with_disk].iter().enumerate() {
        world.rig.write("vms/lab/lab.vbox", text.as_bytes());
        let name = format!("lab{number}");
        let report = world.back_up(0, &["vbox:", "--machine", &name])["report"].clone();
        let disks = report["machines"][0]["disks"].as_array().unwrap();
        let xml = stdout(&world.rig.run(&["restore", &format!("{name}:domain.xml"), "-"]));
        for (disk, bytes) in disks.iter().zip(&world.disks) {
            let target = disk["name"].as_str().or(disk.as_str()).unwrap();
            world.assert_holds(&name, &[(target, bytes)]);
            let (before, _) = xml.split_once(&format!("<target dev='{target}'")).unwrap();
            assert!(
                before.rsplit("<disk ").next().unwrap().contains("device='disk'"),
                "{target}: {xml}"
            );
        }
        for format in ["ova", "xva", "vma"] {
            let file = format!("{name}.{format}");
            world.run(0, &["export", &name, &file]);
            let folder = format!("{name}-{format}");
            world.rig.run(&["import", &file, "--to", &folder, "--format", "raw"]);
            let images: Vec<String> = world
                .rig
                .names(&folder)
                .into_iter()
                .filter(|name| name.contains(".raw"))
                .collect();
            assert_eq!(images.len(), 2, "{images:?}");
            for (image, bytes) in images.iter().zip(&world.disks) {
                assert!(
                    world.rig.read(&format!("{folder}/{image}")) == *bytes,
                    "{folder}/{image}"
                );
            }
        }
    }
}

/// Tape archives allow names of 100 bytes, and names of machines may be longer.
#[test]
fn a_machine_with_a_long_name_is_exported_to_an_ova() {
    let world = World::new();
    world.back_up(0, &["vbox:"]);
    let long = "ä".repeat(60);
    world.run(0, &["export", NAME, "long.ova", "--name", &long]);
    world.rig.ok(&["archive", "check", "long.ova"]);
    world.rig.ok(&["import", "long.ova", "--to", "out", "--format", "raw"]);
    assert!(world.rig.read("out/sda.raw") == world.disks[0] && world.rig.read("out/sdb.raw") == world.disks[1]);
}

#[test]
fn a_damaged_registry_does_not_hide_other_machines() {
    if Path::new("/run/libvirt/libvirt-sock").exists() {
        return;
    }
    let world = World::new();
    world.rig.write("home/VirtualBox.xml", b"damaged");
    let output = world.run(3, &["machines"]);
    assert!(stderr(&output).contains("the machines of VirtualBox are not listed"));
    world.run(5, &["machines", "vbox:"]);
    // The doctor examines everything else.
    let output = world.run(3, &["doctor", "--json"]);
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = document["report"]["findings"].as_array().unwrap();
    let found = findings
        .iter()
        .find(|finding| finding["machine"] == "VirtualBox")
        .unwrap();
    assert!(
        found["what"].as_str().unwrap().contains("cannot be examined"),
        "{document}"
    );
    world.run(5, &["doctor", "vbox:"]);
}
