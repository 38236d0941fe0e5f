//! Reads and changes grain directories and tables.

use std::ops::Range;
use std::sync::Arc;

use holdfast_block::to_usize;

use super::concatenated::{Concatenated, WINDOW_BYTES};
use super::extent::{SparseExtent, ZERO_GRAIN};
use super::overlap::is_first_directory_invalid;
use super::stream::{GRAIN_MARKER_BYTES, check_stored, grain_marker, inflate};
use crate::allocation_table::pages::{Pages, TableChanges};
use crate::allocation_table::{AllocationTable, clear_room, end_of_block};
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::identity::ImageId;
use crate::model::mapped_extent::{Compressed, KnownLength, MappedExtent, MappedKind};
use crate::model::shared_cache::SharedCache;
use crate::{Error, Result};

/// Memory for the tables of one layer: with grains of 64 KiB enough for 128 GiB.
const CACHE_BYTES: u64 = 8 << 20;
/// Memory for decompressed grains, for reads smaller than a grain.
const GRAIN_CACHE_BYTES: u64 = 4 << 20;

/// An extent of the disk. Offsets in files are those of [`Concatenated`].
pub(crate) struct VmdkExtent {
    pub(crate) start: u64,
    pub(crate) length: u64,
    pub(crate) kind: VmdkExtentKind,
}

pub(crate) enum VmdkExtentKind {
    Zero,
    /// Stored in a file from `host` on, without metadata.
    Flat {
        host: u64,
    },
    /// A sparse extent file, which begins at `window`.
    Sparse {
        window: u64,
        extent: SparseExtent,
    },
}

/// Extents and files of an opened image.
pub(crate) struct OpenedVmdk {
    pub(crate) parts: Vec<VmdkExtent>,
    pub(crate) files: Arc<Concatenated>,
    /// The range of the CID's digits.
    pub(crate) content_id_at: Range<u64>,
}

impl OpenedVmdk {
    /// Reads the headers of the extents again, after they may have changed.
    pub(crate) fn reload(&mut self, image: &str) -> Result<()> {
        for part in &mut self.parts {
            if let VmdkExtentKind::Sparse { window, extent } = &mut part.kind {
                *extent = SparseExtent::load(&**self.files.at(*window)?, image)?;
            }
        }
        Ok(())
    }
}

struct CachedGrain {
    /// Its first sector in the extent, according to its marker.
    sector: u64,
    bytes: Vec<u8>,
}

pub(crate) struct VmdkTables {
    image: Arc<str>,
    opened: OpenedVmdk,
    disk_bytes: u64,
    pages: Pages,
    grains: SharedCache<CachedGrain>,
    /// The known length of each file.
    lengths: Vec<KnownLength>,
    /// Where the next grain of each extent goes; known once writing has started.
    ends: Vec<u64>,
    /// Whether the second directory of an extent is read, because the first one is lost.
    is_second_read: bool,
}

impl VmdkTables {
    pub(crate) fn new(image: Arc<str>, mut opened: OpenedVmdk) -> Result<Self> {
        let files: Arc<dyn ImageFile> = Arc::clone(&opened.files) as Arc<dyn ImageFile>;
        let mut is_second_read = false;
        for part in &mut opened.parts {
            if let VmdkExtentKind::Sparse { window, extent } = &mut part.kind
                && is_first_directory_invalid(&**opened.files.at(*window)?, extent)?
            {
                extent.directory = extent.second_directory.take().unwrap_or(extent.directory);
                is_second_read = true;
            }
        }
        Ok(Self {
            image,
            disk_bytes: opened.parts.last().map_or(0, |part| part.start + part.length),
            lengths: opened.files.files.iter().map(|_| KnownLength::default()).collect(),
            opened,
            pages: Pages::new(files, CACHE_BYTES),
            grains: SharedCache::new(GRAIN_CACHE_BYTES),
            ends: Vec::new(),
            is_second_read,
        })
    }

    /// The index of the extent that contains `offset`.
    fn part_index(&self, offset: u64) -> usize {
        self.opened
            .parts
            .partition_point(|part| part.start + part.length <= offset)
            .min(self.opened.parts.len().saturating_sub(1))
    }

    fn number(&self, offset: u64) -> Result<u32> {
        Ok(u32::from_le_bytes(self.pages.array(offset)?))
    }

    /// The offset of table `index` of an extent, in its file.
    fn table(&self, window: u64, extent: &SparseExtent, index: u64) -> Result<u64> {
        let sector = self.number(window + extent.directory + index * 4)?;
        Ok(u64::from(sector) * super::SECTOR_BYTES)
    }

