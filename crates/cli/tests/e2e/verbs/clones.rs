//! `clone` of images: shared if the file system supports it, overlays otherwise, copies on request, each with a new
//! identity.

use std::path::Path;

use crate::host::file_system;
use crate::program::stderr;
use crate::qemu_nbd::QemuNbd;
use crate::rig::{Rig, noise};

const MIB: usize = 1 << 20;
const IMAGES: [&str; 5] = ["base.qcow2", "base.vdi", "base.vhd", "base.vhdx", "base.vmdk"];

/// Images of one disk, in the folder `within`, which ends with a slash or is empty.
fn with_images(rig: &Rig, within: &str) -> Vec<u8> {
    let mut bytes = noise(6 * MIB, 31);
    bytes[MIB..3 * MIB].fill(0);
    let raw = format!("{within}base.raw");
    rig.write(&raw, &bytes);
    for image in IMAGES {
        rig.ok(&["image", "convert", &raw, &format!("{within}{image}")]);
    }
    bytes
}

fn is_equal(rig: &Rig, one: &str, other: &str) -> bool {
    rig.report(&["image", "compare", one, other])["is_equal"] == true
}

fn id(rig: &Rig, image: &str) -> serde_json::Value {
    rig.report(&["image", "identity", image])["id"].clone()
}

/// ext4 and tmpfs cannot share blocks: the clone is an overlay, which is created as fast.
#[test]
fn a_clone_is_an_overlay_if_blocks_cannot_be_shared() {
    let rig = Rig::empty();
    with_images(&rig, "");
    let can_share = rig.report(&["clone", "base.raw", "probe.qcow2"])["images"][0]["kind"] == "shared";
    for image in IMAGES {
        let name = image.replace("base", "clone");
        let report = rig.report(&["clone", image, &name, "--overlay"]);
        let clone = &report["images"][0];
        assert_eq!(clone["kind"], "overlay", "{report}");
        assert!(clone["own_bytes"].as_u64().unwrap() < MIB as u64, "{report}");
        assert!(is_equal(&rig, image, &name), "{image}");
        rig.ok(&["image", "check", &name]);
        if image != "base.qcow2" {
            assert_ne!(id(&rig, &name), id(&rig, image), "{image}");
        }
    }
    let (kind, message) = rig.error(1, &["clone", "base.vdi", "clone.vdi"]);
    assert_eq!(kind, "exists", "{message}");
    if !can_share {
        // An overlay of a raw disk cannot be raw, and a machine would read a qcow2 file as the disk.
        let (_, message) = rig.error(1, &["clone", "base.raw", "clone.raw"]);
        assert!(message.contains("--copy"), "{message}");
    }
    let report = rig.report(&["clone", "base.vmdk", "copy.vmdk", "--copy"]);
    assert_eq!(report["images"][0]["kind"], "copied");
    std::fs::remove_file(rig.path("base.vmdk")).unwrap();
    assert!(
        is_equal(&rig, "base.raw", "copy.vmdk"),
        "a copy is independent of its base"
    );
}

#[test]
fn several_clones_are_named_by_a_template() {
    let rig = Rig::empty();
    with_images(&rig, "");
    let before = rig.names(".");
    let words = [
        "clone",
        "base.vdi",
        "--count",
        "3",
        "--name-template",
        "web{n:02}.vdi",
        "--first",
        "9",
    ];
    let plan = rig.report(&[&words[..], &["--dry-run"]].concat());
    assert_eq!(plan["images"][2]["path"], "web11.vdi");
    assert_eq!(rig.names("."), before);
    rig.ok(&words);
    let ids: Vec<_> = ["web09.vdi", "web10.vdi", "web11.vdi"]
        .map(|name| id(&rig, name))
        .to_vec();
    assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2]);
    // If one of several names exists, no clone is created.
    let before = rig.names(".");
    let taken = [
        "clone",
        "base.vdi",
        "--count",
        "3",
        "--name-template",
        "web{n:02}.vdi",
        "--first",
        "11",
    ];
    for more in [&[][..], &["--dry-run"]] {
        let (kind, message) = rig.error(1, &[&taken[..2], &["--first", "8"], &taken[2..6], more].concat());
        assert!(kind == "exists" && message.contains("web09.vdi"), "{message}");
        let (kind, _) = rig.error(1, &[&taken[..], more].concat());
        assert_eq!(kind, "exists");
    }
    assert_eq!(rig.names("."), before);
    for wrong in [
        &["clone", "base.vdi", "--count", "2"][..],
        &["clone", "base.vdi", "a.vdi", "--count", "2"],
        &["clone", "base.vdi", "a.vdi", "--first", "2"],
        &["clone", "base.vdi", "--name-template", "web.vdi"],
        &["clone", "base.vdi", "a.vdi", "--start"],
        &["clone", "base.vdi"],
        &["clone", "nowhere@latest", "a", "--overlay"],
    ] {
        let output = rig.run(wrong);
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
    }
    // virt-sysprep is not installed; no partial clone is left.
    if !Path::new("/usr/bin/virt-sysprep").exists() {
        let (_, message) = rig.error(1, &["clone", "base.qcow2", "guest.qcow2", "--sysprep"]);
        assert!(
            message.contains("virt-sysprep") && message.contains("guestfs-tools"),
            "{message}"
        );
        assert!(!rig.path("guest.qcow2").exists());
    }
}

