//! Records every change of a device in a dirty bitmap.
//!
//! A range is marked *before* the write, so that the bitmap never misses a change after a crash, and again *after* it:
//! a copy that takes the bitmap while a write is in progress may copy the old bytes, and must find the range in the
//! next bitmap.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::device::range_length;
use crate::{BlockDevice, BlockDeviceMut, DirtyBitmap, Error, ExtentList, Result};

/// A device whose writes, zeroings and trims are marked in a [`DirtyBitmap`].
#[derive(Debug)]
pub struct TrackedDevice<D> {
    device: D,
    dirty: Mutex<DirtyBitmap>,
}

impl<D: BlockDeviceMut> TrackedDevice<D> {
    /// Tracks changes of `device` from now on, at `granularity_bytes`.
    pub fn new(device: D, granularity_bytes: u64) -> Result<Self> {
        let dirty = DirtyBitmap::new(device.size_bytes(), granularity_bytes)?;
        Ok(Self {
            device,
            dirty: Mutex::new(dirty),
        })
    }

    /// Tracks changes of `device` in the existing bitmap `dirty`, which must be for a device of the same size.
    pub fn with_bitmap(device: D, dirty: DirtyBitmap) -> Result<Self> {
        if dirty.size_bytes() != device.size_bytes() {
            return Err(Error::Unsupported {
                what: "tracking",
                detail: format!(
                    "the bitmap is for a device of {} bytes, this one has {}",
                    dirty.size_bytes(),
                    device.size_bytes()
                ),
            });
        }
        Ok(Self {
            device,
            dirty: Mutex::new(dirty),
        })
    }

    /// A copy of the bitmap.
    pub fn dirty(&self) -> DirtyBitmap {
        self.lock().clone()
    }

    /// Takes the bitmap of all changes up to now; later changes are recorded in a new bitmap.
    pub fn take_dirty(&self) -> DirtyBitmap {
        let mut dirty = self.lock();
        let fresh = DirtyBitmap::new(dirty.size_bytes(), dirty.granularity_bytes())
            .expect("these parameters made a bitmap before");
        std::mem::replace(&mut dirty, fresh)
    }

    /// Takes the next marked range, like [`DirtyBitmap::take_next`].
    pub fn take_next_dirty(&self, offset: u64, length_max: u64) -> Option<Range<u64>> {
        self.lock().take_next(offset, length_max)
    }

    /// Marks a range again that was taken but not copied.
    pub fn mark(&self, range: Range<u64>) {
        self.lock().set(range);
    }

    fn lock(&self) -> MutexGuard<'_, DirtyBitmap> {
        self.dirty.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Executes `change`, which may change bytes in `range` even if it fails.
    fn tracked(&self, range: Range<u64>, change: impl FnOnce() -> Result<()>) -> Result<()> {
        self.check_bounds(range.start, range_length(&range))?;
        self.mark(range.clone());
        let result = change();
        self.mark(range);
        result
    }
}

impl<D: BlockDevice> BlockDevice for TrackedDevice<D> {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.device.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.device.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        self.device.block_size_bytes()
    }
}

impl<D: BlockDeviceMut> BlockDeviceMut for TrackedDevice<D> {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        // Saturation keeps a request that overflows out of bounds.
        let range = offset..offset.saturating_add(data.len() as u64);
        self.check_bounds(offset, data.len() as u64)?;
        self.tracked(range, || self.device.write_at(data, offset))
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.tracked(range.clone(), || self.device.write_zeroes(range))
    }

    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.tracked(range.clone(), || self.device.trim(range))
    }

    fn flush(&self) -> Result<()> {
        self.device.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use super::TrackedDevice;
    use crate::testing::conformance::{Conformance, test_seed};
    use crate::{
        BlockDevice, BlockDeviceMut, DirtyBitmap, Fault, FaultRule, FaultyDevice, MemoryDevice, Request, RequestKind,
        SeededRandom, TracedDevice, to_usize,
    };

    #[test]
    fn conforms() {
        Conformance::new().check_mutable(|size| TrackedDevice::new(MemoryDevice::new(size), 4096).unwrap());
    }

    /// All differences to the last copy are marked, so copying the marked ranges makes both equal.
    #[test]
    fn copying_the_dirty_ranges_is_enough() {
        let mut random = SeededRandom::new(test_seed());
        let device = TrackedDevice::new(MemoryDevice::new(1_000_001), 1024).unwrap();
        let copy = MemoryDevice::new(1_000_001);
        for _ in 0..50 {
            for _ in 0..random.below(10) {
                let range = random.range_within(1_000_001, 5000);
                match random.below(3) {
                    0 => device.write_zeroes(range).unwrap(),
                    1 => device.trim(range).unwrap(),
                    _ => {
                        let data = random.bytes(to_usize(range.end - range.start));
                        device.write_at(&data, range.start).unwrap();
                    }
                }
            }
            let dirty = device.take_dirty();
            assert!(dirty.dirty_bytes() < 100_000);
            for range in &dirty {
                let mut bytes = vec![0; to_usize(range.end - range.start)];
                device.read_at(&mut bytes, range.start).unwrap();
                copy.write_at(&bytes, range.start).unwrap();
            }
            let mut bytes = vec![0; 1_000_001];
            device.read_at(&mut bytes, 0).unwrap();
            assert!(bytes == copy.to_bytes());
        }
    }

    /// A copy that takes the bitmap while a write is in progress reads the old bytes; the range must be marked again.
    #[test]
    fn a_write_under_way_while_the_marks_are_taken_is_in_both_bitmaps() {
        type Sink = Box<dyn Fn(Request) + Send + Sync>;
        static DEVICE: OnceLock<TrackedDevice<TracedDevice<MemoryDevice, Sink>>> = OnceLock::new();
        static TAKEN: OnceLock<DirtyBitmap> = OnceLock::new();
        let take_in_between: Sink = Box::new(|request| {
            if request.kind == RequestKind::Write {
                TAKEN.set(DEVICE.get().unwrap().take_dirty()).unwrap();
            }
        });
        let device = DEVICE.get_or_init(|| {
            TrackedDevice::new(TracedDevice::new(MemoryDevice::new(4096), take_in_between), 512).unwrap()
        });
        device.write_at(&[1; 10], 1000).unwrap();
        assert!(TAKEN.get().unwrap().is_dirty(1000..1010));
        assert!(device.dirty().is_dirty(1000..1010));
    }

    #[test]
    fn a_failed_write_is_marked_and_a_refused_one_is_not() {
        let faulty = FaultyDevice::new(MemoryDevice::new(4096));
        faulty.add(FaultRule::every(RequestKind::Write, Fault::Io));
        let device = TrackedDevice::new(faulty, 512).unwrap();
        device.write_at(&[1; 10], 4090).unwrap_err();
        device.write_at(&[1; 10], u64::MAX - 3).unwrap_err();
        device.trim(4096..5000).unwrap_err();
        assert!(device.dirty().is_clean());
        device.write_at(&[1; 10], 600).unwrap_err();
        assert!(device.dirty().is_dirty(600..610));
    }

    #[test]
    fn a_bitmap_of_another_size_is_refused() {
        let bitmap = DirtyBitmap::new(4095, 512).unwrap();
        assert!(TrackedDevice::with_bitmap(MemoryDevice::new(4096), bitmap).is_err());
    }
}
