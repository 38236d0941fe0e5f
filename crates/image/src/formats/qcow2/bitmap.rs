//! Persistent dirty bitmaps: which ranges of the disk were written since a checkpoint.
//!
//! A header extension refers to a directory, each row of which (padded to 8 bytes) refers to a table of data clusters:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | offset of the bitmap table |
//! | 8 | 4 | entries of it |
//! | 12 | 4 | flags: 0 in use, 1 enabled, 2 extra data may be ignored |
//! | 16 | 1 | type, 1 for dirty tracking |
//! | 17 | 1 | log2 of the granularity in bytes |
//! | 18 | 2 | length of the name |
//! | 20 | 4 | length of extra data, which comes before the name |

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::ops::Range;

use holdfast_block::{Record, to_usize};

use super::features::{AUTOCLEAR_BITMAPS, EXTENSION_BITMAPS};
use super::geometry::OFFSET_MASK;
use super::header::Qcow2Header;
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::to_words;
use crate::model::qcow2_info::{BitmapState, PersistentBitmap, Recording, TableLocation};
use crate::{Error, Result};

const ROW_BYTES: u64 = 24;
/// The fixed part of a row; the extension has the same length.
type Fields<'a> = Record<'a, { to_usize(ROW_BYTES) }>;
/// QEMU's limits.
const BITMAP_COUNT_MAX: u32 = 65_535;
const DIRECTORY_BYTES_MAX: u64 = 64 << 20;
const NAME_BYTES_MAX: u64 = 1023;
const TABLE_BYTES_MAX: u64 = 64 << 20;
const GRANULARITY_BITS: Range<u8> = 9..32;

/// The location of the bitmap directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BitmapDirectory {
    pub(crate) offset: u64,
    pub(crate) length_bytes: u64,
    count: u32,
}

/// The directory according to the header, if there is one.
pub(crate) fn directory(header: &Qcow2Header, file_bytes: u64, image: &str) -> Result<Option<BitmapDirectory>> {
    let Some(extension) = header.extension(EXTENSION_BITMAPS) else {
        return Ok(None);
    };
    let Some(fields) = Fields::first_of(extension) else {
        let detail = format!("{} bytes long", extension.len());
        return Err(corrupt(image, "bitmap extension", 0, detail));
    };
    let found = BitmapDirectory {
        count: fields.be_u32::<0>(),
        length_bytes: fields.be_u64::<8>(),
        offset: fields.be_u64::<16>(),
    };
    let end = found.offset.checked_add(found.length_bytes);
    let fits = end.is_some_and(|end| end <= file_bytes) && found.length_bytes <= DIRECTORY_BYTES_MAX;
    if !fits || found.count > BITMAP_COUNT_MAX || !header.geometry.is_aligned(found.offset) {
        let detail = format!("{} bitmaps in {} bytes", found.count, found.length_bytes);
        return Err(corrupt(image, "bitmap directory", found.offset, detail));
    }
    Ok(Some(found))
}

/// Reads the bitmap directory.
pub(crate) fn load(file: &dyn ImageFile, header: &Qcow2Header, image: &str) -> Result<Vec<PersistentBitmap>> {
    let file_bytes = file.length_bytes()?;
    let Some(directory) = directory(header, file_bytes, image)? else {
        return Ok(Vec::new());
    };
    let mut bytes = vec![0; to_usize(directory.length_bytes)];
    file.read_at(&mut bytes, directory.offset)?;
    let mut bitmaps = Vec::new();
    let mut at = 0u64;
    for _ in 0..directory.count {
        let damaged = |detail: String| corrupt(image, "bitmap directory", directory.offset + at, detail);
        let row = bytes.get(to_usize(at)..).unwrap_or_default();
        let fields = Fields::first_of(row).ok_or_else(|| damaged("cut off".to_owned()))?;
        let name_bytes = u64::from(fields.be_u16::<18>());
        let extra_bytes = u64::from(fields.be_u32::<20>());
        let name_at = ROW_BYTES + extra_bytes;
        let name = row.get(to_usize(name_at)..to_usize(name_at + name_bytes));
        let name = name.filter(|_| (1..=NAME_BYTES_MAX).contains(&name_bytes));
        let name = name.ok_or_else(|| damaged(format!("name of {name_bytes} bytes")))?;
        bitmaps.push(parse_row(fields, name, header, file_bytes, image)?);
        at += (name_at + name_bytes).next_multiple_of(8);
    }
    Ok(bitmaps)
}

fn parse_row(
    row: Fields<'_>,
    name: &[u8],
    header: &Qcow2Header,
    file_bytes: u64,
    image: &str,
) -> Result<PersistentBitmap> {
    let table = TableLocation {
        offset: row.be_u64::<0>(),
        entries: u64::from(row.be_u32::<8>()),
    };
    let flags = row.be_u32::<12>();
    let (kind, granularity_bits) = (row.byte::<16>(), row.byte::<17>());
    let damaged = |detail: String| corrupt(image, "bitmap table", table.offset, detail);
    if kind != 1 || flags & !0b111 != 0 || !GRANULARITY_BITS.contains(&granularity_bits) {
        return Err(damaged(format!(
            "type {kind}, flags {flags:#x}, granularity 2^{granularity_bits}"
        )));
    }
    let table_bytes = table.entries * 8;
    let end = table.offset.checked_add(table_bytes);
    if table_bytes > TABLE_BYTES_MAX
        || end.is_none_or(|end| end > file_bytes)
        || !header.geometry.is_aligned(table.offset)
    {
        return Err(damaged(format!("{} entries do not fit", table.entries)));
    }
    let state = if header.autoclear & AUTOCLEAR_BITMAPS == 0 {
        BitmapState::Stale
    } else if flags & 1 != 0 {
        BitmapState::InUse
    } else {
        BitmapState::Valid
    };
    Ok(PersistentBitmap {
        name: String::from_utf8_lossy(name).into_owned(),
        granularity_bytes: 1 << granularity_bits,
        state,
        recording: if flags & 2 == 0 {
            Recording::Disabled
        } else {
            Recording::Enabled
        },
        table,
    })
}

