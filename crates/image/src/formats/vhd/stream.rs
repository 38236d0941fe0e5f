//! Reads a VHD sequentially, as XenServer exports disks.
//!
//! XenServer sends a complete image whose table comes before its blocks, which follow in the order of the disk. In a
//! differencing image, the bitmap of a block says which sectors it has; the others are the parent's.
//!
//! Bounds: [`HEAD_BYTES_MAX`] for everything before the blocks, 2 MiB for a block, 2040 GiB for the disk, as in the
//! footer.

use std::io::Read;
use std::ops::Range;

use holdfast_block::to_usize;

use super::footer::{FOOTER_BYTES, Footer, FooterBytes};
use super::sparse::SparseHeader;
use super::tables::DISK_BYTES_MAX;
use super::{FREE, SECTOR_BYTES};
use crate::error::corrupt;
use crate::model::bytes::rows;
use crate::model::forward_reader::ForwardReader;
use crate::model::info::ImageKind;
use crate::{ImageId, Result};

const HEAD_BYTES_MAX: u64 = 64 << 20;
const HEAD_PIECE_BYTES: u64 = 1 << 20;
const BLOCK_BYTES_MAX: u64 = 16 << 20;

/// A dynamic or differencing VHD that is read sequentially.
pub struct VhdStream<R> {
    source: ForwardReader<R>,
    size_bytes: u64,
    id: ImageId,
    parent: Option<ImageId>,
    header: SparseHeader,
    footer: FooterBytes,
    /// Stored blocks, in the order of the stream: offset and index.
    blocks: Vec<(u64, u64)>,
    next: usize,
    bitmap: Vec<u8>,
    data: Vec<u8>,
}

/// A block of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VhdBlock<'a> {
    /// Its offset on the disk, in bytes.
    pub offset: u64,
    /// Its sectors; shorter at the end of the disk. Sectors that are not stored are undefined.
    pub bytes: &'a [u8],
    bitmap: &'a [u8],
}

impl VhdBlock<'_> {
    /// The stored ranges, in order.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        let sector = to_usize(SECTOR_BYTES);
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for (number, start) in (0..self.bytes.len()).step_by(sector).enumerate() {
            let bits = self.bitmap.get(number / 8).copied().unwrap_or_default();
            if bits & (0x80 >> (number % 8)) == 0 {
                continue;
            }
            let end = (start + sector).min(self.bytes.len());
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => ranges.push(start..end),
            }
        }
        ranges
    }
}

impl<R: Read> VhdStream<R> {
    /// Reads everything before the first block; errors call the stream `image`.
    ///
    /// # Errors
    /// [`Error::is_corrupt`] if it is no VHD, or a fixed one, which can be read like a raw disk. [`Error::NotInOrder`]
    /// if the table is not at its start.
    pub fn open(reader: R, image: &str) -> Result<Self> {
        let mut head = TableReader {
            source: ForwardReader {
                reader,
                image: image.to_owned(),
                at: 0,
            },
            bytes: Vec::new(),
        };
        let footer_bytes = *head.at(0)?;
        let footer = Footer::parse(&footer_bytes, 0, image)?;
        let size_bytes = footer.disk_bytes();
        if footer.kind == ImageKind::Fixed || size_bytes > DISK_BYTES_MAX {
            let detail = format!("it is a fixed image, or has {size_bytes} bytes");
            return Err(corrupt(image, "footer", 48, detail));
        }
        let header = SparseHeader::parse(head.at(footer.header_offset)?, &footer, image)?;
        if header.block_bytes > BLOCK_BYTES_MAX {
            let detail = format!("a block has {} bytes", header.block_bytes);
            return Err(corrupt(image, "header", footer.header_offset + 32, detail));
        }
        let table = rows::<4>(head.bytes_before(header.tables_end)?, to_usize(header.table_offset));
        let mut blocks = Vec::new();
        for (index, sector) in (0..size_bytes.div_ceil(header.block_bytes)).zip(table) {
            match u32::from_be_bytes(*sector) {
                FREE => {}
                sector => blocks.push((u64::from(sector) * SECTOR_BYTES, index)),
            }
        }
        blocks.sort_unstable();
        Ok(Self {
            footer: footer_bytes,
            size_bytes,
            id: footer.id,
            parent: (footer.kind == ImageKind::Differencing).then_some(header.parent),
            bitmap: vec![0; to_usize(header.bitmap_bytes())],
            data: vec![0; to_usize(header.block_bytes)],
            header,
            blocks,
            next: 0,
            source: head.source,
        })
    }

