//! Reading a stream from its start to its end, once.

use std::io::Read;
use std::num::NonZero;

use libdeflater::Decompressor;

use super::grains::{GrainScanner, StreamedGrain};
use crate::error::corrupt;
use crate::model::forward_reader::ForwardReader;
use crate::{Error, ImageId, Result};

/// Bytes of grains that each thread decompresses at a time.
const BATCH_BYTES: u64 = 2 << 20;

/// A VMDK of the kind `streamOptimized` that is read as it comes, from a pipe or out of an archive.
///
/// Grains come at rising offsets; what no grain covers is zero. (VMware's open-vmdk can be told to write them in another order, which is
/// [`Error::NotInOrder`]: such a file can be opened with [`open`](crate::open).) At the end the reader has been read to its end, too.
pub struct StreamReader<R> {
    grains: GrainScanner<R>,
    threads: usize,
    /// One for each thread.
    decompressors: Vec<Decompressor>,
    /// Grains that are decompressed, and how many of them were given away.
    ready: Vec<StreamedGrain>,
    given: usize,
    /// Grains behind those, still compressed.
    ahead: Vec<StreamedGrain>,
    /// Used ones.
    spare: Vec<StreamedGrain>,
    end: StreamEnd,
}

/// What is behind the grains that were read.
enum StreamEnd {
    /// More, as far as is known.
    More,
    /// The end of the stream.
    Complete,
    /// An error, returned after the pieces before it.
    Failed(Error),
    /// The error was returned.
    Returned,
}

/// A part of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamGrain<'a> {
    /// Where it belongs, in bytes.
    pub offset: u64,
    /// What it is; shorter at the end of the disk.
    pub bytes: &'a [u8],
}

impl<R: Read> StreamReader<R> {
    /// Reads what is before the first grain; errors call the stream `image`.
    ///
    /// # Errors
    /// [`Error::NotInOrder`] where it is a VMDK that can be read from a file only. [`Error::is_corrupt`] where it is none.
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

    /// Decompresses on so many threads while it reads ahead, some MiB for each. Without this nothing is read before it is asked for.
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

    /// The identity that its descriptor says.
    pub fn id(&self) -> Option<ImageId> {
        self.grains.preamble.id
    }

    /// Bytes of the stream that were read so far.
    pub fn read_bytes(&self) -> u64 {
        self.grains.source.at
    }

    /// Gives the reader back, which is behind all that was read of the stream.
    pub fn into_inner(self) -> R {
        self.grains.source.reader
    }

    /// The next grain, or none at the end, which is the end of the stream as it was written.
    ///
    /// # Errors
    /// [`Error::NotInOrder`] where a grain goes back; [`Error::is_corrupt`] where the stream was cut off, or says what cannot be. What came
    /// before is right as far as one can know, but not all of the disk. After an error there are only errors.
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
                    "it was not read to its end",
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

    /// Gets more grains ready, unless there are no more.
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

    /// Reads as many grains as are to be decompressed together.
    fn read_ahead(&mut self) {
        let count_max = match self.threads {
            // What was asked for.
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
