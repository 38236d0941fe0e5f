use std::cell::{Cell, RefCell};

use holdfast_block::SeededRandom;
use holdfast_block::conformance::test_seed;

use super::{EXTENT_COUNT_MAX, Extent, ExtentChanges, ExtentError, ExtentMap, MappedFile, Result, UNWRITTEN, compare};

const BLOCK: u64 = 4096;
const ENCODED: u32 = 0x8;
const SHARED: u32 = 0x2000;

impl ExtentMap for &[Extent] {
    fn extents(&self, start: u64) -> Result<Vec<Extent>> {
        let reaching = self.iter().filter(|extent| extent.logical + extent.length > start);
        Ok(reaching.take(EXTENT_COUNT_MAX).copied().collect())
    }
}

fn mapped<M>(map: M, size_bytes: u64) -> MappedFile<M> {
    MappedFile { map, size_bytes }
}

fn changes(before: &[Extent], after: &[Extent], sizes: (u64, u64)) -> ExtentChanges {
    compare(&mapped(before, sizes.0), &mapped(after, sizes.1)).unwrap()
}

/// The changed ranges as pairs of start and end.
fn ranges(before: &[Extent], after: &[Extent], sizes: (u64, u64)) -> Vec<(u64, u64)> {
    let found = changes(before, after, sizes).ranges;
    found.as_slice().iter().map(|range| (range.start, range.end)).collect()
}

#[test]
fn only_equal_addresses_are_unchanged() {
    let before = [Extent::new(0, 1000, 300, SHARED), Extent::new(500, 5000, 100, 0)];
    let after = [
        Extent::new(0, 1000, 100, 0),
        Extent::new(100, 9000, 100, 0),
        Extent::new(200, 1200, 100, SHARED | 1),
        Extent::new(500, 5000, 50, 0),
    ];
    let found = changes(&before, &after, (1000, 1000));
    assert_eq!(found.ranges.as_slice(), [100..200, 550..600]);
    assert_eq!((found.mapped_bytes, found.ambiguous_bytes), (350, 0));
}

#[test]
fn ambiguous_addresses_are_changed() {
    for flag in [0x2, 0x4, ENCODED, 0x80, 0x100, 0x200, 0x400, 0x10_0000] {
        let same = [Extent::new(0, 1000, 300, flag)];
        let found = changes(&same, &same, (400, 400));
        assert_eq!((found.ranges.bytes(), found.ambiguous_bytes), (300, 300), "{flag:#x}");
    }
}

#[test]
fn unwritten_extents_are_holes_until_they_are_written() {
    let reserved = [Extent::new(0, 1000, 300, UNWRITTEN)];
    let elsewhere = [Extent::new(100, 7000, 100, UNWRITTEN)];
    let written = [
        Extent::new(0, 1000, 100, UNWRITTEN),
        Extent::new(100, 1100, 50, 0),
        Extent::new(150, 1150, 150, UNWRITTEN),
    ];
    assert_eq!(ranges(&reserved, &elsewhere, (400, 400)), []);
    assert_eq!(ranges(&reserved, &written, (400, 400)), [(100, 150)]);
    assert_eq!(ranges(&written, &reserved, (400, 400)), [(100, 150)]);
    assert_eq!(ranges(&written, &[], (400, 400)), [(100, 150)]);
}

#[test]
fn the_part_after_the_old_end_is_changed() {
    let extents = [Extent::new(0, 4096, 4096, 0)];
    assert_eq!(ranges(&extents, &extents, (100, 300)), [(100, 300)]);
    let shorter = changes(&extents, &extents, (300, 100));
    assert_eq!((shorter.ranges.as_slice().len(), shorter.ranges.size_bytes()), (0, 100));
    assert_eq!(
        changes(&[], &[], (0, 9)).ranges.as_slice(),
        std::slice::from_ref(&(0..9))
    );
}

/// Returns the same extents for every query.
struct Stuck;

impl ExtentMap for Stuck {
    fn extents(&self, _: u64) -> Result<Vec<Extent>> {
        Ok(vec![Extent::new(0, 0, 1, 0); EXTENT_COUNT_MAX])
    }
}

#[test]
fn contradictory_extents_are_an_error() {
    let overlapping = [Extent::new(0, 0, 100, 0), Extent::new(50, 500, 100, 0)];
    let endless = [Extent::new(0, u64::MAX - 5, 100, 0)];
    for nonsense in [&overlapping[..], &endless] {
        let result = compare(&mapped(nonsense, 1000), &mapped(&[][..], 1000));
        assert!(matches!(result, Err(ExtentError::Invalid { .. })), "{nonsense:?}");
    }
    assert!(compare(&mapped(Stuck, 1000), &mapped(Stuck, 1000)).is_err());
}

/// Returns other extents for each query.
struct Moving<'a> {
    answers: &'a [&'a [Extent]],
    query_count: Cell<usize>,
}

impl ExtentMap for Moving<'_> {
    fn extents(&self, start: u64) -> Result<Vec<Extent>> {
        let number = self.query_count.get();
        self.query_count.set(number + 1);
        self.answers[number.min(self.answers.len() - 1)].extents(start)
    }
}

