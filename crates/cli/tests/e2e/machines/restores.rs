//! Snapshots of machines are restored to machines: new ones, the same ones, and in place.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use holdfast_host::domain_xml::DomainXml;
use holdfast_host::{DiskSource, Hypervisor as _};
use holdfast_image::{BitmapState, Format, OpenOptions};
use serde_json::Value;

use super::{World, at};
use crate::rig::noise;

impl World {
    /// The configuration of a machine in libvirt.
    pub(super) fn configuration(&self, name: &str) -> String {
        let machine = self.lab.connect().machine(name).unwrap();
        String::from_utf8(machine.configuration().unwrap().swap_remove(0).1).unwrap()
    }

    /// Restores to a machine; returns the report.
    pub(super) fn restore(&self, words: &[&str]) -> Value {
        let uri = self.lab.uri();
        self.rig
            .report(&at(&uri, &[&["restore", "web1", "--to-machine"], words].concat()))
    }

    /// Asserts that a restore to a machine fails; returns the kind of the error and its whole text.
    pub(super) fn refused(&self, code: i32, words: &[&str]) -> (String, String) {
        let uri = self.lab.uri();
        self.rig
            .error(code, &at(&uri, &[&["restore", "web1", "--to-machine"], words].concat()))
    }

    pub(super) fn machines(&self) -> Vec<String> {
        let machines = self.lab.connect().machines().unwrap();
        machines.into_iter().map(|machine| machine.name).collect()
    }

    /// Files in the folder of the machines.
    pub(super) fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.lab.folder.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.filter(|name| !name.starts_with("libvirt")).collect();
        names.sort();
        names
    }

    /// Asserts that the disks of a machine have their expected content.
    pub(super) fn assert_holds(&self, name: &str) {
        let xml = DomainXml::parse(&self.configuration(name)).unwrap();
        for (disk, bytes) in xml.disks.iter().zip(&self.disks) {
            let content = content(disk);
            let differs = content.iter().zip(bytes).position(|(is, wanted)| is != wanted);
            assert!(
                content == *bytes,
                "{name}: {}: differs at {differs:?}, {} bytes of {}",
                disk.target,
                content.len(),
                bytes.len()
            );
        }
    }

    /// The image of a machine's disk.
    pub(super) fn image(&self, name: &str, disk: usize) -> PathBuf {
        path_of(&DomainXml::parse(&self.configuration(name)).unwrap().disks[disk].source)
    }
}

fn path_of(source: &DiskSource) -> PathBuf {
    match source {
        DiskSource::File(path) | DiskSource::Device(path) => path.clone(),
        other => panic!("{other:?}"),
    }
}