/// An entry of a bitmap table.
pub(crate) enum TableEntry {
    AllClear,
    AllSet,
    Cluster(u64),
}

pub(crate) fn table_entry(word: u64) -> TableEntry {
    match (word & OFFSET_MASK, word & 1) {
        (0, 0) => TableEntry::AllClear,
        (0, _) => TableEntry::AllSet,
        (offset, _) => TableEntry::Cluster(offset),
    }
}

pub(crate) fn load_table(file: &dyn ImageFile, table: TableLocation) -> Result<Vec<u64>> {
    let mut bytes = vec![0; to_usize(table.entries * 8)];
    file.read_at(&mut bytes, table.offset)?;
    Ok(to_words(&bytes))
}

/// Calls `visit` with every dirty range of a disk of `size_bytes`, in order, with adjacent ranges merged.
pub(crate) fn for_each_dirty(
    file: &dyn ImageFile,
    header: &Qcow2Header,
    bitmap: &PersistentBitmap,
    image: &str,
    visit: &mut dyn FnMut(Range<u64>),
) -> Result<()> {
    let geometry = header.geometry;
    let damaged = |offset: u64, detail: String| corrupt(image, "bitmap", offset, detail);
    // Bytes of the disk that one cluster of bits covers; saturates for the largest sizes.
    let covered = geometry
        .cluster_bytes()
        .saturating_mul(8)
        .saturating_mul(bitmap.granularity_bytes);
    let needed = header.size_bytes.div_ceil(covered);
    if bitmap.table.entries < needed {
        let detail = format!("it has {} clusters, but the disk needs {needed}", bitmap.table.entries);
        return Err(damaged(bitmap.table.offset, detail));
    }
    let file_bytes = file.length_bytes()?;
    let mut ranges = Merger {
        pending: None,
        end: header.size_bytes,
        visit,
    };
    let words = load_table(file, bitmap.table)?;
    let mut read_bytes = 0;
    let mut bits = vec![0; to_usize(geometry.cluster_bytes())];
    for (number, word) in (0..needed).zip(words) {
        let start = number * covered;
        match table_entry(word) {
            TableEntry::AllClear => {}
            TableEntry::AllSet => ranges.add(start, start.saturating_add(covered)),
            TableEntry::Cluster(offset) => {
                if !geometry.is_aligned(offset) || offset.saturating_add(geometry.cluster_bytes()) > file_bytes {
                    return Err(damaged(offset, "cluster outside the file".to_owned()));
                }
                // A table that refers to one cluster repeatedly would make the work grow with the square of the file
                // size.
                read_bytes += geometry.cluster_bytes();
                if read_bytes > file_bytes.next_multiple_of(geometry.cluster_bytes()) {
                    let detail = "its clusters are larger than the file: some overlap".to_owned();
                    return Err(damaged(offset, detail));
                }
                file.read_at(&mut bits, offset)?;
                ranges.add_bits(&bits, start, bitmap.granularity_bytes);
            }
        }
    }
    ranges.finish();
    Ok(())
}

struct Merger<'a> {
    pending: Option<Range<u64>>,
    end: u64,
    visit: &'a mut dyn FnMut(Range<u64>),
}

impl Merger<'_> {
    fn add(&mut self, start: u64, end: u64) {
        let (start, end) = (start.min(self.end), end.min(self.end));
        match &mut self.pending {
            Some(pending) if pending.end == start => pending.end = end,
            _ => {
                self.finish();
                self.pending = Some(start..end);
            }
        }
    }

    fn add_bits(&mut self, bits: &[u8], start: u64, granularity_bytes: u64) {
        for (number, byte) in (0u64..).zip(bits).filter(|(_, byte)| **byte != 0) {
            for bit in (0..8).filter(|bit| byte >> bit & 1 == 1) {
                let at = start.saturating_add((number * 8 + bit).saturating_mul(granularity_bytes));
                self.add(at, at.saturating_add(granularity_bytes));
            }
        }
    }

    fn finish(&mut self) {
        if let Some(range) = self.pending.take().filter(|range| !range.is_empty()) {
            (self.visit)(range);
        }
    }
}

pub(crate) fn find<'a>(bitmaps: &'a [PersistentBitmap], name: &str, image: &str) -> Result<&'a PersistentBitmap> {
    bitmaps
        .iter()
        .find(|bitmap| bitmap.name == name)
        .ok_or_else(|| Error::NotFound {
            image: image.to_owned(),
            what: "bitmap",
            name: name.to_owned(),
        })
}
