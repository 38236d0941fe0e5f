//! Resizes images: old data stays, new bytes are zero, and QEMU agrees.

use std::path::{Path, PathBuf};

use holdfast_block::{BlockDevice as _, BlockDeviceMut as _};
use holdfast_image::{
    BackingFile, CreateOptions, Error, Format, ImageKind, OpenOptions, ResizeReport, Shrink, check, create, open,
    open_mut, resize,
};

use crate::peer::{Lab, QemuIo, Random, assert_clean, assert_reads_as, overwrite, path_text, qemu_img, work};

const MIB: u64 = 1 << 20;

/// The name of a format in QEMU.
fn name_of(format: Format) -> &'static str {
    match format {
        Format::Raw => "raw",
        Format::Vdi => "vdi",
        Format::Vhd => "vpc",
        Format::Vhdx => "vhdx",
        Format::Parallels => "parallels",
        _ => "qcow2",
    }
}

fn options_of(format: Format) -> OpenOptions {
    OpenOptions {
        format: Some(format),
        ..OpenOptions::default()
    }
}

/// Resizes the image at `path`, and `disk`; then both sides must agree.
fn resize_both(lab: &Lab, path: &Path, disk: &mut Vec<u8>, format: Format, size_bytes: u64, what: &str) {
    let before_bytes = disk.len() as u64;
    let options = options_of(format);
    let resized = resize(path, &options, size_bytes, Shrink::Allow).unwrap_or_else(|error| panic!("{what}: {error}"));
    let expected = ResizeReport {
        before_bytes,
        after_bytes: size_bytes,
        format,
    };
    assert_eq!(resized, expected, "{what}");
    disk.resize(usize::try_from(size_bytes).unwrap(), 0);
    assert_agree(lab, path, disk, format, what);
}

fn assert_agree(lab: &Lab, path: &Path, disk: &[u8], format: Format, what: &str) {
    assert_reads_as(&open(path, &options_of(format)).unwrap(), disk, what);
    if format != Format::Raw {
        let report = check(path, &options_of(format)).unwrap();
        assert_eq!(report.corruption_count, 0, "{what}: {:?}", report.problems);
    }
    let name = name_of(format);
    let printed = qemu_img(&["info", "-f", name, "--output=json", path_text(path)]);
    let size = format!("\"virtual-size\": {}", disk.len());
    assert!(printed.contains(&size), "{what}: {printed}");
    if !matches!(format, Format::Raw | Format::Vhd) {
        qemu_img(&["check", "-q", "-f", name, path_text(path)]);
    }
    let raw = lab.path("expected.raw");
    overwrite(&raw, disk);
    qemu_img(&[
        "compare",
        "-q",
        "-f",
        name,
        "-F",
        "raw",
        path_text(path),
        path_text(&raw),
    ]);
}

/// Grows, writes, shrinks, and grows again.
fn go_through(lab: &Lab, path: &Path, disk: &mut Vec<u8>, format: Format, what: &str) {
    let mut random = Random(5);
    let options = options_of(format);
    let refused = resize(path, &options, disk.len() as u64 - 512, Shrink::Refuse);
    assert!(matches!(refused, Err(Error::WouldShrink { .. })), "{what}: {refused:?}");
    for size_bytes in [5 * MIB + 512 * 3, 5 * MIB + 512 * 4, 13 * MIB, 3 * MIB + 512, 9 * MIB] {
        let what = format!("{what} of {size_bytes} bytes");
        resize_both(lab, path, disk, format, size_bytes, &what);
        {
            let device = open_mut(path, &options).unwrap();
            let (end, start) = (disk.len(), disk.len() - 700);
            disk[start..end].fill(0x77);
            device.write_at(&disk[start..end], start as u64).unwrap();
            let start = usize::try_from(random.below(end as u64 - 70_000)).unwrap();
            random.fill(&mut disk[start..start + 70_000]);
            device.write_at(&disk[start..start + 70_000], start as u64).unwrap();
            device.flush().unwrap();
        }
        assert_agree(lab, path, disk, format, &format!("{what}, written"));
    }
}

