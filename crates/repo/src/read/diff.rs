//! The differences between two disks of snapshots, without reading what they share.
//!
//! The two maps are walked together. Identical pages are skipped at any level; pieces at the same location of
//! the repository are equal; for blocks at different locations the prints are compared, which needs no frame. Only
//! streams, whose pieces have arbitrary boundaries, are read where their maps differ.

use std::ops::Range;

use holdfast_block::{BlockDevice, to_usize};

use crate::error::{Error, Result};
use crate::format::fingerprint::{BLOCK_BYTES, PRINT_LENGTH};
use crate::format::manifest::{DiskContent, DiskRecord};
use crate::format::map::{FANOUT, LEAF_BYTES, MapReader, Piece, PieceContent, height};
use crate::format::pack::Location;
use crate::read::device::SnapshotDevice;
use crate::repository::Repository;
use crate::repository::packs::Packs;

impl Repository {
    /// Calls `visit` with every range of bytes that differs between two disks, in order, with adjacent ranges joined; a
    /// range ends at a block boundary (4096 bytes) or at the end of the disk. If one disk is longer, the excess
    /// differs.
    ///
    /// The first error of `visit` ends the walk.
    pub fn diff(
        &self,
        old: &DiskRecord,
        new: &DiskRecord,
        visit: &mut dyn FnMut(Range<u64>) -> Result<()>,
    ) -> Result<()> {
        let (old_device, new_device) = (self.device(old), self.device(new));
        let has_prints = old.content == DiskContent::Blocks && new.content == DiskContent::Blocks;
        let common_bytes = old.size_bytes.min(new.size_bytes);
        let mut diff = Diff {
            packs: &self.packs,
            old: old_device.map(),
            new: new_device.map(),
            devices: (&old_device, &new_device),
            has_prints,
            common_bytes,
            ranges: RangeJoiner { pending: None, visit },
        };
        diff.run()?;
        diff.ranges.push(common_bytes..old.size_bytes.max(new.size_bytes))?;
        diff.ranges.finish()
    }
}

/// Merges adjacent ranges.
struct RangeJoiner<'a> {
    pending: Option<Range<u64>>,
    visit: &'a mut dyn FnMut(Range<u64>) -> Result<()>,
}

impl RangeJoiner<'_> {
    fn push(&mut self, range: Range<u64>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        match &mut self.pending {
            Some(pending) if pending.end == range.start => {
                pending.end = range.end;
                Ok(())
            }
            pending => match pending.replace(range) {
                Some(complete) => (self.visit)(complete),
                None => Ok(()),
            },
        }
    }

    fn finish(&mut self) -> Result<()> {
        self.pending.take().map_or(Ok(()), |range| (self.visit)(range))
    }
}

struct Diff<'a> {
    packs: &'a Packs,
    old: MapReader<'a>,
    new: MapReader<'a>,
    /// The devices to read streams from, which have no prints.
    devices: (&'a SnapshotDevice, &'a SnapshotDevice),
    has_prints: bool,
    common_bytes: u64,
    ranges: RangeJoiner<'a>,
}

