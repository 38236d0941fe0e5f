//! Reading a stream from its start to its end, once.

use std::io::Read;

use holdfast_block::to_usize;
use libdeflater::Decompressor;

use super::front::{Front, Source};
use super::{END_OF_STREAM, FOOTER, GRAIN_MARKER_BYTES, SECTOR_BYTES, Sector, check_stored, grain_marker, inflate};
use crate::error::corrupt;
use crate::vmdk::extent::{MAGIC, SparseExtent};
use crate::{Error, ImageId, Result};

/// What is not grains has no longer parts.
const METADATA_BYTES_MAX: u64 = 64 << 20;
/// Zeroes that may be behind the end.
const PADDING_BYTES_MAX: u64 = 1 << 20;

/// A VMDK of the kind `streamOptimized` that is read as it comes, from a pipe or out of an archive.
///
/// Grains come at rising offsets, as every program that we know of writes them. What no grain covers is zero. Nothing is read beyond the
/// next grain before it is asked for; at the end the reader has been read to its end, too.
pub struct StreamReader<R> {
    source: Source<R>,
    front: Front,
    decompressor: Decompressor,
    /// A compressed grain, up to the end of its sector.
    stored: Vec<u8>,
    grain: Vec<u8>,
    /// Where the next grain may begin.
    end: u64,
    /// Grains that came.
    grain_count: u64,
    has_footer: bool,
    is_over: bool,
}

/// A part of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamGrain<'a> {
    /// Where it belongs, in bytes.
    pub offset: u64,
    /// What it is; shorter at the end of the disk.
    pub bytes: &'a [u8],
}

impl<R: Read> StreamReader<R> {
    /// Reads what is before the first grain; errors call the stream `image`.
    ///
    /// # Errors
    /// [`Error::NotInOrder`] where it is a VMDK that can be read from a file only. [`Error::is_corrupt`] where it is none.
    pub fn open(reader: R, image: &str) -> Result<Self> {
        let mut source = Source {
            reader,
            image: image.to_owned(),
            at: 0,
        };
        let front = Front::read(&mut source)?;
        Ok(Self {
            grain: vec![0; to_usize(front.extent.grain_bytes)],
            source,
            front,
            decompressor: Decompressor::new(),
            stored: Vec::new(),
            end: 0,
            grain_count: 0,
            has_footer: false,
            is_over: false,
        })
    }

    /// Size of the disk.
    pub fn size_bytes(&self) -> u64 {
        self.front.size_bytes
    }

    /// The identity that its descriptor says.
    pub fn id(&self) -> Option<ImageId> {
        self.front.id
    }

    /// Bytes of the stream that were read so far.
    pub fn read_bytes(&self) -> u64 {
        self.source.at
    }

