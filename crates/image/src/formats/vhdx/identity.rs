//! Changes the identity of a disk in its metadata, which no checksum covers.
//!
//! Children identify their parent by the GUID of its last modification. It stays, because the data does not change.

use super::opened::OpenedVhdx;
use crate::Result;
use crate::model::identity::ImageId;

/// Sets the identity, durably.
pub(crate) fn set(opened: &mut OpenedVhdx, image: &str, id: ImageId) -> Result<()> {
    // The header must get a new FileWriteGuid before anything else in the file changes (MS-VHDX 2.2.2).
    opened.header.file_write = ImageId::random()?;
    opened.header.store_next(&*opened.file, image)?;
    opened.file.write_at(&id.to_guid(), opened.id_at)?;
    Ok(opened.file.sync()?)
}
