//! Writing a VMA.

use std::collections::VecDeque;
use std::io::Write;
use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;
use std::thread::Scope;

use holdfast_block::{BlockDevice, ExtentKind, is_zero, to_usize};

use super::format::{
    BLOCK_BYTES, CLUSTER_BYTES, ClusterInfo, DEVICE_BYTES_MAX, EXTENT_BYTES, EXTENT_CLUSTER_COUNT, MEMORY_NAME, put,
    write_extent, write_header,
};
use crate::ordered_pool::{OrderedResults, Threads};
use crate::{Error, Result};

/// Bytes of a disk that an extent is about.
const UNIT_BYTES: u64 = EXTENT_CLUSTER_COUNT as u64 * CLUSTER_BYTES;
/// Proxmox leaves the last number to nobody.
const DISK_COUNT_MAX: usize = 254;
/// Proxmox counts in sectors, and would lose what is behind the last.
const SECTOR_BYTES: u64 = 512;
const RANGE_COUNT_MAX: usize = 256;

/// A disk that is to be in an archive.
#[derive(Clone)]
pub struct VmaDisk<'d> {
    /// By what the configuration refers to it: `drive-scsi0`.
    pub device_name: String,
    /// Its content: a multiple of 512 bytes.
    pub device: Arc<dyn BlockDevice + 'd>,
}

/// How an archive is written.
#[derive(Debug, Clone, Copy)]
pub struct VmaWriteOptions {
    /// Threads that read and look for zeroes.
    pub threads: NonZero<usize>,
    /// When the archive was made, in seconds since 1970.
    pub time: u64,
    /// The archive's own UUID, by which its parts know each other.
    pub uuid: [u8; 16],
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VmaWritten {
    /// Bytes of the archive.
    pub bytes: u64,
    /// Bytes of disks that are in it.
    pub data_bytes: u64,
}

/// Writes an archive: configurations, each with its name, of which Proxmox wants one called `qemu-server.conf`, and disks, one after the
/// other.
///
/// Blocks of 4 KiB that are zero are left out. `progress` is told how many bytes of the disks are done, the zeroes among them, and stops it
/// by an error.
///
/// # Errors
/// [`Error::InvalidOption`]: a configuration or a disk that the format has no place for. Reading the disks, writing, what `progress` gives.
/// What was written until then is no archive.
pub fn write_vma(
    output: &mut dyn Write,
    config: &[(String, Vec<u8>)],
    disks: &[VmaDisk<'_>],
    options: VmaWriteOptions,
    progress: &mut dyn FnMut(u64) -> std::io::Result<()>,
) -> Result<VmaWritten> {
    let devices: Vec<(&str, u64)> = disks
        .iter()
        .map(|disk| (&*disk.device_name, disk.device.size_bytes()))
        .collect();
    check_devices(&devices)?;
    let mut written = VmaWritten::default();
    let mut put = |bytes: &[u8], written: &mut VmaWritten| {
        let offset = written.bytes;
        written.bytes += bytes.len() as u64;
        output
            .write_all(bytes)
            .map_err(|source| Error::Write { offset, source })
    };
    put(
        &write_header(&options.uuid, options.time, config, &devices)?,
        &mut written,
    )?;
    let mut before = 0;
    for (disk, number) in disks.iter().zip(1..) {
        std::thread::scope(|scope| {
            let extents = extents(scope, disk, number, options);
            while let Some(extent) = extents.next().map_err(|source| Error::Read { offset: 0, source })? {
                let extent = extent?;
                put(&extent.bytes, &mut written)?;
                written.data_bytes += extent.data_bytes;
                progress(before + extent.end).map_err(|source| Error::Write {
                    offset: written.bytes,
                    source,
                })?;
            }
            Ok::<(), Error>(())
        })?;
        before += disk.device.size_bytes();
    }
    output.flush().map_err(|source| Error::Write {
        offset: written.bytes,
        source,
    })?;
    Ok(written)
}

fn check_devices(devices: &[(&str, u64)]) -> Result<()> {
    let refuse = |detail: String| {
        Err(Error::InvalidOption {
            option: "disk of a VMA",
            detail,
        })
    };
    if devices.len() > DISK_COUNT_MAX {
        return refuse(format!(
            "there are {}; at most {DISK_COUNT_MAX} have a place",
            devices.len()
        ));
    }
    for (place, (name, size_bytes)) in devices.iter().enumerate() {
        if devices[..place].iter().any(|(other, _)| other == name) {
            return refuse(format!("{name} is there twice"));
        }
        if *name == MEMORY_NAME {
            return refuse(format!("{name} is what the memory of a machine is called"));
        }
        if *size_bytes == 0 || *size_bytes > DEVICE_BYTES_MAX || *size_bytes % SECTOR_BYTES != 0 {
            return refuse(format!(
                "{name} has {size_bytes} bytes; multiples of {SECTOR_BYTES} up to {DEVICE_BYTES_MAX} have a place"
            ));
        }
    }
    Ok(())
}

/// An extent, as it is written.
struct Extent {
    bytes: Vec<u8>,
    data_bytes: u64,
    /// How far of the disk it reaches.
    end: u64,
}

/// The extents of a disk, in order.
fn extents<'scope>(
    scope: &'scope Scope<'scope, '_>,
    disk: &'scope VmaDisk<'_>,
    number: u8,
    options: VmaWriteOptions,
) -> OrderedResults<Result<Extent>> {
    let mut units = ExtentRanges {
        device: &*disk.device,
        at: 0,
        data: VecDeque::new(),
        asked: 0,
    };
    let threads = Threads {
        count: options.threads,
        load_max: None,
    };
    OrderedResults::start_within(
        scope,
        threads,
        move || units.next().transpose(),
        || {
            let mut buffer = Vec::new();
            move |unit: Result<ExtentRange>| extent(&*disk.device, number, &options.uuid, &unit?, &mut buffer)
        },
    )
}

/// A part of a disk that becomes an extent.
struct ExtentRange {
    /// Begins at a cluster, and has at most [`UNIT_BYTES`].
    range: Range<u64>,
    /// Which of its clusters may be data, the first by the lowest bit.
    data: u64,
}

/// The parts of a disk.
struct ExtentRanges<'d> {
    device: &'d dyn BlockDevice,
    at: u64,
    /// What may be data and lies behind `at`.
    data: VecDeque<Range<u64>>,
    /// How far the disk was asked.
    asked: u64,
}

