//! New images.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::chain::load_header;
use crate::file::{Access, HostFile, ImageFile, directory_of};
use crate::qcow2::layer::Layer;
use crate::qcow2::layout::{new_header, write_empty};
use crate::qcow2::writer::Qcow2Mut;
use crate::{BulkWriter, Compression, Error, Format, Result};

/// What a new image is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateOptions {
    /// Raw or qcow2.
    pub format: Format,
    /// Size of the disk.
    pub size_bytes: u64,
    /// What only qcow2 has.
    pub qcow2: Qcow2Options,
}

impl CreateOptions {
    /// A raw disk of `size_bytes`.
    pub fn raw(size_bytes: u64) -> Self {
        Self {
            format: Format::Raw,
            size_bytes,
            qcow2: Qcow2Options::default(),
        }
    }

    /// A qcow2 image of `size_bytes` with the usual options.
    pub fn qcow2(size_bytes: u64) -> Self {
        Self {
            format: Format::Qcow2,
            size_bytes,
            qcow2: Qcow2Options::default(),
        }
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

/// Creates an empty image at `path`, where nothing may be yet; durable when this returns.
pub fn create(path: &Path, options: &CreateOptions) -> Result<()> {
    match options.format {
        Format::Raw => {
            let file = HostFile::create_new(path)?;
            file.set_length(options.size_bytes)?;
            file.sync()?;
        }
        Format::Qcow2 => create_qcow2(path, options)?,
        other => {
            return Err(Error::InvalidOption {
                option: "format",
                detail: format!("{other} images cannot be created"),
            });
        }
    }
    HostFile::sync_directory(path)
}

fn create_qcow2(path: &Path, options: &CreateOptions) -> Result<()> {
    let header = new_header(options)?;
    check_backing(path, &options.qcow2)?;
    let file: Arc<dyn ImageFile> = Arc::new(HostFile::create_new(path)?);
    let data_file = create_data_file(path, options)?;
    write_empty(&*file, header)?;
    let is_raw = options
        .qcow2
        .data_file
        .as_ref()
        .is_some_and(|data| data.kind == DataFileKind::Raw);
    // A raw data file has a meaning of its own only if every entry points into it.
    if is_raw || options.qcow2.preallocation == Preallocation::Metadata {
        let image = path.display().to_string();
        let header = load_header(&*file, &image)?;
        Qcow2Mut::new(Layer::new(image.into(), header, file, data_file, None)?)?.preallocate()?;
    }
    Ok(())
}

/// Creates an image at `path`, where nothing may be yet, to be filled once from start to end.
///
/// Until [`BulkWriter::finish`] the file is no image at all, so that a crash cannot leave half a disk that looks whole.
pub fn create_bulk(path: &Path, options: &CreateOptions) -> Result<BulkWriter> {
    if options.format != Format::Qcow2 {
        let detail = format!("{} images are filled as devices", options.format);
        return Err(Error::InvalidOption {
            option: "format",
            detail,
        });
    }
    let header = new_header(options)?;
    check_backing(path, &options.qcow2)?;
    if options.qcow2.preallocation != Preallocation::Off {
        let detail = "an image that is filled at once has nothing to allocate for later".to_owned();
        return Err(Error::InvalidOption {
            option: "preallocation",
            detail,
        });
    }
    let file: Arc<dyn ImageFile> = Arc::new(HostFile::create_new(path)?.written_once());
    let data_file = create_data_file(path, options)?;
    let is_raw = options
        .qcow2
        .data_file
        .as_ref()
        .is_some_and(|data| data.kind == DataFileKind::Raw);
    BulkWriter::new(file, data_file, header, is_raw, Some(path.to_owned()))
}

/// The backing file must be there: a typing error found later would be a disk of zeroes.
fn check_backing(path: &Path, options: &Qcow2Options) -> Result<()> {
    if let Some(backing) = &options.backing {
        HostFile::open(&beside(path, &backing.name), Access::Read)?;
    }
    Ok(())
}

fn create_data_file(path: &Path, options: &CreateOptions) -> Result<Option<Arc<dyn ImageFile>>> {
    let Some(data) = &options.qcow2.data_file else {
        return Ok(None);
    };
    let place = beside(path, &data.name);
    let file = HostFile::create_new(&place)?;
    file.set_length(options.size_bytes)?;
    file.sync()?;
    HostFile::sync_directory(&place)?;
    Ok(Some(Arc::new(file.written_once())))
}

fn beside(image: &Path, name: &str) -> PathBuf {
    directory_of(image).join(name)
}
