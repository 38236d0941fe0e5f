//! The header and the trailer of a segment.

use super::{
    FORMAT_VERSION, FORMAT_VERSION_1, HEADER_LENGTH, MAGIC, PACK_COUNT_MAX, PACK_ENTRY_LENGTH, PAGE_ENTRY_COUNT,
    TRAILER_LENGTH, TRAILER_MAGIC,
};
use crate::error::{Error, Result};
use crate::id::{PackId, SegmentId};
use crate::store::ObjectName;

pub(super) struct Counts {
    pub(super) version: u16,
    pub(super) entries: u64,
    pub(super) packs: u32,
    pub(super) pages: u32,
}

impl Counts {
    pub(super) fn pack_entry_length(&self) -> usize {
        match self.version {
            FORMAT_VERSION_1 => PackId::LENGTH,
            _ => PACK_ENTRY_LENGTH,
        }
    }
}

/// Checks header and trailer of the segment `segment`; returns the counts in the trailer.
pub(super) fn check_ends(
    name: &ObjectName,
    segment: SegmentId,
    header: &[u8; HEADER_LENGTH],
    trailer: &[u8; TRAILER_LENGTH],
    trailer_at: u64,
) -> Result<Counts> {
    let wrong = |at: u64, detail: &str| Err(Error::damaged(name, at, detail));
    if &header[..8] != MAGIC {
        return wrong(0, "it does not begin as a segment of the index does");
    }
    let version = u16::from_le_bytes([header[8], header[9]]);
    if !(FORMAT_VERSION_1..=FORMAT_VERSION).contains(&version) {
        return Err(Error::FutureVersion {
            object: name.clone(),
            found: version.into(),
            supported: FORMAT_VERSION.into(),
        });
    }
    if &trailer[..8] != TRAILER_MAGIC || crc32c::crc32c(&trailer[..60]).to_le_bytes() != trailer[60..] {
        return wrong(
            trailer_at,
            "it does not end as a segment of the index does: cut short, or overwritten",
        );
    }
    if header[10..16] != [0; 6] || header[16..] != *segment.as_bytes() || trailer[8..24] != *segment.as_bytes() {
        return wrong(16, "it is another segment under this name");
    }
    let word = |at: usize| u32::from_le_bytes(trailer[at..at + 4].try_into().expect("four bytes"));
    let entries = u64::from_le_bytes(trailer[24..32].try_into().expect("eight bytes"));
    let counts = Counts {
        version,
        entries,
        packs: word(32),
        pages: word(36),
    };
    if counts.entries.div_ceil(PAGE_ENTRY_COUNT as u64) != u64::from(counts.pages) || counts.packs > PACK_COUNT_MAX {
        return wrong(trailer_at + 24, "its counts do not agree");
    }
    Ok(counts)
}
