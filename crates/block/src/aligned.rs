//! Memory aligned for direct I/O.

use std::ops::{Deref, DerefMut};

/// Alignment that satisfies every disk with sectors up to 4096 bytes, and the page size of the page cache.
pub(crate) const ALIGNMENT: usize = 4096;

/// A buffer aligned to 4096 bytes. A device in [`IoMode::Direct`](crate::IoMode) needs no bounce buffer for it, unlike
/// for other memory.
#[derive(Debug, Default)]
pub struct AlignedBuffer {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl AlignedBuffer {
    /// `length` bytes of zero.
    pub fn new(length: usize) -> Self {
        let memory = vec![0; length + ALIGNMENT];
        // In an interpreter, this may be usize::MAX: the buffer is not aligned then, and everything still works.
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { memory, start, length }
    }

    /// Changes the length to `length` bytes. Existing bytes are kept. New bytes are zero, or have the value from before
    /// the buffer was shortened.
    pub fn set_length(&mut self, length: usize) {
        if self.start + length <= self.memory.len() {
            self.length = length;
        } else {
            let mut longer = Self::new(length);
            longer[..self.length].copy_from_slice(self);
            *self = longer;
        }
    }
}

/// Whether `memory` is aligned for direct I/O.
pub(crate) fn is_aligned(memory: &[u8]) -> bool {
    memory.as_ptr().addr().is_multiple_of(ALIGNMENT)
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.length]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::{AlignedBuffer, is_aligned};

    #[test]
    fn it_is_aligned_at_every_length() {
        let mut buffer = AlignedBuffer::default();
        assert!(buffer.is_empty());
        for length in [1, 4096, 5, 10_000, 0, 1 << 20] {
            let kept = length.min(buffer.len());
            buffer.set_length(length);
            assert!(buffer.len() == length && is_aligned(&buffer));
            assert!(buffer[..kept].iter().all(|byte| *byte == 7));
            buffer.fill(7);
        }
    }
}
