//! The positions of the frame tables in a segment.

use crate::id::PackId;

/// The locations of a segment's tables, which are contiguous and in the order of its packs.
pub(crate) struct TablePlaces {
    /// The end of each pack's table, preceded by the start of the first table.
    ends: Vec<u64>,
}

impl TablePlaces {
    /// The packs in the list of a segment with entries of this length, and the locations of their tables, beginning at
    /// `start`.
    pub(crate) fn decode(list: &[u8], entry_length: usize, start: u64) -> (Vec<PackId>, Self) {
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

    /// The offset after the last table.
    pub(crate) fn end(&self) -> u64 {
        self.ends[self.ends.len() - 1]
    }

    /// The table of pack `number`, if there is one.
    pub(crate) fn of(&self, number: usize) -> Option<TablePlace> {
        let (offset, end) = (self.ends.get(number)?, self.ends.get(number + 1)?);
        let length = u32::try_from(end - offset).ok().filter(|length| *length > 0)?;
        Some(TablePlace {
            number: number as u64,
            offset: *offset,
            length,
        })
    }
}

/// A sealed table in a segment.
pub(crate) struct TablePlace {
    pub(crate) number: u64,
    pub(crate) offset: u64,
    pub(crate) length: u32,
}
