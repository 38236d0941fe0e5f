//! A device that computes its digest while it is read.
//!
//! The copying job reads blocks roughly in order, on several threads, and skips ranges that the device reports as zero.
//! Each block is hashed by the thread that reads it; the hashes are combined in order. At the end everything must have
//! been read or reported as zero, and the digest must be the expected one: then the copied content is the signed
//! content.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use holdfast_block::{BlockDevice, Error as DeviceError, ExtentKind, ExtentList, Result as DeviceResult, to_usize};

use super::digest::{BLOCK_BYTES, Digest, DiskDigester, block_count, hash_block};
use super::statement::Piece;
use crate::job::Result;
use crate::job::error::TemplateError;

/// A device that is read once and checked meanwhile.
pub(super) struct CheckedDevice<'a> {
    inner: &'a dyn BlockDevice,
    state: Mutex<DigestState>,
}

struct DigestState {
    digester: DiskDigester,
    /// Hashes of blocks that were read before earlier blocks.
    read: BTreeMap<u64, Digest>,
    /// Blocks that were reported as zero: start and end of each range.
    zero: BTreeMap<u64, u64>,
}

impl<'a> CheckedDevice<'a> {
    pub(super) fn new(inner: &'a dyn BlockDevice) -> Self {
        Self {
            inner,
            state: Mutex::new(DigestState {
                digester: DiskDigester::new(),
                read: BTreeMap::new(),
                zero: BTreeMap::new(),
            }),
        }
    }

    /// Checks after the copy that its content was the expected one.
    pub(super) fn check_end(&self, expected: &Piece) -> Result<()> {
        let size_bytes = self.inner.size_bytes();
        let mut state = self.lock();
        state.fold();
        // A part that was not read cannot have been copied.
        let is_whole = state.digester.count() == block_count(size_bytes) && size_bytes == expected.size_bytes;
        let digester = std::mem::take(&mut state.digester);
        if is_whole && digester.finish(size_bytes) == expected.digest {
            return Ok(());
        }
        Err(TemplateError::OtherContent {
            name: expected.name.to_string(),
        }
        .into())
    }

    fn lock(&self) -> MutexGuard<'_, DigestState> {
        // A panic ends the copy; the digest is not used then.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds blocks that were read, starting with block `first`.
    fn take(&self, bytes: &[u8], first: u64) -> DeviceResult<()> {
        let hashes: Vec<Digest> = bytes.chunks(to_usize(BLOCK_BYTES)).map(hash_block).collect();
        let mut state = self.lock();
        for (block, hash) in (first..).zip(hashes) {
            let is_known = block < state.digester.count() || state.said_zero(block) || state.read.contains_key(&block);
            if !is_known {
                state.read.insert(block, hash);
            } else if hash != state.digester.zero() {
                // If a block is read twice, it is unknown which content was copied. Zeroes may be read in a range that
                // was reported as zero: copies round to clusters.
                return Err(DeviceError::io(
                    "read again",
                    block * BLOCK_BYTES,
                    std::io::Error::from(std::io::ErrorKind::InvalidData),
                ));
            }
        }
        state.fold();
        Ok(())
    }
}

impl DigestState {
    fn said_zero(&self, block: u64) -> bool {
        let before = self.zero.range(..=block).next_back();
        before.is_some_and(|(_, end)| block < *end)
    }

    /// Combines all hashes without gaps.
    fn fold(&mut self) {
        loop {
            let at = self.digester.count();
            if let Some(hash) = self.read.remove(&at) {
                self.digester.push(hash);
                continue;
            }
            let Some((&start, &end)) = self.zero.range(..=at).next_back().filter(|(_, end)| at < **end) else {
                return;
            };
            // A block that was read before it was reported as zero counts as read.
            let end_now = self.read.range(at..end).next().map_or(end, |(block, _)| *block);
            self.digester.push_zeroes(end_now - at);
            // Kept: a block of it may still be read.
            debug_assert!(start <= at, "a range begins at or before the block");
        }
    }
}

