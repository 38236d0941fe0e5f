//! The index at the end of a packed stream.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::io;

use holdfast_block::Record;

use super::gzip;
use super::zstd_frame::SEEK_TABLE;
use crate::packed::frame::{FRAME_BYTES_MAX, Packing};
use crate::{Error, Result};

/// Bytes of an entry in both forms: packed length, length, checksum.
pub(super) const ENTRY_BYTES: usize = 12;
/// The number of 1 MiB blocks of a stream of 4 PiB.
pub(super) const ENTRY_COUNT_MAX: u64 = 1 << 32;

/// The magic number at the end of an index in a gzip file.
const GZIP_MAGIC: [u8; 8] = *b"HFINDEX1";
/// Magic, number of entries, bytes of the members with entries.
const GZIP_FOOTER_BYTES: usize = 24;
/// The whole last member.
pub(crate) const GZIP_END_BYTES: usize = gzip::MEMBER_HEAD_BYTES + 4 + GZIP_FOOTER_BYTES + 2 + 8;
/// Entries of an index member.
const GZIP_ENTRIES_MAX: usize = gzip::INDEX_BYTES_MAX / ENTRY_BYTES;

/// The magic number at the end of a seek table of zstd.
const ZSTD_MAGIC: u32 = 0x8f92_eab1;
/// Number of entries, descriptor, magic.
pub(super) const ZSTD_FOOTER_BYTES: usize = 9;
const ZSTD_HEAD_BYTES: usize = 8;
const ZSTD_HAS_CHECKSUMS: u8 = 0x80;
/// Number of entries, descriptor, magic number.
type ZstdFooter<'a> = Record<'a, ZSTD_FOOTER_BYTES>;

/// A block of the stream, with its offset in the packed file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexEntry {
    /// Its offset in the packed file.
    pub packed_offset: u64,
    /// Its packed length.
    pub packed_bytes: u32,
    /// Its offset in the stream.
    pub offset: u64,
    /// Its length in the stream.
    pub bytes: u32,
    /// CRC-32 of its content in a gzip file; the lower half of its XXH64 with seed 0 in a zstd file.
    pub checksum: u32,
}

/// The offsets of all blocks of a packed stream.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PackedIndex {
    entries: Vec<IndexEntry>,
}

impl PackedIndex {
    /// The blocks, in the order of the stream.
    pub fn entries(&self) -> &[IndexEntry] {
        &self.entries
    }

    /// Length of the stream.
    pub fn size_bytes(&self) -> u64 {
        self.entries
            .last()
            .map_or(0, |last| last.offset + u64::from(last.bytes))
    }

    /// Total length of the packed blocks, which is the offset of the index.
    pub fn packed_bytes(&self) -> u64 {
        self.entries
            .last()
            .map_or(0, |last| last.packed_offset + u64::from(last.packed_bytes))
    }

    pub(crate) fn push(&mut self, packed_bytes: u32, bytes: u32, checksum: u32) {
        self.entries.push(IndexEntry {
            packed_offset: self.packed_bytes(),
            packed_bytes,
            offset: self.size_bytes(),
            bytes,
            checksum,
        });
    }

    /// The number of the block that contains `offset`.
    pub(crate) fn find(&self, offset: u64) -> usize {
        self.entries
            .partition_point(|entry| entry.offset + u64::from(entry.bytes) <= offset)
    }

    fn table(&self) -> Vec<u8> {
        let words = self
            .entries
            .iter()
            .flat_map(|entry| [entry.packed_bytes, entry.bytes, entry.checksum]);
        words.flat_map(u32::to_le_bytes).collect()
    }

    /// The encoded index, to be written after the blocks.
    pub(crate) fn encode(&self, packing: Packing) -> io::Result<Vec<u8>> {
        match packing {
            Packing::Gzip => self.encode_gzip(),
            Packing::Zstd | Packing::Xz | Packing::None => self.encode_zstd(),
        }
    }

