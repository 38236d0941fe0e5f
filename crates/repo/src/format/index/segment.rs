//! One object of the index: a sorted list of chunks, in sealed pages.
//!
//! ```text
//! header   32 bytes: magic `HFINDEX\n`, u16 format version 2, 6 zero bytes, 16 bytes identity
//! pages    each sealed: up to 128 entries of 28 bytes, sorted; all but the last are full
//! tables   each sealed: the frames of a pack, in the order of the packs
//! packs    sealed: for each pack whose chunks are listed 16 bytes identity, u32 bytes of its sealed table, 0 if it has none
//! fences   sealed: the first 8 bytes of the first entry of each page
//! trailer  64 bytes: magic `HFIXEND\n`, 16 bytes identity, u64 entries, u32 packs, u32 pages, 20 zero bytes,
//!          u32 CRC-32C of the trailer so far
//! ```
//!
//! An entry: 16 bytes of the chunk's identity; u32 pack (place in the table); u64 of which bits 0-21 are the offset in the
//! frame, 22-42 the length, 43-58 the frame. Everything is little-endian but the identities, which sort as bytes.
//!
//! The key of a segment is derived from the repository's index key and the segment's identity; nonces: byte 0 is 1 for
//! pages, 2 for packs, 3 for fences, 4 for tables; bytes 4 to 11 the number of the page, or of the pack.
//!
//! Version 1 has no tables, only ids of packs; its offsets have 21 bits, the other fields are one bit lower. Only read.

mod ends;
#[cfg(feature = "hostile")]
pub(crate) mod forged;

use std::sync::{Arc, Mutex, PoisonError};

use holdfast_block::LruCache;

use self::ends::check_ends;
use super::table_places::TablePlaces;
use super::{IndexEntry, PREFIX_LENGTH, Prefix};
use crate::error::{Error, Result};
use crate::format::pack::{FRAME_TABLE_BYTES_MAX, Location};
use crate::id::{PackId, SegmentId};
use crate::key::{Cipher, Keyring, Purpose, SealingKey, TAG_LENGTH};
use crate::store::{ObjectKind, ObjectName, ObjectWriter, Put, Store};

const MAGIC: &[u8; 8] = b"HFINDEX\n";
const TRAILER_MAGIC: &[u8; 8] = b"HFIXEND\n";
const FORMAT_VERSION: u16 = 2;
/// The version without tables of frames.
const FORMAT_VERSION_1: u16 = 1;
/// An identity, and the length of a sealed table.
const PACK_ENTRY_LENGTH: usize = PackId::LENGTH + 4;
const HEADER_LENGTH: usize = 32;
const TRAILER_LENGTH: usize = 64;
const ENTRY_LENGTH: usize = PREFIX_LENGTH + 4 + 8;
const PAGE_ENTRY_COUNT: usize = 128;
const SEALED_PAGE_LENGTH: usize = PAGE_ENTRY_COUNT * ENTRY_LENGTH + TAG_LENGTH;
const LENGTH_BITS: u32 = 21;
/// Maximum number of packs in a segment; with the object's length it limits what a malicious trailer can allocate.
const PACK_COUNT_MAX: u32 = 1 << 24;

const _: () = assert!(1 << offset_bits(FORMAT_VERSION) >= crate::format::codec::FRAME_BYTES_MAX);

/// Bits of an entry that are the offset in the frame.
const fn offset_bits(version: u16) -> u32 {
    if version == FORMAT_VERSION_1 { 21 } else { 22 }
}

/// The name of a segment in the store.
pub(crate) fn segment_name(segment: SegmentId) -> ObjectName {
    ObjectName::new(ObjectKind::Index, &segment.to_string()).expect("hex digits are a name")
}

#[derive(Clone, Copy)]
pub(super) enum Section {
    Page(u64),
    Packs,
    Fences,
    Table(u64),
}

impl Section {
    pub(super) fn nonce(self) -> [u8; 12] {
        let (kind, number) = match self {
            Self::Page(number) => (1, number),
            Self::Packs => (2, 0),
            Self::Fences => (3, 0),
            Self::Table(number) => (4, number),
        };
        let mut nonce = [0; 12];
        nonce[0] = kind;
        nonce[4..].copy_from_slice(&number.to_le_bytes());
        nonce
    }
}

/// The keys for sealing segments.
#[derive(Clone)]
pub(crate) struct SegmentKeys {
    pub(crate) cipher: Cipher,
    pub(crate) keyring: Keyring,
}

