//! Disks of an archive as devices that are read once, in order.
//!
//! Readers announce a range before they read it, and read on several threads. Announced pieces stay in memory until
//! they are read. A reader that announces too far ahead of its reads would fill the memory, so that is refused. If the
//! disks of an archive are interleaved, pieces of other disks than the one that is read are buffered in an unnamed
//! file.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Cursor, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use holdfast_archive::{ArchiveReader, Error as ArchiveError, Piece};
use holdfast_block::{BlockDevice, Error as DeviceError, ExtentKind, ExtentList, Result as DeviceResult, to_usize};

use crate::job::Result;
use crate::job::error::ExchangeError;

/// The maximum number of bytes that are buffered in memory.
const HELD_BYTES_MAX: u64 = 1 << 30;
/// The maximum number of bytes of other disks in memory before more of them are written to files.
const OTHERS_BYTES_MAX: u64 = 64 << 20;

/// An archive whose disks are being read.
pub(crate) struct ArchiveDisks {
    state: Mutex<ArchiveState>,
}

struct ArchiveState {
    reader: Box<dyn ArchiveReader>,
    disks: Vec<DiskState>,
    held_bytes: u64,
    is_over: bool,
    has_failed: bool,
    /// An error that was not returned yet.
    deferred_error: Option<DeviceError>,
}

#[derive(Default)]
struct DiskState {
    /// Whether it is read; other disks are skipped.
    is_wanted: bool,
    pieces: VecDeque<HeldPiece>,
    /// The end of the range whose content is known: buffered, read before, or zero.
    known_end: u64,
    /// Ranges of data that were read and dropped: in order, not touching.
    gone: Vec<Range<u64>>,
    /// Ranges of data in the file, at the same offsets as on the disk.
    spooled: Vec<Range<u64>>,
    spool: Option<File>,
}

/// Bytes that are buffered until they are read.
struct HeldPiece {
    offset: u64,
    bytes: Vec<u8>,
    /// How many of them are unread.
    left: usize,
}

impl HeldPiece {
    fn end(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }
}

impl ArchiveDisks {
    /// Reads the disks of an archive with the numbers in `wanted`.
    pub(crate) fn new(reader: Box<dyn ArchiveReader>, wanted: &[usize]) -> Self {
        let disk = |number| DiskState {
            is_wanted: wanted.contains(&number),
            ..DiskState::default()
        };
        Self {
            state: Mutex::new(ArchiveState {
                disks: (0..reader.disks().len()).map(disk).collect(),
                reader,
                held_bytes: 0,
                is_over: false,
                has_failed: false,
                deferred_error: None,
            }),
        }
    }

    /// A disk, by its number in the archive.
    pub(crate) fn device(self: &Arc<Self>, number: usize) -> ArchiveDevice {
        ArchiveDevice {
            disks: Arc::clone(self),
            number,
        }
    }

    /// Reads the rest of the archive, and checks that all wanted data was read.
    pub(crate) fn finish(&self) -> Result<()> {
        let mut state = self.lock();
        while !state.is_over {
            state.pull(usize::MAX)?;
        }
        let unread = state
            .disks
            .iter()
            .position(|disk| !disk.pieces.is_empty() || !disk.spooled.is_empty());
        match unread {
            None => Ok(()),
            Some(number) => Err(ExchangeError::NotRead {
                disk: state.reader.disks()[number].key.clone(),
            }
            .into()),
        }
    }

    /// Contradictions between the archive's documents and its disks; call this when everything was read.
    pub(crate) fn corrections(&self) -> Vec<String> {
        self.lock().reader.corrections()
    }

    /// The parts of the archive without a checksum; call this when everything was read.
    pub(crate) fn unverified(&self) -> Vec<String> {
        self.lock().reader.unverified()
    }