    fn encode_gzip(&self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for part in self.table().chunks(GZIP_ENTRIES_MAX * ENTRY_BYTES) {
            bytes.extend(gzip::index_member(part)?);
        }
        let mut footer = GZIP_MAGIC.to_vec();
        footer.extend((self.entries.len() as u64).to_le_bytes());
        footer.extend((bytes.len() as u64).to_le_bytes());
        bytes.extend(gzip::index_member(&footer)?);
        Ok(bytes)
    }

    fn encode_zstd(&self) -> io::Result<Vec<u8>> {
        let table = self.table();
        let length = u32::try_from(table.len() + ZSTD_FOOTER_BYTES).map_err(io::Error::other)?;
        let mut bytes = SEEK_TABLE.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend(table);
        bytes.extend(
            u32::try_from(self.entries.len())
                .map_err(io::Error::other)?
                .to_le_bytes(),
        );
        bytes.push(ZSTD_HAS_CHECKSUMS);
        bytes.extend(ZSTD_MAGIC.to_le_bytes());
        Ok(bytes)
    }

    /// Reads the index of a file of `file_bytes`. `read` returns a range of the file.
    ///
    /// # Errors
    /// The file has no index, or one that contradicts the file's length. Reading.
    pub(crate) fn read(
        packing: Packing,
        file_bytes: u64,
        read: &mut dyn FnMut(u64, usize) -> Result<Vec<u8>>,
    ) -> Result<Self> {
        match packing {
            Packing::Gzip => Self::read_gzip(file_bytes, read),
            Packing::Zstd => Self::read_zstd(file_bytes, read),
            Packing::Xz | Packing::None => Err(Error::NoIndex),
        }
    }

    fn read_gzip(file_bytes: u64, read: &mut dyn FnMut(u64, usize) -> Result<Vec<u8>>) -> Result<Self> {
        let end_at = file_bytes.checked_sub(GZIP_END_BYTES as u64).ok_or(Error::NoIndex)?;
        let end = read(end_at, GZIP_END_BYTES)?;
        let footer = gzip::index_of(&end).and_then(gzip_footer);
        let (count, length) = footer.ok_or(Error::NoIndex)?;
        gzip::check_index(&end).map_err(|detail| wrong(end_at, detail))?;
        let start = end_at.checked_sub(length).filter(|_| count <= ENTRY_COUNT_MAX);
        let mut at = start.ok_or_else(|| wrong(end_at, "it is longer than the file"))?;
        let mut table = Vec::new();
        while at < end_at {
            let most = usize::try_from(end_at - at).unwrap_or(usize::MAX).min(0x1_0000 + 64);
            let bytes = read(at, most)?;
            let sizes = gzip::sizes(&bytes).and_then(|(length, _)| bytes.get(..length));
            let entries = sizes.and_then(gzip::index_of);
            let entries = entries.ok_or_else(|| wrong(at, "one of its members is malformed"))?;
            gzip::check_index(sizes.unwrap_or_default()).map_err(|detail| wrong(at, detail))?;
            table.extend_from_slice(entries);
            at += sizes.map_or(0, <[u8]>::len) as u64;
        }
        Self::decode(&table, count, end_at - length)?.of_all(Packing::Gzip, end_at - length, read)
    }

