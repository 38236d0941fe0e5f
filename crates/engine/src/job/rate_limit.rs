//! How fast a machine is read: as fast as it goes, at most as fast as a person says, and slower where the guest's writes suffer.

use std::io::Read;
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use holdfast_block::{BlockDevice, ExtentList, Throttle, ThrottleLimits};

use super::context::Job;

/// Below this nothing is slowed down: what is frozen must not stay so for ever.
const RATE_MIN: u64 = 1 << 20;
/// Time that was not used may be made up for.
const BURST_MS: u32 = 50;
/// A pause is a series of sleeps of at most this length, so that an interrupted job ends soon.
const PIECE: Duration = Duration::from_millis(100);

/// The pace of one backup of a machine, for all its disks together.
pub(crate) struct RateLimit<'a> {
    job: Job<'a>,
    throttle: Throttle,
    /// What a person says.
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

    /// Changes the rate, in bytes each second.
    pub(crate) fn set(&self, rate: Option<NonZeroU64>) {
        let limits = ThrottleLimits {
            bytes_per_second: rate,
            operations_per_second: None,
            burst_ms: BURST_MS,
        };
        self.throttle.set_limits(limits, self.job.clock.now());
    }

    /// Ends all waiting: what is read is gone.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Bytes read until now.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// How long readers have waited, of `elapsed`; readers that wait at once are counted once.
    pub(crate) fn waited(&self, elapsed: Duration) -> Duration {
        Duration::from_micros(self.waited_us.load(Ordering::Relaxed)).min(elapsed)
    }

    /// Waits until so many more bytes may be read.
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

/// A device that is read at a pace. Questions for extents pass freely.
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

/// A stream that is read at a pace.
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

/// Finds the rate at which the guest's writes take no longer than they may.
#[derive(Debug)]
pub(crate) struct LatencyGovernor {
    latency_max: Duration,
    ceiling: Option<NonZeroU64>,
    rate: Option<NonZeroU64>,
}

/// What a look at the guest's writes leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RateChange {
    /// The rate stays as it is.
    Stay,
    /// It is half of what it was.
    Slower(NonZeroU64),
    /// It is a quarter more; none is as fast as it goes.
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

    /// What to do after a while in which a write took `latency`, and was read at `now_rate` bytes each second.
    ///
    /// A guest that writes nothing cannot suffer.
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
        // A rate that was not reached is no limit any more.
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
        // What was read was less than allowed: that is what is halved.
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
