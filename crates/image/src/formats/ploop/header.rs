//! Parses and validates the header.

use holdfast_block::{Record, to_usize};

use super::SECTOR_BYTES;
use crate::Result;
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::put;
use crate::model::info::{BlockInfo, ImageKind, USUAL_SECTOR_BYTES};

pub(crate) const HEADER_BYTES: u64 = 64;
const MAGICS: [&[u8; 16]; 2] = [b"WithoutFreeSpace", b"WithouFreSpacExt"];
pub(super) const AT_CYLINDERS: u64 = 24;
pub(super) const AT_ENTRIES: u64 = 32;
pub(super) const AT_IN_USE: u64 = 44;
/// As in QEMU: 16 heads, and 32 sectors.
pub(super) const CYLINDER_BYTES: u64 = SECTOR_BYTES * 16 * 32;
pub(super) const AT_EXTENSION: u64 = 56;
const OPEN: u32 = 0x746f_6e59;
/// Written here: it means that there are no extensions, which could be outdated.
pub(super) const CLOSED_WITHOUT_EXTENSIONS: u32 = 0;

/// The unit of the entries in the cluster table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PloopVersion {
    /// Sectors.
    One,
    /// Clusters.
    Two,
}

/// A header that was validated against its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PloopHeader {
    pub(crate) version: PloopVersion,
    pub(crate) cluster_bytes: u64,
    pub(crate) entry_count: u64,
    pub(crate) disk_bytes: u64,
    pub(crate) data_offset: u64,
    pub(crate) is_open: bool,
}

impl PloopHeader {
    /// Reads the header of `file`; errors call it `image`.
    pub(crate) fn load(file: &dyn ImageFile, image: &str) -> Result<Self> {
        let file_bytes = file.length_bytes()?;
        let wrong = |at: u64, detail: String| Err(corrupt(image, "header", at, detail));
        if file_bytes < HEADER_BYTES {
            return wrong(0, format!("the file has {file_bytes} bytes, too few for a header"));
        }
        let mut bytes = [0; to_usize(HEADER_BYTES)];
        file.read_at(&mut bytes, 0)?;
        let stored = Record::new(&bytes);
        let version = match MAGICS.iter().position(|magic| bytes.starts_with(*magic)) {
            Some(0) => PloopVersion::One,
            Some(_) => PloopVersion::Two,
            None => return wrong(0, "it is missing".to_owned()),
        };
        if stored.le_u32::<16>() != 2 {
            return wrong(16, format!("the version is {}", stored.le_u32::<16>()));
        }
        let cluster_sectors = u64::from(stored.le_u32::<28>());
        if !cluster_sectors.is_power_of_two() || cluster_sectors > 1 << 21 {
            return wrong(28, format!("a cluster has {cluster_sectors} sectors"));
        }
        let cluster_bytes = cluster_sectors * SECTOR_BYTES;
        let entry_count = u64::from(stored.le_u32::<32>());
        let sectors = match version {
            PloopVersion::One => u64::from(stored.le_u32::<36>()),
            PloopVersion::Two => stored.le_u64::<36>(),
        };
        let Some(disk_bytes) = sectors
            .checked_mul(SECTOR_BYTES)
            .filter(|bytes| i64::try_from(*bytes).is_ok())
        else {
            return wrong(36, format!("the disk has {sectors} sectors"));
        };
        if disk_bytes.div_ceil(cluster_bytes) > entry_count {
            return wrong(
                32,
                format!("the table has {entry_count} entries, but the disk has {sectors} sectors"),
            );
        }
        let table_end = HEADER_BYTES + entry_count * 4;
        if table_end > file_bytes {
            return wrong(32, format!("the table ends at {table_end}, the file at {file_bytes}"));
        }
        let data_offset = match u64::from(stored.le_u32::<48>()) * SECTOR_BYTES {
            0 if version == PloopVersion::One => table_end.next_multiple_of(SECTOR_BYTES),
            offset => offset,
        };
        if data_offset < table_end {
            return wrong(48, format!("clusters begin at {data_offset}, inside the table"));
        }
        Ok(Self {
            version,
            cluster_bytes,
            entry_count,
            disk_bytes,
            data_offset,
            is_open: stored.le_u32::<44>() == OPEN,
        })
    }

    pub(crate) fn describe(&self) -> BlockInfo {
        BlockInfo {
            kind: ImageKind::Dynamic,
            block_bytes: self.cluster_bytes,
            sector_bytes: USUAL_SECTOR_BYTES,
            id: None,
            modification: None,
            parent: None,
            creator: None,
        }
    }

    /// The unit of entries, in bytes.
    pub(super) fn entry_bytes(&self) -> u64 {
        match self.version {
            PloopVersion::One => SECTOR_BYTES,
            PloopVersion::Two => self.cluster_bytes,
        }
    }

    /// Offset of the cluster of `entry`.
    pub(super) fn host(&self, entry: u32) -> u64 {
        u64::from(entry) * self.entry_bytes()
    }

    /// The stored header of a new image of version 2.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; to_usize(HEADER_BYTES)];
        let mut put = |at: usize, field: &[u8]| put(&mut bytes, at, field);
        let low = |value: u64| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
        put(0, MAGICS[1]);
        put(16, &2_u32.to_le_bytes());
        put(20, &16_u32.to_le_bytes());
        put(24, &low(self.disk_bytes.div_ceil(CYLINDER_BYTES)));
        put(28, &low(self.cluster_bytes / SECTOR_BYTES));
        put(32, &low(self.entry_count));
        put(36, &(self.disk_bytes / SECTOR_BYTES).to_le_bytes());
        put(44, &CLOSED_WITHOUT_EXTENSIONS.to_le_bytes());
        put(48, &low(self.data_offset / SECTOR_BYTES));
        bytes
    }
}
