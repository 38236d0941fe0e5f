//! A frozen disk that QEMU must not serve: QEMU copies it part by part into a scratch file, which is read.
//!
//! A part is copied when it is first requested. The two newest parts are kept, since several threads read near one
//! another; the space of older ones is freed. So the file never takes more than two parts, however large the disk is.

use std::collections::{BTreeSet, VecDeque};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, PoisonError};

use holdfast_block::{
    BlockDevice, BlockDeviceMut as _, Clock, DirtyBitmap, Error as DeviceError, ExtentKind, ExtentList, Result,
    to_usize,
};
use holdfast_host::qemu::PartCopier;
use holdfast_host::qmp::{Monitor, MonitorError, query_with_retries};
use holdfast_serve::nbd::client::{NbdDeviceMut, NbdStopper};
use rustix::fs::{FallocateFlags, SeekFrom};

use crate::job::{Interrupt, Interrupted};

/// The unit in which QEMU copies.
const UNIT_BYTES: u64 = 64 << 10;
/// The maximum size of a part, if there is enough space.
const PART_BYTES_MAX: u64 = 256 << 20;
const PART_BYTES_MIN: u64 = 1 << 20;
/// The parts of all disks together take at most this fraction of the available space.
const ROOM_SHARE: u64 = 8;
/// How often copying a part is tried while the connection to QEMU is lost.
const ATTEMPT_COUNT: u32 = 5;
/// The number of parts that are kept.
const PART_COUNT: usize = 2;

/// The connection to QEMU.
#[derive(Clone, Copy)]
pub(super) struct CopyContext<'a> {
    pub(super) monitor: &'a dyn Monitor,
    pub(super) clock: &'a dyn Clock,
    pub(super) interrupt: &'a Interrupt,
}

/// The bytes of a part that are copied when one of them is requested.
#[derive(Debug)]
enum PartRange {
    /// Only the requested bytes.
    Asked,
    /// All bytes.
    All,
    /// Bytes that may have changed.
    Only(DirtyBitmap),
}

/// A frozen disk that is copied in parts.
pub(super) struct CopiedDisk<'a> {
    /// The node at which the ranges to copy are marked.
    pub(super) marks: NbdDeviceMut,
    copier: PartCopier,
    spool: File,
    part_bytes: u64,
    wanted: PartRange,
    context: CopyContext<'a>,
    parts: Mutex<CopiedParts>,
}

#[derive(Default)]
struct CopiedParts {
    /// Numbers of the parts that are in the file, the newest last.
    kept: VecDeque<u64>,
    /// Parts that are entirely zero.
    zero: BTreeSet<u64>,
}

/// The size of a part if the scratch files of `disk_count` disks may take `room_bytes`.
pub(super) fn part_bytes(room_bytes: u64, disk_count: usize) -> u64 {
    let share = room_bytes / ROOM_SHARE / (PART_COUNT * disk_count.max(1)) as u64;
    share.clamp(PART_BYTES_MIN, PART_BYTES_MAX) / PART_BYTES_MIN * PART_BYTES_MIN
}

impl<'a> CopiedDisk<'a> {
    pub(super) fn new(
        marks: NbdDeviceMut,
        copier: PartCopier,
        spool: File,
        part_bytes: u64,
        context: CopyContext<'a>,
    ) -> Self {
        Self {
            marks,
            copier,
            spool,
            part_bytes,
            wanted: PartRange::Asked,
            context,
            parts: Mutex::default(),
        }
    }

    /// Prepares for reading in order: the whole disk, or only what may have changed.
    pub(super) fn read_in_order(&mut self, changed: Option<&DirtyBitmap>) {
        self.wanted = changed.map_or(PartRange::All, |changed| PartRange::Only(changed.clone()));
    }

    pub(super) fn stopper(&self) -> NbdStopper {
        self.marks.as_read().stopper()
    }

    /// The ranges of part `number` that are copied together.
    fn ranges_of(&self, number: u64) -> Vec<Range<u64>> {
        let part = self.part(number);
        match &self.wanted {
            PartRange::Asked => Vec::new(),
            PartRange::All => vec![part],
            PartRange::Only(changed) => changed_in(changed, &part),
        }
    }

    fn part(&self, number: u64) -> Range<u64> {
        let start = number * self.part_bytes;
        start..(start + self.part_bytes).min(self.size_bytes())
    }

    /// Has QEMU copy these ranges into the file.
    ///
    /// If a proxy to QEMU is restarted meanwhile, a reply may be lost: then the job is ended, and everything is copied
    /// again.
    fn copy(&self, ranges: &[Range<u64>]) -> Result<()> {
        let CopyContext {
            monitor,
            clock,
            interrupt,
        } = self.context;
        for attempt in 1.. {
            for range in ranges {
                self.marks.write_zeroes(range.clone())?;
            }
            let copied = self.copier.copy(monitor, clock, &|| !interrupt.is_requested());
            if interrupt.is_requested() {
                return Err(DeviceError::layer(Interrupted));
            }
            match copied {
                Ok(()) => break,
                Err(MonitorError::Transport { .. }) if attempt < ATTEMPT_COUNT => {
                    let abandon = |monitor: &dyn Monitor| self.copier.abandon(monitor, clock);
                    query_with_retries(monitor, clock, &abandon).map_err(DeviceError::layer)?;
                }
                Err(error) => return Err(DeviceError::layer(error)),
            }
        }
        Ok(())
    }

