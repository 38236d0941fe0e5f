//! What is before the first grain of a stream, which is read once, from its start to its end.

use std::io::{ErrorKind, Read};

use holdfast_block::to_usize;

use super::{SECTOR_BYTES, Sector};
use crate::error::corrupt;
use crate::vmdk::descriptor::{Descriptor, ExtentKind, TEXT_BYTES_MAX};
use crate::vmdk::extent::{HEADER_BYTES, MAGIC, SparseExtent};
use crate::{Error, ImageId, Result};

/// A directory in memory is not larger: with tables as everybody has them, that of a disk of 128 TiB.
const DIRECTORY_BYTES_MAX: u64 = 16 << 20;
/// Bytes that are passed over at once.
const SKIP_BYTES: u64 = 64 << 10;

/// A stream, and how far it was read.
pub(super) struct Source<R> {
    pub(super) reader: R,
    /// What errors call it.
    pub(super) image: String,
    pub(super) at: u64,
}

impl<R: Read> Source<R> {
    /// Reads until `buffer` is full or the stream ends; how many bytes came.
    fn read_up_to(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let mut count = 0;
        while count < buffer.len() {
            match self.reader.read(&mut buffer[count..]) {
                Ok(0) => break,
                Ok(more) => count += more,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(holdfast_block::Error::io("read", self.at + count as u64, error).into()),
            }
        }
        self.at += count as u64;
        Ok(count)
    }

    /// Fills `buffer`, with a part of `what`.
    pub(super) fn read(&mut self, buffer: &mut [u8], what: &'static str) -> Result<()> {
        let count = self.read_up_to(buffer)?;
        if count < buffer.len() {
            return Err(self.cut_off(what));
        }
        Ok(())
    }

    /// The next sector; none where the stream ends before it.
    pub(super) fn sector(&mut self, what: &'static str) -> Result<Option<Sector>> {
        let mut sector = [0; to_usize(SECTOR_BYTES)];
        match self.read_up_to(&mut sector)? {
            0 => Ok(None),
            count if count == sector.len() => Ok(Some(sector)),
            _ => Err(self.cut_off(what)),
        }
    }

    /// Passes over what is before `offset`.
    pub(super) fn skip_to(&mut self, offset: u64, what: &'static str) -> Result<()> {
        let mut buffer = vec![0; to_usize(SKIP_BYTES.min(offset.saturating_sub(self.at)))];
        while self.at < offset {
            let length = to_usize(SKIP_BYTES.min(offset - self.at));
            self.read(&mut buffer[..length], what)?;
        }
        Ok(())
    }

    /// Passes over all that is left; the place of the first byte that is not zero, if there is one. Gives up after `length_max` bytes.
    pub(super) fn drain(&mut self, length_max: u64) -> Result<Option<u64>> {
        let mut buffer = vec![0; to_usize(SKIP_BYTES)];
        let start = self.at;
        loop {
            let before = self.at;
            let count = self.read_up_to(&mut buffer)?;
            if let Some(found) = buffer[..count].iter().position(|byte| *byte != 0) {
                return Ok(Some(before + found as u64));
            }
            if count < buffer.len() {
                return Ok(None);
            }
            if self.at - start > length_max {
                return Ok(Some(self.at));
            }
        }
    }

    /// The error of a stream that ends too early.
    pub(super) fn cut_off(&self, what: &'static str) -> Error {
        corrupt(&self.image, what, self.at, "the stream ends here: it was cut off")
    }

    fn not_in_order(&self, detail: impl Into<String>) -> Error {
        Error::NotInOrder {
            image: self.image.clone(),
            detail: detail.into(),
        }
    }

    fn unsupported(&self, feature: &str, detail: &str) -> Error {
        Error::UnsupportedFeature {
            image: self.image.clone(),
            feature: feature.to_owned(),
            detail: detail.to_owned(),
        }
    }
}

/// What is known of a stream before its first grain.
pub(super) struct Front {
    pub(super) extent: SparseExtent,
    /// Size of the disk.
    pub(super) size_bytes: u64,
    pub(super) id: Option<ImageId>,
    /// Grains that the tables tell of, where these are before the grains.
    pub(super) grain_count: Option<u64>,
}

