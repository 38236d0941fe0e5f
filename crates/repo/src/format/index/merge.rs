//! Merges several segments; needs memory for one page of each.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};

use super::segment::SegmentKeys;
use super::{IndexEntry, SegmentReader, SegmentWriter};
use crate::error::Result;
use crate::format::pack::{Directory, encode_frame_table};
use crate::id::{PackId, SegmentId};
use crate::store::Store;

/// Walks the entries of a segment in order.
struct Cursor<'a> {
    segment: &'a SegmentReader,
    page: u32,
    entries: std::vec::IntoIter<IndexEntry>,
}

impl Cursor<'_> {
    fn next(&mut self, store: &dyn Store) -> Result<Option<IndexEntry>> {
        loop {
            if let Some(entry) = self.entries.next() {
                return Ok(Some(entry));
            }
            if self.page == self.segment.page_count() {
                return Ok(None);
            }
            self.entries = self.segment.page(store, self.page)?.into_iter();
            self.page += 1;
        }
    }
}

/// Writes the entries of `segments` about the packs in `existing` as one segment; entries about other packs are
/// dropped.
///
/// If no segment has the frame table of a pack, as in segments of earlier releases, its directory is read.
pub(crate) fn merge_segments(
    store: &dyn Store,
    keys: &SegmentKeys,
    segments: &[SegmentReader],
    existing: &HashSet<PackId>,
    merged: SegmentId,
    directory_of: &dyn Fn(PackId) -> Result<Option<Directory>>,
) -> Result<SegmentId> {
    let mut packs: Vec<_> = segments
        .iter()
        .flat_map(SegmentReader::packs)
        .filter(|pack| existing.contains(pack))
        .copied()
        .collect();
    packs.sort_unstable();
    packs.dedup();
    let mut writer = SegmentWriter::create(store, keys, merged, packs)?;
    let mut cursors: Vec<_> = segments
        .iter()
        .map(|segment| Cursor {
            segment,
            page: 0,
            entries: Vec::new().into_iter(),
        })
        .collect();
    let mut heap = BinaryHeap::new();
    for (number, cursor) in cursors.iter_mut().enumerate() {
        heap.extend(cursor.next(store)?.map(|entry| Reverse((entry, number))));
    }
    let mut last = None;
    while let Some(Reverse((entry, number))) = heap.pop() {
        heap.extend(cursors[number].next(store)?.map(|entry| Reverse((entry, number))));
        if last != Some(entry) && existing.contains(&entry.location.pack) {
            writer.push(&entry)?;
        }
        last = Some(entry);
    }
    writer.finish(&mut |pack| {
        for segment in segments {
            match segment.frame_table(store, pack) {
                Ok(None) => {}
                // A damaged table is not copied: it is rebuilt from the directory.
                Err(error) if error.is_about_one_object() => {}
                other => return other,
            }
        }
        directory_of(pack).map(|directory| directory.as_ref().map(encode_frame_table))
    })
}
