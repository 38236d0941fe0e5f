//! Reads the disk as of a snapshot.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use holdfast_block::{BlockDevice, ExtentList, Result as BlockResult};

use super::folder::{ChainFolder, HostFolder};
use super::layer::{reader_cache_bytes, reader_of};
use super::reader::LayerReader;
use super::stack::LayerStack;
use super::tree::ContainerTree;
use crate::{Error, ImageId, Result};

/// The disk of a container as of a snapshot. Its layers are not merged while this exists.
pub struct PointInTime {
    stack: LayerStack,
    size_bytes: u64,
    /// Ids of its layers, the highest first.
    ids: Vec<ImageId>,
}

impl PointInTime {
    /// Opens the layer `id` of the container at `path` with those below it: a snapshot, or the top of a container that
    /// is not in use.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is no such layer; [`Error::Locked`] if one of them is being written.
    pub fn open(path: &Path, id: ImageId) -> Result<Self> {
        let folder = HostFolder::open(path)?;
        let tree = ContainerTree::load(&folder)?;
        Self::open_in(&folder, &tree, id)
    }

    pub(super) fn open_in(folder: &dyn ChainFolder, tree: &ContainerTree, id: ImageId) -> Result<Self> {
        let chain = tree.chain_of(id);
        let cache_bytes = reader_cache_bytes(chain.len());
        let mut layers: Vec<Arc<dyn LayerReader>> = Vec::new();
        for layer in &chain {
            let image = folder.path(&layer.file).display().to_string();
            layers.push(reader_of(folder.pin(&layer.file)?, layer.format, &image, cache_bytes)?);
        }
        let Some(first) = layers.first() else {
            return Err(Error::NotFound {
                image: folder.path("").display().to_string(),
                what: "snapshot",
                name: id.to_string(),
            });
        };
        Ok(Self {
            size_bytes: first.layer_bytes(),
            stack: LayerStack::new(layers),
            ids: chain.iter().map(|layer| layer.id).collect(),
        })
    }

    /// What was written between the snapshot `older` and this one: everything else is absent, and reads as zero. None
    /// if this one is not based on `older`.
    pub fn changes_since(&self, older: ImageId) -> Option<Changes> {
        let count = self.ids.iter().position(|id| *id == older)?;
        let layers = self.stack.layers().get(..count)?.to_vec();
        Some(Changes {
            stack: LayerStack::new(layers),
            size_bytes: self.size_bytes,
        })
    }
}

/// The changes between two snapshots.
pub struct Changes {
    stack: LayerStack,
    size_bytes: u64,
}

impl BlockDevice for PointInTime {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        self.stack.read_at(buffer, offset)
    }

    /// Nothing is below the last layer, so nothing is absent.
    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        for extent in self.stack.extents(range, extent_count_max)? {
            let kind = match extent.kind {
                holdfast_block::ExtentKind::Absent => holdfast_block::ExtentKind::Zero,
                kind => kind,
            };
            if !list.push(extent.length, kind) {
                break;
            }
        }
        Ok(list)
    }

    fn block_size_bytes(&self) -> u32 {
        4096
    }
}

impl BlockDevice for Changes {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        if self.stack.layers().is_empty() {
            buffer.fill(0);
            return Ok(());
        }
        self.stack.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        if self.stack.layers().is_empty() {
            let mut list = ExtentList::new(range.start, extent_count_max);
            list.push(
                range.end.saturating_sub(range.start),
                holdfast_block::ExtentKind::Absent,
            );
            return Ok(list);
        }
        self.stack.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        4096
    }
}
