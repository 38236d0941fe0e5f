//! Changes the size of an image.
//!
//! All formats grow in one order, so that after a crash the disk has the old size or the new one:
//!
//! 1. The tables get room for the new size, in places that nothing refers to yet; then the header says that they are larger. Tables
//!    may be larger than a disk needs.
//! 2. What the tables, or a backing file, hold past the old end becomes zero: an earlier size has left it there.
//! 3. The header says the new size.
//!
//! They shrink in the reverse order: the header says the new size, and then the room past it is given back.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::chain::{Content, open_chain, stack};
use crate::file::{Access, ImageFile, directory_of};
use crate::formats::ploop::descriptor::FILE_NAME;
use crate::formats::{ploop, qcow2, vdi, vhd, vhdx};
use crate::operations::image::refuse_cut_off;
use crate::operations::new_identity::dependents_beside;
use crate::{Backing, Error, Format, OpenOptions, Result};

#[cfg(test)]
mod crash_tests;

/// Sizes of disks are multiples of this many bytes in all formats but raw.
const SECTOR_BYTES: u64 = 512;

/// Whether an image may become smaller, by which it loses its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Shrink {
    /// It may not.
    #[default]
    Refuse,
    /// It may.
    Allow,
}

/// An image whose size was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResizeReport {
    /// What the size of the disk was, in bytes.
    pub before_bytes: u64,
    /// What it is, in bytes.
    pub after_bytes: u64,
    /// The format of the image.
    pub format: Format,
}

/// Gives the disk of the image at `path` a size of `new_size_bytes` bytes; durable when this returns. New bytes read as zero.
///
/// Sizes are multiples of 512 but for raw images. The size that the image has already changes nothing. Where this is cut short, the
/// image has its old size or the new one, and it can be done again.
///
/// # Errors
/// - [`Error::CutOff`] where the file ends before the end of what its tables lead to;
/// - [`Error::WouldShrink`] where the disk would become smaller and `shrink` does not allow that;
/// - [`Error::HasChildren`] where images beside it are based on it: they have its size;
/// - [`Error::NotResizable`] where the format, or this image of it, cannot have that size: converting it helps;
/// - [`Error::InvalidOption`] for sizes that the format has not;
/// - [`Error::Locked`] where somebody else has it open.
pub fn resize(path: &Path, options: &OpenOptions, new_size_bytes: u64, shrink: Shrink) -> Result<ResizeReport> {
    // Before anything is locked: a lock ends when any opening of its file does.
    refuse_cut_off(path, options)?;
    let children: Vec<PathBuf> = dependents_beside(path, options)?;
    let options = OpenOptions {
        backing: Backing::Follow,
        ..options.clone()
    };
    let mut chain = open_chain(path, &options, Access::Write)?;
    // So does one beside a delta.
    let descriptor = directory_of(path).join(FILE_NAME);
    let is_delta = chain.files[0].info.format == Format::Parallels && descriptor.exists();
    if chain.tree.is_some() || is_delta {
        return Err(Error::NotResizable {
            image: path.display().to_string(),
            detail: "it is a disk of Parallels whose descriptor says the size too; convert it".to_owned(),
        });
    }
    let top = chain.files.remove(0);
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
    match &top.content {
        Content::Raw => resize_raw(&*top.file, &image, new_size_bytes)?,
        Content::Qcow2(opened) if opened.data_file.is_some() => {
            return Err(not_resizable("its data is in another file; convert it"));
        }
        Content::Qcow2(_) => {
            let below = stack(chain.files, None)?;
            let backing = below.first().map(|layer| Arc::clone(&layer.device));
            qcow2::resize::resize(&top.file, &image, backing.as_ref(), new_size_bytes)?;
        }
        Content::Vmdk(_) => return Err(not_resizable("a VMDK is not given another size here; convert it")),
        Content::Vdi(_) => vdi::resize::resize(&top.file, &image, new_size_bytes)?,
        Content::Vhd(_) => vhd::resize::resize(&top.file, &image, new_size_bytes)?,
        Content::Vhdx(_) => vhdx::resize::resize(&top.file, &image, new_size_bytes)?,
        Content::Ploop(_) => ploop::resize::resize(&top.file, &image, new_size_bytes)?,
    }
    Ok(resized)
}

fn check_size(resized: &ResizeReport) -> Result<()> {
    let after = resized.after_bytes;
    let detail = if i64::try_from(after).is_err() || after == 0 {
        format!("no disk has {after} bytes")
    } else if resized.format != Format::Raw && !after.is_multiple_of(SECTOR_BYTES) {
        format!("{after} bytes are not whole sectors of {SECTOR_BYTES}")
    } else {
        return Ok(());
    };
    Err(Error::InvalidOption { option: "size", detail })
}

fn resize_raw(file: &dyn ImageFile, image: &str, after_bytes: u64) -> Result<()> {
    file.set_length(after_bytes)?;
    if file.length_bytes()? != after_bytes {
        return Err(Error::NotResizable {
            image: image.to_owned(),
            detail: "it is a block device, whose size its owner says".to_owned(),
        });
    }
    Ok(file.sync()?)
}