fn content(disk: &holdfast_host::MachineDisk) -> Vec<u8> {
    let options = OpenOptions {
        format: Format::from_name(disk.format.as_deref().unwrap()),
        ..OpenOptions::default()
    };
    let device = holdfast_image::open(&path_of(&disk.source), &options).unwrap().device();
    let mut bytes = vec![0; usize::try_from(device.size_bytes()).unwrap()];
    device.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// Both machines run at the same time, and later writes of the first one are not visible to the second.
#[test]
fn a_new_machine_runs_beside_the_original() {
    let mut world = World::new();
    world.write(0, 7, 1 << 20, 65_536);
    world.back_up();
    let instant = world.disks.clone();
    world.write(0, 8, 2 << 20, 65_536);
    let later = std::mem::replace(&mut world.disks, instant);
    let report = world.restore(&["--start"]);
    assert_eq!(report["target_machine"]["name"], "web1-restored");
    assert_eq!(
        (
            &report["target_machine"]["is_new"],
            &report["target_machine"]["is_started"]
        ),
        (&true.into(), &true.into())
    );
    for name in ["web1", "web1-restored"] {
        assert_eq!(world.lab.virsh(&["domstate", name]).trim(), "running");
    }
    world.assert_holds("web1-restored");
    assert_eq!(
        world.files(),
        ["domain.xml", "web1-a", "web1-b", "web1-restored-a", "web1-restored-b"]
    );
    let [old, new] = ["web1", "web1-restored"].map(|name| DomainXml::parse(&world.configuration(name)).unwrap());
    assert!(old.uuid != new.uuid && old.disks[0].source != new.disks[0].source);
    assert_eq!(new.uuid.as_deref(), report["target_machine"]["uuid"].as_str());
    assert_eq!(new.disks[0].format.as_deref(), Some("qcow2"));
    assert_eq!(new.disks[2].source, DiskSource::Empty);
    world.disks = later;
    world.assert_holds("web1");
    world.assert_runs_and_is_clean();

    // Another machine, with another format and folder.
    std::fs::create_dir(world.lab.path("store")).unwrap();
    let store = world.lab.path("store");
    let report = world.restore(&["--storage", store.to_str().unwrap(), "--format", "raw"]);
    assert_eq!(report["target_machine"]["name"], "web1-restored-2");
    assert_eq!(report["target_machine"]["is_started"], false);
    assert_eq!(report["files"][0]["format"], "raw");
    assert!(world.image("web1-restored-2", 0).starts_with(&store));
}

#[test]
fn a_missing_machine_is_restored_with_its_identity() {
    let mut world = World::new();
    world.write(1, 9, 4096, 4096);
    world.back_up();
    let before = world.configuration("web1");
    let (kind, text) = world.refused(1, &["--keep-identity"]);
    assert!(kind == "exists" && text.contains("--in-place"), "{kind}: {text}");
    world.lab.virsh(&["destroy", "web1"]);
    world.lab.virsh(&["undefine", "web1"]);
    let images = ["web1-a", "web1-b"].map(|name| world.lab.path(name));
    for image in &images {
        std::fs::remove_file(image).unwrap();
    }
    world.restore(&["--keep-identity", "--start"]);
    assert_eq!(world.configuration("web1"), before);
    world.assert_holds("web1");
    assert!(images.iter().all(|image| image.exists()));
    assert_eq!(world.lab.virsh(&["domstate", "web1"]).trim(), "running");
}

/// Only differing ranges are written, and the next backup does not rely on a bitmap that lacks these writes.
#[test]
fn an_in_place_restore_writes_only_differences() {
    let mut world = World::new();
    world.write(0, 7, 1 << 20, 65_536);
    world.back_up();
    world.write(0, 20, 3 << 20, 65_536);
    world.back_up();
    let second = world.disks.clone();
    world.write(0, 21, 0, 65_536);
    world.write(1, 22, 5 << 20, 8192);
    world.disks = second;
    let world = world;
    let before = world.configuration("web1");
    let (kind, text) = world.refused(1, &["--in-place"]);
    assert!(kind == "refused" && text.contains("running"), "{kind}: {text}");
    world.lab.virsh(&["destroy", "web1"]);
    let bitmaps = || {
        let image = holdfast_image::open(&world.image("web1", 0), &OpenOptions::default()).unwrap();
        let bitmaps = image.layers()[0].qcow2.as_ref().unwrap().bitmaps.clone();
        bitmaps.iter().map(|bitmap| bitmap.state).collect::<Vec<_>>()
    };
    assert_eq!(bitmaps(), [BitmapState::Valid]);
    world.restore(&["--in-place", "--dry-run"]);
    assert_eq!(bitmaps(), [BitmapState::Valid]);
    let report = world.restore(&["--in-place"]);
    assert_eq!(bitmaps(), [BitmapState::Stale], "the bitmap lacks the restored ranges");
    world.lab.virsh(&["start", "web1"]);
    assert_eq!(report["target_machine"]["is_new"], false);
    assert!(report["configuration_diff"].is_null());
    let written: Vec<u64> = (0..2)
        .map(|disk| report["disks"][disk]["written_bytes"].as_u64().unwrap())
        .collect();
    assert_eq!(written, [65_536, 8192]);
    world.assert_holds("web1");
    assert_eq!(world.configuration("web1"), before);
    let report = world.back_up();
    for disk in 0..2 {
        let reason = report["disks"][disk]["reason"].as_str().unwrap();
        assert!(reason.contains("bitmap"), "{reason}");
    }
    world.assert_snapshot_is_right("after the restore");
}

/// Broken and missing images are the reason for restoring: they are created anew, and existing files are kept.
#[test]
fn an_in_place_restore_replaces_broken_and_missing_images() {
    let mut world = World::new();
    world.write(0, 7, 1 << 20, 65_536);
    world.back_up();
    world.lab.virsh(&["destroy", "web1"]);
    let (vda, vdb) = (world.image("web1", 0), world.image("web1", 1));
    let kept = world.lab.path("web1-a.broken");
    let file = File::options().write(true).open(&vda).unwrap();
    file.write_all_at(&noise(512, 1), 0).unwrap();
    std::fs::set_permissions(&vda, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
    let broken = std::fs::read(&vda).unwrap();
    std::fs::remove_file(&vdb).unwrap();
    let (before, configuration) = (world.files(), world.configuration("web1"));
    let uri = world.lab.uri();
    let words = ["restore", "web1", "--to-machine", "--in-place"];
    let shown = world.rig.json(3, &at(&uri, &[&words[..], &["--dry-run"]].concat()));
    let files = &shown["report"]["files"];
    assert_eq!(
        (&files[0]["way"], &files[1]["way"]),
        (&"set-aside".into(), &"new".into())
    );
    assert_eq!(files[0]["kept_at"], kept.to_str().unwrap());
    assert!(shown["warnings"].to_string().contains("web1-a.broken"), "{shown}");
    assert!(shown["report"]["notes"].to_string().contains("is missing"), "{shown}");
    assert_eq!(world.files(), before, "a dry run changes nothing");

    world.rig.json(3, &at(&uri, &words));
    world.assert_holds("web1");
    assert_eq!(world.configuration("web1"), configuration);
    assert_eq!(world.files(), ["domain.xml", "web1-a", "web1-a.broken", "web1-b"]);
    assert!(std::fs::read(&kept).unwrap() == broken);
    let mode = |path: &Path| std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions()) & 0o777;
    assert_eq!(mode(&vda), 0o640, "the new image has the mode of the old one");
    world.lab.virsh(&["start", "web1"]);
    world.lab.virsh(&["destroy", "web1"]);

    // A truncated raw image, and a missing base.
    File::options()
        .write(true)
        .open(&vdb)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    std::fs::remove_file(&vda).unwrap();
    let base = world.lab.path("base.raw");
    File::create(&base).unwrap().set_len(8 << 20).unwrap();
    let overlay = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b"];
    holdfast_test_kit::run(
        "qemu-img",
        &[&overlay[..], &[base.to_str().unwrap(), vda.to_str().unwrap()]].concat(),
    );
    std::fs::remove_file(&base).unwrap();
    world.rig.json(3, &at(&uri, &words));
    world.assert_holds("web1");
    let names = [
        "domain.xml",
        "web1-a",
        "web1-a.broken",
        "web1-a.broken-2",
        "web1-b",
        "web1-b.broken",
    ];
    assert_eq!(world.files(), names);

    // If everything is in order, no old files are kept.
    world.restore(&["--in-place"]);
    assert_eq!(world.files(), names);
}

#[test]
fn an_in_place_restore_restores_the_configuration_on_request() {
    let world = World::new();
    world.back_up();
    let before = world.configuration("web1");
    world.lab.virsh(&["destroy", "web1"]);
    world.lab.virsh(&["setvcpus", "web1", "3", "--config", "--maximum"]);
    let changed = world.configuration("web1");
    assert_ne!(changed, before);
    world.restore(&["--in-place"]);
    assert_eq!(world.configuration("web1"), changed);
    let report = world.restore(&["--in-place", "--configuration", "--dry-run"]);
    let diff = report["configuration_diff"].as_str().unwrap();
    assert!(diff.contains("-  <vcpu") && diff.contains("+  <vcpu"), "{diff}");
    assert_eq!(world.configuration("web1"), changed);
    world.restore(&["--in-place", "--configuration"]);
    assert_eq!(world.configuration("web1"), before);
    world.assert_holds("web1");
}

#[test]
fn a_dry_run_shows_everything_and_changes_nothing() {
    let world = World::new();
    world.back_up();
    let (files, configuration) = (world.files(), world.configuration("web1"));
    let uri = world.lab.uri();
    let shown = world
        .rig
        .ok(&at(&uri, &["restore", "web1", "--to-machine", "--dry-run"]));
    for part in [
        "-  <name>web1</name>",
        "+  <name>web1-restored</name>",
        "web1-restored-a",
        "nothing was changed",
        "free",
    ] {
        assert!(shown.contains(part), "{part:?} is missing:\n{shown}");
    }
    let report = world.restore(&["--name", "other", "--dry-run"]);
    assert!(report["dry_run"] == true && report["disks"].as_array().unwrap().is_empty());
    assert_eq!(
        report["files"][1]["target"],
        world.lab.path("other-b").to_str().unwrap()
    );
    assert_eq!(report["files"][1]["data_bytes"], 8 << 20);
    assert!(report["rooms"][0]["needed_bytes"].as_u64().unwrap() > 16 << 20);
    assert_eq!(world.machines(), ["web1"]);
    assert_eq!((world.files(), world.configuration("web1")), (files, configuration));
    world.assert_runs_and_is_clean();
}

/// A disk that is not in the snapshot, and a missing image of a CD drive; the report lists the disks that are kept.
#[test]
fn disks_without_a_stored_image_are_kept_emptied_or_dropped() {
    let world = World::new();
    world.lab.virsh(&["destroy", "web1"]);
    let (iso, shared) = (world.lab.path("cd.iso"), world.lab.path("shared.raw"));
    for path in [&iso, &shared] {
        File::create(path).unwrap().set_len(1 << 20).unwrap();
    }
    let own = world.lab.path("web1-c");
    File::create(&own).unwrap().set_len(1 << 20).unwrap();
    let attach = |path: &Path, target: &str, words: &[&str]| {
        let path = path.to_str().unwrap();
        world
            .lab
            .virsh(&[&["attach-disk", "web1", path, target, "--config"], words].concat());
    };
    world.lab.virsh(&[
        "change-media",
        "web1",
        "sda",
        "--insert",
        iso.to_str().unwrap(),
        "--config",
    ]);
    attach(&shared, "vdc", &["--mode", "shareable"]);
    attach(&own, "vdd", &[]);
    let uri = world.lab.uri();
    world.rig.ok(&at(&uri, &["backup", "web1", "--exclude", "vdd"]));

    let document = world.rig.json(3, &at(&uri, &["restore", "web1", "--to-machine"]));
    let warnings = document["warnings"].to_string();
    assert!(
        warnings.contains("vdd") && warnings.contains("used by the machine web1"),
        "{document}"
    );
    let targets = |name: &str| {
        let disks = DomainXml::parse(&world.configuration(name)).unwrap().disks;
        disks
            .into_iter()
            .map(|disk| (disk.target, disk.source))
            .collect::<Vec<_>>()
    };
    let made = targets("web1-restored");
    assert_eq!(
        made.iter().map(|(target, _)| &target[..]).collect::<Vec<_>>(),
        ["vda", "vdb", "vdc", "sda"]
    );
    assert_eq!(made[2].1, DiskSource::File(shared));
    assert_eq!(made[3].1, DiskSource::File(iso.clone()));
    std::fs::remove_file(iso).unwrap();
    world
        .rig
        .json(3, &at(&uri, &["restore", "web1", "--to-machine", "--name", "no-cd"]));
    assert_eq!(targets("no-cd")[3], ("sda".to_owned(), DiskSource::Empty));
}

const FIRMWARE_CODE: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";

#[test]
fn firmware_variables_are_restored_and_the_guest_gets_a_new_generation() {
    if !Path::new(FIRMWARE_CODE).exists() {
        return;
    }
    let world = World::new();
    let (image, variables) = (world.lab.path("web2.raw"), world.lab.path("web2_VARS.fd"));
    File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let first = noise(540_672, 1);
    File::create(&variables).unwrap().write_all_at(&first, 0).unwrap();
    let xml = format!(
        "<domain type='qemu'><name>web2</name><memory unit='MiB'>16</memory><vcpu>1</vcpu><genid/>\
         <os><type arch='x86_64' machine='q35'>hvm</type><loader readonly='yes' type='pflash'>{FIRMWARE_CODE}</loader>\
         <nvram>{}</nvram></os><features><acpi/></features><devices>\
         <disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{}'/><target dev='vda'/></disk>\
         <interface type='user'><mac address='52:54:00:00:00:01'/></interface></devices></domain>",
        variables.display(),
        image.display()
    );
    world.rig.write("web2.xml", xml.as_bytes());
    world
        .lab
        .virsh(&["define", world.rig.path("web2.xml").to_str().unwrap()]);
    let uri = world.lab.uri();
    let work = |words: &[&str]| world.rig.report(&at(&uri, words));
    work(&["backup", "web2"]);

    let report = world.rig.report(&["export", "web2", "folder", "--format", "dir"]);
    assert!(!report["dropped"].to_string().contains("firmware"), "{report}");
    assert!(world.rig.read("folder/web2_VARS.fd") == first);
    let text = String::from_utf8(world.rig.read("folder/domain.xml")).unwrap();
    let exported = DomainXml::parse(&text).unwrap();
    assert_eq!(
        exported.nvram.as_deref(),
        world.rig.path("folder/web2_VARS.fd").to_str()
    );
    assert_eq!(exported.disks[0].format.as_deref(), Some("qcow2"));

    // Another machine must not write to the variables of this one, even if there is no copy of them.
    std::fs::remove_file(&variables).unwrap();
    let document = world
        .rig
        .json(3, &at(&uri, &["export", "--now", "web2", "fresh", "--format", "dir"]));
    assert!(document["warnings"].to_string().contains("fresh ones"), "{document}");
    let text = String::from_utf8(world.rig.read("fresh/domain.xml")).unwrap();
    assert_eq!(
        DomainXml::parse(&text).unwrap().nvram.as_deref(),
        world.rig.path("fresh/web2_VARS.fd").to_str()
    );
    File::create(&variables).unwrap().write_all_at(&first, 0).unwrap();

    let report = work(&["restore", "web2", "--to-machine"]);
    let file = &report["files"][1];
    assert_eq!(
        (&file["content"], &file["way"]),
        (&"firmware-variables".into(), &"new".into())
    );
    let new = world.lab.path("web2-restored_VARS.fd");
    assert!(std::fs::read(&new).unwrap() == first);
    let made = DomainXml::parse(&world.configuration("web2-restored")).unwrap();
    assert_eq!(made.nvram.as_deref(), new.to_str());
    assert!(made.macs[0].starts_with("52:54:00:") && made.macs[0] != "52:54:00:00:00:01");

    let second = noise(540_672, 2);
    File::options()
        .write(true)
        .open(&variables)
        .unwrap()
        .write_all_at(&second, 0)
        .unwrap();
    std::fs::set_permissions(&variables, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
    let before = world.configuration("web2");
    let report = work(&["restore", "web2", "--to-machine", "--in-place"]);
    assert!(std::fs::read(&variables).unwrap() == first);
    let mode = std::os::unix::fs::PermissionsExt::mode(&variables.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o640);
    let after = world.configuration("web2");
    let changed: Vec<_> = before
        .lines()
        .zip(after.lines())
        .filter(|(old, new)| old != new)
        .collect();
    assert!(changed.len() == 1 && changed[0].0.contains("<genid>"), "{changed:?}");
    assert!(report["configuration_diff"].as_str().unwrap().contains("genid"));
}
