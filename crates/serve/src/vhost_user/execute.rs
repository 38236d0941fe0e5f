//! Executes requests on the device and the memory of the guest.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use holdfast_block::{BlockDeviceMut, Error as DeviceError, to_usize};

use super::chain::{Chain, Segment, byte_count};
use super::config::WriteCache;
use super::export::VhostUserExport;
use super::memory::{GuestMap, NoMemory};
use super::request::{
    Action, FreedSpace, HEADER_BYTES, Payload, RANGES_BYTES_MAX, RequestParts, RequestStatus, ZeroedRange, action_of,
    payload_of,
};
use crate::server::dispatch::{Work, WorkClass};

/// Bytes that are copied at a time: a copy that fits into the cache of the processor costs little.
pub(super) const PIECE_BYTES: u64 = 128 << 10;
/// Bytes that a worker copies at a time: slow devices prefer large requests.
pub(super) const WORKER_PIECE_BYTES: u64 = 1 << 20;
/// Zeroes that are written at a time, if their space must stay allocated.
const ZERO_BYTES: usize = 64 << 10;

/// A request that was taken from a ring.
pub(super) struct DiskRequest {
    pub(super) head: u16,
    memory: Arc<GuestMap>,
    chain: Chain,
    action: Result<Action, RequestStatus>,
}

/// The end of a request.
#[derive(Debug)]
pub(super) struct Executed {
    /// Bytes that were written to the guest.
    pub(super) written_bytes: u32,
    /// An error of the device.
    pub(super) error: Option<DeviceError>,
}

/// A request whose status cannot be written: the driver has provided no place for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoStatus;

enum RequestFailure {
    Device(DeviceError),
    Guest,
}

impl From<DeviceError> for RequestFailure {
    fn from(error: DeviceError) -> Self {
        Self::Device(error)
    }
}

impl From<NoMemory> for RequestFailure {
    fn from(_: NoMemory) -> Self {
        Self::Guest
    }
}

impl DiskRequest {
    /// Reads and checks the request in a chain.
    pub(super) fn parse(
        head: u16,
        chain: Chain,
        memory: Arc<GuestMap>,
        export: &VhostUserExport,
    ) -> Result<Self, NoStatus> {
        let expected_bytes = byte_count(&chain.writable).checked_sub(1).ok_or(NoStatus)?;
        let action = Self::action(&chain, expected_bytes, &memory, export);
        Ok(Self {
            head,
            memory,
            chain,
            action,
        })
    }

    fn action(
        chain: &Chain,
        expected_bytes: u64,
        memory: &GuestMap,
        export: &VhostUserExport,
    ) -> Result<Action, RequestStatus> {
        let mut header = [0; HEADER_BYTES];
        let readable = byte_count(&chain.readable);
        let sent_bytes = readable.checked_sub(HEADER_BYTES as u64).ok_or(RequestStatus::Failed)?;
        let failed = |_| RequestStatus::Failed;
        memory.gather(&chain.readable, 0, &mut header).map_err(failed)?;
        let mut payload = Vec::new();
        if payload_of(header) == Payload::Ranges && sent_bytes <= RANGES_BYTES_MAX {
            payload.resize(to_usize(sent_bytes), 0);
            memory
                .gather(&chain.readable, HEADER_BYTES as u64, &mut payload)
                .map_err(failed)?;
        }
        let parts = RequestParts {
            header,
            sent_bytes,
            expected_bytes,
            payload: &payload,
        };
        action_of(&parts, &export.disk)
    }

    /// The class of the request; `None` if it does not use the device.
    pub(super) fn work(&self) -> Option<Work> {
        let length = |range: &Range<u64>| range.end - range.start;
        let (class, bytes) = match self.action.as_ref().ok()? {
            Action::Read(range) => (WorkClass::Read, length(range)),
            Action::Write(range) => (WorkClass::Write, length(range)),
            Action::Flush => (WorkClass::Durable, 0),
            Action::Identify => return None,
            Action::Discard(_) | Action::WriteZeroes(_) => (WorkClass::Other, 0),
        };
        Some(Work { class, bytes })
    }

