//! Sorts the pieces of archives that have them in any order.
//!
//! Pieces are stored in temporary files until a disk is complete. The files are sparse and unnamed: none is left behind by a crash.

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

/// Bytes per read of a file.
const PIECE_BYTES: u64 = 1 << 20;

/// An archive with its pieces in order, based on one in any order.
///
/// An archive that is already in order is passed through. Otherwise a disk is returned as soon as it and all previous
/// ones are complete; the files need as much space as the data of the waiting disks.
pub struct Ordered {
    archive: Box<dyn ArchiveReader>,
    folder: PathBuf,
    /// The stored data of each disk.
    spools: Vec<Spool>,
    /// The disk that is being returned.
    disk: usize,
    /// The offset up to which the disk was returned.
    at: u64,
    piece: Vec<u8>,
}

/// The stored data of a disk.
#[derive(Default)]
struct Spool {
    /// `None` before the first write and after all data was returned.
    file: Option<File>,
    has_ended: bool,
}

impl Ordered {
    /// Stores waiting disks in files in `folder`, which are created on demand.
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

    /// Reads the archive until the current disk is complete; after the last disk, checks the rest.
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

    /// Reads the next data of the current disk and returns its offset; `None` at the end.
    fn read_piece(&mut self) -> io::Result<Option<u64>> {
        let Some(file) = self.spools.get(self.disk).and_then(|spool| spool.file.as_ref()) else {
            return Ok(None);
        };
        let Some(data) = seek(file, SeekFrom::Data(self.at))? else {
            return Ok(None);
        };
        // A hole always follows data: the end of the file counts as one.
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

/// The offset of the next data or hole; `None` at the end of the file.
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
        // Frees its space for the waiting disks.
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
