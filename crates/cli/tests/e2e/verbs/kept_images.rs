//! Files that are part of an image or its base are kept: they are not replaced, mistaken for others, or damaged by a
//! repair.

use std::fs::File;

use crate::host::{system, text};
use crate::program::stdout;
use crate::rig::{Rig, noise};

const MIB: usize = 1 << 20;

fn rig() -> Rig {
    let rig = Rig::empty();
    rig.write("a.raw", &noise(3 * MIB, 1));
    rig
}

/// Creates a qcow2 image with an external data file.
fn create_with_data_file(rig: &Rig, data: &str) {
    rig.ok(&["image", "convert", "a.raw", "outside.qcow2", "--data-file", data]);
}

/// Asserts that the file is refused as a target, and unchanged.
fn assert_kept(rig: &Rig, file: &str, words: &[&str]) {
    let before = rig.read(file);
    let (kind, message) = rig.error(1, words);
    assert!(kind == "refused", "{words:?}: {message}");
    assert!(rig.read(file) == before, "{words:?}");
}

#[test]
fn an_image_does_not_replace_its_own_base() {
    let rig = rig();
    rig.ok(&["image", "convert", "a.raw", "base.qcow2"]);
    rig.ok(&["image", "create", "mid.qcow2", "-b", "base.qcow2"]);
    for base in ["base.qcow2", "mid.qcow2"] {
        assert_kept(
            &rig,
            "base.qcow2",
            &["image", "create", "--force", "base.qcow2", "-b", base],
        );
        assert_kept(
            &rig,
            "base.qcow2",
            &["image", "convert", "--force", "a.raw", "base.qcow2", "-b", base],
        );
    }
    for format in ["vdi", "vhd", "vhdx", "vmdk"] {
        let [parent, child] = ["parent", "child"].map(|name| format!("{name}.{format}"));
        rig.ok(&["image", "convert", "a.raw", &parent]);
        rig.ok(&["image", "create", &child, "--parent", &parent]);
        for of in [&parent, &child] {
            assert_kept(&rig, &parent, &["image", "create", "--force", &parent, "--parent", of]);
        }
    }
    // The data of a qcow2 image may be in an external file.
    create_with_data_file(&rig, "outside.data");
    assert_kept(
        &rig,
        "outside.data",
        &[
            "image",
            "convert",
            "--force",
            "--to",
            "qcow2",
            "outside.qcow2",
            "outside.data",
        ],
    );
    assert_kept(
        &rig,
        "outside.data",
        &[
            "image",
            "create",
            "--force",
            "--format",
            "qcow2",
            "outside.data",
            "-b",
            "outside.qcow2",
        ],
    );
    assert_eq!(
        rig.report(&["image", "compare", "a.raw", "outside.qcow2"])["is_equal"],
        true
    );
    // Unrelated files are replaced.
    rig.ok(&["image", "create", "--force", "mid.qcow2", "-b", "base.qcow2"]);
}

/// QEMU interprets a prefix before a colon as a protocol, unless the name contains a slash before it.
#[test]
fn names_with_colons_are_file_names() {
    let rig = rig();
    let base = "web1-2026-11-20T10:00.qcow2";
    rig.ok(&["image", "convert", "a.raw", base]);
    rig.ok(&["image", "create", "made.qcow2", "-b", base]);
    rig.ok(&["image", "convert", "a.raw", "converted.qcow2", "-b", base]);
    rig.ok(&["clone", base, "cloned.qcow2"]);
    // The file `file:x.qcow2`, beside the file that QEMU would open for this name.
    rig.ok(&["image", "create", "x.qcow2", "3M"]);
    rig.ok(&["image", "convert", "a.raw", "./file:x.qcow2"]);
    rig.ok(&["clone", "./file:x.qcow2", "right.qcow2"]);
    for image in ["made.qcow2", "converted.qcow2", "cloned.qcow2", "right.qcow2"] {
        assert_eq!(
            rig.report(&["image", "compare", "a.raw", image])["is_equal"],
            true,
            "{image}"
        );
        let (disk, path) = (rig.path("a.raw"), rig.path(image));
        let words = ["compare", "-f", "raw", "-F", "qcow2", text(&disk), text(&path)];
        system("qemu-img", &words).unwrap();
    }
    for format in ["vdi", "vhd", "vhdx", "vmdk"] {
        let [base, clone] = ["we:ird", "clone"].map(|name| format!("{name}.{format}"));
        rig.ok(&["image", "convert", "a.raw", &base]);
        rig.ok(&["clone", &base, &clone]);
        assert_eq!(
            rig.report(&["image", "compare", "a.raw", &clone])["is_equal"],
            true,
            "{format}"
        );
    }
    create_with_data_file(&rig, "da:ta");
    assert_eq!(
        rig.report(&["image", "compare", "a.raw", "outside.qcow2"])["is_equal"],
        true
    );
}

