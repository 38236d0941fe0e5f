//! Options of new images.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use crate::model::block_options::BlockOptions;
use crate::model::bytes::round_up;
use crate::{Compression, Format};

/// What a new image is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateOptions {
    /// One of [`Format::CREATED`].
    pub format: Format,
    /// Size of the disk.
    pub size_bytes: u64,
    /// What only qcow2 has.
    pub qcow2: Qcow2Options,
    /// What the other formats but raw have.
    pub blocks: BlockOptions,
    /// What its file will be called, where it is made under another name: a VMDK says it, and for a disk of Parallels it decides
    /// whether that is a folder.
    pub name: Option<OsString>,
}

impl CreateOptions {
    /// An image of `size_bytes` with the usual options.
    pub fn new(format: Format, size_bytes: u64) -> Self {
        Self {
            format,
            size_bytes,
            qcow2: Qcow2Options::default(),
            blocks: BlockOptions::default(),
            name: None,
        }
    }

    /// The same for an image that is made under another name, and will be at `path`.
    #[must_use]
    pub fn to_be_at(self, path: &Path) -> Self {
        let name = path.file_name().map(OsStr::to_owned);
        Self { name, ..self }
    }

    /// The same for a qcow2 that is to be read by QEMU, which does not see a part of a sector at the end of a disk. The other formats hold whole
    /// sectors in any case, and a raw disk has the size that it has.
    #[must_use]
    pub fn of_whole_sectors(self) -> Self {
        let size_bytes = match self.format {
            Format::Qcow2 => round_up(self.size_bytes, 512),
            _ => self.size_bytes,
        };
        Self { size_bytes, ..self }
    }

    /// A raw disk of `size_bytes`.
    pub fn raw(size_bytes: u64) -> Self {
        Self::new(Format::Raw, size_bytes)
    }

    /// A qcow2 image of `size_bytes` with the usual options.
    pub fn qcow2(size_bytes: u64) -> Self {
        Self::new(Format::Qcow2, size_bytes)
    }
}

/// Options of a new qcow2 image; the default is what `qemu-img create` makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qcow2Options {
    /// 512 bytes to 2 MiB, a power of two.
    pub cluster_bytes: u64,
    /// 2 (`compat=0.10`) or 3 (`compat=1.1`).
    pub version: u32,
    /// How clusters will be compressed.
    pub compression: Compression,
    /// Whether L2 entries describe subclusters: a write to an overlay then copies 1/32 of a cluster.
    pub extended_l2: bool,
    /// Whether programs may leave refcounts behind while the image is open; this one never does.
    pub lazy_refcounts: bool,
    /// Width of a refcount: 1, 2, 4, 8, 16, 32 or 64.
    pub refcount_bits: u32,
    /// What the image is an overlay of.
    pub backing: Option<BackingFile>,
    /// Where the data goes, if not into the image.
    pub data_file: Option<DataFile>,
    /// What is allocated at once.
    pub preallocation: Preallocation,
}

impl Default for Qcow2Options {
    fn default() -> Self {
        Self {
            cluster_bytes: 65_536,
            version: 3,
            compression: Compression::Zlib,
            extended_l2: false,
            lazy_refcounts: false,
            refcount_bits: 16,
            backing: None,
            data_file: None,
            preallocation: Preallocation::Off,
        }
    }
}

/// A backing file of a new image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingFile {
    /// As it is to be named; a relative name starts at the directory of the image.
    pub name: String,
    /// Its format, always written down.
    pub format: Format,
}

/// An external data file of a new image, which is created with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataFile {
    /// As it is to be named; a relative name starts at the directory of the image.
    ///
    /// For QEMU it starts at the working directory of the process: give an absolute name where QEMU is to open the image.
    pub name: String,
    /// What it can be used as.
    pub kind: DataFileKind,
    /// Where it is made, if it gets that name later.
    pub made_at: Option<PathBuf>,
}

/// What an external data file can be used as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataFileKind {
    /// Only together with its image.
    Plain,
    /// By itself, as a raw image of the disk.
    Raw,
}

/// What a new image allocates at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// All tables; the data clusters are holes.
    Metadata,
}
