//! Scans the grains of a stream sequentially, without decompressing them.

use std::io::Read;

use holdfast_block::{Record, to_usize};
use libdeflater::Decompressor;

use super::preamble::Preamble;
use super::{END_OF_STREAM, FOOTER, GRAIN_MARKER_BYTES, SECTOR_BYTES, Sector, check_stored, grain_marker, inflate};
use crate::error::corrupt;
use crate::formats::vmdk::extent::{MAGIC, PADDING_BYTES_MAX, SparseExtent};
use crate::model::forward_reader::ForwardReader;
use crate::{Error, Result};

/// Limit of other structures between grains.
const METADATA_BYTES_MAX: u64 = 64 << 20;
/// A grain with its buffers, which are reused.
#[derive(Default)]
pub(super) struct StreamedGrain {
    /// Its offset on the disk.
    pub(super) offset: u64,
    /// The offset of its marker in the stream.
    at: u64,
    /// Marker and zlib stream, padded to a sector.
    stored: Vec<u8>,
    /// End of the zlib stream in `stored`.
    stored_end: usize,
    /// Bytes of the disk from `offset` on.
    disk_rest: u64,
    bytes: Vec<u8>,
    /// Why decompression failed.
    failure: Option<String>,
}

impl StreamedGrain {
    /// Decompresses it.
    pub(super) fn inflate(&mut self, decompressor: &mut Decompressor) {
        let input = self.stored.get(GRAIN_MARKER_BYTES..self.stored_end).unwrap_or_default();
        self.failure = inflate(decompressor, input, &mut self.bytes, self.disk_rest).err();
    }

    /// The decompressed bytes, up to the end of the disk.
    pub(super) fn bytes(&self, image: &str) -> Result<&[u8]> {
        match &self.failure {
            Some(detail) => Err(corrupt(image, "compressed grain", self.at, detail)),
            None => Ok(self.bytes.get(..to_usize(self.disk_rest)).unwrap_or(&self.bytes)),
        }
    }
}

/// Reads the following grains of a stream.
pub(super) struct GrainScanner<R> {
    pub(super) source: ForwardReader<R>,
    pub(super) preamble: Preamble,
    /// The minimum offset of the next grain.
    end: u64,
    /// Grains read so far.
    grain_count: u64,
    has_footer: bool,
    is_over: bool,
}

impl<R: Read> GrainScanner<R> {
    pub(super) fn open(mut source: ForwardReader<R>) -> Result<Self> {
        Ok(Self {
            preamble: Preamble::read(&mut source)?,
            source,
            end: 0,
            grain_count: 0,
            has_footer: false,
            is_over: false,
        })
    }

    /// Reads the next grain into `grain`; false at the end.
    pub(super) fn next(&mut self, grain: &mut StreamedGrain) -> Result<bool> {
        let found = if self.is_over { None } else { self.find_grain()? };
        let Some((sector, stored)) = found else {
            return Ok(false);
        };
        self.read_grain(&sector, stored, grain)?;
        Ok(true)
    }

    /// The first sector of the next grain, and its compressed length; none at the end.
    fn find_grain(&mut self) -> Result<Option<(Sector, u64)>> {
        loop {
            let Some(sector) = self.source.sector("marker")? else {
                // If the tables come before the grains, QEMU writes nothing after them.
                return self.check_end(self.preamble.grain_count.is_some()).map(|()| None);
            };
            let marker = Record::new(&sector);
            let (value, stored) = grain_marker(marker.field::<0, GRAIN_MARKER_BYTES>());
            if stored != 0 {
                return Ok(Some((sector, stored)));
            }
            let kind = marker.le_u32::<12>();
            if kind == END_OF_STREAM {
                return self.end_of_stream(value).map(|()| None);
            }
            let start = self.source.at;
            let length = value
                .checked_mul(SECTOR_BYTES)
                .filter(|length| *length <= METADATA_BYTES_MAX);
            let Some(length) = length else {
                let detail = format!("it announces {value} sectors");
                return Err(corrupt(&self.source.image, "marker", start - SECTOR_BYTES, detail));
            };
            if kind == FOOTER {
                self.read_footer()?;
            }
            // Skip tables, which are needed only in files, and progress markers.
            self.source.skip_to(start + length, "table of grains")?;
        }
    }

