//! Damages and repairs images of QEMU: afterwards QEMU finds no problem, reads the same disk, and its own repair has
//! the same result.

use std::fs;
use std::path::Path;

use holdfast_image::{
    BackingFile, CreateOptions, Error, Format, OpenOptions, RepairAction, RepairIntent, RepairMode, check, create,
    open, plan_repair,
};

use crate::peer::{
    Lab, QemuIo, assert_clean, assert_reads_as, flatten, overwrite, path_text, qemu_check, qemu_img, qemu_io_as,
    sample_disk,
};

const MIB: u64 = 1 << 20;

fn repair(image: &Path, mode: RepairMode) -> Vec<&'static str> {
    let options = OpenOptions::default();
    let before = fs::read(image).unwrap();
    let looked = plan_repair(image, &options, mode, RepairIntent::Look).unwrap();
    let planned: Vec<_> = looked.actions().iter().map(RepairAction::name).collect();
    drop(looked);
    assert!(fs::read(image).unwrap() == before, "planning changed the image");
    let plan = plan_repair(image, &options, mode, RepairIntent::Repair).unwrap();
    let actions: Vec<_> = plan.actions().iter().map(RepairAction::name).collect();
    assert_eq!(actions, planned, "the actions differ from the plan");
    let after = plan.after().clone();
    assert_eq!(plan.execute().unwrap(), after);
    actions
}

/// An image of this disk, written by QEMU.
fn by_qemu(lab: &Lab, name: &str, words: &str, disk: &[u8]) -> std::path::PathBuf {
    let (raw, image) = (lab.path("source.raw"), lab.path(name));
    overwrite(&raw, disk);
    let mut arguments = vec!["convert", "-f", "raw"];
    arguments.extend(words.split_whitespace());
    arguments.extend([path_text(&raw), path_text(&image)]);
    qemu_img(&arguments);
    image
}

fn change(image: &Path, damage: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(image).unwrap();
    damage(&mut bytes);
    overwrite(image, &bytes);
}

fn be64(bytes: &[u8], at: usize) -> usize {
    usize::try_from(u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00).unwrap()
}

/// Damages an image.
type Damage = fn(&mut Vec<u8>);

/// File name, arguments of qemu-img, damage, mode of the repair, and expected actions.
type Case = (&'static str, &'static str, Damage, RepairMode, &'static [&'static str]);

const QCOW2_DAMAGE: [(&str, Damage, RepairMode, &[&str]); 5] = [
    (
        "leaks",
        |bytes| {
            // Clusters at the end with a refcount, but without data.
            let block = be64(bytes, be64(bytes, 48));
            let clusters = bytes.len().div_ceil(65_536);
            bytes.resize((clusters + 6) * 65_536, 0);
            bytes[block + 2 * clusters + 1] = 1;
            bytes[block + 2 * clusters + 9] = 3;
        },
        RepairMode::Leaks,
        &["refcounts"],
    ),
    (
        "counts of zero",
        |bytes| {
            let block = be64(bytes, be64(bytes, 48));
            bytes[block + 8..block + 40].fill(0);
        },
        RepairMode::Safe,
        &["refcounts"],
    ),
    (
        "no counts",
        |bytes| {
            let table = be64(bytes, 48);
            bytes[table..table + 8].fill(0);
        },
        RepairMode::Safe,
        &["refcounts-rebuilt"],
    ),
    (
        "flags",
        |bytes| {
            let l1 = be64(bytes, 40);
            let l2 = be64(bytes, l1);
            bytes[l1] ^= 0x80;
            for at in (l2..l2 + 800).step_by(8) {
                if be64(bytes, at) != 0 {
                    bytes[at] &= 0x7f;
                }
            }
        },
        RepairMode::Safe,
        &["copied-flags"],
    ),
    (
        "marks",
        |bytes| bytes[79] |= 3,
        RepairMode::Safe,
        &["mark-cleared", "mark-cleared"],
    ),
];

#[test]
fn repaired_qcow2_passes_qemu_check() {
    for (name, damage, mode, actions) in QCOW2_DAMAGE {
        let lab = Lab::new();
        let disk = sample_disk(12 * MIB, 6);
        let image = by_qemu(&lab, "image.qcow2", "-O qcow2", &disk);
        lab.qemu_img("snapshot -c first image.qcow2");
        qemu_io_as("qcow2", &image, &["write -P 0x77 1M 3M", "write -z 5M 1M"]);
        let now = flatten(&image, &lab);
        change(&image, damage);
        assert!(!check(&image, &OpenOptions::default()).unwrap().is_clean(), "{name}");
        // QEMU repairs the same damage.
        let copy = lab.path("copy.qcow2");
        fs::copy(&image, &copy).unwrap();
        let how = if mode == RepairMode::Leaks { "leaks" } else { "all" };
        qemu_img(&["check", "-q", "-f", "qcow2", "-r", how, path_text(&copy)]);
        assert_eq!(repair(&image, mode), actions, "{name}");
        assert_eq!(qemu_check(&image), (0, 0), "{name}");
        assert_clean(&image);
        for image in [&image, &copy] {
            assert!(flatten(image, &lab) == now, "{name}");
        }
        assert!(
            repair(&copy, RepairMode::All).is_empty(),
            "{name}: the peer finds further damage"
        );
        // The image can be written again, and its snapshot is unchanged.
        qemu_io_as("qcow2", &image, &["write -P 0x11 0 6M"]);
        lab.qemu_img("snapshot -a first image.qcow2");
        assert!(flatten(&image, &lab) == disk, "{name}: the snapshot");
        assert_eq!(qemu_check(&image), (0, 0), "{name}: written again");
    }
}