/// A check finds a truncated data file before any read beyond its end.
#[test]
fn a_truncated_data_file_is_found() {
    let rig = rig();
    create_with_data_file(&rig, "outside.data");
    rig.ok(&["image", "check", "outside.qcow2"]);
    let data = rig.read("outside.data");
    for cut in [1, MIB] {
        rig.write("outside.data", &data[..data.len() - cut]);
        rig.code(5, &["image", "check", "outside.qcow2"]);
        rig.code(5, &["image", "convert", "outside.qcow2", "out.raw"]);
    }
}

/// Regression: one flipped bit, and the disk seemed to be empty, without any error.
#[test]
fn a_damaged_disk_size_entry_is_damage() {
    let rig = rig();
    rig.ok(&["image", "convert", "a.raw", "v.vhdx"]);
    let bytes = rig.read("v.vhdx");
    // The entry for the size of the disk in the metadata table.
    let id = 0x2FA5_4224_u32.to_le_bytes();
    let entry = bytes.windows(4).position(|window| window == id).unwrap();
    let mut changed = bytes.clone();
    changed[entry + 16] ^= 0x20;
    rig.write("v.vhdx", &changed);
    for words in [
        &["image", "check", "v.vhdx"][..],
        &["image", "convert", "v.vhdx", "out.raw"],
    ] {
        rig.code(5, words);
    }
}

/// The offsets of the first grain tables of both directories of a VMDK.
fn tables(bytes: &[u8]) -> [usize; 2] {
    let number = |at: usize| usize::try_from(u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())).unwrap();
    // The second directory, and the first one, which is used for reading.
    [56, 48].map(|field| number(number(field) * 512) * 512)
}

fn put(rig: &Rig, at: usize, value: [u8; 4]) {
    let mut bytes = rig.read("disk.vmdk");
    bytes[at..at + 4].copy_from_slice(&value);
    rig.write("disk.vmdk", &bytes);
}

/// If a flipped bit damages the first directory, only the second one still refers to the grain.
#[test]
fn a_wrong_first_directory_is_repaired_from_the_second() {
    let rig = rig();
    rig.ok(&["image", "convert", "a.raw", "disk.vmdk"]);
    let bytes = rig.read("disk.vmdk");
    let [one, other] = tables(&bytes);
    for first in [one, other] {
        let entry = |number: usize| -> [u8; 4] {
            let at = first + number * 4;
            bytes[at..at + 4].try_into().unwrap()
        };
        // The entry refers to the grain of another range, or to none.
        for value in [entry(1), [0; 4]] {
            rig.write("disk.vmdk", &bytes);
            put(&rig, first, value);
            let is_over_another = first == one && value != [0; 4];
            rig.code(if is_over_another { 5 } else { 3 }, &["image", "check", "disk.vmdk"]);
            rig.ok(&["image", "check", "--repair", "disk.vmdk"]);
            assert_eq!(
                rig.report(&["image", "compare", "a.raw", "disk.vmdk"])["is_equal"],
                true,
                "{value:?}"
            );
            assert!(rig.read("disk.vmdk") == bytes, "{value:?}");
        }
        // An unreferenced grain at the end: either directory may be right.
        let mut longer = bytes.clone();
        let end = u32::try_from(longer.len().next_multiple_of(65_536) / 512).unwrap();
        longer.resize(longer.len().next_multiple_of(65_536) + 65_536, 7);
        rig.write("disk.vmdk", &longer);
        put(&rig, first, end.to_le_bytes());
        let before = rig.read("disk.vmdk");
        rig.code(5, &["image", "check", "disk.vmdk"]);
        rig.code(5, &["image", "check", "--repair", "disk.vmdk"]);
        assert_eq!(tables(&rig.read("disk.vmdk")), [one, other]);
        for table in [one, other] {
            assert_eq!(
                rig.read("disk.vmdk")[table..table + 4],
                before[table..table + 4],
                "the entry is unchanged"
            );
        }
    }
}

