//! A volume, and its bytes as a device.

use std::ops::Range;
use std::sync::Arc;

use holdfast_block::{BlockDevice, ExtentKind, ExtentList, Result, to_usize};

use super::{Content, DiskSource};

/// A range of a disk that belongs to a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeSegment {
    /// Index of the disk.
    pub disk: usize,
    /// First byte on the disk.
    pub start_bytes: u64,
    /// Length in bytes.
    pub size_bytes: u64,
}

/// Why a volume cannot be read although it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable(pub String);

/// A partition, a logical volume, or a disk without a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Names of the disks that it lies on; never empty.
    pub disks: Vec<String>,
    /// Its name: the number of a partition, `GROUP/VOLUME` of LVM, or `whole`.
    pub name: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// What it holds.
    pub content: Content,
    /// The label of the file system; else the name of the partition.
    pub label: Option<String>,
    /// Why its bytes cannot be read; none if they can.
    pub unreadable: Option<Unreadable>,
    /// Its bytes, in order.
    pub segments: Vec<VolumeSegment>,
}

impl Volume {
    /// The bytes of the volume on `disks`, which must be those that the volume was found on.
    pub fn device(&self, disks: &[DiskSource]) -> VolumeDevice {
        let mut parts = Vec::new();
        let mut end = 0;
        for segment in &self.segments {
            if let Some(disk) = disks.get(segment.disk) {
                end += segment.size_bytes;
                parts.push(VolumePart {
                    end,
                    start_below: segment.start_bytes,
                    size_bytes: segment.size_bytes,
                    device: Arc::clone(&disk.device),
                });
            }
        }
        VolumeDevice { parts, size_bytes: end }
    }
}

/// The bytes of a volume.
pub struct VolumeDevice {
    parts: Vec<VolumePart>,
    size_bytes: u64,
}

struct VolumePart {
    /// The first byte of the volume after this part.
    end: u64,
    start_below: u64,
    size_bytes: u64,
    device: Arc<dyn BlockDevice>,
}

impl VolumeDevice {
    /// The part that contains `offset`, the offset on its device, and the bytes left in it.
    fn part_at(&self, offset: u64) -> Option<PartPosition<'_>> {
        let number = self.parts.partition_point(|part| part.end <= offset);
        let part = self.parts.get(number)?;
        let inside = offset - (part.end - part.size_bytes);
        Some(PartPosition {
            device: &*part.device,
            offset: part.start_below + inside,
            left_bytes: part.size_bytes - inside,
        })
    }
}

struct PartPosition<'a> {
    device: &'a dyn BlockDevice,
    offset: u64,
    left_bytes: u64,
}

impl BlockDevice for VolumeDevice {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        let mut rest = buffer;
        let mut at = offset;
        while !rest.is_empty()
            && let Some(part) = self.part_at(at)
        {
            let length = part.left_bytes.min(rest.len() as u64);
            let (now, later) = rest.split_at_mut(to_usize(length));
            part.device.read_at(now, part.offset)?;
            rest = later;
            at += length;
        }
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
        let length = range.end.saturating_sub(range.start);
        self.check_bounds(range.start, length)?;
        let mut list = ExtentList::new(range.start, extent_count_max);
        list.push(length, ExtentKind::Data);
        Ok(list)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use holdfast_block::MemoryDevice;
    use holdfast_block::conformance::Conformance;

    use super::{Content, DiskSource, Volume, VolumeSegment};

    #[test]
    fn segments_of_several_disks_are_one_device() {
        let bytes: Vec<u8> = (0..60_000u32).map(|at| (at / 7 % 251).to_le_bytes()[0]).collect();
        let disks = ["vda", "vdb"].map(|name| DiskSource {
            name: name.to_owned(),
            device: Arc::new(MemoryDevice::from_bytes(&bytes)),
        });
        let segment = |disk, start_bytes, size_bytes| VolumeSegment {
            disk,
            start_bytes,
            size_bytes,
        };
        let volume = Volume {
            disks: vec!["vda".to_owned()],
            name: "vg/lv".to_owned(),
            size_bytes: 30_000,
            content: Content::Unknown,
            label: None,
            unreadable: None,
            segments: vec![segment(0, 50_000, 10_000), segment(1, 0, 5000), segment(0, 100, 15_000)],
        };
        let expected = [&bytes[50_000..], &bytes[..5000], &bytes[100..15_100]].concat();
        Conformance::new().check_read_only(&volume.device(&disks), &expected);
    }
}