#[test]
fn overlay_with_discarded_clusters_reads_backing() {
    let lab = Lab::new();
    let disk = sample_disk(4 * MIB, 7);
    by_qemu(&lab, "base.qcow2", "-O qcow2", &disk);
    let mut options = CreateOptions::qcow2(4 * MIB);
    options.qcow2.backing = Some(BackingFile {
        name: "base.qcow2".to_owned(),
        format: Format::Qcow2,
    });
    let image = lab.path("top.qcow2");
    create(&image, &options).unwrap();
    qemu_io_as("qcow2", &image, &["write -P 9 0 256k"]);
    change(&image, |bytes| {
        let entry = be64(bytes, be64(bytes, 40));
        bytes[entry..entry + 8].copy_from_slice(&(1_u64 << 63 | 1 << 40).to_be_bytes());
    });
    assert_eq!(repair(&image, RepairMode::Safe), [""; 0]);
    assert_eq!(repair(&image, RepairMode::All), ["entries-discarded", "refcounts"]);
    assert_eq!(qemu_check(&image), (0, 0));
    let mut expected = disk;
    expected[65_536..262_144].fill(9);
    assert_reads_as(&open(&image, &OpenOptions::default()).unwrap(), &expected, "repaired");
    assert!(flatten(&image, &lab) == expected);
}

/// Snapshots share clusters and tables, and compressed clusters share host clusters: none of that is cross-linked.
#[test]
fn cross_linked_clusters_are_reported_until_copied() {
    for words in ["-O qcow2", "-c -O qcow2", "-O qcow2 -o extended_l2=on"] {
        let lab = Lab::new();
        let disk = sample_disk(12 * MIB, 6);
        let image = by_qemu(&lab, "image.qcow2", words, &disk);
        lab.qemu_img("snapshot -c first image.qcow2");
        qemu_io_as("qcow2", &image, &["write -P 0x77 1M 1M", "write -P 0x78 2M 1M"]);
        lab.qemu_img("snapshot -c second image.qcow2");
        assert_clean(&image);
        let mut now = flatten(&image, &lab);
        let entry_bytes = if words.contains("extended") { 16 } else { 8 };
        change(&image, |bytes| {
            let l2 = be64(bytes, be64(bytes, 40));
            let from = l2 + 16 * entry_bytes;
            bytes.copy_within(from..from + entry_bytes, l2 + 32 * entry_bytes);
        });
        now.copy_within(16 << 16..17 << 16, 32 << 16);
        let options = OpenOptions::default();
        assert_eq!(check(&image, &options).unwrap().corruption_count, 2, "{words}");
        assert_eq!(repair(&image, RepairMode::Leaks), [""; 0], "{words}");
        // The ranges are separate from now on, and the data of the second one is unchanged.
        assert_eq!(repair(&image, RepairMode::Safe), ["refcounts"], "{words}");
        let report = check(&image, &options).unwrap();
        assert_eq!((report.corruption_count, report.leak_count), (1, 1), "{words}");
        assert_eq!(repair(&image, RepairMode::All), ["separated", "refcounts"], "{words}");
        assert_eq!(qemu_check(&image), (0, 0), "{words}");
        assert_clean(&image);
        assert!(flatten(&image, &lab) == now, "{words}");
        lab.qemu_img("snapshot -a first image.qcow2");
        assert!(flatten(&image, &lab) == disk, "{words}: the snapshot");
    }
}

/// A repair ignored the data file, found no problem, and cleared the mark.
#[test]
fn repair_reports_truncated_data_file() {
    let lab = Lab::new();
    let (image, data) = (lab.path("image.qcow2"), lab.path("image.data"));
    overwrite(&lab.path("source.raw"), &vec![5; 4 << 20]);
    lab.qemu_img("convert -f raw -O qcow2 -o data_file=image.data source.raw image.qcow2");
    let cut = fs::File::options().write(true).open(&data).unwrap();
    cut.set_len(3 * MIB).unwrap();
    change(&image, |bytes| bytes[79] |= 2);
    let options = OpenOptions::default();
    let found = check(&image, &options).unwrap();
    assert!(found.corruption_count > 16, "{:?}", found.problems);
    for mode in [RepairMode::Leaks, RepairMode::Safe, RepairMode::All] {
        let plan = plan_repair(&image, &options, mode, RepairIntent::Look).unwrap();
        assert_eq!(plan.actions(), [], "{mode:?}");
        assert_eq!(plan.after(), &found, "{mode:?}");
        assert!(repair(&image, mode).is_empty(), "{mode:?}");
    }
    // Complete again, except for the mark.
    cut.set_len(4 * MIB).unwrap();
    assert_eq!(repair(&image, RepairMode::Safe), ["mark-cleared"]);
    fs::remove_file(&data).unwrap();
    let missing = |error: Error| matches!(error, Error::Io { action: "open", .. });
    assert!(missing(check(&image, &options).unwrap_err()));
    let planned = plan_repair(&image, &options, RepairMode::Safe, RepairIntent::Repair);
    assert!(missing(planned.map(drop).unwrap_err()));
}

