//! Disks that are transferred as streams, one after another.
//!
//! They are read like those of an archive, once and in order: see [`ArchiveDisks`].

use std::io::{Cursor, Read};
use std::ops::Range;
use std::sync::Arc;

use holdfast_archive::{
    ArchiveDisk, ArchiveReader, DiskContent, Document, Error as ArchiveError, Piece, Result as ArchiveResult,
};
use holdfast_block::{BlockDevice, is_zero};
use holdfast_host::xapi::{DiskForm, Download, Pool, Reference, XapiError};
use holdfast_image::VhdStream;

use crate::capture::foreign_disks::{ArchiveDisks, StreamAfterDisks};

/// The size of a piece of a raw stream.
const RAW_PIECE_BYTES: u64 = 1 << 20;

/// A disk that will be transferred as a stream.
pub(super) struct PlannedStream {
    /// Its name in errors.
    pub(super) label: String,
    pub(super) disk: Reference,
    pub(super) size_bytes: u64,
    pub(super) form: Form,
}

/// The format of the stream.
pub(super) enum Form {
    Raw,
    Vhd,
    /// Only the changes since this disk of the pool, which had this content.
    Since(Reference, Arc<dyn BlockDevice>),
}

/// Disks that come as streams.
pub(super) struct Streams {
    disks: Arc<ArchiveDisks>,
}

impl Streams {
    pub(super) fn new(pool: Arc<Pool>, planned: Vec<PlannedStream>) -> Self {
        let all: Vec<usize> = (0..planned.len()).collect();
        let disks = planned.iter().map(|disk| ArchiveDisk {
            key: disk.label.clone(),
            size_bytes: disk.size_bytes,
            content: DiskContent::Stored,
        });
        let reader = Reader {
            disks: disks.collect(),
            pool,
            planned,
            next: 0,
            current: None,
            piece: Vec::new(),
        };
        Self {
            disks: Arc::new(ArchiveDisks::new(Box::new(reader), &all)),
        }
    }

    /// A disk, by its number among the planned ones.
    pub(super) fn device(&self, number: usize) -> Arc<dyn BlockDevice> {
        Arc::new(self.disks.device(number))
    }

    /// A text that is returned only when all streams were read to their ends.
    pub(super) fn behind(&self, text: Vec<u8>) -> StreamAfterDisks<'_> {
        StreamAfterDisks::new(&self.disks, Cursor::new(text))
    }
}

/// The reader of the current download.
enum CurrentDownload {
    Raw { download: Box<Download>, at: u64 },
    Vhd(Box<VhdStream<Download>>),
}

/// The streams in the form of an archive without documents.
struct Reader {
    disks: Vec<ArchiveDisk>,
    pool: Arc<Pool>,
    planned: Vec<PlannedStream>,
    next: usize,
    current: Option<CurrentDownload>,
    piece: Vec<u8>,
}

/// An error of the pool as an error of the archive's reader.
fn read_error(error: XapiError) -> ArchiveError {
    ArchiveError::Read {
        offset: 0,
        source: std::io::Error::other(error),
    }
}

impl Reader {
    fn begin(&self, planned: &PlannedStream) -> ArchiveResult<CurrentDownload> {
        let form = match &planned.form {
            Form::Raw => DiskForm::Raw,
            Form::Vhd => DiskForm::Vhd,
            Form::Since(base, _) => DiskForm::VhdSince(base.clone()),
        };
        let download = self.pool.download_disk(&planned.disk, &form).map_err(read_error)?;
        if form == DiskForm::Raw {
            return Ok(CurrentDownload::Raw {
                download: Box::new(download),
                at: 0,
            });
        }
        let stream = VhdStream::open(download, &planned.label)?;
        check_size(&stream, planned)?;
        Ok(CurrentDownload::Vhd(Box::new(stream)))
    }

    /// Reads the next piece of the current disk into `self.piece`, and returns its offset; none at the end.
    fn next_piece(&mut self) -> ArchiveResult<Option<u64>> {
        let planned = &self.planned[self.next];
        let mut current = match self.current.take() {
            Some(current) => current,
            None => self.begin(planned)?,
        };
        let place = match &mut current {
            CurrentDownload::Raw { download, at } => next_raw(download, at, planned.size_bytes, &mut self.piece)?,
            CurrentDownload::Vhd(stream) => next_of_vhd(stream, planned, &mut self.piece)?,
        };
        if place.is_some() {
            self.current = Some(current);
            return Ok(place);
        }
        let download = match current {
            CurrentDownload::Raw { download, .. } => *download,
            CurrentDownload::Vhd(stream) => stream.into_inner(),
        };
        download.finish().map_err(read_error)?;
        Ok(None)
    }
}

fn check_size<R: Read>(stream: &VhdStream<R>, planned: &PlannedStream) -> ArchiveResult<()> {
    // A VHD has whole sectors, and one of XenServer whole blocks.
    if stream.size_bytes() >= planned.size_bytes {
        return Ok(());
    }
    Err(ArchiveError::Corrupt {
        what: "disk",
        offset: 0,
        detail: format!(
            "{} has {} bytes, and comes with {}",
            planned.label,
            planned.size_bytes,
            stream.size_bytes()
        ),
    })
}

fn next_raw(download: &mut Download, at: &mut u64, size_bytes: u64, piece: &mut Vec<u8>) -> ArchiveResult<Option<u64>> {
    while *at < size_bytes {
        let place = *at;
        let length = RAW_PIECE_BYTES.min(size_bytes - place);
        piece.resize(usize::try_from(length).unwrap_or_default(), 0);
        download
            .read_exact(piece)
            .map_err(|source| ArchiveError::Read { offset: place, source })?;
        *at += length;
        if !is_zero(piece) {
            return Ok(Some(place));
        }
    }
    Ok(None)
}

fn next_of_vhd(
    stream: &mut VhdStream<Download>,
    planned: &PlannedStream,
    piece: &mut Vec<u8>,
) -> ArchiveResult<Option<u64>> {
    loop {
        let Some(block) = stream.next_block()? else {
            return Ok(None);
        };
        let Some(room) = planned.size_bytes.checked_sub(block.offset).filter(|room| *room > 0) else {
            continue;
        };
        let length = block.bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX));
        piece.clear();
        piece.resize(length, 0);
        let there: Vec<Range<usize>> = block
            .ranges()
            .into_iter()
            .map(|range| range.start.min(length)..range.end.min(length))
            .collect();
        if let Form::Since(_, base) = &planned.form
            && there.iter().map(ExactSizeIterator::len).sum::<usize>() < length
        {
            base.read_at(piece, block.offset)?;
        }
        for range in there {
            piece[range.clone()].copy_from_slice(&block.bytes[range]);
        }
        return Ok(Some(block.offset));
    }
}

impl ArchiveReader for Reader {
    fn documents(&self) -> &[Document] {
        &[]
    }

    fn disks(&self) -> &[ArchiveDisk] {
        &self.disks
    }

    fn next(&mut self) -> ArchiveResult<Option<Piece<'_>>> {
        if self.next == self.planned.len() {
            return Ok(None);
        }
        let disk = self.next;
        let Some(offset) = self.next_piece()? else {
            self.next += 1;
            return Ok(Some(Piece::End { disk }));
        };
        Ok(Some(Piece::Data {
            disk,
            offset,
            bytes: &self.piece,
        }))
    }

    fn is_in_order(&self) -> bool {
        true
    }
}
