//! Parses and writes the header of a sparse extent.
//!
//! ```text
//! offset  bytes
//! 0       4    "KDMV"
//! 4       4    version: 1, 2 or 3
//! 8       4    flags: 1 line ends, 2 a second directory, 4 entries of 1 are zero, 0x10000 compressed, 0x20000 with markers
//! 12      8    sectors of the extent
//! 20      8    sectors of a grain
//! 28      8    sector of the descriptor; 0 where it is elsewhere
//! 36      8    sectors of it
//! 44      4    entries of a table
//! 48      8    sector of the second directory
//! 56      8    sector of the directory; all ones: see the footer
//! 64      8    sectors before the first grain
//! 72      1    1: not closed
//! 73      4    a line feed, a space, a carriage return, a line feed
//! 77      2    1: deflate
//! ```
//!
//! A compressed grain is stored as its first sector (8 bytes), its length (4), and a zlib stream. A footer is a header
//! in the last sector but one.

use std::ops::Range;

use holdfast_block::{Record, to_usize};

use super::SECTOR_BYTES;
use crate::allocation_table::for_each_entry;
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::put;
use crate::{Error, Result};

/// The entry of a zero grain, in extents that support it.
pub(super) const ZERO_GRAIN: u32 = 1;
pub(super) const HEADER_BYTES: u64 = 512;
pub(crate) const MAGIC: &[u8; 4] = b"KDMV";
const HAS_NEWLINES: u32 = 1;
const HAS_SECOND: u32 = 2;
const HAS_ZERO_GRAINS: u32 = 4;
const IS_COMPRESSED: u32 = 1 << 16;
const HAS_MARKERS: u32 = 1 << 17;
const DEFLATE: u16 = 1;
const AT_END: u64 = u64::MAX;
const AT_DIRECTORY: usize = 56;
/// Limit of a grain: a compressed one is read as a whole.
const GRAIN_SECTORS_MAX: u64 = (16 << 20) / SECTOR_BYTES;
/// Offset of the mark of an open extent.
pub(super) const AT_IS_OPEN: u64 = 72;
const NEWLINES: &[u8; 4] = b"\n \r\n";

/// A header that was validated against its file. Offsets are in bytes of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SparseExtent {
    pub(crate) disk_bytes: u64,
    pub(crate) grain_bytes: u64,
    pub(crate) descriptor: Option<(u64, u64)>,
    pub(crate) table_entries: u64,
    /// 0 if only the footer has it.
    pub(crate) directory: u64,
    /// The redundant directory. It is only written, and may be past the end of the file.
    pub(crate) second_directory: Option<u64>,
    pub(crate) has_zero_grains: bool,
    pub(crate) is_compressed: bool,
    pub(crate) is_open: bool,
    /// Bytes before the first grain according to the header; not validated.
    pub(crate) overhead: u64,
}

type Stored = [u8; to_usize(HEADER_BYTES)];

impl SparseExtent {
    /// Reads the header of `file`; errors call it `image`.
    pub(crate) fn load(file: &dyn ImageFile, image: &str) -> Result<Self> {
        let file_bytes = file.length_bytes()?;
        let header_at = |at: u64| -> Result<Stored> {
            let mut bytes = [0; to_usize(HEADER_BYTES)];
            file.read_at(&mut bytes, at)?;
            if bytes.starts_with(MAGIC) && file_bytes >= HEADER_BYTES {
                Ok(bytes)
            } else {
                Err(corrupt(image, "header", at, "it is missing"))
            }
        };
        let first = header_at(0)?;
        let extent = Self::parse(&first, file_bytes, image)?;
        if Record::new(&first).le_u64::<AT_DIRECTORY>() != AT_END {
            return Ok(extent);
        }
        let footer = header_at(footer_place(file, file_bytes)?)?;
        if Record::new(&footer).le_u64::<AT_DIRECTORY>() == AT_END {
            return Err(corrupt(image, "footer", 0, "the directory is missing"));
        }
        // The header has the place of the descriptor; a footer often does not.
        let descriptor = extent.descriptor;
        Ok(Self {
            descriptor,
            ..Self::parse(&footer, file_bytes, image)?
        })
    }