impl BlockDevice for CheckedDevice<'_> {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> DeviceResult<()> {
        let length = buffer.len() as u64;
        self.check_bounds(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        let end = offset + length;
        let first = offset / BLOCK_BYTES;
        let whole_end = end.next_multiple_of(BLOCK_BYTES).min(self.size_bytes());
        if offset == first * BLOCK_BYTES && end == whole_end {
            self.inner.read_at(buffer, offset)?;
            return self.take(buffer, first);
        }
        let start = first * BLOCK_BYTES;
        let mut whole = vec![0; to_usize(whole_end - start)];
        self.inner.read_at(&mut whole, start)?;
        let before = to_usize(offset - start);
        buffer.copy_from_slice(&whole[before..before + buffer.len()]);
        self.take(&whole, first)
    }

    /// Rounds data to whole blocks.
    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> DeviceResult<ExtentList> {
        let size_bytes = self.size_bytes();
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        let mut list = ExtentList::new(range.start, extent_count_max);
        if range.end <= range.start {
            return Ok(list);
        }
        let start = range.start / BLOCK_BYTES * BLOCK_BYTES;
        let end = range.end.next_multiple_of(BLOCK_BYTES).min(size_bytes);
        let asked = self.inner.extents(start..end, extent_count_max.max(16))?;
        let mut state = self.lock();
        // Each step handles a run of whole blocks of one kind.
        let mut at = start;
        for extent in asked.as_slice() {
            let kind = match extent.kind {
                ExtentKind::Data => ExtentKind::Data,
                ExtentKind::Zero | ExtentKind::Absent => ExtentKind::Zero,
            };
            let border = match kind {
                ExtentKind::Data => extent.end().next_multiple_of(BLOCK_BYTES).min(size_bytes),
                // A block may start with zeroes and contain data behind them.
                _ if extent.end() == size_bytes => size_bytes,
                _ => extent.end() / BLOCK_BYTES * BLOCK_BYTES,
            };
            if border <= at {
                continue;
            }
            let from = at.max(range.start);
            let to = border.min(range.end);
            if to > from && !list.push(to - from, kind) {
                return Ok(list);
            }
            if kind == ExtentKind::Zero {
                state.say_zero(at / BLOCK_BYTES, block_count(border));
            }
            at = border;
        }
        if at == start {
            // A block of which only the start is known has to be read.
            list.push((start + BLOCK_BYTES).min(range.end) - range.start, ExtentKind::Data);
        }
        Ok(list)
    }

    fn block_size_bytes(&self) -> u32 {
        self.inner.block_size_bytes()
    }
}

impl DigestState {
    fn say_zero(&mut self, start: u64, end: u64) {
        let (mut start, mut end) = (start, end);
        if let Some((&before, &before_end)) = self.zero.range(..=start).next_back()
            && before_end >= start
        {
            (start, end) = (before, end.max(before_end));
        }
        while let Some((&after, &after_end)) = self.zero.range(start..=end).next() {
            self.zero.remove(&after);
            end = end.max(after_end);
        }
        self.zero.insert(start, end);
    }
}

#[cfg(test)]
mod tests {
    use holdfast_block::{BlockDevice, BlockDeviceMut as _, ExtentKind, MemoryDevice, SeededRandom, to_usize};

    use super::{BLOCK_BYTES, CheckedDevice};
    use crate::job::DiskName;
    use crate::template::digest::{Digest, digest_bytes};
    use crate::template::statement::{Piece, PieceKind};

    /// A disk of `blocks` blocks and a half; data where `data` says so.
    fn disk(blocks: u64, data: &[std::ops::Range<u64>]) -> (MemoryDevice, Vec<u8>) {
        let size_bytes = blocks * BLOCK_BYTES + BLOCK_BYTES / 2;
        let device = MemoryDevice::new(size_bytes);
        let mut bytes = vec![0; to_usize(size_bytes)];
        let mut random = SeededRandom::new(3);
        for range in data {
            let range = to_usize(range.start)..to_usize(range.end);
            random.fill(&mut bytes[range.clone()]);
            device.write_at(&bytes[range.clone()], range.start as u64).unwrap();
        }
        (device, bytes)
    }

    fn piece(size_bytes: u64, digest: Digest) -> Piece {
        Piece {
            kind: PieceKind::Disk,
            size_bytes,
            digest,
            name: DiskName::new("vda").unwrap(),
        }
    }

