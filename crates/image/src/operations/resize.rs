//! Changes the size of an image.
//!
//! All formats grow in one order, so that after a crash the disk has the old or the new size:
//!
//! 1. The tables grow into unused space; then the header records their new size. Tables may be larger than the disk
//!    needs.
//! 2. Leftover data past the old end, in the tables or in a backing file, is zeroed.
//! 3. The header records the new disk size.
//!
//! They shrink in the reverse order: the header records the new size, then the space past it is freed.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::{BlockDevice, ExtentKind};

use crate::chain::{Content, OpenedFile, open_chain, stack};
use crate::file::{Access, ImageFile, Staged, directory_of};
use crate::formats::ploop::descriptor::FILE_NAME;
use crate::formats::{ploop, qcow2, vdi, vhd, vhdx};
use crate::operations::image::{open, refuse_cut_off, refuse_unwritable};
use crate::operations::new_identity::dependents_in_folder;
use crate::{Backing, Error, Format, OpenOptions, Result};

#[cfg(test)]
mod crash_tests;

/// In all formats but raw, the disk size is a multiple of this.
const SECTOR_BYTES: u64 = 512;

/// Whether an image may become smaller, which loses the data at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Shrink {
    /// It must not.
    #[default]
    Refuse,
    /// It may.
    Allow,
}

/// The result of a resize.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResizeReport {
    /// Size of the disk before, in bytes.
    pub before_bytes: u64,
    /// Size of the disk after, in bytes.
    pub after_bytes: u64,
    /// The format of the image.
    pub format: Format,
}

/// The result of planning a resize.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResizePlan {
    /// The sizes.
    pub report: ResizeReport,
    /// The data past the new end, if any.
    pub lost: Option<LostData>,
}

/// Data that a resize would discard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostData {
    /// Bytes that the image and its backing files store past the new end of the disk.
    pub data_bytes: u64,
    /// Disk offset of the first of these bytes.
    pub first_offset: u64,
}

/// Number of extents that are queried at once.
const EXTENT_COUNT_MAX: usize = 1024;

/// Resizes the disk of the image at `path` to `new_size_bytes`; durable when this returns. New bytes read as zero.
///
/// The size must be a multiple of 512, except for raw images. Nothing happens if the image has the size already. After
/// an interruption the image has the old or the new size, and the call can be repeated.
///
/// # Errors
/// - [`Error::CutOff`] if the file is truncated;
/// - [`Error::WouldShrink`] if the disk would become smaller and `shrink` does not allow it;
/// - [`Error::HasChildren`] if images in its folder depend on it: they have its size;
/// - [`Error::NotResizable`] if the format, or this variant of it, does not support it: convert the image instead;
/// - [`Error::InvalidOption`] for a size that the format does not support;
/// - [`Error::Locked`] if another process has it open.
pub fn resize(path: &Path, options: &OpenOptions, new_size_bytes: u64, shrink: Shrink) -> Result<ResizeReport> {
    let target = ResizeTarget::open(path, options, Access::Write)?;
    target.resize(new_size_bytes, shrink, Ok)
}

/// Plans the same change: everything is checked, and the changes are made in memory only.
///
/// # Errors
/// Those of [`resize`].
pub fn plan_resize(path: &Path, options: &OpenOptions, new_size_bytes: u64, shrink: Shrink) -> Result<ResizePlan> {
    refuse_unwritable(path, options)?;
    let target = ResizeTarget::open(path, options, Access::Read)?;
    let report = target.resize(new_size_bytes, shrink, |file| Ok(Arc::new(Staged::new(file)?)))?;
    let cut = report.after_bytes..report.before_bytes;
    let lost = if cut.is_empty() {
        None
    } else {
        data_in(&open(path, &with_backing_followed(options))?, cut)?
    };
    Ok(ResizePlan { report, lost })
}

/// The data of the disk in `range`.
fn data_in(device: &dyn BlockDevice, mut range: Range<u64>) -> Result<Option<LostData>> {
    let mut lost: Option<LostData> = None;
    while !range.is_empty() {
        let extents = device.extents(range.clone(), EXTENT_COUNT_MAX)?;
        for extent in extents.iter().filter(|extent| extent.kind == ExtentKind::Data) {
            let lost = lost.get_or_insert(LostData {
                data_bytes: 0,
                first_offset: extent.offset,
            });
            lost.data_bytes += extent.length;
        }
        range.start = extents.end();
    }
    Ok(lost)
}