/// Regression: an entry of the second directory that refers to the middle of a grain counted as one that the first
/// directory has lost.
#[test]
fn an_entry_into_the_middle_of_a_grain_is_not_restored() {
    let rig = rig();
    rig.write("little.raw", &noise(65_536, 3));
    system("truncate", &["-s", "64M", text(&rig.path("little.raw"))]).unwrap();
    rig.ok(&["image", "convert", "little.raw", "disk.vmdk"]);
    let [first, second] = tables(&rig.read("disk.vmdk"));
    let grain = u32::from_le_bytes(rig.read("disk.vmdk")[first..first + 4].try_into().unwrap());
    put(&rig, second + 400, (grain + 4).to_le_bytes());
    put(&rig, first + 640, 0x7f00_0000_u32.to_le_bytes());
    rig.code(5, &["image", "check", "disk.vmdk"]);
    rig.ok(&["image", "check", "--repair", "disk.vmdk"]);
    rig.ok(&["image", "check", "disk.vmdk"]);
    assert_eq!(
        rig.report(&["image", "compare", "little.raw", "disk.vmdk"])["is_equal"],
        true
    );
    // If both directories have the entry, it is damage.
    put(&rig, first + 400, (grain + 4).to_le_bytes());
    put(&rig, second + 400, (grain + 4).to_le_bytes());
    rig.code(5, &["image", "check", "disk.vmdk"]);
}

#[test]
fn a_repair_does_not_hide_a_doubtful_entry() {
    let rig = rig();
    rig.ok(&["image", "convert", "a.raw", "disk.qcow2"]);
    let mut bytes = rig.read("disk.qcow2");
    let number = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let l1 = usize::try_from(number(&bytes, 40)).unwrap();
    let l2 = usize::try_from(number(&bytes, l1) & 0x00ff_ffff_ffff_fe00).unwrap();
    bytes[l2] ^= 0x40;
    rig.write("disk.qcow2", &bytes);
    rig.code(5, &["image", "check", "disk.qcow2"]);
    rig.code(5, &["image", "check", "--repair", "disk.qcow2"]);
    assert!(rig.read("disk.qcow2")[l2..l2 + 8] == bytes[l2..l2 + 8]);
    rig.code(5, &["image", "check", "disk.qcow2"]);
}

/// Regression: one flipped bit made an empty entry of a qcow2 refer to a free cluster, and a repair allocated that
/// cluster to it.
#[test]
fn an_entry_for_a_free_cluster_is_not_repaired_automatically() {
    let rig = rig();
    rig.write("little.raw", &noise(65_536, 3));
    system("truncate", &["-s", "16M", text(&rig.path("little.raw"))]).unwrap();
    rig.ok(&["image", "convert", "little.raw", "disk.qcow2"]);
    let mut bytes = rig.read("disk.qcow2");
    let number = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let l1 = usize::try_from(number(&bytes, 40)).unwrap();
    let l2 = usize::try_from(number(&bytes, l1) & 0x00ff_ffff_ffff_fe00).unwrap();
    let free = bytes.len().next_multiple_of(65_536);
    bytes[l2 + 80..l2 + 88].copy_from_slice(&(free as u64).to_be_bytes());
    bytes.resize(free + 65_536, 7);
    rig.write("disk.qcow2", &bytes);
    rig.code(5, &["image", "check", "disk.qcow2"]);
    rig.code(5, &["image", "check", "--repair", "disk.qcow2"]);
    rig.code(5, &["image", "check", "disk.qcow2"]);
    rig.code(3, &["image", "convert", "disk.qcow2", "out.raw"]);
    rig.ok(&["image", "check", "--repair=all", "disk.qcow2"]);
}

