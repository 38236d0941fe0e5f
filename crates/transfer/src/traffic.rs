//! What the connections of a copy carry: how fast, and how much smaller compression makes it.

use std::time::Duration;

/// Bytes of frames with data that are written to a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FrameBytes {
    /// Before compression.
    pub plain_bytes: u64,
    /// As written.
    pub wire_bytes: u64,
}

impl FrameBytes {
    /// What was added to `earlier` counts.
    pub(crate) fn since(self, earlier: Self) -> Self {
        Self {
            plain_bytes: self.plain_bytes - earlier.plain_bytes,
            wire_bytes: self.wire_bytes - earlier.wire_bytes,
        }
    }
}

/// Counts of all connections of a copy. They only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LinkTraffic {
    /// Bytes of frames with data, before compression, that the receiver applied while others were under way.
    pub applied_bytes: u64,
    /// How long that took. The latency of a connection on which little is under way says nothing about its bandwidth.
    pub applied_in: Duration,
    /// Frames with data that were written.
    pub written: FrameBytes,
}

impl LinkTraffic {
    /// What was added to `earlier` counts.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        Self {
            applied_bytes: self.applied_bytes - earlier.applied_bytes,
            applied_in: self.applied_in.saturating_sub(earlier.applied_in),
            written: self.written.since(earlier.written),
        }
    }

    pub(crate) fn add_applied(&mut self, bytes: u64, took: Duration) {
        self.applied_bytes = self.applied_bytes.saturating_add(bytes);
        self.applied_in += took;
    }

    pub(crate) fn add_written(&mut self, written: FrameBytes) {
        self.written.plain_bytes += written.plain_bytes;
        self.written.wire_bytes += written.wire_bytes;
    }
}

/// The part of data that is left of it after compression, from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WireShare {
    millionths: u64,
}

impl WireShare {
    /// Nothing was compressed.
    pub(crate) const WHOLE: Self = Self { millionths: 1_000_000 };

    pub(crate) fn of(written: FrameBytes) -> Self {
        let millionths = u128::from(written.wire_bytes) * 1_000_000 / u128::from(written.plain_bytes.max(1));
        let millionths = u64::try_from(millionths).unwrap_or(u64::MAX);
        match written.plain_bytes {
            0 => Self::WHOLE,
            _ => Self { millionths }.clamp(Self { millionths: 1 }, Self::WHOLE),
        }
    }

    /// The bytes on the wire of this many bytes of frames.
    pub(crate) fn wire_bytes(self, plain_bytes: u64) -> u64 {
        scaled(plain_bytes, self.millionths, Self::WHOLE.millionths)
    }

    /// The bytes of frames that become this many bytes on the wire.
    pub(crate) fn plain_bytes(self, wire_bytes: u64) -> u64 {
        scaled(wire_bytes, Self::WHOLE.millionths, self.millionths)
    }
}

/// Bytes per second that a connection carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bandwidth {
    Unknown,
    /// The receiver has not said what it has applied: how fast the frames were read. A small disk is sent before.
    Guessed(u64),
    Measured(u64),
}

impl Bandwidth {
    pub(crate) fn bytes_per_s(self) -> u64 {
        match self {
            Self::Unknown => 0,
            Self::Guessed(rate) | Self::Measured(rate) => rate,
        }
    }

    /// With another measured value, which has half of the weight.
    pub(crate) fn measured(self, rate: u64) -> Self {
        match self {
            Self::Measured(last) => Self::Measured(last / 2 + rate / 2),
            Self::Unknown | Self::Guessed(_) => Self::Measured(rate),
        }
    }

    pub(crate) fn guessed(self, rate: u64) -> Self {
        match self {
            Self::Measured(_) => self,
            Self::Guessed(last) => Self::Guessed(last / 2 + rate / 2),
            Self::Unknown => Self::Guessed(rate),
        }
    }
}

pub(crate) fn bytes_per_s(bytes: u64, time: Duration) -> u64 {
    let rate = u128::from(bytes) * 1_000_000_000 / time.as_nanos().max(1);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

fn scaled(bytes: u64, multiplier: u64, divisor: u64) -> u64 {
    let scaled = u128::from(bytes) * u128::from(multiplier) / u128::from(divisor);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}