#[test]
fn a_dry_run_shows_the_kind_of_a_clone_and_a_misleading_name_is_warned_about() {
    let rig = Rig::empty();
    with_images(&rig, "");
    let plan = rig.report(&["clone", "base.vdi", "new.vdi", "--overlay", "-n"]);
    assert_eq!(
        (&plan["images"][0]["kind"], &plan["images"][0]["format"]),
        (&"overlay".into(), &"vdi".into())
    );
    // A dry run does not announce an impossible clone.
    let (_, message) = rig.error(1, &["clone", "base.raw", "new.raw", "--overlay", "--dry-run"]);
    assert!(message.contains("qcow2 image"), "{message}");
    for more in [&["--dry-run"][..], &[]] {
        let message = stderr(&rig.run(&[&["clone", "base.raw", "new.qcow2", "--copy"], more].concat()));
        assert!(message.contains("new.qcow2 is called otherwise"), "{message}");
    }
    let message = stderr(&rig.run(&["clone", "base.qcow2", "new.raw", "--copy"]));
    assert!(message.contains("new.raw is called otherwise"), "{message}");
    rig.ok(&["clone", "base.raw", "over.qcow2", "--overlay"]);
    let message = stderr(&rig.run(&["clone", "base.qcow2", "over2.qcow2", "--overlay"]));
    assert!(
        !message.contains("otherwise") && !message.contains("--allow-file"),
        "{message}"
    );
    std::fs::create_dir(rig.path("lab")).unwrap();
    let message = stderr(&rig.run(&["clone", "base.qcow2", "lab/a.qcow2", "--overlay"]));
    assert!(message.contains("--allow-file base.qcow2"), "{message}");
    rig.ok(&["image", "check", "lab/a.qcow2", "--allow-file", "base.qcow2"]);
}

/// An image lacks data that a running machine has in memory.
#[test]
fn an_image_open_for_writing_is_refused_as_source() {
    let rig = Rig::empty();
    with_images(&rig, "");
    let socket = rig.path("nbd");
    let serve =
        |options: &[&str]| QemuNbd::serve(&rig.path("base.qcow2"), &socket, &[&["-f", "qcow2"], options].concat());
    let writer = serve(&[]);
    let (kind, message) = rig.error(4, &["clone", "base.qcow2", "clone.qcow2"]);
    assert_eq!(kind, "locked", "{message}");
    assert!(message.contains("MACHINE@SNAPSHOT"), "{message}");
    drop(writer);
    std::fs::remove_file(&socket).ok();
    let _reader = serve(&["--read-only"]);
    rig.ok(&["clone", "base.qcow2", "clone.qcow2"]);
}

fn shares(kind: &'static str) {
    let rig = Rig::empty();
    let Some(_mounted) = file_system(kind, &rig.path("mount"), 400 << 20) else {
        return;
    };
    let bytes = with_images(&rig, "mount/");
    let at = |name: &str| format!("mount/{name}");
    for image in IMAGES.iter().copied().chain(["base.raw"]) {
        let (image, name) = (at(image), at(&image.replace("base", "clone")));
        let report = rig.report(&["clone", &image, &name]);
        let clone = &report["images"][0];
        assert_eq!(clone["kind"], "shared", "{report}");
        assert!(clone["own_bytes"].as_u64().unwrap() <= 64 << 10, "{report}");
        assert!(clone["shared_bytes"].as_u64().unwrap() >= 3 * MIB as u64, "{report}");
        assert!(is_equal(&rig, &image, &name), "{image}");
        if !image.ends_with("raw") {
            rig.ok(&["image", "check", &name]);
        }
        if !image.ends_with("qcow2") && !image.ends_with("raw") {
            assert_ne!(id(&rig, &name), id(&rig, &image), "{image}");
        }
    }
    // A descriptor that contains its own file name gets the new name.
    let texts = rig.read("mount/clone.vmdk");
    let has = |name: &str| texts.windows(name.len()).any(|window| window == name.as_bytes());
    assert!(has("\"clone.vmdk\"") && !has("base.vmdk"));
    // A clone does not depend on its source.
    std::fs::remove_file(rig.path("mount/base.raw")).unwrap();
    assert!(rig.read("mount/clone.raw") == bytes);
    // A clone of an overlay shares blocks in the same folder, and is an overlay in another one.
    rig.ok(&["clone", "mount/base.qcow2", "mount/middle.qcow2", "--overlay"]);
    let beside = rig.report(&["clone", "mount/middle.qcow2", "mount/beside.qcow2"]);
    assert_eq!(beside["images"][0]["kind"], "shared");
    std::fs::create_dir(rig.path("mount/far")).unwrap();
    let far = rig.report(&["clone", "mount/middle.qcow2", "mount/far/clone.qcow2"]);
    assert_eq!(far["images"][0]["kind"], "overlay");
    let words = [
        "image",
        "compare",
        "mount/base.qcow2",
        "mount/far/clone.qcow2",
        "--allow-dir",
        "mount",
    ];
    assert_eq!(rig.report(&words)["is_equal"], true);
}

#[test]
fn btrfs_shares_the_bytes_of_clones() {
    shares("btrfs");
}

#[test]
fn xfs_shares_the_bytes_of_clones() {
    shares("xfs");
}
