//! Detects the kind of an archive by its first bytes.

use std::io::{Cursor, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ova::disk::StreamImages;
use crate::ova::{ImageReading, OvaReader};
use crate::packed::frame::Packing;
use crate::packed::unpack::Unpacked;
use crate::reader::ArchiveReader;
use crate::tar::{TarReader, read_error};
use crate::vma::{MAGIC as VMA_MAGIC, VmaReader};
use crate::xva::XvaReader;
use crate::{Error, Result};
use holdfast_block::Threads;

/// Magic numbers of other compression formats, with their names and the commands that unpack them.
const OTHER_PACKERS: &[(&[u8], &str, &str)] = &[
    // Proxmox VE compressed backups with it for years.
    (b"\x89LZO", "lzop", "lzop -dc"),
    (b"BZh", "bzip2", "bzip2 -dc"),
    (b"\x04\x22\x4d\x18", "lz4", "lz4 -dc"),
    (b"LZIP", "lzip", "lzip -dc"),
    (b"PK\x03\x04", "zip", "unzip -p"),
    (b"7z\xbc\xaf", "7-Zip", "7z x -so"),
];
/// File extensions of members of an OVA other than its descriptor.
const IN_PACKAGES: &[&str] = &[
    "mf", "cert", "vmdk", "vhd", "vhdx", "vdi", "qcow2", "img", "raw", "iso", "nvram",
];

/// A kind of archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArchiveKind {
    /// XenServer and XCP-ng.
    Xva,
    /// VMware, VirtualBox and others: a package in the Open Virtualization Format.
    Ova,
    /// Proxmox VE.
    Vma,
}

impl ArchiveKind {
    /// Its usual name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Xva => "XVA",
            Self::Ova => "OVA",
            Self::Vma => "VMA",
        }
    }
}

/// An opened archive.
pub struct OpenArchive {
    /// Its kind.
    pub kind: ArchiveKind,
    /// Its compression.
    pub packing: Packing,
    /// Counts the bytes read from the stream.
    pub read: Counter,
    /// Its reader.
    pub reader: Box<dyn ArchiveReader>,
}

/// Counts the bytes read from a stream before decompression, for progress.
#[derive(Debug, Clone)]
pub struct Counter(pub(crate) Arc<AtomicU64>);

impl Counter {
    /// Bytes read so far.
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Options for reading an archive.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OpenOptions {
    /// Threads for decompression.
    pub threads: Threads,
    /// How stream-optimized images are read.
    pub images: StreamImages,
}

/// Opens an archive: decompresses the stream if necessary, and reads everything before the first disk.
///
/// # Errors
/// [`Error::Unknown`] if it is not an archive. Reading; the configuration of the machine.
pub fn open(stream: Box<dyn Read + Send>, options: OpenOptions) -> Result<OpenArchive> {
    let read_error = |source| read_error(source, "its first bytes", 0);
    let mut stream = Unpacked::new(stream, options.threads).map_err(read_error)?;
    let (packing, read) = (stream.packing(), Counter(stream.counter()));
    let mut start = Vec::new();
    let count = VMA_MAGIC.len() as u64;
    stream
        .by_ref()
        .take(count)
        .read_to_end(&mut start)
        .map_err(read_error)?;
    let is_vma = start == VMA_MAGIC;
    let packer = OTHER_PACKERS.iter().find(|(magic, ..)| start.starts_with(magic));
    let stream = Cursor::new(start).chain(stream);
    if is_vma {
        return Ok(OpenArchive {
            kind: ArchiveKind::Vma,
            packing,
            read,
            reader: Box::new(VmaReader::open(stream)?),
        });
    }
    if let Some((_, name, unpack)) = packer {
        return Err(Error::Unsupported {
            feature: (*name).to_owned(),
            detail: format!("unpack it on the way: {unpack} FILE | holdfast import -"),
        });
    }
    let (kind, reader) = open_tape(TarReader::new(stream), packing, options)?;
    Ok(OpenArchive {
        kind,
        packing,
        read,
        reader,
    })
}

/// Opens a tape archive by its first member.
fn open_tape<R: Read + Send + 'static>(
    mut tar: TarReader<R>,
    packing: Packing,
    options: OpenOptions,
) -> Result<(ArchiveKind, Box<dyn ArchiveReader>)> {
    let unknown = |detail: &str| Error::Unknown {
        detail: detail.to_owned(),
    };
    let first = match tar.next() {
        Ok(Some(first)) => first,
        Ok(None) => return Err(unknown("it is empty")),
        Err(Error::CutOff { offset: 0, .. }) if packing == Packing::None => {
            return Err(unknown("it is shorter than any archive"));
        }
        Err(Error::Corrupt { offset: 0, .. }) => return Err(unknown("it does not begin like a tar archive")),
        // A machine archive begins with a text member.
        Err(Error::Unsupported { feature, .. }) => {
            return Err(unknown(&format!("it is a tape archive that begins with {feature}")));
        }
        Err(error) => return Err(error),
    };
    if first.name == "ova.xml" {
        return Ok((ArchiveKind::Xva, Box::new(XvaReader::open_at_records(tar)?)));
    }
    let extension = first.name.rsplit_once('.').map_or("", |(_, extension)| extension);
    if extension.eq_ignore_ascii_case("ovf") {
        let reading = ImageReading {
            images: options.images,
            threads: options.threads.count,
        };
        return Ok((
            ArchiveKind::Ova,
            Box::new(OvaReader::open_at_descriptor(tar, &first, reading)?),
        ));
    }
    let shown: String = first.name.chars().take(100).collect();
    let advice = if IN_PACKAGES.iter().any(|known| extension.eq_ignore_ascii_case(known)) {
        "; in an OVA the descriptor (.ovf) comes first: unpack it, and pack it again in this order"
    } else {
        ""
    };
    Err(unknown(&format!(
        "it is a tape archive whose first member is {shown:?}{advice}"
    )))
}
