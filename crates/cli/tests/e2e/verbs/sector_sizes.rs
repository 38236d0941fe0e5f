//! Sizes that a format cannot say: of sectors of 4096 bytes (the bytes are the same with others, and a guest finds nothing on them), and of disks.

use holdfast_block::BlockDeviceMut as _;
use holdfast_image::{BlockOptions, CreateOptions, Format, OpenOptions};

use crate::program::stderr;
use crate::rig::{Rig, noise};

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
fn the_size_of_sectors_is_kept_or_its_loss_is_told() {
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
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(3), "{words:?}: {said}");
        assert!(said.contains("sectors of 4096 bytes"), "{words:?}: {said}");
    }
    assert!(rig.read("back.raw") == bytes);
    let report = rig.json(3, &["export", "web", "web.ova"])["report"].clone();
    assert!(
        report["dropped"]
            .to_string()
            .contains("sectors of 4096 bytes of disk vda"),
        "{report}"
    );
    // Those of other images are not told of.
    rig.ok(&["image", "convert", "back.raw", "usual.vhdx"]);
    assert_eq!(sector_of(&rig, "usual.vhdx"), 512);
}

/// Whoever names a format cannot know how large the disk is: that is no wrong command line.
#[test]
fn a_disk_that_is_too_large_for_a_format_is_refused() {
    let rig = Rig::new();
    let file = std::fs::File::create(rig.path("large.raw")).unwrap();
    file.set_len(3 << 40).unwrap();
    for words in [
        &["image", "convert", "large.raw", "out.vhd"][..],
        &["image", "convert", "large.raw", "out.vmdk"],
    ] {
        let (_, said) = rig.error(1, words);
        assert!(said.contains("3298534883328"), "{words:?}: {said}");
    }
    // A size that is given is an option.
    rig.error(2, &["image", "create", "out.vhd", "3T"]);
}
