//! A cache of block status that the server reported beyond the requested range.
//!
//! One query may return a hundred thousand extents, of which the caller takes a few hundred at a time. The rest is
//! cached here, returned once, and then dropped: a second scan queries the server again. Own writes invalidate the
//! whole cache.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::status::Descriptor;

/// Limit of cached descriptors, of 16 bytes each.
const DESCRIPTOR_COUNT_MAX: usize = 1 << 18;
/// Cached runs.
const RUN_COUNT_MAX: usize = 256;
/// Limit of queries in flight for a sequential caller.
pub(super) const WINDOW_MAX: usize = 16;

/// Consecutive descriptors from an offset on.
#[derive(Debug, Clone)]
struct StatusRun {
    end: u64,
    descriptors: VecDeque<Descriptor>,
}

/// Runs of block status by start offset; they do not overlap.
#[derive(Debug, Default)]
pub(super) struct StatusCache {
    by_start: BTreeMap<u64, StatusRun>,
}

/// What a visitor did with a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Visit {
    /// Taken; continue.
    Continue,
    /// Taken; stop.
    Stop,
    /// Not taken; stop.
    NotTaken,
}

impl StatusCache {
    /// Adds descriptors from `start` on, where nothing is cached yet.
    pub(super) fn add(&mut self, start: u64, descriptors: Vec<Descriptor>) {
        let mut descriptors = VecDeque::from(descriptors);
        let limit = self.by_start.range(start..).next().map_or(u64::MAX, |(next, _)| *next);
        let mut end = descriptors
            .iter()
            .fold(start, |end, one| end.saturating_add(one.length));
        // The last descriptor may reach past the query, into a known run.
        while end > limit {
            let Some(last) = descriptors.back_mut() else { return };
            let excess = end - limit;
            if last.length > excess {
                last.length -= excess;
                end = limit;
            } else {
                end -= last.length;
                descriptors.pop_back();
            }
        }
        // The first one may begin before the query, inside a known run that ends between two blocks.
        let before = self.by_start.range(..=start).next_back();
        let known_end = before.map_or(start, |(_, run)| run.end.max(start));
        let mut start = start;
        while start < known_end {
            let Some(first) = descriptors.front_mut() else { return };
            let excess = known_end - start;
            if first.length > excess {
                first.length -= excess;
                start = known_end;
            } else {
                start += first.length;
                descriptors.pop_front();
            }
        }
        if end > start {
            self.by_start.insert(start, StatusRun { end, descriptors });
        }
    }

    /// Visits what is known of the bytes from `at` to `end`, in order, until there is a gap or the visitor stops, and
    /// removes what was taken and what lies before it in the same run. Returns where it stopped, and the visitor's
    /// last result.
    pub(super) fn visit_known(
        &mut self,
        at: u64,
        end: u64,
        take: &mut dyn FnMut(u64, Descriptor) -> Visit,
    ) -> (u64, Visit) {
        let mut at = at;
        while at < end {
            let Some((&start, run)) = self.by_start.range(..=at).next_back() else {
                break;
            };
            if run.end <= at {
                break;
            }
            let Some(mut run) = self.by_start.remove(&start) else {
                break;
            };
            let mut position = start;
            let mut visit = Visit::Continue;
            while let Some(first) = run.descriptors.front_mut().filter(|_| position < end) {
                let descriptor_end = position + first.length;
                if descriptor_end > at {
                    let length = descriptor_end.min(end) - at;
                    let flags = first.flags;
                    visit = take(at, Descriptor { length, flags });
                    if visit != Visit::NotTaken {
                        at += length;
                    }
                    if at < descriptor_end {
                        first.length = descriptor_end - at;
                        position = at;
                        break;
                    }
                }
                position = descriptor_end;
                run.descriptors.pop_front();
                if visit != Visit::Continue {
                    break;
                }
            }
            if position < run.end {
                self.by_start.insert(position, run);
            }
            if visit != Visit::Continue {
                return (at, visit);
            }
        }
        (at, Visit::Continue)
    }

