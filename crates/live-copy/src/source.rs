//! Disks that are copied, and how their writes are tracked.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use holdfast_block::{BlockDevice, DirtyBitmap, to_usize};
use holdfast_transfer::{Digest, FirstPassTakes, TrackerCheck, UnitLayout};

use crate::error::Result;

/// A disk that may be written while it is copied.
///
/// Marks have the granularity of [`granularity_bytes`](Self::granularity_bytes). A write that was completed before
/// [`take_marks`](Self::take_marks) began is in its result, or was in an earlier one.
pub trait LiveSource: Send + Sync {
    /// The disk. Its content may change between two reads.
    fn device(&self) -> &dyn BlockDevice;

    /// Bytes that one mark covers.
    fn granularity_bytes(&self) -> u32;

    /// How often marks are taken in the first pass.
    fn first_pass_takes(&self) -> FirstPassTakes {
        FirstPassTakes::Often
    }

    /// Records all writes from now on.
    fn start_tracking(&self) -> Result<()>;

    /// Takes all marks: returns and clears them in one step.
    fn take_marks(&self) -> Result<DirtyBitmap>;

    /// Counts the marked bytes.
    fn count_marks(&self) -> Result<u64>;

    /// Counts the marked bytes, and checks that every write was recorded since the start.
    fn check(&self) -> Result<TrackerCheck>;

    /// The content of a range that was read to be sent.
    fn was_read(&self, _offset: u64, _content: ReadContent<'_>) {}

    /// Freezes what writes, and waits for its writes in progress.
    ///
    /// # Errors
    /// The source is not frozen, or [`thaw`](Self::thaw) must be called.
    fn freeze(&self) -> Result<()>;

    /// Thaws, whether or not the source is frozen.
    fn thaw(&self) -> Result<()>;

    /// Limits the writes, so that at most this many bytes become dirty per second. False if this source cannot.
    fn throttle(&self, dirty_bytes_per_s_max: u64) -> Result<bool>;

    /// Ends the limit.
    fn unthrottle(&self) -> Result<()>;

    /// Ends the tracking, and removes what it needed.
    fn stop_tracking(&self) -> Result<()>;

    /// The consistency of the copy, as in the notes of snapshots.
    fn consistency(&self) -> SourceConsistency;
}

/// What was read.
#[derive(Debug, Clone, Copy)]
pub enum ReadContent<'a> {
    /// These bytes.
    Data(&'a [u8]),
    /// So many zeroes.
    Zero(u64),
}

/// What a copy contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceConsistency {
    /// Nothing wrote to the source.
    AtRest,
    /// The source was frozen by commands of the user.
    Commands,
    /// A file system was frozen.
    FileSystem,
    /// What a disk has after a power failure.
    Crash,
}

impl SourceConsistency {
    /// The word for it in JSON.
    pub fn word(self) -> &'static str {
        match self {
            Self::AtRest => "at-rest",
            Self::Commands => "commands",
            Self::FileSystem => "file-system",
            Self::Crash => "crash",
        }
    }
}

/// Freezes and thaws what writes to a source.
pub trait Freezer: Send + Sync {
    /// Freezes it.
    fn freeze(&self) -> Result<()>;
    /// Thaws it, whether or not it is frozen.
    fn thaw(&self) -> Result<()>;

    /// What a copy contains that was completed in the last freeze.
    fn consistency(&self) -> SourceConsistency {
        SourceConsistency::Commands
    }
}

/// A disk to which nothing writes.
pub struct StillSource<'a> {
    device: &'a dyn BlockDevice,
    consistency: SourceConsistency,
}

impl<'a> StillSource<'a> {
    /// The caller holds a lock that keeps writers away.
    pub fn new(device: &'a dyn BlockDevice) -> Self {
        Self::as_of(device, SourceConsistency::AtRest)
    }

    /// The disk of a snapshot, which is what a source in use contained.
    pub fn as_of(device: &'a dyn BlockDevice, consistency: SourceConsistency) -> Self {
        Self { device, consistency }
    }
}

