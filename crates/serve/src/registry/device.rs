//! The device of an export: counts requests, and refuses them after the export was removed.

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use holdfast_block::{BlockDevice, BlockDeviceMut, Error, ExtentList, Result};

use super::counters::{Counted, Counters, Traffic};
use crate::server::export_device::ExportDevice;

/// A device that counts its requests, and that can be retired: afterwards all new requests fail.
pub struct CountedDevice {
    inner: ExportDevice,
    counters: Counters,
    is_retired: AtomicBool,
    running_count: AtomicU64,
    waiting: Mutex<()>,
    idle: Condvar,
    /// Locks and files to keep as long as requests may use the device. Dropped after it.
    _held: Vec<Box<dyn Any + Send + Sync>>,
}

/// A request in progress.
struct Running<'a>(&'a CountedDevice);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let device = self.0;
        if device.running_count.fetch_sub(1, Ordering::SeqCst) == 1 && device.is_retired() {
            // With the lock, a thread that has just found a request in progress is waiting already.
            let _guard = device.lock_waiting();
            device.idle.notify_all();
        }
    }
}

impl CountedDevice {
    pub(super) fn new(inner: ExportDevice, held: Vec<Box<dyn Any + Send + Sync>>) -> Self {
        Self {
            inner,
            counters: Counters::default(),
            is_retired: AtomicBool::new(false),
            running_count: AtomicU64::new(0),
            waiting: Mutex::new(()),
            idle: Condvar::new(),
            _held: held,
        }
    }

    /// The counters.
    pub fn traffic(&self) -> Traffic {
        self.counters.sample()
    }

    /// Whether clients can write.
    pub fn is_writable(&self) -> bool {
        self.inner.writer().is_some()
    }

    fn lock_waiting(&self) -> MutexGuard<'_, ()> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_retired(&self) -> bool {
        self.is_retired.load(Ordering::SeqCst)
    }

    /// Whether no request is in progress.
    pub(super) fn is_idle(&self) -> bool {
        self.running_count.load(Ordering::SeqCst) == 0
    }

    /// Refuses further requests.
    pub(super) fn retire(&self) {
        // SeqCst here and in `begin`: either the request sees that the device is retired, or `is_idle` sees the request.
        self.is_retired.store(true, Ordering::SeqCst);
    }

    /// Makes all writes to a retired device durable: at once those that are complete, and later those that are in
    /// progress, for which it waits without a limit.
    ///
    /// # Errors
    /// A flush failed: acknowledged writes that no client has flushed may be lost.
    pub(super) fn settle(&self) -> Result<()> {
        loop {
            // Read before the flush, which does not cover a request that ends meanwhile.
            let was_idle = self.is_idle();
            if let Some(writer) = self.inner.writer() {
                writer.flush()?;
            }
            if was_idle {
                return Ok(());
            }
            let mut guard = self.lock_waiting();
            while !self.is_idle() {
                guard = self.idle.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn begin(&self) -> Result<Running<'_>> {
        self.running_count.fetch_add(1, Ordering::SeqCst);
        let running = Running(self);
        if self.is_retired() {
            return Err(Error::layer(std::io::Error::other("the export was removed")));
        }
        Ok(running)
    }

    fn counted<T>(&self, kind: Counted, bytes: u64, request: impl FnOnce() -> Result<T>) -> Result<T> {
        let _running = self.begin()?;
        let done = request();
        match &done {
            Ok(_) => self.counters.completed(kind, bytes),
            Err(_) => self.counters.failed(),
        }
        done
    }

    fn change(&self, kind: Counted, bytes: u64, request: impl FnOnce(&dyn BlockDeviceMut) -> Result<()>) -> Result<()> {
        let Some(writer) = self.inner.writer() else {
            let error = std::io::Error::from(std::io::ErrorKind::ReadOnlyFilesystem);
            return Err(Error::layer(error));
        };
        self.counted(kind, bytes, || request(writer))
    }
}

fn length(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

impl BlockDevice for CountedDevice {
    fn size_bytes(&self) -> u64 {
        self.inner.reader().size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let bytes = buffer.len() as u64;
        self.counted(Counted::Read, bytes, || self.inner.reader().read_at(buffer, offset))
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.counted(Counted::Query, 0, || {
            self.inner.reader().extents(range, extent_count_max)
        })
    }

    fn block_size_bytes(&self) -> u32 {
        self.inner.reader().block_size_bytes()
    }
}

impl BlockDeviceMut for CountedDevice {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.change(Counted::Write, data.len() as u64, |device| {
            device.write_at(data, offset)
        })
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.change(Counted::Write, length(&range), |device| device.write_zeroes(range))
    }

    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.change(Counted::Discard, length(&range), |device| device.trim(range))
    }

    fn flush(&self) -> Result<()> {
        self.change(Counted::Flush, 0, |device| device.flush())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use holdfast_block::{BlockDevice as _, BlockDeviceMut, MemoryDevice, conformance::Conformance};

    use super::CountedDevice;
    use crate::registry::Traffic;
    use crate::server::export_device::ExportDevice;

    fn writable(device: impl BlockDeviceMut + 'static) -> CountedDevice {
        CountedDevice::new(ExportDevice::Writable(Arc::new(device)), Vec::new())
    }

    #[test]
    fn it_is_a_device_like_any_other() {
        Conformance::new().check_mutable(|size_bytes| writable(MemoryDevice::new(size_bytes)));
    }

    #[test]
    fn requests_are_counted_by_kind() {
        let device = writable(MemoryDevice::new(8192));
        device.write_at(&[1; 512], 0).unwrap();
        device.write_zeroes(512..2048).unwrap();
        device.read_at(&mut [0; 4096], 0).unwrap();
        device.trim(0..4096).unwrap();
        device.flush().unwrap();
        assert!(device.read_at(&mut [0; 1], 8192).is_err());
        let expected = Traffic {
            read_count: 1,
            read_bytes: 4096,
            write_count: 2,
            write_bytes: 2048,
            flush_count: 1,
            discard_count: 1,
            discard_bytes: 4096,
            error_count: 1,
        };
        assert_eq!(device.traffic(), expected);
    }

    #[test]
    fn a_read_only_device_refuses_changes() {
        let device = CountedDevice::new(ExportDevice::ReadOnly(Arc::new(MemoryDevice::new(512))), Vec::new());
        assert!(!device.is_writable());
        assert!(device.write_at(&[1], 0).is_err() && device.flush().is_err());
        device.retire();
        device.settle().unwrap();
        assert!(device.read_at(&mut [0; 1], 0).is_err());
    }
}