    /// Parses the [`HEADER_BYTES`] of a header or footer whose magic number was checked. `file_bytes` is the length of
    /// the file; [`u64::MAX`] if unknown.
    pub(super) fn parse(bytes: &Stored, file_bytes: u64, image: &str) -> Result<Self> {
        let wrong = |at: u64, detail: String| Err(corrupt(image, "header", at, detail));
        let unsupported = |feature: String| Error::UnsupportedFeature {
            image: image.to_owned(),
            feature,
            detail: "clone or export it with its hypervisor".to_owned(),
        };
        let stored = Record::new(bytes);
        let version = stored.le_u32::<4>();
        if !(1..=3).contains(&version) {
            return Err(unsupported(format!("version {version} of sparse extents")));
        }
        let flags = stored.le_u32::<8>();
        let algorithm = stored.le_u16::<77>();
        if flags & IS_COMPRESSED != 0 && (flags & HAS_MARKERS == 0 || algorithm != DEFLATE) {
            return Err(unsupported(format!("compression {algorithm} with flags {flags:#x}")));
        }
        if flags & HAS_NEWLINES != 0 && stored.field::<73, 4>() != NEWLINES {
            return wrong(73, "line ends were changed: it was transferred as a text".to_owned());
        }
        let (sectors, grain_sectors) = (stored.le_u64::<12>(), stored.le_u64::<20>());
        let table_entries = u64::from(stored.le_u32::<44>());
        check_grain(grain_sectors, image)?;
        if table_entries == 0 || table_entries > 4096 {
            return wrong(44, format!("a table has {table_entries} entries"));
        }
        if sectors > i64::MAX as u64 / SECTOR_BYTES {
            return wrong(12, format!("the extent has {sectors} sectors"));
        }
        let place = |sector: u64| {
            let place = sector.checked_mul(SECTOR_BYTES);
            place.filter(|place| i64::try_from(*place).is_ok())
        };
        let grain_bytes = grain_sectors * SECTOR_BYTES;
        let disk_bytes = sectors * SECTOR_BYTES;
        let directory_bytes = disk_bytes.div_ceil(grain_bytes * table_entries) * 4;
        let is_at_end = stored.le_u64::<AT_DIRECTORY>() == AT_END;
        let directory = place(stored.le_u64::<AT_DIRECTORY>()).unwrap_or_default();
        if !is_at_end && (directory == 0 || directory + directory_bytes > file_bytes) {
            return wrong(
                56,
                format!("the directory of {directory_bytes} bytes begins at {directory}"),
            );
        }
        let second = place(stored.le_u64::<48>()).filter(|second| flags & HAS_SECOND != 0 && *second > 0);
        let descriptor = match (place(stored.le_u64::<28>()), place(stored.le_u64::<36>())) {
            (Some(offset), Some(length)) if offset > 0 && length > 0 => Some((offset, length)),
            _ => None,
        };
        Ok(Self {
            disk_bytes,
            grain_bytes,
            descriptor,
            table_entries,
            directory,
            second_directory: second,
            has_zero_grains: flags & HAS_ZERO_GRAINS != 0,
            is_compressed: flags & IS_COMPRESSED != 0,
            is_open: stored.byte::<{ to_usize(AT_IS_OPEN) }>() == 1,
            overhead: place(stored.le_u64::<64>()).unwrap_or_default(),
        })
    }

    /// Bytes of the disk that one table maps.
    pub(crate) fn table_coverage(&self) -> u64 {
        self.grain_bytes * self.table_entries
    }

    pub(crate) fn table_count(&self) -> u64 {
        self.disk_bytes.div_ceil(self.table_coverage())
    }

    /// The offsets of the tables in a directory; 0 for none.
    pub(super) fn tables_of(&self, file: &dyn ImageFile, directory: u64) -> Result<Vec<u64>> {
        let mut places = Vec::new();
        for_each_entry(file, directory, self.table_count(), |_, entry| {
            places.push(u64::from(u32::from_le_bytes(entry)) * SECTOR_BYTES);
        })?;
        Ok(places)
    }

    /// Calls `visit` with the number and the offset of each grain in these tables, which are in the file.
    pub(super) fn for_each_grain(
        &self,
        file: &dyn ImageFile,
        tables: &[u64],
        mut visit: impl FnMut(u64, u64),
    ) -> Result<()> {
        for (number, table) in (0..).zip(tables).filter(|(_, table)| **table != 0) {
            for_each_entry(file, *table, self.table_entries, |index, entry| {
                let sector = u32::from_le_bytes(entry);
                if sector > ZERO_GRAIN || sector == ZERO_GRAIN && !self.has_zero_grains {
                    visit(number * self.table_entries + index, u64::from(sector) * SECTOR_BYTES);
                }
            })?;
        }
        Ok(())
    }

    /// Header, descriptor and first directory: metadata whose place the header determines.
    pub(super) fn fixed_metadata(&self) -> Vec<Range<u64>> {
        let descriptor = self
            .descriptor
            .map(|(offset, length)| offset..offset.saturating_add(length));
        let mut ranges: Vec<Range<u64>> = descriptor.into_iter().collect();
        ranges.push(0..HEADER_BYTES);
        ranges.push(self.directory..self.directory + self.table_count() * 4);
        ranges
    }

