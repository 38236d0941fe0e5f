//! A restored machine starts: host resources that it needs exist, are created, or are reported as missing before the
//! first byte.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use super::{World, at};
use holdfast_test_kit::libvirt::LibvirtLab;

/// A machine whose configuration has additional devices.
fn world_with(devices: impl FnOnce(&LibvirtLab) -> String) -> World {
    World::defined(LibvirtLab::new(), |lab| {
        lab.define("web1", &["qcow2", "raw"]);
        let xml = lab.virsh(&["dumpxml", "web1"]);
        lab.define_xml(&xml.replace("</devices>", &format!("{}</devices>", devices(lab))));
    })
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o7777
}

/// A machine with logs and a socket in folders that are named after it.
fn world_with_logs() -> World {
    world_with(|lab| {
        for folder in ["logs/web1", "sockets/web1"] {
            std::fs::create_dir_all(lab.path(folder)).unwrap();
        }
        std::fs::set_permissions(lab.path("logs/web1"), std::fs::Permissions::from_mode(0o2770)).unwrap();
        let at = |name: &str| lab.path(name).display().to_string();
        format!(
            "<serial type='file'><source path='{}'/><log file='{}'/></serial>\
             <channel type='unix'><source mode='bind' path='{}'/><target type='virtio' name='x'/></channel>",
            at("logs/web1/console.log"),
            at("logs/web1/serial.log"),
            at("sockets/web1/channel")
        )
    })
}

#[test]
fn folders_for_logs_and_sockets_are_created() {
    let world = world_with_logs();
    world.back_up();
    let report = world.restore(&["--dry-run"]);
    let notes = report["notes"].to_string();
    for folder in ["logs/web1-restored", "sockets/web1-restored"] {
        let path = world.lab.path(folder);
        assert!(
            notes.contains(path.to_str().unwrap()) && notes.contains("is made"),
            "{notes}"
        );
        assert!(!path.exists(), "a dry run creates no folder");
    }
    let report = world.restore(&["--start"]);
    assert_eq!(report["target_machine"]["is_started"], true, "{report}");
    assert!(world.lab.path("logs/web1-restored/console.log").exists());
    assert_eq!(
        mode(&world.lab.path("logs/web1-restored")),
        0o2770,
        "the same mode as the folder of the original"
    );

    let report = world.restore(&["--live", "--name", "quick"]);
    assert_eq!(report["target_machine"]["is_started"], true, "{report}");
    assert!(world.lab.path("logs/quick").exists());

    // On a host without these folders.
    for name in ["web1", "web1-restored", "quick"] {
        world.lab.virsh(&["destroy", name]);
    }
    world.lab.virsh(&["undefine", "web1"]);
    for folder in ["logs", "sockets"] {
        std::fs::remove_dir_all(world.lab.path(folder)).unwrap();
    }
    let report = world.restore(&["--keep-identity", "--start"]);
    assert_eq!(report["target_machine"]["is_started"], true, "{report}");

    // In-place restores also create folders, which may have been lost with the images.
    world.lab.virsh(&["destroy", "web1"]);
    std::fs::remove_dir_all(world.lab.path("logs")).unwrap();
    let report = world.restore(&["--in-place", "--start"]);
    assert_eq!(report["target_machine"]["is_started"], true, "{report}");
}

#[test]
fn missing_devices_are_reported_before_the_first_byte() {
    let world = world_with(|lab| {
        let pipe = lab.path("pipe").display().to_string();
        holdfast_test_kit::run("mkfifo", &[&pipe]);
        format!(
            "<interface type='user'><mac address='52:54:00:00:00:01'/></interface><serial type='pipe'><source path='{pipe}'/></serial>"
        )
    });
    world.back_up();
    world.lab.virsh(&["destroy", "web1"]);
    std::fs::remove_file(world.lab.path("pipe")).unwrap();
    let before = world.files();
    for words in [&["--start"][..], &["--live"], &["--start", "--dry-run"]] {
        let (kind, text) = world.refused(1, words);
        assert!(
            kind == "refused" && text.contains("/pipe (pipe) is not there"),
            "{kind}: {text}"
        );
        assert!(text.contains("without --start"), "{text}");
    }
    assert_eq!((world.files(), world.machines()), (before, vec!["web1".to_owned()]));
    // Without --start it is restored, with a warning.
    let uri = world.lab.uri();
    let words = ["restore", "web1", "--to-machine"];
    for words in [[&words[..], &["--dry-run"]].concat(), words.to_vec()] {
        let document = world.rig.json(3, &at(&uri, &words));
        assert!(
            document["warnings"]
                .to_string()
                .contains("would not start on this host"),
            "{document}"
        );
    }
    world.assert_holds("web1-restored");
    let (kind, text) = world.refused(1, &["--in-place", "--start"]);
    assert!(kind == "refused" && text.contains("(pipe)"), "{kind}: {text}");
}

