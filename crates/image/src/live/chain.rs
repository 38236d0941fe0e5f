//! The chain of a container as one device.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard};

use holdfast_block::{BlockDevice, BlockDeviceMut, Error as BlockError, ExtentList, Result as BlockResult};

use super::folder::{ChainFolder, HostFolder};
use super::layer::{open_reader, reader_cache_bytes, writer_of};
use super::mirror::Mirror;
use super::reader::{LayerReader, LayerWriter};
use super::stack::{LayerStack, Seam};
use super::tree::{ContainerTree, StoreOrder, TreeLayer};
use crate::chain::options::Locking;
use crate::file::{Access, ImageFile};
use crate::{Error, Format, ImageId, Result};

/// How a container is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LiveOptions {
    /// Whether the file of the top is locked. The caller holds a [`ContainerLock`](super::ContainerLock) in any case.
    pub locking: Locking,
}

/// The disk of a container, open for writing.
///
/// Dropping it discards writes since the last [`flush`](BlockDeviceMut::flush), as a power failure would.
pub struct LiveChain {
    pub(super) folder: Arc<dyn ChainFolder>,
    /// Requests hold it for reading, a change of the top for writing.
    pub(super) gate: RwLock<Top>,
    size_bytes: AtomicU64,
    /// Number of changes of the content that were executed on the top.
    change_count: AtomicU64,
    /// The value of `change_count` up to which the changes are durable.
    flushed_count: AtomicU64,
    /// Whether the stored tree is durable. No flush succeeds before: what is in the top would not be found.
    is_settled: Mutex<bool>,
    /// Held during each change of the tree.
    tree: Mutex<ContainerTree>,
    /// Held during a merge, a snapshot, or a change of the size: one at a time.
    pub(super) changing: Mutex<()>,
    /// The reason why the chain cannot be written any more.
    failure: OnceLock<String>,
}

/// The layer that is written.
pub(super) struct Top {
    pub(super) writer: Arc<dyn LayerWriter>,
    pub(super) file: Arc<dyn ImageFile>,
    pub(super) seam: Arc<Seam>,
    /// The layer that the top is merged into, and that gets writes too.
    pub(super) mirror: Option<Arc<Mirror>>,
}

/// The state of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainStatus {
    /// Size of the disk.
    pub size_bytes: u64,
    /// The layers from the top down.
    pub layers: Vec<LayerStatus>,
    /// The tree.
    pub tree: ContainerTree,
}

/// A layer of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerStatus {
    /// The layer.
    pub layer: TreeLayer,
    /// The path of its file.
    pub path: PathBuf,
    /// Length of the file.
    pub file_bytes: u64,
    /// Bytes that the file system has allocated for it, if known.
    pub allocated_bytes: Option<u64>,
}

impl LiveChain {
    /// Opens the container at `path`, which the caller has locked, and deletes files that a killed process has left.
    ///
    /// # Errors
    /// The container or one of its layers is damaged or in use, or a file cannot be opened.
    pub fn open(path: &Path, options: LiveOptions) -> Result<Self> {
        Self::open_in(Arc::new(HostFolder::open(path)?), options)
    }

    pub(super) fn open_in(folder: Arc<dyn ChainFolder>, options: LiveOptions) -> Result<Self> {
        let tree = ContainerTree::load(&*folder)?;
        sync_visible(&*folder, &tree)?;
        delete_leftovers(&*folder, &tree)?;
        let access = match options.locking {
            Locking::Lock => Access::Write,
            Locking::HeldElsewhere => Access::WriteUnlocked,
        };
        let top = open_top(&*folder, &tree, access)?;
        Ok(Self {
            folder,
            size_bytes: AtomicU64::new(top.writer.size_bytes()),
            gate: RwLock::new(top),
            // What a killed process has written is not known to be durable.
            change_count: AtomicU64::new(1),
            flushed_count: AtomicU64::new(0),
            is_settled: Mutex::new(true),
            tree: Mutex::new(tree),
            changing: Mutex::new(()),
            failure: OnceLock::new(),
        })
    }

    /// The current tree.
    pub fn tree(&self) -> ContainerTree {
        self.lock_tree().clone()
    }

    pub(super) fn lock_tree(&self) -> MutexGuard<'_, ContainerTree> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin_change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state of the chain.
    ///
    /// # Errors
    /// A file cannot be examined.
    pub fn status(&self) -> Result<ChainStatus> {
        let tree = self.tree();
        Ok(ChainStatus {
            size_bytes: self.size_bytes(),
            layers: layers_of(&*self.folder, &tree)?,
            tree,
        })
    }

    /// Replaces the further facts of the container.
    ///
    /// # Errors
    /// The file cannot be stored.
    pub fn set_properties(&self, properties: std::collections::BTreeMap<String, String>) -> Result<()> {
        self.edit_tree(StoreOrder::EntriesFirst, |tree| Ok(tree.with_properties(properties)))
    }