#[test]
fn all_formats_grow_and_shrink() {
    let lab = Lab::new();
    for (format, kind) in [
        (Format::Raw, ImageKind::Dynamic),
        (Format::Qcow2, ImageKind::Dynamic),
        (Format::Vdi, ImageKind::Dynamic),
        (Format::Vdi, ImageKind::Fixed),
        (Format::Vhd, ImageKind::Dynamic),
        (Format::Vhd, ImageKind::Fixed),
        (Format::Vhdx, ImageKind::Dynamic),
        (Format::Vhdx, ImageKind::Fixed),
        (Format::Parallels, ImageKind::Dynamic),
    ] {
        let what = format!("{format} {}", kind.name());
        // A fixed VHD with the extension .img is read as a raw disk, unless its format is given.
        let path = lab.path(&format!("{}.{format}", kind.name()));
        let mut options = CreateOptions::new(format, 4 * MIB + 512);
        options.blocks.kind = kind;
        create(&path, &options).unwrap();
        let mut disk = vec![0; 4 << 20 | 512];
        if format != Format::Raw {
            work(&path, &mut disk, &mut Random(3), 30);
        }
        go_through(&lab, &path, &mut disk, format, &what);
        if format != Format::Raw {
            assert_clean(&path);
        }
    }
}

#[test]
fn peer_images_grow_and_shrink() {
    let lab = Lab::new();
    for (number, (format, options)) in [
        (Format::Qcow2, "cluster_size=4k"),
        (Format::Qcow2, "extended_l2=on,cluster_size=64k"),
        (Format::Qcow2, "compat=0.10,cluster_size=512"),
        (Format::Vdi, "static=off"),
        (Format::Vhd, "force_size=on"),
        (Format::Vhd, "force_size=on,subformat=fixed"),
        (Format::Vhdx, "subformat=dynamic"),
        (Format::Vhdx, "subformat=fixed"),
        (Format::Parallels, "cluster_size=64k"),
    ]
    .into_iter()
    .enumerate()
    {
        let (raw, mut disk) = lab.raw("content.raw", 4 * MIB, 8);
        let path = lab.path(&format!("peer-{number}.img"));
        let (name, to) = (name_of(format), path_text(&path));
        qemu_img(&["convert", "-f", "raw", "-O", name, "-o", options, path_text(&raw), to]);
        go_through(&lab, &path, &mut disk, format, &format!("{format} {options}"));
    }
}

/// The table of a VHD grows over its first block; that of a VHDX outgrows its region.
#[test]
fn small_disks_grow_beyond_their_tables() {
    let lab = Lab::new();
    for (format, size_bytes) in [
        (Format::Raw, 1 << 40),
        (Format::Qcow2, 40 << 40),
        (Format::Vdi, 255 << 30),
        (Format::Vhd, 2040 << 30),
        (Format::Vhdx, 2 << 40),
        (Format::Parallels, 255 << 30),
    ] {
        let path = lab.path(&format!("{format}.img"));
        create(&path, &CreateOptions::new(format, 7 * MIB)).unwrap();
        let content = vec![0x5a; 7 << 20];
        let write = |offset: u64| {
            let device = open_mut(&path, &options_of(format)).unwrap();
            device.write_at(&content, offset).unwrap();
            device.flush().unwrap();
        };
        let name = name_of(format);
        let assert_content = |offset: u64| {
            let image = open(&path, &options_of(format)).unwrap();
            let mut found = vec![0; content.len()];
            image.read_at(&mut found, offset).unwrap();
            assert!(found == content, "{format} at {offset}");
            let pattern = format!("read -P 0x5a {offset} 7M");
            crate::peer::qemu_io_as(name, &path, &[&pattern]);
        };
        write(0);
        resize(&path, &options_of(format), size_bytes, Shrink::Refuse).unwrap();
        assert_content(0);
        crate::peer::qemu_io_as(name, &path, &["read -P 0 7M 60M"]);
        write(size_bytes - 9 * MIB);
        assert_content(size_bytes - 9 * MIB);
        assert_content(0);
        if format != Format::Raw {
            let report = check(&path, &options_of(format)).unwrap();
            // The space of the VHD block that was moved, less the part that the table uses now.
            let leaks = u64::from(format == Format::Vhd);
            assert!(
                report.corruption_count == 0 && report.leak_count <= leaks,
                "{format}: {report:?}"
            );
            let printed = qemu_img(&["info", "-f", name, "--output=json", path_text(&path)]);
            assert!(
                printed.contains(&format!("\"virtual-size\": {size_bytes}")),
                "{printed}"
            );
        }
    }
}

