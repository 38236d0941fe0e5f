//! Deletes snapshots: marks them, and merges the layers that nothing but the next layer needs.

use super::chain::LiveChain;
use super::tree::{ContainerTree, StoreOrder};
use crate::pipeline::copy_pipeline::Continue;
use crate::{ImageId, Result};

/// How far a merge is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MergeProgress {
    /// Everything before this offset is merged.
    pub position: u64,
    /// Bytes since the last report; some of them need no copy.
    pub step_bytes: u64,
    /// Size of the layer.
    pub size_bytes: u64,
}

/// Observes and limits a merge.
pub trait MergeObserver: Send + Sync {
    /// A step is done. A merge that stops is repeated with the next [`LiveChain::collapse`].
    fn advanced(&self, progress: &MergeProgress) -> Continue;
}

/// The result of [`LiveChain::collapse`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Collapse {
    /// Layers that were merged into the one below.
    pub merged_count: usize,
    /// Layers that were deleted, because nothing needs them.
    pub removed_count: usize,
}

/// A step of a collapse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Remove(ImageId),
    /// Merge this layer into its parent.
    Merge(ImageId),
}

impl ContainerTree {
    /// The next step, the lowest first: so that each layer is copied once.
    fn next_step(&self) -> Option<Step> {
        let mut hidden: Vec<ImageId> = self
            .layers()
            .iter()
            .map(|layer| layer.id)
            .filter(|id| *id != self.top() && self.is_hidden(*id))
            .collect();
        hidden.sort_by_key(|id| self.chain_of(*id).len());
        hidden.into_iter().find_map(|id| match self.children_of(id)[..] {
            [] => Some(Step::Remove(id)),
            [child] => Some(Step::Merge(child.id)),
            _ => None,
        })
    }

    /// Whether a deleted snapshot still has a layer that can be merged or removed.
    pub fn is_collapse_pending(&self) -> bool {
        self.next_step().is_some()
    }
}

impl LiveChain {
    /// Marks snapshots as deleted, durably, and deletes the memory of their processes. [`collapse`](Self::collapse)
    /// frees their layers.
    ///
    /// # Errors
    /// The tree cannot be stored.
    pub fn hide_snapshots(&self, ids: &[ImageId]) -> Result<()> {
        let mut unlisted = Vec::new();
        self.edit_tree(StoreOrder::LayersFirst, |old| {
            let new = ids.iter().fold(old.clone(), |tree, id| tree.with_hidden(*id));
            let names = old.memory_folders().into_iter();
            unlisted.extend(names.filter(|name| new.is_memory_leftover(name)).map(str::to_owned));
            Ok(new)
        })?;
        // A folder that cannot be deleted now is a leftover for the next process that opens the container.
        unlisted.iter().try_for_each(|name| self.folder.remove_folder(name))
    }

    /// Merges and removes the layers of deleted snapshots.
    ///
    /// # Errors
    /// The observer stops it, or a layer cannot be read or written. What was done until then is kept.
    pub fn collapse(&self, observer: &dyn MergeObserver) -> Result<Collapse> {
        let mut done = Collapse::default();
        loop {
            // Snapshots can be taken between two steps.
            let _changing = self.begin_change();
            let tree = self.tree();
            match tree.next_step() {
                None => return Ok(done),
                Some(Step::Merge(id)) => {
                    self.merge(id, observer)?;
                    done.merged_count += 1;
                }
                Some(Step::Remove(id)) => {
                    let file = tree.layer(id).map(|layer| layer.file.clone());
                    self.edit_tree(StoreOrder::LayersFirst, |tree| tree.without_leaf(id))?;
                    if let Some(file) = file {
                        self.folder.remove(&file)?;
                    }
                    done.removed_count += 1;
                }
            }
        }
    }
}
