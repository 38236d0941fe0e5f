//! The file of a disk at this host.

use std::fs::File;
use std::path::PathBuf;

use holdfast_block::{BlockDevice as _, is_open_for_writing};
use holdfast_engine::chain_of;
use holdfast_image::{Format, Image, OpenOptions};

use crate::error::{Error, Result};

/// A file or device of this host that holds a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageFile {
    /// Its path.
    pub path: PathBuf,
    /// Its format; none if it is to be detected.
    pub format: Option<String>,
}

impl ImageFile {
    /// Size of the disk, in bytes.
    pub(crate) fn size_bytes(&self) -> Result<u64> {
        self.open().map(|image| image.size_bytes())
    }

    /// Opens the image without a lock: its machine may run.
    pub(crate) fn open(&self) -> Result<Image> {
        holdfast_image::open(&self.path, &self.options()).map_err(failed)
    }

    /// Whether QEMU may write to it.
    pub(crate) fn is_open_for_writing(&self) -> Result<bool> {
        let file = File::open(&self.path).and_then(|file| is_open_for_writing(&file));
        file.map_err(|source| {
            holdfast_engine::Error::File {
                action: "examine",
                path: self.path.clone(),
                source,
            }
            .into()
        })
    }

    /// Opens the image of a machine that is shut off. The machine cannot be started before it is dropped.
    pub(crate) fn open_at_rest(&self) -> Result<Image> {
        holdfast_image::open_at_rest(&self.path, &self.options()).map_err(failed)
    }

    fn options(&self) -> OpenOptions {
        OpenOptions {
            format: self.format.as_deref().and_then(Format::from_name),
            // A hypervisor opens backing files in all folders.
            allow: chain_of(&self.path, self.format.as_deref()),
            ..OpenOptions::default()
        }
    }
}

fn failed(error: holdfast_image::Error) -> Error {
    holdfast_engine::Error::from(error).into()
}