    /// Up to `count` unknown ranges between `at` and `end`, each at most `length_max` long.
    pub(super) fn gaps(&self, at: u64, end: u64, length_max: u64, count: usize) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = at;
        while at < end && gaps.len() < count {
            let before = self.by_start.range(..=at).next_back();
            if let Some((_, run)) = before.filter(|(_, run)| run.end > at) {
                at = run.end;
                continue;
            }
            let next = self
                .by_start
                .range(at..)
                .next()
                .map_or(end, |(next, _)| (*next).min(end));
            let gap_end = next.min(at.saturating_add(length_max));
            gaps.push(at..gap_end);
            at = gap_end;
        }
        gaps
    }

    /// Removes and returns the statuses that intersect `range`.
    fn split_off(&mut self, range: &Range<u64>) -> Self {
        let before = self.by_start.range(..range.start).next_back();
        let before = before.filter(|(_, run)| run.end > range.start).map(|(start, _)| *start);
        let starts = before
            .into_iter()
            .chain(self.by_start.range(range.clone()).map(|(start, _)| *start));
        let starts: Vec<u64> = starts.collect();
        let taken = starts
            .into_iter()
            .filter_map(|start| self.by_start.remove_entry(&start));
        Self {
            by_start: taken.collect(),
        }
    }

    /// Merges other statuses, and enforces the bounds.
    fn merge(&mut self, other: Self) {
        let mut left = DESCRIPTOR_COUNT_MAX;
        for (start, run) in other.by_start {
            let overlaps = self
                .by_start
                .range(..run.end)
                .next_back()
                .is_some_and(|(_, known)| known.end > start);
            if !overlaps {
                self.by_start.insert(start, run);
            }
        }
        let mut count = 0;
        self.by_start.retain(|_, run| {
            count += 1;
            let fits = run.descriptors.len() <= left && count <= RUN_COUNT_MAX;
            if fits {
                left -= run.descriptors.len();
            }
            fits
        });
    }
}

/// The cache of one context, shared by all threads.
#[derive(Debug, Default)]
pub(super) struct ReadAhead {
    state: Mutex<ReadAheadState>,
}

#[derive(Debug)]
struct ReadAheadState {
    statuses: StatusCache,
    /// Incremented by every write: results of earlier queries are outdated.
    generation: u64,
    /// The offset at which the last caller stopped. A caller that continues there is sequential.
    next: u64,
    window: usize,
}

impl Default for ReadAheadState {
    fn default() -> Self {
        Self {
            statuses: StatusCache::default(),
            generation: 0,
            next: u64::MAX,
            window: 1,
        }
    }
}

/// The part of the cache that one caller uses.
#[derive(Debug)]
pub(super) struct BorrowedStatuses {
    pub(super) statuses: StatusCache,
    /// Queries in flight at a time: one for random access, increasing for sequential access.
    pub(super) window: usize,
    generation: u64,
}

impl BorrowedStatuses {
    /// Nothing is known, and nothing is asked ahead.
    pub(super) fn unknown() -> Self {
        Self {
            statuses: StatusCache::default(),
            window: 1,
            generation: 0,
        }
    }
}

impl ReadAhead {
    fn lock(&self) -> MutexGuard<'_, ReadAheadState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the cached status of `range`, for exclusive use by one caller.
    pub(super) fn borrow(&self, range: &Range<u64>) -> BorrowedStatuses {
        let mut state = self.lock();
        state.window = if range.start == state.next {
            (state.window * 2).min(WINDOW_MAX)
        } else {
            1
        };
        BorrowedStatuses {
            statuses: state.statuses.split_off(range),
            window: state.window,
            generation: state.generation,
        }
    }

    /// Returns the status that the caller, which stopped at `end`, did not use, unless it is outdated.
    pub(super) fn put_back(&self, borrowed: BorrowedStatuses, end: u64) {
        let mut state = self.lock();
        state.next = end;
        if state.generation == borrowed.generation {
            state.statuses.merge(borrowed.statuses);
        }
    }

    /// Discards the whole cache, and also the replies to queries in flight, because the device is being changed.
    pub(super) fn invalidate(&self) {
        let mut state = self.lock();
        state.generation += 1;
        state.statuses = StatusCache::default();
    }
}

