//! Extents, dirty bitmaps and other metadata contexts of an export.

use std::ops::Range;

use holdfast_block::{BlockDevice, DirtyBitmap, ExtentKind, ExtentList, Request, RequestKind};

use super::call::{Call, CommandWithData};
use super::command::ClientCommand;
use super::read_ahead::{BorrowedStatuses, Visit, WINDOW_MAX};
use super::status::Descriptor;
use super::violation::Violation;
use super::{ALLOCATION, ALLOCATION_DEPTH, DIRTY_BITMAP, Error, ExportContent, NbdDevice, Result};
use crate::nbd::wire::{AllocationFlags, HeaderStyle};

/// Longest query: nearly as much as 32 bits can hold, in whole clusters of every format.
const QUERY_BYTES_MAX: u64 = (4 << 30) - (64 << 20);
/// Longest query with extended headers. Servers still have to scan the whole range.
const EXTENDED_QUERY_BYTES_MAX: u64 = 64 << 30;
/// How far to query beyond a range, per query in flight, for a caller that reads sequentially.
const AHEAD_BYTES: u64 = 256 << 20;
/// QEMU's flag of a dirty extent.
const DIRTY: u64 = 1;

/// The status of a range in a metadata context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusExtent {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes, never 0.
    pub length: u64,
    /// The flags. The metadata context defines their meaning.
    pub flags: u64,
}