    /// The next grain, or none at the end, which is the end of the stream as it was written.
    ///
    /// # Errors
    /// [`Error::NotInOrder`] where a grain goes back; [`Error::is_corrupt`] where the stream was cut off, or says what cannot be. What came
    /// before is right as far as one can know, but not all of the disk. After an error there is nothing more to ask for.
    pub fn next_grain(&mut self) -> Result<Option<StreamGrain<'_>>> {
        let found = if self.is_over { None } else { self.find_grain()? };
        let Some((sector, stored)) = found else {
            return Ok(None);
        };
        let offset = self.read_grain(&sector, stored)?;
        let length = (self.front.size_bytes - offset).min(self.grain.len() as u64);
        Ok(Some(StreamGrain {
            offset,
            bytes: &self.grain[..to_usize(length)],
        }))
    }

    /// The first sector of the next grain, and how many bytes it has compressed; none at the end.
    fn find_grain(&mut self) -> Result<Option<(Sector, u64)>> {
        loop {
            let Some(sector) = self.source.sector("marker")? else {
                // Where tables are before the grains, QEMU writes nothing behind these.
                return self.check_end(self.front.grain_count.is_some()).map(|()| None);
            };
            let (value, stored) = grain_marker(sector.first_chunk().expect("a sector is longer"));
            if stored != 0 {
                return Ok(Some((sector, stored)));
            }
            let kind = u32::from_le_bytes(*sector[12..].first_chunk().expect("a sector is longer"));
            if kind == END_OF_STREAM {
                return self.end_of_stream(value).map(|()| None);
            }
            let start = self.source.at;
            let length = value
                .checked_mul(SECTOR_BYTES)
                .filter(|length| *length <= METADATA_BYTES_MAX);
            let Some(length) = length else {
                let detail = format!("{value} sectors are said to follow");
                return Err(corrupt(&self.source.image, "marker", start - SECTOR_BYTES, detail));
            };
            if kind == FOOTER {
                self.read_footer()?;
            }
            // Tables say where in a file the grains are, and other kinds how far a program has come.
            self.source.skip_to(start + length, "table of grains")?;
        }
    }

    /// The footer is a header: of the same disk, or the grains are not what it says.
    fn read_footer(&mut self) -> Result<()> {
        let at = self.source.at;
        let Some(sector) = self.source.sector("footer")? else {
            return Err(self.source.cut_off("footer"));
        };
        let image = &self.source.image;
        if self.has_footer || !sector.starts_with(MAGIC) {
            return Err(corrupt(image, "footer", at, "there is none, or there are two"));
        }
        let footer = SparseExtent::parse(&sector, u64::MAX, image)?;
        let geometry = |extent: &SparseExtent| (extent.disk_bytes, extent.grain_bytes, extent.table_entries);
        if geometry(&footer) != geometry(&self.front.extent) || !footer.is_compressed || footer.directory == 0 {
            return Err(corrupt(
                image,
                "footer",
                at,
                "it is that of another disk than the header",
            ));
        }
        self.has_footer = true;
        Ok(())
    }

    /// Reads what follows the end of the stream, which was met.
    fn end_of_stream(&mut self, value: u64) -> Result<()> {
        let at = self.source.at - SECTOR_BYTES;
        let wrong = |image: &str, detail: &str| Err(corrupt(image, "end of the stream", at, detail));
        if value != 0 {
            return wrong(&self.source.image, "sectors are said to follow");
        }
        if self.front.grain_count.is_none() && !self.has_footer {
            return wrong(&self.source.image, "there was no footer before it");
        }
        if let Some(behind) = self.source.drain(PADDING_BYTES_MAX)? {
            return wrong(&self.source.image, &format!("something is behind it, at {behind}"));
        }
        self.check_end(true)
    }

    /// Whether this can be the end.
    fn check_end(&mut self, is_end: bool) -> Result<()> {
        if !is_end {
            return Err(self.source.cut_off("end of the stream"));
        }
        let count = self.grain_count;
        match self.front.grain_count {
            Some(expected) if expected != count => {
                let detail = format!("{count} grains have come, and its tables tell of {expected}: it was cut off");
                Err(corrupt(&self.source.image, "end of the stream", self.source.at, detail))
            }
            _ => {
                self.is_over = true;
                Ok(())
            }
        }
    }

    /// Reads the grain that begins with `sector`; gives its place on the disk.
    fn read_grain(&mut self, sector: &Sector, stored: u64) -> Result<u64> {
        let at = self.source.at - SECTOR_BYTES;
        let extent = &self.front.extent;
        let wrong = |image: &str, detail: String| corrupt(image, "compressed grain", at, detail);
        let (first, _) = grain_marker(sector.first_chunk().expect("a sector is longer"));
        let offset = first
            .checked_mul(SECTOR_BYTES)
            .filter(|offset| offset.is_multiple_of(extent.grain_bytes) && *offset < self.front.size_bytes);
        let Some(offset) = offset else {
            let detail = format!("no grain of the disk begins at its sector {first}");
            return Err(wrong(&self.source.image, detail));
        };
        if offset < self.end {
            let detail = format!(
                "the grain for {offset} comes behind one for {}",
                self.end - extent.grain_bytes
            );
            if offset + extent.grain_bytes == self.end {
                return Err(wrong(&self.source.image, detail));
            }
            return Err(Error::NotInOrder {
                image: self.source.image.clone(),
                detail,
            });
        }
        check_stored(stored, extent.grain_bytes).map_err(|detail| wrong(&self.source.image, detail))?;
        let end = GRAIN_MARKER_BYTES + to_usize(stored);
        self.stored.clear();
        self.stored.extend_from_slice(sector);
        self.stored.resize(end.next_multiple_of(sector.len()), 0);
        self.source.read(&mut self.stored[sector.len()..], "compressed grain")?;
        let input = &self.stored[GRAIN_MARKER_BYTES..end];
        let least = self.front.size_bytes - offset;
        inflate(&mut self.decompressor, input, &mut self.grain, least)
            .map_err(|detail| wrong(&self.source.image, detail))?;
        self.end = offset + extent.grain_bytes;
        self.grain_count += 1;
        Ok(offset)
    }
}
