//! The UUID of an image, and the one that a child has of its parent. Nothing has a checksum.

use super::header::{AT_ID, AT_PARENT};
use crate::Result;
use crate::file::ImageFile;
use crate::model::identity::ImageId;

/// Gives the image in `file` another UUID, durably.
pub(crate) fn set(file: &dyn ImageFile, id: ImageId) -> Result<()> {
    file.write_at(&id.to_guid(), AT_ID as u64)?;
    Ok(file.sync()?)
}

/// Has the child in `file` know its parent by another UUID, durably.
pub(crate) fn set_parent(file: &dyn ImageFile, id: ImageId) -> Result<()> {
    file.write_at(&id.to_guid(), AT_PARENT as u64)?;
    Ok(file.sync()?)
}
