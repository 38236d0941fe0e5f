//! Archives whose pieces come in any order, in order.
//!
//! What comes is kept in files until all of a disk is there. The files are sparse and have no name: nothing stays behind, whatever happens.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::SeekFrom;

use crate::reader::{ArchiveDisk, ArchiveReader, Document, Piece};
use crate::sparse::write_sparse_at;
use crate::tar::corrupt;
use crate::{Error, Result};

/// Bytes that are read from a file at once.
const PIECE_BYTES: u64 = 1 << 20;

/// An archive that is in order, made of one that need not be.
///
/// An archive that is in order by itself is passed on as it comes. Of another, a disk is given as soon as it and all before it have come
/// whole: the files take as many bytes as the disks that have to wait, zeroes not counted.
pub struct Ordered {
    archive: Box<dyn ArchiveReader>,
    folder: PathBuf,
    /// What was kept of each disk.
    spools: Vec<Spool>,
    /// The disk whose turn it is.
    disk: usize,
    /// How far it was given.
    at: u64,
    piece: Vec<u8>,
}

/// What has come of a disk.
#[derive(Default)]
struct Spool {
    /// None as long as nothing had to be written, and when all of it was given.
    file: Option<File>,
    has_ended: bool,
}

impl Ordered {
    /// Keeps what has to wait in files in `folder`, which are made when they are needed.
    pub fn new(archive: Box<dyn ArchiveReader>, folder: &Path) -> Self {
        Self {
            spools: archive.disks().iter().map(|_| Spool::default()).collect(),
            archive,
            folder: folder.to_owned(),
            disk: 0,
            at: 0,
            piece: Vec::new(),
        }
    }

    /// Reads from the archive until the disk has ended whose turn it is; checks the rest where all of them have.
    fn read_on(&mut self) -> Result<()> {
        while self.spools.get(self.disk).is_none_or(|spool| !spool.has_ended) {
            match self.archive.next()? {
                Some(Piece::Data { disk, offset, bytes }) => {
                    let spool = self.spools.get_mut(disk);
                    let spool =
                        spool.ok_or_else(|| corrupt("archive", 0, "it has data of a disk that it does not name"))?;
                    spool
                        .write(&self.folder, offset, bytes)
                        .map_err(|source| Error::Spool {
                            folder: self.folder.clone(),
                            source,
                        })?;
                }
                Some(Piece::End { disk }) => {
                    if let Some(spool) = self.spools.get_mut(disk) {
                        spool.has_ended = true;
                    }
                }
                None if self.disk == self.spools.len() => return Ok(()),
                None => return Err(corrupt("archive", 0, "it ends before all of its disks have")),
            }
        }
        Ok(())
    }

    /// Reads the next data of the disk whose turn it is: where it is, or none at the end.
    fn read_piece(&mut self) -> io::Result<Option<u64>> {
        let Some(file) = self.spools.get(self.disk).and_then(|spool| spool.file.as_ref()) else {
            return Ok(None);
        };
        let Some(data) = seek(file, SeekFrom::Data(self.at))? else {
            return Ok(None);
        };
        // There is always a hole behind data: the end of the file is one.
        let hole = seek(file, SeekFrom::Hole(data))?.unwrap_or(data);
        let length = hole.saturating_sub(data).min(PIECE_BYTES);
        self.piece.resize(holdfast_block::to_usize(length), 0);
        file.read_exact_at(&mut self.piece, data)?;
        self.at = data + length;
        Ok(Some(data).filter(|_| length > 0))
    }
}

impl Spool {
    fn write(&mut self, folder: &Path, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let file = match &self.file {
            Some(file) => file,
            None => self.file.insert(tempfile::tempfile_in(folder)?),
        };
        write_sparse_at(file, bytes, offset)?;
        Ok(())
    }
}

/// Where there is data, or none, next; none where the file has ended.
fn seek(file: &File, to: SeekFrom) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, to) {
        Ok(offset) => Ok(Some(offset)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

impl ArchiveReader for Ordered {
    fn documents(&self) -> &[Document] {
        self.archive.documents()
    }

    fn disks(&self) -> &[ArchiveDisk] {
        self.archive.disks()
    }

    fn left_out(&self) -> &[String] {
        self.archive.left_out()
    }

    fn is_size_certain(&self, disk: usize) -> bool {
        self.archive.is_size_certain(disk)
    }

    fn corrections(&self) -> Vec<String> {
        self.archive.corrections()
    }

    fn unverified(&self) -> Vec<String> {
        self.archive.unverified()
    }

    fn next(&mut self) -> Result<Option<Piece<'_>>> {
        if self.archive.is_in_order() {
            return self.archive.next();
        }
        self.read_on()?;
        if self.disk == self.spools.len() {
            return Ok(None);
        }
        let disk = self.disk;
        let offset = self.read_piece().map_err(|source| Error::Spool {
            folder: self.folder.clone(),
            source,
        })?;
        if let Some(offset) = offset {
            return Ok(Some(Piece::Data {
                disk,
                offset,
                bytes: &self.piece,
            }));
        }
        // Its bytes are free for those who wait.
        if let Some(spool) = self.spools.get_mut(disk) {
            spool.file = None;
        }
        (self.disk, self.at) = (disk + 1, 0);
        Ok(Some(Piece::End { disk }))
    }

    fn is_in_order(&self) -> bool {
        true
    }
}
