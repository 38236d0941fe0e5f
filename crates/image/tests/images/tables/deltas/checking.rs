//! The check of chains of deltas, and chains with a damaged one.

use std::fs;

use holdfast_block::BlockDevice;
use holdfast_image::{ImageId, OpenOptions, open};

use super::{MIB, TOP, files, folder, grown, id, made_by_qemu, overlay};
use crate::peer::{Lab, Random, assert_reads_as, overwrite};

#[test]
fn check_includes_lower_deltas() {
    let lab = Lab::new();
    let path = grown(&lab);
    let check = || holdfast_image::check(&path, &OpenOptions::default()).unwrap();
    assert_eq!(check().corruption_count, 0);
    let middle = path.join("middle.hds");
    let length = fs::metadata(&middle).unwrap().len();
    fs::File::options()
        .write(true)
        .open(&middle)
        .unwrap()
        .set_len(length / 2)
        .unwrap();
    let report = check();
    assert!(report.corruption_count > 0);
    assert!(report.problems[0].kind.to_string().starts_with("middle.hds: "));
}

#[test]
fn plain_disk_has_no_metadata_to_check() {
    let lab = Lab::new();
    let path = folder(&lab, 2 * MIB, Some(TOP), &[(TOP, ImageId::NIL, "Plain", "root.hds")]);
    lab.raw("web1.hdd/root.hds", 2 * MIB, 5);
    let refused = holdfast_image::check(&path, &OpenOptions::default()).unwrap_err();
    assert!(refused.to_string().contains("no metadata"), "{refused}");
}

/// Deltas do not refer to each other: any two can be in a chain, with any sizes, and any of them can be damaged.
#[test]
fn damaged_delta_limits_the_readable_chain() {
    let lab = Lab::new();
    let rows = [
        (id(1), ImageId::NIL, "Compressed", "root.hds"),
        (id(2), id(1), "Compressed", "middle.hds"),
        (TOP, id(2), "Compressed", "top.hds"),
    ];
    let path = folder(&lab, 65_536, None, &rows);
    for (name, cluster, command) in [
        ("root.hds", "4096", "write -P 1 0 60k"),
        ("middle.hds", "8192", "write -P 2 9k 20k"),
        ("top.hds", "4096", "write -P 3 30k 9k"),
    ] {
        made_by_qemu(&path.join(name), cluster, 65_536, &[command]);
    }
    let sound = files(&path, &["root.hds", "middle.hds", "top.hds"]);
    let seed = holdfast_block::conformance::test_seed();
    let mut random = Random(seed);
    let (mut opened_count, mut refused_count) = (0, 0);
    for round in 0..600 {
        let which = usize::try_from(random.below(3)).unwrap();
        let mut bytes = sound[which].clone();
        match random.below(8) {
            0 => bytes.truncate(usize::try_from(random.below(bytes.len() as u64)).unwrap()),
            // Fields after the magic number and the version, and the table.
            1..=5 => {
                let at = 28 + usize::try_from(random.below(40)).unwrap();
                bytes[at] = [0, 1, 0x7f, 0x80, 0xff][usize::try_from(random.below(5)).unwrap()];
            }
            _ => {
                let at = usize::try_from(random.below(128)).unwrap();
                bytes[at] ^= 1 << random.below(8);
            }
        }
        overwrite(&path.join(rows[which].3), &bytes);
        match open(&path, &OpenOptions::default()) {
            Ok(image) => {
                opened_count += 1;
                let size = image.size_bytes();
                let (mut at, mut entry_count) = (0, 0);
                while at < size && entry_count < 100 {
                    let Ok(entry) = image.map_at(at, u64::MAX) else { break };
                    assert!(
                        entry.length > 0 && at + entry.length <= size,
                        "seed {seed}, round {round}"
                    );
                    at += entry.length;
                    entry_count += 1;
                }
                let mut buffer = vec![0; usize::try_from(size.min(65_536)).unwrap()];
                drop(image.read_at(&mut buffer, 0));
                let last = size - buffer.len() as u64;
                drop(image.read_at(&mut buffer, last));
                drop(image.extents(0..size, 100));
                drop(image.snapshot(&id(1).to_string()).unwrap().extents(0..512, 10));
            }
            Err(error) => {
                refused_count += 1;
                assert!(!error.to_string().is_empty());
            }
        }
        overwrite(&path.join(rows[which].3), &sound[which]);
    }
    assert!(
        opened_count > 0 && refused_count > 0,
        "seed {seed}: {opened_count}, {refused_count}"
    );
    let image = open(&path, &OpenOptions::default()).unwrap();
    let mut disk = Vec::new();
    for (_, _, _, name) in rows {
        overlay(&mut disk, &path.join(name));
    }
    assert_reads_as(&image, &disk, "the sound chain");
}
