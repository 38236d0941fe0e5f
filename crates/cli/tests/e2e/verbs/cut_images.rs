//! Images that are truncated, have an odd size, or are being written: a wrong disk is never returned without a warning.

use std::fs::File;
use std::process::{Command, Stdio};

use crate::host::text;
use crate::rig::{Rig, noise};

const MIB: usize = 1 << 20;

/// Regression: the missing end of a truncated disk was read as zeroes without a warning.
#[test]
fn every_verb_reports_a_truncated_image_as_damaged() {
    let rig = Rig::new();
    rig.write("disk.raw", &noise(8 * MIB, 1));
    let images = [
        ("a.vdi", &[][..]),
        ("fixed.vdi", &["--fixed"]),
        ("a.vhdx", &[]),
        ("fixed.vhdx", &["--fixed"]),
        ("a.hds", &[]),
        ("a.vmdk", &[]),
        ("a.vhd", &[]),
        ("a.qcow2", &[]),
        ("large.qcow2", &["--cluster-size", "2M"]),
        ("sub.qcow2", &["--extended-l2"]),
    ];
    for (image, options) in images {
        rig.ok(&[&["image", "convert", "disk.raw", image][..], options].concat());
        let whole = rig.read(image);
        for cut in [700, 3 * MIB] {
            File::options()
                .write(true)
                .open(rig.path(image))
                .unwrap()
                .set_len((whole.len() - cut) as u64)
                .unwrap();
            let what = format!("{image} without {cut} bytes");
            let before = rig.names(".");
            for words in [
                &["image", "check", image][..],
                &["image", "info", image],
                &["image", "map", image],
                &["image", "compare", image, "disk.raw"],
                &["image", "convert", "--verify", image, "out.raw"],
                &["image", "convert", image, "out.qcow2"],
                &["clone", "--copy", image, "out.img"],
                &["backup", "--machine", "cut", image],
                &["image", "resize", image, "16M"],
            ] {
                let output = rig.run(words);
                assert_eq!(output.status.code(), Some(5), "{what}: {words:?}: {output:?}");
            }
            assert_eq!(rig.names("."), before, "{what}");
            rig.write(image, &whole);
        }
        assert_eq!(rig.report(&["image", "compare", "disk.raw", image])["is_equal"], true);
    }
    assert_eq!(rig.snapshot_count(), 0);
}

/// Regression: a descriptor without its extents was read as an empty disk, and one with fewer sectors as a shorter
/// disk.
#[test]
fn every_verb_reports_a_vmdk_descriptor_without_extents_as_damaged() {
    let rig = Rig::new();
    rig.write("disk.raw", &noise(MIB, 1));
    rig.ok(&["image", "convert", "disk.raw", "a.vmdk"]);
    let whole = rig.read("a.vmdk");
    for (what, from, to) in [
        ("no extent", "RW 2048", "XX 2048"),
        ("fewer sectors", "RW 2048 ", "RW 204  "),
        ("a text that ends", "createType", "\0\0\0\0\0\0\0\0\0\0"),
        ("another extent", "SPARSE \"a.vmdk\"", "ZERO           "),
    ] {
        let mut bytes = whole.clone();
        let at = bytes.windows(from.len()).position(|part| part == from.as_bytes());
        let at = at.expect("the descriptor says so");
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
        rig.write("a.vmdk", &bytes);
        for words in [
            &["image", "check", "a.vmdk"][..],
            &["image", "convert", "a.vmdk", "out.raw"],
            &["backup", "--machine", "cut", "a.vmdk"],
        ] {
            let output = rig.run(words);
            assert_eq!(output.status.code(), Some(5), "{what}: {words:?}: {output:?}");
        }
    }
    assert_eq!(rig.snapshot_count(), 0);
}