/// Between two queries, the blocks of the older file are moved away, and those of the newer file are moved to the old
/// address.
#[test]
fn a_move_between_two_queries_is_detected() {
    let (here, there) = ([Extent::new(0, 0, 100, 0)], [Extent::new(0, 700, 100, 0)]);
    let moves: &[&[Extent]] = &[&here, &there];
    let before = Moving {
        answers: moves,
        query_count: Cell::new(0),
    };
    let found = compare(&mapped(before, 100), &mapped(&here[..], 100)).unwrap();
    assert_eq!(found.ranges.bytes(), 100);
    // A file that is moved repeatedly counts as changed.
    let restless: Vec<&[Extent]> = (0..100).map(|n| if n % 2 == 0 { &here[..] } else { &there }).collect();
    let before = Moving {
        answers: &restless,
        query_count: Cell::new(0),
    };
    let found = compare(&mapped(before, 100), &mapped(&here[..], 100)).unwrap();
    assert_eq!((found.ranges.bytes(), found.ambiguous_bytes), (100, 100));
}

/// A simple file system: every block has an address, and every write gets a new one, except to unwritten blocks.
struct Model {
    /// Address of each block of the file, and whether it was written.
    blocks: Vec<Option<(u64, bool)>>,
    next: u64,
}

impl Model {
    fn extents(&self) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        for (number, block) in self.blocks.iter().enumerate() {
            let Some((place, is_written)) = block else { continue };
            let flags = if *is_written { 0 } else { UNWRITTEN };
            let (logical, physical) = (number as u64 * BLOCK, place * BLOCK);
            match extents.last_mut() {
                Some(last)
                    if last.logical + last.length == logical
                        && last.physical + last.length == physical
                        && last.flags == flags =>
                {
                    last.length += BLOCK;
                }
                _ => extents.push(Extent::new(logical, physical, BLOCK, flags)),
            }
        }
        extents
    }

    fn change(&mut self, random: &mut SeededRandom) {
        let count = self.blocks.len() as u64;
        let start = random.below(count);
        let range = start..(start + 1 + random.below(20)).min(count);
        let kind = random.below(6);
        for number in range {
            let block = &mut self.blocks[usize::try_from(number).unwrap()];
            match kind {
                0 => *block = None,
                1 if block.is_none() => *block = Some((self.next, false)),
                1 => {}
                // A write in place, to an unwritten block.
                2 if matches!(block, Some((_, false))) => *block = block.map(|(place, _)| (place, true)),
                _ => *block = Some((self.next, true)),
            }
            self.next += 1;
        }
    }
}

/// Random histories: exactly the blocks with different content are changed, whatever the number of queries.
#[test]
fn random_histories_are_reported_exactly() {
    let mut random = SeededRandom::new(test_seed());
    for round in 0..100 {
        let count = if round % 4 == 0 { 4000 } else { 60 };
        let mut model = Model {
            blocks: vec![None; count],
            next: 1,
        };
        let change_count = if count == 60 { 10 } else { 3000 };
        for _ in 0..random.below(change_count) {
            model.change(&mut random);
        }
        let (before, old) = (model.extents(), model.blocks.clone());
        for _ in 0..random.below(change_count) {
            model.change(&mut random);
        }
        let size = count as u64 * BLOCK;
        let found = changes(&before, &model.extents(), (size, size));
        let content = |block: &Option<(u64, bool)>| block.filter(|(_, is_written)| *is_written);
        let bitmap = found.ranges.to_bitmap(BLOCK).unwrap();
        for (number, pair) in old.iter().zip(&model.blocks).enumerate() {
            let at = number as u64 * BLOCK;
            let is_changed = content(pair.0) != content(pair.1);
            assert_eq!(bitmap.is_dirty(at..at + BLOCK), is_changed, "block {number}");
        }
    }
}

/// Two files of one block, never with the same address, which are moved between two queries.
struct Restless<'a> {
    /// Addresses of both files.
    state: &'a RefCell<(u64, u64, SeededRandom)>,
    is_first: bool,
}

impl ExtentMap for Restless<'_> {
    fn extents(&self, _: u64) -> Result<Vec<Extent>> {
        let mut state = self.state.borrow_mut();
        if state.2.one_in(3) {
            let is_free = |place: &u64| *place != state.0 && *place != state.1;
            let place = (1..4).find(is_free).unwrap();
            if state.2.one_in(2) {
                state.0 = place;
            } else {
                state.1 = place;
            }
        }
        let place = if self.is_first { state.0 } else { state.1 };
        Ok(vec![Extent::new(0, place * BLOCK, BLOCK, 0)])
    }
}

/// A wrong result would need four moves between three queries.
#[test]
fn changes_are_reported_despite_concurrent_moves() {
    for seed in 0..2000 {
        let state = RefCell::new((1, 2, SeededRandom::new(test_seed() ^ seed)));
        let side = |is_first| Restless {
            state: &state,
            is_first,
        };
        let found = compare(&mapped(side(true), BLOCK), &mapped(side(false), BLOCK)).unwrap();
        assert_eq!(found.ranges.bytes(), BLOCK);
    }
}
