//! Creates images.

use super::SECTOR_BYTES;
use super::header::{HEADER_BYTES, PloopHeader, PloopVersion};
use crate::file::ImageFile;
use crate::model::bytes::round_up;
use crate::{Error, Result};

/// The default of Parallels and ploop.
pub(crate) const CLUSTER_BYTES: u64 = 1 << 20;

/// The header of an empty image of `size_bytes`, a multiple of 512.
///
/// # Errors
/// The size is not possible.
pub(crate) fn new_header(size_bytes: u64, cluster_bytes: u64) -> Result<PloopHeader> {
    let entry_count = size_bytes.div_ceil(cluster_bytes);
    let data_offset = round_up(HEADER_BYTES + entry_count * 4, cluster_bytes);
    // The first cluster follows the table, and the number of the last one must fit into an entry.
    if data_offset / SECTOR_BYTES + entry_count > u64::from(u32::MAX) / 2 {
        return Err(Error::InvalidOption {
            option: "size",
            detail: format!("a Parallels image cannot have {size_bytes} bytes"),
        });
    }
    Ok(PloopHeader {
        version: PloopVersion::Two,
        cluster_bytes,
        entry_count,
        disk_bytes: size_bytes,
        data_offset,
        is_open: false,
    })
}

/// Writes an empty image of `size_bytes`, a multiple of 512, into the empty `file`; durable when this returns.
pub(crate) fn write_empty(file: &dyn ImageFile, size_bytes: u64, cluster_bytes: u64) -> Result<()> {
    let header = new_header(size_bytes, cluster_bytes)?;
    // The header is written last: without it the file is not a valid image.
    file.set_length(header.data_offset)?;
    file.sync()?;
    file.write_at(&header.to_bytes(), 0)?;
    Ok(file.sync()?)
}
