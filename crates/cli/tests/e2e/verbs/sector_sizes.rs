//! Sizes that a format cannot store: sectors of 4096 bytes (the same bytes with another sector size are useless to a
//! guest), and sizes of disks.

use holdfast_block::BlockDeviceMut as _;
use holdfast_image::{BlockOptions, CreateOptions, Format, OpenOptions};

use crate::host::{LoopDevice, loop_device_of_sectors, text};
use crate::program::stderr;
use crate::rig::{Rig, noise};
use crate::templates;

const MIB: usize = 1 << 20;

fn image(rig: &Rig, name: &str) -> Vec<u8> {
    let bytes = noise(3 * MIB, 1);
    let options = CreateOptions {
        blocks: BlockOptions {
            sector_bytes: 4096,
            ..BlockOptions::default()
        },
        ..CreateOptions::new(Format::Vhdx, bytes.len() as u64)
    };
    holdfast_image::create(&rig.path(name), &options).unwrap();
    let image = holdfast_image::open_mut(&rig.path(name), &OpenOptions::default()).unwrap();
    image.write_at(&bytes, 0).unwrap();
    image.flush().unwrap();
    bytes
}

fn sector_of(rig: &Rig, name: &str) -> u64 {
    let info = rig.report(&["image", "info", name]);
    let blocks = &info["images"][0]["blocks"];
    blocks["sector_bytes"].as_u64().unwrap_or_else(|| panic!("{info}"))
}

#[test]
fn the_size_of_sectors_is_kept_or_its_loss_is_reported() {
    let rig = Rig::new();
    let bytes = image(&rig, "4k.vhdx");
    assert_eq!(sector_of(&rig, "4k.vhdx"), 4096);
    let shown = rig.ok(&["image", "info", "4k.vhdx"]);
    assert!(shown.contains("4096 bytes"), "{shown}");

    rig.ok(&["image", "convert", "4k.vhdx", "kept.vhdx"]);
    assert_eq!(sector_of(&rig, "kept.vhdx"), 4096);
    rig.ok(&["clone", "--overlay", "4k.vhdx", "child.vhdx"]);
    assert_eq!(sector_of(&rig, "child.vhdx"), 4096);
    rig.ok(&["backup", "--machine", "web", "vda=4k.vhdx"]);
    rig.ok(&["restore", "web:vda", "back.vhdx"]);
    assert_eq!(sector_of(&rig, "back.vhdx"), 4096);
    assert_eq!(
        rig.report(&["image", "compare", "4k.vhdx", "back.vhdx"])["is_equal"],
        true
    );

    for words in [
        &["image", "convert", "4k.vhdx", "out.raw"][..],
        &["image", "convert", "4k.vhdx", "out.qcow2"],
        &["image", "convert", "4k.vhdx", "out.vdi"],
        &["image", "convert", "4k.vhdx", "-"],
        &["restore", "web:vda", "back.raw"],
        &["restore", "web:vda", "back.qcow2"],
    ] {
        let output = rig.run(words);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(3), "{words:?}: {message}");
        assert!(message.contains("sectors of 4096 bytes"), "{words:?}: {message}");
    }
    assert!(rig.read("back.raw") == bytes);
    let report = rig.json(3, &["export", "web", "web.ova"])["report"].clone();
    assert!(
        report["dropped"]
            .to_string()
            .contains("sectors of 4096 bytes of disk vda"),
        "{report}"
    );
    // Other images cause no warning.
    rig.ok(&["image", "convert", "back.raw", "usual.vhdx"]);
    assert_eq!(sector_of(&rig, "usual.vhdx"), 512);
}

/// Asserts that a command warns about the lost sector size.
fn assert_lost(rig: &Rig, words: &[&str]) {
    let output = rig.run(words);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(3), "{words:?}: {message}");
    assert!(message.contains("sectors of 4096 bytes"), "{words:?}: {message}");
}

#[test]
fn the_size_of_the_sectors_of_a_vdi_goes_into_a_vhdx() {
    let rig = Rig::new();
    rig.write("disk.raw", &noise(3 * MIB, 2));
    rig.ok(&["image", "convert", "disk.raw", "4k.vdi"]);
    let mut bytes = rig.read("4k.vdi");
    for place in [0x168, 0x1d4] {
        bytes[place..place + 4].copy_from_slice(&4096_u32.to_le_bytes());
    }
    rig.write("4k.vdi", &bytes);
    assert_eq!(sector_of(&rig, "4k.vdi"), 4096);
    rig.ok(&["image", "convert", "4k.vdi", "kept.vhdx"]);
    assert_eq!(sector_of(&rig, "kept.vhdx"), 4096);
    rig.ok(&["backup", "--machine", "web", "vda=4k.vdi"]);
    rig.ok(&["restore", "web:vda", "back.vhdx"]);
    assert_eq!(sector_of(&rig, "back.vhdx"), 4096);
    for target in ["out.vdi", "out.qcow2", "out.raw", "out.vmdk"] {
        assert_lost(&rig, &["image", "convert", "4k.vdi", target]);
    }
    assert_lost(&rig, &["restore", "web:vda", "out2.vdi"]);
}

