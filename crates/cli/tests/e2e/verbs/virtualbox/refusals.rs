//! Machines and settings that are ambiguous, missing or untrusted are refused.

use super::{LAB, NAME, World, text_of};
use crate::host::system;
use crate::rig::Rig;

#[test]
fn unknown_and_unreadable_machines_are_reported() {
    let world = World::new();
    let other = "0ac5b1ed-af7d-48ba-85e6-3ba7091d2d35";
    let id = world.id("vms/lab/lab.vdi");
    world.write_settings("vms/two/two.vbox", other, NAME, &[("/nowhere.vdi", &id, "")]);
    let gone = "d17e3814-8a95-4d83-a7fc-13e6e3cdb10c";
    world.register(&[
        (LAB, "vms/lab/lab.vbox"),
        (other, "vms/two/two.vbox"),
        (gone, "vms/gone/gone.vbox"),
    ]);
    let (kind, message) = world.refused(1, &[&format!("vbox:{NAME}")]);
    assert!(
        kind == "ambiguous" && message.contains(LAB) && message.contains(other),
        "{message}"
    );
    assert_eq!(world.refused(1, &["vbox:missing"]).0, "not-found");
    assert_eq!(world.refused(1, &["vbox:missing*"]).0, "not-found");
    let (kind, message) = world.refused(1, &[&format!("vbox:{gone}")]);
    assert!(kind == "io" && message.contains("gone.vbox"), "{message}");
    // A backup of all machines reports those that fail, and backs up the others.
    world.write_settings("vms/two/two.vbox", other, "lab three", &[("/nowhere.vdi", &id, "")]);
    let document = world.back_up(1, &["vbox:"]);
    assert_eq!(
        document["report"]["machines"].as_array().unwrap().len(),
        1,
        "{document}"
    );
    assert_eq!(document["report"]["failed"].as_array().unwrap().len(), 1, "{document}");
    assert!(document["warnings"].to_string().contains(gone), "{document}");
    let document = world.back_up(3, &["vbox:", "--exclude-machine", "lab*"]);
    assert_eq!(document["report"]["left_out_machines"].as_array().unwrap().len(), 2);
    // Options that VirtualBox does not support.
    for option in [["--quiesce", "require"], ["--method", "pause"], ["--max-latency", "20"]] {
        let words = [&["vbox:"], &option[..]].concat();
        assert_eq!(world.refused(2, &words).0, "usage", "{option:?}");
    }
    world.run(2, &["snapshot", "vbox:lab"]);
    let empty = Rig::new();
    assert_eq!(empty.error(1, &["backup", "vbox:"]).0, "not-found");
}

/// Settings name files, which root can open: so root only reads settings that belong to root.
#[test]
fn root_refuses_settings_of_another_user() {
    let world = World::new();
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let settings = world.rig.path("vms/lab/lab.vbox");
    let registry = world.rig.path("home/VirtualBox.xml");
    let by_name = format!("vbox:{NAME}");
    let by_path = format!("vbox:{}", settings.display());
    for (path, word) in [(&settings, &by_path), (&registry, &by_name)] {
        std::os::unix::fs::chown(path, Some(65_534), None).unwrap();
        let (kind, message) = world.refused(1, &[word]);
        assert!(
            kind == "refused" && message.contains("belongs to user 65534"),
            "{word}: {message}"
        );
        std::os::unix::fs::chown(path, Some(0), None).unwrap();
    }
    world.back_up(0, &[&format!("vbox:{NAME}")]);
}

#[test]
fn settings_with_foreign_files_or_identities_are_refused() {
    let world = World::new();
    let id = world.id("vms/lab/lab.vdi");
    let lab = |images: &[(&str, &str, &str)]| world.write_settings("vms/lab/lab.vbox", LAB, "lab", images);
    std::fs::create_dir(world.rig.path("elsewhere")).unwrap();
    world.rig.ok(&["image", "convert", "a.raw", "elsewhere/secret.vdi"]);
    let secret = world.id("elsewhere/secret.vdi");
    let outside = world.rig.path("elsewhere/secret.vdi").display().to_string();
    std::os::unix::fs::symlink(&outside, world.rig.path("vms/lab/link.vdi")).unwrap();
    for location in [
        "../../elsewhere/secret.vdi",
        &outside,
        "link.vdi",
        "../../nowhere/x.vdi",
        "/etc/passwd",
    ] {
        lab(&[(location, &secret, "")]);
        let (kind, message) = world.refused(1, &["vbox:lab"]);
        assert!(
            kind == "refused" && message.contains("--allow"),
            "{location}: {message}"
        );
    }
    // --allow trusts the file, or its folder.
    for allowed in ["elsewhere", "elsewhere/secret.vdi"] {
        lab(&[("../../elsewhere/secret.vdi", &secret, "")]);
        world.back_up(0, &["vbox:lab", "--allow", allowed]);
    }
    world.assert_holds("lab", &[("sda", &world.disks[0])]);
    let other = "11111111-2222-4333-8444-555555555555";
    // The image has another UUID than the settings.
    lab(&[("lab.vdi", other, "")]);
    let (kind, message) = world.refused(1, &["vbox:lab"]);
    assert!(kind == "refused" && message.contains(&id), "{message}");
    // Two files with one UUID.
    std::fs::copy(world.rig.path("vms/lab/lab.vdi"), world.rig.path("vms/lab/copy.vdi")).unwrap();
    lab(&[("lab.vdi", &id, ""), ("copy.vdi", &id, "")]);
    let (kind, message) = world.refused(1, &["vbox:lab"]);
    assert!(kind == "refused" && message.contains("two images"), "{message}");
    // Unsupported formats, encrypted images, and incomplete settings.
    lab(&[("lab.vdi", &id, "")]);
    let text = world.settings();
    for (from, to, kind, word) in [
        ("format=\"VDI\"", "format=\"iSCSI\"", "unsupported", "iSCSI"),
        ("format=\"VDI\"", "format=\"QCOW\"", "unsupported", "QCOW"),
        (
            "type=\"Normal\"/>",
            "type=\"Normal\"><Property name=\"CRYPT/KeyStore\" value=\"x\"/></HardDisk>",
            "refused",
            "encrypted",
        ),
        ("<HardDisk ", "<Other ", "refused", "nothing says where"),
        ("RAMSize=\"512\"", "RAMSize=\"x\"", "damage", "memory"),
        ("</Machine>", "", "damage", "lab.vbox"),
    ] {
        world.rig.write("vms/lab/lab.vbox", text.replace(from, to).as_bytes());
        let code = if kind == "damage" { 5 } else { 1 };
        let (found, message) = world.refused(code, &["vbox:vms/lab/lab.vbox"]);
        assert!(found == kind && message.contains(word), "{to}: {found}: {message}");
    }
}