    pub(super) fn enter(&self) -> RwLockReadGuard<'_, Top> {
        self.gate.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the tree by what `edit` makes of it, durably. A change of the layers also holds `changing`.
    ///
    /// # Errors
    /// The tree is unchanged then. If it is not known which layers are stored, the chain refuses further writes: they
    /// might go to a layer that is not listed.
    pub(super) fn edit_tree(
        &self,
        order: StoreOrder,
        edit: impl FnOnce(&ContainerTree) -> Result<ContainerTree>,
    ) -> Result<()> {
        self.edit_and_store(edit, |new, old| new.store(&*self.folder, old, order))
    }

    /// Like [`edit_tree`](Self::edit_tree), with another way to store the tree.
    pub(super) fn edit_and_store(
        &self,
        edit: impl FnOnce(&ContainerTree) -> Result<ContainerTree>,
        store: impl FnOnce(&ContainerTree, &ContainerTree) -> Result<()>,
    ) -> Result<()> {
        let mut tree = self.lock_tree();
        let new = edit(&tree)?;
        if let Err(error) = store(&new, &tree) {
            match ContainerTree::load(&*self.folder) {
                Ok(stored) if stored.has_layers_of(&tree) => return Err(error),
                // Only entries of layers that are gone may be left, and those are ignored.
                Ok(stored) if stored.has_layers_of(&new) && self.folder.sync().is_ok() => {}
                _ => {
                    self.fail(&error);
                    return Err(error);
                }
            }
        }
        *tree = new;
        Ok(())
    }

    /// Flushes the top before it is exchanged. The caller holds the gate exclusively: no change is under way.
    pub(super) fn flush_top(&self, top: &Top) -> Result<()> {
        let count = self.change_count.load(Ordering::Acquire);
        if self.flushed_count.load(Ordering::Acquire) < count {
            top.writer.flush()?;
            self.flushed_count.fetch_max(count, Ordering::AcqRel);
        }
        Ok(())
    }

    /// Lets flushes wait until the stored tree is durable.
    pub(super) fn unsettle(&self) {
        *self.is_settled.lock().unwrap_or_else(PoisonError::into_inner) = false;
    }

    /// Makes the stored tree durable.
    pub(super) fn settle(&self) -> Result<()> {
        let mut is_settled = self.is_settled.lock().unwrap_or_else(PoisonError::into_inner);
        if !*is_settled {
            // As after a replacement that failed, a second sync decides.
            self.folder.sync().or_else(|_| self.folder.sync())?;
            *is_settled = true;
        }
        Ok(())
    }

    /// Refuses all further writes and flushes.
    pub(super) fn fail(&self, error: &Error) {
        // The first reason is the one to report.
        self.failure.set(holdfast_block::error_text(error)).ok();
    }

    /// Whether the chain refuses all further writes.
    pub(super) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    fn check_health(&self) -> BlockResult<()> {
        match self.failure.get() {
            None => Ok(()),
            Some(detail) => Err(BlockError::layer(Error::NotWritable {
                image: self.folder.path("").display().to_string(),
                detail: format!("a change of its layers may not be durable ({detail}); open it again"),
            })),
        }
    }

    pub(super) fn set_size(&self, size_bytes: u64) {
        self.size_bytes.store(size_bytes, Ordering::Release);
    }

    /// Opens the layers below the top again, with caches for their number.
    pub(super) fn reopened_lower(&self, tree: &ContainerTree) -> Result<Arc<LayerStack>> {
        lower_stack(&*self.folder, tree, tree.top())
    }

    /// Executes a change of `range` on the top, and on the layer that it is merged into.
    fn change(&self, range: Range<u64>, apply: impl Fn(&dyn BlockDeviceMut) -> BlockResult<()>) -> BlockResult<()> {
        self.check_health()?;
        let top = self.enter();
        let changed = match &top.mirror {
            None => apply(&*top.writer),
            Some(mirror) => mirror.change(range, &*top.writer, apply),
        };
        // A failed change may have been executed in part.
        self.change_count.fetch_add(1, Ordering::AcqRel);
        changed
    }
}

/// The layers of the chain of the top with their files.
fn layers_of(folder: &dyn ChainFolder, tree: &ContainerTree) -> Result<Vec<LayerStatus>> {
    let mut layers = Vec::new();
    for layer in tree.chain_of(tree.top()) {
        let file = folder.open(&layer.file, Access::Read)?;
        layers.push(LayerStatus {
            layer: layer.clone(),
            path: folder.path(&layer.file),
            file_bytes: file.length_bytes()?,
            allocated_bytes: file.allocated_bytes()?,
        });
    }
    Ok(layers)
}

