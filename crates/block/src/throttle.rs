//! Limits the rate of a device, so that a copy leaves capacity for running machines.
//!
//! For each limit, a request reserves the next free time slot for its bytes, or for one operation, and waits until the
//! slot begins. Unused time is saved, up to the burst.

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::{BlockDevice, BlockDeviceMut, Clock, ExtentList, Result};

/// The limits of a [`ThrottledDevice`]; `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ThrottleLimits {
    /// Bytes read and written each second.
    pub bytes_per_second: Option<NonZeroU64>,
    /// Reads, writes, zeroings and trims each second.
    pub operations_per_second: Option<NonZeroU64>,
    /// How much unused time may be used later, in milliseconds.
    pub burst_ms: u32,
}

/// For each limit, the clock's time at which the next request may begin.
#[derive(Debug, Default)]
struct Schedule {
    limits: ThrottleLimits,
    bytes_free_at: Duration,
    operations_free_at: Duration,
}

/// Reserves time for `units`; returns when it begins.
fn reserve(
    free_at: &mut Duration,
    now: Duration,
    burst: Duration,
    units: u64,
    per_second: Option<NonZeroU64>,
) -> Duration {
    let Some(per_second) = per_second else {
        return now;
    };
    let begin = (*free_at).max(now.saturating_sub(burst));
    let nanoseconds = u128::from(units) * 1_000_000_000 / u128::from(per_second.get());
    let length = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
    *free_at = begin.saturating_add(length);
    begin
}

impl Schedule {
    /// Reserves time for one operation of `bytes`; returns how long to wait before it.
    fn wait(&mut self, now: Duration, bytes: u64) -> Duration {
        let limits = self.limits;
        let burst = Duration::from_millis(limits.burst_ms.into());
        let bytes_begin = reserve(&mut self.bytes_free_at, now, burst, bytes, limits.bytes_per_second);
        let operation_begin = reserve(
            &mut self.operations_free_at,
            now,
            burst,
            1,
            limits.operations_per_second,
        );
        bytes_begin.max(operation_begin).saturating_sub(now)
    }
}

/// Limits that several threads share. Each thread asks how long to wait before a request.
#[derive(Debug, Default)]
pub struct Throttle {
    schedule: Mutex<Schedule>,
}

impl Throttle {
    /// Changes the limits for later requests; earlier reservations are dropped.
    pub fn set_limits(&self, limits: ThrottleLimits, now: Duration) {
        *self.schedule.lock().unwrap_or_else(PoisonError::into_inner) = Schedule {
            limits,
            bytes_free_at: now,
            operations_free_at: now,
        };
    }

    /// Reserves time for one request of `bytes`; returns how long to wait before it may begin.
    pub fn reserve(&self, bytes: u64, now: Duration) -> Duration {
        let mut schedule = self.schedule.lock().unwrap_or_else(PoisonError::into_inner);
        schedule.wait(now, bytes)
    }
}

/// A device with [`ThrottleLimits`]. Flushes and extent queries are not limited.
#[derive(Debug)]
pub struct ThrottledDevice<D, C> {
    device: D,
    clock: C,
    throttle: Throttle,
}

impl<D: BlockDevice, C: Clock> ThrottledDevice<D, C> {
    /// Limits `device` to `limits`, by the time of `clock`.
    pub fn new(device: D, limits: ThrottleLimits, clock: C) -> Self {
        let throttled = Self {
            device,
            clock,
            throttle: Throttle::default(),
        };
        throttled.set_limits(limits);
        throttled
    }

    /// Changes the limits for later requests; earlier reservations are dropped.
    pub fn set_limits(&self, limits: ThrottleLimits) {
        self.throttle.set_limits(limits, self.clock.now());
    }

    fn pass(&self, bytes: u64) {
        let wait = self.throttle.reserve(bytes, self.clock.now());
        if !wait.is_zero() {
            self.clock.sleep(wait);
        }
    }
}

