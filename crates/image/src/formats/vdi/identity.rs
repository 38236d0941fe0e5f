//! Changes the UUID of an image, and the one of its parent that a child stores. No checksum covers them.

use super::header::{AT_ID, AT_PARENT};
use crate::Result;
use crate::file::ImageFile;
use crate::model::identity::ImageId;

/// Sets the UUID of the image, durably.
pub(crate) fn set(file: &dyn ImageFile, id: ImageId) -> Result<()> {
    file.write_at(&id.to_guid(), AT_ID as u64)?;
    Ok(file.sync()?)
}

/// Sets the parent UUID of a child, durably.
pub(crate) fn set_parent(file: &dyn ImageFile, id: ImageId) -> Result<()> {
    file.write_at(&id.to_guid(), AT_PARENT as u64)?;
    Ok(file.sync()?)
}
