//! What the tests of writing do to an image, and what they expect of it then.

use std::path::Path;

use holdfast_block::{BlockDevice as _, BlockDeviceMut as _, to_usize};
use holdfast_image::{
    BackingFile, BulkWriter, CreateOptions, Format, OpenOptions, Qcow2Options, create, create_bulk, open, open_mut,
};

use crate::peer::{Lab, Random, assert_clean, assert_reads_as, flatten, qemu_check};

/// Makes an image.
pub(crate) fn create_with(image: &Path, qcow2: Qcow2Options, size_bytes: u64) {
    let options = CreateOptions {
        qcow2,
        ..CreateOptions::qcow2(size_bytes)
    };
    create(image, &options).unwrap();
}

/// Begins an image that is filled in one go.
pub(crate) fn create_bulk_with(image: &Path, qcow2: Qcow2Options, size_bytes: u64) -> BulkWriter {
    let options = CreateOptions {
        qcow2,
        ..CreateOptions::qcow2(size_bytes)
    };
    create_bulk(image, &options).unwrap()
}

/// Options of an image that is based on the raw file `base.raw` beside it.
pub(crate) fn over_base() -> Qcow2Options {
    Qcow2Options {
        backing: Some(BackingFile {
            name: "base.raw".to_owned(),
            format: Format::Raw,
        }),
        ..Qcow2Options::default()
    }
}

/// Random operations on the image and on a plain vector.
pub(crate) fn work(image: &Path, disk: &mut [u8], random: &mut Random, operations: u32) {
    let device = open_mut(image, &OpenOptions::default()).unwrap();
    assert_eq!(device.size_bytes(), disk.len() as u64);
    for _ in 0..operations {
        let start = random.below(disk.len() as u64);
        let longest = [512, 70_000, 600_000][to_usize(random.below(3))];
        let (mut start, mut end) = (start, (start + 1 + random.below(longest)).min(disk.len() as u64));
        if random.below(2) == 0 {
            start = start / 4096 * 4096;
            end = end.next_multiple_of(4096).min(disk.len() as u64);
        }
        let place = to_usize(start)..to_usize(end);
        match random.below(10) {
            0..6 => {
                random.fill(&mut disk[place.clone()]);
                device.write_at(&disk[place], start).unwrap();
            }
            6 | 7 => {
                disk[place].fill(0);
                device.write_zeroes(start..end).unwrap();
            }
            8 => {
                device.trim(start..end).unwrap();
                let mut found = vec![0; place.len()];
                device.read_at(&mut found, start).unwrap();
                for (now, before) in found.iter().zip(&disk[place.clone()]) {
                    assert!(now == before || *now == 0, "trimmed bytes are as before, or zero");
                }
                disk[place].copy_from_slice(&found);
            }
            _ => device.flush().unwrap(),
        }
    }
    assert_reads_as(&device, disk, "before the flush");
    device.flush().unwrap();
    assert_reads_as(&device, disk, "after the flush");
}

/// Both checks find nothing, and both sides read `disk`.
pub(crate) fn assert_is(image: &Path, disk: &[u8], lab: &Lab, what: &str) {
    assert_clean(image);
    assert_eq!(qemu_check(image), (0, 0), "{what}");
    assert!(flatten(image, lab) == disk, "{what}: the peer reads something else");
    assert_reads_as(&open(image, &OpenOptions::default()).unwrap(), disk, what);
}