    /// The mapping at `at`, inside its extent.
    fn piece(&self, at: u64) -> Result<MappedExtent> {
        let Some(part) = self.opened.parts.get(self.part_index(at)) else {
            return Ok(MappedExtent {
                length: u64::MAX,
                kind: MappedKind::Zero,
            });
        };
        let within = at - part.start;
        // Tables map whole grains, also past the end of the disk.
        let rest = match part.length.checked_sub(within) {
            Some(rest) if rest > 0 && part.start + part.length < self.disk_bytes => rest,
            _ => u64::MAX,
        };
        match &part.kind {
            VmdkExtentKind::Zero => Ok(MappedExtent {
                length: rest,
                kind: MappedKind::Zero,
            }),
            VmdkExtentKind::Flat { host } => Ok(MappedExtent {
                length: rest,
                kind: MappedKind::Data { host: host + within },
            }),
            VmdkExtentKind::Sparse { window, extent } => {
                let run = self.sparse_piece(*window, extent, within)?;
                Ok(MappedExtent {
                    length: run.length.min(rest),
                    ..run
                })
            }
        }
    }

    fn sparse_piece(&self, window: u64, extent: &SparseExtent, within: u64) -> Result<MappedExtent> {
        let coverage = extent.table_coverage();
        let table = self.table(window, extent, within / coverage)?;
        if table == 0 {
            return Ok(MappedExtent {
                length: coverage - within % coverage,
                kind: MappedKind::Absent,
            });
        }
        let file = &**self.opened.files.at(window)?;
        let length = self.length_at(window)?;
        let is_inside = |place: u64| length.contains(file, place);
        if !is_inside(table + extent.table_entries * 4 - 1)? {
            return Err(corrupt(&self.image, "table", table, "past the end of the file"));
        }
        let grain = extent.grain_bytes;
        let index = within % coverage / grain;
        let length = grain - within % grain;
        let kind = match self.number(window + table + index * 4)? {
            0 => MappedKind::Absent,
            ZERO_GRAIN if extent.has_zero_grains => MappedKind::Zero,
            sector => {
                let place = u64::from(sector) * super::SECTOR_BYTES;
                if !is_inside(place)? {
                    return Err(corrupt(&self.image, "grain", place, "past the end of the file"));
                }
                let host = window + place;
                if extent.is_compressed {
                    MappedKind::Compressed(Compressed {
                        offset: host,
                        length_bytes: grain,
                    })
                } else {
                    MappedKind::Data {
                        host: host + within % grain,
                    }
                }
            }
        };
        Ok(MappedExtent { length, kind })
    }

    /// The grain whose marker is at `host`; it must be that of the byte at `within` of the extent.
    fn grain(&self, host: u64, extent: &SparseExtent, within: u64) -> Result<Arc<CachedGrain>> {
        let wrong = |detail: String| corrupt(&self.image, "compressed grain", host % WINDOW_BYTES, detail);
        let start = within / extent.grain_bytes * extent.grain_bytes;
        let expected = start / super::SECTOR_BYTES;
        // Check cached grains, too: two entries may refer to one grain.
        let check = |sector: u64| {
            if sector == expected {
                return Ok(());
            }
            Err(wrong(format!("it is that of sector {sector}, not {expected}")))
        };
        if let Some(grain) = self.grains.get(host) {
            check(grain.sector)?;
            return Ok(grain);
        }
        let mut marker = [0; GRAIN_MARKER_BYTES];
        let has = |length: u64| -> Result<bool> {
            let (file, place) = (&**self.opened.files.at(host)?, host % WINDOW_BYTES);
            Ok(self.length_at(host)?.held(file, place, place + length)? == length)
        };
        if !has(GRAIN_MARKER_BYTES as u64)? {
            return Err(wrong("past the end of the file".to_owned()));
        }
        self.opened.files.read_at(&mut marker, host)?;
        let (sector, stored) = grain_marker(&marker);
        check(sector)?;
        check_stored(stored, extent.grain_bytes).map_err(&wrong)?;
        if !has(GRAIN_MARKER_BYTES as u64 + stored)? {
            return Err(wrong("the end of the file truncates it".to_owned()));
        }
        let mut input = vec![0; to_usize(stored)];
        self.opened
            .files
            .read_at(&mut input, host + GRAIN_MARKER_BYTES as u64)?;
        let mut bytes = vec![0; to_usize(extent.grain_bytes)];
        let least = extent.disk_bytes.saturating_sub(start);
        inflate(&mut libdeflater::Decompressor::new(), &input, &mut bytes, least).map_err(wrong)?;
        let grain = Arc::new(CachedGrain { sector, bytes });
        self.grains.insert(host, Arc::clone(&grain), extent.grain_bytes);
        Ok(grain)
    }

    /// The known length of the file whose window contains `offset`.
    fn length_at(&self, offset: u64) -> Result<&KnownLength> {
        let length = self.lengths.get(to_usize(offset / WINDOW_BYTES));
        length.ok_or_else(|| corrupt(&self.image, "table", offset, "it refers to a file that does not exist"))
    }