fn with_backing_followed(options: &OpenOptions) -> OpenOptions {
    OpenOptions {
        backing: Backing::Follow,
        ..options.clone()
    }
}

/// An image to resize.
struct ResizeTarget {
    top: OpenedFile,
    /// Its backing files.
    below: Vec<OpenedFile>,
    /// Images that depend on it.
    children: Vec<PathBuf>,
}

impl ResizeTarget {
    fn open(path: &Path, options: &OpenOptions, access: Access) -> Result<Self> {
        refuse_cut_off(path, options)?;
        let children: Vec<PathBuf> = dependents_in_folder(path, options)?;
        let mut chain = open_chain(path, &with_backing_followed(options), access)?;
        // A descriptor in the folder of a delta stores the size, too.
        let descriptor = directory_of(path).join(FILE_NAME);
        let is_delta = chain.files[0].info.format == Format::Parallels && descriptor.exists();
        if chain.tree.is_some() || is_delta {
            return Err(Error::NotResizable {
                image: path.display().to_string(),
                detail: "it is a delta of a Parallels disk, whose descriptor records the size, too; convert it first"
                    .to_owned(),
            });
        }
        Ok(Self {
            top: chain.files.remove(0),
            below: chain.files,
            children,
        })
    }

    /// Resizes the image in the file that `writable` opens for writing or wraps.
    fn resize(
        self,
        new_size_bytes: u64,
        shrink: Shrink,
        writable: impl FnOnce(Arc<dyn ImageFile>) -> Result<Arc<dyn ImageFile>>,
    ) -> Result<ResizeReport> {
        let Self { top, below, children } = self;
        let image = top.path.display().to_string();
        let resized = ResizeReport {
            before_bytes: top.info.size_bytes,
            after_bytes: new_size_bytes,
            format: top.info.format,
        };
        if new_size_bytes == resized.before_bytes {
            return Ok(resized);
        }
        if !children.is_empty() {
            return Err(Error::HasChildren {
                image,
                children: children.iter().map(|child| child.display().to_string()).collect(),
            });
        }
        if new_size_bytes < resized.before_bytes && shrink == Shrink::Refuse {
            return Err(Error::WouldShrink {
                image,
                before_bytes: resized.before_bytes,
                after_bytes: new_size_bytes,
            });
        }
        check_size(&resized)?;
        let not_resizable = |detail: &str| Error::NotResizable {
            image: image.clone(),
            detail: detail.to_owned(),
        };
        let file = writable(top.file)?;
        match &top.content {
            Content::Raw => resize_raw(&*file, &top.path, new_size_bytes)?,
            Content::Qcow2(opened) if opened.data_file.is_some() => {
                return Err(not_resizable("its data is in an external file; convert it first"));
            }
            Content::Qcow2(_) => {
                let below = stack(below, None)?;
                let backing = below.first().map(|layer| Arc::clone(&layer.device));
                qcow2::resize::resize(&file, &image, backing.as_ref(), new_size_bytes)?;
            }
            Content::Vmdk(_) => return Err(not_resizable("resizing a VMDK is not supported; convert it first")),
            Content::Vdi(_) => vdi::resize::resize(&file, &image, new_size_bytes)?,
            Content::Vhd(_) => vhd::resize::resize(&file, &image, new_size_bytes)?,
            Content::Vhdx(_) => vhdx::resize::resize(&file, &image, new_size_bytes)?,
            Content::Ploop(_) => ploop::resize::resize(&file, &image, new_size_bytes)?,
        }
        Ok(resized)
    }
}

fn check_size(resized: &ResizeReport) -> Result<()> {
    let after = resized.after_bytes;
    let detail = if i64::try_from(after).is_err() || after == 0 {
        format!("a disk cannot have {after} bytes")
    } else if resized.format != Format::Raw && !after.is_multiple_of(SECTOR_BYTES) {
        format!("{after} bytes is not a multiple of the sector size, {SECTOR_BYTES} bytes")
    } else {
        return Ok(());
    };
    Err(Error::InvalidOption { option: "size", detail })
}

fn resize_raw(file: &dyn ImageFile, path: &Path, after_bytes: u64) -> Result<()> {
    let is_device = path.metadata().is_ok_and(|metadata| !metadata.is_file());
    if !is_device {
        file.set_length(after_bytes)?;
    }
    if is_device || file.length_bytes()? != after_bytes {
        return Err(Error::NotResizable {
            image: path.display().to_string(),
            detail: "it is a block device; resize it with its volume manager".to_owned(),
        });
    }
    Ok(file.sync()?)
}