    /// Reads like a copy: only data extents, in steps.
    fn read_all(device: &dyn BlockDevice, step: u64) -> Vec<u8> {
        let mut bytes = vec![0; to_usize(device.size_bytes())];
        let mut at = 0;
        while at < device.size_bytes() {
            let list = device.extents(at..device.size_bytes(), 2).unwrap();
            for extent in list.as_slice().iter().filter(|extent| extent.kind == ExtentKind::Data) {
                let mut offset = extent.offset;
                while offset < extent.end() {
                    let end = (offset / step * step + step).min(extent.end());
                    let place = to_usize(offset)..to_usize(end);
                    device.read_at(&mut bytes[place], offset).unwrap();
                    offset = end;
                }
            }
            at = list.end();
        }
        bytes
    }

    const SOME: &[std::ops::Range<u64>] = &[100..200, 65_000..66_000, 400_000..700_000, 900_000..900_001];

    #[test]
    fn a_copy_of_the_right_content_is_found_right() {
        for data in [&[][..], SOME, &[0..1, 1_310_000..1_343_488]] {
            for step in [BLOCK_BYTES, 4 * BLOCK_BYTES, 1 << 30] {
                let (inner, bytes) = disk(20, data);
                let device = CheckedDevice::new(&inner);
                assert_eq!(read_all(&device, step), bytes);
                device
                    .check_end(&piece(inner.size_bytes(), digest_bytes(&bytes)))
                    .unwrap();
            }
        }
    }

    #[test]
    fn another_content_is_found_out() {
        let (inner, mut bytes) = disk(20, SOME);
        for place in [0, 150, 100_000, 1_343_487] {
            let device = CheckedDevice::new(&inner);
            read_all(&device, BLOCK_BYTES);
            bytes[place] ^= 1;
            let expected = piece(inner.size_bytes(), digest_bytes(&bytes));
            bytes[place] ^= 1;
            assert!(device.check_end(&expected).is_err(), "{place}");
        }
        let device = CheckedDevice::new(&inner);
        read_all(&device, BLOCK_BYTES);
        assert!(
            device
                .check_end(&piece(inner.size_bytes() + 1, digest_bytes(&bytes)))
                .is_err()
        );
    }

    #[test]
    fn a_part_that_was_not_read_is_not_trusted() {
        let (inner, bytes) = disk(20, SOME);
        let device = CheckedDevice::new(&inner);
        let mut buffer = vec![0; to_usize(4 * BLOCK_BYTES)];
        device.read_at(&mut buffer, 0).unwrap();
        assert!(
            device
                .check_end(&piece(inner.size_bytes(), digest_bytes(&bytes)))
                .is_err()
        );
    }

    /// An attacker with the repository could return the right bytes for hashing, and others for copying.
    #[test]
    fn what_is_read_again_is_an_error_unless_it_is_zero() {
        let (inner, _) = disk(20, SOME);
        let device = CheckedDevice::new(&inner);
        let mut buffer = vec![0; to_usize(BLOCK_BYTES)];
        device.read_at(&mut buffer, 0).unwrap();
        device.read_at(&mut buffer, 0).unwrap_err();
        read_all(&CheckedDevice::new(&inner), BLOCK_BYTES);
        device.read_at(&mut buffer, 3 * BLOCK_BYTES).unwrap();
        device.read_at(&mut buffer, 3 * BLOCK_BYTES).unwrap();
    }

    #[test]
    fn blocks_may_come_in_any_order_and_in_parts() {
        let (inner, bytes) = disk(20, SOME);
        let device = CheckedDevice::new(&inner);
        let mut buffer = vec![0; to_usize(BLOCK_BYTES)];
        for block in [3, 1, 0, 2] {
            device.read_at(&mut buffer, block * BLOCK_BYTES).unwrap();
        }
        let rest = inner.size_bytes() - 4 * BLOCK_BYTES;
        let mut buffer = vec![0; to_usize(rest - 10)];
        device.read_at(&mut buffer, 4 * BLOCK_BYTES + 5).unwrap();
        assert_eq!(buffer, bytes[to_usize(4 * BLOCK_BYTES + 5)..bytes.len() - 5]);
        device
            .check_end(&piece(inner.size_bytes(), digest_bytes(&bytes)))
            .unwrap();
    }
}
