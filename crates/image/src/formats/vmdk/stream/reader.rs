//! Reads a stream once from start to end.

use std::io::Read;
use std::num::NonZero;

use libdeflater::Decompressor;

use super::grains::{GrainScanner, StreamedGrain};
use crate::error::corrupt;
use crate::model::forward_reader::ForwardReader;
use crate::{Error, ImageId, Result};

/// Bytes of grains that each thread decompresses at a time.
const BATCH_BYTES: u64 = 2 << 20;

/// Reads a streamOptimized VMDK sequentially, from a pipe or an archive.
///
/// Grains come in the order of the disk; bytes without a grain are zero. (VMware's open-vmdk can write another order,
/// which is [`Error::NotInOrder`]: open such a file with [`open`](crate::open).) At the end, the reader has been read
/// to its end, too.
pub struct StreamReader<R> {
    grains: GrainScanner<R>,
    threads: usize,
    /// One for each thread.
    decompressors: Vec<Decompressor>,
    /// Decompressed grains, and how many of them were returned.
    ready: Vec<StreamedGrain>,
    given: usize,
    /// Following grains, still compressed.
    ahead: Vec<StreamedGrain>,
    /// Grains whose buffers can be reused.
    spare: Vec<StreamedGrain>,
    end: StreamEnd,
}

/// What follows the grains that were read.
enum StreamEnd {
    /// More grains, as far as is known.
    More,
    /// The end of the stream.
    Complete,
    /// An error, to be returned after the grains before it.
    Failed(Error),
    /// An error that was returned.
    Returned,
}

/// A grain of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamGrain<'a> {
    /// Its offset in bytes.
    pub offset: u64,
    /// Its content; shorter at the end of the disk.
    pub bytes: &'a [u8],
}

impl<R: Read> StreamReader<R> {
    /// Reads everything before the first grain; errors call the stream `image`.
    ///
    /// # Errors
    /// [`Error::NotInOrder`] if the VMDK can be read from a file only. [`Error::is_corrupt`] if it is no VMDK.
    pub fn open(reader: R, image: &str) -> Result<Self> {
        let source = ForwardReader {
            reader,
            image: image.to_owned(),
            at: 0,
        };
        Ok(Self {
            grains: GrainScanner::open(source)?,
            threads: 1,
            decompressors: vec![Decompressor::new()],
            ready: Vec::new(),
            given: 0,
            ahead: Vec::new(),
            spare: Vec::new(),
            end: StreamEnd::More,
        })
    }

    /// Reads ahead some MiB for each thread, and decompresses on this many threads. By default nothing is read
    /// in advance.
    #[must_use]
    pub fn with_threads(mut self, threads: NonZero<usize>) -> Self {
        self.threads = threads.get();
        self.decompressors.resize_with(self.threads, Decompressor::new);
        self
    }

    /// Size of the disk.
    pub fn size_bytes(&self) -> u64 {
        self.grains.preamble.size_bytes
    }

    /// The UUID in its descriptor.
    pub fn id(&self) -> Option<ImageId> {
        self.grains.preamble.id
    }

    /// Bytes of the stream that were read so far.
    pub fn read_bytes(&self) -> u64 {
        self.grains.source.at
    }

    /// Returns the reader, after everything that was read.
    pub fn into_inner(self) -> R {
        self.grains.source.reader
    }

    /// Reads the next grain; none at the end of a complete stream.
    ///
    /// # Errors
    /// [`Error::NotInOrder`] if a grain is out of order; [`Error::is_corrupt`] if the stream is truncated or invalid.
    /// Grains before the error are valid as far as can be known, but the disk is incomplete. After an error there are
    /// only errors.
    pub fn next_grain(&mut self) -> Result<Option<StreamGrain<'_>>> {
        if self.given == self.ready.len() {
            self.refill();
        }
        let image = &self.grains.source.image;
        let Some(grain) = self.ready.get(self.given) else {
            return match std::mem::replace(&mut self.end, StreamEnd::Returned) {
                StreamEnd::Failed(error) => Err(error),
                StreamEnd::Returned => Err(corrupt(
                    image,
                    "stream",
                    self.grains.source.at,
                    "it was not read completely",
                )),
                StreamEnd::More | StreamEnd::Complete => {
                    self.end = StreamEnd::Complete;
                    Ok(None)
                }
            };
        };
        match grain.bytes(image) {
            Ok(bytes) => {
                self.given += 1;
                Ok(Some(StreamGrain {
                    offset: grain.offset,
                    bytes,
                }))
            }
            Err(error) => {
                self.end = StreamEnd::Returned;
                Err(error)
            }
        }
    }

    /// Prepares more grains, if there are any.
    fn refill(&mut self) {
        self.spare.append(&mut self.ready);
        self.given = 0;
        if self.ahead.is_empty() {
            self.read_ahead();
        }
        let mut ready = std::mem::take(&mut self.ahead);
        let mut decompressors = std::mem::take(&mut self.decompressors);
        if let [only] = &mut decompressors[..] {
            for grain in &mut ready {
                grain.inflate(only);
            }
        } else {
            let share = ready.len().div_ceil(self.threads).max(1);
            std::thread::scope(|scope| {
                for (grains, decompressor) in ready.chunks_mut(share).zip(&mut decompressors) {
                    scope.spawn(move || {
                        for grain in grains {
                            grain.inflate(decompressor);
                        }
                    });
                }
                self.read_ahead();
            });
        }
        (self.ready, self.decompressors) = (ready, decompressors);
    }

    /// Reads a batch of grains, to be decompressed together.
    fn read_ahead(&mut self) {
        let count_max = match self.threads {
            // Only the requested grain.
            1 => 1,
            threads => (BATCH_BYTES / self.grains.preamble.extent.grain_bytes).max(1) * threads as u64,
        };
        while matches!(self.end, StreamEnd::More) && (self.ahead.len() as u64) < count_max {
            let mut grain = self.spare.pop().unwrap_or_default();
            match self.grains.next(&mut grain) {
                Ok(true) => self.ahead.push(grain),
                Ok(false) => self.end = StreamEnd::Complete,
                Err(error) => self.end = StreamEnd::Failed(error),
            }
        }
    }
}
