//! Merges a layer into the one below it, while the chain is in use.
//!
//! Only the lower file is written, and only what the upper layer hides. So a merge that is interrupted leaves the
//! content as it was, and is repeated from the start.

use std::sync::{Arc, PoisonError};

use holdfast_block::{BlockDevice as _, BlockDeviceMut as _, ExtentKind};

use super::chain::{LiveChain, Top, lower_stack};
use super::collapse::{MergeObserver, MergeProgress};
use super::layer::{grow_layer, open_reader, writer_of};
use super::mirror::{Mirror, copy_range};
use super::reader::{LayerReader, LayerWriter};
use super::stack::Seam;
use super::tree::{ContainerTree, StoreOrder, TreeLayer};
use crate::file::{Access, ImageFile};
use crate::pipeline::copy_pipeline::Continue;
use crate::{Error, Format, ImageId, Result};

/// Bytes that are copied between two questions whether to continue.
const STEP_BYTES: u64 = 1 << 20;

/// The lower layer of a merge, opened for writing.
struct OpenedLower {
    writer: Arc<dyn LayerWriter>,
    file: Arc<dyn ImageFile>,
    seam: Arc<Seam>,
}

impl LiveChain {
    /// Merges the layer `upper` into its parent, which is hidden and has no other child. The merged layer keeps the id
    /// of `upper`.
    ///
    /// The caller holds `changing`.
    pub(super) fn merge(&self, upper: ImageId, observer: &dyn MergeObserver) -> Result<()> {
        let tree = self.tree();
        let chain = tree.chain_of(tree.top());
        let Some(depth) = chain.iter().position(|layer| layer.id == upper) else {
            return self.merge_beside(&tree, upper, observer);
        };
        let (Some(upper), Some(lower)) = (chain.get(depth), chain.get(depth + 1)) else {
            return Ok(());
        };
        let below = self.enter().seam.stack().below(depth + 1);
        let size_bytes = match depth {
            0 => self.size_bytes(),
            _ => self.enter().seam.stack().layers()[depth - 1].layer_bytes(),
        };
        let opened = self.open_lower(&tree, lower, Arc::new(Seam::new(Arc::new(below))), size_bytes)?;
        // From here on, the lower layer is read through its writer: its tables change.
        let seam = Arc::clone(&self.enter().seam);
        let stack = seam
            .stack()
            .with_layer(depth, Arc::clone(&opened.writer) as Arc<dyn LayerReader>);
        seam.replace(Arc::new(stack));
        let merged = if depth == 0 {
            self.merge_top(upper, lower, opened, observer)
        } else {
            self.merge_below(upper, lower, &opened, depth, observer)
        };
        if merged.is_err() {
            // The writer of the lower layer is closed, and with it its lock.
            seam.replace(self.reopened_lower(&self.tree())?);
        }
        merged
    }

    /// Opens the lower layer of a merge, and lets it grow to the size of the upper one.
    fn open_lower(
        &self,
        tree: &ContainerTree,
        lower: &TreeLayer,
        seam: Arc<Seam>,
        size_bytes: u64,
    ) -> Result<OpenedLower> {
        if lower.format == Format::Raw && tree.merge_renames() {
            return Err(Error::NotWritable {
                image: self.folder.path(&lower.file).display().to_string(),
                detail: "a raw base keeps its file; convert the container instead".to_owned(),
            });
        }
        let file = self.folder.open(&lower.file, Access::Write)?;
        let image = self.folder.path(&lower.file).display().to_string();
        let mut writer = writer_of(Arc::clone(&file), lower.format, &image, &seam)?;
        if writer.size_bytes() < size_bytes {
            drop(writer);
            grow_layer(&file, lower, &image, &seam, size_bytes)?;
            writer = writer_of(Arc::clone(&file), lower.format, &image, &seam)?;
        }
        Ok(OpenedLower { writer, file, seam })
    }

    /// Merges a layer that is not in the chain of the top.
    fn merge_beside(&self, tree: &ContainerTree, upper: ImageId, observer: &dyn MergeObserver) -> Result<()> {
        let chain = tree.chain_of(upper);
        let (Some(upper), Some(lower)) = (chain.first(), chain.get(1)) else {
            return Ok(());
        };
        let stack = lower_stack(&*self.folder, tree, lower.id)?;
        let reader = open_reader(&*self.folder, upper, 1 << 20)?;
        let opened = self.open_lower(tree, lower, Arc::new(Seam::new(stack)), reader.layer_bytes())?;
        copy_all(&*reader, &*opened.writer, observer)?;
        opened.writer.flush()?;
        self.commit_merge(upper, lower)?;
        self.finish_merge(upper)
    }

