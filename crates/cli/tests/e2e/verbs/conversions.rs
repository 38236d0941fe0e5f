//! Difficult cases of `image convert`: impossible options, block devices, and images that contain more than a disk.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use holdfast_block::SeededRandom;

use crate::host::{file_system, loop_device, system, text};
use crate::program::stderr;
use crate::rig::{Rig, noise};

const MIB: usize = 1 << 20;

/// A disk with random data, written zeroes, and holes.
fn rig_with_disk() -> (Rig, Vec<u8>) {
    let rig = Rig::empty();
    let mut bytes = noise(8 * MIB, 11);
    let mut random = SeededRandom::new(12);
    for _ in 0..20 {
        let at = usize::try_from(random.below(8 * MIB as u64 - 100_000)).unwrap();
        bytes[at..at + 100_000].fill(0);
    }
    bytes[3 * MIB..5 * MIB].fill(0);
    rig.write("disk.raw", &bytes);
    (rig, bytes)
}

fn qemu_img(rig: &Rig, words: &[&str]) -> String {
    let folder = rig.path("");
    let line = format!("cd '{}' && qemu-img {}", text(&folder), words.join(" "));
    system("/bin/sh", &["-c", &line]).unwrap()
}

/// A disk from a pipe is converted completely or not at all, on all cores.
#[test]
fn disks_are_converted_from_and_to_pipes() {
    let (rig, bytes) = rig_with_disk();
    let size = bytes.len().to_string();
    for (target, more) in [("a.qcow2", &["--compress"][..]), ("a.vhdx", &[]), ("a.raw", &[])] {
        let words = [&["image", "convert", "-", target, "--size", &size], more].concat();
        let output = rig.run_with(&words, &bytes);
        assert!(output.status.success(), "{target}: {}", stderr(&output));
        let output = rig.run(&["image", "convert", target, "-"]);
        assert!(output.status.success() && output.stdout == bytes, "{target}");
    }
    // The size of a redirected file is counted from its current position.
    let file = File::open(rig.path("disk.raw")).unwrap();
    let status = rig
        .command(&["image", "convert", "-", "b.qcow2"])
        .stdin(file)
        .status()
        .unwrap();
    assert!(status.success());
    assert_eq!(
        rig.report(&["image", "compare", "disk.raw", "b.qcow2"])["is_equal"],
        true
    );

    let before = rig.names(".");
    for (size, bytes, expected) in [
        ("8M", &bytes[..bytes.len() - 1], "ends before the end of the disk"),
        ("7M", &bytes[..], "has more than the 7340032 bytes"),
    ] {
        let output = rig.run_with(&["image", "convert", "-", "c.qcow2", "--size", size], bytes);
        assert!(
            !output.status.success() && stderr(&output).contains(expected),
            "{}",
            stderr(&output)
        );
    }
    let output = rig.run_with(&["image", "convert", "-", "c.qcow2"], &bytes);
    assert!(
        output.status.code() == Some(2) && stderr(&output).contains("--size"),
        "{}",
        stderr(&output)
    );
    for words in [
        &["image", "convert", "-", "c.raw", "--size", "8M", "--verify"][..],
        &["image", "convert", "a.qcow2", "-", "--verify"],
        &["image", "convert", "a.qcow2", "-", "--to", "qcow2"],
    ] {
        let output = rig.run(words);
        assert!(output.status.code() == Some(2) && output.stdout.is_empty(), "{words:?}");
    }
    assert_eq!(rig.names("."), before, "failed conversions leave no files");
}

#[test]
fn streamed_vmdks_are_written_to_files_and_pipes() {
    let (rig, bytes) = rig_with_disk();
    let report = rig.report(&["image", "convert", "--compress", "--verify", "disk.raw", "a.vmdk"]);
    assert!(report["compressed_bytes"].as_u64() > Some(1 << 20), "{report}");
    let output = rig.run(&["image", "convert", "disk.raw", "-", "--to", "vmdk"]);
    assert!(output.status.success(), "{}", stderr(&output));
    rig.write("b.vmdk", &output.stdout);
    for name in ["a.vmdk", "b.vmdk"] {
        let info = qemu_img(&rig, &["info", name]);
        assert!(info.contains("streamOptimized"), "{info}");
        qemu_img(&rig, &["compare", name, "-f", "vmdk", "-F", "raw", "disk.raw"]);
        let output = rig.run(&["image", "convert", name, "-"]);
        assert!(output.stdout == bytes, "{name}");
    }
    let output = rig.run(&["image", "convert", "disk.raw", "-", "--to", "vhd"]);
    assert_eq!(output.status.code(), Some(2));
}

