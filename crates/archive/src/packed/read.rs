//! Random access to a packed file by its index.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::num::NonZero;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use holdfast_block::{
    BlockDevice, Error as DeviceError, ExtentKind, ExtentList, OrderedResults, Result as DeviceResult, Threads,
    to_usize,
};

use super::gzip;
use super::index::{IndexEntry, PackedIndex};
use super::write::low_half;
use crate::checksum::xxh64;
use crate::packed::frame::Packing;
use crate::packed::unpack::Unpacked;
use crate::{Error, Result};

/// Number of unpacked blocks in the cache.
const KEPT: usize = 4;

/// A packed file with an index, as a device with the unpacked content.
pub struct PackedFile {
    inner: Arc<Inner>,
    kept: Mutex<Vec<(usize, Arc<Vec<u8>>)>>,
}

struct Inner {
    file: Arc<dyn BlockDevice>,
    packing: Packing,
    index: PackedIndex,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PackedReport {
    /// Blocks that were unpacked and verified.
    pub block_count: u64,
    /// Bytes of the stream.
    pub unpacked_bytes: u64,
}

impl PackedFile {
    /// Reads the index of a file.
    ///
    /// # Errors
    /// [`Error::NoIndex`] if another program packed it, or if it is not packed. An index that contradicts the file. Reading.
    pub fn open(file: Arc<dyn BlockDevice>) -> Result<Self> {
        let size_bytes = file.size_bytes();
        let mut start = vec![0; usize::try_from(size_bytes.min(4)).unwrap_or_default()];
        file.read_at(&mut start, 0)?;
        let packing = Packing::sniff(&start);
        let index = PackedIndex::read(packing, size_bytes, &mut |offset, count| {
            let mut bytes = vec![0; count];
            file.read_at(&mut bytes, offset)?;
            Ok(bytes)
        })?;
        Ok(Self {
            inner: Arc::new(Inner { file, packing, index }),
            kept: Mutex::default(),
        })
    }

    /// Its compression.
    pub fn packing(&self) -> Packing {
        self.inner.packing
    }

    /// Its index.
    pub fn index(&self) -> &PackedIndex {
        &self.inner.index
    }

    /// Unpacks every block on `threads` threads and compares it with the index. `progress` gets the number of packed bytes that are done, and can
    /// abort with an error.
    ///
    /// # Errors
    /// The first damaged block.
    pub fn check(
        &self,
        threads: NonZero<usize>,
        progress: &mut dyn FnMut(u64) -> std::io::Result<()>,
    ) -> Result<PackedReport> {
        let threads = Threads {
            count: threads,
            load_max: None,
        };
        let mut numbers = 0..self.inner.index.entries().len();
        let results = OrderedResults::start(
            threads,
            move || numbers.next(),
            || {
                let inner = Arc::clone(&self.inner);
                move |number| inner.unpack(number).map(|bytes| bytes.len() as u64)
            },
        );
        let mut report = PackedReport::default();
        let failed = |offset| move |source| Error::Read { offset, source };
        while let Some(bytes) = results.next().map_err(failed(0))? {
            report.unpacked_bytes += bytes?;
            let number = usize::try_from(report.block_count).unwrap_or(usize::MAX);
            let entry = self.inner.index.entries().get(number);
            report.block_count += 1;
            let at = entry.map_or(0, |entry| entry.packed_offset + u64::from(entry.packed_bytes));
            progress(at).map_err(failed(at))?;
        }
        Ok(report)
    }

    /// The content as a stream, unpacked on `threads` threads; every block is compared with the index.
    pub fn stream(&self, threads: NonZero<usize>) -> Unpacked {
        let threads = Threads {
            count: threads,
            load_max: None,
        };
        let mut numbers = 0..self.inner.index.entries().len();
        let damaged = |error| std::io::Error::new(std::io::ErrorKind::InvalidData, error);
        Unpacked::of_blocks(OrderedResults::start(
            threads,
            move || numbers.next(),
            || {
                let inner = Arc::clone(&self.inner);
                move |number| inner.unpack(number).map_err(damaged)
            },
        ))
    }

    fn block(&self, number: usize) -> Result<Arc<Vec<u8>>> {
        let lock = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, block)) = lock().iter().find(|(known, _)| *known == number) {
            return Ok(Arc::clone(block));
        }
        let block = Arc::new(self.inner.unpack(number)?);
        let mut kept = lock();
        if kept.len() == KEPT {
            kept.remove(0);
        }
        kept.push((number, Arc::clone(&block)));
        Ok(block)
    }
}

impl Inner {
    fn unpack(&self, number: usize) -> Result<Vec<u8>> {
        let entry = self
            .index
            .entries()
            .get(number)
            .expect("callers have the number from the index");
        let mut packed = vec![0; usize::try_from(entry.packed_bytes).unwrap_or_default()];
        self.file.read_at(&mut packed, entry.packed_offset)?;
        let length = usize::try_from(entry.bytes).unwrap_or_default();
        // Sequential readers rely on the size fields and would fail here.
        if self.packing == Packing::Gzip && gzip::sizes(&packed) != Some((packed.len(), length)) {
            return Err(damaged(entry, "its size field contradicts the index".to_owned()));
        }
        let unpacked = match self.packing {
            Packing::Gzip => gzip::unpack(&mut libdeflater::Decompressor::new(), &packed, length),
            Packing::Zstd | Packing::Xz | Packing::None => zstd::bulk::decompress(&packed, length),
        };
        let unpacked = unpacked.map_err(|error| damaged(entry, error.to_string()))?;
        let checksum = match self.packing {
            Packing::Gzip => libdeflater::crc32(&unpacked),
            Packing::Zstd | Packing::Xz | Packing::None => low_half(xxh64(&unpacked)),
        };
        if unpacked.len() != length {
            let detail = format!("it holds {} bytes; the index says {length}", unpacked.len());
            return Err(damaged(entry, detail));
        }
        if checksum != entry.checksum {
            let detail = format!("its checksum is {checksum:08x}; the index says {:08x}", entry.checksum);
            return Err(damaged(entry, detail));
        }
        Ok(unpacked)
    }
}

/// Keeps errors of the underlying file, and distinguishes a damaged block from a failing medium.
fn to_device(error: Error) -> DeviceError {
    match error {
        Error::Device(error) => error,
        other => DeviceError::layer(other),
    }
}

fn damaged(entry: &IndexEntry, detail: String) -> Error {
    Error::Corrupt {
        what: "packed block",
        offset: entry.packed_offset,
        detail,
    }
}

impl BlockDevice for PackedFile {
    fn size_bytes(&self) -> u64 {
        self.inner.index.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> DeviceResult<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        let mut done = 0;
        while done < buffer.len() {
            let at = offset + done as u64;
            let number = self.inner.index.find(at);
            let block = self.block(number).map_err(to_device)?;
            let entry = self.inner.index.entries().get(number);
            let start = to_usize(at - entry.map_or(at, |entry| entry.offset));
            let source = block.get(start..).unwrap_or_default();
            let target = buffer.get_mut(done..).unwrap_or_default();
            let count = source.len().min(target.len());
            if let Some((target, source)) = target.get_mut(..count).zip(source.get(..count)) {
                target.copy_from_slice(source);
            }
            done += count;
        }
        Ok(())
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> DeviceResult<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        list.push(range.end - range.start, ExtentKind::Data);
        Ok(list)
    }
}
