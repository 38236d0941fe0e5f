//! How a layer is read alone, without those below it.

use std::ops::Range;

use holdfast_block::{BlockDeviceMut, ExtentList, Result};

/// The start of a range in one layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadPiece {
    pub(crate) length: usize,
    /// Whether the layer has it, so that it was read; otherwise the layers below have it.
    pub(crate) is_present: bool,
}

/// A layer that is read alone.
pub(crate) trait LayerReader: Send + Sync {
    /// Size of the disk in this layer.
    fn layer_bytes(&self) -> u64;

    /// Reads the start of `buffer`, which is not empty and inside the layer.
    fn read_present(&self, buffer: &mut [u8], offset: u64) -> Result<ReadPiece>;

    /// Extents of this layer alone: absent ones are in the layers below.
    fn extents_alone(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList>;
}

/// A layer that is written.
pub(crate) trait LayerWriter: BlockDeviceMut + LayerReader {}

impl<W: BlockDeviceMut + LayerReader> LayerWriter for W {}