    fn lock(&self) -> MutexGuard<'_, ArchiveState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ArchiveState {
    /// Reads the next piece, while the disk `reading` is read.
    fn pull(&mut self, reading: usize) -> DeviceResult<()> {
        let failed = |offset, error: Box<dyn std::error::Error + Send + Sync>| {
            Err(DeviceError::io("read", offset, std::io::Error::other(error)))
        };
        if let Some(error) = self.deferred_error.take() {
            return Err(error);
        }
        if self.has_failed {
            return failed(0, "the archive could not be read before this".into());
        }
        self.has_failed = true;
        match self.reader.next() {
            Err(error) => return Err(DeviceError::layer(error)),
            Ok(None) => {
                self.is_over = true;
                for (disk, of_archive) in self.disks.iter_mut().zip(self.reader.disks()) {
                    disk.known_end = of_archive.size_bytes;
                }
            }
            Ok(Some(Piece::End { disk })) => self.disks[disk].known_end = self.reader.disks()[disk].size_bytes,
            Ok(Some(Piece::Data { disk, offset, bytes })) => {
                let is_other = disk != reading;
                let is_zero = bytes.iter().all(|byte| *byte == 0);
                let disk = &mut self.disks[disk];
                if offset < disk.known_end {
                    return failed(offset, "the archive goes back on a disk".into());
                }
                disk.known_end = offset + bytes.len() as u64;
                if is_zero {
                    // A range without a piece is zero.
                } else if disk.is_wanted && is_other && self.held_bytes > OTHERS_BYTES_MAX {
                    disk.put_aside(offset, bytes)?;
                } else if disk.is_wanted {
                    self.held_bytes += bytes.len() as u64;
                    disk.pieces.push_back(HeldPiece {
                        offset,
                        bytes: bytes.to_vec(),
                        left: bytes.len(),
                    });
                }
                if self.held_bytes > HELD_BYTES_MAX {
                    return failed(
                        offset,
                        "the disks of the archive come in another order than they are read".into(),
                    );
                }
            }
        }
        self.has_failed = false;
        Ok(())
    }

    /// The size of a disk; that of its image, if a document may be wrong.
    fn size_bytes(&mut self, number: usize) -> u64 {
        while !self.reader.is_size_certain(number) && !self.is_over && !self.has_failed {
            if let Err(error) = self.pull(number) {
                self.deferred_error = Some(error);
            }
        }
        self.reader.disks()[number].size_bytes
    }

    fn learn(&mut self, number: usize, end: u64) -> DeviceResult<()> {
        while self.disks[number].known_end < end && !self.is_over {
            self.pull(number)?;
        }
        Ok(())
    }
}

impl DiskState {
    /// Writes a piece to the file.
    fn put_aside(&mut self, offset: u64, bytes: &[u8]) -> DeviceResult<()> {
        let folder = std::env::temp_dir();
        let failed = |source| DeviceError::layer(ArchiveError::Spool { folder, source });
        let written = match &self.spool {
            Some(file) => file.write_all_at(bytes, offset),
            None => tempfile::tempfile_in(std::env::temp_dir())
                .and_then(|file| self.spool.insert(file).write_all_at(bytes, offset)),
        };
        written.map_err(failed)?;
        add(&mut self.spooled, offset..offset + bytes.len() as u64);
        Ok(())
    }

    /// Reads the buffered bytes from `offset` on from the file.
    fn take_from_file(&mut self, buffer: &mut [u8], offset: u64) -> DeviceResult<()> {
        let end = offset + buffer.len() as u64;
        let Some(file) = &self.spool else { return Ok(()) };
        for range in &self.spooled {
            let (from, to) = (range.start.max(offset), range.end.min(end));
            if from < to {
                file.read_exact_at(&mut buffer[to_usize(from - offset)..to_usize(to - offset)], from)
                    .map_err(|source| DeviceError::io("read", from, source))?;
                add(&mut self.gone, from..to);
            }
        }
        remove(&mut self.spooled, &(offset..end));
        Ok(())
    }

