//! XFS: snapshots are clones (reflinks) of the image.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;

use holdfast_block::SeededRandom;
use holdfast_block::conformance::test_seed;
use holdfast_host::changed_blocks::by_extents;

use crate::history::{SIZE_MAX, Tally, Work, change, check, noise};
use crate::mounts::{Mount, run};

fn mount() -> Option<Mount> {
    Mount::new("mkfs.xfs", &["-q", "-m", "reflink=1"], "noatime")
}

fn clone(from: &Path, to: &Path) -> File {
    let (source, target) = (File::open(from).unwrap(), File::create(to).unwrap());
    rustix::fs::ioctl_ficlone(&target, &source).unwrap();
    File::open(to).unwrap()
}

fn histories(mount: &Mount, work: Work, round_count: u64) -> Tally {
    let mut random = SeededRandom::new(test_seed());
    let image = mount.path("image");
    fs::write(&image, noise(3 << 20, &mut random)).unwrap();
    let mut tally = Tally::default();
    let mut before = clone(&image, &mount.path("0"));
    for round in 1..=round_count {
        change(&image, work, &mut random);
        let after = clone(&image, &mount.path(&round.to_string()));
        if work == Work::Anything && random.one_in(4) {
            // The clones are moved later, without a change of their content.
            run(Command::new("xfs_fsr").arg(mount.path(&round.to_string()))).unwrap();
        }
        let found = by_extents(&before, &after).unwrap();
        assert_eq!(found.ambiguous_bytes, 0);
        tally.add(check(&before, &after, &found.ranges, &format!("xfs, round {round}")));
        before = after;
        fs::remove_file(mount.path(&(round - 1).to_string())).unwrap();
    }
    tally
}

#[test]
fn no_change_is_missed_on_xfs() {
    let Some(mount) = mount() else { return };
    histories(&mount, Work::Anything, 60).print("xfs, anything");
}

/// Changes are reported with a granularity of 4 KiB.
#[test]
fn blocks_are_reported_exactly_on_xfs() {
    let Some(mount) = mount() else { return };
    let tally = histories(&mount, Work::Blocks, 40);
    tally.print("xfs, blocks");
    assert_eq!(tally.reported, tally.different);
}

/// Space that was allocated before a snapshot and written after it, at the same address.
#[test]
fn reserved_space_that_is_written_is_changed_on_xfs() {
    let Some(mount) = mount() else { return };
    let image = mount.path("image");
    let file = File::create(&image).unwrap();
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, SIZE_MAX).unwrap();
    let before = clone(&image, &mount.path("before"));
    file.write_all_at(&[7; 8192], 65_536).unwrap();
    let after = clone(&image, &mount.path("after"));
    let found = by_extents(&before, &after).unwrap();
    assert_eq!(found.ranges.as_slice(), std::slice::from_ref(&(65_536..65_536 + 8192)));
    check(&before, &after, &found.ranges, "reserved");
    // The live file still has the old address; that is why it must not be passed.
    let found = by_extents(&before, &File::open(&image).unwrap()).unwrap();
    assert_eq!(found.ranges.bytes(), 8192);
}

/// Cached data has no address yet.
#[test]
fn cached_data_is_written_first() {
    let Some(mount) = mount() else { return };
    let [old, new] = ["old", "new"].map(|name| mount.path(name));
    fs::write(&old, vec![1; 40_000]).unwrap();
    fs::write(&new, vec![2; 40_000]).unwrap();
    let (before, after) = (File::open(&old).unwrap(), File::open(&new).unwrap());
    let found = by_extents(&before, &after).unwrap();
    assert_eq!(
        (found.ranges.bytes(), found.mapped_bytes, found.ambiguous_bytes),
        (40_000, 40_000, 0)
    );
}

/// Tens of thousands of extents, in many queries.
#[test]
fn a_fragmented_file_is_reported_exactly() {
    let Some(mount) = mount() else { return };
    let image = mount.path("image");
    let file = File::create(&image).unwrap();
    let mut random = SeededRandom::new(test_seed());
    let count = 5000;
    for number in 0..count {
        file.write_all_at(&noise(4096, &mut random), number * 8192).unwrap();
    }
    let before = clone(&image, &mount.path("before"));
    let mut expected = Vec::new();
    for number in (0..count).step_by(3) {
        file.write_all_at(&[9; 4096], number * 8192).unwrap();
        expected.push(number * 8192..number * 8192 + 4096);
    }
    let after = clone(&image, &mount.path("after"));
    let found = by_extents(&before, &after).unwrap();
    assert_eq!(found.ranges.as_slice(), expected);
    assert_eq!(found.mapped_bytes, count * 4096);
}
