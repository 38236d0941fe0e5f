//! Takes snapshots of a chain in use.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};

use holdfast_block::{BlockDevice as _, BlockDeviceMut as _};

use super::chain::{LiveChain, Top};
use super::layer::{BaseLayer, create_layer, writer_of};
use super::reader::LayerReader;
use super::stack::{LayerStack, Seam};
use super::tree::{
    ContainerTree, LAYER_COUNT_MAX, MEMORY_PROPERTY, SnapshotEntry, StagedTree, StoreOrder, is_memory_folder,
};
use crate::file::ImageFile;
use crate::{Error, ImageId, Result};

/// A snapshot to take.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NewSnapshot {
    /// Its name, unique in the container.
    pub name: Option<String>,
    /// The current time, in seconds since 1970.
    pub created_s: Option<u64>,
    /// A comment of the user.
    pub comment: String,
    /// Further facts.
    pub properties: BTreeMap<String, String>,
}

/// A new top that exists and is not used yet. Dropping it deletes the new file.
pub struct PreparedSnapshot<'a> {
    chain: &'a LiveChain,
    _changing: MutexGuard<'a, ()>,
    id: ImageId,
    new: NewSnapshot,
    name: String,
    file: Option<Arc<dyn ImageFile>>,
    staged: Option<StagedTree>,
}

impl LiveChain {
    /// Creates the file of a new top, so that the snapshot itself takes little time.
    ///
    /// # Errors
    /// The name is taken or invalid, the chain has too many layers, or the file cannot be created.
    pub fn prepare_snapshot(&self, new: NewSnapshot) -> Result<PreparedSnapshot<'_>> {
        let changing = self.begin_change();
        let tree = self.tree();
        tree.check_new_name(new.name.as_deref())?;
        if tree.chain_of(tree.top()).len() >= LAYER_COUNT_MAX {
            return Err(Error::InvalidOption {
                option: "snapshot",
                detail: format!("the chain has {LAYER_COUNT_MAX} layers; delete or merge snapshots first"),
            });
        }
        if let Some(memory) = new.properties.get(MEMORY_PROPERTY) {
            // A chain that was opened meanwhile has deleted it as a leftover.
            if !is_memory_folder(memory) || !self.folder.names()?.contains(memory) {
                return Err(Error::NotFound {
                    image: self.folder.path("").display().to_string(),
                    what: "folder with the memory of processes",
                    name: memory.clone(),
                });
            }
        }
        let top = tree.layer(tree.top()).expect("a valid tree lists its top");
        let name = tree.new_file()?;
        let base = BaseLayer {
            file: &top.file,
            format: top.format,
        };
        let file = create_layer(
            &*self.folder,
            &name,
            tree.new_layer_format(),
            self.size_bytes(),
            Some(base),
        );
        if file.is_err() {
            self.folder.remove(&name).ok();
        }
        // What is written until the commit is little then.
        let prepared = PreparedSnapshot {
            chain: self,
            _changing: changing,
            id: ImageId::random()?,
            new,
            name,
            file: Some(file?),
            staged: None,
        };
        self.flush()?;
        Ok(prepared)
    }
}

impl PreparedSnapshot<'_> {
    /// Adds a fact to the snapshot. After [`stage`](Self::stage), a new fact makes the commit slower.
    pub fn note(&mut self, key: &str, value: &str) {
        let old = self.new.properties.insert(key.to_owned(), value.to_owned());
        if old.as_deref() != Some(value) {
            self.discard_staged();
        }
    }

    fn discard_staged(&mut self) {
        if let Some(staged) = self.staged.take() {
            staged.discard(&*self.chain.folder);
        }
    }

    /// Stores the new tree beside the valid one, so that the commit needs no sync.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn stage(&mut self) -> Result<()> {
        let tree = self.chain.tree();
        self.staged = Some(self.applied_to(&tree)?.stage(&*self.chain.folder, &tree)?);
        Ok(())
    }

    /// `tree` with the snapshot.
    fn applied_to(&self, tree: &ContainerTree) -> Result<ContainerTree> {
        let entry = SnapshotEntry {
            name: self.new.name.clone(),
            created_s: self.new.created_s,
            comment: self.new.comment.clone(),
            is_hidden: false,
            properties: self.new.properties.clone(),
        };
        tree.with_snapshot(self.id, entry, &self.name)
    }

    /// Takes the snapshot: everything written until now is in it, everything written later is not. Returns its id.
    ///
    /// Requests wait meanwhile.
    ///
    /// # Errors
    /// The old top cannot be flushed, or the tree cannot be stored. The chain is then unchanged, or refuses writes.
    pub fn commit(self) -> Result<ImageId> {
        self.commit_then(|_| {})
    }

    /// Like [`commit`](Self::commit), and calls `thaw` as soon as the snapshot is taken, or has failed. It becomes durable
    /// after that, and before any flush of later writes succeeds.
    ///
    /// # Errors
    /// Those of [`commit`](Self::commit).
    pub fn commit_then(mut self, thaw: impl FnOnce(&Result<()>)) -> Result<ImageId> {
        let chain = self.chain;
        let file = self.file.take().expect("only a commit takes the file");
        let taken = self.exchange_top(&file);
        thaw(&taken);
        match &taken {
            Ok(()) => drop(self.staged.take()),
            Err(_) => self.file = Some(file),
        }
        taken?;
        chain.settle()?;
        // The old top is read only from now on: without the memory and the lock of a writer.
        // If it cannot be opened again, the writer continues to be read: the snapshot is taken in any case.
        if let Ok(stack) = chain.reopened_lower(&chain.tree()) {
            chain.enter().seam.replace(stack);
        }
        Ok(self.id)
    }

    fn exchange_top(&mut self, file: &Arc<dyn ImageFile>) -> Result<()> {
        let chain = self.chain;
        let image = chain.folder.path(&self.name).display().to_string();
        let seam = Arc::new(Seam::default());
        // The lower layers are set below, before the first request.
        let writer = writer_of(Arc::clone(file), chain.tree().new_layer_format(), &image, &seam)?;
        let mut top = chain.gate.write().unwrap_or_else(PoisonError::into_inner);
        chain.flush_top(&top)?;
        let staged = self.staged.as_ref();
        chain.edit_and_store(
            |tree| match staged.and_then(|staged| staged.in_place_of(tree)) {
                Some(new) => Ok(new),
                None => self.applied_to(tree),
            },
            |new, old| match staged {
                Some(staged) if staged.in_place_of(old).is_some() => {
                    chain.unsettle();
                    staged.put(&*chain.folder)
                }
                // A property of the container was changed since.
                _ => new.store(&*chain.folder, old, StoreOrder::EntriesFirst),
            },
        )?;
        let mut layers: Vec<Arc<dyn LayerReader>> = vec![Arc::clone(&top.writer) as Arc<dyn LayerReader>];
        layers.extend(top.seam.stack().layers().iter().cloned());
        seam.replace(Arc::new(LayerStack::new(layers)));
        *top = Top {
            writer,
            file: Arc::clone(file),
            seam,
            mirror: None,
        };
        Ok(())
    }
}

impl Drop for PreparedSnapshot<'_> {
    fn drop(&mut self) {
        // A failed chain may have stored a tree that lists the file. A leftover is deleted when the container is opened
        // again.
        if self.file.take().is_some() && !self.chain.has_failed() {
            self.chain.folder.remove(&self.name).ok();
        }
        self.discard_staged();
    }
}
