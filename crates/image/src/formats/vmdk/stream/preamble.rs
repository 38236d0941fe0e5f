//! Reads everything before the first grain of a streamOptimized VMDK: the header and the descriptor.

use std::io::Read;

use holdfast_block::to_usize;

use super::SECTOR_BYTES;
use crate::error::corrupt;
use crate::formats::vmdk::descriptor::{Descriptor, NamedExtentKind, TEXT_BYTES_MAX};
use crate::formats::vmdk::extent::{HEADER_BYTES, MAGIC, SparseExtent};
use crate::model::bytes::rows;
use crate::model::forward_reader::{ForwardReader, SKIP_BYTES};
use crate::{ImageId, Result};

/// Limit of the directory in memory: with tables of the usual size, that of a disk of 128 TiB.
const DIRECTORY_BYTES_MAX: u64 = 16 << 20;

/// Information about a stream that precedes its first grain.
pub(super) struct Preamble {
    pub(super) extent: SparseExtent,
    pub(super) size_bytes: u64,
    pub(super) id: Option<ImageId>,
    /// Number of grains in the tables, if these come before the grains.
    pub(super) grain_count: Option<u64>,
}

impl Preamble {
    /// Reads up to the first grain.
    pub(super) fn read<R: Read>(source: &mut ForwardReader<R>) -> Result<Self> {
        let mut header = [0; to_usize(HEADER_BYTES)];
        source.read(&mut header, "header")?;
        if !header.starts_with(MAGIC) {
            return Err(corrupt(&source.image, "header", 0, "it is not a VMDK in one file"));
        }
        let extent = SparseExtent::parse(&header, u64::MAX, &source.image)?;
        if !extent.is_compressed {
            return Err(source.not_in_order("it is not streamOptimized"));
        }
        let (size_bytes, id) = read_descriptor(source, &extent)?;
        let grain_count = match extent.directory {
            0 => None,
            _ => Some(count_grains(source, &extent)?),
        };
        // The header may leave it empty.
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

/// Size and identity in the descriptor, if there is one.
fn read_descriptor<R: Read>(source: &mut ForwardReader<R>, extent: &SparseExtent) -> Result<(u64, Option<ImageId>)> {
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
        return Err(source.not_in_order("its descriptor does not follow its header"));
    }
    source.skip_to(offset, "descriptor")?;
    let mut text = vec![0; to_usize(length)];
    source.read(&mut text, "descriptor")?;
    let descriptor = Descriptor::parse(&text, &source.image)?;
    if descriptor.parent.is_some() {
        return Err(source.unsupported("a parent", "a stream must contain the whole disk"));
    }
    let [only] = &descriptor.extents[..] else {
        return Err(source.unsupported("several files", "a stream must be one file"));
    };
    let size_bytes = only.sectors.saturating_mul(SECTOR_BYTES);
    if !matches!(only.kind, NamedExtentKind::Sparse { .. }) || size_bytes > extent.disk_bytes {
        let detail = format!(
            "it has {} bytes, but {size_bytes} according to the descriptor",
            extent.disk_bytes
        );
        return Err(corrupt(&source.image, "extent", 0, detail));
    }
    Ok((size_bytes, descriptor.id))
}

/// Counts the grains in the tables, which follow the directory before the first grain.
fn count_grains<R: Read>(source: &mut ForwardReader<R>, extent: &SparseExtent) -> Result<u64> {
    let length = extent.table_count() * 4;
    if length > DIRECTORY_BYTES_MAX {
        let detail = "its directory is too large; read it as a file";
        return Err(source.unsupported(&format!("a directory of {length} bytes"), detail));
    }
    let table_bytes = extent.table_entries * 4;
    if extent.directory < source.at || extent.directory + length > extent.overhead {
        return Err(source.not_in_order("its directory follows its first grain"));
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

/// Reads the directory of `length` bytes. Memory grows only with the bytes that arrive.
fn read_directory<R: Read>(source: &mut ForwardReader<R>, length: u64) -> Result<Vec<u32>> {
    let end = source.at + length;
    let mut tables = Vec::new();
    let mut buffer = vec![0; to_usize(SKIP_BYTES.min(length))];
    while source.at < end {
        let length = to_usize(SKIP_BYTES.min(end - source.at));
        let piece = buffer
            .get_mut(..length)
            .expect("the buffer has the first length, which is the largest");
        source.read(piece, "directory")?;
        tables.extend(numbers(piece).filter(|sector| *sector != 0));
    }
    Ok(tables)
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    rows(bytes, 0).iter().map(|number| u32::from_le_bytes(*number))
}
