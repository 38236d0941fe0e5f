//! Another size.

use std::sync::Arc;

use crate::file::ImageFile;
use crate::{Error, Result};

/// Gives the disk of the image in `file` a size of `after_bytes`, durably.
pub(crate) fn resize(_file: &Arc<dyn ImageFile>, image: &str, _after_bytes: u64) -> Result<()> {
    Err(Error::NotResizable {
        image: image.to_owned(),
        detail: "its format is not given another size here; convert it".to_owned(),
    })
}