impl NbdDevice {
    /// The extents of `range` in the metadata context `context`, from the start of the range, at most
    /// `extent_count_max` (at least 1) of them.
    ///
    /// The result covers at least one byte of a non-empty range, and may end before the range does. Adjacent extents
    /// have different flags.
    pub fn block_status(
        &self,
        context: &str,
        range: Range<u64>,
        extent_count_max: usize,
    ) -> holdfast_block::Result<Vec<StatusExtent>> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        let mut extents: Vec<StatusExtent> = Vec::new();
        let count_max = extent_count_max.max(1);
        self.walk(context, range, &mut |offset, descriptor| {
            let is_full = extents.len() == count_max;
            match extents.last_mut() {
                Some(last) if last.flags == descriptor.flags => last.length += descriptor.length,
                _ if is_full => return Visit::NotTaken,
                _ => extents.push(StatusExtent {
                    offset,
                    length: descriptor.length,
                    flags: descriptor.flags,
                }),
            }
            if extents.len() == count_max {
                Visit::Stop
            } else {
                Visit::Continue
            }
        })?;
        Ok(extents)
    }

    /// QEMU's dirty bitmap `name`. Its context `qemu:dirty-bitmap:NAME` must have been requested when the connection
    /// was made.
    ///
    /// The granularity is the coarsest one, up to 64 KiB, that represents the server's reply exactly, as long as the
    /// bitmap takes no more than a few dozen MiB. Otherwise it is coarser, and ranges are rounded outwards.
    pub fn dirty_bitmap(&self, name: &str) -> holdfast_block::Result<DirtyBitmap> {
        let context = format!("{DIRTY_BITMAP}{name}");
        self.collect(&context, &|flags| flags & DIRTY != 0)
    }

    /// Collects the ranges whose flags satisfy `is_wanted`.
    fn collect(&self, context: &str, is_wanted: &dyn Fn(u64) -> bool) -> holdfast_block::Result<DirtyBitmap> {
        let mut builder = BitmapBuilder::new(self.size_bytes());
        let mut at = 0;
        while at < self.size_bytes() {
            at = self.walk(context, at..self.size_bytes(), &mut |offset, descriptor| {
                if is_wanted(descriptor.flags) {
                    builder.add(offset..offset + descriptor.length);
                }
                Visit::Continue
            })?;
        }
        Ok(builder.into_bitmap())
    }

    /// The ranges that are allocated in one of the uppermost `layer_count` layers of QEMU's image, by its context
    /// [`ALLOCATION_DEPTH`], which must have been requested when the connection was made.
    pub fn allocated_above(&self, layer_count: u64) -> holdfast_block::Result<DirtyBitmap> {
        // The uppermost layer is 1; 0 means that no layer holds it.
        self.collect(ALLOCATION_DEPTH, &|depth| (1..=layer_count).contains(&depth))
    }

    /// Appends the allocation of `range`, which is not empty, to a list.
    pub(super) fn fill(&self, list: &mut ExtentList, range: Range<u64>) -> Result<()> {
        let zero = u64::from(AllocationFlags::ZERO.0);
        self.walk(ALLOCATION, range, &mut |_, descriptor| {
            // A hole that is not zero has unknown contents and must be read.
            let kind = if descriptor.flags & zero == zero {
                ExtentKind::Zero
            } else {
                ExtentKind::Data
            };
            if !list.push(descriptor.length, kind) {
                Visit::NotTaken
            } else if list.is_full() {
                Visit::Stop
            } else {
                Visit::Continue
            }
        })?;
        Ok(())
    }

    /// Visits the extents of `range` in a context, in order, until the visitor stops; returns where it stopped.
    fn walk(&self, context: &str, range: Range<u64>, take: &mut dyn FnMut(u64, Descriptor) -> Visit) -> Result<u64> {
        let known = self.read_aheads.iter().find(|(name, _)| name == context);
        let Some((_, read_ahead)) = known else {
            return Err(Error::ContextUnknown {
                context: context.to_owned(),
            });
        };
        if range.is_empty() {
            return Ok(range.start);
        }
        let content = self.content();
        let mut borrowed = match content {
            ExportContent::Fixed => read_ahead.borrow(&range),
            ExportContent::Changing => BorrowedStatuses::unknown(),
        };
        let mut at = range.start;
        let mut was_asked = false;
        loop {
            let (stopped, visit) = borrowed.statuses.visit_known(at, range.end, take);
            was_asked &= stopped == at;
            at = stopped;
            if at >= range.end || visit != Visit::Continue {
                break;
            }
            if was_asked {
                let what = "extents shorter than the minimum block size";
                let violation = Violation::Extents { offset: at, what };
                let server = self.server();
                return Err(Error::Violation { server, violation });
            }
            self.ask(context, &mut borrowed, at, range.end)?;
            if content == ExportContent::Fixed {
                borrowed.window = (borrowed.window * 2).min(WINDOW_MAX);
            }
            was_asked = true;
        }
        if content == ExportContent::Fixed {
            read_ahead.put_back(borrowed, at);
        }
        Ok(at)
    }

    /// Queries the server about the unknown parts from `at` on.
    fn ask(&self, context: &str, borrowed: &mut BorrowedStatuses, at: u64, end: u64) -> Result<()> {
        let connection = self.least_busy();
        let length_max = match connection.style() {
            HeaderStyle::Simple | HeaderStyle::Structured => QUERY_BYTES_MAX,
            HeaderStyle::Extended => EXTENDED_QUERY_BYTES_MAX,
        };
        let end = match borrowed.window {
            1 => end,
            window => end.max((at + AHEAD_BYTES * window as u64).min(self.size_bytes())),
        };
        let gaps = borrowed.statuses.gaps(at, end, length_max, borrowed.window);
        let sendings = gaps.iter().map(|gap| -> CommandWithData<'static> {
            let blocks = self.blocks_around(gap);
            let request = Request::new(RequestKind::Extents, blocks.start, blocks.end - blocks.start);
            (ClientCommand::of(request), &[])
        });
        let id = connection
            .contexts()
            .iter()
            .find(|granted| granted.name == context)
            .map(|granted| granted.id);
        let answers = Call::new(&connection, &mut [], 0)?.run(sendings, WINDOW_MAX)?;
        for (request, statuses) in answers {
            let wanted = statuses.into_iter().find(|status| Some(status.context_id) == id);
            if let Some(status) = wanted {
                borrowed.statuses.add(request.offset, status.descriptors);
            }
        }
        Ok(())
    }
}

/// Collects dirty ranges until the granularity of the bitmap is known.
struct BitmapBuilder {
    size_bytes: u64,
    ranges: Vec<Range<u64>>,
    /// All boundaries except the device's end, combined by "or": the lowest set bit is the granularity.
    borders: u64,
    bitmap: Option<DirtyBitmap>,
}