/// Marks of a source to which nothing writes.
const STILL_GRANULARITY_BYTES: u32 = 64 << 10;

impl LiveSource for StillSource<'_> {
    fn device(&self) -> &dyn BlockDevice {
        self.device
    }
    fn granularity_bytes(&self) -> u32 {
        STILL_GRANULARITY_BYTES
    }
    fn first_pass_takes(&self) -> FirstPassTakes {
        FirstPassTakes::AtEnd
    }
    fn start_tracking(&self) -> Result<()> {
        Ok(())
    }
    fn take_marks(&self) -> Result<DirtyBitmap> {
        let granularity_bytes = u64::from(STILL_GRANULARITY_BYTES);
        Ok(DirtyBitmap::new(self.device.size_bytes(), granularity_bytes)?)
    }
    fn count_marks(&self) -> Result<u64> {
        Ok(0)
    }
    fn check(&self) -> Result<TrackerCheck> {
        Ok(TrackerCheck::Valid { dirty_bytes: 0 })
    }
    fn freeze(&self) -> Result<()> {
        Ok(())
    }
    fn thaw(&self) -> Result<()> {
        Ok(())
    }
    fn throttle(&self, _dirty_bytes_per_s_max: u64) -> Result<bool> {
        Ok(false)
    }
    fn unthrottle(&self) -> Result<()> {
        Ok(())
    }
    fn stop_tracking(&self) -> Result<()> {
        Ok(())
    }
    fn consistency(&self) -> SourceConsistency {
        self.consistency
    }
}

/// A disk whose writes are found by reading it again: for anything that can be frozen by a command.
///
/// A part is dirty if its content is not that which was last read to be sent. So each search reads the whole disk, and
/// the frozen time contains one search.
pub struct ComparedSource<'a> {
    device: &'a dyn BlockDevice,
    freezer: &'a dyn Freezer,
    layout: UnitLayout,
    state: Mutex<ComparedState>,
}

/// Threads of a search.
const SEARCH_THREAD_COUNT: u64 = 4;

#[derive(Default)]
struct ComparedState {
    /// What was last read of each unit to be sent; none if it was never read.
    sent: Vec<Option<Digest>>,
    /// What the last search has found. It is used once.
    found: Option<Search>,
    is_frozen: bool,
}

/// The digests of all units, as a search has found them.
struct Search {
    digests: Vec<Digest>,
    is_frozen: bool,
}

