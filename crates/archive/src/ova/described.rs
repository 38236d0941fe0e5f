//! The disks of a package, by its descriptor.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use holdfast_hardware::ovf::{OvfDisk, OvfPackage};

use crate::reader::{ArchiveDisk, DiskContent};
use crate::tar::plain_name;
use crate::{Error, Result};

/// Tolerated difference of the sizes by descriptor and image: a descriptor may round up to its unit, an image to its last block.
const UNIT_BYTES: u64 = 1 << 20;

/// The file of a disk, as the descriptor describes it.
pub(super) struct DescribedFile {
    /// Its possible names; empty for a disk without a file.
    pub(super) names: Vec<String>,
    pub(super) is_raw: bool,
    /// The unit of its size.
    pub(super) unit_bytes: u64,
    /// Whether the capacity may be the length of the file instead of the size of the disk.
    pub(super) may_count_file: bool,
    /// The member that it was read from.
    pub(super) member: Option<String>,
}

/// The disks of a package with their files; disks without a file come last.
pub(super) fn described_disks(package: OvfPackage) -> Result<(Vec<ArchiveDisk>, Vec<DescribedFile>)> {
    // Media of drives are not disks of the package: they are skipped.
    let disks = package.disks.into_iter().filter(|disk| !disk.format.is_empty());
    let described: Result<Vec<(ArchiveDisk, DescribedFile)>> = disks.map(described).collect();
    Ok(described?.into_iter().unzip())
}

fn described(disk: OvfDisk) -> Result<(ArchiveDisk, DescribedFile)> {
    if let Some(file) = &disk.file
        && (file.chunk_bytes.is_some() || !matches!(file.compression.as_deref().unwrap_or_default(), "" | "identity"))
    {
        return Err(Error::Unsupported {
            feature: format!("the file {:?} in chunks, or compressed by itself", file.href),
            detail: "have it exported again without".to_owned(),
        });
    }
    if disk.parent_ref.is_some() {
        return Err(Error::Unsupported {
            feature: format!("the disk {}, which is a difference to another one", disk.key),
            detail: "have it exported as whole disks".to_owned(),
        });
    }
    let Some(size_bytes) = disk.capacity_bytes else {
        return Err(Error::Unsupported {
            feature: format!(
                "the disk {}, of which the descriptor does not say how large it is",
                disk.key
            ),
            detail: "write its size into ovf:capacity of the descriptor".to_owned(),
        });
    };
    let is_raw = disk.format.contains("raw");
    let (content, names, may_count_file) = match &disk.file {
        None => (DiskContent::Blank, Vec::new(), false),
        Some(file) => {
            let names = file.names().into_iter().map(plain_name).collect();
            let is_of_file = file.size_bytes.is_none_or(|length| length == size_bytes);
            (DiskContent::Stored, names, is_of_file && !is_raw)
        }
    };
    let disk_of_archive = ArchiveDisk {
        key: disk.key,
        size_bytes,
        content,
    };
    let file = DescribedFile {
        names,
        is_raw,
        unit_bytes: disk.capacity_unit_bytes.max(UNIT_BYTES),
        may_count_file,
        member: None,
    };
    Ok((disk_of_archive, file))
}
