//! Changes the UUID of an image, in both footers, and the one of its parent that a child stores in its header.
//! Checksums cover all of them.

use holdfast_block::to_usize;

use super::footer::{AT_CHECKSUM, AT_ID};
use super::header::VhdHeader;
use super::sparse::HEADER_BYTES;
use super::{checksum, sparse};
use crate::Result;
use crate::file::ImageFile;
use crate::model::bytes::put;
use crate::model::identity::ImageId;

/// Sets the UUID of the image, durably.
pub(crate) fn set(file: &dyn ImageFile, header: &VhdHeader, id: ImageId) -> Result<()> {
    let mut footer = *header.footer_bytes;
    put_id(&mut footer, AT_ID, AT_CHECKSUM, id);
    // The copy first: a valid footer at the end has precedence.
    if header.sparse.is_some() {
        file.write_at(&footer, 0)?;
        file.sync()?;
    }
    if header.has_footer_at_end {
        file.write_at(&footer, header.footer_start(file.length_bytes()?))?;
        file.sync()?;
    }
    Ok(())
}

/// Sets the parent UUID of a child whose header is at `offset`, durably.
pub(crate) fn set_parent(file: &dyn ImageFile, offset: u64, id: ImageId) -> Result<()> {
    let mut bytes = vec![0; to_usize(HEADER_BYTES)];
    file.read_at(&mut bytes, offset)?;
    put_id(&mut bytes, sparse::AT_PARENT, sparse::AT_CHECKSUM, id);
    file.write_at(&bytes, offset)?;
    Ok(file.sync()?)
}

fn put_id(bytes: &mut [u8], at: usize, checksum_at: usize, id: ImageId) {
    put(bytes, at, &id.0);
    let sum = checksum(bytes, checksum_at);
    put(bytes, checksum_at, &sum.to_be_bytes());
}
