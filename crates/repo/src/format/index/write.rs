//! Writes a segment about packs whose directories are in memory.

use std::collections::HashMap;

use super::{SegmentKeys, SegmentWriter, entries_of};
use crate::error::Result;
use crate::format::pack::{Directory, encode_frame_table};
use crate::id::{PackId, SegmentId};
use crate::store::Store;

/// Writes a segment with the chunks and the frames of `packs`.
pub(crate) fn write_segment(
    store: &dyn Store,
    keys: &SegmentKeys,
    segment: SegmentId,
    packs: &[(PackId, Directory)],
) -> Result<SegmentId> {
    let directories: HashMap<PackId, &Directory> = packs.iter().map(|(pack, directory)| (*pack, directory)).collect();
    let mut entries: Vec<_> = packs
        .iter()
        .flat_map(|(pack, directory)| entries_of(*pack, directory))
        .collect();
    entries.sort_unstable();
    let mut ids: Vec<PackId> = directories.keys().copied().collect();
    ids.sort_unstable();
    let mut writer = SegmentWriter::create(store, keys, segment, ids)?;
    entries.iter().try_for_each(|entry| writer.push(entry))?;
    writer.finish(&mut |pack| Ok(directories.get(&pack).map(|directory| encode_frame_table(directory))))
}