    /// Ranges of `file` that contain metadata, sorted: header, descriptor, directories and tables.
    pub(super) fn metadata(&self, file: &dyn ImageFile) -> Result<Vec<Range<u64>>> {
        let mut ranges = self.fixed_metadata();
        if let Some(second) = self.second_directory {
            ranges.push(second..second + self.table_count() * 4);
        }
        let table_bytes = self.table_entries * 4;
        for directory in [Some(self.directory), self.second_directory].into_iter().flatten() {
            for_each_entry(file, directory, self.table_count(), |_, entry| {
                let table = u64::from(u32::from_le_bytes(entry)) * SECTOR_BYTES;
                if table != 0 {
                    ranges.push(table..table + table_bytes);
                }
            })?;
        }
        ranges.sort_unstable_by_key(|range| range.start);
        Ok(ranges)
    }

    /// The stored header of a new extent.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; to_usize(HEADER_BYTES)];
        let mut put = |at: usize, field: &[u8]| put(&mut bytes, at, field);
        let sectors = |bytes: u64| (bytes / SECTOR_BYTES).to_le_bytes();
        let (descriptor, descriptor_bytes) = self.descriptor.unwrap_or_default();
        let second = self.second_directory.map_or(0, |_| HAS_SECOND);
        let (version, flags, algorithm) = if self.is_compressed {
            (3_u32, IS_COMPRESSED | HAS_MARKERS, DEFLATE)
        } else {
            (1, 0, 0)
        };
        let directory = if self.directory == 0 {
            AT_END.to_le_bytes()
        } else {
            sectors(self.directory)
        };
        put(0, MAGIC);
        put(4, &version.to_le_bytes());
        put(8, &(HAS_NEWLINES | second | flags).to_le_bytes());
        put(12, &sectors(self.disk_bytes));
        put(20, &sectors(self.grain_bytes));
        put(28, &sectors(descriptor));
        put(36, &sectors(descriptor_bytes));
        put(44, &u32::try_from(self.table_entries).unwrap_or(u32::MAX).to_le_bytes());
        put(48, &sectors(self.second_directory.unwrap_or_default()));
        put(56, &directory);
        put(64, &sectors(self.overhead));
        put(73, NEWLINES);
        put(77, &algorithm.to_le_bytes());
        bytes
    }
}

fn check_grain(sectors: u64, image: &str) -> Result<()> {
    match sectors {
        8..=GRAIN_SECTORS_MAX if sectors.is_power_of_two() => Ok(()),
        sectors if sectors > GRAIN_SECTORS_MAX && sectors.is_power_of_two() => Err(Error::UnsupportedFeature {
            image: image.to_owned(),
            feature: format!("grains of {sectors} sectors"),
            detail: "clone or export it with its hypervisor".to_owned(),
        }),
        sectors => Err(corrupt(image, "header", 20, format!("a grain has {sectors} sectors"))),
    }
}

/// Offset of the footer: in the last sector with data. The end of the stream, which is zero, and the padding of a
/// block device or tape follow.
fn footer_place(file: &dyn ImageFile, file_bytes: u64) -> Result<u64> {
    const BYTES_AT_ONCE: u64 = 64 << 10;
    let usual = file_bytes.saturating_sub(2 * SECTOR_BYTES);
    let mut end = file_bytes;
    while end > 0 && file_bytes - end <= PADDING_BYTES_MAX {
        let start = end.saturating_sub(BYTES_AT_ONCE);
        let mut bytes = vec![0; to_usize(end - start)];
        file.read_at(&mut bytes, start)?;
        if let Some(last) = bytes.iter().rposition(|byte| *byte != 0) {
            return Ok((start + last as u64) / SECTOR_BYTES * SECTOR_BYTES);
        }
        end = start;
    }
    Ok(usual)
}

/// The descriptor embedded in `file`, if it is an extent that has one; truncated to the maximum length of a
/// descriptor.
pub(crate) fn descriptor_of(file: &dyn ImageFile) -> Result<Vec<u8>> {
    const DESCRIPTOR_BYTES_MAX: u64 = 1 << 20;
    let mut first = [0; 48];
    file.read_at(&mut first, 0)?;
    let stored = Record::new(&first);
    if stored.field::<0, 4>() != MAGIC {
        return Ok(Vec::new());
    }
    let [start, length] = [stored.le_u64::<28>(), stored.le_u64::<36>()].map(|at| at.saturating_mul(SECTOR_BYTES));
    let there = file.length_bytes()?.saturating_sub(start);
    let mut text = vec![0; to_usize(length.min(there).min(DESCRIPTOR_BYTES_MAX))];
    if !text.is_empty() {
        file.read_at(&mut text, start)?;
    }
    Ok(text)
}

/// Limit of zero padding after the end.
pub(crate) const PADDING_BYTES_MAX: u64 = 1 << 20;