#[test]
fn missing_networks_bridges_and_drives_are_reported() {
    let world = World::new();
    world.lab.virsh(&["destroy", "web1"]);
    let iso = world.lab.path("a.iso");
    std::fs::File::create(&iso).unwrap().set_len(1 << 20).unwrap();
    let xml = world.configuration("web1");
    let more = "<interface type='network'><source network='nowhere'/></interface>\
                <interface type='bridge'><source bridge='no-bridge'/></interface></devices>";
    world.lab.define_xml(&xml.replace("</devices>", more));
    world.lab.virsh(&[
        "change-media",
        "web1",
        "sda",
        iso.to_str().unwrap(),
        "--insert",
        "--config",
    ]);
    let uri = world.lab.uri();
    world.rig.report(&at(&uri, &["backup", "web1"]));
    std::fs::remove_file(&iso).unwrap();
    let (_, text) = world.refused(1, &["--start"]);
    assert!(
        text.contains("no network nowhere") && text.contains("no network device no-bridge"),
        "{text}"
    );
    assert!(
        !text.contains("a.iso"),
        "the drive of a new machine becomes empty: {text}"
    );
    let (_, text) = world.refused(1, &["--start", "--in-place"]);
    assert!(text.contains("a.iso") && text.contains("change-media"), "{text}");
}

/// The steps of docs/exchange.md, on a host without KVM: the output of every step names the next one.
#[test]
fn an_imported_archive_becomes_a_running_machine() {
    let world = World::new();
    world.back_up();
    world.rig.report(&["export", "web1", "web1.ova"]);
    let pool = world.lab.path("images");
    std::fs::create_dir(&pool).unwrap();
    world
        .lab
        .virsh(&["pool-define-as", "default", "dir", "--target", pool.to_str().unwrap()]);
    world.lab.virsh(&["pool-start", "default"]);
    world.rig.run(&["import", "web1.ova", "--machine", "o2"]);
    let uri = world.lab.uri();
    let words = ["restore", "o2", "--to-machine", "--start"];
    let (kind, text) = world.rig.error(1, &at(&uri, &words));
    assert!(
        kind == "unsupported" && text.contains("--domain-type qemu"),
        "{kind}: {text}"
    );
    assert_eq!(world.rig.names(pool.to_str().unwrap()).len(), 0);
    let words = [&words[..], &["--domain-type", "qemu"]].concat();
    let output = world.rig.run(&at(&uri, &words));
    let message = crate::program::stderr(&output) + &crate::program::stdout(&output);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{message}");
    assert_eq!(
        world.lab.virsh(&["domstate", "o2-restored"]).trim(),
        "running",
        "{message}"
    );
    assert!(world.image("o2-restored", 0).starts_with(&pool), "{message}");
    world.assert_holds("o2-restored");
}

/// A host of another distribution has its QEMU in another place.
#[test]
fn a_qemu_at_another_path_is_found() {
    let world = World::new();
    world.lab.virsh(&["destroy", "web1"]);
    let xml = world.configuration("web1");
    let own = world.lab.path("qemu");
    let emulator = xml
        .split("<emulator>")
        .nth(1)
        .unwrap()
        .split("</emulator>")
        .next()
        .unwrap();
    std::os::unix::fs::symlink(emulator, &own).unwrap();
    world.lab.define_xml(&xml.replace(emulator, own.to_str().unwrap()));
    let uri = world.lab.uri();
    world.rig.report(&at(&uri, &["backup", "web1"]));
    std::fs::remove_file(&own).unwrap();
    let report = world.restore(&["--start"]);
    assert_eq!(report["target_machine"]["is_started"], true, "{report}");
    assert!(
        report["notes"].to_string().contains("libvirt's default QEMU is used"),
        "{report}"
    );
}
