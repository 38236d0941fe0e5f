//! Reads a VHD from a stream into a disk.

use std::io::{self, Read};

use holdfast_block::to_usize;

use super::layout::checksum;
use super::{SECTOR_BYTES, UNUSED};
use crate::handlers::Target;

/// Limit of blocks in a table: that of the largest VHD.
const BLOCK_COUNT_MAX: u64 = 2040 << 9;

/// A stream, and the number of bytes that were read.
struct Source<'a> {
    stream: &'a mut dyn Read,
    offset: u64,
}

impl Source<'_> {
    fn read(&mut self, length: u64) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; to_usize(length)];
        self.stream.read_exact(&mut bytes)?;
        self.offset += length;
        Ok(bytes)
    }

    fn skip_to(&mut self, offset: u64) -> io::Result<()> {
        let length = offset.checked_sub(self.offset).ok_or_else(|| bad("parts overlap"))?;
        let skipped = io::copy(&mut (&mut *self.stream).take(length), &mut io::sink())?;
        self.offset += skipped;
        if skipped < length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }
}

fn bad(what: &str) -> io::Error {
    io::Error::other(format!("VHD: {what}"))
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_be_bytes([bytes[offset], bytes[offset + 1], bytes[offset + 2], bytes[offset + 3]])
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from(u32_at(bytes, offset)) << 32 | u64::from(u32_at(bytes, offset + 4))
}

/// Writes the blocks of a dynamic or differencing VHD to `target`; the rest of `target` is not changed.
pub(crate) fn read(stream: &mut dyn Read, target: &Target<'_>) -> io::Result<()> {
    let mut source = Source { stream, offset: 0 };
    let footer = source.read(512)?;
    if &footer[..8] != b"conectix" || u32_at(&footer, 64) != checksum(&footer, 64) {
        return Err(bad("no footer at the beginning"));
    }
    if u64_at(&footer, 48) > target.size_bytes {
        return Err(bad("larger than the disk"));
    }
    if !matches!(u32_at(&footer, 60), 3 | 4) {
        return Err(bad("neither dynamic nor differencing"));
    }
    source.skip_to(u64_at(&footer, 16))?;
    let header = source.read(1024)?;
    if &header[..8] != b"cxsparse" || u32_at(&header, 36) != checksum(&header, 36) {
        return Err(bad("no header"));
    }
    let block_bytes = u64::from(u32_at(&header, 32));
    let count = u64::from(u32_at(&header, 28));
    if !block_bytes.is_power_of_two() || !(4096..=64 << 20).contains(&block_bytes) || count > BLOCK_COUNT_MAX {
        return Err(bad("impossible blocks"));
    }
    source.skip_to(u64_at(&header, 16))?;
    let table = source.read(count * 4)?;
    let mut blocks: Vec<(u32, u64)> = table
        .chunks_exact(4)
        .map(|entry| u32_at(entry, 0))
        .zip(0..)
        .filter(|(sector, _)| *sector != UNUSED)
        .collect();
    // The stream contains the blocks in the order of their offsets.
    blocks.sort_unstable();
    let bitmap_bytes = (block_bytes / SECTOR_BYTES).div_ceil(8).next_multiple_of(SECTOR_BYTES);
    for (sector, number) in blocks {
        source.skip_to(u64::from(sector) * SECTOR_BYTES)?;
        let bitmap = source.read(bitmap_bytes)?;
        let block = source.read(block_bytes)?;
        write_block(target, number * block_bytes, &bitmap, &block)?;
    }
    io::copy(source.stream, &mut io::sink())?;
    Ok(())
}

/// Writes the sectors that are set in the bitmap, in runs.
fn write_block(target: &Target<'_>, start: u64, bitmap: &[u8], block: &[u8]) -> io::Result<()> {
    let sector_bytes = to_usize(SECTOR_BYTES);
    let is_there = |sector: usize| bitmap[sector / 8] & 0x80 >> (sector % 8) != 0;
    let count = block.len() / sector_bytes;
    let mut sector = 0;
    while sector < count {
        let end = (sector..count)
            .find(|other| is_there(*other) != is_there(sector))
            .unwrap_or(count);
        let offset = start + (sector * sector_bytes) as u64;
        if is_there(sector) && offset < target.size_bytes {
            let run = &block[sector * sector_bytes..end * sector_bytes];
            // The last block may reach past the end of the disk.
            let length = to_usize(target.size_bytes - offset).min(run.len());
            target.write(offset, &run[..length])?;
        }
        sector = end;
    }
    Ok(())
}
