//! The file of a disk at this host.

use std::path::PathBuf;

use holdfast_image::{Format, Image, OpenOptions};

use crate::error::Result;

/// A file or device of this host that holds a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageFile {
    /// Its path.
    pub path: PathBuf,
    /// Its format; none if it is to be detected.
    pub format: Option<String>,
}

/// Opens an image, which is locked against writers as long as it is open: the machine cannot be started meanwhile.
pub(crate) fn open_image(image: &ImageFile) -> Result<Image> {
    let options = OpenOptions {
        format: image.format.as_deref().and_then(Format::from_name),
        ..OpenOptions::default()
    };
    holdfast_image::open(&image.path, &options).map_err(|error| holdfast_engine::Error::from(error).into())
}
