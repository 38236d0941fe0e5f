//! The file of a copy, raw or an image, while it has its temporary name.
//!
//! An image is written by the same code as one that a machine uses: a flush makes its tables durable, and after a kill
//! at any point it holds at least all that was flushed. What was allocated since then may be lost space. A qcow2 counts its
//! clusters, so there it is freed before the copy continues.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use holdfast_block::{BlockDevice as _, BlockDeviceMut, FileDeviceMut, IoMode, error_text, sync_folder_of};
use holdfast_image::{
    Backing, CreateOptions, Format, Gate, ImageMut, OpenOptions as ImageOptions, RepairIntent, RepairMode, open_mut,
    plan_repair,
};
use rustix::fs::statvfs;

use crate::error::{Error, Result};
use crate::request::ReceiveRequest;
use crate::seed::SeedFill;

/// An open file with the disk that it holds.
pub(super) struct PartialFile {
    disk: FileDisk,
    /// The same file.
    pub(super) file: File,
}

/// A disk in a file.
enum FileDisk {
    Raw(FileDeviceMut),
    Image(ImageMut),
}

impl PartialFile {
    /// Creates a file for a disk without content. A leftover of an earlier copy is removed.
    pub(super) fn create(path: &Path, request: &ReceiveRequest) -> Result<Self> {
        if let Err(source) = std::fs::remove_file(path)
            && source.kind() != std::io::ErrorKind::NotFound
        {
            return Err(failed(path, "delete", source));
        }
        check_room(path, request)?;
        match target_format(request)? {
            Format::Raw => Self::create_raw(path, request.size_bytes),
            format => {
                let options = CreateOptions::new(format, request.size_bytes)
                    .of_whole_sectors()
                    .with_final_path(&request.target);
                holdfast_image::create(path, &options)?;
                Self::of_image(open_mut(path, &image_options(format))?, path)
            }
        }
    }

    /// Opens the file of an interrupted copy.
    pub(super) fn reopen(path: &Path, request: &ReceiveRequest) -> Result<Self> {
        let format = target_format(request)?;
        if format == Format::Raw {
            return Self::open_raw(path);
        }
        let unusable = |reason| Error::PartialImage {
            path: path.to_owned(),
            reason,
        };
        let image = open_repaired(path, format).map_err(|error| unusable(error_text(&error)))?;
        if image.size_bytes() < request.size_bytes {
            return Err(unusable(format!("its disk has {} bytes", image.size_bytes())));
        }
        Self::of_image(image, path)
    }

    /// Opens a raw file, or one of any format to which nothing is written.
    pub(super) fn open_raw(path: &Path) -> Result<Self> {
        let opened = OpenOptions::new().read(true).write(true).open(path);
        Self::of_raw(opened.map_err(|source| failed(path, "open", source))?, path)
    }

    pub(super) fn device(&self) -> &dyn BlockDeviceMut {
        match &self.disk {
            FileDisk::Raw(device) => device,
            FileDisk::Image(image) => image,
        }
    }

    /// Keeps what was written to an image and not flushed, which would be discarded with it.
    pub(super) fn keep(&self) {
        if let FileDisk::Image(image) = &self.disk {
            // After an error, it is sent again.
            image.flush().ok();
        }
    }

    /// Fills a new file with the content of a seed.
    pub(super) fn fill(&self, seed: &mut SeedFill<'_>) -> Result<()> {
        match &self.disk {
            FileDisk::Raw(device) => seed.fill_file(&self.file, device),
            FileDisk::Image(image) => seed.fill_image(image),
        }
    }

    fn create_raw(path: &Path, size_bytes: u64) -> Result<Self> {
        let mut options = OpenOptions::new();
        let created = options.read(true).write(true).create_new(true).mode(0o600).open(path);
        let file = created.map_err(|source| failed(path, "create", source))?;
        let sized = file.set_len(size_bytes).and_then(|()| file.sync_all());
        sized
            .and_then(|()| sync_folder_of(path))
            .map_err(|source| failed(path, "make durable", source))?;
        Self::of_raw(file, path)
    }

    fn of_raw(file: File, path: &Path) -> Result<Self> {
        let same = file.try_clone().map_err(|source| failed(path, "open", source))?;
        Ok(Self {
            disk: FileDisk::Raw(FileDeviceMut::of_file(file, path, IoMode::Buffered)?),
            file: same,
        })
    }

    fn of_image(image: ImageMut, path: &Path) -> Result<Self> {
        Ok(Self {
            disk: FileDisk::Image(image),
            file: File::open(path).map_err(|source| failed(path, "open", source))?,
        })
    }
}

/// The format of the new file that a request asks for.
pub(super) fn target_format(request: &ReceiveRequest) -> Result<Format> {
    let Some(name) = &request.format else {
        return Ok(Format::Raw);
    };
    let format = Format::from_name(name).filter(|format| Format::SUPPORTED.contains(format));
    let refused = |reason: String| Error::TargetFormat {
        path: request.target.clone(),
        reason,
    };
    let format = format.ok_or_else(|| refused(format!("{name:?} images cannot be written here")))?;
    let extension = request.target.extension().unwrap_or_default();
    if format == Format::Parallels && extension.eq_ignore_ascii_case("hdd") {
        return Err(refused(
            "this disk of Parallels would be a folder, not a file".to_owned(),
        ));
    }
    Ok(format)
}

fn open_repaired(path: &Path, format: Format) -> holdfast_image::Result<ImageMut> {
    let options = image_options(format);
    if format == Format::Qcow2 {
        // It holds the lock of the image until it is executed or dropped.
        let repair = plan_repair(path, &options, RepairMode::Leaks, RepairIntent::Repair)?;
        if repair.actions().is_empty() {
            drop(repair);
        } else {
            repair.execute()?;
        }
    }
    open_mut(path, &options)
}

/// A sender with few rights may have written the file as a raw one before: it must not refer to others.
fn image_options(format: Format) -> ImageOptions {
    ImageOptions {
        format: Some(format),
        gate: Gate::Deny,
        backing: Backing::Ignore,
        ..ImageOptions::default()
    }
}

/// Refuses a disk that is expected to take more space than there is.
fn check_room(path: &Path, request: &ReceiveRequest) -> Result<()> {
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    let room = statvfs(folder).map_err(|error| failed(folder, "examine the file system of", error.into()))?;
    let available_bytes = room.f_bavail.saturating_mul(room.f_frsize);
    if available_bytes < request.expected_bytes {
        return Err(Error::NoSpace {
            path: request.target.clone(),
            needed_bytes: request.expected_bytes,
            available_bytes,
        });
    }
    Ok(())
}

fn failed(path: &Path, action: &'static str, source: std::io::Error) -> Error {
    Error::File {
        action,
        path: path.to_owned(),
        source,
    }
}
