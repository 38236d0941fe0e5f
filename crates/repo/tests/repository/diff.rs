//! Diff reports the blocks that differ in a byte-by-byte comparison, and no others.

use std::collections::BTreeMap;
use std::ops::Range;

use holdfast_block::{SeededRandom, to_usize};
use holdfast_repo::{DiskRecord, GcRequest, Parent, Source, SourceData};

use crate::common::{Disk, Rig, request};

const MIB: u64 = 1 << 20;

fn diff(rig: &Rig, old: &DiskRecord, new: &DiskRecord) -> Vec<Range<u64>> {
    let mut ranges = Vec::new();
    let mut visit = |range| {
        ranges.push(range);
        Ok(())
    };
    rig.repository.diff(old, new, &mut visit).unwrap();
    ranges
}

/// Differing blocks, joined; a range that only one disk has differs.
fn expected(old: &[u8], new: &[u8]) -> Vec<Range<u64>> {
    let common = old.len().min(new.len());
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let mut push = |range: Range<usize>| {
        let range = range.start as u64..range.end as u64;
        match ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ if !range.is_empty() => ranges.push(range),
            _ => {}
        }
    };
    for start in (0..common).step_by(4096) {
        let end = (start + 4096).min(common);
        if old[start..end] != new[start..end] {
            push(start..end);
        }
    }
    push(common..old.len().max(new.len()));
    ranges
}

#[test]
fn ranges_are_exactly_the_differences() {
    let rig = Rig::new(31);
    let mut random = SeededRandom::new(8);
    let mut disk = Disk::new(70 * MIB, 3);
    disk.fill(0, 5 * MIB);
    let mut points = Vec::new();
    for size in [70 * MIB, 70 * MIB, 66 * MIB + 77, 3 * MIB + 1, 130 * MIB, 0] {
        disk.bytes.resize(to_usize(size), 0);
        if size > 0 {
            disk.scatter(12, 9000);
            let start = to_usize(random.below(size));
            disk.bytes[start..(start + 100_000).min(to_usize(size))].fill(0);
        }
        let record = rig.backup("m", &disk, Parent::Newest).snapshot.disks[0].clone();
        points.push((record, disk.bytes.clone()));
    }
    for (old, old_bytes) in &points {
        for (new, new_bytes) in &points {
            assert_eq!(diff(&rig, old, new), expected(old_bytes, new_bytes));
        }
    }
}

/// The same bytes are stored twice: by a backup without a parent, and by gc, which moved them.
#[test]
fn moved_chunks_are_not_differences() {
    let rig = Rig::new(32);
    let mut disk = Disk::new(20 * MIB, 4);
    disk.fill(0, 12 * MIB);
    let forgotten = rig.backup("a", &disk, Parent::None).snapshot;
    disk.scatter(400, 4096);
    let first = rig.backup("a", &disk, Parent::Newest).snapshot;
    let second = rig.backup("b", &disk, Parent::None).snapshot;
    assert_eq!(diff(&rig, &first.disks[0], &second.disks[0]), []);
    rig.repository.forget(forgotten.id, "test").unwrap();
    let gc = GcRequest {
        repack_below_percent: 100,
        thread_count: 0,
    };
    rig.repository.gc(gc).unwrap();
    assert_eq!(diff(&rig, &first.disks[0], &second.disks[0]), []);
}

#[test]
fn streams_are_compared_by_their_bytes() {
    let rig = Rig::new(33);
    let mut disk = Disk::new(3 * MIB + 5, 4);
    disk.fill(0, 3 * MIB);
    let backup = |bytes: &[u8]| {
        let mut stream = bytes;
        let source = Source {
            name: "s".to_owned(),
            data: SourceData::Stream(&mut stream),
            notes: BTreeMap::new(),
        };
        let request = request("m", 1, vec![source], Parent::None, 1);
        let report = rig.repository.backup(request, &rig.progress).unwrap();
        report.snapshot.disks[0].clone()
    };
    let old = backup(&disk.bytes);
    let mut changed = disk.bytes.clone();
    changed[1_000_000] ^= 1;
    changed[2_000_000..2_300_000].fill(0);
    changed.truncate(3_000_000);
    let new = backup(&changed);
    assert_eq!(diff(&rig, &old, &new), expected(&disk.bytes, &changed));
    let as_disk = rig.backup("d", &disk, Parent::None).snapshot.disks[0].clone();
    assert_eq!(diff(&rig, &as_disk, &new), expected(&disk.bytes, &changed));
}