impl<'a> ComparedSource<'a> {
    /// `layout` is that of the copy: whole units are read.
    pub fn new(device: &'a dyn BlockDevice, layout: UnitLayout, freezer: &'a dyn Freezer) -> Self {
        Self {
            device,
            freezer,
            layout,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, ComparedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the disk, on several threads: the source may be frozen meanwhile.
    fn search(&self) -> Result<Search> {
        let is_frozen = self.state().is_frozen;
        let unit_count = self.layout.unit_count();
        let part = unit_count.div_ceil(SEARCH_THREAD_COUNT).max(1);
        let parts = (0..SEARCH_THREAD_COUNT).map(|number| number * part..((number + 1) * part).min(unit_count));
        let found: Vec<Result<Vec<Digest>>> = std::thread::scope(|scope| {
            let threads: Vec<_> = parts.map(|units| scope.spawn(|| self.search_units(units))).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        });
        let digests = found.into_iter().collect::<Result<Vec<_>>>()?.concat();
        Ok(Search { digests, is_frozen })
    }

    fn search_units(&self, units: std::ops::Range<u64>) -> Result<Vec<Digest>> {
        let mut bytes = vec![0; self.layout.unit_bytes() as usize];
        let mut digests = Vec::new();
        for unit in units {
            let range = self.layout.bytes_of(unit);
            let buffer = &mut bytes[..to_usize(range.end - range.start)];
            self.device.read_at(buffer, range.start)?;
            digests.push(Digest::of(buffer));
        }
        Ok(digests)
    }

    /// The units that were read, and have another content now.
    fn dirty(&self, state: &ComparedState, search: &Search) -> Result<DirtyBitmap> {
        let mut marks = DirtyBitmap::new(self.layout.size_bytes(), u64::from(self.layout.unit_bytes()))?;
        for (unit, (sent, found)) in (0..).zip(state.sent.iter().zip(&search.digests)) {
            if sent.is_some_and(|sent| sent != *found) {
                marks.set(self.layout.bytes_of(unit));
            }
        }
        Ok(marks)
    }
}

impl LiveSource for ComparedSource<'_> {
    fn device(&self) -> &dyn BlockDevice {
        self.device
    }

    fn granularity_bytes(&self) -> u32 {
        self.layout.unit_bytes()
    }

    fn first_pass_takes(&self) -> FirstPassTakes {
        FirstPassTakes::AtEnd
    }

    fn start_tracking(&self) -> Result<()> {
        let mut state = self.state();
        state.sent = vec![None; to_usize(self.layout.unit_count())];
        state.found = None;
        Ok(())
    }

    fn take_marks(&self) -> Result<DirtyBitmap> {
        let is_frozen = self.state().is_frozen;
        // What a count has found just now need not be searched again, unless the freeze came later.
        let last = self.state().found.take().filter(|search| search.is_frozen == is_frozen);
        let search = match last {
            Some(search) => search,
            None => self.search()?,
        };
        let mut state = self.state();
        let marks = self.dirty(&state, &search)?;
        if is_frozen {
            state.found = Some(search);
        }
        Ok(marks)
    }

    fn count_marks(&self) -> Result<u64> {
        let search = self.search()?;
        let mut state = self.state();
        let dirty_bytes = self.dirty(&state, &search)?.dirty_bytes();
        state.found = Some(search);
        Ok(dirty_bytes)
    }

    /// The search while the source was frozen says what it contains; what was sent meanwhile must be the same.
    fn check(&self) -> Result<TrackerCheck> {
        let state = self.state();
        let frozen = state
            .found
            .as_ref()
            .filter(|search| search.is_frozen && state.is_frozen);
        Ok(match frozen {
            Some(search) => TrackerCheck::Valid {
                dirty_bytes: self.dirty(&state, search)?.dirty_bytes(),
            },
            None => TrackerCheck::Invalid,
        })
    }

    fn was_read(&self, offset: u64, content: ReadContent<'_>) {
        let digest = match content {
            ReadContent::Data(bytes) => Digest::of(bytes),
            ReadContent::Zero(length) => Digest::of(&vec![0; to_usize(length)]),
        };
        let unit = to_usize(offset / u64::from(self.layout.unit_bytes()));
        if let Some(sent) = self.state().sent.get_mut(unit) {
            *sent = Some(digest);
        }
    }

    fn freeze(&self) -> Result<()> {
        self.freezer.freeze()?;
        let mut state = self.state();
        state.is_frozen = true;
        state.found = None;
        Ok(())
    }

    fn thaw(&self) -> Result<()> {
        {
            let mut state = self.state();
            state.is_frozen = false;
            state.found = None;
        }
        self.freezer.thaw()
    }

    fn throttle(&self, _dirty_bytes_per_s_max: u64) -> Result<bool> {
        Ok(false)
    }

    fn unthrottle(&self) -> Result<()> {
        Ok(())
    }

    fn stop_tracking(&self) -> Result<()> {
        Ok(())
    }

    fn consistency(&self) -> SourceConsistency {
        SourceConsistency::Commands
    }
}

/// How long tracking takes is a part of the frozen time: see `RoundMeasurement::take`.
pub(crate) fn timed<T>(clock: &dyn holdfast_block::Clock, work: impl FnOnce() -> T) -> (T, Duration) {
    let start = clock.now();
    let result = work();
    (result, clock.now().saturating_sub(start))
}
