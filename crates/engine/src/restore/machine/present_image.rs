//! Existing images that are to be written.

use std::path::Path;

use holdfast_block::{BlockDevice as _, FileDeviceMut, IoMode};
use holdfast_image::{Format, ImageMut, OpenOptions};
use rustix::fs::{Access, access};

use super::neighbours::chain_of;
use crate::files::block_target::is_block_device;
use crate::image::source::OpenSource;
use crate::job::{Error, Result};

/// Opens an existing image for writing, with a lock that excludes QEMU.
pub(super) fn open_image(path: &Path, format: Format) -> Result<ImageMut> {
    let options = OpenOptions {
        format: Some(format),
        // QEMU opens the same files, as the image names them.
        allow: chain_of(path, Some(format.name())),
        ..OpenOptions::default()
    };
    holdfast_image::open_mut(path, &options).map_err(|error| Error::from(error).on(path))
}

/// The virtual size of an existing image in bytes, if it can be written once the machine that uses it now is off.
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

/// The virtual size of an existing image in bytes, if it can be written now and no other process writes it.
pub(super) fn size_if_writable(path: &Path, format: Format) -> Result<u64> {
    if is_block_device(path) && format != Format::Raw {
        return Err(Error::DeviceFormat {
            path: path.to_owned(),
            format: format.to_string(),
        });
    }
    if is_block_device(path) {
        // The operating system refuses this if a file system or an array uses the device.
        drop(FileDeviceMut::open(path, IoMode::Buffered)?);
    }
    Ok(open_image(path, format)?.size_bytes())
}
