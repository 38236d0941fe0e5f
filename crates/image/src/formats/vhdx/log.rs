//! Replays the log: changes of the table and the metadata that were pending when a program ended.
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

use holdfast_block::{Error as BlockError, ExtentKind, ExtentList, Record, Result as BlockResult, to_usize};

use super::header::VhdxHeader;
use super::{MIB, is_sealed};
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::{put, rows};
use crate::{ImageId, Result};

const SECTOR: u64 = 4096;
const SECTOR_BYTES: usize = to_usize(SECTOR);
const ENTRY_HEADER_BYTES: usize = 64;
const DESCRIPTOR_BYTES: usize = 32;
/// Logs have 1 MiB; a much larger size is damage.
const LOG_BYTES_MAX: u64 = 256 * MIB;

/// The file with the changes of its log applied.
pub(crate) struct ReplayedFile {
    file: Arc<dyn ImageFile>,
    /// Sectors in the log, by file offset.
    sectors: BTreeMap<u64, Box<[u8]>>,
    /// Ranges that the log zeroes, except where a later sector is; sorted and disjoint.
    zeroes: Vec<Range<u64>>,
    length_bytes: u64,
}

/// A valid log entry.
struct VhdxLogEntry {
    at: u64,
    length_bytes: u64,
    number: u64,
    tail: u64,
    /// Length of the file that was durable (FlushedFileOffset).
    durable_bytes: u64,
    /// Minimum length of the file (LastFileOffset).
    needed_bytes: u64,
    changes: Vec<VhdxLogDescriptor>,
}

/// A change of the file.
enum VhdxLogDescriptor {
    Zero { target: u64, length_bytes: u64 },
    Sector { target: u64, bytes: Box<[u8]> },
}

impl ReplayedFile {
    /// Reads the pending changes of `file`; none if the log is empty.
    pub(super) fn load(file: Arc<dyn ImageFile>, header: &VhdxHeader, image: &str) -> Result<Option<Self>> {
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
                "it is not empty according to the header, but has no valid entry",
            ));
        }
        let mut replayed = Self {
            file,
            sectors: BTreeMap::new(),
            zeroes: Vec::new(),
            length_bytes: file_bytes,
        };
        for entry in entries {
            let at = offset + entry.at;
            replayed
                .apply(entry, file_bytes)
                .map_err(|detail| corrupt(image, "log", at, detail))?;
        }
        Ok(Some(replayed))
    }

    fn apply(&mut self, entry: VhdxLogEntry, file_bytes: u64) -> std::result::Result<(), String> {
        if entry.durable_bytes > file_bytes {
            return Err(format!(
                "the file had {} bytes, but has {file_bytes} now",
                entry.durable_bytes
            ));
        }
        for change in entry.changes {
            let (target, length) = match &change {
                VhdxLogDescriptor::Zero { target, length_bytes } => (*target, *length_bytes),
                VhdxLogDescriptor::Sector { target, .. } => (*target, SECTOR),
            };
            if !target.is_multiple_of(SECTOR) {
                return Err(format!("a change at {target}"));
            }
            let end = target.checked_add(length).filter(|end| i64::try_from(*end).is_ok());
            let Some(end) = end.filter(|_| length.is_multiple_of(SECTOR)) else {
                return Err(format!("a change of {length} bytes at {target}"));
            };
            match change {
                VhdxLogDescriptor::Zero { .. } => {
                    let covered: Vec<u64> = self.sectors.range(target..end).map(|(at, _)| *at).collect();
                    for at in covered {
                        self.sectors.remove(&at);
                    }
                    self.zeroes.push(target..end);
                }
                VhdxLogDescriptor::Sector { bytes, .. } => {
                    self.sectors.insert(target, bytes);
                }
            }
            self.length_bytes = self.length_bytes.max(end);
        }
        self.length_bytes = self.length_bytes.max(entry.needed_bytes.min(i64::MAX as u64));
        Ok(())
    }

    /// Writes the changes into the file, durably, and then marks the log as empty in the header.
    pub(super) fn store(&self, header: &mut VhdxHeader, image: &str) -> Result<()> {
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
        header.store_next(&*self.file, image)
    }
}