#[test]
fn the_size_of_sectors_is_kept_by_a_template_or_its_loss_is_reported() {
    let rig = templates::rig();
    image(&rig, "4k.vhdx");
    templates::push(&rig, "base:1", "4k.vhdx", "anna", &[]);
    rig.ok(&templates::pull_words("base:1", "pulled.vhdx"));
    assert_eq!(sector_of(&rig, "pulled.vhdx"), 4096);
    assert_eq!(
        rig.report(&["image", "compare", "4k.vhdx", "pulled.vhdx"])["is_equal"],
        true
    );
    for target in ["pulled.raw", "pulled.qcow2", "pulled.vdi"] {
        assert_lost(&rig, &templates::pull_words("base:1", target));
    }
}

/// A disk with the signature of a partition table at this offset.
fn with_table(at: usize) -> Vec<u8> {
    let mut bytes = noise(3 * MIB, 3);
    bytes[at..at + 8].copy_from_slice(b"EFI PART");
    bytes
}

fn device(rig: &Rig, name: &str, sector_bytes: u32) -> Option<LoopDevice> {
    loop_device_of_sectors(&rig.path(name), 3 << 20, sector_bytes)
}

#[test]
fn the_size_of_the_sectors_of_a_block_device_is_kept_or_its_loss_is_reported() {
    let rig = Rig::new();
    let (Some(source), Some(same), Some(other)) = (
        device(&rig, "source", 4096),
        device(&rig, "same", 4096),
        device(&rig, "other", 512),
    ) else {
        return;
    };
    let [source, same, other] = [&source, &same, &other].map(|device| text(&device.path));
    let bytes = with_table(4096);
    rig.write("whole.raw", &bytes);
    rig.ok(&["image", "convert", "whole.raw", source, "--force"]);
    rig.ok(&["image", "convert", source, "kept.vhdx"]);
    assert_eq!(sector_of(&rig, "kept.vhdx"), 4096);
    rig.ok(&["image", "convert", "kept.vhdx", same, "--force"]);
    assert!(rig.read(same) == bytes);
    rig.ok(&["backup", "--machine", "web", &format!("sda={source}")]);
    rig.ok(&["restore", "web:sda", "back.vhdx"]);
    assert_eq!(sector_of(&rig, "back.vhdx"), 4096);
    rig.ok(&["restore", "web:sda", same, "--force"]);
    assert!(rig.read(same) == bytes);
    for words in [
        &["image", "convert", source, "out.raw"][..],
        &["image", "convert", source, "out.qcow2"],
        &["image", "convert", source, "-"],
        &["image", "convert", source, other, "--force"],
        &["restore", "web:sda", "back.qcow2"],
        &["restore", "web:sda", other, "--force"],
    ] {
        assert_lost(&rig, words);
    }
    assert!(rig.read(other) == bytes);
    // A machine sees sectors of 512 bytes on such a device, unless its configuration says otherwise: then its partition
    // table has these sectors.
    for at in [512, 65_536] {
        rig.write("guest.raw", &with_table(at));
        rig.ok(&["image", "convert", "guest.raw", source, "--force"]);
        rig.ok(&["image", "convert", source, "guest.qcow2", "--force"]);
        rig.ok(&["image", "convert", source, "guest.vhdx", "--force"]);
        assert_eq!(sector_of(&rig, "guest.vhdx"), 512);
    }
}

/// The size of the disk is not part of the command line: the error is no usage error.
#[test]
fn a_disk_that_is_too_large_for_a_format_is_refused() {
    let rig = Rig::new();
    let file = std::fs::File::create(rig.path("large.raw")).unwrap();
    file.set_len(3 << 40).unwrap();
    for words in [
        &["image", "convert", "large.raw", "out.vhd"][..],
        &["image", "convert", "large.raw", "out.vmdk"],
    ] {
        let (_, message) = rig.error(1, words);
        assert!(message.contains("3298534883328"), "{words:?}: {message}");
    }
    // An explicit size is an option.
    rig.error(2, &["image", "create", "out.vhd", "3T"]);
}