    fn not_writable(&self, detail: &str) -> Error {
        Error::NotWritable {
            image: self.image.to_string(),
            detail: detail.to_owned(),
        }
    }

    /// Allocates `length` bytes, a multiple of the sector size, at the end of the file of extent `index`; they read as
    /// zero.
    fn room(&mut self, index: usize, length: u64) -> Result<u64> {
        let end = self.ends.get_mut(index);
        let end = end.expect("each part has an end since writing has started");
        let start = *end;
        let within = start % WINDOW_BYTES;
        if (within + length) / super::SECTOR_BYTES > u64::from(u32::MAX) {
            let detail = "the file has reached the maximum size of its format; convert it to another format";
            return Err(self.not_writable(detail));
        }
        // The end of this file, not of the concatenation.
        let file = self.opened.files.at(start)?;
        clear_room(&**file, within..within + length)?;
        *end = start + length;
        Ok(start)
    }

    fn reserve_grain(&mut self, part_index: usize, within: u64) -> Result<()> {
        let kind = self.opened.parts.get(part_index).map(|part| &part.kind);
        let Some(VmdkExtentKind::Sparse { window, extent }) = kind else {
            return Err(self.not_writable("it has a zero extent, which cannot be written"));
        };
        let (window, extent) = (*window, extent.clone());
        let coverage = extent.table_coverage();
        let (number, index) = (within / coverage, within % coverage / extent.grain_bytes);
        let directories = [Some(extent.directory), extent.second_directory];
        if self.table(window, &extent, number)? == 0 {
            for directory in directories.into_iter().flatten() {
                let bytes = (extent.table_entries * 4).next_multiple_of(super::SECTOR_BYTES);
                let table = self.room(part_index, bytes)?;
                let sector = u32::try_from(table % WINDOW_BYTES / super::SECTOR_BYTES).unwrap_or(u32::MAX);
                self.pages
                    .write(&sector.to_le_bytes(), window + directory + number * 4)?;
            }
            // Align grains so that file systems can share them.
            if let Some(end) = self.ends.get_mut(part_index) {
                *end = end.next_multiple_of(extent.grain_bytes);
            }
        }
        let grain = self.room(part_index, extent.grain_bytes)?;
        let sector = u32::try_from(grain % WINDOW_BYTES / super::SECTOR_BYTES).unwrap_or(u32::MAX);
        for directory in directories.into_iter().flatten() {
            let table = self.number(window + directory + number * 4)?;
            if table != 0 {
                let table = window + u64::from(table) * super::SECTOR_BYTES;
                self.pages.write(&sector.to_le_bytes(), table + index * 4)?;
            }
        }
        Ok(())
    }
}

/// Whether two of the sorted ranges overlap.
pub(super) fn has_overlap(ranges: &[Range<u64>]) -> bool {
    let neighbours = ranges.iter().zip(ranges.iter().skip(1));
    neighbours.into_iter().any(|(first, second)| second.start < first.end)
}

/// The starts of those ranges that extend past the end of a file of `file_bytes`: it would grow over them.
pub(super) fn past_end(ranges: &[Range<u64>], file_bytes: u64) -> impl Iterator<Item = u64> + '_ {
    let is_past = move |range: &&Range<u64>| range.end > file_bytes;
    ranges.iter().filter(is_past).map(|range| range.start)
}

/// A CID of `count` digits, as many as the descriptor has now. It is never all ones, which would mean that there is no
/// parent.
fn content_id_digits(number: u32, count: usize) -> String {
    let digits = format!("{:08x}", number & 0x7fff_ffff | 0x1111_1111);
    digits.chars().take(count).collect()
}

impl AllocationTable for VmdkTables {
    fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    fn unit_bytes(&self) -> u64 {
        let grain = |part: &VmdkExtent| match &part.kind {
            VmdkExtentKind::Sparse { extent, .. } => Some(extent.grain_bytes),
            _ => None,
        };
        self.opened
            .parts
            .iter()
            .filter_map(grain)
            .max()
            .unwrap_or(super::SECTOR_BYTES)
    }

    fn run(&self, offset: u64, length_max: u64) -> Result<MappedExtent> {
        MappedExtent::of_pieces(length_max, |done| self.piece(offset + done))
    }

    fn read_compressed(&self, buffer: &mut [u8], offset: u64, compressed: Compressed) -> Result<()> {
        let part = self.opened.parts.get(self.part_index(offset));
        let Some((start, VmdkExtentKind::Sparse { extent, .. })) = part.map(|part| (part.start, &part.kind)) else {
            return Err(self.not_writable("only sparse extents are compressed"));
        };
        let within = offset - start;
        let grain = self.grain(compressed.offset, extent, within)?;
        let bytes = grain.bytes.get(to_usize(within % extent.grain_bytes)..);
        let bytes = bytes.and_then(|bytes| bytes.get(..buffer.len()));
        buffer.copy_from_slice(bytes.expect("a run of a compressed image ends with its grain"));
        Ok(())
    }

