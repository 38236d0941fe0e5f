//! Records which parts of a device change.
//!
//! A range is marked *before* the write, so that the marks never miss a change after a crash, and again *after* it: a
//! copy that takes the marks while a write is in progress may copy the old bytes, and must find the range in the next
//! marks.
//!
//! The marks form generations. [`TrackedDevice::take`] ends the current one and starts the next, so a copy cannot clear
//! a mark after it has read the bytes: it takes a generation first, and then reads what that generation marks. Threads
//! mark a generation at the same time, without waiting for each other.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use crate::bitmap::SharedMarks;
use crate::device::range_length;
use crate::{BlockDevice, BlockDeviceMut, DirtyBitmap, Error, ExtentList, Result};

/// A device whose writes, zeroings and trims are marked.
#[derive(Debug)]
pub struct TrackedDevice<D> {
    device: D,
    /// The current generation. The lock is shared for marking, and exclusive only to exchange the generation.
    marks: RwLock<SharedMarks>,
    /// Number of changes that began, and of those that ended, successfully or not.
    begun: AtomicU64,
    ended: AtomicU64,
}

/// A moment at which a [`TrackedDevice`] had no marks and no change was in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CleanEpoch(u64);

impl<D: BlockDeviceMut> TrackedDevice<D> {
    /// Tracks changes of `device` from now on. A mark covers `granularity_bytes`, with the limits of
    /// [`DirtyBitmap::new`].
    pub fn new(device: D, granularity_bytes: u64) -> Result<Self> {
        let marks = SharedMarks::new(device.size_bytes(), granularity_bytes)?;
        Ok(Self {
            device,
            marks: RwLock::new(marks),
            begun: AtomicU64::new(0),
            ended: AtomicU64::new(0),
        })
    }

    /// Tracks changes of `device` in addition to those in `dirty`, which must be for a device of the same size.
    pub fn with_bitmap(device: D, dirty: &DirtyBitmap) -> Result<Self> {
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
        let tracked = Self::new(device, dirty.granularity_bytes())?;
        for range in dirty {
            tracked.mark(range);
        }
        Ok(tracked)
    }

    /// A copy of the marks of the current generation.
    pub fn peek(&self) -> DirtyBitmap {
        self.marks.read().unwrap_or_else(PoisonError::into_inner).to_bitmap()
    }

