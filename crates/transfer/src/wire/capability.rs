//! What a side can do beyond the basic protocol.

use std::ops::{BitAnd, BitOr};

/// A set of capabilities. A session uses those that both sides have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capabilities(pub u64);

impl Capabilities {
    /// Data is made durable on request. Without it, everything is made durable while the guest is frozen.
    pub const SYNC: Self = Self(1 << 0);
    /// Units are compared by hash. Without it, an interrupted copy may begin again.
    pub const HASHES: Self = Self(1 << 1);
    /// Data may be compressed. Without it, data is sent as it is.
    pub const COMPRESSION: Self = Self(1 << 2);
    /// All that this program has.
    pub const ALL: Self = Self(Self::SYNC.0 | Self::HASHES.0 | Self::COMPRESSION.0);

    /// The others.
    #[must_use]
    pub fn without(self, unwanted: Self) -> Self {
        Self(self.0 & !unwanted.0)
    }

    /// Whether all of `wanted` are in the set.
    pub fn has(self, wanted: Self) -> bool {
        self.0 & wanted.0 == wanted.0
    }
}

impl BitAnd for Capabilities {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl BitOr for Capabilities {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}
