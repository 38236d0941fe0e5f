//! Compression of streams while the link is slower than the compression.
//!
//! A compressed stream is a row of zstd frames, which any program that knows zstd decompresses. A frame is stored as it is as long as the link takes
//! what it gets at once; where chunks wait for the link there is time to compress the next one. So nothing has to be measured first, and a
//! link that gets slower in the middle is noticed.

use std::io;

use zstd::bulk::Compressor;

/// Maximum length of a chunk in bytes.
pub(super) const CHUNK_BYTES: usize = 1 << 20;
const LEVEL: i32 = 3;
/// Frames that are not tried after one that did not get smaller: data that is encrypted, or compressed already.
const SKIP_COUNT: u32 = 7;
/// RFC 8878, 3.1.1.2: a block has at most 128 KiB.
const BLOCK_BYTES_MAX: usize = 128 << 10;
const MAGIC: u32 = 0xFD2F_B528;
/// A single segment, whose content size has four bytes.
const DESCRIPTOR: u8 = 0b1010_0000;

/// Whether a chunk is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    /// Stored uncompressed.
    None,
    /// Compressed, unless recent chunks did not get smaller.
    Try,
    /// Compressed, if that makes it smaller.
    Full,
}

/// Makes a frame of each chunk.
pub(super) struct FrameCompressor {
    compressor: Compressor<'static>,
    skip: u32,
}

impl FrameCompressor {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            compressor: Compressor::new(LEVEL)?,
            skip: 0,
        })
    }

    pub(super) fn frame(&mut self, chunk: &[u8], effort: Compression) -> io::Result<Vec<u8>> {
        match effort {
            Compression::None => return Ok(stored(chunk)),
            Compression::Try if self.skip > 0 => {
                self.skip -= 1;
                return Ok(stored(chunk));
            }
            Compression::Try | Compression::Full => {}
        }
        let packed = self.compressor.compress(chunk)?;
        if packed.len() > chunk.len() - chunk.len() / 16 {
            self.skip = SKIP_COUNT;
            return Ok(stored(chunk));
        }
        Ok(packed)
    }
}

/// A frame with an uncompressed chunk: RFC 8878, 3.1.1.
fn stored(chunk: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(chunk.len() + 64);
    let size = u32::try_from(chunk.len()).expect("a chunk is small");
    frame.extend(MAGIC.to_le_bytes());
    frame.push(DESCRIPTOR);
    frame.extend(size.to_le_bytes());
    let mut blocks = chunk.chunks(BLOCK_BYTES_MAX).peekable();
    if blocks.peek().is_none() {
        frame.extend([1, 0, 0]);
    }
    while let Some(block) = blocks.next() {
        let size = u32::try_from(block.len()).expect("a block is small");
        let head = size << 3 | u32::from(blocks.peek().is_none());
        frame.extend(&head.to_le_bytes()[..3]);
        frame.extend(block);
    }
    frame
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use holdfast_block::SeededRandom;

    use super::{CHUNK_BYTES, Compression, FrameCompressor, SKIP_COUNT};

    fn noise(length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        SeededRandom::new(length as u64).fill(&mut bytes);
        bytes
    }

    #[test]
    fn frames_of_any_kind_in_a_row_are_read_back() {
        let mut compressor = FrameCompressor::new().unwrap();
        let mut expected = Vec::new();
        let mut packed = Vec::new();
        for (round, length) in [0, 1, 131_071, 131_072, 131_073, CHUNK_BYTES - 1, CHUNK_BYTES]
            .into_iter()
            .enumerate()
        {
            for chunk in [noise(length), vec![7; length]] {
                packed.extend(
                    compressor
                        .frame(
                            &chunk,
                            if round % 2 == 0 {
                                Compression::Full
                            } else {
                                Compression::None
                            },
                        )
                        .unwrap(),
                );
                expected.extend(chunk);
            }
        }
        let mut read = Vec::new();
        zstd::stream::read::Decoder::new(&packed[..])
            .unwrap()
            .read_to_end(&mut read)
            .unwrap();
        assert!(read == expected);
    }

    #[test]
    fn what_does_not_get_smaller_is_not_tried_for_a_while() {
        let mut compressor = FrameCompressor::new().unwrap();
        let zeros = vec![0; CHUNK_BYTES];
        assert!(compressor.frame(&zeros, Compression::Try).unwrap().len() < 1000);
        assert!(compressor.frame(&zeros, Compression::None).unwrap().len() > CHUNK_BYTES);
        assert!(compressor.frame(&noise(CHUNK_BYTES), Compression::Try).unwrap().len() > CHUNK_BYTES);
        let tries = (0..=SKIP_COUNT).map(|_| compressor.frame(&zeros, Compression::Try).unwrap().len());
        let packed: Vec<bool> = tries.map(|length| length < 1000).collect();
        assert_eq!(packed.iter().filter(|is_packed| **is_packed).count(), 1);
        assert!(packed[SKIP_COUNT as usize]);
    }
}