impl Diff<'_> {
    fn run(&mut self) -> Result<()> {
        let leaf_count = self.common_bytes.div_ceil(LEAF_BYTES);
        let top = height(self.old.size_bytes()).min(height(self.new.size_bytes()));
        let mut leaf = 0;
        'leaves: while leaf < leaf_count {
            for level in (0..=top).rev() {
                let span = FANOUT.pow(level);
                if self.old.page_ref(level, leaf / span)? == self.new.page_ref(level, leaf / span)? {
                    leaf = (leaf / span + 1).saturating_mul(span);
                    continue 'leaves;
                }
            }
            self.leaf(leaf)?;
            leaf += 1;
        }
        Ok(())
    }

    /// Compares the pieces of a leaf whose pages differ.
    fn leaf(&mut self, number: u64) -> Result<()> {
        let pieces = |map: &mut MapReader<'_>| -> Result<Vec<Piece>> {
            let zero = Piece {
                length: map.leaf_span(number),
                content: PieceContent::Zero,
            };
            Ok(map.leaf(number)?.unwrap_or_else(|| vec![zero]))
        };
        let old = pieces(&mut self.old)?;
        let new = pieces(&mut self.new)?;
        let (mut old, mut new) = (old.into_iter(), new.into_iter());
        let (mut left, mut right) = (old.next(), new.next());
        let mut offset = number * LEAF_BYTES;
        while let (Some(a), Some(b)) = (left, right)
            && offset < self.common_bytes
        {
            let length = a.length.min(b.length);
            self.pair(offset, length, a.content, b.content)?;
            offset += length;
            let rest = |piece: Piece| (piece.length > length).then(|| piece.part(length, u64::MAX));
            left = rest(a).or_else(|| old.next());
            right = rest(b).or_else(|| new.next());
        }
        Ok(())
    }

    /// Compares `length` bytes at `offset`, which are a single piece in each map.
    fn pair(&mut self, offset: u64, length: u64, old: PieceContent, new: PieceContent) -> Result<()> {
        match (old, new) {
            (PieceContent::Zero, PieceContent::Zero) => Ok(()),
            (PieceContent::Data(a), PieceContent::Data(b)) if a == b => Ok(()),
            _ if !self.has_prints => self.bytes(offset, length),
            (PieceContent::Data(a), PieceContent::Data(b)) => self.prints(offset, length, a, b),
            // A block of zeroes has no location: blocks with a location are not zero.
            _ => self.changed(offset, length),
        }
    }

    /// Compares blocks that may differ. Of a block that extends past the end of the shorter disk, only the common
    /// part is compared.
    fn changed(&mut self, offset: u64, length: u64) -> Result<()> {
        let end = offset + length;
        if end <= self.common_bytes {
            return self.ranges.push(offset..end);
        }
        let whole_end = (self.common_bytes - self.common_bytes % BLOCK_BYTES).max(offset);
        self.ranges.push(offset..whole_end)?;
        self.bytes(whole_end, end - whole_end)
    }

    fn prints(&mut self, offset: u64, length: u64, old: Location, new: Location) -> Result<()> {
        let mut done = 0;
        while done < length {
            let (a, together_a) = self.packs.resolve(old.advance(done), length - done)?;
            let (b, together) = self.packs.resolve(new.advance(done), together_a)?;
            if a != b {
                let old_prints = self.packs.prints(a.pack, a.frame)?;
                let new_prints = self.packs.prints(b.pack, b.frame)?;
                for block in 0..together.div_ceil(BLOCK_BYTES) {
                    let at = block * BLOCK_BYTES;
                    if print_at(&old_prints, a.advance(at))? != print_at(&new_prints, b.advance(at))? {
                        self.changed(offset + done + at, BLOCK_BYTES)?;
                    }
                }
            }
            done += together;
        }
        Ok(())
    }

    fn bytes(&mut self, offset: u64, length: u64) -> Result<()> {
        const STEP_BYTES: u64 = 1 << 20;
        let (old, new) = self.devices;
        let end = (offset + length).min(self.common_bytes);
        let mut at = offset;
        let (mut a, mut b) = (Vec::new(), Vec::new());
        while at < end {
            // Steps end at block boundaries, and therefore ranges do as well.
            let step = (STEP_BYTES - at % BLOCK_BYTES).min(end - at);
            for (device, buffer) in [(old, &mut a), (new, &mut b)] {
                buffer.resize(to_usize(step), 0);
                device.read_at(buffer, at).map_err(device_error)?;
            }
            let mut start = 0;
            while start < step {
                let block = (BLOCK_BYTES - (at + start) % BLOCK_BYTES).min(step - start);
                let range = to_usize(start)..to_usize(start + block);
                if a[range.clone()] != b[range] {
                    self.ranges.push(at + start..at + start + block)?;
                }
                start += block;
            }
            at += step;
        }
        Ok(())
    }
}

/// A disk of a snapshot is backed by the repository, so its errors are errors of the repository.
fn device_error(error: holdfast_block::Error) -> Error {
    match error {
        holdfast_block::Error::Layer(inner) => match inner.downcast::<Error>() {
            Ok(error) => *error,
            Err(inner) => snapshot_error(holdfast_block::Error::Layer(inner)),
        },
        other => snapshot_error(other),
    }
}

fn snapshot_error(source: holdfast_block::Error) -> Error {
    Error::Device {
        role: "snapshot",
        name: String::new(),
        source,
    }
}

fn print_at(prints: &[u8], location: Location) -> Result<&[u8]> {
    let block = to_usize(u64::from(location.offset) / BLOCK_BYTES);
    prints
        .get(block * PRINT_LENGTH..(block + 1) * PRINT_LENGTH)
        .ok_or_else(|| {
            let detail = format!("a map names block {block} of frame {}, which has fewer", location.frame);
            Error::damaged(
                &crate::format::pack::pack_name(location.pack),
                location.offset.into(),
                detail,
            )
        })
}
