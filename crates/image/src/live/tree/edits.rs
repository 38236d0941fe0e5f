//! Changes of a tree. Each makes a new one.

use std::collections::BTreeMap;

use super::super::folder::ChainFolder;
use super::{ContainerTree, Listing, MEMORY_PROPERTY, SnapshotEntry, TreeLayer, layers_of};
use crate::{DiskDescriptor, Format, ImageId, Result};

impl ContainerTree {
    /// Freezes the top as the snapshot `id`, under a new top in the file `file`.
    pub(crate) fn with_snapshot(&self, id: ImageId, entry: SnapshotEntry, file: &str) -> Result<Self> {
        self.check_new_name(entry.name.as_deref())?;
        let mut new = self.clone();
        match &self.listing {
            Listing::Descriptor(descriptor) => new.set_descriptor(descriptor.with_snapshot(id, file)?)?,
            Listing::Container => {
                let old_top = self.top;
                let fresh = ImageId::random()?;
                for layer in &mut new.layers {
                    if layer.id == old_top {
                        layer.id = id;
                    }
                }
                new.layers.push(TreeLayer {
                    id: fresh,
                    parent: Some(id),
                    file: file.to_owned(),
                    format: Format::Qcow2,
                });
                new.top = fresh;
            }
        }
        new.snapshots.insert(id, entry);
        Ok(new)
    }

    /// Marks a snapshot as deleted.
    pub(crate) fn with_hidden(&self, id: ImageId) -> Self {
        let mut new = self.clone();
        new.snapshots.insert(
            id,
            SnapshotEntry {
                is_hidden: true,
                ..SnapshotEntry::default()
            },
        );
        new
    }

    /// Removes the layer `lower`, whose only child is `upper`. With a descriptor, `upper` gets its file; otherwise the
    /// file of `lower` was renamed to that of `upper`.
    pub(crate) fn with_merged(&self, lower: ImageId, upper: ImageId) -> Result<Self> {
        let mut new = self.clone();
        match &self.listing {
            Listing::Descriptor(descriptor) => new.set_descriptor(descriptor.with_merged(lower, upper)?)?,
            Listing::Container => {
                let parent = self.layer(lower).and_then(|layer| layer.parent);
                let format = self.layer(lower).map_or(Format::Qcow2, |layer| layer.format);
                for layer in &mut new.layers {
                    if layer.id == upper {
                        layer.parent = parent;
                        layer.format = format;
                    }
                }
                new.layers.retain(|layer| layer.id != lower);
            }
        }
        new.snapshots.remove(&lower);
        Ok(new)
    }

    /// Removes the layers of merges whose file was renamed, and of deletions, before the tree could be stored.
    pub(super) fn without_finished_merges(self, folder: &dyn ChainFolder) -> Result<Self> {
        if !self.merge_renames() || !self.layers.iter().any(|layer| self.is_hidden(layer.id)) {
            return Ok(self);
        }
        let names = folder.names()?;
        let mut tree = self;
        loop {
            let is_gone = |layer: &&TreeLayer| !names.contains(&layer.file) && tree.is_hidden(layer.id);
            let Some(lower) = tree.layers.iter().find(is_gone).map(|layer| layer.id) else {
                return Ok(tree);
            };
            tree = match tree.children_of(lower)[..] {
                [upper] => tree.with_merged(lower, upper.id)?,
                [] => tree.without_leaf(lower)?,
                _ => return Ok(tree),
            };
        }
    }

    /// Removes a layer without children, which is not the top.
    pub(crate) fn without_leaf(&self, id: ImageId) -> Result<Self> {
        let mut new = self.clone();
        match &self.listing {
            Listing::Descriptor(descriptor) => new.set_descriptor(descriptor.without_delta(id)?)?,
            Listing::Container => new.layers.retain(|layer| layer.id != id),
        }
        new.snapshots.remove(&id);
        Ok(new)
    }

    /// Replaces the top by the file `file` above the snapshot `base`.
    pub(crate) fn with_top_over(&self, base: ImageId, file: &str) -> Result<Self> {
        let mut new = self.clone();
        match &self.listing {
            Listing::Descriptor(descriptor) => new.set_descriptor(descriptor.with_top_over(base, file)?)?,
            Listing::Container => {
                let fresh = ImageId::random()?;
                new.layers.retain(|layer| layer.id != self.top);
                new.layers.push(TreeLayer {
                    id: fresh,
                    parent: Some(base),
                    file: file.to_owned(),
                    format: Format::Qcow2,
                });
                new.top = fresh;
            }
        }
        Ok(new)
    }

    /// The tree of a new container with an empty top in the file `file` above the snapshot `base`: without the layers
    /// that `base` is not based on, and without the memory of processes, which is in other files.
    pub(crate) fn duplicate_of(&self, base: ImageId, file: &str) -> Result<Self> {
        let mut new = self.with_top_over(base, file)?;
        new.id = ImageId::random()?;
        let is_needed = |tree: &Self, id: ImageId| tree.chain_of(tree.top).iter().any(|layer| layer.id == id);
        let leaf = |tree: &Self| {
            let mut layers = tree.layers.iter();
            let found = layers.find(|layer| !is_needed(tree, layer.id) && tree.children_of(layer.id).is_empty());
            found.map(|layer| layer.id)
        };
        while let Some(id) = leaf(&new) {
            new = new.without_leaf(id)?;
        }
        for entry in new.snapshots.values_mut() {
            entry.properties.remove(MEMORY_PROPERTY);
        }
        Ok(new)
    }

    /// The tree of a disk of another size; only a descriptor stores it.
    pub(crate) fn with_size(&self, disk_bytes: u64) -> Result<Self> {
        let mut new = self.clone();
        if let Listing::Descriptor(descriptor) = &self.listing {
            new.set_descriptor(descriptor.with_size(disk_bytes)?)?;
        }
        Ok(new)
    }

    /// Replaces the further facts of the container.
    pub(crate) fn with_properties(&self, properties: BTreeMap<String, String>) -> Self {
        Self {
            properties,
            ..self.clone()
        }
    }

    fn set_descriptor(&mut self, descriptor: DiskDescriptor) -> Result<()> {
        self.layers = layers_of(&descriptor)?;
        self.top = descriptor.top();
        self.listing = Listing::Descriptor(Box::new(descriptor));
        Ok(())
    }
}