impl ChainStatus {
    /// Reads the state of the container at `path`, which another process may use.
    ///
    /// # Errors
    /// The container is damaged, or a file cannot be examined.
    pub fn load(path: &Path) -> Result<Self> {
        let folder = HostFolder::open(path)?;
        let tree = ContainerTree::load(&folder)?;
        let top = tree.layer(tree.top()).expect("a valid tree lists its top");
        let reader = open_reader(&folder, top, 1 << 20)?;
        Ok(Self {
            size_bytes: reader.layer_bytes(),
            layers: layers_of(&folder, &tree)?,
            tree,
        })
    }
}

/// Makes durable what the chain shows and a flush of its top does not cover: names, and the layer of a merge that a
/// killed process has written in part. If the write of the same range to the top was lost, that layer shows it.
fn sync_visible(folder: &dyn ChainFolder, tree: &ContainerTree) -> Result<()> {
    for layer in tree.chain_of(tree.top()).iter().skip(1) {
        if tree.is_hidden(layer.id) {
            folder.open(&layer.file, Access::Read)?.sync()?;
        }
    }
    folder.sync()
}

/// Deletes new layers and folders with memory that no tree lists, and staged trees.
fn delete_leftovers(folder: &dyn ChainFolder, tree: &ContainerTree) -> Result<()> {
    for name in folder.names()? {
        if tree.is_leftover(&name) || ContainerTree::is_staged(&name) {
            folder.remove(&name)?;
        } else if tree.is_memory_leftover(&name) {
            folder.remove_folder(&name)?;
        }
    }
    Ok(())
}

/// Opens the layers below `id`.
pub(super) fn lower_stack(folder: &dyn ChainFolder, tree: &ContainerTree, id: ImageId) -> Result<Arc<LayerStack>> {
    let chain = tree.chain_of(id);
    let cache_bytes = reader_cache_bytes(chain.len());
    let readers: Result<Vec<Arc<dyn LayerReader>>> = chain
        .iter()
        .skip(1)
        .map(|layer| open_reader(folder, layer, cache_bytes))
        .collect();
    Ok(Arc::new(LayerStack::new(readers?)))
}

fn open_top(folder: &dyn ChainFolder, tree: &ContainerTree, access: Access) -> Result<Top> {
    let layer = tree.layer(tree.top()).expect("a valid tree lists its top");
    if !tree.children_of(layer.id).is_empty() {
        return Err(Error::NotWritable {
            image: folder.path(&layer.file).display().to_string(),
            detail: "it is the top, and also the parent of another snapshot".to_owned(),
        });
    }
    let seam = Arc::new(Seam::new(lower_stack(folder, tree, layer.id)?));
    let file = folder.open(&layer.file, access)?;
    let image = folder.path(&layer.file).display().to_string();
    let writer = writer_of(Arc::clone(&file), layer.format, &image, &seam)?;
    Ok(Top {
        writer,
        file,
        seam,
        mirror: None,
    })
}

impl ContainerTree {
    /// Loads the tree of the container at `path`.
    ///
    /// # Errors
    /// It is no container, or it is damaged.
    pub fn open(path: &Path) -> Result<Self> {
        Self::load(&HostFolder::open(path)?)
    }

    /// Whether new layers of the container are Parallels images, which its own tools read.
    pub fn is_parallels(&self) -> bool {
        self.new_layer_format() == Format::Parallels
    }
}

impl BlockDevice for LiveChain {
    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        self.enter().writer.read_at(buffer, offset)
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        self.enter().writer.extents(range, extent_count_max)
    }

    fn block_size_bytes(&self) -> u32 {
        4096
    }
}

impl BlockDeviceMut for LiveChain {
    fn write_at(&self, data: &[u8], offset: u64) -> BlockResult<()> {
        let range = offset..offset.saturating_add(data.len() as u64);
        self.change(range, |device| device.write_at(data, offset))
    }

    fn write_zeroes(&self, range: Range<u64>) -> BlockResult<()> {
        self.change(range.clone(), |device| device.write_zeroes(range.clone()))
    }

    fn trim(&self, range: Range<u64>) -> BlockResult<()> {
        self.check_health()?;
        let top = self.enter();
        let trimmed = match &top.mirror {
            None => top.writer.trim(range),
            Some(mirror) => mirror.trim(range, &*top.writer),
        };
        self.change_count.fetch_add(1, Ordering::AcqRel);
        trimmed
    }

    /// Does not hold the gate: a snapshot flushes the old top itself.
    fn flush(&self) -> BlockResult<()> {
        self.check_health()?;
        // Before the top is taken: changes of a later one are not counted as flushed.
        let count = self.change_count.load(Ordering::Acquire);
        let writer = Arc::clone(&self.enter().writer);
        self.settle().map_err(BlockError::layer)?;
        writer.flush()?;
        self.flushed_count.fetch_max(count, Ordering::AcqRel);
        self.check_health()
    }
}
