//! The check of images that QEMU wrote and that are damaged, compared with the check of QEMU.

use std::fs;

use holdfast_block::{BlockDevice as _, BlockDeviceMut as _, to_usize};
use holdfast_image::{Error, OpenOptions, check, open, open_mut};

use crate::peer::{Lab, overwrite, qemu_check, qemu_io};

/// In a data file, every cluster has the offset that it has on the disk, raw data file or not: nothing else
/// distinguishes two entries for one cluster from valid ones.
#[test]
fn data_file_entry_with_wrong_offset_is_damage() {
    for raw_option in ["", ",data_file_raw=on"] {
        let lab = Lab::new();
        let image = lab.path("image.qcow2");
        overwrite(&lab.path("source.raw"), &vec![7; 2 << 20]);
        lab.qemu_img(&format!(
            "convert -f raw -O qcow2 -o data_file=image.data{raw_option} source.raw image.qcow2"
        ));
        let options = OpenOptions::default();
        assert_eq!(check(&image, &options).unwrap().problems, [], "{raw_option}");
        let mut bytes = fs::read(&image).unwrap();
        let u64_at = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00;
        let l2 = to_usize(u64_at(to_usize(u64_at(40))));
        bytes.copy_within(l2 + 8 * 3..l2 + 8 * 4, l2 + 8 * 16);
        overwrite(&image, &bytes);
        let report = check(&image, &options).unwrap();
        assert_eq!(report.corruption_count, 1, "{raw_option}: {:?}", report.problems);
        let mut buffer = vec![0; 65_536];
        let opened = open(&image, &options).unwrap();
        opened.read_at(&mut buffer, 15 << 16).unwrap();
        let error = opened.read_at(&mut buffer, 16 << 16).unwrap_err();
        assert!(Error::from(error).is_corrupt(), "{raw_option}");
        // No data of the other range is overwritten.
        let written = open_mut(&image, &options).unwrap();
        let error = written.write_at(&buffer, 16 << 16).unwrap_err();
        assert!(Error::from(error).is_corrupt(), "{raw_option}");
        written.write_at(&buffer, 0).unwrap_err();
    }
}

/// Clusters past the end of the disk are leaked, unless a snapshot uses them, too.
#[test]
fn check_reports_clusters_past_the_end() {
    let lab = Lab::new();
    let image = lab.path("image.qcow2");
    let cut = |size_bytes: u64| {
        let mut bytes = fs::read(&image).unwrap();
        bytes[24..32].copy_from_slice(&size_bytes.to_be_bytes());
        overwrite(&image, &bytes);
        let report = check(&image, &OpenOptions::default()).unwrap();
        let problems: Vec<_> = report.problems.iter().map(|problem| problem.kind.to_string()).collect();
        assert_eq!(
            (report.corruption_count, qemu_check(&image)),
            (0, (0, 0)),
            "{problems:?}"
        );
        (
            report.allocated_count,
            report.cluster_count,
            report.leak_count,
            problems,
        )
    };
    let unreferenced = |count| vec![format!("unreferenced clusters past the end of the disk: {count}")];
    lab.qemu_img("create -f qcow2 image.qcow2 2G");
    qemu_io(&image, &["write -P 1 0 384k", "write -P 2 1G 64k"]);
    assert_eq!(cut(512), (1, 1, 6, unreferenced(6)));
    assert_eq!(cut(100_000), (2, 2, 5, unreferenced(5)));
    assert_eq!(cut(2 << 30), (7, 32_768, 0, Vec::new()));
    // The snapshot uses all of them, and stores its own size; then the disk gets clusters of its own.
    lab.qemu_img("snapshot -c kept image.qcow2");
    assert_eq!(cut(100_000), (2, 2, 0, Vec::new()));
    cut(2 << 30);
    qemu_io(&image, &["write -P 3 128k 128k", "write -P 3 1G 64k"]);
    assert_eq!(cut(100_000), (2, 2, 3, unreferenced(3)));
    // Now the snapshot is longer than the disk.
    cut(2 << 30);
    lab.qemu_img("resize -q --shrink image.qcow2 99840");
    assert_eq!(cut(99_840), (2, 2, 0, Vec::new()));
    // Compressed clusters.
    lab.raw("source.raw", 1 << 20, 3);
    lab.qemu_img("convert -c -f raw -O qcow2 source.raw image.qcow2");
    let (all, _, _, problems) = cut(1 << 20);
    assert_eq!(problems, [""; 0]);
    assert_eq!(cut(65_536), (1, 1, all - 1, unreferenced(all - 1)));
}

/// Damages metadata in ways that QEMU detects, and compares the reports.
#[test]
fn check_agrees_with_qemu_on_damage() {
    let lab = Lab::new();
    let image = lab.path("image.qcow2");
    lab.qemu_img("create -f qcow2 image.qcow2 64M");
    qemu_io(&image, &["write -P 1 0 1M"]);
    lab.qemu_img("snapshot -c kept image.qcow2");
    qemu_io(&image, &["write -P 2 128k 128k"]);
    let good = fs::read(&image).unwrap();
    let u64_at = |at: usize| u64::from_be_bytes(good[at..at + 8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00;
    let l1 = to_usize(u64_at(40));
    let l2 = to_usize(u64_at(l1));
    let block = to_usize(u64_at(to_usize(u64_at(48))));
    let data = u64_at(l2 + 8 * 2) >> 16;
    let snapshot_l1 = to_usize(u64_at(to_usize(u64_at(64))));
    let snapshot_l2 = to_usize(u64_at(snapshot_l1));
    let damages: [(&str, usize, Vec<u8>); 12] = [
        ("none", 0, vec![b'Q']),
        ("refcount too low", block + to_usize(data) * 2, vec![0, 0]),
        ("refcount too high", block + to_usize(data) * 2, vec![0, 9]),
        ("two entries for one cluster", l2, good[l2 + 8 * 2..l2 + 8 * 3].to_vec()),
        ("entry outside the file", l2, vec![0x80, 0, 0x7f, 0, 0, 0, 0, 0]),
        ("copied flag missing", l2 + 8 * 2, vec![0]),
        ("reserved bit of the l1 table", l1 + 7, vec![good[l1 + 7] ^ 8]),
        ("reserved bits of an l2 table", l2 + 7, vec![good[l2 + 7] ^ 0x18]),
        ("high bit of an l2 table", l2 + 16, vec![good[l2 + 16] ^ 0x10]),
        ("reserved bit, and no cluster", l2 + 8 * 64 + 7, vec![8]),
        ("reserved bit of a snapshot", snapshot_l1 + 7, vec![8]),
        ("reserved bit of a snapshot's table", snapshot_l2 + 7, vec![8]),
    ];
    for (what, at, bytes) in damages {
        let mut damaged = good.clone();
        damaged[at..at + bytes.len()].copy_from_slice(&bytes);
        overwrite(&image, &damaged);
        let report = check(&image, &OpenOptions::default()).unwrap();
        let (corruptions, leaks) = qemu_check(&image);
        // QEMU counts references, but not which range of the disk they belong to.
        let extra_count = u64::from(what == "two entries for one cluster");
        assert_eq!(
            (report.corruption_count, report.leak_count),
            (corruptions + extra_count, leaks),
            "{what}: {:?}",
            report.problems
        );
    }
}
