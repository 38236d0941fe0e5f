//! Random changes of an image between two snapshots, and a check that all of them are reported.

use std::fs::{self, File, OpenOptions};
use std::io::Read as _;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use holdfast_block::{SeededRandom, to_usize};
use holdfast_host::changed_blocks::ChangedRanges;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

const BLOCK: u64 = 4096;
/// Limit on the size of images.
pub(crate) const SIZE_MAX: u64 = 6 << 20;

/// The kind of changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// Writes of blocks, as by a guest.
    Blocks,
    /// Every operation of a file system.
    Anything,
}

/// Changes the file at `path` in some ways.
pub(crate) fn change(path: &Path, work: Work, random: &mut SeededRandom) {
    for _ in 0..=random.below(12) {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let size = file.metadata().unwrap().len();
        match work {
            Work::Blocks => write_blocks(&file, size, random),
            Work::Anything => do_anything(path, &file, size, random),
        }
    }
}

fn write_blocks(file: &File, size: u64, random: &mut SeededRandom) {
    let count = 1 + random.below(8);
    let start = random.below(size / BLOCK);
    let end = (start + count).min(size / BLOCK);
    let bytes = noise(to_usize((end - start) * BLOCK), random);
    file.write_all_at(&bytes, start * BLOCK).unwrap();
}

fn do_anything(path: &Path, file: &File, size: u64, random: &mut SeededRandom) {
    let range = random.range_within(SIZE_MAX, 1 << 18);
    let aligned = range.start / BLOCK * BLOCK..range.end.next_multiple_of(BLOCK);
    match random.below(14) {
        0 => allocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, &range),
        1 => allocate(file, FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, &range),
        2 => allocate(file, FallocateFlags::empty(), &aligned),
        3 => allocate(file, FallocateFlags::COLLAPSE_RANGE, &aligned),
        4 => allocate(file, FallocateFlags::INSERT_RANGE, &aligned),
        5 => file.set_len(random.below(SIZE_MAX)).unwrap(),
        6 => copy_within(file, size, random),
        7 => file.sync_all().unwrap(),
        8 => {
            // Another file gets the name.
            let other = path.with_extension("other");
            fs::copy(path, &other).unwrap();
            fs::rename(&other, path).unwrap();
        }
        // Compressible text at a random offset.
        9 | 10 => {
            let word = [u8::try_from(random.below(256)).unwrap()];
            let bytes = word.repeat(to_usize(range.end - range.start));
            file.write_all_at(&bytes, range.start).unwrap();
        }
        11 => {
            let bytes = noise(to_usize(range.end - range.start), random);
            file.write_all_at(&bytes, range.start).unwrap();
        }
        _ => write_blocks(file, size.max(BLOCK), random),
    }
}

/// Operations that the file system does not support are skipped.
fn allocate(file: &File, flags: FallocateFlags, range: &Range<u64>) {
    match rustix::fs::fallocate(file, flags, range.start, range.end - range.start) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::FBIG) => {}
        Err(errno) => unreachable!("{flags:?}: {errno}"),
    }
}

/// Copies a part of the file to another offset: the file system shares the blocks.
fn copy_within(file: &File, size: u64, random: &mut SeededRandom) {
    let (mut from, mut to) = (
        random.below(1 + size / BLOCK) * BLOCK,
        random.below(SIZE_MAX / BLOCK) * BLOCK,
    );
    let length = to_usize(BLOCK * (1 + random.below(32)));
    match rustix::fs::copy_file_range(file, Some(&mut from), file, Some(&mut to), length) {
        // Overlapping ranges are refused.
        Ok(_) | Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        Err(errno) => unreachable!("copy: {errno}"),
    }
}

pub(crate) fn noise(length: usize, random: &mut SeededRandom) -> Vec<u8> {
    let mut bytes = vec![0; length];
    random.fill(&mut bytes);
    bytes
}

/// Reported and real changes, in bytes.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Tally {
    pub(crate) different: u64,
    pub(crate) reported: u64,
    pub(crate) size: u64,
}

impl Tally {
    pub(crate) fn add(&mut self, other: Self) {
        self.different += other.different;
        self.reported += other.reported;
        self.size += other.size;
    }

    pub(crate) fn print(&self, what: &str) {
        println!(
            "{what}: {} KiB differ, {} KiB are called changed ({} %), of {} KiB",
            self.different >> 10,
            self.reported >> 10,
            self.reported * 100 / self.different.max(1),
            self.size >> 10,
        );
    }
}

/// Compares both files completely: no byte outside of `ranges` may differ. Differences are counted in blocks.
pub(crate) fn check(before: &File, after: &File, ranges: &ChangedRanges, what: &str) -> Tally {
    let (old, new) = (contents(before), contents(after));
    assert_eq!(ranges.size_bytes(), new.len() as u64, "{what}");
    let bitmap = ranges.to_bitmap(512).unwrap();
    let mut tally = Tally {
        reported: ranges.bytes(),
        size: new.len() as u64,
        ..Tally::default()
    };
    for (number, block) in new.chunks(to_usize(BLOCK)).enumerate() {
        let start = number as u64 * BLOCK;
        let was = &old[old.len().min(to_usize(start))..old.len().min(to_usize(start) + block.len())];
        if was == block {
            continue;
        }
        tally.different += block.len() as u64;
        for (at, byte) in block.iter().enumerate() {
            let at_file = start + at as u64;
            let is_same = was.get(at) == Some(byte);
            assert!(
                is_same || bitmap.next_dirty(at_file).is_some_and(|dirty| dirty.start == at_file),
                "{what}: the change at {at_file} is missed; reported: {:?}",
                ranges.as_slice()
            );
        }
    }
    tally
}

fn contents(mut file: &File) -> Vec<u8> {
    let mut bytes = Vec::new();
    std::io::Seek::rewind(&mut file).unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}