impl<D: BlockDevice, C: Clock> BlockDevice for ThrottledDevice<D, C> {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        self.pass(buffer.len() as u64);
        self.device.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.device.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        self.device.block_size_bytes()
    }
}

impl<D: BlockDeviceMut, C: Clock> BlockDeviceMut for ThrottledDevice<D, C> {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, data.len() as u64)?;
        self.pass(data.len() as u64);
        self.device.write_at(data, offset)
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.pass(0);
        self.device.write_zeroes(range)
    }

    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.pass(0);
        self.device.trim(range)
    }

    fn flush(&self) -> Result<()> {
        self.device.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;
    use std::sync::Arc;
    use std::time::Duration;

    use super::{ThrottleLimits, ThrottledDevice};
    use crate::testing::conformance::Conformance;
    use crate::{BlockDevice, BlockDeviceMut, Clock, ManualClock, MemoryDevice};

    fn limits(bytes: u64, operations: u64, burst_ms: u32) -> ThrottleLimits {
        ThrottleLimits {
            bytes_per_second: NonZeroU64::new(bytes),
            operations_per_second: NonZeroU64::new(operations),
            burst_ms,
        }
    }

    fn throttled(limits: ThrottleLimits) -> (Arc<ManualClock>, ThrottledDevice<MemoryDevice, Arc<ManualClock>>) {
        let clock = Arc::new(ManualClock::new());
        (
            clock.clone(),
            ThrottledDevice::new(MemoryDevice::new(10_000), limits, clock),
        )
    }

    #[test]
    fn conforms() {
        Conformance::new().check_mutable(|size| {
            ThrottledDevice::new(MemoryDevice::new(size), limits(1_000_000, 1000, 10), ManualClock::new())
        });
    }

    #[test]
    fn bytes_take_their_time_and_the_first_request_none() {
        let (clock, device) = throttled(limits(1000, 0, 0));
        for request in 0..11u64 {
            device.write_at(&[1; 500], 0).unwrap();
            assert_eq!(clock.now(), Duration::from_millis(500 * request));
        }
        device.flush().unwrap();
        assert_eq!(clock.now(), Duration::from_secs(5));
    }

    #[test]
    fn the_stricter_limit_wins() {
        let (clock, device) = throttled(limits(1_000_000, 10, 0));
        for _ in 0..11 {
            device.read_at(&mut [0; 10], 0).unwrap();
        }
        assert_eq!(clock.now(), Duration::from_secs(1));
        device.trim(0..10_000).unwrap();
        assert_eq!(clock.now(), Duration::from_millis(1100));
    }

    #[test]
    fn unused_time_is_made_up_for_up_to_the_burst() {
        let (clock, device) = throttled(limits(0, 100, 50));
        clock.advance(Duration::from_secs(60));
        // 5 operations of 10 ms each fit the burst of 50 ms, the sixth begins now, the seventh waits.
        for _ in 0..6 {
            device.read_at(&mut [0; 1], 0).unwrap();
        }
        assert_eq!(clock.now(), Duration::from_secs(60));
        device.read_at(&mut [0; 1], 0).unwrap();
        assert_eq!(clock.now(), Duration::from_secs(60) + Duration::from_millis(10));
    }

    #[test]
    fn no_limit_is_no_wait_and_limits_change_on_the_way() {
        let (clock, device) = throttled(ThrottleLimits::default());
        device.read_at(&mut [0; 10_000], 0).unwrap();
        device.read_at(&mut [0; 10_000], 0).unwrap();
        assert_eq!(clock.now(), Duration::ZERO);
        device.set_limits(limits(10_000, 0, 0));
        device.read_at(&mut [0; 10_000], 0).unwrap();
        device.read_at(&mut [0; 10_000], 0).unwrap();
        assert_eq!(clock.now(), Duration::from_secs(1));
    }
}