impl SegmentKeys {
    /// The key of a segment: keyed BLAKE3 of its identity under the repository's index key.
    fn key(&self, segment: SegmentId) -> SealingKey {
        let key = blake3::keyed_hash(self.keyring.key(Purpose::IndexSealing), segment.as_bytes());
        SealingKey::new(self.cipher, key.as_bytes())
    }
}

/// A segment that is being written, from sorted entries.
pub(crate) struct SegmentWriter {
    segment: SegmentId,
    key: SealingKey,
    object: Box<dyn ObjectWriter>,
    packs: Vec<PackId>,
    page: Vec<u8>,
    fences: Vec<u8>,
    entry_count: u64,
    page_count: u32,
}

impl SegmentWriter {
    /// Begins a segment about `packs`, which are sorted and unique.
    pub(crate) fn create(
        store: &dyn Store,
        keys: &SegmentKeys,
        segment: SegmentId,
        packs: Vec<PackId>,
    ) -> Result<Self> {
        debug_assert!(packs.is_sorted());
        let mut header = [0; HEADER_LENGTH];
        header[..8].copy_from_slice(MAGIC);
        header[8..10].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        header[16..].copy_from_slice(segment.as_bytes());
        let mut object = store.create(&segment_name(segment))?;
        object.append(&header)?;
        Ok(Self {
            segment,
            key: keys.key(segment),
            object,
            packs,
            page: Vec::with_capacity(SEALED_PAGE_LENGTH),
            fences: Vec::new(),
            entry_count: 0,
            page_count: 0,
        })
    }

    /// Adds the next entry in order; its pack is one of the segment's.
    pub(crate) fn push(&mut self, entry: &IndexEntry) -> Result<()> {
        let pack = self
            .packs
            .binary_search(&entry.location.pack)
            .expect("the pack is one of the segment's");
        if self.page.is_empty() {
            self.fences.extend_from_slice(&entry.prefix[..8]);
        }
        let offset_bits = offset_bits(FORMAT_VERSION);
        let place = u64::from(entry.location.offset)
            | u64::from(entry.length) << offset_bits
            | u64::from(entry.location.frame) << (offset_bits + LENGTH_BITS);
        self.page.extend_from_slice(&entry.prefix);
        self.page
            .extend_from_slice(&u32::try_from(pack).expect("fewer than 2^32 packs").to_le_bytes());
        self.page.extend_from_slice(&place.to_le_bytes());
        self.entry_count += 1;
        if self.page.len() == PAGE_ENTRY_COUNT * ENTRY_LENGTH {
            self.finish_page()
        } else {
            Ok(())
        }
    }

    fn finish_page(&mut self) -> Result<()> {
        self.key
            .seal(Section::Page(self.page_count.into()).nonce(), &[], &mut self.page);
        self.object.append(&self.page)?;
        self.page.clear();
        self.page_count += 1;
        Ok(())
    }

    /// Writes the table of each pack; returns the list of packs.
    fn finish_tables(&mut self, table_of: &mut dyn FnMut(PackId) -> Result<Option<Vec<u8>>>) -> Result<Vec<u8>> {
        let mut list = Vec::with_capacity(self.packs.len() * PACK_ENTRY_LENGTH + TAG_LENGTH);
        for (number, pack) in (0..).zip(&self.packs) {
            let mut table = table_of(*pack)?.unwrap_or_default();
            if !table.is_empty() {
                self.key.seal(Section::Table(number).nonce(), &[], &mut table);
                self.object.append(&table)?;
            }
            let length = u32::try_from(table.len()).expect("a pack has at most 2^16 frames");
            list.extend_from_slice(pack.as_bytes());
            list.extend_from_slice(&length.to_le_bytes());
        }
        Ok(list)
    }

    /// Completes the segment, with the encoded frame table of each pack that has one; it is durable on return.
    pub(crate) fn finish(mut self, table_of: &mut dyn FnMut(PackId) -> Result<Option<Vec<u8>>>) -> Result<SegmentId> {
        if !self.page.is_empty() {
            self.finish_page()?;
        }
        let mut packs = self.finish_tables(table_of)?;
        let mut trailer = [0; TRAILER_LENGTH];
        trailer[..8].copy_from_slice(TRAILER_MAGIC);
        trailer[8..24].copy_from_slice(self.segment.as_bytes());
        trailer[24..32].copy_from_slice(&self.entry_count.to_le_bytes());
        let pack_count = u32::try_from(self.packs.len()).expect("fewer than 2^32 packs");
        trailer[32..36].copy_from_slice(&pack_count.to_le_bytes());
        trailer[36..40].copy_from_slice(&self.page_count.to_le_bytes());
        let crc = crc32c::crc32c(&trailer[..60]);
        trailer[60..].copy_from_slice(&crc.to_le_bytes());
        for (section, bytes) in [(Section::Packs, &mut packs), (Section::Fences, &mut self.fences)] {
            self.key.seal(section.nonce(), &[], bytes);
            self.object.append(bytes)?;
        }
        self.object.append(&trailer)?;
        match self.object.commit()? {
            Put::Created => Ok(self.segment),
            Put::AlreadyExists => {
                let detail = "a segment of this random name exists: is the source of randomness broken?";
                Err(Error::damaged(&segment_name(self.segment), 0, detail))
            }
        }
    }
}