#[test]
fn qemu_reads_disks_of_odd_sizes_completely() {
    let rig = Rig::empty();
    for length in [1, 513, MIB + 1000] {
        let bytes = noise(length, 3);
        rig.write("disk.raw", &bytes);
        for options in [&[][..], &["--compress"]] {
            rig.ok(&[
                &["image", "convert", "--force", "--verify", "disk.raw", "disk.qcow2"][..],
                options,
            ]
            .concat());
            let converted = by_qemu(&rig, &["convert", "-O", "raw", "disk.qcow2", "back.raw"]);
            assert!(converted.success(), "{length}");
            let converted = rig.read("back.raw");
            assert!(
                converted.len() == length.next_multiple_of(512) && converted.starts_with(&bytes),
                "{length}: {}",
                converted.len()
            );
        }
        rig.ok(&["image", "create", &format!("{length}.qcow2"), &length.to_string()]);
        let info = rig.report(&["image", "info", &format!("{length}.qcow2")]);
        assert_eq!(info["images"][0]["size_bytes"], length.next_multiple_of(512), "{info}");
    }
}

#[test]
fn an_image_written_during_conversion_is_warned_about() {
    let rig = Rig::empty();
    rig.write("disk.raw", &noise(MIB, 5));
    rig.ok(&["image", "convert", "disk.raw", "disk.qcow2"]);
    let socket = rig.path("nbd");
    let served = by_qemu_nbd(
        &rig,
        &[
            "-f",
            "qcow2",
            "-k",
            text(&socket),
            "--fork",
            "--pid-file",
            "pid",
            "disk.qcow2",
        ],
    );
    assert!(served.success());
    let document = rig.json(3, &["image", "convert", "disk.qcow2", "out.raw"]);
    let pid = String::from_utf8(rig.read("pid")).unwrap().trim().parse().unwrap();
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid).unwrap(),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    assert!(document["warnings"].to_string().contains("is in use"), "{document}");
}

#[expect(clippy::disallowed_methods, reason = "another program reads the images")]
fn by_qemu(rig: &Rig, words: &[&str]) -> std::process::ExitStatus {
    Command::new("qemu-img")
        .args(words)
        .current_dir(rig.path("."))
        .status()
        .unwrap()
}

#[expect(clippy::disallowed_methods, reason = "another program has the image open")]
fn by_qemu_nbd(rig: &Rig, words: &[&str]) -> std::process::ExitStatus {
    Command::new("qemu-nbd")
        .args(words)
        .current_dir(rig.path("."))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap()
}

/// Otherwise the container would become the disk without a warning.
#[test]
fn a_misleading_image_name_is_warned_about() {
    let rig = Rig::empty();
    rig.write("disk.raw", &noise(MIB, 6));
    rig.ok(&["image", "convert", "disk.raw", "disk.qcow2"]);
    let mut bytes = rig.read("disk.qcow2");
    bytes[0] ^= 1;
    rig.write("disk.qcow2", &bytes);
    let document = rig.json(3, &["image", "convert", "disk.qcow2", "out.raw"]);
    assert!(
        document["warnings"].to_string().contains("has the name of a qcow2"),
        "{document}"
    );
    rig.ok(&[
        "image",
        "convert",
        "--force",
        "--format",
        "raw",
        "disk.qcow2",
        "out.raw",
    ]);
    // A folder of Parallels with a damaged descriptor is not read as a raw disk.
    for text in ["", "<?xml version=\"1.0\"?><Parallels_disk_image"] {
        rig.write("disk.hdd/DiskDescriptor.xml", text.as_bytes());
        let (kind, message) = rig.error(5, &["image", "convert", "disk.hdd", "none.raw"]);
        assert_eq!(kind, "damage", "{message}");
    }
}

/// Otherwise the archive would be stored as a disk that no machine can read.
#[test]
fn a_machine_archive_is_refused_as_an_image() {
    let rig = Rig::new();
    for name in ["m.ova", "m.vma.zst", "m.xva", "m.xva.zstd"] {
        rig.write(name, &noise(10_240, 6));
        for words in [
            &["clone", name, "out.qcow2"][..],
            &["image", "convert", name, "out.qcow2"],
            &["image", "info", name],
            &["image", "map", name],
            &["template", "push", "t:1", name, "--unsigned"],
            &["backup", name],
        ] {
            let (_, message) = rig.error(2, words);
            assert!(
                message.contains("has the name of a machine archive"),
                "{words:?}: {message}"
            );
        }
    }
    rig.ok(&["image", "convert", "--format", "raw", "m.ova", "out.qcow2"]);
}

