//! The next tree, stored beside the valid one: a rename makes it the valid one.

use super::{ContainerTree, DESCRIPTOR_FILE, Listing, document};
use crate::Result;
use crate::live::folder::{CONTAINER_FILE, ChainFolder, staged_name};

/// A tree that is stored beside the valid one.
pub(crate) struct StagedTree {
    /// The file that lists the layers.
    name: &'static str,
    old: ContainerTree,
    tree: ContainerTree,
}

impl StagedTree {
    /// The tree, if it still replaces `old`.
    pub(crate) fn in_place_of(&self, old: &ContainerTree) -> Option<ContainerTree> {
        (self.old == *old).then(|| self.tree.clone())
    }

    /// Makes it the valid one; durably after the next sync of the folder.
    ///
    /// # Errors
    /// The stored tree may be the old or the new one.
    pub(crate) fn put(&self, folder: &dyn ChainFolder) -> Result<()> {
        folder.put_staged(self.name)
    }

    /// Deletes the file.
    pub(crate) fn discard(self, folder: &dyn ChainFolder) {
        // A leftover is deleted when the container is opened again.
        folder.remove(&staged_name(self.name)).ok();
    }
}

impl ContainerTree {
    /// Stages the tree in place of `old`: [`put`](StagedTree::put) shows it. Entries of layers that no descriptor lists
    /// are ignored, so they are stored at once.
    pub(crate) fn stage(&self, folder: &dyn ChainFolder, old: &Self) -> Result<StagedTree> {
        let entries = document::encode(self);
        let (name, bytes) = match &self.listing {
            Listing::Container => (CONTAINER_FILE, entries),
            Listing::Descriptor(descriptor) => {
                if entries != document::encode(old) {
                    folder.replace(CONTAINER_FILE, &entries)?;
                }
                (DESCRIPTOR_FILE, descriptor.as_text().as_bytes().to_vec())
            }
        };
        folder.stage(name, &bytes)?;
        let staged = StagedTree {
            name,
            old: old.clone(),
            tree: self.clone(),
        };
        // The rename may become durable at any time: the new layer must be there by then.
        match folder.sync() {
            Ok(()) => Ok(staged),
            Err(error) => {
                staged.discard(folder);
                Err(error)
            }
        }
    }

    /// Whether `name` is a file that [`stage`](Self::stage) writes.
    pub(crate) fn is_staged(name: &str) -> bool {
        [CONTAINER_FILE, DESCRIPTOR_FILE]
            .iter()
            .any(|file| name == staged_name(file))
    }
}
