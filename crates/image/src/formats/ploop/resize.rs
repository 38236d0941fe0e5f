//! Changes the size: grows the cluster table, which has to fit before the clusters, zeroes data past the old end, then
//! writes the size to the header.

use std::sync::Arc;

use super::check::check;
use super::header::{AT_CYLINDERS, AT_ENTRIES, HEADER_BYTES, PloopHeader, PloopVersion};
use super::tables::PloopTables;
use super::{SECTOR_BYTES, header};
use crate::allocation_table::resize::{require_sound, zero_tables};
use crate::allocation_table::write_entries;
use crate::file::ImageFile;
use crate::{Error, Result};

/// Resizes the disk of the delta to `after_bytes`, a multiple of 512, durably.
pub(crate) fn resize(file: &Arc<dyn ImageFile>, image: &str, after_bytes: u64) -> Result<()> {
    let header = PloopHeader::load(&**file, image)?;
    require_sound(&check(&**file, &header)?, image)?;
    let not_resizable = |detail: String| Error::NotResizable {
        image: image.to_owned(),
        detail,
    };
    if header.is_open {
        return Err(not_resizable(
            "it was not closed cleanly, or is open; run holdfast image check --repair".to_owned(),
        ));
    }
    let sectors = after_bytes / SECTOR_BYTES;
    if header.version == PloopVersion::One && u32::try_from(sectors).is_err() {
        return Err(not_resizable(
            "version 1 supports at most 2 TiB; convert it first".to_owned(),
        ));
    }
    let before_bytes = header.disk_bytes;
    let zero_past = |from: u64, to: u64| -> Result<()> {
        let mut header = PloopHeader::load(&**file, image)?;
        header.disk_bytes = to;
        zero_tables(
            file,
            image,
            Box::new(PloopTables::new(image.into(), header, Arc::clone(file))),
            from..to,
        )
    };
    if after_bytes > before_bytes {
        let needed = after_bytes.div_ceil(header.cluster_bytes);
        let room = (header.data_offset - HEADER_BYTES) / 4;
        // The number of the last cluster must fit into an entry.
        let number_max = u64::from(u32::MAX) * header.entry_bytes() / header.cluster_bytes / 2;
        if needed > room.min(number_max) {
            let bytes = room.min(number_max) * header.cluster_bytes;
            return Err(not_resizable(format!(
                "the space before its clusters only suffices for the table of {bytes} bytes; convert it first"
            )));
        }
        if needed > header.entry_count {
            grow_table(&**file, header.entry_count, needed)?;
        }
        zero_past(before_bytes, after_bytes)?;
        return write_size(&**file, &header, after_bytes);
    }
    write_size(&**file, &header, after_bytes)?;
    zero_past(after_bytes, before_bytes)
}

fn grow_table(file: &dyn ImageFile, from: u64, to: u64) -> Result<()> {
    write_entries(file, HEADER_BYTES + from * 4, to - from, |_| [0; 4])?;
    file.sync()?;
    let count = u32::try_from(to).unwrap_or(u32::MAX);
    file.write_at(&count.to_le_bytes(), AT_ENTRIES)?;
    Ok(file.sync()?)
}

/// Changes one sector of the header, which is written atomically.
fn write_size(file: &dyn ImageFile, header: &PloopHeader, size_bytes: u64) -> Result<()> {
    let mut fields = [0; 20];
    file.read_at(&mut fields, AT_CYLINDERS)?;
    let cylinders = size_bytes.div_ceil(header::CYLINDER_BYTES);
    fields[..4].copy_from_slice(&u32::try_from(cylinders).unwrap_or(u32::MAX).to_le_bytes());
    // Cylinders, sectors per cluster, entries, sectors of the disk.
    let sectors = (size_bytes / SECTOR_BYTES).to_le_bytes();
    match header.version {
        PloopVersion::One => fields[12..16].copy_from_slice(&sectors[..4]),
        PloopVersion::Two => fields[12..].copy_from_slice(&sectors),
    }
    file.write_at(&fields, AT_CYLINDERS)?;
    Ok(file.sync()?)
}
