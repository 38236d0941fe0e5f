//! Images without a parent.

use std::fs;
use std::num::NonZero;
use std::path::Path;

use holdfast_block::BlockDevice as _;
use holdfast_image::{
    BlockOptions, Continue, CreateOptions, Format, ImageKind, OpenOptions, TargetContent, create, detect, fill_device,
    open, open_mut,
};

use crate::peer::{
    Lab, Random, assert_clean, assert_reads_as, flatten, path_text, qemu_img, qemu_io_as, sample_disk, work,
};

const MIB: u64 = 1 << 20;

/// A format as we write it, and its QEMU equivalent.
struct Flavour {
    name: &'static str,
    format: Format,
    kind: ImageKind,
    /// Options by which QEMU writes the same.
    peer_options: &'static str,
    /// Whether QEMU can check such an image.
    is_checked: bool,
}

fn flavours() -> Vec<Flavour> {
    let flavour = |name, format, kind, peer_options| Flavour {
        name,
        format,
        kind,
        peer_options,
        is_checked: true,
    };
    vec![
        flavour("vdi", Format::Vdi, ImageKind::Dynamic, ""),
        flavour("vdi, fixed", Format::Vdi, ImageKind::Fixed, "-o static=on"),
        Flavour {
            is_checked: false,
            ..flavour("vhd", Format::Vhd, ImageKind::Dynamic, "-o force_size=on")
        },
        Flavour {
            is_checked: false,
            ..flavour(
                "vhd, fixed",
                Format::Vhd,
                ImageKind::Fixed,
                "-o force_size=on,subformat=fixed",
            )
        },
        flavour("parallels", Format::Parallels, ImageKind::Dynamic, ""),
        flavour(
            "vmdk",
            Format::Vmdk,
            ImageKind::Dynamic,
            "-o subformat=monolithicSparse",
        ),
        flavour("vhdx", Format::Vhdx, ImageKind::Dynamic, ""),
        flavour("vhdx, fixed", Format::Vhdx, ImageKind::Fixed, "-o subformat=fixed"),
    ]
}

fn options(flavour: &Flavour, size_bytes: u64) -> CreateOptions {
    CreateOptions {
        blocks: BlockOptions {
            kind: flavour.kind,
            ..BlockOptions::default()
        },
        ..CreateOptions::new(flavour.format, size_bytes)
    }
}

fn assert_peer_agrees(flavour: &Flavour, image: &Path, disk: &[u8], lab: &Lab) {
    assert_clean(image);
    if flavour.is_checked {
        qemu_img(&["check", "-f", flavour.format.qemu_name(), path_text(image)]);
    }
    assert!(
        flatten(image, lab)[..disk.len()] == *disk,
        "{}: the peer reads other data",
        flavour.name
    );
    assert_reads_as(&open(image, &OpenOptions::default()).unwrap(), disk, flavour.name);
}

#[test]
fn peers_read_our_images() {
    for flavour in flavours() {
        for size_bytes in [512, MIB, 5 * MIB + 512, 33 * MIB - 512] {
            let lab = Lab::new();
            let image = lab.path("image");
            create(&image, &options(&flavour, size_bytes)).unwrap();
            assert_eq!(detect(&image).unwrap(), flavour.format);
            let mut disk = vec![0; usize::try_from(size_bytes).unwrap()];
            assert_peer_agrees(&flavour, &image, &disk, &lab);
            for seed in 0..3 {
                work(&image, &mut disk, &mut Random(seed), 40);
                assert_peer_agrees(&flavour, &image, &disk, &lab);
            }
        }
    }
}

#[test]
fn peer_images_are_read_and_written() {
    for flavour in flavours() {
        let lab = Lab::new();
        let (raw, mut disk) = lab.raw("disk.raw", 20 * MIB + 512, 3);
        let image = lab.path("image");
        let mut words = vec!["convert", "-f", "raw", "-O", flavour.format.qemu_name()];
        words.extend(flavour.peer_options.split_whitespace());
        words.extend([path_text(&raw), path_text(&image)]);
        qemu_img(&words);
        let opened = open(&image, &OpenOptions::default()).unwrap();
        assert_reads_as(&opened, &disk, flavour.name);
        assert_eq!(
            opened.layers()[0].blocks.as_ref().unwrap().kind,
            flavour.kind,
            "{}",
            flavour.name
        );
        drop(opened);
        work(&image, &mut disk, &mut Random(5), 60);
        assert_peer_agrees(&flavour, &image, &disk, &lab);
        // QEMU can write to our image.
        qemu_io_as(
            flavour.format.qemu_name(),
            &image,
            &["write -P 0x5a 3M 2M", "write -P 0x5b 19M 64k"],
        );
        disk[3 << 20..5 << 20].fill(0x5a);
        disk[19 << 20..(19 << 20) + 65_536].fill(0x5b);
        assert_peer_agrees(&flavour, &image, &disk, &lab);
    }
}

#[test]
fn threads_write_one_image() {
    for flavour in flavours() {
        let lab = Lab::new();
        let disk = sample_disk(24 * MIB, 8);
        let image = lab.path("image");
        create(&image, &options(&flavour, disk.len() as u64)).unwrap();
        let target = open_mut(&image, &OpenOptions::default()).unwrap();
        let source = holdfast_block::MemoryDevice::from_bytes(&disk);
        let threads = NonZero::new(3).unwrap();
        let report = fill_device(&source, &target, TargetContent::Zeroes, threads, &mut |_| Continue::Go).unwrap();
        assert_eq!(report.plain_bytes + report.zero_bytes, disk.len() as u64);
        drop(target);
        assert_peer_agrees(&flavour, &image, &disk, &lab);
    }
}

#[test]
fn sparse_images_are_small_and_fast() {
    for flavour in flavours() {
        if flavour.kind != ImageKind::Dynamic {
            continue;
        }
        let lab = Lab::new();
        let image = lab.path("image");
        // The maximum size of a VHD.
        let size_bytes = 2040 << 30;
        create(&image, &options(&flavour, size_bytes)).unwrap();
        let device = open_mut(&image, &OpenOptions::default()).unwrap();
        holdfast_block::BlockDeviceMut::write_at(&device, &[7; 1000], size_bytes - 1000).unwrap();
        holdfast_block::BlockDeviceMut::flush(&device).unwrap();
        assert_eq!(device.size_bytes(), size_bytes);
        drop(device);
        let taken = fs::metadata(&image).unwrap();
        assert!(
            std::os::unix::fs::MetadataExt::blocks(&taken) * 512 < 32 * MIB,
            "{}",
            flavour.name
        );
        let opened = open(&image, &OpenOptions::default()).unwrap();
        let mut found = [0; 1001];
        opened.read_at(&mut found, size_bytes - 1001).unwrap();
        assert!(found[0] == 0 && found[1..] == [7; 1000]);
        assert_clean(&image);
    }
}
