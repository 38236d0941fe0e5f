//! The log: what was about to be changed in the table and the metadata when a program ended.
//!
//! The log is a ring of entries, each of whole sectors of 4 KiB:
//!
//! ```text
//! offset  bytes
//! 0       4    "loge"
//! 4       4    checksum of the entry
//! 8       4    bytes of the entry
//! 12      4    tail: offset in the log of the oldest entry that still counts
//! 16      8    number; the next entry has the next one
//! 24      4    descriptors
//! 32      16   the log's GUID, as in the header
//! 48      8    bytes of the file that were durable
//! 56      8    bytes that the file has to have
//! 64      32   each descriptor: "desc", last 4 bytes, first 8 bytes, offset, number;
//!              or "zero", 4 unused, bytes, offset, number
//! ...          for each "desc" a sector: "data", high half of the number, 4084 bytes, low half
//! ```

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use holdfast_block::{Error as BlockError, ExtentKind, ExtentList, Result as BlockResult, to_usize};

use super::header::Header;
use super::{MIB, checksum, guid_at, u32_at, u64_at};
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::{ImageId, Result};

const SECTOR: u64 = 4096;
const ENTRY_HEADER_BYTES: usize = 64;
const DESCRIPTOR_BYTES: usize = 32;
/// Logs are of 1 MiB; one that is larger than this is not what it says.
const LOG_BYTES_MAX: u64 = 256 * MIB;

/// A file as it is when its log is replayed.
pub(crate) struct Replayed {
    file: Arc<dyn ImageFile>,
    /// Sectors that the log has, by their offsets.
    sectors: BTreeMap<u64, Box<[u8]>>,
    /// What the log zeroes, where no later sector is; in order, and apart from each other.
    zeroes: Vec<Range<u64>>,
    length_bytes: u64,
}

/// An entry that is whole.
struct Entry {
    at: u64,
    bytes: Vec<u8>,
    number: u64,
    tail: u64,
}

impl Replayed {
    /// What is to be replayed in `file`; nothing where the log is empty.
    pub(super) fn load(file: Arc<dyn ImageFile>, header: &Header, image: &str) -> Result<Option<Self>> {
        if header.log.is_nil() {
            return Ok(None);
        }
        let (offset, length) = (header.log_offset, u64::from(header.log_bytes));
        let file_bytes = file.length_bytes()?;
        let is_inside = offset.checked_add(length).is_some_and(|end| end <= file_bytes);
        if offset < MIB
            || !offset.is_multiple_of(MIB)
            || !length.is_multiple_of(MIB)
            || length > LOG_BYTES_MAX
            || !is_inside
        {
            return Err(corrupt(
                image,
                "log",
                offset,
                format!("{length} bytes of a file of {file_bytes}"),
            ));
        }
        let mut log = vec![0; to_usize(length)];
        file.read_at(&mut log, offset)?;
        let entries = newest_sequence(&log, header);
        if entries.is_empty() {
            return Err(corrupt(
                image,
                "log",
                offset,
                "the header says that it is not empty, and no entry is whole",
            ));
        }
        let mut replayed = Self {
            file,
            sectors: BTreeMap::new(),
            zeroes: Vec::new(),
            length_bytes: file_bytes,
        };
        for entry in &entries {
            replayed
                .apply(entry, file_bytes)
                .map_err(|detail| corrupt(image, "log", offset + entry.at, detail))?;
        }
        Ok(Some(replayed))
    }

