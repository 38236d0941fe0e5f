//! Reads a disk image from the stream of a package.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::fs::File;
use std::io::Read;
use std::num::NonZero;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::Arc;

use holdfast_block::{BlockDevice, ExtentKind};
use holdfast_image::{Error as ImageError, Gate, OpenOptions, StreamReader};

use super::manifest::{Digested, Digests};
use crate::sparse::write_sparse_at;
use crate::tar::TarReader;
use crate::{Error, Result};

/// Bytes per piece of an image that was stored in a temporary file.
const PIECE_BYTES: u64 = 1 << 20;
const EXTENT_COUNT_MAX: usize = 256;
/// Bytes of the header that identify a stream-optimized VMDK: `KDMV`, and the flags for compressed grains and markers.
const HEAD_BYTES: usize = 72;
const MAGIC: [u8; 4] = *b"KDMV";
const COMPRESSED_AND_MARKED: u8 = 3;
/// The directory's offset in such a header: the real offset is only in the footer after the grains.
const AT_END: u64 = u64::MAX;
/// A stored image may have this much data in addition to twice the size of its disk, for tables and snapshots.
const STORED_BYTES_MORE: u64 = 64 << 20;

/// Options for reading images.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImageReading {
    pub(crate) images: StreamImages,
    pub(crate) threads: NonZero<usize>,
}

/// An image, as the archive describes it.
#[derive(Clone, Copy)]
pub(super) struct MemberImage<'a> {
    pub(super) name: &'a str,
    pub(super) is_raw: bool,
    pub(super) disk_bytes: u64,
}

/// A member of the archive that is hashed while it is read.
pub(super) struct DiskMember<R> {
    tar: TarReader<R>,
    digests: Digests,
    /// Its first bytes, read for detection.
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

    /// Whether it is a stream-optimized VMDK whose directory is after all grains or before them, as in a stream.
    fn is_stream(&self) -> bool {
        let is_marked = |flags: &u8| flags & COMPRESSED_AND_MARKED == COMPRESSED_AND_MARKED;
        let number = |at| Some(u64::from_le_bytes(*self.head.get(at..)?.first_chunk()?));
        let (Some(directory), Some(overhead)) = (number(56), number(64)) else {
            return false;
        };
        self.head.starts_with(&MAGIC)
            && self.head.get(10).is_some_and(is_marked)
            && (directory == AT_END || directory < overhead)
    }

    fn remaining_bytes(&self) -> u64 {
        self.tar.remaining_bytes() + (self.head.len() - self.at) as u64
    }

    /// Reads `length` bytes of it into `buffer`.
    fn read_piece(&mut self, buffer: &mut Vec<u8>, length: u64) -> Result<()> {
        buffer.clear();
        let offset = self.tar.offset();
        let read = self.by_ref().take(length).read_to_end(buffer);
        read.map_err(|source| Error::Read { offset, source })?;
        if buffer.len() as u64 != length {
            self.tar.check_read()?;
        }
        Ok(())
    }

    /// Reads the rest of it; returns the archive and the digests.
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
            let mut rest = self.head.get(self.at..).unwrap_or_default();
            let count = rest.read(buffer)?;
            self.at += count;
            return Ok(count);
        }
        let count = self.tar.read(buffer)?;
        self.digests.update(buffer.get(..count).unwrap_or_default());
        Ok(count)
    }
}

fn spool_error(source: std::io::Error) -> Error {
    Error::Spool {
        folder: std::env::temp_dir(),
        source,
    }
}

