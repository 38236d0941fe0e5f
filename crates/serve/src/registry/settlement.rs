//! Makes the writes to retired devices durable, within a time limit.
//!
//! A flush of a device that hangs never returns. So each flush has a thread, and only the caller has a deadline. The
//! thread of a device that hangs continues, and keeps the files of the device locked until it ends.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use holdfast_block::{Clock, Error as DeviceError, Result as DeviceResult};

use super::device::CountedDevice;

/// Flushes that run at a time: fewer devices that hang do not delay the others.
const THREAD_COUNT_MAX: usize = 64;
/// Interval at which the caller checks the clock.
const SETTLE_TICK: Duration = Duration::from_millis(10);

/// The end of the requests to a retired device.
#[derive(Debug)]
pub(super) enum Settlement {
    /// No request is in progress, and all writes are durable.
    Complete,
    /// A request or the last flush did not end in time. The last writes may be lost.
    Busy,
    /// The last flush failed. The last writes may be lost.
    Failed(DeviceError),
}

/// A device in the queue, and its place in the results.
type QueuedDevice = (usize, Arc<CountedDevice>);

/// The result of a device, and its place in the results.
type Settled = (usize, DeviceResult<()>);

/// Settles retired devices within `patience`: those without requests in progress first. Returns the result of each, in
/// the order of `devices`.
pub(super) fn settle_all(devices: &[Arc<CountedDevice>], patience: Duration, clock: &dyn Clock) -> Vec<Settlement> {
    let deadline = clock.now() + patience;
    let mut queue: Vec<QueuedDevice> = devices.iter().cloned().enumerate().collect();
    queue.sort_by_key(|(_, device)| !device.is_idle());
    let queue = Arc::new(Mutex::new(VecDeque::from(queue)));
    // There is room for all results: a thread that ends late must not wait.
    let (sender, results) = sync_channel(devices.len());
    let thread_count = devices.len().min(THREAD_COUNT_MAX);
    let spawned_count = (0..thread_count).filter(|_| spawn(&queue, &sender)).count();
    if spawned_count == 0 {
        // Without threads, there is no limit.
        settle_queue(&queue, &sender);
    }
    drop(sender);
    receive(&results, devices.len(), deadline, clock)
}

fn spawn(queue: &Arc<Mutex<VecDeque<QueuedDevice>>>, results: &SyncSender<Settled>) -> bool {
    let (queue, results) = (Arc::clone(queue), results.clone());
    let thread = std::thread::Builder::new().name("export-flush".to_owned());
    thread.spawn(move || settle_queue(&queue, &results)).is_ok()
}

fn settle_queue(queue: &Mutex<VecDeque<QueuedDevice>>, results: &SyncSender<Settled>) {
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    while let Some((place, device)) = next() {
        let settled = catch_unwind(AssertUnwindSafe(|| device.settle()));
        let settled = settled.unwrap_or_else(|_| Err(DeviceError::layer(std::io::Error::other("the device panicked"))));
        // Its files are unlocked before the caller learns of the end.
        drop(device);
        // The caller may have stopped waiting.
        results.send((place, settled)).unwrap_or_default();
    }
}

