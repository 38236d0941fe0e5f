//! Options of new images.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use crate::model::block_options::BlockOptions;
use crate::model::bytes::round_up;
use crate::{Compression, Format};

/// Format, size and options of a new image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateOptions {
    /// The format, one of [`Format::CREATED`].
    pub format: Format,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Options of a qcow2.
    pub qcow2: Qcow2Options,
    /// Options of the other formats except raw.
    pub blocks: BlockOptions,
    /// The final file name, if the image is created under another one: a VMDK stores it, and a Parallels disk is a
    /// folder or a file depending on it.
    pub name: Option<OsString>,
}

impl CreateOptions {
    /// Options of an image of `size_bytes` with defaults.
    pub fn new(format: Format, size_bytes: u64) -> Self {
        Self {
            format,
            size_bytes,
            qcow2: Qcow2Options::default(),
            blocks: BlockOptions::default(),
            name: None,
        }
    }

    /// Sets the final path of an image that is created under another name.
    #[must_use]
    pub fn with_final_path(self, path: &Path) -> Self {
        let name = path.file_name().map(OsStr::to_owned);
        Self { name, ..self }
    }

    /// Rounds the size of a qcow2 up to whole sectors: QEMU ignores an incomplete sector at the end of a disk. The
    /// other block formats store whole sectors in any case, and a raw disk keeps its size.
    #[must_use]
    pub fn of_whole_sectors(self) -> Self {
        let size_bytes = match self.format {
            Format::Qcow2 => round_up(self.size_bytes, 512),
            _ => self.size_bytes,
        };
        Self { size_bytes, ..self }
    }

    /// Options of a raw image of `size_bytes`.
    pub fn raw(size_bytes: u64) -> Self {
        Self::new(Format::Raw, size_bytes)
    }

    /// Options of a qcow2 of `size_bytes`, otherwise with defaults.
    pub fn qcow2(size_bytes: u64) -> Self {
        Self::new(Format::Qcow2, size_bytes)
    }
}

/// Options of a new qcow2; the default is that of `qemu-img create`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qcow2Options {
    /// 512 bytes to 2 MiB, a power of two.
    pub cluster_bytes: u64,
    /// 2 (`compat=0.10`) or 3 (`compat=1.1`).
    pub version: u32,
    /// Compression of clusters.
    pub compression: Compression,
    /// Whether L2 entries describe subclusters: a write to an overlay then copies 1/32 of a cluster only.
    pub extended_l2: bool,
    /// Whether programs may postpone refcount updates while the image is open; Holdfast never does.
    pub lazy_refcounts: bool,
    /// Width of a refcount: 1, 2, 4, 8, 16, 32 or 64.
    pub refcount_bits: u32,
    /// The backing file.
    pub backing: Option<BackingFile>,
    /// The external data file, if the data is not stored in the image.
    pub data_file: Option<DataFile>,
    /// What is allocated at creation.
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
    /// Its name as the image stores it; a relative name starts at the directory of the image.
    pub name: String,
    /// Its format, which the image always stores.
    pub format: Format,
}

/// An external data file, which is created together with the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataFile {
    /// Its name as the image stores it; a relative name starts at the directory of the image.
    ///
    /// QEMU resolves it from the working directory of its process: give an absolute name where QEMU is to open the
    /// image.
    pub name: String,
    /// Whether it can be used without the image.
    pub kind: DataFileKind,
    /// Where it is created, if it is renamed later.
    pub made_at: Option<PathBuf>,
}

/// Whether an external data file can be used without its image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataFileKind {
    /// It can be read together with its image only.
    Plain,
    /// It is a raw image of the disk.
    Raw,
}

/// What is allocated when an image is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// All tables; data clusters are holes.
    Metadata,
}