impl Front {
    /// Reads up to the first grain.
    pub(super) fn read<R: Read>(source: &mut Source<R>) -> Result<Self> {
        let mut header = [0; to_usize(HEADER_BYTES)];
        source.read(&mut header, "header")?;
        if !header.starts_with(MAGIC) {
            return Err(corrupt(&source.image, "header", 0, "it is no VMDK that is one file"));
        }
        let extent = SparseExtent::parse(&header, u64::MAX, &source.image)?;
        if !extent.is_compressed {
            return Err(source.not_in_order("it is not of the kind streamOptimized"));
        }
        let (size_bytes, id) = read_descriptor(source, &extent)?;
        let grain_count = match extent.directory {
            0 => None,
            _ => Some(count_grains(source, &extent)?),
        };
        // A header may say nothing of it.
        let start = extent.overhead.max(source.at).next_multiple_of(SECTOR_BYTES);
        source.skip_to(start, "header")?;
        Ok(Self {
            extent,
            size_bytes,
            id,
            grain_count,
        })
    }
}

/// What the descriptor, if there is one, says of size and identity.
fn read_descriptor<R: Read>(source: &mut Source<R>, extent: &SparseExtent) -> Result<(u64, Option<ImageId>)> {
    let Some((offset, length)) = extent.descriptor else {
        return Ok((extent.disk_bytes, None));
    };
    if length > TEXT_BYTES_MAX {
        return Err(corrupt(
            &source.image,
            "descriptor",
            offset,
            format!("it has {length} bytes"),
        ));
    }
    if extent.directory != 0 && offset.saturating_add(length) > extent.directory || offset > extent.overhead {
        return Err(source.not_in_order("its descriptor is not behind its header"));
    }
    source.skip_to(offset, "descriptor")?;
    let mut text = vec![0; to_usize(length)];
    source.read(&mut text, "descriptor")?;
    let descriptor = Descriptor::parse(&text, &source.image)?;
    if descriptor.parent.is_some() {
        return Err(source.unsupported("a parent", "a stream has to be the whole disk"));
    }
    let [only] = &descriptor.extents[..] else {
        return Err(source.unsupported("several files", "a stream is one file"));
    };
    let size_bytes = only.sectors.saturating_mul(SECTOR_BYTES);
    if !matches!(only.kind, ExtentKind::Sparse { .. }) || size_bytes > extent.disk_bytes {
        let detail = format!("{} bytes, and the descriptor says {size_bytes}", extent.disk_bytes);
        return Err(corrupt(&source.image, "extent", 0, detail));
    }
    Ok((size_bytes, descriptor.id))
}

/// How many grains are stored by the tables, which are behind the directory and before the first grain.
fn count_grains<R: Read>(source: &mut Source<R>, extent: &SparseExtent) -> Result<u64> {
    let length = extent.table_count() * 4;
    if length > DIRECTORY_BYTES_MAX {
        let detail = "its directory is too large; read it as a file";
        return Err(source.unsupported(&format!("a directory of {length} bytes"), detail));
    }
    let table_bytes = extent.table_entries * 4;
    if extent.directory < source.at || extent.directory + length > extent.overhead {
        return Err(source.not_in_order("its directory is behind its first grain"));
    }
    source.skip_to(extent.directory, "directory")?;
    let mut tables = read_directory(source, length)?;
    tables.sort_unstable();
    let mut table = vec![0; to_usize(table_bytes)];
    let mut count = 0;
    for sector in tables {
        let place = u64::from(sector) * SECTOR_BYTES;
        if place < source.at || place + table_bytes > extent.overhead {
            return Err(source.not_in_order("its tables are not between its directory and its first grain"));
        }
        source.skip_to(place, "table of grains")?;
        source.read(&mut table, "table of grains")?;
        let first = if extent.has_zero_grains { 2 } else { 1 };
        count += numbers(&table).filter(|sector| *sector >= first).count() as u64;
    }
    Ok(count)
}

/// The sectors of the tables, as the directory of `length` bytes has them. Takes no more memory than has come.
fn read_directory<R: Read>(source: &mut Source<R>, length: u64) -> Result<Vec<u32>> {
    let end = source.at + length;
    let mut tables = Vec::new();
    let mut buffer = vec![0; to_usize(SKIP_BYTES.min(length))];
    while source.at < end {
        let piece = &mut buffer[..to_usize(SKIP_BYTES.min(end - source.at))];
        source.read(piece, "directory")?;
        tables.extend(numbers(piece).filter(|sector| *sector != 0));
    }
    Ok(tables)
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes
        .chunks_exact(4)
        .map(|number| u32::from_le_bytes(number.try_into().expect("four bytes")))
}