    /// Copies buffered bytes from `offset` on to the zeroed `buffer`; returns how many of them were in memory.
    fn take(&mut self, buffer: &mut [u8], offset: u64) -> u64 {
        let end = offset + buffer.len() as u64;
        let mut taken = 0;
        for piece in &mut self.pieces {
            let (from, to) = (piece.offset.max(offset), piece.end().min(end));
            if from >= to {
                continue;
            }
            let source = to_usize(from - piece.offset)..to_usize(to - piece.offset);
            buffer[to_usize(from - offset)..to_usize(to - offset)].copy_from_slice(&piece.bytes[source]);
            piece.left -= to_usize(to - from);
            taken += to - from;
            add(&mut self.gone, from..to);
        }
        self.pieces.retain(|piece| piece.left > 0);
        taken
    }
}

/// Adds a range to ordered ranges that do not touch.
fn add(ranges: &mut Vec<Range<u64>>, new: Range<u64>) {
    let start = ranges.partition_point(|range| range.end < new.start);
    let end = ranges.partition_point(|range| range.start <= new.end);
    let touched = &ranges[start..end];
    let first = touched.first().map_or(new.start, |range| range.start.min(new.start));
    let last = touched.last().map_or(new.end, |range| range.end.max(new.end));
    ranges.splice(start..end, std::iter::once(first..last));
}

/// Removes a range from ordered ranges.
fn remove(ranges: &mut Vec<Range<u64>>, cut: &Range<u64>) {
    let parts = |range: Range<u64>| {
        let before = range.start..range.end.min(cut.start);
        let behind = range.start.max(cut.end)..range.end;
        [before, behind].into_iter().filter(|part| part.start < part.end)
    };
    *ranges = std::mem::take(ranges).into_iter().flat_map(parts).collect();
}

/// A disk of an archive.
pub(crate) struct ArchiveDevice {
    disks: Arc<ArchiveDisks>,
    number: usize,
}

impl ArchiveDevice {
    /// Its size as far as it is known without reading more of the archive.
    pub(crate) fn known_size_bytes(&self) -> u64 {
        self.disks.lock().reader.disks()[self.number].size_bytes
    }
}

impl BlockDevice for ArchiveDevice {
    fn size_bytes(&self) -> u64 {
        self.disks.lock().size_bytes(self.number)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> DeviceResult<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        let end = offset + buffer.len() as u64;
        buffer.fill(0);
        let mut state = self.disks.lock();
        state.learn(self.number, end)?;
        let disk = &mut state.disks[self.number];
        let at = disk.gone.partition_point(|range| range.end <= offset);
        if disk.gone.get(at).is_some_and(|range| range.start < end) {
            let gone = std::io::Error::other("an archive is read once, and in order");
            return Err(DeviceError::io("read", offset, gone));
        }
        disk.take_from_file(buffer, offset)?;
        let taken = disk.take(buffer, offset);
        state.held_bytes -= taken;
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> DeviceResult<ExtentList> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        let mut list = ExtentList::new(range.start, extent_count_max);
        if range.is_empty() {
            return Ok(list);
        }
        let mut state = self.disks.lock();
        state.learn(self.number, range.start + 1)?;
        let disk = &state.disks[self.number];
        let end = disk.known_end.min(range.end);
        // Data that was read before is still data: a second read fails instead of returning zeroes.
        let before = disk.gone.partition_point(|gone| gone.end <= range.start);
        let mut data: Vec<Range<u64>> = disk.gone[before..].to_vec();
        let waiting = disk.spooled.iter().filter(|spooled| spooled.end > range.start);
        waiting.for_each(|spooled| add(&mut data, spooled.clone()));
        disk.pieces
            .iter()
            .for_each(|piece| add(&mut data, piece.offset..piece.end()));
        for held in data.iter().filter(|held| held.end > range.start) {
            let (from, to) = (held.start.clamp(list.end(), end), held.end.min(end));
            if !list.push(from - list.end(), ExtentKind::Zero) || !list.push(to.saturating_sub(from), ExtentKind::Data)
            {
                return Ok(list);
            }
        }
        list.push(end - list.end(), ExtentKind::Zero);
        Ok(list)
    }
}

