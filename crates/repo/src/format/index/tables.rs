//! The frame tables of packs, as segments keep them.

use super::{SegmentKeys, SegmentReader};
use crate::error::{Error, Result};
use crate::format::pack::{Directory, decode_frame_table};
use crate::id::{PackId, SegmentId};
use crate::store::{ObjectKind, Store, StoreError};

/// Where the tables of a segment are: one behind the other, in the order of its packs.
pub(super) struct TablePlaces {
    /// Where the table of each pack ends, and before them all where the first begins.
    ends: Vec<u64>,
}

/// A sealed table in a segment.
pub(super) struct TablePlace {
    pub(super) number: u64,
    pub(super) offset: u64,
    pub(super) length: u32,
}

impl TablePlaces {
    /// The packs in the list of a segment, whose entries have this length, and where their tables are, the first of them at `start`.
    pub(super) fn decode(list: &[u8], entry_length: usize, start: u64) -> (Vec<PackId>, Self) {
        let mut places = Self { ends: vec![start] };
        let packs = list.chunks_exact(entry_length).map(|entry| {
            let (pack, length) = entry.split_at(PackId::LENGTH);
            // Version 1 has no lengths.
            places.push(length.try_into().map_or(0, u32::from_le_bytes));
            PackId::from_bytes(pack.try_into().expect("an entry begins with an identity"))
        });
        (packs.collect(), places)
    }

    fn push(&mut self, length: u32) {
        self.ends.push(self.end().saturating_add(length.into()));
    }

    /// First byte behind the last table.
    pub(super) fn end(&self) -> u64 {
        self.ends[self.ends.len() - 1]
    }

    /// The table of pack `number`, if there is one.
    pub(super) fn of(&self, number: usize) -> Option<TablePlace> {
        let (offset, end) = (self.ends.get(number)?, self.ends.get(number + 1)?);
        let length = u32::try_from(end - offset).ok().filter(|length| *length > 0)?;
        Some(TablePlace {
            number: number as u64,
            offset: *offset,
            length,
        })
    }
}

/// The frames of `pack` as the index knows them, in a directory without chunks; none where no segment has them.
///
/// Segments that cannot be read are passed over.
pub(crate) fn find_frame_table(store: &dyn Store, keys: &SegmentKeys, pack: PackId) -> Result<Option<Directory>> {
    // Segments may be merged while they are looked through: the second time the merged one is there.
    for _ in 0..2 {
        let mut segments: Vec<SegmentId> = Vec::new();
        store.list(ObjectKind::Index, &mut |name, _| {
            segments.extend(name.name().parse::<SegmentId>());
            Ok(())
        })?;
        let mut vanished = false;
        for segment in segments {
            let read = SegmentReader::open(store, keys, segment).and_then(|reader| reader.frame_table(store, pack));
            match read {
                Ok(Some(bytes)) => {
                    if let Ok(directory) = decode_frame_table(&bytes) {
                        return Ok(Some(directory));
                    }
                }
                Ok(None) => {}
                Err(Error::Store(StoreError::NotFound { .. })) => vanished = true,
                Err(error) if error.is_about_one_object() || error.is_unreadable() => {}
                Err(error) => return Err(error),
            }
        }
        if !vanished {
            break;
        }
    }
    Ok(None)
}
