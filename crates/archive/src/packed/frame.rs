//! Shared by gzip and zstd: frames of bounded length, and the input that they are read from.

use std::io;
use std::io::{Cursor, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Longer frames, packed or unpacked, are unpacked in pieces on one thread.
pub(crate) const FRAME_BYTES_MAX: usize = 64 << 20;

/// The compression of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// None.
    None,
    /// gzip, RFC 1952.
    Gzip,
    /// zstd, RFC 8878.
    Zstd,
    /// xz. It is read, and never written.
    Xz,
}

impl Packing {
    /// Detects the compression of a stream by its first four bytes.
    pub fn sniff(start: &[u8]) -> Self {
        match start {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            [0xfd, b'7', b'z', b'X', ..] => Self::Xz,
            _ => Self::None,
        }
    }

    /// Its usual name.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::Xz => "xz",
        }
    }
}

/// The packed stream, with a byte counter; bytes that were read ahead can be put back.
pub(crate) struct Input {
    pub(crate) ahead: Cursor<Vec<u8>>,
    pub(crate) stream: Box<dyn Read + Send>,
    pub(crate) read: Arc<AtomicU64>,
}

impl Input {
    pub(crate) fn give_back(&mut self, bytes: Vec<u8>) {
        let at = usize::try_from(self.ahead.position()).unwrap_or(usize::MAX);
        let rest = self.ahead.get_ref().get(at..).unwrap_or_default().to_vec();
        self.ahead = Cursor::new([bytes, rest].concat());
    }

    /// Appends `count` bytes to `bytes`.
    ///
    /// # Errors
    /// The stream ends early.
    pub(crate) fn append(&mut self, bytes: &mut Vec<u8>, count: usize) -> io::Result<()> {
        let read = self.by_ref().take(count as u64).read_to_end(bytes)?;
        if read == count {
            Ok(())
        } else {
            Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the packed stream ends in the middle of a frame: it was cut off",
            ))
        }
    }
}

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.ahead.read(buffer)?;
        if count > 0 || buffer.is_empty() {
            return Ok(count);
        }
        let count = self.stream.read(buffer)?;
        self.read.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// The next frame of a stream.
pub(crate) enum Frame {
    /// None: the stream ends here.
    End,
    /// A whole frame, with its unpacked length.
    Whole { bytes: Vec<u8>, unpacked_bytes: usize },
    /// The start of a frame of unknown or excessive length.
    Long { start: Vec<u8> },
}

/// Bytes of a block: for gzip, large enough that the lost history of its window does not matter; for zstd, small enough
/// that the blocks of all threads fit into a cache.
pub(crate) const GZIP_BLOCK_BYTES: usize = 1 << 20;
pub(crate) const ZSTD_BLOCK_BYTES: usize = 4 << 20;