/// Unreadable files cause a warning, and the backup does not wait for them.
#[test]
fn missing_files_and_special_files_in_settings_are_warned_about() {
    let world = World::new();
    let settings = world.settings();
    // The file with the memory is missing.
    world.state("saved");
    let text = settings.replace(" lastStateChange", " stateFile=\"Snapshots/gone.sav\" lastStateChange");
    world.rig.write("vms/lab/lab.vbox", text.as_bytes());
    let document = world.back_up(3, &["vbox:"]);
    assert_eq!(document["report"]["machines"][0]["consistency"], "crash", "{document}");
    assert!(document.to_string().contains("gone.sav"), "{document}");
    world.state("poweroff");
    // A controller of an unknown type.
    let text = settings.replace(
        "</StorageControllers>",
        "<StorageController name=\"X\" type=\"Newest\"><AttachedDevice type=\"HardDisk\" port=\"0\" device=\"0\"><Image \
         uuid=\"{5a6b2a2c-3f64-4d43-9d5e-3a7b57d1b1a2}\"/></AttachedDevice></StorageController></StorageControllers>",
    );
    world.rig.write("vms/lab/lab.vbox", text.as_bytes());
    let document = world.back_up(3, &["vbox:"]);
    assert!(document.to_string().contains("Newest"), "{document}");
    world.rig.write("vms/lab/lab.vbox", settings.as_bytes());
    // A pipe without a writer.
    std::fs::remove_file(world.rig.path("vms/lab/lab.nvram")).unwrap();
    system("/usr/bin/mkfifo", &[text_of(&world, "vms/lab/lab.nvram").as_str()]).unwrap();
    let document = world.back_up(1, &["vbox:"]);
    assert!(document.to_string().contains("not a regular file"), "{document}");
}

/// Otherwise they would have one history, each a parent of the other.
#[test]
fn machines_with_the_same_name_are_refused_together() {
    const TWIN: &str = "9f6d1b8e-1f2a-4c3d-8e4f-5a6b7c8d9eaa";
    let world = World::new();
    std::fs::create_dir_all(world.rig.path("vms/twin")).unwrap();
    world.rig.ok(&["image", "convert", "b.raw", "vms/twin/data.vdi"]);
    let id = world.id("vms/twin/data.vdi");
    world.write_settings("vms/twin/twin.vbox", TWIN, NAME, &[("data.vdi", &id, "")]);
    world.register(&[(LAB, "vms/lab/lab.vbox"), (TWIN, "vms/twin/twin.vbox")]);
    let document = world.back_up(1, &["vbox:"]);
    assert!(document.to_string().contains(TWIN), "{document}");
    assert_eq!(world.rig.snapshot_count(), 0);
    world.back_up(0, &[&format!("vbox:{TWIN}"), "--machine", "twin"]);
    world.assert_holds("twin", &[("sda", &world.disks[1])]);
}

/// Otherwise both machines would have one history, and `restore` would return the data of the other one.
#[test]
fn a_machine_does_not_continue_the_history_of_a_namesake() {
    const TWIN: &str = "1f6d1b8e-1f2a-4c3d-8e4f-5a6b7c8d9e0f";
    let world = World::new();
    std::fs::create_dir_all(world.rig.path("vms/two/Snapshots")).unwrap();
    world.rig.ok(&["image", "convert", "b.raw", "vms/two/two.vdi"]);
    let [first, second] = ["vms/lab/lab.vdi", "vms/two/two.vdi"].map(|image| world.id(image));
    world.write_settings("vms/lab/lab.vbox", LAB, "web", &[("lab.vdi", &first, "")]);
    world.write_settings("vms/two/two.vbox", TWIN, "web", &[("two.vdi", &second, "")]);
    world.register(&[(LAB, "vms/lab/lab.vbox"), (TWIN, "vms/two/two.vbox")]);
    let [lab, twin] = [LAB, TWIN].map(|uuid| format!("vbox:{uuid}"));
    world.back_up(0, &[&lab]);
    let (kind, message) = world.refused(1, &[&twin]);
    assert!(kind == "exists" && message.contains(LAB), "{message}");
    world.back_up(0, &[&twin, "--machine", "web2"]);
    world.back_up(0, &[&lab]);
    // If the first one is gone, the second one may be its replacement: that needs a statement.
    world.register(&[(TWIN, "vms/two/two.vbox")]);
    assert_eq!(world.refused(1, &[&twin]).0, "exists");
    world.back_up(0, &[&twin, "--same-machine"]);
    world.back_up(0, &[&twin]);
}