impl BitmapBuilder {
    /// QEMU's default.
    const GRANULARITY_BYTES_MAX: u64 = 64 << 10;
    const GRANULARITY_BYTES_MIN: u64 = 512;
    /// 32 MiB of bits.
    const BIT_COUNT_MAX: u64 = 1 << 28;
    /// 16 MiB of ranges.
    const RANGE_COUNT_MAX: usize = 1 << 20;

    fn new(size_bytes: u64) -> Self {
        Self {
            size_bytes,
            ranges: Vec::new(),
            borders: 0,
            bitmap: None,
        }
    }

    fn add(&mut self, range: Range<u64>) {
        if let Some(bitmap) = &mut self.bitmap {
            // A boundary that is finer than all earlier ones is rounded outwards.
            bitmap.set(range);
            return;
        }
        self.borders |= range.start;
        if range.end != self.size_bytes {
            self.borders |= range.end;
        }
        match self.ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.ranges.push(range),
        }
        if self.ranges.len() == Self::RANGE_COUNT_MAX {
            self.bitmap = Some(self.bitmap_of_ranges());
            self.ranges = Vec::new();
        }
    }

    fn bitmap_of_ranges(&self) -> DirtyBitmap {
        let exact = if self.borders == 0 {
            u64::MAX
        } else {
            1 << self.borders.trailing_zeros()
        };
        let coarse = self.size_bytes.div_ceil(Self::BIT_COUNT_MAX).next_power_of_two();
        let granularity = exact
            .clamp(Self::GRANULARITY_BYTES_MIN, Self::GRANULARITY_BYTES_MAX)
            .max(coarse);
        let mut bitmap = DirtyBitmap::new(self.size_bytes, granularity)
            .expect("the granularity is a power of two, fine and coarse enough");
        self.ranges.iter().for_each(|range| bitmap.set(range.clone()));
        bitmap
    }

    fn into_bitmap(mut self) -> DirtyBitmap {
        self.bitmap.take().unwrap_or_else(|| self.bitmap_of_ranges())
    }
}

#[cfg(test)]
mod tests {
    use super::BitmapBuilder;

    fn granularity_of(size_bytes: u64, ranges: &[(u64, u64)]) -> u64 {
        let mut builder = BitmapBuilder::new(size_bytes);
        for (start, end) in ranges {
            builder.add(*start..*end);
        }
        let bitmap = builder.into_bitmap();
        assert!(ranges.iter().all(|(start, end)| bitmap.is_dirty(*start..*end)));
        bitmap.granularity_bytes()
    }

    #[test]
    fn the_granularity_is_the_coarsest_that_is_exact_within_bounds() {
        const MIB: u64 = 1 << 20;
        assert_eq!(granularity_of(MIB, &[]), 65_536);
        assert_eq!(granularity_of(MIB + 17, &[(0, MIB + 17)]), 65_536);
        assert_eq!(granularity_of(MIB, &[(MIB / 2, MIB)]), 65_536);
        assert_eq!(granularity_of(MIB, &[(0, 32_768), (65_536, 131_072)]), 32_768);
        assert_eq!(granularity_of(MIB, &[(1, 2)]), 512);
        // The bitmap has at most 2^28 bits.
        assert_eq!(granularity_of(1 << 50, &[(4096, 8192)]), 4 << 20);
    }

    #[test]
    fn more_ranges_than_are_kept_are_marked_all_the_same() {
        let count = BitmapBuilder::RANGE_COUNT_MAX as u64;
        let mut builder = BitmapBuilder::new(count * 8192 * 2);
        for number in 0..count + 10 {
            builder.add(number * 8192..number * 8192 + 4096);
        }
        assert!(builder.ranges.is_empty(), "they are in the bitmap by now");
        // A finer boundary than all before is rounded outwards.
        builder.add(count * 16_000..count * 16_000 + 1);
        let bitmap = builder.into_bitmap();
        assert_eq!(
            (bitmap.granularity_bytes(), bitmap.dirty_bytes()),
            (4096, (count + 11) * 4096)
        );
    }
}