    /// Size of the disk.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The UUID of the image.
    pub fn id(&self) -> ImageId {
        self.id
    }

    /// The UUID of the parent of a differencing image.
    pub fn parent(&self) -> Option<ImageId> {
        self.parent
    }

    /// Whether the blocks come in the order of the disk.
    pub fn is_in_order(&self) -> bool {
        self.blocks.is_sorted_by(|(_, first), (_, second)| first < second)
    }

    /// The ranges of the disk with stored blocks, in the order of the disk.
    pub fn stored(&self) -> Vec<Range<u64>> {
        let mut indices: Vec<u64> = self.blocks.iter().map(|(_, index)| *index).collect();
        indices.sort_unstable();
        indices.into_iter().map(|index| self.range_of(index)).collect()
    }

    fn range_of(&self, index: u64) -> Range<u64> {
        let start = index * self.header.block_bytes;
        start..(start + self.header.block_bytes).min(self.size_bytes)
    }

    /// Returns the reader, after everything that was read.
    pub fn into_inner(self) -> R {
        self.source.reader
    }

    /// Reads the next block; none at the end, after the footer.
    ///
    /// # Errors
    /// [`Error::is_corrupt`] if the stream is truncated, blocks overlap, or the footer differs from that at the start.
    pub fn next_block(&mut self) -> Result<Option<VhdBlock<'_>>> {
        let Some(&(place, index)) = self.blocks.get(self.next) else {
            return self.end().map(|()| None);
        };
        if place < self.source.at {
            let detail = format!("block {index} begins at {place}, and overlaps another structure");
            let entry = self.header.entry_offset(index);
            return Err(corrupt(&self.source.image, "table", entry, detail));
        }
        self.source.skip_to(place, "block")?;
        self.next += 1;
        self.source.read(&mut self.bitmap, "bitmap of a block")?;
        self.source.read(&mut self.data, "block")?;
        let range = self.range_of(index);
        Ok(Some(VhdBlock {
            offset: range.start,
            bytes: self.data.get(..to_usize(range.end - range.start)).unwrap_or(&self.data),
            bitmap: &self.bitmap,
        }))
    }

    /// Reads the footer after the last block.
    fn end(&mut self) -> Result<()> {
        self.source
            .skip_to(self.source.at.next_multiple_of(SECTOR_BYTES), "end")?;
        let mut footer = [0; to_usize(FOOTER_BYTES)];
        // Some programs align blocks to pages.
        for _ in 0..16 {
            self.source.read(&mut footer, "end")?;
            if footer.iter().any(|byte| *byte != 0) {
                break;
            }
        }
        // A resumed export is another image with the same content: it may have another UUID and timestamp.
        let at = self.source.at - FOOTER_BYTES;
        let same = |bytes: &FooterBytes, at: u64| {
            let footer = Footer::parse(bytes, at, &self.source.image)?;
            Ok::<_, crate::Error>(Footer {
                id: self.id,
                timestamp: 0,
                ..footer
            })
        };
        if footer == self.footer || same(&footer, at)? == same(&self.footer, 0)? {
            return Ok(());
        }
        let detail = "the footer is missing, or differs from that at the start".to_owned();
        Err(corrupt(
            &self.source.image,
            "end",
            self.source.at - FOOTER_BYTES,
            detail,
        ))
    }
}

/// Buffers everything before the blocks.
struct TableReader<R> {
    source: ForwardReader<R>,
    bytes: Vec<u8>,
}

impl<R: Read> TableReader<R> {
    /// The `N` bytes at `start`.
    fn at<const N: usize>(&mut self, start: u64) -> Result<&[u8; N]> {
        let cut_off = self.source.cut_off("tables");
        let bytes = self.bytes_before(start.saturating_add(N as u64))?;
        let found = bytes.get(to_usize(start)..).and_then(|rest| rest.first_chunk());
        found.ok_or(cut_off)
    }

    /// All bytes before `end`.
    fn bytes_before(&mut self, end: u64) -> Result<&[u8]> {
        if end > HEAD_BYTES_MAX {
            return Err(self.source.not_in_order(format!("its tables end at {end}")));
        }
        // The buffer grows as bytes arrive: the table size in a header alone is not trusted.
        while self.source.at < end {
            let start = self.bytes.len();
            let piece = HEAD_PIECE_BYTES.min(end - self.source.at);
            self.bytes.resize(start + to_usize(piece), 0);
            self.source
                .read(self.bytes.get_mut(start..).unwrap_or_default(), "tables")?;
        }
        Ok(&self.bytes)
    }
}
