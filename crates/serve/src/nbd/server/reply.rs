//! Encoded replies, collected in a reusable buffer.

use super::handshake::bounded;
use crate::nbd::wire::{ChunkHeader, ChunkKind, ErrorNumber, HeaderStyle, ReplyFlags, SIMPLE_REPLY_MAGIC};

/// Capacity that a buffer keeps when it is cleared.
const KEPT_BYTES_MAX: usize = 2 << 20;

/// Bytes to send. The buffer keeps its memory, so that data can be read into it without zeroing the memory again.
#[derive(Debug, Default)]
pub(crate) struct ReplyBuffer {
    bytes: Vec<u8>,
    end: usize,
    /// The start of the current reply.
    mark: usize,
    header: Vec<u8>,
}

impl ReplyBuffer {
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.end]
    }

    /// Number of bytes collected so far.
    pub(crate) fn len(&self) -> usize {
        self.end
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.end == 0
    }

    pub(crate) fn clear(&mut self) {
        self.end = 0;
        self.mark = 0;
        if self.bytes.len() > KEPT_BYTES_MAX {
            self.bytes.truncate(KEPT_BYTES_MAX);
            self.bytes.shrink_to_fit();
        }
    }

    /// Starts another reply.
    pub(crate) fn begin(&mut self) {
        self.mark = self.end;
    }

    /// Discards the rest of the current reply; its first bytes may have been sent already.
    pub(crate) fn abandon(&mut self) {
        self.end = self.mark;
    }

    /// Truncates to the first `length` bytes.
    pub(crate) fn rewind(&mut self, length: usize) {
        self.end = self.end.min(length);
    }

    /// Appends `length` bytes of arbitrary contents, which the caller must overwrite or truncate.
    pub(crate) fn space(&mut self, length: usize) -> &mut [u8] {
        let start = self.end;
        self.end += length;
        if self.bytes.is_empty() {
            // Zeroed memory from the system costs nothing.
            self.bytes = vec![0; self.end];
        } else if self.bytes.len() < self.end {
            self.bytes.resize(self.end, 0);
        }
        &mut self.bytes[start..self.end]
    }

    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.space(bytes.len()).copy_from_slice(bytes);
    }

    /// Appends a successful reply without data.
    pub(crate) fn success(&mut self, style: HeaderStyle, to: ReplyTarget) {
        match style {
            HeaderStyle::Simple => self.simple(to, ErrorNumber::OK),
            HeaderStyle::Structured | HeaderStyle::Extended => {
                self.chunk(style, to, ReplyFlags::DONE, ChunkKind::NONE, 0);
            }
        }
    }

    /// Appends an error; a simple reply has no message.
    pub(crate) fn error(&mut self, style: HeaderStyle, to: ReplyTarget, error: ErrorNumber, message: &str) {
        if style == HeaderStyle::Simple {
            return self.simple(to, error);
        }
        let message = bounded(message).as_bytes();
        let length = u16::try_from(message.len()).expect("at most 4096 bytes");
        self.chunk(style, to, ReplyFlags::DONE, ChunkKind::ERROR, 6 + u64::from(length));
        self.put(&error.0.to_be_bytes());
        self.put(&length.to_be_bytes());
        self.put(message);
    }

    /// Appends the header of a simple reply; data follows a successful read.
    pub(crate) fn simple(&mut self, to: ReplyTarget, error: ErrorNumber) {
        let mut header = [0; crate::nbd::wire::SIMPLE_REPLY_BYTES];
        header[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        header[4..8].copy_from_slice(&error.0.to_be_bytes());
        header[8..].copy_from_slice(&to.cookie.to_be_bytes());
        self.put(&header);
    }

    /// Appends the header of a chunk of `length` bytes.
    pub(crate) fn chunk(
        &mut self,
        style: HeaderStyle,
        to: ReplyTarget,
        flags: ReplyFlags,
        kind: ChunkKind,
        length: u64,
    ) {
        let header = ChunkHeader {
            flags,
            kind,
            cookie: to.cookie,
            offset: to.offset,
            length,
        };
        let mut bytes = std::mem::take(&mut self.header);
        bytes.clear();
        header.encode(style, &mut bytes);
        self.put(&bytes);
        self.header = bytes;
    }
}

impl AsRef<[u8]> for ReplyBuffer {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

/// The request that a reply belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReplyTarget {
    pub(crate) cookie: u64,
    /// The offset of the request; extended headers repeat it.
    pub(crate) offset: u64,
}