    fn apply(&mut self, entry: &Entry, file_bytes: u64) -> std::result::Result<(), String> {
        let durable = u64_at(&entry.bytes, 48);
        if durable > file_bytes {
            return Err(format!("the file had {durable} bytes, and has {file_bytes}"));
        }
        let count = u32_at(&entry.bytes, 24) as usize;
        let mut data = data_offset(count);
        for descriptor in entry.bytes[ENTRY_HEADER_BYTES..]
            .chunks_exact(DESCRIPTOR_BYTES)
            .take(count)
        {
            let target = u64_at(descriptor, 16);
            if !target.is_multiple_of(SECTOR) || target > i64::MAX as u64 - SECTOR {
                return Err(format!("a change at {target}"));
            }
            if descriptor.starts_with(b"zero") {
                let length = u64_at(descriptor, 8);
                let end = target.checked_add(length).filter(|end| i64::try_from(*end).is_ok());
                let Some(end) = end.filter(|_| length.is_multiple_of(SECTOR)) else {
                    return Err(format!("{length} bytes of zeroes at {target}"));
                };
                let covered: Vec<u64> = self.sectors.range(target..end).map(|(at, _)| *at).collect();
                for at in covered {
                    self.sectors.remove(&at);
                }
                self.zeroes.push(target..end);
                self.length_bytes = self.length_bytes.max(end);
            } else {
                let source = &entry.bytes[data..data + to_usize(SECTOR)];
                let mut sector = source.to_vec();
                sector[..8].copy_from_slice(&descriptor[8..16]);
                sector[to_usize(SECTOR) - 4..].copy_from_slice(&descriptor[4..8]);
                self.sectors.insert(target, sector.into_boxed_slice());
                self.length_bytes = self.length_bytes.max(target + SECTOR);
                data += to_usize(SECTOR);
            }
        }
        self.length_bytes = self.length_bytes.max(u64_at(&entry.bytes, 56).min(i64::MAX as u64));
        Ok(())
    }

    /// Writes what the log says into the file, durably, and then into the header that the log is empty.
    pub(super) fn store(&self, header: &mut Header) -> Result<()> {
        for range in &self.zeroes {
            let end = range.end.min(self.file.length_bytes()?);
            if range.start < end {
                self.file.punch(range.start..end)?;
            }
        }
        if self.length_bytes > self.file.length_bytes()? {
            self.file.set_length(self.length_bytes)?;
        }
        for (at, sector) in &self.sectors {
            self.file.write_at(sector, *at)?;
        }
        self.file.sync()?;
        header.log = ImageId::NIL;
        header.store_next(&*self.file)
    }
}

/// Where the data of an entry with so many descriptors begins.
fn data_offset(descriptor_count: usize) -> usize {
    (ENTRY_HEADER_BYTES + descriptor_count * DESCRIPTOR_BYTES).next_multiple_of(to_usize(SECTOR))
}

/// The entry at `at` of the ring, where it is whole and of this log.
fn entry_at(log: &[u8], at: u64, header: &Header) -> Option<Entry> {
    let ring = log.len() as u64;
    let start = to_usize(at);
    let head = log.get(start..start + ENTRY_HEADER_BYTES)?;
    let length = u64::from(u32_at(head, 8));
    let is_sane = head.starts_with(b"loge")
        && guid_at(head, 32) == header.log
        && length >= SECTOR
        && length.is_multiple_of(SECTOR)
        && length <= ring;
    if !is_sane {
        return None;
    }
    let mut bytes = vec![0; to_usize(length)];
    let first = to_usize(length.min(ring - at));
    bytes[..first].copy_from_slice(&log[start..start + first]);
    let rest = to_usize(length) - first;
    bytes[first..].copy_from_slice(&log[..rest]);
    if u32_at(&bytes, 4) != checksum(&bytes) {
        return None;
    }
    let number = u64_at(&bytes, 16);
    let tail = u64::from(u32_at(&bytes, 12));
    let is_whole = has_whole_descriptors(&bytes, number);
    (is_whole && tail.is_multiple_of(SECTOR) && tail < ring).then_some(Entry {
        at,
        bytes,
        number,
        tail,
    })
}