/// Regression: bits of sectors past the end of the file were read as zeroes, so the block seemed to be unallocated.
#[test]
fn every_verb_reports_a_vhd_block_past_the_end_as_damaged() {
    let rig = Rig::new();
    rig.write("disk.raw", &noise(6 * MIB, 1));
    rig.ok(&["image", "convert", "disk.raw", "a.vhd"]);
    let mut bytes = rig.read("a.vhd");
    bytes[1536..1540].copy_from_slice(&0x0010_0000_u32.to_be_bytes());
    rig.write("a.vhd", &bytes);
    for words in [
        &["image", "check", "a.vhd"][..],
        &["image", "convert", "--verify", "a.vhd", "out.raw"],
        &["backup", "--machine", "cut", "a.vhd"],
    ] {
        let output = rig.run(words);
        assert_eq!(output.status.code(), Some(5), "{words:?}: {output:?}");
    }
}

/// Regression: a table entry referred to wrong bytes of the image, which were returned as the disk without a warning.
#[test]
fn an_inconsistent_image_is_read_with_a_warning() {
    let rig = Rig::new();
    let disk = noise(4 * MIB, 1);
    rig.write("disk.raw", &disk);
    rig.ok(&["image", "convert", "disk.raw", "base.qcow2"]);
    rig.ok(&["clone", "base.qcow2", "top.qcow2"]);
    let whole = rig.read("base.qcow2");
    let number = |at: usize| usize::try_from(u64::from_be_bytes(whole[at..at + 8].try_into().unwrap())).unwrap();
    let place = |entry: usize| entry & 0x00ff_ffff_ffff_fe00;
    let table = place(number(place(number(40))));
    let mut bytes = whole.clone();
    bytes.copy_within(table..table + 8, table + 8);
    for (image, is_sound) in [(&whole, true), (&bytes, false)] {
        rig.write("base.qcow2", image);
        for (number, words) in [
            &["image", "convert", "base.qcow2", "a.raw"][..],
            &["image", "convert", "--verify", "top.qcow2", "b.raw"],
            &["image", "convert", "base.qcow2", "-"],
            &["clone", "--copy", "top.qcow2", "c.qcow2"],
            &["backup", "--machine", "web1", "base.qcow2"],
            &["backup", "--machine", "web2", "top.qcow2"],
        ]
        .into_iter()
        .enumerate()
        {
            let output = rig.run(words);
            let (message, code) = (String::from_utf8_lossy(&output.stderr), output.status.code());
            assert_eq!(code, Some(if is_sound { 0 } else { 3 }), "{number}: {message}");
            let is_warned = message.contains("base.qcow2 is inconsistent") && message.contains("image check");
            assert_eq!(is_warned, !is_sound, "{number}: {message}");
        }
        assert_eq!(rig.read("a.raw") == disk, is_sound);
        for made in ["a.raw", "b.raw", "c.qcow2"] {
            std::fs::remove_file(rig.path(made)).unwrap();
        }
    }
}

/// Regression: an entry of a qcow2 without an offset was read as zeroes, and a repair freed the cluster that it had
/// referred to.
#[test]
fn an_entry_without_an_offset_is_damage_and_its_cluster_is_not_freed() {
    let rig = Rig::new();
    let disk = noise(2 * MIB, 1);
    rig.write("disk.raw", &disk);
    rig.ok(&["image", "convert", "disk.raw", "sound.qcow2"]);
    let whole = rig.read("sound.qcow2");
    let number = |at: usize| usize::try_from(u64::from_be_bytes(whole[at..at + 8].try_into().unwrap())).unwrap();
    let place = |entry: usize| entry & 0x00ff_ffff_ffff_fe00;
    let l1 = number(40);
    let l2 = place(number(l1));
    for (what, entry) in [("of L1", l1), ("of L2", l2 + 8)] {
        let mut bytes = whole.clone();
        bytes[entry..entry + 8].copy_from_slice(&(1_u64 << 63).to_be_bytes());
        rig.write("a.qcow2", &bytes);
        rig.code(5, &["image", "check", "a.qcow2"]);
        let message = rig.run(&["image", "convert", "a.qcow2", "a.raw"]);
        assert_eq!(message.status.code(), Some(3), "{what}: {message:?}");
        assert!(rig.read("a.raw") != disk);
        std::fs::remove_file(rig.path("a.raw")).unwrap();
        rig.code(5, &["image", "check", "--repair", "a.qcow2"]);
        bytes = rig.read("a.qcow2");
        bytes[entry..entry + 8].copy_from_slice(&whole[entry..entry + 8]);
        rig.write("a.qcow2", &bytes);
        rig.code(0, &["image", "check", "a.qcow2"]);
        assert_eq!(
            rig.report(&["image", "compare", "disk.raw", "a.qcow2"])["is_equal"],
            true
        );
        bytes[entry..entry + 8].copy_from_slice(&(1_u64 << 63).to_be_bytes());
        rig.write("a.qcow2", &bytes);
        rig.ok(&["image", "check", "--repair=all", "a.qcow2"]);
        rig.code(0, &["image", "check", "a.qcow2"]);
    }
}

