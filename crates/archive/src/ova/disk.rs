//! An image in a package, as it comes.

use std::io::{Read, Write as _};
use std::num::NonZero;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::Arc;

use holdfast_block::{BlockDevice, ExtentKind};
use holdfast_image::{Error as ImageError, Format, Gate, OpenOptions, StreamReader};

use super::manifest::{Digested, Digests};
use crate::tar::TarReader;
use crate::{Error, Result};

/// Bytes that are given at once of an image that was stored in between.
const PIECE_BYTES: u64 = 1 << 20;
const EXTENT_COUNT_MAX: usize = 256;
/// What tells a VMDK for streams from others: `KDMV`, and that its grains are compressed and have markers.
const HEAD_BYTES: usize = 12;
const MAGIC: [u8; 4] = *b"KDMV";
const COMPRESSED_AND_MARKED: u8 = 3;

/// A member of the archive, digested as it is read.
pub(super) struct DiskMember<R> {
    tar: TarReader<R>,
    digests: Digests,
    /// Its first bytes, which were looked at.
    head: Vec<u8>,
    at: usize,
}

impl<R: Read> DiskMember<R> {
    pub(super) fn new(mut tar: TarReader<R>, mut digests: Digests) -> Result<Self> {
        let mut head = Vec::new();
        let offset = tar.offset();
        let read = tar.by_ref().take(HEAD_BYTES as u64).read_to_end(&mut head);
        read.map_err(|source| Error::Read { offset, source })?;
        digests.update(&head);
        Ok(Self {
            tar,
            digests,
            head,
            at: 0,
        })
    }

    fn is_stream(&self) -> bool {
        self.head.len() == HEAD_BYTES
            && self.head[..4] == MAGIC
            && self.head[10] & COMPRESSED_AND_MARKED == COMPRESSED_AND_MARKED
    }

    /// Reads what is left of it; gives the archive back, and what the digests are.
    fn finish(mut self) -> Result<(TarReader<R>, Digested)> {
        let offset = self.tar.offset();
        std::io::copy(&mut self, &mut std::io::sink()).map_err(|source| Error::Read { offset, source })?;
        self.tar.check_read()?;
        Ok((self.tar, self.digests.finish()))
    }
}

impl<R: Read> Read for DiskMember<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.at < self.head.len() {
            let count = buffer.len().min(self.head.len() - self.at);
            buffer[..count].copy_from_slice(&self.head[self.at..self.at + count]);
            self.at += count;
            return Ok(count);
        }
        let count = self.tar.read(buffer)?;
        self.digests.update(&buffer[..count]);
        Ok(count)
    }
}

fn spool_error(source: std::io::Error) -> Error {
    Error::Spool {
        folder: std::env::temp_dir(),
        source,
    }
}

/// The disk in a member.
pub(super) enum OvaImage<R> {
    /// A VMDK for streams, read as it comes.
    Stream(Box<StreamReader<DiskMember<R>>>),
    /// Any other image, which has to be read here and there: it was stored in between.
    Stored {
        tar: TarReader<R>,
        digested: Digested,
        device: Arc<dyn BlockDevice>,
        at: u64,
        data_end: u64,
    },
}

/// Nobody can allow a file beside an archive to an image in it.
fn of_itself(error: ImageError, name: &str) -> ImageError {
    match error {
        ImageError::Refused { file, .. } | ImageError::GuessedFormat { file, .. } => ImageError::UnsupportedFeature {
            image: name.to_owned(),
            feature: format!("a part of the disk in another file ({file})"),
            detail: "pack the disk as one image that needs no other, such as a VMDK for streams".to_owned(),
        },
        other => other,
    }
}

impl<R: Read + Send> OvaImage<R> {
    /// Begins to read. `name` is that of the member, and `is_raw` what the descriptor says of its format.
    pub(super) fn open(member: DiskMember<R>, name: &str, is_raw: bool, threads: NonZero<usize>) -> Result<Self> {
        if member.is_stream() {
            let stream = StreamReader::open(member, name)?.with_threads(threads);
            return Ok(Self::Stream(Box::new(stream)));
        }
        let mut member = member;
        // Without a name: nothing is left of it, however this program ends.
        let mut stored = tempfile::tempfile().map_err(spool_error)?;
        // What fails here is either; the archive knows whether it was cut off.
        std::io::copy(&mut member, &mut stored)
            .and_then(|_| stored.flush())
            .map_err(spool_error)?;
        let (tar, digested) = member.finish()?;
        let options = OpenOptions {
            format: is_raw.then_some(Format::Raw),
            gate: Gate::Deny,
            ..OpenOptions::default()
        };
        let path = format!("/proc/self/fd/{}", stored.as_raw_fd());
        let image = holdfast_image::open(Path::new(&path), &options).map_err(|source| Error::StoredImage {
            name: name.to_owned(),
            source: of_itself(source, name),
        })?;
        Ok(Self::Stored {
            tar,
            digested,
            device: image.device(),
            at: 0,
            data_end: 0,
        })
    }

    pub(super) fn size_bytes(&self) -> u64 {
        match self {
            Self::Stream(stream) => stream.size_bytes(),
            Self::Stored { device, .. } => device.size_bytes(),
        }
    }

    /// The next bytes, into `buffer`; where they belong. None at the end.
    pub(super) fn next(&mut self, buffer: &mut Vec<u8>) -> Result<Option<u64>> {
        buffer.clear();
        match self {
            Self::Stream(stream) => Ok(stream.next_grain()?.map(|grain| {
                buffer.extend_from_slice(grain.bytes);
                grain.offset
            })),
            Self::Stored {
                device, at, data_end, ..
            } => {
                while *at >= *data_end {
                    if *at >= device.size_bytes() {
                        return Ok(None);
                    }
                    let list = device.extents(*at..device.size_bytes(), EXTENT_COUNT_MAX)?;
                    let data = list.as_slice().iter().find(|extent| extent.kind == ExtentKind::Data);
                    *at = data.map_or(list.end(), |data| data.offset);
                    *data_end = data.map_or(*at, holdfast_block::Extent::end);
                }
                let offset = *at;
                *at = (offset + PIECE_BYTES).min(*data_end);
                buffer.resize(usize::try_from(*at - offset).unwrap_or_default(), 0);
                device.read_at(buffer, offset)?;
                Ok(Some(offset))
            }
        }
    }

    /// Gives the archive back, behind the member, and what its digests are.
    pub(super) fn finish(self) -> Result<(TarReader<R>, Digested)> {
        match self {
            Self::Stream(stream) => stream.into_inner().finish(),
            Self::Stored { tar, digested, .. } => Ok((tar, digested)),
        }
    }
}