#[test]
fn repaired_block_formats_are_read_by_qemu() {
    let disk = sample_disk(8 * MIB, 8);
    let cases: [Case; 7] = [
        (
            "image.vhd",
            "-O vpc -o force_size=on",
            |bytes| bytes.truncate(bytes.len() - 512),
            RepairMode::Safe,
            &["rewritten"],
        ),
        (
            "image.vhd",
            "-O vpc -o force_size=on",
            |bytes| bytes[100] ^= 1,
            RepairMode::Safe,
            &["rewritten"],
        ),
        (
            "image.vhd",
            "-O vpc -o force_size=on,subformat=fixed",
            |bytes| bytes.truncate(bytes.len() - 1),
            RepairMode::Safe,
            &["number"],
        ),
        (
            "image.vhdx",
            "-O vhdx",
            |bytes| bytes[(64 << 10) + 20] ^= 1,
            RepairMode::Safe,
            &["rewritten"],
        ),
        (
            "image.vdi",
            "-O vdi",
            |bytes| bytes[0x184..0x188].fill(0),
            RepairMode::Safe,
            &["number"],
        ),
        (
            "image.vmdk",
            "-O vmdk",
            |bytes| {
                let place = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) * 512;
                let directory = usize::try_from(place(56)).unwrap();
                bytes[directory..directory + 4].fill(0xff);
                bytes[72] = 1;
            },
            RepairMode::Safe,
            &["from-second-copy", "mark-cleared"],
        ),
        (
            "image.hds",
            "-O parallels",
            |bytes| {
                bytes[44..48].copy_from_slice(&0x746f_6e59_u32.to_le_bytes());
                bytes.resize(bytes.len() + (3 << 20), 7);
            },
            RepairMode::Safe,
            &["truncated", "mark-cleared"],
        ),
    ];
    for (name, words, damage, mode, actions) in cases {
        let lab = Lab::new();
        let image = by_qemu(&lab, name, words, &disk);
        change(&image, damage);
        assert_eq!(repair(&image, mode), actions, "{words}");
        assert_reads_as(&open(&image, &OpenOptions::default()).unwrap(), &disk, words);
        let format = words.split_whitespace().nth(1).unwrap();
        assert!(flatten(&image, &lab)[..disk.len()] == disk, "{words}");
        if format != "vpc" {
            qemu_img(&["check", "-q", "-f", format, path_text(&image)]);
        }
        let report = check(&image, &OpenOptions::default()).unwrap();
        assert_eq!(report.problems, [], "{words}");
    }
}

#[test]
fn locked_and_raw_images_are_not_repaired() {
    let lab = Lab::new();
    let options = OpenOptions::default();
    // An empty image: the growth of the file shows that qemu-io has opened it.
    let image = lab.path("image.qcow2");
    create(&image, &CreateOptions::qcow2(MIB)).unwrap();
    change(&image, |bytes| {
        let block = be64(bytes, be64(bytes, 48));
        bytes[block + 100] = 1;
    });
    {
        let _held = QemuIo::hold(&image);
        let refused = plan_repair(&image, &options, RepairMode::Safe, RepairIntent::Repair);
        assert!(matches!(refused.err(), Some(Error::Locked { .. })));
    }
    let (raw, _) = lab.raw("disk.raw", MIB, 1);
    let refused = plan_repair(&raw, &options, RepairMode::Safe, RepairIntent::Look);
    assert!(matches!(refused.err(), Some(Error::UnsupportedFormat { .. })));
}

/// Each of several extent files is repaired.
#[test]
fn one_of_several_extents_is_repaired() {
    let lab = Lab::new();
    let disk = sample_disk(3 * MIB, 2);
    let image = by_qemu(&lab, "disk.vmdk", "-O vmdk -o subformat=twoGbMaxExtentSparse", &disk);
    let extent = lab.path("disk-s001.vmdk");
    change(&extent, |bytes| bytes[72] = 1);
    assert_eq!(check(&image, &OpenOptions::default()).unwrap().leak_count, 1);
    let before = fs::read(&image).unwrap();
    let plan = plan_repair(&image, &OpenOptions::default(), RepairMode::Safe, RepairIntent::Repair).unwrap();
    assert_eq!(plan.execute().unwrap().problems, []);
    assert!(fs::read(&image).unwrap() == before, "the descriptor has changed");
    assert_eq!(fs::read(&extent).unwrap()[72], 0);
    assert_reads_as(&open(&image, &OpenOptions::default()).unwrap(), &disk, "repaired");
}
