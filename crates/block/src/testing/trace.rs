//! Records the requests to a device before they are executed.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::{BlockDevice, BlockDeviceMut, ExtentList, Request, RequestKind, Result};

/// Receives the requests of a [`TracedDevice`]: a [`TraceRing`], or any closure.
pub trait TraceSink: Send + Sync {
    /// Records a request that is about to be executed.
    fn record(&self, request: Request);
}

impl<F: Fn(Request) + Send + Sync> TraceSink for F {
    fn record(&self, request: Request) {
        self(request);
    }
}

/// Keeps a limited number of the last requests.
#[derive(Debug)]
pub struct TraceRing {
    request_count_max: usize,
    requests: Mutex<VecDeque<Request>>,
}

impl TraceRing {
    /// A ring for `request_count_max` requests, shared between the device and its observer.
    pub fn new(request_count_max: usize) -> Arc<Self> {
        Arc::new(Self {
            request_count_max,
            requests: Mutex::default(),
        })
    }

    /// Removes and returns the recorded requests, oldest first.
    pub fn take(&self) -> Vec<Request> {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *requests).into()
    }
}

impl TraceSink for Arc<TraceRing> {
    fn record(&self, request: Request) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        if requests.len() == self.request_count_max {
            requests.pop_front();
        }
        if self.request_count_max > 0 {
            requests.push_back(request);
        }
    }
}

/// A device that records every request, even if the request is then refused.
#[derive(Debug)]
pub struct TracedDevice<D, S> {
    device: D,
    sink: S,
}

impl<D: BlockDevice, S: TraceSink> TracedDevice<D, S> {
    /// Records every request to `device` in `sink`.
    pub fn new(device: D, sink: S) -> Self {
        Self { device, sink }
    }
}

impl<D: BlockDevice, S: TraceSink> BlockDevice for TracedDevice<D, S> {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.sink
            .record(Request::new(RequestKind::Read, offset, buffer.len() as u64));
        self.device.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        self.sink.record(Request::of_range(RequestKind::Extents, &range));
        self.device.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        self.device.block_size_bytes()
    }
}

impl<D: BlockDeviceMut, S: TraceSink> BlockDeviceMut for TracedDevice<D, S> {
    fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.sink
            .record(Request::new(RequestKind::Write, offset, data.len() as u64));
        self.device.write_at(data, offset)
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        self.sink.record(Request::of_range(RequestKind::WriteZeroes, &range));
        self.device.write_zeroes(range)
    }

    fn trim(&self, range: Range<u64>) -> Result<()> {
        self.sink.record(Request::of_range(RequestKind::Trim, &range));
        self.device.trim(range)
    }

    fn flush(&self) -> Result<()> {
        self.sink.record(Request::flush());
        self.device.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::{TraceRing, TracedDevice};
    use crate::testing::conformance::Conformance;
    use crate::{BlockDevice, BlockDeviceMut, MemoryDevice, Request, RequestKind};

    #[test]
    fn conforms() {
        Conformance::new().check_mutable(|size| TracedDevice::new(MemoryDevice::new(size), TraceRing::new(16)));
    }

    #[test]
    fn the_ring_keeps_the_last_requests_in_order() {
        let ring = TraceRing::new(3);
        let device = TracedDevice::new(MemoryDevice::new(1000), ring.clone());
        device.write_at(&[1; 10], 5).unwrap();
        device.read_at(&mut [0; 7], 1).unwrap();
        device.flush().unwrap();
        assert!(device.trim(990..1010).is_err());
        assert_eq!(
            ring.take(),
            [
                Request::new(RequestKind::Read, 1, 7),
                Request::flush(),
                Request::new(RequestKind::Trim, 990, 20),
            ]
        );
        assert!(ring.take().is_empty());
    }

    #[test]
    fn a_closure_hears_every_request() {
        let seen = Mutex::new(Vec::new());
        let device = TracedDevice::new(MemoryDevice::new(1000), |request: Request| {
            seen.lock().unwrap().push(request.kind);
        });
        device.extents(0..10, 1).unwrap();
        device.write_zeroes(0..10).unwrap();
        assert_eq!(*seen.lock().unwrap(), [RequestKind::Extents, RequestKind::WriteZeroes]);
    }
}