/// A stream that is stored after the disks. Its first byte is returned only when the archive was read to its end, so
/// that no snapshot is committed of an archive that is damaged behind its disks.
pub(crate) struct StreamAfterDisks<'a> {
    disks: &'a ArchiveDisks,
    bytes: Cursor<Vec<u8>>,
    is_checked: bool,
}

impl<'a> StreamAfterDisks<'a> {
    pub(crate) fn new(disks: &'a ArchiveDisks, bytes: Cursor<Vec<u8>>) -> Self {
        Self {
            disks,
            bytes,
            is_checked: false,
        }
    }
}

impl Read for StreamAfterDisks<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if !self.is_checked {
            self.disks.finish().map_err(std::io::Error::other)?;
            self.is_checked = true;
        }
        self.bytes.read(buffer)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use holdfast_archive::{ArchiveDisk, ArchiveReader, DiskContent, Document, Piece};
    use holdfast_block::{BlockDevice as _, ExtentKind};

    use super::{ArchiveDisks, add};

    /// An archive with these pieces: disk, offset, bytes.
    struct Pieces {
        disks: Vec<ArchiveDisk>,
        rest: std::vec::IntoIter<(usize, u64, Vec<u8>)>,
        last: Vec<u8>,
    }

    impl ArchiveReader for Pieces {
        fn documents(&self) -> &[Document] {
            &[]
        }

        fn disks(&self) -> &[ArchiveDisk] {
            &self.disks
        }

        fn next(&mut self) -> holdfast_archive::Result<Option<Piece<'_>>> {
            let Some((disk, offset, bytes)) = self.rest.next() else {
                return Ok(None);
            };
            self.last = bytes;
            Ok(Some(Piece::Data {
                disk,
                offset,
                bytes: &self.last,
            }))
        }

        fn is_in_order(&self) -> bool {
            true
        }
    }

    fn disks(sizes: &[u64], pieces: Vec<(usize, u64, Vec<u8>)>, wanted: &[usize]) -> Arc<ArchiveDisks> {
        let disk = |size_bytes: &u64| ArchiveDisk {
            key: format!("disk of {size_bytes}"),
            size_bytes: *size_bytes,
            content: DiskContent::Stored,
        };
        let reader = Pieces {
            disks: sizes.iter().map(disk).collect(),
            rest: pieces.into_iter(),
            last: Vec::new(),
        };
        Arc::new(ArchiveDisks::new(Box::new(reader), wanted))
    }

    #[test]
    fn disks_are_read_as_they_come_and_what_is_not_wanted_is_passed_over() {
        let pieces = vec![(0, 10, vec![1; 20]), (1, 0, vec![9; 50]), (2, 5, vec![3; 5])];
        let disks = disks(&[100, 50, 10], pieces, &[0, 2]);
        let first = disks.device(0);
        let list = first.extents(0..100, 10).unwrap();
        let found: Vec<_> = list
            .as_slice()
            .iter()
            .map(|extent| (extent.offset, extent.length, extent.kind))
            .collect();
        assert_eq!(found, [(0, 10, ExtentKind::Zero), (10, 20, ExtentKind::Data)]);
        let mut bytes = [7; 100];
        first.read_at(&mut bytes, 0).unwrap();
        assert_eq!((bytes[9], bytes[10], bytes[29], bytes[30]), (0, 1, 1, 0));
        let error = first.read_at(&mut bytes[..1], 15).unwrap_err();
        assert!(format!("{error:?}").contains("read once"), "{error:?}");
        let last = disks.device(2);
        last.read_at(&mut bytes[..10], 0).unwrap();
        assert_eq!(bytes[..10], [0, 0, 0, 0, 0, 3, 3, 3, 3, 3]);
        disks.finish().unwrap();
    }

    #[test]
    fn what_was_not_read_is_reported() {
        let disks = disks(&[100], vec![(0, 10, vec![1; 20])], &[0]);
        disks.device(0).read_at(&mut [0; 15], 0).unwrap();
        assert!(disks.finish().unwrap_err().to_string().contains("disk of 100"));
    }

    #[test]
    fn threads_read_behind_each_other() {
        let pieces = (0..200).map(|number| (0, number * 1000, vec![u8::try_from(number).unwrap() + 1; 1000]));
        let disks = disks(&[200_000], pieces.collect(), &[0]);
        let device = disks.device(0);
        std::thread::scope(|scope| {
            for number in (0..40_u64).rev() {
                let device = &device;
                scope.spawn(move || {
                    let mut bytes = vec![0; 5000];
                    device.read_at(&mut bytes, number * 5000).unwrap();
                    for (at, chunk) in bytes.chunks(1000).enumerate() {
                        assert_eq!(chunk, vec![u8::try_from(1 + number * 5 + at as u64).unwrap(); 1000]);
                    }
                });
            }
        });
        disks.finish().unwrap();
    }

    /// Many bytes of another disk are buffered in a file.
    #[test]
    fn disks_in_another_order_are_read_all_the_same() {
        let size = 100_u64 << 20;
        let piece = |disk: usize, number: u64| (disk, number << 20, vec![u8::try_from(number).unwrap() + 1; 1 << 20]);
        let pieces = (0..100).filter(|number| number % 3 != 0).map(|number| piece(1, number));
        let pieces: Vec<_> = pieces.chain((0..100).map(|number| piece(0, number))).collect();
        let disks = disks(&[size, size], pieces, &[0, 1]);
        for number in 0..2 {
            let device = disks.device(number);
            let mut at = 0;
            let mut data_bytes = 0;
            while at < size {
                let list = device.extents(at..size, 8).unwrap();
                let data = list.as_slice().iter().filter(|extent| extent.kind == ExtentKind::Data);
                data_bytes += data.map(|extent| extent.length).sum::<u64>();
                let mut bytes = vec![9; usize::try_from(list.end() - at).unwrap()];
                device.read_at(&mut bytes, at).unwrap();
                for (place, chunk) in bytes.chunks(4096).enumerate() {
                    let block = (at + place as u64 * 4096) >> 20;
                    let is_hole = number == 1 && block.is_multiple_of(3);
                    let expected = if is_hole { 0 } else { u8::try_from(block).unwrap() + 1 };
                    assert!(
                        chunk.iter().all(|byte| *byte == expected),
                        "disk {number}, block {block}"
                    );
                }
                at = list.end();
            }
            assert_eq!(data_bytes, if number == 0 { size } else { 66 << 20 });
        }
        assert!(disks.lock().disks[1].spool.is_some(), "this test is about the file");
        disks.finish().unwrap();
    }

    #[test]
    fn ranges_are_taken_out() {
        let mut ranges = vec![0..10, 20..30, 40..50];
        super::remove(&mut ranges, &(5..25));
        assert_eq!(ranges, [0..5, 25..30, 40..50]);
        super::remove(&mut ranges, &(42..44));
        super::remove(&mut ranges, &(0..5));
        assert_eq!(ranges, [25..30, 40..42, 44..50]);
    }

    #[test]
    fn ranges_that_touch_become_one() {
        let mut ranges = vec![0..5, 10..15, 20..25];
        add(&mut ranges, 5..10);
        assert_eq!(ranges, [0..15, 20..25]);
        add(&mut ranges, 30..31);
        add(&mut ranges, 18..32);
        assert_eq!(ranges, [0..15, 18..32]);
    }
}