fn refusal(path: &Path, size_bytes: u64) -> Error {
    let before = std::fs::read(path).unwrap();
    let error = resize(path, &OpenOptions::default(), size_bytes, Shrink::Allow).unwrap_err();
    assert!(std::fs::read(path).unwrap() == before, "{error}");
    error
}

#[test]
fn impossible_resizes_are_refused() {
    let lab = Lab::new();
    let image = |name: &str, format: Format| -> PathBuf {
        let path = lab.path(name);
        create(&path, &CreateOptions::new(format, 4 * MIB)).unwrap();
        path
    };
    let vmdk = image("a.vmdk", Format::Vmdk);
    assert!(matches!(refusal(&vmdk, 8 * MIB), Error::NotResizable { .. }));
    let vdi = image("a.vdi", Format::Vdi);
    for size_bytes in [1 << 50, 4 * MIB + 1, 0] {
        let error = refusal(&vdi, size_bytes);
        assert!(
            matches!(error, Error::NotResizable { .. } | Error::InvalidOption { .. }),
            "{error}"
        );
    }
    for (format, extension) in [(Format::Vhd, "vhd"), (Format::Vhdx, "vhdx"), (Format::Vdi, "vdi")] {
        let parent = image(&format!("parent.{extension}"), format);
        let child = lab.path(&format!("child.{extension}"));
        let mut options = CreateOptions::new(format, 4 * MIB);
        options.blocks.kind = ImageKind::Differencing;
        options.blocks.parent = Some(parent.clone());
        create(&child, &options).unwrap();
        assert!(
            matches!(refusal(&parent, 8 * MIB), Error::HasChildren { .. }),
            "{format}"
        );
        assert!(
            matches!(refusal(&child, 8 * MIB), Error::NotResizable { .. }),
            "{format}"
        );
    }
    let base = image("base.qcow2", Format::Qcow2);
    let top = lab.path("top.qcow2");
    let mut options = CreateOptions::new(Format::Qcow2, 4 * MIB);
    options.qcow2.backing = Some(BackingFile {
        name: "base.qcow2".to_owned(),
        format: Format::Qcow2,
    });
    create(&top, &options).unwrap();
    assert!(matches!(refusal(&base, 8 * MIB), Error::HasChildren { .. }));
    resize(&top, &OpenOptions::default(), 8 * MIB, Shrink::Refuse).unwrap();
    let bitmaps = image("bitmaps.qcow2", Format::Qcow2);
    lab.qemu_img("bitmap --add bitmaps.qcow2 kept");
    assert!(matches!(refusal(&bitmaps, 8 * MIB), Error::NotResizable { .. }));
    let held = image("held.qcow2", Format::Qcow2);
    let _peer = QemuIo::hold(&held);
    let locked = resize(&held, &OpenOptions::default(), 8 * MIB, Shrink::Allow);
    assert!(matches!(locked, Err(Error::Locked { .. })), "{locked:?}");
}

/// Data of a larger backing file past the end of its overlay is hidden when the overlay grows; a snapshot keeps its
/// size.
#[test]
fn resize_zeroes_overlays_and_keeps_snapshots() {
    let lab = Lab::new();
    let (_, base) = lab.raw("base.raw", 9 * MIB, 4);
    lab.qemu_img("create -q -f qcow2 -F raw -b base.raw top.qcow2 3000320");
    let path = lab.path("top.qcow2");
    let mut disk = base[..3_000_320].to_vec();
    work(&path, &mut disk, &mut Random(6), 10);
    lab.qemu_img("snapshot -c kept top.qcow2");
    let kept = disk.clone();
    resize_both(&lab, &path, &mut disk, Format::Qcow2, 12 * MIB, "an overlay");
    assert_clean(&path);
    let image = open(&path, &OpenOptions::default()).unwrap();
    assert_reads_as(&*image.snapshot("kept").unwrap(), &kept, "the snapshot");
}