/// Cached pages of all segments.
pub(crate) type SegmentPages = Mutex<LruCache<(SegmentId, u32), Arc<Vec<IndexEntry>>>>;

/// A segment that is open for reading.
pub(crate) struct SegmentReader {
    pub(crate) segment: SegmentId,
    version: u16,
    name: ObjectName,
    key: SealingKey,
    packs: Vec<PackId>,
    /// The locations of the sealed tables of the packs.
    tables: TablePlaces,
    fences: Vec<u64>,
    entry_count: u64,
    pub(crate) length: u64,
}

impl SegmentReader {
    pub(crate) fn open(store: &dyn Store, keys: &SegmentKeys, segment: SegmentId) -> Result<Self> {
        let name = segment_name(segment);
        let key = keys.key(segment);
        let length = store.length(&name)?;
        if length < (HEADER_LENGTH + TRAILER_LENGTH + 2 * TAG_LENGTH) as u64 {
            return Err(Error::damaged(&name, length, "it is too short to be a segment"));
        }
        let mut header = [0; HEADER_LENGTH];
        store.get_range(&name, 0, &mut header)?;
        let mut trailer = [0; TRAILER_LENGTH];
        let trailer_at = length - TRAILER_LENGTH as u64;
        store.get_range(&name, trailer_at, &mut trailer)?;
        let counts = check_ends(&name, segment, &header, &trailer, trailer_at)?;
        let mut tables = SegmentTables {
            store,
            name: &name,
            key: &key,
            end: trailer_at,
        };
        let fences = tables.read_back(Section::Fences, 8 * counts.pages as usize)?;
        let list = tables.read_back(Section::Packs, counts.pack_entry_length() * counts.packs as usize)?;
        let (packs, places) = TablePlaces::decode(&list, counts.pack_entry_length(), pages_end(counts.entries));
        if tables.end != places.end() {
            return Err(Error::damaged(
                &name,
                tables.end,
                "its pages do not add up to its length",
            ));
        }
        let fences = fences
            .as_chunks::<8>()
            .0
            .iter()
            .map(|fence| u64::from_be_bytes(*fence))
            .collect();
        Ok(Self {
            segment,
            version: counts.version,
            name,
            key,
            packs,
            tables: places,
            fences,
            entry_count: counts.entries,
            length,
        })
    }

    /// The packs whose chunks the segment lists.
    pub(crate) fn packs(&self) -> &[PackId] {
        &self.packs
    }

    /// The encoded frame table of a pack; `None` if the segment has none.
    pub(crate) fn frame_table(&self, store: &dyn Store, pack: PackId) -> Result<Option<Vec<u8>>> {
        let Some(place) = self
            .packs
            .binary_search(&pack)
            .ok()
            .and_then(|number| self.tables.of(number))
        else {
            return Ok(None);
        };
        if place.length > FRAME_TABLE_BYTES_MAX {
            let detail = format!(
                "a table of {} bytes; at most {FRAME_TABLE_BYTES_MAX} are read",
                place.length
            );
            return Err(Error::damaged(&self.name, place.offset, detail));
        }
        let mut bytes = vec![0; place.length as usize];
        store.get_range(&self.name, place.offset, &mut bytes)?;
        let nonce = Section::Table(place.number).nonce();
        if self.key.open(nonce, &[], &mut bytes).is_err() {
            let detail = format!("the table of pack {pack} has changed since it was written");
            return Err(Error::damaged(&self.name, place.offset, detail));
        }
        Ok(Some(bytes))
    }

    pub(crate) fn page_count(&self) -> u32 {
        u32::try_from(self.fences.len()).expect("the trailer counts pages in 32 bits")
    }

    /// The entries of chunks whose id begins with `prefix`: usually one, sometimes copies in several packs.
    pub(crate) fn find(&self, store: &dyn Store, pages: &SegmentPages, prefix: &Prefix) -> Result<Vec<IndexEntry>> {
        let fence = u64::from_be_bytes(prefix[..8].try_into().expect("a prefix is longer than a fence"));
        let mut found = Vec::new();
        // Equal fences: the entry may be at the end of the previous page.
        let first = self.fences.partition_point(|other| *other < fence).saturating_sub(1);
        for page in first..self.fences.len() {
            if self.fences[page] > fence {
                break;
            }
            let page = u32::try_from(page).expect("the trailer counts pages in 32 bits");
            let entries = self.page_cached(store, pages, page)?;
            let start = entries.partition_point(|entry| entry.prefix < *prefix);
            found.extend(entries[start..].iter().take_while(|entry| entry.prefix == *prefix));
        }
        Ok(found)
    }

