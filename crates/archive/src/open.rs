//! Which archive a stream is, by what it begins with.

use std::io::{Cursor, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::in_order::Threads;
use crate::ova::OvaReader;
use crate::reader::ArchiveReader;
use crate::tar::{TarReader, read_error};
use crate::unpack::{Packing, Unpacked};
use crate::vma::{MAGIC as VMA_MAGIC, VmaReader};
use crate::xva::XvaReader;
use crate::{Error, Result};

/// What lzop writes first; Proxmox packed backups with it for years.
const LZOP_MAGIC: [u8; 4] = *b"\x89LZO";

/// A kind of archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArchiveKind {
    /// Of XenServer and XCP-ng.
    Xva,
    /// Of VMware, VirtualBox and others: a package in the Open Virtualization Format.
    Ova,
    /// Of Proxmox VE.
    Vma,
}

impl ArchiveKind {
    /// What a person calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Xva => "XVA",
            Self::Ova => "OVA",
            Self::Vma => "VMA",
        }
    }
}

/// An archive, opened.
pub struct OpenArchive {
    /// What it is.
    pub kind: ArchiveKind,
    /// How it is packed.
    pub packing: Packing,
    /// How much of the stream was read.
    pub read: Counter,
    /// The archive.
    pub reader: Box<dyn ArchiveReader>,
}

/// Bytes of a stream that were read, as they came: for those who show how far it is.
#[derive(Debug, Clone)]
pub struct Counter(pub(crate) Arc<AtomicU64>);

impl Counter {
    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Opens an archive: unpacks the stream where it is packed, and reads all that stands before the first disk.
///
/// # Errors
/// [`Error::Unknown`]: it begins with something else. Reading; what the archive says of its machine.
pub fn open(stream: Box<dyn Read + Send>, threads: Threads) -> Result<OpenArchive> {
    let read_error = |source| read_error(source, "its first bytes", 0);
    let mut stream = Unpacked::new(stream, threads).map_err(read_error)?;
    let (packing, read) = (stream.packing(), Counter(stream.counter()));
    let mut start = Vec::new();
    let count = VMA_MAGIC.len() as u64;
    stream
        .by_ref()
        .take(count)
        .read_to_end(&mut start)
        .map_err(read_error)?;
    let (is_vma, is_lzop) = (start == VMA_MAGIC, start == LZOP_MAGIC);
    let stream = Cursor::new(start).chain(stream);
    if is_vma {
        return Ok(OpenArchive {
            kind: ArchiveKind::Vma,
            packing,
            read,
            reader: Box::new(VmaReader::open(stream)?),
        });
    }
    if is_lzop {
        return Err(Error::Unsupported {
            feature: "lzop".to_owned(),
            detail: "unpack it on the way: lzop -dc FILE | holdfast import -".to_owned(),
        });
    }
    let mut tar = TarReader::new(stream);
    let unknown = |detail: &str| Error::Unknown {
        detail: detail.to_owned(),
    };
    let first = match tar.next() {
        Ok(Some(first)) => first,
        Ok(None) => return Err(unknown("it is empty")),
        Err(Error::CutOff { offset: 0, .. }) if packing == Packing::None => {
            return Err(unknown("it is shorter than any"));
        }
        Err(Error::Corrupt { offset: 0, .. }) => return Err(unknown("its first bytes are of no tape archive")),
        // A machine's begins with a text.
        Err(Error::Unsupported { feature, .. }) => {
            return Err(unknown(&format!("it is a tape archive that begins with {feature}")));
        }
        Err(error) => return Err(error),
    };
    if first.name == "ova.xml" {
        return Ok(OpenArchive {
            kind: ArchiveKind::Xva,
            packing,
            read,
            reader: Box::new(XvaReader::open_at_records(tar)?),
        });
    }
    if first.name.to_ascii_lowercase().ends_with(".ovf") {
        return Ok(OpenArchive {
            kind: ArchiveKind::Ova,
            packing,
            read,
            reader: Box::new(OvaReader::open_at_descriptor(tar, &first, threads.count)?),
        });
    }
    Err(unknown(&format!(
        "it is a tape archive whose first member is {:?}",
        first.name.chars().take(100).collect::<String>()
    )))
}