/// Whether all descriptors, and the data behind them, are of the entry with this number.
fn has_whole_descriptors(bytes: &[u8], number: u64) -> bool {
    let count = u32_at(bytes, 24) as usize;
    let Some(end) = count
        .checked_mul(DESCRIPTOR_BYTES)
        .and_then(|length| length.checked_add(ENTRY_HEADER_BYTES))
        .filter(|end| *end <= bytes.len())
    else {
        return false;
    };
    let mut data = data_offset(count);
    bytes[ENTRY_HEADER_BYTES..end]
        .chunks_exact(DESCRIPTOR_BYTES)
        .all(|descriptor| {
            if u64_at(descriptor, 24) != number {
                return false;
            }
            if descriptor.starts_with(b"zero") {
                return true;
            }
            let Some(sector) = bytes.get(data..data + to_usize(SECTOR)) else {
                return false;
            };
            data += to_usize(SECTOR);
            let high = u64::from(u32_at(sector, 4));
            let low = u64::from(u32_at(sector, to_usize(SECTOR) - 4));
            descriptor.starts_with(b"desc") && sector.starts_with(b"data") && (high << 32 | low) == number
        })
}

/// The entries that are to be replayed, in order: of all runs of entries with following numbers that reach back to what the last of
/// them calls the tail, the one with the largest number.
fn newest_sequence(log: &[u8], header: &Header) -> Vec<Entry> {
    let ring = log.len() as u64;
    let mut at = 0;
    let mut best: Vec<Entry> = Vec::new();
    while at < ring {
        let mut run: Vec<Entry> = Vec::new();
        let (mut next, mut used) = (at, 0);
        while let Some(entry) = entry_at(log, next, header) {
            let length = entry.bytes.len() as u64;
            if run
                .last()
                .is_some_and(|last| entry.number != last.number.wrapping_add(1))
                || used + length > ring
            {
                break;
            }
            used += length;
            next = (next + length) % ring;
            run.push(entry);
        }
        // No entry of the run begins a better one: they would end where it ends.
        at += used.max(SECTOR);
        let Some(last) = run.last() else { continue };
        let Some(first) = run.iter().position(|entry| entry.at == last.tail) else {
            continue;
        };
        if best.last().is_none_or(|known| known.number < last.number) {
            best = run.split_off(first);
        }
    }
    best
}

impl ImageFile for Replayed {
    fn length_bytes(&self) -> BlockResult<u64> {
        Ok(self.length_bytes)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        self.file.read_at(buffer, offset)?;
        let end = offset + buffer.len() as u64;
        for range in &self.zeroes {
            let (from, to) = (range.start.max(offset), range.end.min(end));
            if from < to {
                buffer[to_usize(from - offset)..to_usize(to - offset)].fill(0);
            }
        }
        for (at, sector) in self.sectors.range(offset.saturating_sub(SECTOR - 1)..end) {
            let (from, to) = ((*at).max(offset), (at + SECTOR).min(end));
            let source = &sector[to_usize(from - at)..to_usize(to - at)];
            buffer[to_usize(from - offset)..to_usize(to - offset)].copy_from_slice(source);
        }
        Ok(())
    }

    fn write_at(&self, _data: &[u8], offset: u64) -> BlockResult<()> {
        Err(read_only(offset))
    }

    fn set_length(&self, length_bytes: u64) -> BlockResult<()> {
        Err(read_only(length_bytes))
    }

    fn punch(&self, range: Range<u64>) -> BlockResult<()> {
        Err(read_only(range.start))
    }

    fn sync(&self) -> BlockResult<()> {
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        list.push(range.end.saturating_sub(range.start), ExtentKind::Data);
        Ok(list)
    }

    fn allocated_bytes(&self) -> BlockResult<Option<u64>> {
        self.file.allocated_bytes()
    }
}

/// Who writes replays the log into the file first.
fn read_only(offset: u64) -> BlockError {
    BlockError::io(
        "write",
        offset,
        std::io::Error::from(std::io::ErrorKind::ReadOnlyFilesystem),
    )
}