/// If these options were ignored, the image would not be what the user requested.
#[test]
fn options_of_qcow2_are_refused_for_a_raw_image() {
    let (rig, _) = rig_with_disk();
    for option in [
        "--compress",
        "--cluster-size=64K",
        "--compat=1.1",
        "--compression=zlib",
        "--extended-l2",
        "--lazy-refcounts",
        "--refcount-bits=16",
        "--backing=disk.raw",
        "--data-file=data",
    ] {
        for words in [
            &["image", "convert", "disk.raw", "new.raw", option][..],
            &["image", "create", "new.raw", "1M", option],
        ] {
            if words[1] == "create" && option == "--compress" {
                continue;
            }
            let (kind, text) = rig.error(2, words);
            assert_eq!(kind, "usage", "{text}");
            let name = option.split('=').next().unwrap();
            assert!(text.contains(name), "{words:?}: {text}");
        }
    }
    let (_, text) = rig.error(2, &["image", "create", "new.raw", "1M", "--preallocate-metadata"]);
    assert!(text.contains("--preallocate-metadata"), "{text}");
    assert_eq!(rig.names("."), ["disk.raw"]);
}

#[test]
fn a_block_device_is_overwritten_except_for_its_end() {
    let (rig, bytes) = rig_with_disk();
    let backing_bytes = 9 * MIB;
    let Some(device) = loop_device(&rig.path("device"), backing_bytes as u64) else {
        return;
    };
    let target = text(&device.path);
    let held = File::options().write(true).open(&device.path).unwrap();
    held.write_all_at(&vec![0xEE; backing_bytes], 0).unwrap();
    held.sync_all().unwrap();
    drop(held);
    let read = || std::fs::read(&device.path).unwrap();

    let (kind, message) = rig.error(1, &["image", "convert", "disk.raw", target]);
    assert_eq!(kind, "exists");
    assert!(
        message.contains("--force") && message.contains("block device"),
        "{message}"
    );
    let (kind, message) = rig.error(2, &["image", "convert", "disk.raw", target, "--force", "--to", "qcow2"]);
    assert_eq!(kind, "usage");
    assert!(message.contains("block device"), "{message}");
    assert!(read() == vec![0xEE; backing_bytes], "refused, and nothing written");

    rig.ok(&["image", "convert", "disk.raw", "disk.qcow2", "--compress"]);
    for source in ["disk.raw", "disk.qcow2"] {
        let output = rig.code(3, &["image", "convert", source, target, "--force", "--verify"]);
        assert!(stderr(&output).contains("last 1048576 bytes"), "{}", stderr(&output));
        let found = read();
        assert!(found[..bytes.len()] == bytes[..], "{source}");
        assert!(found[bytes.len()..].iter().all(|byte| *byte == 0xEE));
    }
    // Zero ranges are discarded in the file behind the device.
    let allocated = std::os::unix::fs::MetadataExt::blocks(&rig.path("device").metadata().unwrap()) * 512;
    assert!(allocated <= 7 * MIB as u64, "{allocated} bytes allocated");

    rig.ok(&["image", "create", "large.qcow2", "10M"]);
    let (kind, message) = rig.error(1, &["image", "convert", "large.qcow2", target, "--force"]);
    assert_eq!(kind, "no-space");
    assert!(message.contains(target) && message.contains("10485760"), "{message}");
    assert!(read()[..bytes.len()] == bytes[..], "too small, and nothing written");
}

/// Overwriting a mounted file system would destroy it, and could crash the machine.
#[test]
fn a_block_device_in_use_is_refused() {
    let (rig, _) = rig_with_disk();
    let Some(small) = crate::host::small_file_system(&rig.path("mounted"), 16 << 20) else {
        return;
    };
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let line = mounts.lines().find(|line| line.contains(text(&small.path))).unwrap();
    let device = line.split(' ').next().unwrap();
    let (_, message) = rig.error(1, &["image", "convert", "disk.raw", device, "--force"]);
    assert!(message.contains(device) && message.contains("in use"), "{message}");
    rig.ok(&["init", "--no-encryption"]);
    rig.ok(&["backup", "disk.raw"]);
    let (_, message) = rig.error(1, &["restore", "disk", device, "--force"]);
    assert!(message.contains(device) && message.contains("in use"), "{message}");
}

