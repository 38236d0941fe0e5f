//! Writing a VMA.

use std::collections::VecDeque;
use std::io::Write;
use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;
use std::thread::Scope;

use holdfast_block::{BlockDevice, ExtentKind, OrderedResults, Threads, is_zero, to_usize};

use super::format::{
    BLOCK_BYTES, CLUSTER_BYTES, ClusterInfo, DEVICE_BYTES_MAX, EXTENT_BYTES, EXTENT_CLUSTER_COUNT, MEMORY_NAME, put,
    write_extent, write_header,
};
use crate::{Error, Result};

/// Bytes of a disk per extent.
const UNIT_BYTES: u64 = EXTENT_CLUSTER_COUNT as u64 * CLUSTER_BYTES;
/// Proxmox does not use the last number.
const DISK_COUNT_MAX: usize = 254;
/// Proxmox counts in sectors, and would lose a partial one.
const SECTOR_BYTES: u64 = 512;
const RANGE_COUNT_MAX: usize = 256;

/// A disk to write into an archive.
#[derive(Clone)]
pub struct VmaDisk<'d> {
    /// The name by which the configuration refers to it: `drive-scsi0`.
    pub device_name: String,
    /// Its content: a multiple of 512 bytes.
    pub device: Arc<dyn BlockDevice + 'd>,
}

/// Options for writing an archive.
#[derive(Debug, Clone, Copy)]
pub struct VmaWriteOptions {
    /// Number of threads that read and search for zeroes.
    pub threads: NonZero<usize>,
    /// Creation time, in seconds since 1970.
    pub time: u64,
    /// The archive's UUID, which header and extents repeat.
    pub uuid: [u8; 16],
}

/// The result of writing an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VmaWritten {
    /// Bytes of the archive.
    pub bytes: u64,
    /// Bytes of disk data in it.
    pub data_bytes: u64,
}

/// Writes an archive: named configurations, of which Proxmox requires `qemu-server.conf`, and the disks in sequence.
///
/// Zero blocks of 4 KiB are left out. `progress` gets the number of disk bytes that are done, including zeroes, and can abort with an error.
///
/// # Errors
/// [`Error::InvalidOption`]: a configuration or a disk exceeds the limits of the format. Reading the disks, writing, errors of `progress`. The
/// output is then incomplete.
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

/// An encoded extent.
struct Extent {
    bytes: Vec<u8>,
    data_bytes: u64,
    /// Its end offset in the disk.
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

/// A range of a disk that becomes an extent.
struct ExtentRange {
    /// Begins at a cluster, and has at most [`UNIT_BYTES`].
    range: Range<u64>,
    /// The clusters that may have data, the first in the lowest bit.
    data: u64,
}

/// Splits a disk into the ranges of extents.
struct ExtentRanges<'d> {
    device: &'d dyn BlockDevice,
    at: u64,
    /// Ranges after `at` that may contain data.
    data: VecDeque<Range<u64>>,
    /// The offset up to which extents were queried.
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

/// Reads a range of a disk and encodes it as an extent.
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
        // Adjacent clusters are read at once.
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
                // The size of the disk was checked, so the number fits.
                cluster: u32::try_from(at / CLUSTER_BYTES).unwrap_or(u32::MAX),
                mask: contents.next().map_or(0, |content| append_blocks(content, &mut extent)),
            });
            at += CLUSTER_BYTES;
        }
    }
    put(&mut extent.bytes, 0, &write_extent(uuid, &infos));
    Ok(extent)
}

/// Appends the blocks of a cluster that are not zero; returns their mask.
fn append_blocks(content: &[u8], extent: &mut Extent) -> u16 {
    let mut mask = 0;
    for (block, number) in content.chunks(to_usize(BLOCK_BYTES)).zip(0..u16::BITS) {
        if is_zero(block) {
            continue;
        }
        mask |= 1 << number;
        extent.bytes.extend(block);
        // The last block of a disk may be partial, and is padded.
        let padding = to_usize(BLOCK_BYTES) - block.len();
        extent.bytes.resize(extent.bytes.len() + padding, 0);
        extent.data_bytes += block.len() as u64;
    }
    mask
}
