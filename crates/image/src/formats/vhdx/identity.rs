//! The identity of a disk, in its metadata, which has no checksum.
//!
//! Children know their parent by the GUID of its last modification, which stays: the data is what it was.

use super::opened::OpenedVhdx;
use crate::Result;
use crate::model::identity::ImageId;

/// Gives the image another identity, durably.
pub(crate) fn set(opened: &mut OpenedVhdx, image: &str, id: ImageId) -> Result<()> {
    // Before anything in the file changes, its header says that it is not the file that it was (MS-VHDX 2.2.2, FileWriteGuid).
    opened.header.file_write = ImageId::random()?;
    opened.header.store_next(&*opened.file, image)?;
    opened.file.write_at(&id.to_guid(), opened.id_at)?;
    Ok(opened.file.sync()?)
}