/// Damage that prevents a check need not prevent reading.
#[test]
fn missing_refcounts_are_warned_about_and_lazy_refcounts_are_not() {
    let rig = Rig::new();
    let disk = noise(2 * MIB, 1);
    rig.write("disk.raw", &disk);
    rig.ok(&["image", "convert", "disk.raw", "a.qcow2"]);
    let whole = rig.read("a.qcow2");
    for (at, value) in [(48, 0_u64), (48, 1 << 40), (48, 700)] {
        let mut bytes = whole.clone();
        bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
        rig.write("a.qcow2", &bytes);
        let output = rig.run(&["image", "convert", "a.qcow2", "a.raw"]);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(3), "{value}: {message}");
        assert!(message.contains("a.qcow2 is inconsistent"), "{message}");
        assert!(rig.read("a.raw") == disk);
        std::fs::remove_file(rig.path("a.raw")).unwrap();
    }
    // Outdated refcounts, as after a crash with lazy refcounts.
    let mut bytes = whole;
    let refcounts = usize::try_from(u64::from_be_bytes(bytes[48..56].try_into().unwrap())).unwrap();
    let block = usize::try_from(u64::from_be_bytes(bytes[refcounts..refcounts + 8].try_into().unwrap())).unwrap();
    bytes[block + 12..block + 16].fill(0);
    bytes[79] |= 1;
    rig.write("a.qcow2", &bytes);
    let output = rig.run(&["image", "convert", "a.qcow2", "a.raw"]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        message.contains("was not closed cleanly") && !message.contains("is inconsistent"),
        "{message}"
    );
    assert!(rig.read("a.raw") == disk);
}

/// If the missing end of a deflate stream is replaced by zeroes, it may decode to other data.
#[test]
fn a_truncated_compressed_image_never_reads_wrong_data() {
    let rig = Rig::new();
    let text: Vec<u8> = (0..400_000_u64)
        .flat_map(|number| format!("line {}\n", number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40).into_bytes())
        .take(4 * MIB)
        .collect();
    rig.write("disk.raw", &text);
    for (image, options) in [
        ("zlib.qcow2", &[][..]),
        ("zstd.qcow2", &["--compression", "zstd"]),
        ("stream.vmdk", &[]),
    ] {
        rig.ok(&[&["image", "convert", "--compress", "disk.raw", image][..], options].concat());
        let whole = rig.read(image);
        for cut in [9000, 70_000] {
            rig.write(image, &whole[..whole.len() - cut]);
            for words in [
                &["image", "check", image][..],
                &["image", "convert", image, "out.raw"],
                &["backup", "--machine", "cut", image],
            ] {
                let output = rig.run(words);
                assert_eq!(
                    output.status.code(),
                    Some(5),
                    "{image} without {cut} bytes: {words:?}: {output:?}"
                );
            }
        }
    }
}

/// Regression: offsets far beyond the end were printed in the map.
#[test]
fn offsets_beyond_the_end_of_a_vdi_are_an_error() {
    let rig = Rig::new();
    rig.write("disk.raw", &noise(MIB, 5));
    rig.ok(&["image", "convert", "disk.raw", "a.vdi"]);
    let mut image = rig.read("a.vdi");
    let map = usize::try_from(u32::from_le_bytes(image[0x154..0x158].try_into().unwrap())).unwrap();
    image[map..map + 4].copy_from_slice(&[0xfd, 0xff, 0xff, 0xff]);
    rig.write("a.vdi", &image);
    for format in [&[][..], &["--json"]] {
        rig.code(5, &[&["image", "map", "a.vdi"][..], format].concat());
    }
}