    /// Merges a layer below the top.
    fn merge_below(
        &self,
        upper: &TreeLayer,
        lower: &TreeLayer,
        opened: &OpenedLower,
        depth: usize,
        observer: &dyn MergeObserver,
    ) -> Result<()> {
        let reader = Arc::clone(&self.enter().seam.stack().layers()[depth - 1]);
        copy_all(&*reader, &*opened.writer, observer)?;
        opened.writer.flush()?;
        self.commit_merge(upper, lower)?;
        let stack = self.reopened_lower(&self.tree())?;
        self.enter().seam.replace(stack);
        self.finish_merge(upper)
    }

    /// Makes the merge durable: from here on, the file of the lower layer is that of the merged one.
    ///
    /// # Errors
    /// Nothing is merged then, or the chain refuses writes.
    fn commit_merge(&self, upper: &TreeLayer, lower: &TreeLayer) -> Result<()> {
        if !self.tree().merge_renames() {
            return self.edit_tree(StoreOrder::LayersFirst, |tree| tree.with_merged(lower.id, upper.id));
        }
        // A tree that still lists the lower layer is right as well: it is hidden and without a file.
        if let Err(error) = self.folder.rename(&lower.file, &upper.file) {
            match self.folder.names() {
                Ok(names) if names.contains(&lower.file) => return Err(error),
                Ok(_) if self.folder.sync().is_ok() => {}
                _ => {
                    self.fail(&error);
                    return Err(error);
                }
            }
        }
        let mut tree = self.lock_tree();
        *tree = tree.with_merged(lower.id, upper.id)?;
        Ok(())
    }

    /// Stores the tree after a merge, or deletes the file that is not needed any more.
    fn finish_merge(&self, upper: &TreeLayer) -> Result<()> {
        let tree = self.lock_tree();
        if tree.merge_renames() {
            return tree.store_again(&*self.folder);
        }
        drop(tree);
        self.folder.remove(&upper.file)
    }

    /// Merges the top, which is written meanwhile.
    fn merge_top(
        &self,
        upper: &TreeLayer,
        lower: &TreeLayer,
        opened: OpenedLower,
        observer: &dyn MergeObserver,
    ) -> Result<()> {
        let mirror = Arc::new(Mirror::new(Arc::clone(&opened.writer)));
        self.set_mirror(Some(Arc::clone(&mirror)));
        let copied = self.copy_top(&mirror, observer);
        if copied.is_err() {
            self.set_mirror(None);
        }
        copied?;
        let mut top = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        top.mirror = None;
        mirror.check()?;
        opened.writer.flush()?;
        self.commit_merge(upper, lower)?;
        *top = Top {
            writer: opened.writer,
            file: opened.file,
            seam: opened.seam,
            mirror: None,
        };
        drop(top);
        self.finish_merge(upper)
    }

    fn set_mirror(&self, mirror: Option<Arc<Mirror>>) {
        self.gate.write().unwrap_or_else(PoisonError::into_inner).mirror = mirror;
    }

    fn copy_top(&self, mirror: &Mirror, observer: &dyn MergeObserver) -> Result<()> {
        let size_bytes = self.size_bytes();
        let mut position = 0;
        while position < size_bytes {
            let writer = Arc::clone(&self.enter().writer);
            let next = mirror.copy_next(&*writer, STEP_BYTES)?;
            mirror.check()?;
            report(observer, position..next, size_bytes)?;
            position = next;
        }
        // The flush inside the pause has little to do then.
        Ok(mirror.lower().flush()?)
    }
}

/// Copies everything that `upper` has.
fn copy_all(upper: &dyn LayerReader, lower: &dyn LayerWriter, observer: &dyn MergeObserver) -> Result<()> {
    let size_bytes = upper.layer_bytes();
    let mut position = 0;
    while position < size_bytes {
        let list = upper.extents_alone(position..size_bytes, 1)?;
        let Some(first) = list.iter().next() else { break };
        let end = match first.kind {
            ExtentKind::Absent => first.offset + first.length,
            _ => position + first.length.min(STEP_BYTES),
        };
        copy_range(upper, lower, position..end)?;
        report(observer, position..end, size_bytes)?;
        position = end;
    }
    Ok(())
}

fn report(observer: &dyn MergeObserver, done: std::ops::Range<u64>, size_bytes: u64) -> Result<()> {
    let progress = MergeProgress {
        position: done.end,
        step_bytes: done.end - done.start,
        size_bytes,
    };
    match observer.advanced(&progress) {
        Continue::Go => Ok(()),
        Continue::Stop => Err(Error::Device(holdfast_block::Error::io(
            "merge",
            done.end,
            std::io::Error::from(std::io::ErrorKind::Interrupted),
        ))),
    }
}