    fn page_cached(&self, store: &dyn Store, pages: &SegmentPages, page: u32) -> Result<Arc<Vec<IndexEntry>>> {
        let cache = || pages.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entries) = cache().get(&(self.segment, page)) {
            return Ok(entries);
        }
        let entries = Arc::new(self.page(store, page)?);
        cache().insert(
            (self.segment, page),
            Arc::clone(&entries),
            entries.len() * size_of::<IndexEntry>(),
        );
        Ok(entries)
    }

    /// The entries of a page, in order.
    pub(crate) fn page(&self, store: &dyn Store, page: u32) -> Result<Vec<IndexEntry>> {
        let offset = HEADER_LENGTH as u64 + u64::from(page) * SEALED_PAGE_LENGTH as u64;
        let before = u64::from(page) * PAGE_ENTRY_COUNT as u64;
        let count = holdfast_block::to_usize((self.entry_count - before).min(PAGE_ENTRY_COUNT as u64));
        let mut bytes = vec![0; count * ENTRY_LENGTH + TAG_LENGTH];
        store.get_range(&self.name, offset, &mut bytes)?;
        if self
            .key
            .open(Section::Page(page.into()).nonce(), &[], &mut bytes)
            .is_err()
        {
            return Err(Error::damaged(
                &self.name,
                offset,
                format!("page {page} has changed since it was written"),
            ));
        }
        bytes
            .as_chunks()
            .0
            .iter()
            .map(|entry| self.decode_entry(entry, offset))
            .collect()
    }

    fn decode_entry(&self, bytes: &[u8; ENTRY_LENGTH], offset: u64) -> Result<IndexEntry> {
        let (prefix, rest) = bytes.split_at(PREFIX_LENGTH);
        let (pack, place) = rest.split_at(4);
        let pack = u32::from_le_bytes(pack.try_into().expect("four bytes"));
        let place = u64::from_le_bytes(place.try_into().expect("eight bytes"));
        let Some(&pack) = self.packs.get(pack as usize) else {
            return Err(Error::damaged(
                &self.name,
                offset,
                "an entry names a pack that the segment does not have",
            ));
        };
        let bits = |shift: u32, width: u32| {
            u32::try_from((place >> shift) & ((1 << width) - 1)).expect("fields are narrower than 32 bits")
        };
        let offset_bits = offset_bits(self.version);
        let (chunk_offset, length) = (bits(0, offset_bits), bits(offset_bits, LENGTH_BITS));
        if (chunk_offset + length) as usize > crate::format::codec::FRAME_BYTES_MAX {
            let detail = "an entry reaches past the end of a frame";
            return Err(Error::damaged(&self.name, offset, detail));
        }
        Ok(IndexEntry {
            prefix: prefix.try_into().expect("the prefix comes first"),
            location: Location {
                pack,
                frame: bits(offset_bits + LENGTH_BITS, 16),
                offset: chunk_offset,
            },
            length,
        })
    }
}

/// The offset after the pages of a segment with this many entries.
fn pages_end(entry_count: u64) -> u64 {
    let pages = entry_count.div_ceil(PAGE_ENTRY_COUNT as u64);
    HEADER_LENGTH as u64 + entry_count * ENTRY_LENGTH as u64 + pages * TAG_LENGTH as u64
}

/// Reads sealed tables from the end of a segment.
struct SegmentTables<'a> {
    store: &'a dyn Store,
    name: &'a ObjectName,
    key: &'a SealingKey,
    end: u64,
}

impl SegmentTables<'_> {
    fn read_back(&mut self, section: Section, length: usize) -> Result<Vec<u8>> {
        let sealed = length + TAG_LENGTH;
        if self.end < (sealed + HEADER_LENGTH) as u64 {
            return Err(Error::damaged(self.name, self.end, "its tables are longer than it is"));
        }
        self.end -= sealed as u64;
        let mut bytes = vec![0; sealed];
        self.store.get_range(self.name, self.end, &mut bytes)?;
        if self.key.open(section.nonce(), &[], &mut bytes).is_err() {
            return Err(Error::damaged(
                self.name,
                self.end,
                "a table has changed since it was written",
            ));
        }
        Ok(bytes)
    }
}
