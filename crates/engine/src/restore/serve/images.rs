//! Images as devices to serve.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::BackingId;
use holdfast_image::{Format, OpenOptions, open_mut};
use holdfast_serve::nbd::ExportDevice;
use holdfast_serve::vhost_user::AcceptedWrites;

use super::disks::{ClientWrites, NameInUse, OpenServedDisk, Overlay};
use crate::image::source::{DiskOrigin, OpenSource, SourceName};
use crate::job::error::ServingError;
use crate::job::{Error, Job, Result};

/// An image to serve.
#[derive(Debug, Clone)]
pub struct ServedImage {
    /// Its path, and the name of its disk.
    pub source: SourceName,
    /// How to open it.
    pub options: OpenOptions,
}

/// How to open images.
#[derive(Clone, Copy)]
pub(super) struct ImageSelection<'a> {
    /// How writes of clients are treated.
    pub(super) writes: &'a ClientWrites,
    /// The machine that they belong to.
    pub(super) machine: Option<&'a str>,
    /// Whether an export has this name.
    pub(super) is_in_use: NameInUse<'a>,
}

/// Opens an image. With [`ClientWrites::InPlace`], it is locked, and clients change it.
pub(super) fn open_image(image: &ServedImage, selection: ImageSelection<'_>, job: Job<'_>) -> Result<OpenServedDisk> {
    let DiskOrigin::Path(path) = &image.source.origin else {
        return Err(ServingError::StandardInput.into());
    };
    let name = match &image.source.disk {
        Some(disk) => disk.to_string(),
        None => image.source.base_name().unwrap_or_default(),
    };
    let group = selection.machine.unwrap_or(&name).to_owned();
    let export = match selection.machine {
        Some(machine) => format!("{machine}/{name}"),
        None => name.clone(),
    };
    // Before the image is opened: a writable one is locked.
    if (selection.is_in_use)(&export) {
        return Err(ServingError::NameInUse { name: export }.into());
    }
    let options = with_format(path, &image.options)?;
    let opened = match selection.writes {
        ClientWrites::InPlace(_) => open_writable(path, &options)?,
        writes => open_read_only(path, &options, writes, &name, job)?,
    };
    let description = match selection.writes {
        ClientWrites::Refuse => format!("{} ({})", opened.canonical.display(), opened.format),
        ClientWrites::InPlace(_) => format!("{} ({}), writable", opened.canonical.display(), opened.format),
        ClientWrites::ThrowAway(_) => format!("overlay on {}, discarded at the end", opened.canonical.display()),
        ClientWrites::Keep(_) => format!("overlay on {}", opened.canonical.display()),
    };
    Ok(OpenServedDisk {
        export,
        group,
        serial: digest_of(&opened.canonical),
        description,
        device: opened.device,
        accepted_writes: opened.accepted_writes,
        cache: None,
        held: opened.held,
        watched: opened.watched,
    })
}

/// A block device is raw unless the user says otherwise: its guest controls the bytes of a raw disk.
fn with_format(path: &Path, options: &OpenOptions) -> Result<OpenOptions> {
    let metadata = path.metadata().map_err(|source| Error::File {
        action: "open",
        path: path.to_owned(),
        source,
    })?;
    let mut options = options.clone();
    if options.format.is_none() && metadata.file_type().is_block_device() {
        options.format = Some(Format::Raw);
    }
    Ok(options)
}

struct OpenedImage {
    canonical: PathBuf,
    format: &'static str,
    device: ExportDevice,
    accepted_writes: AcceptedWrites,
    held: Vec<Box<dyn std::any::Any + Send + Sync>>,
    watched: Option<Arc<OpenSource>>,
}

fn open_writable(path: &Path, options: &OpenOptions) -> Result<OpenedImage> {
    let failed = |source| Error::File {
        action: "open",
        path: path.to_owned(),
        source,
    };
    let image = open_mut(path, options).map_err(|error| Error::from(error).on(path))?;
    let format = image.layers().first().map_or(Format::Raw, |layer| layer.format);
    let is_raw = image.layers().iter().all(|layer| layer.format == Format::Raw);
    Ok(OpenedImage {
        canonical: path.canonicalize().map_err(failed)?,
        format: format.name(),
        device: ExportDevice::Writable(Arc::new(image)),
        accepted_writes: if is_raw {
            AcceptedWrites::Stay
        } else {
            AcceptedWrites::NeedFlush
        },
        held: Vec::new(),
        watched: None,
    })
}

fn open_read_only(
    path: &Path,
    options: &OpenOptions,
    writes: &ClientWrites,
    name: &str,
    job: Job<'_>,
) -> Result<OpenedImage> {
    let source = OpenSource::open_with(path, options).map_err(|error| error.on(path))?;
    source.warn_of_format(None, job.progress);
    source.warn_of_inconsistencies(job.progress)?;
    let overlay = Overlay {
        backing_id: BackingId(identity_of(&source)?),
        // Of the path only: after a change of the image, the overlay is refused and not forgotten.
        file: format!("{name}-{}.overlay", digest_of(&source.canonical)),
    };
    let mut held = Vec::new();
    let device = overlay.over(Arc::clone(&source.device), writes, &mut held)?;
    Ok(OpenedImage {
        canonical: source.canonical.clone(),
        format: source.format.name(),
        device,
        accepted_writes: writes.overlay_writes(),
        held,
        watched: Some(Arc::new(source)),
    })
}

/// The identity of the content of an image: another one after it was written. An overlay that is kept must not be used
/// over other data.
fn identity_of(source: &OpenSource) -> Result<[u8; 16]> {
    let mut hasher = blake3::Hasher::new();
    for path in source.paths() {
        let metadata = path.metadata().map_err(|error| Error::File {
            action: "look at",
            path: path.to_owned(),
            source: error,
        })?;
        hasher.update(path.as_os_str().as_encoded_bytes());
        for number in [metadata.size(), metadata.ino()] {
            hasher.update(&number.to_le_bytes());
        }
        for number in [metadata.mtime(), metadata.mtime_nsec()] {
            hasher.update(&number.to_le_bytes());
        }
    }
    let mut identity = [0; 16];
    hasher.finalize_xof().fill(&mut identity);
    Ok(identity)
}

/// 16 digits that identify a path.
fn digest_of(path: &Path) -> String {
    let digest = blake3::hash(path.as_os_str().as_encoded_bytes());
    digest.to_hex().chars().take(16).collect()
}
