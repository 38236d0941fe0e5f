//! The index: which chunks the repository has.
//!
//! The index answers one query, for writers only: is a chunk of this identity stored, and where? Reading a snapshot
//! never needs it. It is a set of immutable *segments*, each a sorted list of the chunks of some packs, read a page at
//! a time; it does not have to fit in memory. What a running backup has stored is kept in memory until it becomes a
//! segment. A segment can always be rebuilt from the directories of its packs. It also has a table of the frames of
//! each pack: the fallback if the directory of a pack is damaged.

mod merge;
pub(crate) mod segment;
pub(crate) mod table_places;
mod tables;
mod write;

pub(crate) use merge::merge_segments;
pub(crate) use segment::{SegmentKeys, SegmentReader, SegmentWriter, segment_name};
pub(crate) use tables::find_frame_table;
pub(crate) use write::write_segment;

use crate::format::pack::{Directory, Location};
use crate::id::{ChunkId, PackId};

/// Bytes of a chunk id that the index stores; a hit is confirmed by the complete id in the pack's directory.
pub(crate) const PREFIX_LENGTH: usize = 16;

/// The first bytes of a chunk's identity.
pub(crate) type Prefix = [u8; PREFIX_LENGTH];

pub(crate) fn prefix_of(id: &ChunkId) -> Prefix {
    let mut prefix = [0; PREFIX_LENGTH];
    prefix.copy_from_slice(&id.as_bytes()[..PREFIX_LENGTH]);
    prefix
}

/// A stored chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct IndexEntry {
    pub(crate) prefix: Prefix,
    pub(crate) location: Location,
    /// Bytes before compression.
    pub(crate) length: u32,
}

/// The entries of all chunks of a pack.
pub(crate) fn entries_of(pack: PackId, directory: &Directory) -> impl Iterator<Item = IndexEntry> + '_ {
    (0u32..).zip(directory.frames()).flat_map(move |(frame, entry)| {
        let mut offset = 0;
        directory.chunks(entry).iter().map(move |chunk| {
            let location = Location { pack, frame, offset };
            offset += chunk.length;
            IndexEntry {
                prefix: prefix_of(&chunk.id),
                location,
                length: chunk.length,
            }
        })
    })
}
