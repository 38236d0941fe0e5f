//! Keeps the index small: few segments, and none about deleted packs.
//!
//! Every backup adds a segment. Segments of similar size are merged, so that about log n segments remain after n
//! backups, and every entry is copied about log n times.

use std::collections::HashSet;

use crate::error::{Error, Result};
use crate::format::index::{SegmentReader, segment_name};
use crate::gc::mark::Marks;
use crate::id::PackId;
use crate::store::StoreError;
use crate::vault::Vault;

/// Maximum number of segments of similar size that are not merged; each makes lookups a little slower.
const LIKE_SEGMENT_COUNT_MAX: usize = 8;

/// Which segments to merge.
#[derive(Clone, Copy)]
pub(crate) enum Compaction<'a> {
    /// Small segments, if there are many.
    Small,
    /// Also all segments, if any of them lists a missing pack that is not live according to these marks.
    ///
    /// A missing live pack was lost. Its index entries are then the only record of its chunks, which a backup needs to
    /// heal it, and are kept until repair has recorded the loss.
    Thorough(&'a Marks),
}

/// Merges segments if needed; returns the existing packs.
pub(crate) fn compact_index(vault: &Vault, compaction: Compaction<'_>) -> Result<HashSet<PackId>> {
    // Packs are stored before the segments that list them; so segments are listed first, and their packs are then
    // visible.
    let (mut segments, _) = vault.segments()?;
    let existing = vault.pack_ids()?;
    let is_kept = |pack: &PackId| match compaction {
        // Without marks it is unknown whether a missing pack was deleted by gc or lost.
        Compaction::Small => true,
        Compaction::Thorough(marks) => existing.contains(pack) || marks.is_live(*pack),
    };
    if segments.iter().flat_map(SegmentReader::packs).all(is_kept) {
        segments.sort_by_key(|segment| segment.length);
        let small = small_count(&segments.iter().map(|segment| segment.length).collect::<Vec<_>>());
        segments.truncate(small);
    }
    if segments.is_empty() {
        return Ok(existing);
    }
    let named = segments.iter().flat_map(SegmentReader::packs).copied();
    let kept: HashSet<PackId> = named.filter(is_kept).collect();
    match vault.merge(&segments, &kept) {
        Ok(_) => segments
            .iter()
            .try_for_each(|segment| vault.store.delete(&segment_name(segment.segment)))?,
        // A damaged segment is left to repair, and a missing one was merged by another process.
        Err(Error::Store(StoreError::NotFound { .. })) => {}
        Err(error) if error.is_damage() => {}
        Err(error) => return Err(error),
    }
    Ok(existing)
}

/// The number of smallest segments to merge, given the lengths in ascending order.
fn small_count(lengths: &[u64]) -> usize {
    let mut sum = 0;
    let count = lengths
        .iter()
        .take_while(|length| {
            let like = sum == 0 || **length <= sum * 2;
            sum += **length;
            like
        })
        .count();
    if count > LIKE_SEGMENT_COUNT_MAX { count } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::small_count;

    #[test]
    fn many_small_segments_are_merged_and_large_ones_left_alone() {
        assert_eq!(small_count(&[]), 0);
        assert_eq!(small_count(&[5; 8]), 0);
        assert_eq!(small_count(&[5; 9]), 9);
        assert_eq!(small_count(&[5, 5, 5, 5, 5, 5, 5, 5, 5, 1000]), 9);
        assert_eq!(small_count(&[1, 100, 10_000]), 0);
    }

    /// After many backups few segments remain, and the amount of copying is bounded.
    #[test]
    fn the_work_of_merging_grows_slowly() {
        let (mut lengths, mut copied) = (Vec::new(), 0);
        for _ in 0..10_000 {
            lengths.push(1);
            lengths.sort_unstable();
            let count = small_count(&lengths);
            let sum: u64 = lengths.drain(..count).sum();
            copied += sum;
            lengths.extend((sum > 0).then_some(sum));
        }
        assert!(lengths.len() < 32, "{}", lengths.len());
        assert!(copied < 10_000 * 8, "{copied}");
    }
}
