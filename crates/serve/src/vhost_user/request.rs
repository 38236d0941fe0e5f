//! Requests of a virtio block device (section 5.2.6): header and lengths in, an action out. Pure.

use std::ops::Range;

use super::config::{
    DiskProperties, GuestAccess, RANGE_COUNT_MAX, RANGE_SECTOR_COUNT_MAX, SECTOR_BYTES, TRANSFER_BYTES_MAX,
};

pub(super) const HEADER_BYTES: usize = 16;
/// Size of a serial number.
pub(super) const SERIAL_BYTES: usize = 20;

const RANGE_BYTES: usize = 16;
/// The longest payload of a request with ranges.
pub(super) const RANGES_BYTES_MAX: u64 = RANGE_COUNT_MAX as u64 * RANGE_BYTES as u64;
/// The flag of a range of zeroes whose space may be released.
const UNMAP: u32 = 1;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

/// The result of a request, as the guest sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestStatus {
    Success,
    Failed,
    Unsupported,
}

impl RequestStatus {
    pub(super) fn byte(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Failed => 1,
            Self::Unsupported => 2,
        }
    }
}

/// What a request does. All ranges are inside the disk and aligned to its sectors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    Read(Range<u64>),
    Write(Range<u64>),
    Flush,
    /// Writes the serial number.
    Identify,
    Discard(Vec<Range<u64>>),
    WriteZeroes(Vec<ZeroedRange>),
}

/// A range to be filled with zeroes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ZeroedRange {
    pub(super) range: Range<u64>,
    pub(super) space: FreedSpace,
}

/// What happens to the space of zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FreedSpace {
    MayBeReleased,
    /// "If unmap is clear, the device SHOULD NOT deallocate".
    StaysAllocated,
}

/// The parts of a request that decide what it does.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestParts<'a> {
    pub(super) header: [u8; HEADER_BYTES],
    /// Bytes after the header that the device reads.
    pub(super) sent_bytes: u64,
    /// Bytes before the status that the device writes.
    pub(super) expected_bytes: u64,
    /// The first bytes after the header, at most [`RANGES_BYTES_MAX`]: needed only by requests with ranges.
    pub(super) payload: &'a [u8],
}

/// The kind of a request, which decides whether its payload is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Payload {
    Data,
    Ranges,
}

/// What the bytes after this header are.
pub(super) fn payload_of(header: [u8; HEADER_BYTES]) -> Payload {
    match fields(header).0 {
        DISCARD | WRITE_ZEROES => Payload::Ranges,
        _ => Payload::Data,
    }
}

/// Type and position.
#[expect(clippy::many_single_char_names, reason = "a name for each byte of a layout")]
fn fields(header: [u8; HEADER_BYTES]) -> (u32, u64) {
    let [a, b, c, d, _, _, _, _, i, j, k, l, m, n, o, p] = header;
    (
        u32::from_le_bytes([a, b, c, d]),
        u64::from_le_bytes([i, j, k, l, m, n, o, p]),
    )
}

/// Checks a request.
pub(super) fn action_of(parts: &RequestParts<'_>, disk: &DiskProperties) -> Result<Action, RequestStatus> {
    let (kind, sector) = fields(parts.header);
    match kind {
        IN if parts.sent_bytes == 0 => range_of(sector, parts.expected_bytes, disk).map(Action::Read),
        OUT if parts.expected_bytes == 0 => {
            require_writable(disk)?;
            range_of(sector, parts.sent_bytes, disk).map(Action::Write)
        }
        FLUSH => Ok(Action::Flush),
        GET_ID => Ok(Action::Identify),
        DISCARD => {
            let ranges = ranges_of(parts, disk)?.into_iter();
            let discarded = ranges.map(|(range, flags)| match flags {
                0 => Ok(range),
                // "The device MUST set the status byte to VIRTIO_BLK_S_UNSUPP for discard commands if the unmap flag is
                // set", and for unknown flags.
                _ => Err(RequestStatus::Unsupported),
            });
            discarded.collect::<Result<_, _>>().map(Action::Discard)
        }
        WRITE_ZEROES => {
            let ranges = ranges_of(parts, disk)?.into_iter();
            let zeroed = ranges.map(|(range, flags)| match flags {
                0 => Ok(ZeroedRange {
                    range,
                    space: FreedSpace::StaysAllocated,
                }),
                UNMAP => Ok(ZeroedRange {
                    range,
                    space: FreedSpace::MayBeReleased,
                }),
                _ => Err(RequestStatus::Unsupported),
            });
            zeroed.collect::<Result<_, _>>().map(Action::WriteZeroes)
        }
        IN | OUT => Err(RequestStatus::Failed),
        _ => Err(RequestStatus::Unsupported),
    }
}

fn require_writable(disk: &DiskProperties) -> Result<(), RequestStatus> {
    match disk.access {
        GuestAccess::Writable => Ok(()),
        GuestAccess::ReadOnly => Err(RequestStatus::Failed),
    }
}

/// The bytes of a read or write.
fn range_of(sector: u64, length: u64, disk: &DiskProperties) -> Result<Range<u64>, RequestStatus> {
    if length > TRANSFER_BYTES_MAX {
        return Err(RequestStatus::Failed);
    }
    aligned_range(sector, length, disk)
}

fn aligned_range(sector: u64, length: u64, disk: &DiskProperties) -> Result<Range<u64>, RequestStatus> {
    let sector_size = u64::from(disk.sector_size.bytes());
    let start = sector.checked_mul(SECTOR_BYTES).ok_or(RequestStatus::Failed)?;
    let end = start.checked_add(length).ok_or(RequestStatus::Failed)?;
    let is_aligned = start.is_multiple_of(sector_size) && length.is_multiple_of(sector_size);
    if is_aligned && end <= disk.size_bytes {
        Ok(start..end)
    } else {
        Err(RequestStatus::Failed)
    }
}

/// The ranges of a request and their flags.
#[expect(clippy::many_single_char_names, reason = "a name for each byte of a layout")]
fn ranges_of(parts: &RequestParts<'_>, disk: &DiskProperties) -> Result<Vec<(Range<u64>, u32)>, RequestStatus> {
    require_writable(disk)?;
    let is_complete = parts.payload.len() as u64 == parts.sent_bytes;
    let is_valid = parts.sent_bytes > 0
        && parts.sent_bytes <= RANGES_BYTES_MAX
        && parts.sent_bytes.is_multiple_of(RANGE_BYTES as u64);
    if !is_complete || !is_valid || parts.expected_bytes > 0 {
        return Err(RequestStatus::Failed);
    }
    let (ranges, _) = parts.payload.as_chunks::<{ RANGE_BYTES }>();
    let parse = |range: &[u8; RANGE_BYTES]| {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *range;
        let sector = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        let count = u32::from_le_bytes([i, j, k, l]);
        let flags = u32::from_le_bytes([m, n, o, p]);
        if count > RANGE_SECTOR_COUNT_MAX {
            return Err(RequestStatus::Failed);
        }
        Ok((aligned_range(sector, u64::from(count) * SECTOR_BYTES, disk)?, flags))
    };
    ranges.iter().map(parse).collect()
}

#[cfg(test)]
mod tests;