    fn read_zstd(file_bytes: u64, read: &mut dyn FnMut(u64, usize) -> Result<Vec<u8>>) -> Result<Self> {
        let end_at = file_bytes.checked_sub(ZSTD_FOOTER_BYTES as u64).ok_or(Error::NoIndex)?;
        let footer = read(end_at, ZSTD_FOOTER_BYTES)?;
        let footer = ZstdFooter::first_of(&footer).ok_or(Error::NoIndex)?;
        if footer.le_u32::<5>() != ZSTD_MAGIC {
            return Err(Error::NoIndex);
        }
        if footer.byte::<4>() != ZSTD_HAS_CHECKSUMS {
            return Err(Error::Unsupported {
                feature: "a seek table without checksums".to_owned(),
                detail: "unpack it as a stream".to_owned(),
            });
        }
        let count = u64::from(footer.le_u32::<0>());
        let table_bytes = count * ENTRY_BYTES as u64;
        let table_at = end_at.checked_sub(table_bytes);
        let start = table_at.and_then(|at| at.checked_sub(ZSTD_HEAD_BYTES as u64));
        let (Some(table_at), Some(start)) = (table_at, start) else {
            return Err(wrong(end_at, "it is longer than the file"));
        };
        let head = read(start, ZSTD_HEAD_BYTES)?;
        let head = Record::<ZSTD_HEAD_BYTES>::first_of(&head).ok_or(Error::NoIndex)?;
        let length = u64::from(head.le_u32::<4>());
        if head.le_u32::<0>() != SEEK_TABLE || length != table_bytes + ZSTD_FOOTER_BYTES as u64 {
            return Err(wrong(start, "its start contradicts its end"));
        }
        // The table is not longer than the file, which bounds the allocation.
        let table_bytes = usize::try_from(table_bytes).map_err(|_| wrong(start, "it is too long"))?;
        Self::decode(&read(table_at, table_bytes)?, count, start)?.of_all(Packing::Zstd, start, read)
    }

    fn decode(table: &[u8], count: u64, packed_bytes: u64) -> Result<Self> {
        if table.len() as u64 != count.saturating_mul(ENTRY_BYTES as u64) {
            return Err(wrong(packed_bytes, "its number of entries is wrong"));
        }
        let mut index = Self::default();
        let (entries, _) = table.as_chunks();
        for entry in entries {
            let (packed, bytes, checksum) = entry_of(entry);
            let most = u32::try_from(FRAME_BYTES_MAX).unwrap_or(u32::MAX);
            if packed > most || bytes > most {
                return Err(wrong(packed_bytes, "one of its blocks is too large"));
            }
            // An empty block would be skipped, and all blocks after it would be misplaced.
            if bytes == 0 && count > 1 {
                return Err(wrong(packed_bytes, "one of its blocks is empty"));
            }
            index.push(packed, bytes, checksum);
        }
        Ok(index)
    }

    /// Returns the index if its blocks are all that precedes it.
    ///
    /// # Errors
    /// [`Error::NoIndex`] if there are other blocks before them: both formats allow concatenated files.
    fn of_all(
        self,
        packing: Packing,
        index_at: u64,
        read: &mut dyn FnMut(u64, usize) -> Result<Vec<u8>>,
    ) -> Result<Self> {
        let wrong = || wrong(index_at, "its blocks do not end where it begins");
        let start = index_at.checked_sub(self.packed_bytes()).ok_or_else(wrong)?;
        if start == 0 {
            return Ok(self);
        }
        let is_joined = !self.entries.is_empty() && Packing::sniff(&read(start, 4)?) == packing;
        Err(if is_joined { Error::NoIndex } else { wrong() })
    }
}

/// Packed length, length and checksum of an entry.
pub(super) fn entry_of(bytes: &[u8; ENTRY_BYTES]) -> (u32, u32, u32) {
    let entry = Record::new(bytes);
    (entry.le_u32::<0>(), entry.le_u32::<4>(), entry.le_u32::<8>())
}

/// Number of entries and length of their members, if `content` is that of the last member of an index.
pub(super) fn gzip_footer(content: &[u8]) -> Option<(u64, u64)> {
    let footer = Record::<GZIP_FOOTER_BYTES>::new(content.try_into().ok()?);
    let is_one = *footer.field::<0, 8>() == GZIP_MAGIC;
    is_one.then(|| (footer.le_u64::<8>(), footer.le_u64::<16>()))
}

/// Number of entries, if `bytes` is the end of a seek table with checksums.
pub(super) fn zstd_footer(bytes: &[u8]) -> Option<u64> {
    let footer = ZstdFooter::new(bytes.try_into().ok()?);
    let is_one = footer.byte::<4>() == ZSTD_HAS_CHECKSUMS && footer.le_u32::<5>() == ZSTD_MAGIC;
    is_one.then(|| u64::from(footer.le_u32::<0>()))
}

fn wrong(offset: u64, detail: &str) -> Error {
    Error::Corrupt {
        what: "index",
        offset,
        detail: detail.to_owned(),
    }
}
