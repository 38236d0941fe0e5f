//! From disks to volumes: partition tables and LVM resolved, and what each volume holds.

#![deny(clippy::indexing_slicing, reason = "the bytes come from a guest")]

mod checksum;
mod detect;
mod gpt;
mod lvm;
mod mbr;
mod volume;

use std::sync::Arc;

use holdfast_block::{BlockDevice, SliceDevice};

use crate::{Error, Result};
pub use detect::Content;
use detect::{Detected, detect};
/// What the first bytes of a device say that it holds, and its label.
pub fn detect_content(device: &dyn BlockDevice) -> Result<(Content, Option<String>)> {
    let detected = detect(device)?;
    Ok((detected.content, detected.label))
}

pub use volume::{Unreadable, Volume, VolumeDevice, VolumeSegment};

/// A disk of a guest.
#[derive(Clone)]
pub struct DiskSource {
    /// Its name, which names its volumes: `vda`.
    pub name: String,
    /// Its bytes.
    pub device: Arc<dyn BlockDevice>,
}

/// The volumes of a set of disks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// The volumes, in the order of the disks and of their tables; logical volumes come last.
    pub volumes: Vec<Volume>,
    /// Tables that are damaged or incomplete, as sentences.
    pub notes: Vec<String>,
}

/// A range of a disk that a partition table lists.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Partition {
    number: u32,
    start_bytes: u64,
    size_bytes: u64,
    /// The name in a GPT.
    name: Option<String>,
    /// A kind of partition that cannot be read whatever its first bytes are.
    refused: Option<&'static str>,
}

/// What the first sectors of a disk are.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Table {
    Partitions(Vec<Partition>),
    /// The whole disk is one volume.
    None,
}

/// Finds all volumes of `disks`. All disks of a guest should be passed: a volume group can lie on several.
///
/// # Errors
/// Only if a disk cannot be read. Damaged tables become notes.
pub fn find_volumes(disks: &[DiskSource]) -> Result<Found> {
    let mut found = Found::default();
    let mut members = Vec::new();
    for (number, disk) in disks.iter().enumerate() {
        let partitions = match read_table(disk, &mut found.notes)? {
            Table::Partitions(partitions) => partitions,
            Table::None => vec![Partition {
                number: 0,
                start_bytes: 0,
                size_bytes: disk.device.size_bytes(),
                name: None,
                refused: None,
            }],
        };
        for partition in partitions {
            let segment = VolumeSegment {
                disk: number,
                start_bytes: partition.start_bytes,
                size_bytes: partition.size_bytes,
            };
            let end = partition.start_bytes + partition.size_bytes;
            let part = SliceDevice::new(&*disk.device, partition.start_bytes..end)?;
            let mut detected = detect(&part)?;
            if let Some(refused) = partition.refused {
                detected = Detected {
                    content: Content::Refused(refused),
                    label: None,
                };
            }
            if detected.content == Content::LvmMember {
                members.push(segment);
            }
            found.volumes.push(Volume {
                disks: vec![disk.name.clone()],
                name: volume_name(partition.number),
                size_bytes: partition.size_bytes,
                content: detected.content,
                label: detected.label.or(partition.name),
                unreadable: None,
                segments: vec![segment],
            });
        }
    }
    lvm::add_logical_volumes(disks, &members, &mut found)?;
    Ok(found)
}

/// The name of a partition, or of a volume that fills its disk.
fn volume_name(number: u32) -> String {
    if number == 0 {
        "whole".to_owned()
    } else {
        number.to_string()
    }
}

fn read_table(disk: &DiskSource, notes: &mut Vec<String>) -> Result<Table> {
    let device = &*disk.device;
    match gpt::read(device, &disk.name, notes) {
        Ok(Some(partitions)) => return Ok(Table::Partitions(partitions)),
        Ok(None) => {}
        Err(Error::Device(error)) => return Err(error.into()),
        Err(error) => {
            notes.push(format!("{}: {error}", disk.name));
            return Ok(Table::Partitions(Vec::new()));
        }
    }
    match mbr::read(device) {
        Ok(Some(partitions)) => Ok(Table::Partitions(partitions)),
        Ok(None) => Ok(Table::None),
        Err(Error::Device(error)) => Err(error.into()),
        Err(error) => {
            notes.push(format!("{}: {error}", disk.name));
            Ok(Table::Partitions(Vec::new()))
        }
    }
}

/// Reads at most `length` bytes at `offset`; fewer at the end of the device.
fn read_up_to(device: &dyn BlockDevice, offset: u64, length: u64) -> Result<Vec<u8>> {
    let length = length.min(device.size_bytes().saturating_sub(offset));
    let mut bytes = vec![0; holdfast_block::to_usize(length)];
    if !bytes.is_empty() {
        device.read_at(&mut bytes, offset)?;
    }
    Ok(bytes)
}

/// For tests with hostile bytes: the checksum of a GPT.
#[cfg(feature = "hostile")]
pub(crate) fn checksum_of(bytes: &[u8]) -> u32 {
    checksum::ieee(bytes)
}

#[cfg(feature = "hostile")]
pub(crate) use lvm::parse_text as parse_lvm_text;
