//! The disk to use if a snapshot is named without a disk.

use holdfast_repo::{DiskContent, DiskRecord};

use crate::job::{Error, Result};
use crate::notes::is_memory;

/// The only disk, ignoring other files of the machine; an error lists the disks if there are several.
pub(crate) fn only_disk<'m>(disks: &[&'m DiskRecord]) -> Result<&'m DiskRecord> {
    let is_disk = |record: &&&DiskRecord| record.content == DiskContent::Blocks && !is_memory(record);
    let mut real = disks.iter().filter(is_disk);
    match (disks, real.next(), real.next()) {
        ([disk], ..) | (_, Some(disk), None) => Ok(disk),
        _ => Err(Error::SeveralDisks {
            disks: disks.iter().map(|disk| disk.name.clone()).collect(),
        }),
    }
}