fn receive(results: &Receiver<Settled>, count: usize, deadline: Duration, clock: &dyn Clock) -> Vec<Settlement> {
    let mut settlements: Vec<Settlement> = (0..count).map(|_| Settlement::Busy).collect();
    let mut missing_count = count;
    while missing_count > 0 {
        let left = deadline.saturating_sub(clock.now());
        match results.recv_timeout(left.min(SETTLE_TICK)) {
            Ok((place, settled)) => {
                missing_count -= 1;
                settlements[place] = settled.map_or_else(Settlement::Failed, |()| Settlement::Complete);
            }
            Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    settlements
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::{Arc, Condvar, Mutex};
    use std::time::Duration;

    use holdfast_block::{BlockDevice, BlockDeviceMut, ExtentList, MemoryDevice, Result, SystemClock};

    use super::super::device::CountedDevice;
    use super::{Settlement, settle_all};
    use crate::server::export_device::ExportDevice;

    const LONG: Duration = Duration::from_secs(60);

    /// A device whose writes or flushes wait until the gate opens.
    struct GatedDevice {
        inner: MemoryDevice,
        gated: Gated,
        state: Mutex<GateState>,
        changed: Condvar,
    }

    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Gated {
        Nothing,
        Writes,
        Flushes,
    }

    #[derive(Default)]
    struct GateState {
        is_open: bool,
        waiting_count: usize,
        flush_count: usize,
    }

    impl GatedDevice {
        fn new(gated: Gated) -> Arc<Self> {
            Arc::new(Self {
                inner: MemoryDevice::new(4096),
                gated,
                state: Mutex::default(),
                changed: Condvar::new(),
            })
        }

        fn pass(&self, request: Gated) {
            let mut state = self.state.lock().unwrap();
            if request == self.gated {
                state.waiting_count += 1;
                self.changed.notify_all();
                drop(self.changed.wait_while(state, |state| !state.is_open).unwrap());
            }
        }

        fn open(&self) {
            self.state.lock().unwrap().is_open = true;
            self.changed.notify_all();
        }

        /// Waits until a request waits at the gate, and until there were so many flushes.
        fn wait_for(&self, waiting_count: usize, flush_count: usize) {
            let state = self.state.lock().unwrap();
            let is_early =
                |state: &mut GateState| state.waiting_count < waiting_count || state.flush_count < flush_count;
            let (_state, waited) = self.changed.wait_timeout_while(state, LONG, is_early).unwrap();
            assert!(!waited.timed_out());
        }
    }

    impl BlockDevice for GatedDevice {
        fn size_bytes(&self) -> u64 {
            self.inner.size_bytes()
        }

        fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
            self.inner.read_at(buffer, offset)
        }

        fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
            self.inner.extents(range, extent_count_max)
        }
    }

    impl BlockDeviceMut for GatedDevice {
        fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
            self.pass(Gated::Writes);
            self.inner.write_at(data, offset)
        }

        fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
            self.inner.write_zeroes(range)
        }

        fn trim(&self, range: Range<u64>) -> Result<()> {
            self.inner.trim(range)
        }

        fn flush(&self) -> Result<()> {
            self.pass(Gated::Flushes);
            self.state.lock().unwrap().flush_count += 1;
            self.changed.notify_all();
            self.inner.flush()
        }
    }

    fn counted(device: &Arc<GatedDevice>) -> Arc<CountedDevice> {
        Arc::new(CountedDevice::new(
            ExportDevice::Writable(Arc::clone(device) as _),
            Vec::new(),
        ))
    }

    /// The flush of a device that hung had no time limit, and the devices after it were never flushed.
    #[test]
    fn a_device_that_hangs_delays_no_other() {
        let (hung, healthy) = (GatedDevice::new(Gated::Flushes), GatedDevice::new(Gated::Nothing));
        let devices = [counted(&hung), counted(&healthy)];
        for device in &devices {
            device.retire();
        }
        let settled = settle_all(&devices, Duration::from_millis(100), &SystemClock::new());
        assert!(
            matches!(settled[..], [Settlement::Busy, Settlement::Complete]),
            "{settled:?}"
        );
        healthy.wait_for(0, 1);
        hung.open();
        hung.wait_for(1, 1);
    }

    /// A write that ended during the only flush was reported as durable.
    #[test]
    fn a_write_that_outlasts_a_flush_is_flushed_when_it_ends() {
        let gated = GatedDevice::new(Gated::Writes);
        let device = counted(&gated);
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| device.write_at(&[1; 512], 0));
            gated.wait_for(1, 0);
            device.retire();
            let devices = [Arc::clone(&device)];
            let settling = scope.spawn(move || settle_all(&devices, LONG, &SystemClock::new()));
            gated.wait_for(1, 1);
            gated.open();
            writing.join().unwrap().unwrap();
            let settled = settling.join().unwrap();
            assert!(matches!(settled[..], [Settlement::Complete]), "{settled:?}");
        });
        assert_eq!(gated.state.lock().unwrap().flush_count, 2);
        assert!(device.write_at(&[1; 512], 0).is_err(), "it is retired");
    }
}
