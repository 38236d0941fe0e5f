//! Limits how fast a machine is read: without limit, at a limit set by the user, or slower when the guest's writes take too long.

use std::io::Read;
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use holdfast_block::{BlockDevice, ExtentList, Throttle, ThrottleLimits};

use super::context::Job;

/// Lowest rate in bytes per second. Reading slower would keep frozen disks for too long.
const RATE_MIN: u64 = 1 << 20;
/// Unused time that may be made up for, in milliseconds.
const BURST_MS: u32 = 50;
/// A wait is a series of sleeps of at most this length, so that an interrupted job ends soon.
const PIECE: Duration = Duration::from_millis(100);

/// The read rate of one backup of a machine, shared by all its disks.
pub(crate) struct RateLimit<'a> {
    job: Job<'a>,
    throttle: Throttle,
    /// The limit set by the user.
    ceiling: Option<NonZeroU64>,
    read_bytes: AtomicU64,
    waited_us: AtomicU64,
    is_over: AtomicBool,
}

impl<'a> RateLimit<'a> {
    pub(crate) fn new(ceiling: Option<NonZeroU64>, job: Job<'a>) -> Self {
        let pace = Self {
            job,
            throttle: Throttle::default(),
            ceiling,
            read_bytes: AtomicU64::new(0),
            waited_us: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
        };
        pace.set(ceiling);
        pace
    }

    pub(crate) fn ceiling(&self) -> Option<NonZeroU64> {
        self.ceiling
    }

    /// Changes the rate, in bytes per second.
    pub(crate) fn set(&self, rate: Option<NonZeroU64>) {
        let limits = ThrottleLimits {
            bytes_per_second: rate,
            operations_per_second: None,
            burst_ms: BURST_MS,
        };
        self.throttle.set_limits(limits, self.job.clock.now());
    }

    /// Ends all waits: the source no longer exists.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Bytes read so far.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// How long readers have waited within `elapsed`; simultaneous waits count once.
    pub(crate) fn waited(&self, elapsed: Duration) -> Duration {
        Duration::from_micros(self.waited_us.load(Ordering::Relaxed)).min(elapsed)
    }

    /// Waits until this many more bytes may be read.
    pub(crate) fn pass(&self, bytes: u64) {
        let clock = self.job.clock;
        let mut left = self.throttle.reserve(bytes, clock.now());
        self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.waited_us
            .fetch_add(u64::try_from(left.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
        while !left.is_zero() && !self.is_over.load(Ordering::Relaxed) && self.job.interrupt.check().is_ok() {
            let piece = left.min(PIECE);
            clock.sleep(piece);
            left -= piece;
        }
    }
}

/// A device with a limited read rate. Queries for extents are not limited.
pub(crate) struct RateLimitedDevice<'a, D> {
    pub(crate) inner: D,
    pub(crate) pace: &'a RateLimit<'a>,
}

impl<D: BlockDevice> BlockDevice for RateLimitedDevice<'_, D> {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
        self.pace.pass(buffer.len() as u64);
        if self.pace.is_over.load(Ordering::Relaxed) {
            return Err(holdfast_block::Error::Unsupported {
                what: "disk",
                detail: "its copy was given up".to_owned(),
            });
        }
        self.inner.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> holdfast_block::Result<ExtentList> {
        self.inner.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        self.inner.block_size_bytes()
    }
}

/// A stream with a limited read rate.
pub(crate) struct RateLimitedReader<'a, R> {
    pub(crate) inner: R,
    pub(crate) pace: &'a RateLimit<'a>,
}

impl<R: Read> Read for RateLimitedReader<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.pace.pass(read as u64);
        Ok(read)
    }
}

/// Adjusts the rate so that the guest's writes stay within their latency limit.
#[derive(Debug)]
pub(crate) struct LatencyGovernor {
    latency_max: Duration,
    ceiling: Option<NonZeroU64>,
    rate: Option<NonZeroU64>,
}

/// Decision of the governor after one interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RateChange {
    /// Keep the rate.
    Stay,
    /// Halve the rate.
    Slower(NonZeroU64),
    /// Raise the rate by a quarter; none means without limit.
    Faster(Option<NonZeroU64>),
}

impl LatencyGovernor {
    pub(crate) fn new(latency_max: Duration, ceiling: Option<NonZeroU64>) -> Self {
        Self {
            latency_max,
            ceiling,
            rate: ceiling,
        }
    }

    /// Decides after an interval in which a write of the guest took `latency`, and the disks were read at `now_rate` bytes per second.
    ///
    /// A guest that does not write cannot be slowed down.
    pub(crate) fn look(&mut self, latency: Option<Duration>, now_rate: u64) -> RateChange {
        if latency.is_some_and(|latency| latency > self.latency_max) {
            let rate = self.rate.map_or(now_rate, |rate| rate.get().min(now_rate));
            let half = NonZeroU64::new((rate / 2).max(RATE_MIN)).expect("it is at least the minimum");
            if self.rate.is_some_and(|rate| rate <= half) {
                return RateChange::Stay;
            }
            self.rate = Some(half);
            return RateChange::Slower(half);
        }
        let Some(rate) = self.rate.filter(|_| self.rate != self.ceiling) else {
            return RateChange::Stay;
        };
        let more = rate.saturating_add(rate.get() / 4);
        // A limit that was not reached is no longer needed.
        let is_enough = rate.get() / 2 > now_rate;
        self.rate = match self.ceiling {
            Some(ceiling) if more >= ceiling => Some(ceiling),
            None if is_enough => None,
            _ => Some(more),
        };
        RateChange::Faster(self.rate)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;
    use std::time::Duration;

    use super::{LatencyGovernor, RATE_MIN, RateChange};

    const MIB: u64 = 1 << 20;
    const SLOW: Option<Duration> = Some(Duration::from_millis(30));
    const QUICK: Option<Duration> = Some(Duration::from_millis(1));

    fn rate(mib: u64) -> NonZeroU64 {
        NonZeroU64::new(mib * MIB).unwrap()
    }

    #[test]
    fn writes_that_suffer_halve_the_rate_down_to_the_least() {
        let mut governor = LatencyGovernor::new(Duration::from_millis(20), None);
        assert_eq!(governor.look(QUICK, 64 * MIB), RateChange::Stay);
        assert_eq!(governor.look(SLOW, 64 * MIB), RateChange::Slower(rate(32)));
        assert_eq!(governor.look(SLOW, 32 * MIB), RateChange::Slower(rate(16)));
        // The actual rate was below the limit: the actual rate is halved.
        assert_eq!(governor.look(SLOW, 2 * MIB), RateChange::Slower(rate(1)));
        assert_eq!(governor.look(SLOW, 0), RateChange::Stay);
        assert_eq!(governor.rate.unwrap().get(), RATE_MIN);
    }

    #[test]
    fn when_they_do_not_suffer_any_more_it_grows_to_what_a_person_says() {
        let mut governor = LatencyGovernor::new(Duration::from_millis(20), Some(rate(10)));
        assert_eq!(governor.look(None, 10 * MIB), RateChange::Stay);
        assert_eq!(governor.look(SLOW, 16 * MIB), RateChange::Slower(rate(5)));
        let mut steps = 0;
        while governor.look(QUICK, 5 * MIB) != RateChange::Stay {
            steps += 1;
        }
        assert_eq!((governor.rate, steps), (Some(rate(10)), 4));
        let mut governor = LatencyGovernor::new(Duration::from_millis(20), None);
        governor.look(SLOW, 8 * MIB);
        assert_eq!(governor.look(None, MIB), RateChange::Faster(None));
    }
}
