//! Grows the disk of a chain in use.

use std::sync::{Arc, PoisonError};

use holdfast_block::{BlockDevice as _, BlockDeviceMut as _};

use super::chain::LiveChain;
use super::layer::{grow_layer, writer_of};
use super::tree::StoreOrder;
use crate::{Error, Result};

const SECTOR_BYTES: u64 = 512;

impl LiveChain {
    /// Grows the disk to `size_bytes`, durably. Requests wait meanwhile. New bytes read as zero.
    ///
    /// # Errors
    /// The disk would become smaller, or the format does not support the size.
    pub fn grow(&self, size_bytes: u64) -> Result<()> {
        let _changing = self.begin_change();
        let before_bytes = self.size_bytes();
        let tree = self.tree();
        let layer = tree.layer(tree.top()).expect("a valid tree lists its top").clone();
        let image = self.folder.path(&layer.file).display().to_string();
        if size_bytes < before_bytes {
            return Err(Error::WouldShrink {
                image,
                before_bytes,
                after_bytes: size_bytes,
            });
        }
        if !size_bytes.is_multiple_of(SECTOR_BYTES) || i64::try_from(size_bytes).is_err() {
            return Err(Error::InvalidOption {
                option: "size",
                detail: format!("{size_bytes} bytes is not a multiple of the sector size, {SECTOR_BYTES} bytes"),
            });
        }
        if size_bytes > before_bytes {
            let mut top = self.gate.write().unwrap_or_else(PoisonError::into_inner);
            top.writer.flush()?;
            let grown = grow_layer(&top.file, &layer, &image, &top.seam, size_bytes);
            // The tables may have changed in any case.
            match writer_of(Arc::clone(&top.file), layer.format, &image, &top.seam) {
                Ok(writer) => {
                    self.set_size(writer.size_bytes());
                    top.writer = writer;
                }
                Err(error) => {
                    self.fail(&error);
                    return Err(error);
                }
            }
            grown?;
        }
        self.edit_tree(StoreOrder::LayersFirst, |tree| tree.with_size(size_bytes))
    }
}