    /// Makes sure that `piece` of part `number` is in the file; returns whether it is zero without having been copied.
    fn provide(&self, parts: &mut CopiedParts, number: u64, piece: &Range<u64>) -> Result<bool> {
        if parts.zero.contains(&number) {
            return Ok(true);
        }
        let ranges = self.ranges_of(number);
        if !ranges
            .iter()
            .any(|range| range.start <= piece.start && piece.end <= range.end)
        {
            // This read is out of order.
            let size_bytes = self.size_bytes();
            let end = piece.end.next_multiple_of(UNIT_BYTES).min(size_bytes);
            self.copy(std::slice::from_ref(&(piece.start / UNIT_BYTES * UNIT_BYTES..end)))?;
            return Ok(false);
        }
        if parts.kept.contains(&number) {
            return Ok(false);
        }
        if parts.kept.len() == PART_COUNT
            && let Some(oldest) = parts.kept.pop_front()
        {
            self.drop_part(oldest);
        }
        self.copy(&ranges)?;
        let part = self.part(number);
        if matches!(self.wanted, PartRange::All) && self.data_from(part.start)?.is_none_or(|data| data >= part.end) {
            self.drop_part(number);
            parts.zero.insert(number);
            return Ok(true);
        }
        parts.kept.push_back(number);
        Ok(false)
    }

    /// Frees the space of a part. If the file system cannot do that, the scratch limit ends the backup in time.
    fn drop_part(&self, number: u64) {
        let part = self.part(number);
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.spool, how, part.start, part.end - part.start).ok();
    }

    /// The offset of the next data in the file.
    fn data_from(&self, offset: u64) -> Result<Option<u64>> {
        match rustix::fs::seek(&self.spool, SeekFrom::Data(offset)) {
            Ok(data) => Ok(Some(data)),
            Err(rustix::io::Errno::NXIO) => Ok(None),
            // If the file system does not report holes, everything counts as data.
            Err(rustix::io::Errno::INVAL) => Ok(Some(offset)),
            Err(error) => Err(failed("look for data in the scratch file", offset, error.into())),
        }
    }

    /// The offset of the next hole in the file.
    fn hole_from(&self, offset: u64) -> u64 {
        rustix::fs::seek(&self.spool, SeekFrom::Hole(offset)).unwrap_or(u64::MAX)
    }
}

impl BlockDevice for CopiedDisk<'_> {
    fn size_bytes(&self) -> u64 {
        self.marks.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        // One part at a time: the content of the file must not change until it has been read.
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut at, mut rest) = (offset, buffer);
        while !rest.is_empty() {
            let number = at / self.part_bytes;
            let length = (self.part(number).end - at).min(rest.len() as u64);
            let (piece, behind) = rest.split_at_mut(to_usize(length));
            if self.provide(&mut parts, number, &(at..at + length))? {
                piece.fill(0);
            } else {
                let read = self.spool.read_exact_at(piece, at);
                read.map_err(|error| failed("read the scratch file", at, error))?;
            }
            (at, rest) = (at + length, behind);
        }
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        let mut list = ExtentList::new(range.start, extent_count_max);
        let PartRange::All = self.wanted else {
            list.push(range.end.saturating_sub(range.start), ExtentKind::Data);
            return Ok(list);
        };
        if range.is_empty() {
            return Ok(list);
        }
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let number = range.start / self.part_bytes;
        let end = self.part(number).end.min(range.end);
        if self.provide(&mut parts, number, &(range.start..end))? {
            list.push(end - range.start, ExtentKind::Zero);
            return Ok(list);
        }
        let mut at = range.start;
        while at < end {
            let data = self.data_from(at)?.unwrap_or(end).min(end);
            let hole = self.hole_from(data).clamp(data, end);
            if !list.push(data - at, ExtentKind::Zero) || !list.push(hole - data, ExtentKind::Data) {
                break;
            }
            at = hole;
        }
        Ok(list)
    }
}

/// The ranges of `part` that `changed` marks.
fn changed_in(changed: &DirtyBitmap, part: &Range<u64>) -> Vec<Range<u64>> {
    let mut ranges = Vec::new();
    let mut at = part.start;
    while let Some(dirty) = changed.next_dirty(at).filter(|dirty| dirty.start < part.end) {
        let end = dirty.end.min(part.end);
        ranges.push(dirty.start..end);
        at = end;
    }
    ranges
}

fn failed(action: &'static str, offset: u64, source: std::io::Error) -> DeviceError {
    DeviceError::Io { action, offset, source }
}

#[cfg(test)]
mod tests {
    use holdfast_block::DirtyBitmap;

    use super::{PART_BYTES_MAX, PART_BYTES_MIN, changed_in, part_bytes};

    #[test]
    fn parts_fit_the_room_that_there_is() {
        assert_eq!(part_bytes(1 << 40, 2), PART_BYTES_MAX);
        assert_eq!(part_bytes(320 << 20, 2), 10 << 20);
        assert_eq!(part_bytes(0, 0), PART_BYTES_MIN);
    }

    #[test]
    fn of_a_part_only_what_changed_is_copied() {
        let mut changed = DirtyBitmap::new(10 << 20, 64 << 10).unwrap();
        changed.set(1 << 20..(1 << 20) + 1);
        changed.set(3 << 20..5 << 20);
        let ranges = changed_in(&changed, &(0..4 << 20));
        assert_eq!(ranges, [1 << 20..(1 << 20) + (64 << 10), 3 << 20..4 << 20]);
        assert!(changed_in(&changed, &(5 << 20..9 << 20)).is_empty());
    }
}
