//! Writing an XVA.

use std::io::Write;
use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;
use std::thread::Scope;

use holdfast_block::{BlockDevice, ExtentKind, OrderedResults, Threads, is_zero};

use crate::checksum::xxh64;
use crate::tar::{BLOCK_BYTES as TAR_BLOCK_BYTES, header, padding_of};
use crate::{Error, Result};

/// Bytes of a block: the size that XAPI writes, and the only one that all readers support.
const BLOCK_BYTES: u64 = 1 << 20;
/// Blocks per read.
const BATCH_BLOCKS: u64 = 4;
const EXTENT_COUNT_MAX: usize = 256;

/// A disk to write into an archive.
#[derive(Clone)]
pub struct XvaDisk<'d> {
    /// The id by which the records refer to it: `Ref:7`. Disks must be sorted by their ids as text.
    pub id: String,
    /// Its content.
    pub device: Arc<dyn BlockDevice + 'd>,
}

/// Options for writing an archive.
#[derive(Debug, Clone, Copy)]
pub struct XvaWriteOptions {
    /// Number of threads that read and compute checksums.
    pub threads: NonZero<usize>,
    /// Modification time of the members, in seconds since 1970.
    pub time: u64,
}

/// The result of writing an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct XvaWritten {
    /// Bytes of the archive.
    pub bytes: u64,
    /// Bytes of disk data in it.
    pub data_bytes: u64,
}

/// Limit of the id of a disk: a block's number and `.checksum` follow it, and names in tar have at most 100 bytes.
const ID_BYTES_MAX: usize = 80;

/// Writes an archive: the records and the disks that they refer to.
///
/// Zero blocks are left out, except the first and the last of each disk. `progress` gets the number of disk bytes that are done, including zeroes,
/// and can abort with an error.
///
/// # Errors
/// Reading the disks, writing, errors of `progress`. The output is then incomplete.
pub fn write_xva(
    output: &mut dyn Write,
    records: &str,
    disks: &[XvaDisk<'_>],
    options: XvaWriteOptions,
    progress: &mut dyn FnMut(u64) -> std::io::Result<()>,
) -> Result<XvaWritten> {
    // The ids of a suspended machine come from its pool, or from the archive that it was imported from.
    if let Some(disk) = disks.iter().find(|disk| disk.id.len() > ID_BYTES_MAX) {
        return Err(Error::InvalidOption {
            option: "id",
            detail: format!(
                "a disk is called by {} bytes, and members by its id have room for {ID_BYTES_MAX}",
                disk.id.len()
            ),
        });
    }
    let mut written = XvaWritten::default();
    let mut put = |bytes: &[u8], written: &mut XvaWritten| {
        let offset = written.bytes;
        written.bytes += bytes.len() as u64;
        output
            .write_all(bytes)
            .map_err(|source| Error::Write { offset, source })
    };
    let mut text = Vec::new();
    append(&mut text, "ova.xml", records.as_bytes(), options.time);
    put(&text, &mut written)?;
    let mut disks: Vec<&XvaDisk<'_>> = disks.iter().collect();
    disks.sort_by(|one, other| one.id.cmp(&other.id));
    let mut before = 0;
    for disk in disks {
        std::thread::scope(|scope| {
            let blocks = blocks(scope, disk, options);
            while let Some(batch) = blocks.next().map_err(|source| Error::Read { offset: 0, source })? {
                let batch = batch?;
                put(&batch.members, &mut written)?;
                written.data_bytes += batch.data_bytes;
                let done = before + batch.end;
                progress(done).map_err(|source| Error::Write {
                    offset: written.bytes,
                    source,
                })?;
            }
            Ok::<(), Error>(())
        })?;
        before += disk.device.size_bytes();
    }
    put(&[0; 2 * TAR_BLOCK_BYTES], &mut written)?;
    output.flush().map_err(|source| Error::Write {
        offset: written.bytes,
        source,
    })?;
    Ok(written)
}

fn append(members: &mut Vec<u8>, name: &str, content: &[u8], time: u64) {
    members.extend(header(name, content.len() as u64, time));
    members.extend(content);
    members.resize(members.len() + padding_of(content.len() as u64), 0);
}

/// Blocks of a disk as members.
struct Batch {
    members: Vec<u8>,
    data_bytes: u64,
    /// Its end offset in the disk.
    end: u64,
}

/// Blocks of a disk, in order.
fn blocks<'scope>(
    scope: &'scope Scope<'scope, '_>,
    disk: &'scope XvaDisk<'_>,
    options: XvaWriteOptions,
) -> OrderedResults<Result<Batch>> {
    let mut batches = Batches {
        device: &*disk.device,
        at: 0,
        data_end: 0,
        asked: 0,
    };
    let threads = Threads {
        count: options.threads,
        load_max: None,
    };
    OrderedResults::start_within(
        scope,
        threads,
        move || batches.next().transpose(),
        || {
            let mut block = Vec::new();
            move |range: Result<Range<u64>>| members(disk, range?, &mut block, options.time)
        },
    )
}

/// Reads a range of a disk and encodes its data as members.
fn members(disk: &XvaDisk<'_>, range: Range<u64>, block: &mut Vec<u8>, time: u64) -> Result<Batch> {
    let size_bytes = disk.device.size_bytes();
    let last = size_bytes.saturating_sub(1) / BLOCK_BYTES;
    let mut batch = Batch {
        members: Vec::new(),
        data_bytes: 0,
        end: range.end,
    };
    for number in range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES) {
        let start = number * BLOCK_BYTES;
        let length = BLOCK_BYTES.min(size_bytes - start);
        block.resize(usize::try_from(length).unwrap_or_default(), 0);
        disk.device.read_at(block, start)?;
        if number != 0 && number != last && is_zero(block) {
            continue;
        }
        let name = format!("{}/{number:08}", disk.id);
        append(&mut batch.members, &name, block, time);
        let checksum = format!("{:016X}", xxh64(block));
        append(&mut batch.members, &format!("{name}.xxhash"), checksum.as_bytes(), time);
        batch.data_bytes += length;
    }
    Ok(batch)
}

/// Splits a disk into ranges to read: possible data, the first and the last block.
struct Batches<'d> {
    device: &'d dyn BlockDevice,
    at: u64,
    /// End of the data at `at`.
    data_end: u64,
    /// The offset up to which extents were queried.
    asked: u64,
}

impl Batches<'_> {
    fn next(&mut self) -> Result<Option<Range<u64>>> {
        let size_bytes = self.device.size_bytes();
        let last = size_bytes.saturating_sub(1) / BLOCK_BYTES * BLOCK_BYTES;
        while self.at < size_bytes {
            if self.at == 0 || self.at == last || self.at < self.data_end {
                let data_end = if self.at < self.data_end {
                    self.data_end
                } else {
                    self.at + 1
                };
                let end = data_end
                    .next_multiple_of(BLOCK_BYTES)
                    .min(self.at + BATCH_BLOCKS * BLOCK_BYTES);
                let range = self.at..end.min(size_bytes);
                self.at = range.end;
                return Ok(Some(range));
            }
            if self.asked >= last {
                self.at = last;
                continue;
            }
            let list = self.device.extents(self.asked.max(self.at)..last, EXTENT_COUNT_MAX)?;
            let data = list.as_slice().iter().find(|extent| extent.kind == ExtentKind::Data);
            self.asked = data.map_or(list.end(), holdfast_block::Extent::end);
            if let Some(data) = data {
                self.at = (data.offset / BLOCK_BYTES * BLOCK_BYTES).max(self.at);
                self.data_end = data.end();
            }
        }
        Ok(None)
    }
}
