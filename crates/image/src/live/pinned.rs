//! The files of layers, as they are while they are copied to another place.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use holdfast_block::{BlockDevice, ExtentList, Result as BlockResult};

use super::folder::{ChainFolder, HostFolder};
use super::tree::{ContainerTree, TreeLayer};
use crate::Result;
use crate::file::ImageFile;

/// The file of a layer. No process writes to it while this exists, so the layer above is not merged into it.
pub struct PinnedLayer {
    layer: TreeLayer,
    file: Arc<dyn ImageFile>,
    length_bytes: u64,
}

/// The files of the layers of a container.
pub struct PinnedLayers {
    tree: ContainerTree,
    layers: Vec<PinnedLayer>,
}

impl PinnedLayers {
    /// Pins all layers except the top, which may be written meanwhile.
    ///
    /// # Errors
    /// [`Error::Locked`](crate::Error::Locked) if a layer is being merged; a file cannot be opened.
    pub fn below_top(path: &Path) -> Result<Self> {
        Self::pin(path, |tree, layer| layer.id != tree.top())
    }

    /// Pins all layers of a container that no process uses.
    ///
    /// # Errors
    /// [`Error::Locked`](crate::Error::Locked) if it is in use; a file cannot be opened.
    pub fn whole(path: &Path) -> Result<Self> {
        Self::pin(path, |_, _| true)
    }

    fn pin(path: &Path, is_pinned: impl Fn(&ContainerTree, &TreeLayer) -> bool) -> Result<Self> {
        let folder = HostFolder::open(path)?;
        let tree = ContainerTree::load(&folder)?;
        let pinned = tree.layers().iter().filter(|layer| is_pinned(&tree, layer));
        let layers = pinned.map(|layer| {
            let file = folder.pin(&layer.file)?;
            Ok(PinnedLayer {
                layer: layer.clone(),
                length_bytes: file.length_bytes()?,
                file,
            })
        });
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            tree,
        })
    }

    /// The tree to which they belong.
    pub fn tree(&self) -> &ContainerTree {
        &self.tree
    }

    /// The layers.
    pub fn layers(&self) -> &[PinnedLayer] {
        &self.layers
    }
}

impl PinnedLayer {
    /// Its place in the tree.
    pub fn layer(&self) -> &TreeLayer {
        &self.layer
    }
}

/// The bytes of the file itself, not those of the disk.
impl BlockDevice for PinnedLayer {
    fn size_bytes(&self) -> u64 {
        self.length_bytes
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        self.check_bounds(offset, buffer.len() as u64)?;
        self.file.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        self.check_bounds(range.start, range.end.saturating_sub(range.start))?;
        self.file.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        4096
    }
}
