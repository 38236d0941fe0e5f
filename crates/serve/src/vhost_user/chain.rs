//! Descriptor chains (section 2.7.5): which ranges of the guest's memory a request consists of. Pure.

use super::config::QUEUE_SIZE_MAX;

/// Size of a descriptor.
pub(super) const DESCRIPTOR_BYTES: usize = 16;

const HAS_NEXT: u16 = 1;
const IS_WRITABLE: u16 = 2;
const IS_INDIRECT: u16 = 4;

/// A range of the guest's memory. It may reach past the end of the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) address: u64,
    pub(super) length: u32,
}

/// The segments of a request. The device reads some, and writes the others.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) readable: Vec<Segment>,
    pub(super) writable: Vec<Segment>,
}

/// Why a chain is not valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChainError {
    /// A descriptor or a table is outside the memory of the guest.
    OutsideMemory,
    /// An index is outside its table.
    Index,
    /// The chain has more descriptors than its table: it is a loop.
    Loop,
    /// A descriptor that the device reads follows one that the device writes (section 2.7.4.2).
    Order,
    /// A table of descriptors is nested, empty, too long, or has other descriptors beside it.
    Table,
}

impl ChainError {
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::OutsideMemory => "a descriptor is outside the memory of the guest",
            Self::Index => "a descriptor's index is outside its table",
            Self::Loop => "a chain of descriptors is a loop",
            Self::Order => "a readable descriptor follows a writable one",
            Self::Table => "an indirect table of descriptors is not valid",
        }
    }
}

/// Whether the driver may put descriptors into tables outside the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IndirectTables {
    Negotiated,
    NotNegotiated,
}

/// A table of descriptors.
#[derive(Debug, Clone, Copy)]
pub(super) struct DescriptorTable {
    pub(super) address: u64,
    pub(super) descriptor_count: u16,
}

struct RingDescriptor {
    segment: Segment,
    flags: u16,
    next: u16,
}

impl RingDescriptor {
    #[expect(clippy::many_single_char_names, reason = "a name for each byte of a layout")]
    fn parse(bytes: [u8; DESCRIPTOR_BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = bytes;
        Self {
            segment: Segment {
                address: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
                length: u32::from_le_bytes([i, j, k, l]),
            },
            flags: u16::from_le_bytes([m, n]),
            next: u16::from_le_bytes([o, p]),
        }
    }
}

/// Reads the descriptor at an address; `None` outside the memory.
pub(super) type LoadDescriptor<'a> = dyn Fn(u64) -> Option<[u8; DESCRIPTOR_BYTES]> + 'a;

/// Follows the chain that begins at `head`. It has at most [`QUEUE_SIZE_MAX`] segments.
pub(super) fn follow(
    ring: DescriptorTable,
    head: u16,
    indirect: IndirectTables,
    load: &LoadDescriptor<'_>,
) -> Result<Chain, ChainError> {
    let mut chain = Chain::default();
    let mut table = ring;
    let mut index = head;
    let mut is_nested = false;
    let mut descriptor_count = 0;
    loop {
        if index >= table.descriptor_count {
            return Err(ChainError::Index);
        }
        descriptor_count += 1;
        if descriptor_count > table.descriptor_count {
            return Err(ChainError::Loop);
        }
        let offset = u64::from(index) * DESCRIPTOR_BYTES as u64;
        let address = table.address.checked_add(offset).ok_or(ChainError::OutsideMemory)?;
        let descriptor = RingDescriptor::parse(load(address).ok_or(ChainError::OutsideMemory)?);
        if descriptor.flags & IS_INDIRECT != 0 {
            // "The driver MUST NOT set both VIRTQ_DESC_F_INDIRECT and VIRTQ_DESC_F_NEXT". Descriptors before the table
            // are legal.
            let is_last = descriptor.flags & HAS_NEXT == 0;
            if is_nested || !is_last || indirect == IndirectTables::NotNegotiated {
                return Err(ChainError::Table);
            }
            table = table_of(descriptor.segment)?;
            (is_nested, index, descriptor_count) = (true, 0, 0);
            continue;
        }
        if descriptor.flags & IS_WRITABLE != 0 {
            chain.writable.push(descriptor.segment);
        } else if chain.writable.is_empty() {
            chain.readable.push(descriptor.segment);
        } else {
            return Err(ChainError::Order);
        }
        if descriptor.flags & HAS_NEXT == 0 {
            return Ok(chain);
        }
        index = descriptor.next;
    }
}

fn table_of(segment: Segment) -> Result<DescriptorTable, ChainError> {
    let length = u64::from(segment.length);
    let count = u16::try_from(length / DESCRIPTOR_BYTES as u64).map_err(|_| ChainError::Table)?;
    if count == 0 || count > QUEUE_SIZE_MAX || length % DESCRIPTOR_BYTES as u64 != 0 {
        return Err(ChainError::Table);
    }
    Ok(DescriptorTable {
        address: segment.address,
        descriptor_count: count,
    })
}

/// Number of bytes of `segments`; at most [`QUEUE_SIZE_MAX`] times two segments of 4 GiB.
pub(super) fn byte_count(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.length)).sum()
}

/// The segments of `length` bytes from `start` on.
pub(super) fn part(segments: &[Segment], start: u64, length: u64) -> impl Iterator<Item = Segment> {
    let (mut skip, mut left) = (start, length);
    segments.iter().filter_map(move |segment| {
        let bytes = u64::from(segment.length);
        let skipped = skip.min(bytes);
        skip -= skipped;
        let taken = left.min(bytes - skipped);
        left -= taken;
        let length = u32::try_from(taken).ok().filter(|length| *length > 0)?;
        // An address that overflows is outside the memory.
        let address = segment.address.saturating_add(skipped);
        Some(Segment { address, length })
    })
}

#[cfg(test)]
mod tests;
