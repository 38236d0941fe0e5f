//! Forged segments with a given plaintext, as an attacker with the keys could write them.
//!
//! The plaintext: u64 entries, u32 packs, u32 pages, as the trailer has them; then the entries, the packs with the
//! lengths of their sealed tables, the fences, and the tables.

use super::{
    ENTRY_LENGTH, FORMAT_VERSION, HEADER_LENGTH, MAGIC, PACK_ENTRY_LENGTH, PAGE_ENTRY_COUNT, Section, SegmentKeys,
    SegmentReader, TRAILER_LENGTH, TRAILER_MAGIC, pages_end, segment_name,
};
use crate::error::Result;
use crate::id::{PackId, SegmentId};
use crate::key::{SealingKey, TAG_LENGTH};
use crate::store::Store;

/// Bytes of plaintext before the entries.
const COUNTS_LENGTH: usize = 16;

/// Seals `plaintext` as the object of `segment`; `None` if it is shorter than its counts.
pub(crate) fn forge(keys: &SegmentKeys, segment: SegmentId, plaintext: &[u8]) -> Option<Vec<u8>> {
    let key = keys.key(segment);
    let (counts, body) = plaintext.split_first_chunk::<COUNTS_LENGTH>()?;
    let entries = u64::from_le_bytes(counts[..8].try_into().expect("eight bytes"));
    let packs = u32::from_le_bytes(counts[8..12].try_into().expect("four bytes"));
    // Counts that exceed the data result in sections that are too short, as may occur in a file.
    let at_most = |length: u64, bytes: &[u8]| holdfast_block::to_usize(length.min(bytes.len() as u64));
    let (pages, rest) = body.split_at(at_most(entries.saturating_mul(ENTRY_LENGTH as u64), body));
    let (packs, fences) = rest.split_at(at_most(u64::from(packs) * PACK_ENTRY_LENGTH as u64, rest));
    let pages_count = u32::from_le_bytes(counts[12..16].try_into().expect("four bytes"));
    let (fences, mut tables) = fences.split_at(at_most(u64::from(pages_count) * 8, fences));
    let mut object = Vec::new();
    object.extend_from_slice(MAGIC);
    object.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
    object.extend_from_slice(&[0; 6]);
    object.extend_from_slice(segment.as_bytes());
    for (number, page) in (0..).zip(pages.chunks(PAGE_ENTRY_COUNT * ENTRY_LENGTH)) {
        append_sealed(&key, Section::Page(number), page, &mut object);
    }
    for (number, entry) in (0..).zip(packs.chunks_exact(PACK_ENTRY_LENGTH)) {
        let sealed = u32::from_le_bytes(entry[PackId::LENGTH..].try_into().expect("four bytes"));
        if sealed > 0 {
            let length = at_most((sealed as usize).saturating_sub(TAG_LENGTH) as u64, tables);
            let (table, rest) = tables.split_at(length);
            append_sealed(&key, Section::Table(number), table, &mut object);
            tables = rest;
        }
    }
    append_sealed(&key, Section::Packs, packs, &mut object);
    append_sealed(&key, Section::Fences, fences, &mut object);
    let mut trailer = [0; TRAILER_LENGTH];
    trailer[..8].copy_from_slice(TRAILER_MAGIC);
    trailer[8..24].copy_from_slice(segment.as_bytes());
    trailer[24..40].copy_from_slice(counts);
    let crc = crc32c::crc32c(&trailer[..60]);
    trailer[60..].copy_from_slice(&crc.to_le_bytes());
    object.extend_from_slice(&trailer);
    Some(object)
}

fn append_sealed(key: &SealingKey, section: Section, plaintext: &[u8], object: &mut Vec<u8>) {
    let mut bytes = plaintext.to_vec();
    key.seal(section.nonce(), &[], &mut bytes);
    object.extend_from_slice(&bytes);
}

/// The plaintext of a segment of a store.
pub(crate) fn plaintext(store: &dyn Store, keys: &SegmentKeys, segment: SegmentId) -> Result<Vec<u8>> {
    let reader = SegmentReader::open(store, keys, segment)?;
    let object = store.get(&segment_name(segment), u64::MAX)?;
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&reader.entry_count.to_le_bytes());
    bytes.extend_from_slice(
        &u32::try_from(reader.packs.len())
            .expect("counted in 32 bits")
            .to_le_bytes(),
    );
    bytes.extend_from_slice(&reader.page_count().to_le_bytes());
    let end = holdfast_block::to_usize(pages_end(reader.entry_count));
    let sealed_page = PAGE_ENTRY_COUNT * ENTRY_LENGTH + TAG_LENGTH;
    for (number, page) in (0..).zip(object[HEADER_LENGTH..end].chunks(sealed_page)) {
        let mut page = page.to_vec();
        reader
            .key
            .open(Section::Page(number).nonce(), &[], &mut page)
            .expect("the reader opened the segment with this key");
        bytes.extend_from_slice(&page);
    }
    let mut tables = Vec::new();
    for (number, pack) in reader.packs.iter().enumerate() {
        bytes.extend_from_slice(pack.as_bytes());
        let length = reader.tables.of(number).map_or(0, |place| place.length);
        bytes.extend_from_slice(&length.to_le_bytes());
        tables.extend(reader.frame_table(store, *pack)?.unwrap_or_default());
    }
    reader
        .fences
        .iter()
        .for_each(|fence| bytes.extend_from_slice(&fence.to_be_bytes()));
    bytes.extend_from_slice(&tables);
    Ok(bytes)
}
