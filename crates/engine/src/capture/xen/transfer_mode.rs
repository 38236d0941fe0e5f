//! The methods for reading disks of a pool.

use std::fmt;

/// How disks of a pool are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XenTransfer {
    /// Random access by NBD; the pool tracks changed blocks.
    Nbd,
    /// VHD streams: only data, or only changes since a disk that the pool keeps.
    Vhd,
    /// Raw streams of the whole disk.
    Raw,
}

impl XenTransfer {
    /// The name in messages.
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
