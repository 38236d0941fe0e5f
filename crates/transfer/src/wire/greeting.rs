//! The messages before the first data: HELLO, OFFER and ACCEPT.

#![deny(clippy::indexing_slicing)]

use super::capability::Capabilities;
use super::control::STREAM_COUNT_MAX;
use super::field::{FieldReader, FieldWriter};
use crate::layout::UnitLayout;
use crate::{Error, Result};

/// First bytes of HELLO.
const MAGIC: [u8; 4] = *b"HFLC";
/// The version of the protocol that this program knows.
pub const PROTOCOL_VERSION: u16 = 1;

/// The identity of a copy: 16 random bytes that the sender chooses at its first start, and keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub [u8; 16]);

/// The identity of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DiskId(pub [u8; 16]);

/// The identity of what a receiver holds: 16 random bytes that it chooses when it accepts a new copy.
///
/// It distinguishes the receivers of one session. Only the receiver that sealed a copy can say who owns the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReceiverId(pub [u8; 16]);

/// The versions of the protocol that a side knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VersionRange {
    /// The lowest version.
    pub lowest: u16,
    /// The highest version.
    pub highest: u16,
}

impl VersionRange {
    /// The versions that this program knows.
    pub const KNOWN: Self = Self {
        lowest: PROTOCOL_VERSION,
        highest: PROTOCOL_VERSION,
    };

    /// The highest version that both sides know.
    pub fn common(self, other: Self) -> Option<u16> {
        let version = self.highest.min(other.highest);
        (version >= self.lowest.max(other.lowest)).then_some(version)
    }
}

/// The first message of both sides, on every stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The known versions.
    pub versions: VersionRange,
    /// What the side can do.
    pub capabilities: Capabilities,
    /// The session of the sender; the receiver repeats it.
    pub session: SessionId,
    /// A random number of the connection, chosen by the sender; the receiver repeats it. The streams of one connection
    /// have the same number, so that streams of an older connection are not added to a newer one.
    pub connection: u64,
    /// Name and version of the program, for messages to people.
    pub program: String,
}

impl Hello {
    pub(super) fn encode(&self, to: &mut FieldWriter<'_>) {
        to.bytes(&MAGIC);
        to.u16(self.versions.lowest);
        to.u16(self.versions.highest);
        to.u64(self.capabilities.0);
        to.bytes(&self.session.0);
        to.u64(self.connection);
        to.text(&self.program);
    }

    pub(super) fn decode(from: &mut FieldReader<'_>) -> Result<Self> {
        if from.array()? != MAGIC {
            return Err(from.malformed("the peer is not a side of a live copy"));
        }
        let versions = VersionRange {
            lowest: from.u16()?,
            highest: from.u16()?,
        };
        if versions.lowest > versions.highest {
            return Err(from.malformed("the lowest version is above the highest"));
        }
        Ok(Self {
            versions,
            capabilities: Capabilities(from.u64()?),
            session: SessionId(from.array()?),
            connection: from.u64()?,
            program: from.text()?,
        })
    }
}

/// The disk that the sender offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// The disk.
    pub disk: DiskId,
    /// Its size, and that of its units.
    pub layout: UnitLayout,
    /// Bytes of the disk that one mark of the tracker covers.
    pub granularity_bytes: u32,
    /// Number of streams that the sender would use, at least 1.
    pub stream_count: u16,
}

impl Offer {
    pub(super) fn encode(&self, to: &mut FieldWriter<'_>) {
        to.bytes(&self.disk.0);
        to.u64(self.layout.size_bytes());
        to.u32(self.layout.unit_bytes());
        to.u32(self.granularity_bytes);
        to.u16(self.stream_count);
    }

    pub(super) fn decode(from: &mut FieldReader<'_>) -> Result<Self> {
        let disk = DiskId(from.array()?);
        let (size_bytes, unit_bytes) = (from.u64()?, from.u32()?);
        let offer = Self {
            disk,
            layout: UnitLayout::new(size_bytes, unit_bytes)?,
            granularity_bytes: from.u32()?,
            stream_count: from.u16()?,
        };
        if offer.stream_count == 0 || offer.stream_count > STREAM_COUNT_MAX {
            return Err(from.malformed("the number of streams is not 1 to 64"));
        }
        Ok(offer)
    }
}

/// The answer to an offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accept {
    /// What the receiver holds.
    pub receiver: ReceiverId,
    /// Bytes of frames with data that may be under way, that is, sent and not credited.
    pub window_bytes: u64,
    /// Number of streams to use: at least 1, at most as many as offered.
    pub stream_count: u16,
    /// The last synchronization that the receiver has made durable; 0 if none.
    pub sync: u64,
    /// The units that it holds since then.
    pub held: HeldUnits,
}

impl Accept {
    pub(super) fn encode(&self, to: &mut FieldWriter<'_>) {
        to.bytes(&self.receiver.0);
        to.u64(self.window_bytes);
        to.u16(self.stream_count);
        to.u64(self.sync);
        to.bytes(&self.held.map);
    }

    pub(super) fn decode(from: &mut FieldReader<'_>) -> Result<Self> {
        let accept = Self {
            receiver: ReceiverId(from.array()?),
            window_bytes: from.u64()?,
            stream_count: from.u16()?,
            sync: from.u64()?,
            held: HeldUnits {
                map: from.rest().to_vec(),
            },
        };
        if accept.stream_count == 0 || accept.stream_count > STREAM_COUNT_MAX {
            return Err(from.malformed("the number of streams is not 1 to 64"));
        }
        Ok(accept)
    }

    pub(super) fn payload_bytes(&self) -> u64 {
        34 + self.held.map.len() as u64
    }
}

/// A set of units: one bit each, the lowest bit of a byte first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldUnits {
    map: Vec<u8>,
}

impl HeldUnits {
    /// No unit of a disk.
    pub fn none(layout: UnitLayout) -> Self {
        Self {
            map: vec![0; Self::map_bytes(layout)],
        }
    }

    /// Every unit of a disk.
    pub fn all(layout: UnitLayout) -> Self {
        let mut all = Self::none(layout);
        (0..layout.unit_count()).for_each(|unit| all.insert(unit));
        all
    }

    /// Adds a unit, which must exist.
    pub fn insert(&mut self, unit: u64) {
        let place = self.map.get_mut(holdfast_block::to_usize(unit / 8));
        *place.expect("the unit exists") |= 1 << (unit % 8);
    }

    /// Whether the set has a unit.
    pub fn contains(&self, unit: u64) -> bool {
        let byte = self.map.get(holdfast_block::to_usize(unit / 8));
        byte.is_some_and(|byte| byte >> (unit % 8) & 1 == 1)
    }

    /// Refuses a set that is not for a disk of this layout.
    pub(crate) fn check(&self, layout: UnitLayout) -> Result<()> {
        if self.map.len() == Self::map_bytes(layout) {
            Ok(())
        } else {
            Err(Error::Malformed {
                message: "ACCEPT",
                detail: "the map of units is not as long as the disk",
            })
        }
    }

    fn map_bytes(layout: UnitLayout) -> usize {
        holdfast_block::to_usize(layout.unit_count().div_ceil(8))
    }
}