    /// The operation, for messages.
    pub(super) fn name(&self) -> &'static str {
        match &self.action {
            Ok(Action::Read(_)) => "read",
            Ok(Action::Write(_)) => "write",
            Ok(Action::Flush) => "flush",
            Ok(Action::Discard(_)) => "discard",
            Ok(Action::WriteZeroes(_)) => "write zeroes",
            Ok(Action::Identify) | Err(_) => "request",
        }
    }

    /// Executes the request and writes its status. `piece` is memory for copies, and not empty.
    pub(super) fn execute(&self, export: &VhostUserExport, cache: WriteCache, piece: &mut [u8]) -> Executed {
        // A panic of a device fails the request, not the server.
        let done = catch_unwind(AssertUnwindSafe(|| self.act(export, cache, piece)));
        let done = done.unwrap_or_else(|_| {
            let error = std::io::Error::other("the device of the disk panicked");
            Err(RequestFailure::Device(DeviceError::layer(error)))
        });
        let (status, data_bytes, error) = match (&self.action, done) {
            (Err(status), _) => (*status, 0, None),
            (Ok(_), Ok(bytes)) => (RequestStatus::Success, bytes, None),
            (Ok(_), Err(RequestFailure::Guest)) => (RequestStatus::Failed, 0, None),
            (Ok(_), Err(RequestFailure::Device(error))) => (RequestStatus::Failed, 0, Some(error)),
        };
        let place = byte_count(&self.chain.writable).saturating_sub(1);
        let written = self.memory.scatter(&self.chain.writable, place, &[status.byte()]);
        let written_bytes = match written {
            Ok(()) => u32::try_from(data_bytes + 1).unwrap_or(u32::MAX),
            Err(NoMemory(_)) => 0,
        };
        Executed { written_bytes, error }
    }

    /// Acts on the device. Returns the number of bytes that were written to the guest.
    fn act(&self, export: &VhostUserExport, cache: WriteCache, piece: &mut [u8]) -> Result<u64, RequestFailure> {
        let Ok(action) = &self.action else {
            return Ok(0);
        };
        if let Action::Read(range) = action {
            return self.read(range, export, piece);
        }
        if let Action::Identify = action {
            let place = byte_count(&self.chain.writable).saturating_sub(1);
            let length = to_usize(place.min(export.serial.len() as u64));
            let serial = export.serial.get(..length).unwrap_or_default();
            self.memory.scatter(&self.chain.writable, 0, serial)?;
            return Ok(length as u64);
        }
        let Some(device) = export.device.writer() else {
            // A disk that cannot be written has nothing to flush; other requests were refused.
            return Ok(0);
        };
        match action {
            Action::Write(range) => self.write(range, device, piece)?,
            Action::Discard(ranges) => ranges.iter().try_for_each(|range| device.trim(range.clone()))?,
            Action::WriteZeroes(ranges) => ranges.iter().try_for_each(|range| write_zeroes(device, range))?,
            Action::Flush | Action::Read(_) | Action::Identify => {}
        }
        if cache == WriteCache::WriteThrough || *action == Action::Flush {
            device.flush()?;
        }
        Ok(0)
    }

    fn read(&self, range: &Range<u64>, export: &VhostUserExport, piece: &mut [u8]) -> Result<u64, RequestFailure> {
        let device = export.device.reader();
        for (offset, length) in pieces(range, piece.len()) {
            let bytes = piece.get_mut(..length).unwrap_or_default();
            device.read_at(bytes, offset)?;
            self.memory.scatter(&self.chain.writable, offset - range.start, bytes)?;
        }
        Ok(range.end - range.start)
    }

    fn write(&self, range: &Range<u64>, device: &dyn BlockDeviceMut, piece: &mut [u8]) -> Result<(), RequestFailure> {
        for (offset, length) in pieces(range, piece.len()) {
            let bytes = piece.get_mut(..length).unwrap_or_default();
            let place = HEADER_BYTES as u64 + (offset - range.start);
            self.memory.gather(&self.chain.readable, place, bytes)?;
            device.write_at(bytes, offset)?;
        }
        Ok(())
    }
}

/// The parts of a range: offsets and lengths of at most `length_max`.
fn pieces(range: &Range<u64>, length_max: usize) -> impl Iterator<Item = (u64, usize)> + use<> {
    let end = range.end;
    let length_max = length_max.max(1);
    let starts = (range.start..end).step_by(length_max);
    starts.map(move |start| (start, to_usize((end - start).min(length_max as u64))))
}

fn write_zeroes(device: &dyn BlockDeviceMut, zeroed: &ZeroedRange) -> Result<(), DeviceError> {
    match zeroed.space {
        FreedSpace::MayBeReleased => device.write_zeroes(zeroed.range.clone()),
        FreedSpace::StaysAllocated => {
            static ZEROES: [u8; ZERO_BYTES] = [0; ZERO_BYTES];
            for (offset, length) in pieces(&zeroed.range, ZEROES.len()) {
                device.write_at(ZEROES.get(..length).unwrap_or_default(), offset)?;
            }
            Ok(())
        }
    }
}

/// Loads a descriptor of a chain.
pub(super) fn load_descriptor(memory: &GuestMap) -> impl Fn(u64) -> Option<[u8; 16]> {
    move |address| {
        let mut bytes = [0; 16];
        let segment = Segment { address, length: 16 };
        memory.gather(&[segment], 0, &mut bytes).ok()?;
        Some(bytes)
    }
}