    fn place_of(&self, host: u64) -> (usize, u64) {
        (to_usize(host / WINDOW_BYTES), host % WINDOW_BYTES)
    }

    fn has(&self, _length: &KnownLength, _file: &dyn ImageFile, host: u64) -> Result<bool> {
        let (index, place) = self.place_of(host);
        match (self.lengths.get(index), self.opened.files.files.get(index)) {
            (Some(length), Some(file)) => length.contains(&**file, place),
            _ => Ok(false),
        }
    }

    fn is_cut_off(&self) -> Result<bool> {
        for part in &self.opened.parts {
            let VmdkExtentKind::Sparse { window, extent } = &part.kind else {
                continue;
            };
            let file = &**self.opened.files.at(*window)?;
            let file_bytes = file.length_bytes()?;
            let tables = extent.tables_of(file, extent.directory)?;
            let mut placed = tables.iter().filter(|table| **table != 0);
            if placed.any(|table| table + extent.table_entries * 4 > file_bytes) {
                return Ok(true);
            }
            let mut is_cut_off = false;
            extent.for_each_grain(file, &tables, |number, host| {
                is_cut_off |= end_of_block(host, number, extent.grain_bytes, extent.disk_bytes) > file_bytes;
            })?;
            // The end of a compressed grain is only in its marker; such an extent is not written to.
            if is_cut_off && !extent.is_compressed {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn start(&mut self) -> Result<()> {
        let unit = self.unit_bytes();
        if self.is_second_read {
            return Err(
                self.not_writable("its first directory is lost, and the second one is read; convert it to a new image")
            );
        }
        let mut ends = Vec::new();
        for part in &self.opened.parts {
            if !part.start.is_multiple_of(unit) {
                return Err(self.not_writable("a new grain would overlap another extent"));
            }
            ends.push(match &part.kind {
                VmdkExtentKind::Zero => return Err(self.not_writable("it has a zero extent, which cannot be written")),
                VmdkExtentKind::Flat { .. } => 0,
                VmdkExtentKind::Sparse { extent, .. } if extent.is_compressed => {
                    return Err(self.not_writable("compressed grains cannot be changed; convert it first"));
                }
                VmdkExtentKind::Sparse { extent, .. } if extent.is_open => {
                    return Err(self.not_writable("it was not closed cleanly, or is open; run holdfast image check --repair"));
                }
                VmdkExtentKind::Sparse { window, extent } => {
                    let file = self.opened.files.at(*window)?;
                    let (metadata, file_bytes) = (extent.metadata(&**file)?, file.length_bytes()?);
                    if has_overlap(&metadata) || past_end(&metadata, file_bytes).next().is_some() {
                        return Err(self.not_writable(
                            "two of its tables overlap, or one is past the end of the file; run holdfast image check for details",
                        ));
                    }
                    // Data after the last grain, left by a crash, stays unused. So does the rest of a grain that the file holds
                    // as far as the disk goes.
                    let mut end = file_bytes;
                    let tables = extent.tables_of(&**file, extent.directory)?;
                    extent.for_each_grain(&**file, &tables, |_, host| end = end.max(host + extent.grain_bytes))?;
                    window + end.next_multiple_of(extent.grain_bytes)
                }
            });
        }
        self.ends = ends;
        // By this, children detect that their parent was modified.
        let [a, b, c, d, ..] = ImageId::random()?.0;
        let number = u32::from_be_bytes([a, b, c, d]);
        let place = &self.opened.content_id_at;
        let digits = content_id_digits(number, to_usize(place.end - place.start));
        self.pages.write(digits.as_bytes(), place.start)
    }

    fn reserve(&mut self, range: Range<u64>) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let index = self.part_index(at);
            let Some(part) = self.opened.parts.get(index) else {
                return Err(self.not_writable("its descriptor lists no extent"));
            };
            let within = at - part.start;
            let VmdkExtentKind::Sparse { extent, .. } = &part.kind else {
                at = part.start + part.length;
                continue;
            };
            let end = part.start + (within / extent.grain_bytes + 1) * extent.grain_bytes;
            self.reserve_grain(index, within)?;
            at = end;
        }
        Ok(())
    }

    fn set_zero(&mut self, _range: Range<u64>) -> Result<u64> {
        Ok(0)
    }

    fn changed_bytes(&self) -> u64 {
        self.pages.changed_bytes()
    }

    fn take_changes(&mut self) -> TableChanges {
        // Any order is right: a table reads as zero before its place is stored, and grains are written before their
        // entries.
        self.pages.take_changes(0..0)
    }

    fn changes_stored(&mut self) {
        self.pages.changes_stored();
    }
}
