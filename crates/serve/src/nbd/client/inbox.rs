//! Received bytes that are not parsed yet.

use std::io::IoSliceMut;

/// Usual size of the buffer: one read may return this many bytes more than are needed.
const BUFFER_BYTES: usize = 64 << 10;

/// A buffer between the stream and the replies.
#[derive(Debug)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self {
            bytes: vec![0; BUFFER_BYTES],
            start: 0,
            end: 0,
        }
    }

    /// The buffered bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Removes the first `count` bytes.
    pub(super) fn consume(&mut self, count: usize) {
        self.start += count;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.bytes.len() > BUFFER_BYTES {
                // Shrinks the buffer after a long reply, which is rare.
                self.bytes = vec![0; BUFFER_BYTES];
            }
        }
    }

    /// Reads until at least `wanted` bytes are buffered. Memory grows with the bytes that have arrived, not with the
    /// announced length.
    pub(super) fn fill<E>(
        &mut self,
        wanted: usize,
        mut read: impl FnMut(&mut [IoSliceMut]) -> Result<usize, E>,
    ) -> Result<(), E> {
        if self.start + wanted > self.bytes.len() {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        while self.end - self.start < wanted {
            if self.end == self.bytes.len() {
                let length = (self.bytes.len() * 2).min(wanted.max(BUFFER_BYTES));
                self.bytes.resize(length, 0);
            }
            self.end += read(&mut [IoSliceMut::new(&mut self.bytes[self.end..])])?;
        }
        Ok(())
    }

    /// Moves the next bytes to `target`. Bytes that are not buffered are read directly into `target`.
    pub(super) fn read_to<E>(
        &mut self,
        target: &mut [u8],
        mut read: impl FnMut(&mut [IoSliceMut]) -> Result<usize, E>,
    ) -> Result<(), E> {
        let here = self.bytes().len().min(target.len());
        target[..here].copy_from_slice(&self.bytes()[..here]);
        self.consume(here);
        let mut rest = &mut target[here..];
        while !rest.is_empty() {
            // Bytes after the data are read into the empty buffer, so the next header needs no extra system call.
            let mut slices = [IoSliceMut::new(rest), IoSliceMut::new(&mut self.bytes)];
            let count = read(&mut slices)?;
            let straight = count.min(rest.len());
            self.end = count - straight;
            rest = &mut rest[straight..];
        }
        Ok(())
    }

    /// Discards the next `count` bytes.
    pub(super) fn skip<E>(
        &mut self,
        count: u64,
        mut read: impl FnMut(&mut [IoSliceMut]) -> Result<usize, E>,
    ) -> Result<(), E> {
        let mut left = count;
        while left > 0 {
            self.fill(1, &mut read)?;
            let here = left.min(self.bytes().len() as u64);
            self.consume(holdfast_block::to_usize(here));
            left -= here;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::io::{IoSliceMut, Read};

    use holdfast_block::SeededRandom;
    use holdfast_block::conformance::test_seed;
    use holdfast_block::to_usize;

    use super::Inbox;

    #[test]
    fn bytes_come_out_in_order_however_they_come_in() {
        let mut random = SeededRandom::new(test_seed());
        let sent = random.bytes(3 << 20);
        let mut source = &sent[..];
        let mut pieces = random.clone();
        let mut read = |buffers: &mut [IoSliceMut]| -> Result<usize, Infallible> {
            let mut limited = Read::take(&mut source, 1 + pieces.below(100_000));
            Ok(limited.read_vectored(buffers).unwrap())
        };
        let (mut inbox, mut at) = (Inbox::new(), 0);
        while at < sent.len() - 600_000 {
            let length = to_usize(1 + random.below(300_000));
            match random.below(3) {
                0 => {
                    inbox.fill(length, &mut read).unwrap();
                    assert_eq!(inbox.bytes()[..length], sent[at..at + length]);
                    inbox.consume(length);
                }
                1 => {
                    let mut target = vec![0; length];
                    inbox.read_to(&mut target, &mut read).unwrap();
                    assert_eq!(target, sent[at..at + length]);
                }
                _ => inbox.skip(length as u64, &mut read).unwrap(),
            }
            at += length;
        }
    }
}
