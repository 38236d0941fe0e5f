//! Pieces of a disk that is copied, with the decision for each cluster: zero, equal to the backing file, plain or
//! compressed.

use std::ops::Range;

use holdfast_block::{AlignedBuffer, BlockDevice, is_zero, to_usize};

use crate::Result;

/// Compresses a cluster; none if that would not make it smaller.
pub(crate) type Compress<'a> = dyn FnMut(&[u8]) -> Option<Vec<u8>> + 'a;

/// Bytes of the source, with their offset.
pub(crate) struct Piece {
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) buffer: AlignedBuffer,
}

/// A piece, divided into parts that are stored in different ways.
pub(crate) struct ClassifiedBuffer {
    pub(crate) piece: Piece,
    pub(crate) parts: Vec<BufferPart>,
}

/// How some clusters of a piece are stored.
pub(crate) enum BufferPart {
    /// As they are.
    Plain(Range<u64>),
    /// Not at all: the backing file has the same data.
    SameAsBacking(Range<u64>),
    /// Compressed: one cluster, at offset `at` of the piece.
    Compressed { at: u64, bytes: Vec<u8> },
}

/// Reads `range` of the source into `buffer`.
pub(crate) fn read_piece(source: &dyn BlockDevice, range: Range<u64>, mut buffer: AlignedBuffer) -> Result<Piece> {
    let length = range.end - range.start;
    buffer.set_length(to_usize(length));
    source.read_at(&mut buffer, range.start)?;
    Ok(Piece {
        offset: range.start,
        length,
        buffer,
    })
}

/// Reads from the backing file where `piece` is; zero past its end.
pub(crate) fn read_base<'a>(base: &dyn BlockDevice, piece: &Piece, buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
    let end = piece.offset + piece.length;
    let held = to_usize(base.size_bytes().clamp(piece.offset, end) - piece.offset);
    buffer.resize(to_usize(piece.length), 0);
    buffer[held..].fill(0);
    if held > 0 {
        base.read_at(&mut buffer[..held], piece.offset)?;
    }
    Ok(buffer)
}

impl Piece {
    /// Pads the last cluster with zeroes if the source is smaller than the disk.
    pub(crate) fn padded(mut self, cluster_bytes: u64, disk_end: u64) -> Self {
        let end = (self.offset + self.length)
            .next_multiple_of(cluster_bytes)
            .min(disk_end);
        let held = to_usize(self.length);
        self.length = end - self.offset;
        self.buffer.set_length(to_usize(self.length));
        self.buffer[held..].fill(0);
        self
    }

    /// Classifies the clusters: zero, plain, compressed, or equal to the backing file.
    pub(crate) fn sort(
        self,
        cluster_bytes: u64,
        below: Option<&[u8]>,
        mut compress: Option<&mut Compress<'_>>,
    ) -> ClassifiedBuffer {
        let mut parts: Vec<BufferPart> = Vec::new();
        let mut at = 0;
        while at < self.length {
            let end = (at + cluster_bytes).min(self.length);
            let cluster = &self.buffer[to_usize(at)..to_usize(end)];
            if below.is_some_and(|below| below[to_usize(at)..to_usize(end)] == *cluster) {
                match parts.last_mut() {
                    Some(BufferPart::SameAsBacking(range)) if range.end == at => range.end = end,
                    _ => parts.push(BufferPart::SameAsBacking(at..end)),
                }
            } else if !is_zero(cluster) {
                let compressed = compress.as_mut().and_then(|compress| {
                    if end - at == cluster_bytes {
                        return compress(cluster);
                    }
                    // The last cluster of the disk is compressed with its padding.
                    let mut whole = cluster.to_vec();
                    whole.resize(to_usize(cluster_bytes), 0);
                    compress(&whole)
                });
                match (compressed, parts.last_mut()) {
                    (Some(bytes), _) => parts.push(BufferPart::Compressed { at, bytes }),
                    (None, Some(BufferPart::Plain(range))) if range.end == at => range.end = end,
                    (None, _) => parts.push(BufferPart::Plain(at..end)),
                }
            }
            at = end;
        }
        ClassifiedBuffer { piece: self, parts }
    }
}