/// Missing data must not be read as zeroes.
#[test]
fn a_source_truncated_while_it_is_read_is_reported() {
    let rig = Rig::empty();
    rig.write("a.raw", &noise(40 * MIB, 2));
    let read = holdfast_image::open(&rig.path("a.raw"), &holdfast_image::OpenOptions::default()).unwrap();
    let file = File::options().write(true).open(rig.path("a.raw")).unwrap();
    file.set_len(10 * MIB as u64).unwrap();
    let device = read.device();
    let mut buffer = vec![1; MIB];
    device.read_at(&mut buffer, 9 * MIB as u64).unwrap();
    let error = device.read_at(&mut buffer, 10 * MIB as u64).unwrap_err();
    assert!(error.to_string().contains("read"), "{error}");
    assert!(device.extents(0..40 * MIB as u64, 100).is_err());
}

#[test]
fn the_base_of_another_image_is_not_replaced() {
    let rig = rig();
    for format in ["qcow2", "vdi", "vhd", "vhdx", "vmdk"] {
        let [base, child] = ["base", "child"].map(|name| format!("{name}.{format}"));
        rig.ok(&["image", "convert", "a.raw", &base]);
        let option = if format == "qcow2" { "-b" } else { "--parent" };
        rig.ok(&["image", "create", &child, option, &base]);
        for words in [
            &["image", "create", "--force", &base, "1M"][..],
            &["image", "convert", "--force", "a.raw", &base],
        ] {
            assert_kept(&rig, &base, words);
        }
        std::fs::remove_file(rig.path(&child)).unwrap();
        rig.ok(&["image", "convert", "--force", "a.raw", &base]);
    }
}

#[test]
fn an_image_cannot_be_its_own_data_file() {
    let rig = rig();
    std::fs::create_dir(rig.path("sub")).unwrap();
    rig.ok(&["image", "convert", "a.raw", "there.qcow2"]);
    for (name, data) in [
        ("k.qcow2", "k.qcow2"),
        ("k.qcow2", "sub/../k.qcow2"),
        ("there.qcow2", "there.qcow2"),
    ] {
        let before = rig.names(".");
        for words in [
            &["image", "create", "--force", name, "10M", "--data-file", data][..],
            &["image", "create", name, "10M", "--data-file", data],
            &["image", "convert", "--force", "a.raw", name, "--data-file", data],
        ] {
            let (_, message) = rig.error(2, words);
            assert!(message.contains("the file of its data"), "{words:?}: {message}");
        }
        assert_eq!(rig.names("."), before);
    }
    rig.ok(&["image", "check", "there.qcow2"]);
}

/// The folder is the disk, with all of its deltas.
#[test]
fn a_parallels_folder_is_checked_completely_and_not_resized() {
    let rig = rig();
    rig.ok(&["image", "convert", "a.raw", "a.hdd"]);
    rig.ok(&["clone", "a.hdd", "b.hdd", "--copy"]);
    let (kind, _) = rig.error(1, &["image", "resize", "b.hdd/root.hds", "+1M"]);
    assert_eq!(kind, "unsupported");
    let mut delta = rig.read("a.hdd/root.hds");
    delta.truncate(2 * MIB);
    rig.write("a.hdd/root.hds", &delta);
    let report = rig.run(&["image", "check", "a.hdd"]);
    assert_eq!(report.status.code(), Some(5), "{report:?}");
    assert!(stdout(&report).contains("root.hds: "), "{report:?}");
    for format in ["vhdx", "vmdk", "hdd"] {
        rig.error(2, &["image", "create", &format!("none.{format}"), "0"]);
    }
}