#[cfg(test)]
mod tests {
    use holdfast_block::SeededRandom;
    use holdfast_block::conformance::test_seed;
    use holdfast_block::to_usize;

    use super::super::status::Descriptor;
    use super::{DESCRIPTOR_COUNT_MAX, ReadAhead, StatusCache, Visit};

    const END: u64 = 60;

    /// The status of `offset` in the model.
    fn flags_at(offset: u64) -> u64 {
        offset / 3 % 4
    }

    /// Adds random replies and takes them again. The model is one bool for each byte.
    #[test]
    fn every_known_byte_is_returned_once() {
        let mut random = SeededRandom::new(test_seed());
        for _ in 0..300 {
            let mut statuses = StatusCache::default();
            let mut known = [false; to_usize(END)];
            for _ in 0..40 {
                let range = random.range_within(END, 12);
                if random.one_in(2) {
                    let before = known;
                    known[to_usize(range.start)..to_usize(range.end)].fill(true);
                    let descriptors = range.clone().map(|at| Descriptor {
                        length: 1,
                        flags: flags_at(at),
                    });
                    statuses.add(range.start, descriptors.collect());
                    // What follows a known run stays unknown: a gap is queried, never guessed.
                    let gaps = statuses.gaps(0, END, 100, 100);
                    for at in 0..END {
                        let is_gap = gaps.iter().any(|gap| gap.contains(&at));
                        assert!(!is_gap || !before[to_usize(at)], "byte {at} was forgotten");
                        known[to_usize(at)] = !is_gap;
                    }
                    continue;
                }
                let mut at = range.start;
                let mut left = random.below(6);
                let (stopped, visit) = statuses.visit_known(range.start, range.end, &mut |offset, descriptor| {
                    if left == 0 {
                        return Visit::NotTaken;
                    }
                    assert_eq!(offset, at, "a gap in what is handed out");
                    for byte in offset..offset + descriptor.length {
                        assert!(
                            known[to_usize(byte)] && flags_at(byte) == descriptor.flags,
                            "byte {byte} is made up"
                        );
                    }
                    at += descriptor.length;
                    left -= 1;
                    if left == 0 { Visit::Stop } else { Visit::Continue }
                });
                assert_eq!(stopped, at);
                assert!(
                    visit != Visit::Continue || at == range.end || !known[to_usize(at)],
                    "it stopped early"
                );
                let gaps = statuses.gaps(0, END, 100, 100);
                for byte in 0..END {
                    let is_gap = gaps.iter().any(|gap| gap.contains(&byte));
                    assert!(
                        !(range.start..at).contains(&byte) || is_gap,
                        "byte {byte} would be returned twice"
                    );
                    assert!(is_gap || known[to_usize(byte)], "byte {byte} came from nowhere");
                    known[to_usize(byte)] = !is_gap;
                }
            }
        }
    }

    #[test]
    fn memory_is_bounded_and_writes_clear_it() {
        let read_ahead = ReadAhead::default();
        let one = Descriptor { length: 512, flags: 0 };
        for number in 0..10 {
            let start = number << 40;
            let mut borrowed = read_ahead.borrow(&(start..start + 1));
            borrowed.statuses.add(start, vec![one; DESCRIPTOR_COUNT_MAX / 3]);
            read_ahead.put_back(borrowed, start);
        }
        let kept = |read_ahead: &ReadAhead| {
            let borrowed = read_ahead.borrow(&(0..u64::MAX));
            let count = borrowed
                .statuses
                .by_start
                .values()
                .map(|run| run.descriptors.len())
                .sum::<usize>();
            read_ahead.put_back(borrowed, 0);
            count
        };
        assert_eq!(kept(&read_ahead), DESCRIPTOR_COUNT_MAX / 3 * 3);
        let mut borrowed = read_ahead.borrow(&(1 << 60..(1 << 60) + 1));
        borrowed.statuses.add(1 << 60, vec![one]);
        read_ahead.invalidate();
        read_ahead.put_back(borrowed, 0);
        assert_eq!(kept(&read_ahead), 0, "what was asked before a write is out of date");
    }
}