#[test]
fn a_data_file_is_created_with_the_image_and_is_raw_on_request() {
    let (rig, bytes) = rig_with_disk();
    for (kind, raw) in [("plain", &[][..]), ("raw", &["--data-file-raw"])] {
        let (image, data) = (format!("{kind}.qcow2"), format!("{kind}.data"));
        let words = ["image", "convert", "disk.raw", &image, "--data-file", &data, "--verify"];
        rig.ok(&[&words, raw].concat());
        qemu_img(&rig, &["compare", "-f", "raw", "-F", "qcow2", "disk.raw", &image]);
        qemu_img(&rig, &["check", "-q", "-f", "qcow2", &image]);
        if kind == "raw" {
            assert!(rig.read(&data) == bytes);
        }
        // If the data file exists, no image is created, and the data file is kept.
        let again = ["image", "convert", "disk.raw", "again.qcow2", "--data-file", &data];
        assert_eq!(rig.error(1, &again).0, "exists");
        assert!(!rig.path("again.qcow2").exists() && rig.path(&data).exists());
    }
    // As in qemu-img: clusters in a data file cannot be compressed, and such a request is refused.
    let words = [
        "image",
        "convert",
        "disk.raw",
        "c.qcow2",
        "--data-file",
        "c.data",
        "--compress",
    ];
    let (kind, message) = rig.error(2, &words);
    assert_eq!(kind, "usage");
    assert!(message.contains("data file"), "{message}");
    assert!(!rig.path("c.qcow2").exists() && !rig.path("c.data").exists());
}

/// The disk of an internal snapshot is converted; a warning names the other snapshots and bitmaps, which are dropped.
#[test]
fn an_internal_snapshot_is_converted_with_a_warning_about_losses() {
    let (rig, bytes) = rig_with_disk();
    qemu_img(&rig, &["convert", "-f", "raw", "-O", "qcow2", "disk.raw", "disk.qcow2"]);
    qemu_img(&rig, &["snapshot", "-c", "before-upgrade", "disk.qcow2"]);
    qemu_img(&rig, &["bitmap", "--add", "disk.qcow2", "since-monday"]);
    system(
        "qemu-io",
        &[
            "-f",
            "qcow2",
            "-c",
            "write -P 0x55 1M 1M",
            text(&rig.path("disk.qcow2")),
        ],
    )
    .unwrap();
    let output = rig.code(
        0,
        &[
            "image",
            "convert",
            "disk.qcow2",
            "old.raw",
            "--snapshot",
            "before-upgrade",
        ],
    );
    assert!(rig.read("old.raw") == bytes);
    for name in ["before-upgrade", "since-monday", "not carried over"] {
        assert!(stderr(&output).contains(name), "{}", stderr(&output));
    }
    rig.ok(&[
        "image",
        "convert",
        "disk.qcow2",
        "now.qcow2",
        "--extended-l2",
        "--cluster-size",
        "32K",
        "--verify",
    ]);
    qemu_img(
        &rig,
        &["compare", "-f", "qcow2", "-F", "qcow2", "disk.qcow2", "now.qcow2"],
    );
    let made = rig.report(&["image", "info", "now.qcow2"])["images"][0].clone();
    assert_eq!(made["qcow2"]["bitmaps"].as_array().unwrap().len(), 0, "{made}");
    let (kind, message) = rig.error(1, &["image", "convert", "disk.qcow2", "x.raw", "--snapshot", "nothing"]);
    assert_eq!(kind, "not-found", "{message}");
    assert_eq!(
        rig.error(1, &["image", "convert", "old.raw", "x.raw", "--snapshot", "nothing"])
            .0,
        "not-found"
    );
    assert!(!rig.path("x.raw").exists());
}

/// A raw file on a file system with reflinks is copied at once, without new space.
#[test]
fn a_raw_copy_shares_blocks_if_the_file_system_supports_it() {
    let (rig, bytes) = rig_with_disk();
    let Some(_mounted) = file_system("xfs", &rig.path("mount"), 400 << 20) else {
        return;
    };
    rig.write("mount/disk.raw", &bytes);
    let report = rig.report(&["image", "convert", "mount/disk.raw", "mount/copy.raw", "--verify"]);
    let copy = rig.read("mount/copy.raw");
    let elsewhere = rig.report(&["image", "convert", "mount/disk.raw", "copy.raw"]);
    assert_eq!(
        (&report["is_cloned"], &elsewhere["is_cloned"]),
        (&true.into(), &false.into())
    );
    assert!(copy == bytes && rig.read("copy.raw") == bytes);
}