impl ExtentRanges<'_> {
    fn next(&mut self) -> Result<Option<ExtentRange>> {
        let size_bytes = self.device.size_bytes();
        if self.at >= size_bytes {
            return Ok(None);
        }
        let range = self.at..size_bytes.min(self.at + UNIT_BYTES);
        while self.asked < range.end {
            let list = self.device.extents(self.asked..size_bytes, RANGE_COUNT_MAX)?;
            let data = list.as_slice().iter().filter(|extent| extent.kind == ExtentKind::Data);
            self.data.extend(data.map(|extent| extent.offset..extent.end()));
            self.asked = list.end();
        }
        let mut mask = 0;
        while let Some(data) = self.data.front().filter(|data| data.start < range.end) {
            let (start, end) = (data.start.max(range.start), data.end.min(range.end));
            for cluster in (start - range.start) / CLUSTER_BYTES..(end - range.start).div_ceil(CLUSTER_BYTES) {
                mask |= 1 << cluster;
            }
            if data.end > range.end {
                break;
            }
            self.data.pop_front();
        }
        self.at = range.end;
        Ok(Some(ExtentRange { range, data: mask }))
    }
}

/// Reads a part of a disk, and makes an extent of it.
fn extent(
    device: &dyn BlockDevice,
    number: u8,
    uuid: &[u8; 16],
    unit: &ExtentRange,
    buffer: &mut Vec<u8>,
) -> Result<Extent> {
    let Range { start, end } = unit.range.clone();
    let mut extent = Extent {
        bytes: vec![0; EXTENT_BYTES],
        data_bytes: 0,
        end,
    };
    let mut infos: Vec<ClusterInfo> = Vec::with_capacity(EXTENT_CLUSTER_COUNT);
    let mut at = start;
    while at < end {
        // Clusters side by side are read at once.
        let run = u64::from((unit.data >> infos.len()).trailing_ones());
        let clusters = at..end.min(at + run.max(1) * CLUSTER_BYTES);
        buffer.clear();
        if run > 0 {
            buffer.resize(to_usize(clusters.end - at), 0);
            device.read_at(buffer, at)?;
        }
        let mut contents = buffer.chunks(to_usize(CLUSTER_BYTES));
        while at < clusters.end {
            infos.push(ClusterInfo {
                device: number,
                // The size of the disk was checked: all numbers are shorter.
                cluster: u32::try_from(at / CLUSTER_BYTES).unwrap_or(u32::MAX),
                mask: contents.next().map_or(0, |content| append_blocks(content, &mut extent)),
            });
            at += CLUSTER_BYTES;
        }
    }
    put(&mut extent.bytes, 0, &write_extent(uuid, &infos));
    Ok(extent)
}

/// Appends the blocks of a cluster that are not zero; tells which.
fn append_blocks(content: &[u8], extent: &mut Extent) -> u16 {
    let mut mask = 0;
    for (block, number) in content.chunks(to_usize(BLOCK_BYTES)).zip(0..u16::BITS) {
        if is_zero(block) {
            continue;
        }
        mask |= 1 << number;
        extent.bytes.extend(block);
        // The last block of a disk may be short, and is stored whole.
        let padding = to_usize(BLOCK_BYTES) - block.len();
        extent.bytes.resize(extent.bytes.len() + padding, 0);
        extent.data_bytes += block.len() as u64;
    }
    mask
}
