//! The ways in which disks of a pool can be read.

use std::fmt;

/// How disks of a pool are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XenTransfer {
    /// At any place, by NBD; changed blocks are tracked by the pool.
    Nbd,
    /// As VHDs: only what has content, or has changed since a disk that the pool keeps.
    Vhd,
    /// All of their bytes.
    Raw,
}

impl XenTransfer {
    /// As it is called by people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nbd => "nbd",
            Self::Vhd => "vhd",
            Self::Raw => "raw",
        }
    }
}

impl fmt::Display for XenTransfer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}