/// The entry at `at`, if it is valid and belongs to this log.
fn entry_at(log: &[u8], at: u64, header: &VhdxHeader) -> Option<VhdxLogEntry> {
    let ring = log.len() as u64;
    let head = Record::<ENTRY_HEADER_BYTES>::first_of(log.get(to_usize(at)..)?)?;
    let length_bytes = u64::from(head.le_u32::<8>());
    let is_sane = ImageId::from_guid(*head.field::<32, 16>()) == header.log
        && length_bytes >= SECTOR
        && length_bytes.is_multiple_of(SECTOR)
        && length_bytes <= ring;
    if !is_sane {
        return None;
    }
    let bytes = of_ring(log, at, length_bytes)?;
    if !is_sealed(&bytes, *b"loge") {
        return None;
    }
    let number = head.le_u64::<16>();
    let tail = u64::from(head.le_u32::<12>());
    let changes = changes_of(&bytes, head.le_u32::<24>() as usize, number)?;
    (tail.is_multiple_of(SECTOR) && tail < ring).then_some(VhdxLogEntry {
        at,
        length_bytes,
        number,
        tail,
        durable_bytes: head.le_u64::<48>(),
        needed_bytes: head.le_u64::<56>(),
        changes,
    })
}

/// Bytes of the ring from `at` on, with wrap-around.
fn of_ring(log: &[u8], at: u64, length_bytes: u64) -> Option<Vec<u8>> {
    let rest = log.get(to_usize(at)..)?;
    let first = rest.get(..to_usize(length_bytes)).unwrap_or(rest);
    let second = log.get(..to_usize(length_bytes) - first.len())?;
    Some([first, second].concat())
}

/// The changes of an entry, if all descriptors and data sectors have its sequence number.
fn changes_of(bytes: &[u8], count: usize, number: u64) -> Option<Vec<VhdxLogDescriptor>> {
    let end = count.checked_mul(DESCRIPTOR_BYTES)?.checked_add(ENTRY_HEADER_BYTES)?;
    let descriptors = bytes.get(ENTRY_HEADER_BYTES..end)?;
    let mut sectors = rows::<SECTOR_BYTES>(bytes, end.next_multiple_of(SECTOR_BYTES)).iter();
    let changes = rows::<DESCRIPTOR_BYTES>(descriptors, 0).iter().map(|descriptor| {
        let descriptor = Record::new(descriptor);
        if descriptor.le_u64::<24>() != number {
            return None;
        }
        let target = descriptor.le_u64::<16>();
        match descriptor.field::<0, 4>() {
            b"zero" => Some(VhdxLogDescriptor::Zero {
                target,
                length_bytes: descriptor.le_u64::<8>(),
            }),
            b"desc" => {
                let stored = sectors.next()?;
                let mut bytes: Box<[u8]> = Box::new(*stored);
                put(&mut bytes, 0, descriptor.field::<8, 8>());
                put(&mut bytes, SECTOR_BYTES - 4, descriptor.field::<4, 4>());
                let stored = Record::new(stored);
                let high = u64::from(stored.le_u32::<4>());
                let low = u64::from(stored.le_u32::<{ SECTOR_BYTES - 4 }>());
                let is_whole = stored.field::<0, 4>() == b"data" && (high << 32 | low) == number;
                is_whole.then_some(VhdxLogDescriptor::Sector { target, bytes })
            }
            _ => None,
        }
    });
    changes.collect()
}

/// The entries to replay, in order. A sequence consists of entries with consecutive numbers, back to the tail that the
/// last one names; the sequence with the largest numbers is current.
fn newest_sequence(log: &[u8], header: &VhdxHeader) -> Vec<VhdxLogEntry> {
    let ring = log.len() as u64;
    let mut at = 0;
    let mut best: Vec<VhdxLogEntry> = Vec::new();
    while at < ring {
        let mut run: Vec<VhdxLogEntry> = Vec::new();
        let (mut next, mut used) = (at, 0);
        while let Some(entry) = entry_at(log, next, header) {
            let length = entry.length_bytes;
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
        // No other entry of this sequence begins a better one: it would end at the same entry.
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

impl ImageFile for ReplayedFile {
    fn length_bytes(&self) -> BlockResult<u64> {
        Ok(self.length_bytes)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        self.file.read_at(buffer, offset)?;
        let end = offset.saturating_add(buffer.len() as u64);
        let within = |from: u64, to: u64, start: u64| to_usize(from - start)..to_usize(to - start);
        for range in &self.zeroes {
            let (from, to) = (range.start.max(offset), range.end.min(end));
            if from < to
                && let Some(part) = buffer.get_mut(within(from, to, offset))
            {
                part.fill(0);
            }
        }
        for (at, sector) in self.sectors.range(offset.saturating_sub(SECTOR - 1)..end) {
            let (from, to) = ((*at).max(offset), (at + SECTOR).min(end));
            let source = sector.get(within(from, to, *at));
            if let Some((part, source)) = buffer.get_mut(within(from, to, offset)).zip(source) {
                part.copy_from_slice(source);
            }
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

/// The log is replayed into the file before any write.
fn read_only(offset: u64) -> BlockError {
    BlockError::io(
        "write",
        offset,
        std::io::Error::from(std::io::ErrorKind::ReadOnlyFilesystem),
    )
}
