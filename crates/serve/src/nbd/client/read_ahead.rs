//! What a server has told of block status beyond what was asked of us.
//!
//! One query of a server may bring a hundred thousand extents while our caller takes a few hundred at a time. The rest waits
//! here, is handed out once, and then forgotten: whoever walks again asks again. Writes of our own throw everything away.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::status::Descriptor;

/// Descriptors that are kept, of 16 bytes each.
const DESCRIPTOR_COUNT_MAX: usize = 1 << 18;
/// Stretches that are kept.
const STRETCH_COUNT_MAX: usize = 256;
/// Queries under way at once, for a caller who walks.
pub(super) const WINDOW_MAX: usize = 16;

/// Descriptors one after another, from an offset on.
#[derive(Debug, Clone)]
struct Stretch {
    end: u64,
    descriptors: VecDeque<Descriptor>,
}

/// Stretches of block status by where they begin; they do not overlap.
#[derive(Debug, Default)]
pub(super) struct Stretches {
    by_start: BTreeMap<u64, Stretch>,
}

/// What became of a descriptor that was shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Appetite {
    /// It was taken; more are welcome.
    More,
    /// It was taken; it was the last one.
    Enough,
    /// It was not taken.
    Refused,
}

impl Stretches {
    /// Adds descriptors from `start` on, where there is nothing yet.
    pub(super) fn add(&mut self, start: u64, descriptors: Vec<Descriptor>) {
        let mut descriptors = VecDeque::from(descriptors);
        let limit = self.by_start.range(start..).next().map_or(u64::MAX, |(next, _)| *next);
        let mut end = descriptors
            .iter()
            .fold(start, |end, one| end.saturating_add(one.length));
        // The last descriptor may reach past the query, into what is known already.
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
        // The first one may begin before what was asked, in what is known already, where that begins between two blocks.
        let before = self.by_start.range(..=start).next_back();
        let known_end = before.map_or(start, |(_, stretch)| stretch.end.max(start));
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
            self.by_start.insert(start, Stretch { end, descriptors });
        }
    }

    /// Shows what is known of the bytes from `at` to `end`, in order, until there is a gap or enough was seen, and forgets
    /// what was taken and what lies before it in the same stretch. Gives where it stopped, and whether more is welcome there.
    pub(super) fn hand_out(
        &mut self,
        at: u64,
        end: u64,
        take: &mut dyn FnMut(u64, Descriptor) -> Appetite,
    ) -> (u64, Appetite) {
        let mut at = at;
        while at < end {
            let Some((&start, stretch)) = self.by_start.range(..=at).next_back() else {
                break;
            };
            if stretch.end <= at {
                break;
            }
            let Some(mut stretch) = self.by_start.remove(&start) else {
                break;
            };
            let mut position = start;
            let mut appetite = Appetite::More;
            while let Some(first) = stretch.descriptors.front_mut().filter(|_| position < end) {
                let descriptor_end = position + first.length;
                if descriptor_end > at {
                    let length = descriptor_end.min(end) - at;
                    let flags = first.flags;
                    appetite = take(at, Descriptor { length, flags });
                    if appetite != Appetite::Refused {
                        at += length;
                    }
                    if at < descriptor_end {
                        first.length = descriptor_end - at;
                        position = at;
                        break;
                    }
                }
                position = descriptor_end;
                stretch.descriptors.pop_front();
                if appetite != Appetite::More {
                    break;
                }
            }
            if position < stretch.end {
                self.by_start.insert(position, stretch);
            }
            if appetite != Appetite::More {
                return (at, appetite);
            }
        }
        (at, Appetite::More)
    }

    /// Up to `count` ranges between `at` and `end` of which nothing is known, each at most `length_max` long.
    pub(super) fn gaps(&self, at: u64, end: u64, length_max: u64, count: usize) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = at;
        while at < end && gaps.len() < count {
            let before = self.by_start.range(..=at).next_back();
            if let Some((_, stretch)) = before.filter(|(_, stretch)| stretch.end > at) {
                at = stretch.end;
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

    /// Takes out the stretches that begin in `range`, or reach into it.
    fn split_off(&mut self, range: &Range<u64>) -> Self {
        let before = self.by_start.range(..range.start).next_back();
        let before = before
            .filter(|(_, stretch)| stretch.end > range.start)
            .map(|(start, _)| *start);
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

    /// Adds stretches of another one, and keeps to the bounds.
    fn merge(&mut self, other: Self) {
        let mut left = DESCRIPTOR_COUNT_MAX;
        for (start, stretch) in other.by_start {
            let overlaps = self
                .by_start
                .range(..stretch.end)
                .next_back()
                .is_some_and(|(_, known)| known.end > start);
            if !overlaps {
                self.by_start.insert(start, stretch);
            }
        }
        let mut count = 0;
        self.by_start.retain(|_, stretch| {
            count += 1;
            let fits = stretch.descriptors.len() <= left && count <= STRETCH_COUNT_MAX;
            if fits {
                left -= stretch.descriptors.len();
            }
            fits
        });
    }
}

/// What is kept for one context, for all threads.
#[derive(Debug, Default)]
pub(super) struct ReadAhead {
    shelf: Mutex<Shelf>,
}

#[derive(Debug)]
struct Shelf {
    stretches: Stretches,
    /// Grows with every write: what was asked before is out of date.
    generation: u64,
    /// Where the last caller stopped; who goes on from there walks.
    next: u64,
    window: usize,
}

impl Default for Shelf {
    fn default() -> Self {
        Self {
            stretches: Stretches::default(),
            generation: 0,
            next: u64::MAX,
            window: 1,
        }
    }
}

/// What one caller works with.
#[derive(Debug)]
pub(super) struct Loan {
    pub(super) stretches: Stretches,
    /// Queries to have under way at once: one for who comes by, more and more for who walks.
    pub(super) window: usize,
    generation: u64,
}

impl ReadAhead {
    fn lock(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what is kept of `range`, for one caller alone.
    pub(super) fn borrow(&self, range: &Range<u64>) -> Loan {
        let mut shelf = self.lock();
        shelf.window = if range.start == shelf.next {
            (shelf.window * 2).min(WINDOW_MAX)
        } else {
            1
        };
        Loan {
            stretches: shelf.stretches.split_off(range),
            window: shelf.window,
            generation: shelf.generation,
        }
    }

    /// Gives back what the caller, who came to `end`, did not need, unless it is out of date.
    pub(super) fn give_back(&self, loan: Loan, end: u64) {
        let mut shelf = self.lock();
        shelf.next = end;
        if shelf.generation == loan.generation {
            shelf.stretches.merge(loan.stretches);
        }
    }

    /// Throws everything away, also what is on its way: the device changes, or has changed.
    pub(super) fn invalidate(&self) {
        let mut shelf = self.lock();
        shelf.generation += 1;
        shelf.stretches = Stretches::default();
    }
}

#[cfg(test)]
mod tests {
    use holdfast_block::SeededRandom;
    use holdfast_block::conformance::test_seed;
    use holdfast_block::to_usize;

    use super::super::status::Descriptor;
    use super::{Appetite, DESCRIPTOR_COUNT_MAX, ReadAhead, Stretches};

    const END: u64 = 60;

    /// What a server would say of `offset`.
    fn flags_at(offset: u64) -> u64 {
        offset / 3 % 4
    }

    /// Random answers are added and handed out, against one bool for each byte that is known.
    #[test]
    fn nothing_is_made_up_and_nothing_is_told_twice() {
        let mut random = SeededRandom::new(test_seed());
        for _ in 0..300 {
            let mut stretches = Stretches::default();
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
                    stretches.add(range.start, descriptors.collect());
                    // What follows a stretch that was known stays unknown: a gap is asked for again, never guessed.
                    let gaps = stretches.gaps(0, END, 100, 100);
                    for at in 0..END {
                        let is_gap = gaps.iter().any(|gap| gap.contains(&at));
                        assert!(!is_gap || !before[to_usize(at)], "byte {at} was forgotten");
                        known[to_usize(at)] = !is_gap;
                    }
                    continue;
                }
                let mut at = range.start;
                let mut left = random.below(6);
                let (stopped, appetite) = stretches.hand_out(range.start, range.end, &mut |offset, descriptor| {
                    if left == 0 {
                        return Appetite::Refused;
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
                    if left == 0 { Appetite::Enough } else { Appetite::More }
                });
                assert_eq!(stopped, at);
                assert!(
                    appetite != Appetite::More || at == range.end || !known[to_usize(at)],
                    "it stopped early"
                );
                let gaps = stretches.gaps(0, END, 100, 100);
                for byte in 0..END {
                    let is_gap = gaps.iter().any(|gap| gap.contains(&byte));
                    assert!(
                        !(range.start..at).contains(&byte) || is_gap,
                        "byte {byte} would be told twice"
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
            let mut loan = read_ahead.borrow(&(start..start + 1));
            loan.stretches.add(start, vec![one; DESCRIPTOR_COUNT_MAX / 3]);
            read_ahead.give_back(loan, start);
        }
        let kept = |read_ahead: &ReadAhead| {
            let loan = read_ahead.borrow(&(0..u64::MAX));
            let count = loan
                .stretches
                .by_start
                .values()
                .map(|stretch| stretch.descriptors.len())
                .sum::<usize>();
            read_ahead.give_back(loan, 0);
            count
        };
        assert_eq!(kept(&read_ahead), DESCRIPTOR_COUNT_MAX / 3 * 3);
        let mut loan = read_ahead.borrow(&(1 << 60..(1 << 60) + 1));
        loan.stretches.add(1 << 60, vec![one]);
        read_ahead.invalidate();
        read_ahead.give_back(loan, 0);
        assert_eq!(kept(&read_ahead), 0, "what was asked before a write is out of date");
    }
}
