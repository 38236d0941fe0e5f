//! The table that links clusters.

use holdfast_block::BlockDevice;

use crate::fields::Fields;
use crate::{Error, Result};

/// Bits of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FatWidth {
    Bits12,
    Bits16,
    /// The highest four bits are reserved.
    Bits32,
    /// All 32 bits.
    Exfat,
}

/// A cluster of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChainPosition {
    /// Number of clusters before it.
    pub(super) index: u64,
    pub(super) cluster: u32,
}

/// The copy of the table that is in use.
#[derive(Debug)]
pub(super) struct FatTable {
    pub(super) width: FatWidth,
    pub(super) start: u64,
    pub(super) size_bytes: u64,
    pub(super) cluster_count: u64,
}

impl FatTable {
    /// An error if a cluster does not exist; the first has the number 2.
    pub(super) fn check(&self, cluster: u32) -> Result<()> {
        if cluster < 2 || u64::from(cluster) - 2 >= self.cluster_count {
            return Err(Error::damaged(
                "FAT",
                format!("cluster {cluster} is used, and does not exist"),
            ));
        }
        Ok(())
    }

    /// The cluster after `cluster`; none at the end of the chain.
    pub(super) fn next(&self, device: &dyn BlockDevice, cluster: u32) -> Result<Option<u32>> {
        self.check(cluster)?;
        let number = u64::from(cluster);
        let offset = match self.width {
            FatWidth::Bits12 => number + number / 2,
            FatWidth::Bits16 => number * 2,
            FatWidth::Bits32 | FatWidth::Exfat => number * 4,
        };
        let width = match self.width {
            FatWidth::Bits12 | FatWidth::Bits16 => 2,
            FatWidth::Bits32 | FatWidth::Exfat => 4,
        };
        if offset + width > self.size_bytes {
            return Err(Error::damaged("FAT", format!("it has no entry for cluster {cluster}")));
        }
        let mut bytes = [0; 4];
        let (bytes, _) = bytes.split_at_mut(holdfast_block::to_usize(width));
        device.read_at(bytes, self.start + offset)?;
        let fields = Fields::new("FAT", bytes);
        let (entry, end) = match self.width {
            FatWidth::Bits12 if cluster % 2 == 1 => (u32::from(fields.u16(0)? >> 4), 0xff8),
            FatWidth::Bits12 => (u32::from(fields.u16(0)? & 0xfff), 0xff8),
            FatWidth::Bits16 => (u32::from(fields.u16(0)?), 0xfff8),
            FatWidth::Bits32 => (fields.u32(0)? & 0x0fff_ffff, 0x0fff_fff8),
            FatWidth::Exfat => (fields.u32(0)?, 0xffff_fff8),
        };
        if entry >= end {
            return Ok(None);
        }
        self.check(entry)?;
        Ok(Some(entry))
    }
}