/// Stores a member in an unnamed temporary file, which the kernel removes when the program ends for any
/// reason.
fn store<R: Read>(mut member: DiskMember<R>, said: &MemberImage<'_>) -> Result<(TarReader<R>, Digested, File)> {
    let stored = tempfile::tempfile().map_err(spool_error)?;
    let data_bytes_max = said.disk_bytes.saturating_mul(2).saturating_add(STORED_BYTES_MORE);
    let (mut at, mut data_bytes) = (0, 0);
    let mut buffer = Vec::new();
    loop {
        let length = PIECE_BYTES.min(member.remaining_bytes());
        if length == 0 {
            break;
        }
        member.read_piece(&mut buffer, length)?;
        data_bytes += write_sparse_at(&stored, &buffer, at).map_err(spool_error)?;
        at += length;
        if data_bytes > data_bytes_max {
            return Err(Error::Unsupported {
                feature: format!(
                    "the image {:?} with more than {data_bytes_max} bytes of data for a disk of {} bytes",
                    said.name, said.disk_bytes
                ),
                detail: "unpack the archive, and look at what the image holds".to_owned(),
            });
        }
    }
    stored.set_len(at).map_err(spool_error)?;
    let (tar, digested) = member.finish()?;
    Ok((tar, digested, stored))
}

/// The disk in a member.
pub(super) enum OvaImage<R> {
    /// A stream-optimized VMDK, read as a stream.
    Stream(Box<StreamReader<DiskMember<R>>>),
    /// A raw image, read as a stream.
    Raw {
        member: Box<DiskMember<R>>,
        size_bytes: u64,
        at: u64,
    },
    /// Any other image, which needs random access: it was stored in a temporary file.
    Stored {
        tar: TarReader<R>,
        digested: Digested,
        device: Arc<dyn BlockDevice>,
        at: u64,
        data_end: u64,
    },
}

/// An image in an archive must not refer to other files, so there is no gate to allow them.
fn self_contained_error(error: ImageError, name: &str) -> ImageError {
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
    pub(super) fn open(member: DiskMember<R>, said: MemberImage<'_>, reading: ImageReading) -> Result<Self> {
        let name = said.name;
        if said.is_raw {
            let size_bytes = member.remaining_bytes();
            return Ok(Self::Raw {
                member: Box::new(member),
                size_bytes,
                at: 0,
            });
        }
        if member.is_stream() && reading.images == StreamImages::Streamed {
            let stream = StreamReader::open(member, name)?.with_threads(reading.threads);
            return Ok(Self::Stream(Box::new(stream)));
        }
        let (tar, digested, stored) = store(member, &said)?;
        let options = OpenOptions {
            gate: Gate::Deny,
            ..OpenOptions::default()
        };
        let path = format!("/proc/self/fd/{}", stored.as_raw_fd());
        let image = holdfast_image::open(Path::new(&path), &options).map_err(|source| Error::StoredImage {
            name: name.to_owned(),
            source: self_contained_error(source, name),
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
            Self::Raw { size_bytes, .. } => *size_bytes,
            Self::Stored { device, .. } => device.size_bytes(),
        }
    }

    /// Reads the next bytes into `buffer` and returns their offset; `None` at the end.
    pub(super) fn next(&mut self, buffer: &mut Vec<u8>) -> Result<Option<u64>> {
        buffer.clear();
        match self {
            Self::Stream(stream) => Ok(stream.next_grain()?.map(|grain| {
                buffer.extend_from_slice(grain.bytes);
                grain.offset
            })),
            Self::Raw { member, size_bytes, at } => {
                while *at < *size_bytes {
                    let offset = *at;
                    member.read_piece(buffer, PIECE_BYTES.min(*size_bytes - offset))?;
                    *at += buffer.len() as u64;
                    if buffer.iter().any(|byte| *byte != 0) {
                        return Ok(Some(offset));
                    }
                }
                Ok(None)
            }
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

    /// Returns the archive, positioned after the member, and the member's digests.
    pub(super) fn finish(self) -> Result<(TarReader<R>, Digested)> {
        match self {
            Self::Stream(stream) => stream.into_inner().finish(),
            Self::Raw { member, .. } => member.finish(),
            Self::Stored { tar, digested, .. } => Ok((tar, digested)),
        }
    }
}

/// How stream-optimized VMDKs in an OVA are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamImages {
    /// As streams. If grains are out of order, reading fails with [`ImageError::NotInOrder`](holdfast_image::Error::NotInOrder), perhaps after some
    /// pieces.
    Streamed,
    /// Each is stored in an unnamed temporary file first.
    Spooled,
}