    /// Takes the current generation: the marks of all changes since the last call. Later changes, and the ends of
    /// changes in progress, are marked in the next one.
    ///
    /// The caller reads the marked ranges after this call, and marks again what it did not copy.
    pub fn take(&self) -> DirtyBitmap {
        let fresh = self.marks.read().unwrap_or_else(PoisonError::into_inner).fresh();
        let taken = {
            let mut marks = self.marks.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *marks, fresh)
        };
        taken.into_bitmap()
    }

    /// Marks a range again that was taken but not copied.
    pub fn mark(&self, range: Range<u64>) {
        self.begun.fetch_add(1, Ordering::SeqCst);
        self.mark_once(range);
        self.ended.fetch_add(1, Ordering::SeqCst);
    }

    /// The present moment, if the current generation has no marks and no change is in progress.
    ///
    /// A copy that has copied all generations that it took is then complete, as long as
    /// [`is_still_clean`](Self::is_still_clean).
    pub fn clean_epoch(&self) -> Option<CleanEpoch> {
        let ended = self.ended.load(Ordering::SeqCst);
        let is_clean = self.marks.read().unwrap_or_else(PoisonError::into_inner).is_clean();
        // Equal numbers: when the first was read, no change was in progress, and none began until the second was.
        let begun = self.begun.load(Ordering::SeqCst);
        (is_clean && begun == ended).then_some(CleanEpoch(begun))
    }

    /// Whether no change has begun since `epoch`.
    pub fn is_still_clean(&self, epoch: CleanEpoch) -> bool {
        self.begun.load(Ordering::SeqCst) == epoch.0
    }

    fn mark_once(&self, range: Range<u64>) {
        self.marks.read().unwrap_or_else(PoisonError::into_inner).mark(range);
    }

    /// Executes `change`, which may change bytes in `range` even if it fails.
    fn tracked(&self, range: Range<u64>, change: impl FnOnce() -> Result<()>) -> Result<()> {
        self.check_bounds(range.start, range_length(&range))?;
        self.begun.fetch_add(1, Ordering::SeqCst);
        self.mark_once(range.clone());
        let result = change();
        self.mark_once(range);
        self.ended.fetch_add(1, Ordering::SeqCst);
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
    use std::sync::atomic::{AtomicBool, Ordering};

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
            let dirty = device.take();
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
                TAKEN.set(DEVICE.get().unwrap().take()).unwrap();
            }
        });
        let device = DEVICE.get_or_init(|| {
            TrackedDevice::new(TracedDevice::new(MemoryDevice::new(4096), take_in_between), 512).unwrap()
        });
        device.write_at(&[1; 10], 1000).unwrap();
        assert!(TAKEN.get().unwrap().is_dirty(1000..1010));
        assert!(device.peek().is_dirty(1000..1010));
    }

    #[test]
    fn a_failed_write_is_marked_and_a_refused_one_is_not() {
        let faulty = FaultyDevice::new(MemoryDevice::new(4096));
        faulty.add(FaultRule::every(RequestKind::Write, Fault::Io));
        let device = TrackedDevice::new(faulty, 512).unwrap();
        device.write_at(&[1; 10], 4090).unwrap_err();
        device.write_at(&[1; 10], u64::MAX - 3).unwrap_err();
        device.trim(4096..5000).unwrap_err();
        assert!(device.peek().is_clean());
        device.write_at(&[1; 10], 600).unwrap_err();
        assert!(device.peek().is_dirty(600..610));
    }

    #[test]
    fn a_bitmap_continues_and_a_peek_takes_nothing() {
        let mut bitmap = DirtyBitmap::new(100_000, 512).unwrap();
        bitmap.set(5000..6000);
        let device = TrackedDevice::with_bitmap(MemoryDevice::new(100_000), &bitmap).unwrap();
        assert_eq!(device.peek(), bitmap);
        device.write_zeroes(20_000..30_000).unwrap();
        bitmap.set(20_000..30_000);
        assert_eq!(device.peek(), bitmap);
        assert_eq!(device.take(), bitmap);
        assert!(device.peek().is_clean() && device.take().is_clean());
    }

    #[test]
    fn a_clean_epoch_ends_when_a_change_begins() {
        type Sink = Box<dyn Fn(Request) + Send + Sync>;
        static DEVICE: OnceLock<TrackedDevice<TracedDevice<MemoryDevice, Sink>>> = OnceLock::new();
        // In the middle of the write, its first mark is taken.
        let take_in_between: Sink = Box::new(|request| {
            let device = DEVICE.get().unwrap();
            if request.kind == RequestKind::Write {
                device.take();
                assert!(device.peek().is_clean());
                assert_eq!(device.clean_epoch(), None, "a change is in progress");
            }
        });
        let device = DEVICE.get_or_init(|| {
            TrackedDevice::new(TracedDevice::new(MemoryDevice::new(4096), take_in_between), 512).unwrap()
        });
        let epoch = device.clean_epoch().unwrap();
        device.read_at(&mut [0; 100], 0).unwrap();
        device.flush().unwrap();
        assert!(device.is_still_clean(epoch));
        device.write_at(&[1; 10], 0).unwrap();
        assert!(!device.is_still_clean(epoch));
        assert_eq!(device.clean_epoch(), None, "the write is marked");
        device.take();
        assert!(device.clean_epoch().is_some_and(|later| later != epoch));
        assert!(!device.is_still_clean(epoch));
        let epoch = device.clean_epoch().unwrap();
        device.mark(0..1);
        assert!(!device.is_still_clean(epoch), "a range is to be copied again");
    }

    /// Threads write while another one copies what each generation marks. After the last generation, the copy is equal.
    #[test]
    fn no_write_is_lost_between_generations() {
        const BLOCK: u64 = 512;
        const BLOCK_COUNT: u64 = 600;
        const WRITER_COUNT: u64 = 3;
        let seed = test_seed();
        let device = TrackedDevice::new(MemoryDevice::new(BLOCK * BLOCK_COUNT), BLOCK).unwrap();
        let copy = MemoryDevice::new(BLOCK * BLOCK_COUNT);
        let is_over = AtomicBool::new(false);
        let copy_generation = || {
            for range in &device.take() {
                let mut bytes = vec![0; to_usize(range.end - range.start)];
                device.read_at(&mut bytes, range.start).unwrap();
                copy.write_at(&bytes, range.start).unwrap();
            }
        };
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..WRITER_COUNT)
                .map(|writer| {
                    let device = &device;
                    scope.spawn(move || {
                        let mut random = SeededRandom::new(seed + writer);
                        for _ in 0..3000 {
                            let block = random.below(BLOCK_COUNT / WRITER_COUNT) * WRITER_COUNT + writer;
                            let bytes = random.bytes(to_usize(BLOCK));
                            device.write_at(&bytes, block * BLOCK).unwrap();
                        }
                    })
                })
                .collect();
            let copier = scope.spawn(|| {
                while !is_over.load(Ordering::Acquire) {
                    copy_generation();
                }
            });
            for writer in writers {
                writer.join().unwrap();
            }
            is_over.store(true, Ordering::Release);
            copier.join().unwrap();
        });
        copy_generation();
        assert!(device.clean_epoch().is_some());
        let mut bytes = vec![0; to_usize(BLOCK * BLOCK_COUNT)];
        device.read_at(&mut bytes, 0).unwrap();
        assert!(bytes == copy.to_bytes(), "seed {seed}");
    }

    #[test]
    fn a_bitmap_of_another_size_is_refused() {
        let bitmap = DirtyBitmap::new(4095, 512).unwrap();
        assert!(TrackedDevice::with_bitmap(MemoryDevice::new(4096), &bitmap).is_err());
    }
}