    /// Reads the footer, which is a header: it must describe the same disk as the one at the start.
    fn read_footer(&mut self) -> Result<()> {
        let at = self.source.at;
        let Some(sector) = self.source.sector("footer")? else {
            return Err(self.source.cut_off("footer"));
        };
        let image = &self.source.image;
        if self.has_footer || !sector.starts_with(MAGIC) {
            return Err(corrupt(image, "footer", at, "it is missing, or occurs twice"));
        }
        let footer = SparseExtent::parse(&sector, u64::MAX, image)?;
        let geometry = |extent: &SparseExtent| (extent.disk_bytes, extent.grain_bytes, extent.table_entries);
        if geometry(&footer) != geometry(&self.preamble.extent) || !footer.is_compressed || footer.directory == 0 {
            return Err(corrupt(
                image,
                "footer",
                at,
                "it belongs to another disk than the header",
            ));
        }
        self.has_footer = true;
        Ok(())
    }

    /// Reads the rest after the end-of-stream marker.
    fn end_of_stream(&mut self, value: u64) -> Result<()> {
        let at = self.source.at - SECTOR_BYTES;
        let wrong = |image: &str, detail: &str| Err(corrupt(image, "end of the stream", at, detail));
        if value != 0 {
            return wrong(&self.source.image, "it announces more sectors");
        }
        if self.preamble.grain_count.is_none() && !self.has_footer {
            return wrong(&self.source.image, "the footer before it is missing");
        }
        if let Some(trailing) = self.source.drain(PADDING_BYTES_MAX)? {
            return wrong(&self.source.image, &format!("data follows it, at {trailing}"));
        }
        self.check_end(true)
    }

    /// Checks that the stream is complete.
    fn check_end(&mut self, is_end: bool) -> Result<()> {
        if !is_end {
            return Err(self.source.cut_off("end of the stream"));
        }
        let count = self.grain_count;
        match self.preamble.grain_count {
            Some(expected) if expected != count => {
                let detail = format!("it has {count} grains, but {expected} according to its tables: it was cut off");
                Err(corrupt(&self.source.image, "end of the stream", self.source.at, detail))
            }
            _ => {
                self.is_over = true;
                Ok(())
            }
        }
    }

    /// Reads the rest of the grain that begins with `sector` and has `stored` bytes.
    fn read_grain(&mut self, sector: &Sector, stored: u64, grain: &mut StreamedGrain) -> Result<()> {
        let at = self.source.at - SECTOR_BYTES;
        let grain_bytes = self.preamble.extent.grain_bytes;
        let wrong = |image: &str, detail: String| corrupt(image, "compressed grain", at, detail);
        let (first, _) = grain_marker(Record::new(sector).field::<0, GRAIN_MARKER_BYTES>());
        let offset = first
            .checked_mul(SECTOR_BYTES)
            .filter(|offset| offset.is_multiple_of(grain_bytes) && *offset < self.preamble.size_bytes);
        let Some(offset) = offset else {
            let detail = format!("its sector, {first}, is not the start of a grain");
            return Err(wrong(&self.source.image, detail));
        };
        if offset < self.end {
            let last = self.end - grain_bytes;
            if offset == last {
                return Err(wrong(
                    &self.source.image,
                    format!("the grain for disk offset {offset} occurs twice"),
                ));
            }
            return Err(Error::NotInOrder {
                image: self.source.image.clone(),
                detail: format!("the grain for disk offset {offset} follows the one for {last}"),
            });
        }
        check_stored(stored, grain_bytes).map_err(|detail| wrong(&self.source.image, detail))?;
        grain.offset = offset;
        grain.at = at;
        grain.disk_rest = self.preamble.size_bytes - offset;
        grain.bytes.resize(to_usize(grain_bytes), 0);
        grain.stored_end = GRAIN_MARKER_BYTES + to_usize(stored);
        grain.stored.clear();
        grain.stored.extend_from_slice(sector);
        grain.stored.resize(grain.stored_end.next_multiple_of(sector.len()), 0);
        let rest = grain.stored.get_mut(sector.len()..).unwrap_or_default();
        self.source.read(rest, "compressed grain")?;
        self.end = offset + grain_bytes;
        self.grain_count += 1;
        Ok(())
    }
}
