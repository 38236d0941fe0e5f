//! Images that are there, and are to be written.

use std::path::Path;

use holdfast_block::{BlockDevice as _, FileDeviceMut, IoMode};
use holdfast_image::{Format, ImageMut, OpenOptions};
use rustix::fs::{Access, access};

use super::neighbours::chain_of;
use crate::files::block_target::is_block_device;
use crate::image::source::OpenSource;
use crate::job::{Error, Result};

/// Opens an image that is there for writing, with a lock that no QEMU takes at the same time.
pub(super) fn open_image(path: &Path, format: Format) -> Result<ImageMut> {
    let options = OpenOptions {
        format: Some(format),
        // QEMU opens them as well, by the same words of the image.
        allow: chain_of(path, Some(format.name())),
        ..OpenOptions::default()
    };
    holdfast_image::open_mut(path, &options).map_err(|error| Error::from(error).on(path))
}

/// The size of what is at a path, in bytes as a machine sees it; it can be written when the machine that writes it now is off.
pub(super) fn size_if_writable_then(path: &Path, format: Format) -> Result<u64> {
    let failed = |error: rustix::io::Errno| Error::File {
        action: "write to",
        path: path.to_owned(),
        source: error.into(),
    };
    access(path, Access::WRITE_OK).map_err(failed)?;
    let options = OpenOptions {
        format: Some(format),
        allow: chain_of(path, Some(format.name())),
        ..OpenOptions::default()
    };
    let source = OpenSource::open_with(path, &options).map_err(|error| error.on(path))?;
    Ok(source.device.size_bytes())
}

/// The size of what is at a path, in bytes as a machine sees it; it can be written, and no other process writes it.
pub(super) fn size_if_writable(path: &Path, format: Format) -> Result<u64> {
    if is_block_device(path) && format != Format::Raw {
        return Err(Error::DeviceFormat {
            path: path.to_owned(),
            format: format.to_string(),
        });
    }
    if is_block_device(path) {
        // Refused by the operating system where a file system or an array uses it.
        drop(FileDeviceMut::open(path, IoMode::Buffered)?);
    }
    Ok(open_image(path, format)?.size_bytes())
}
