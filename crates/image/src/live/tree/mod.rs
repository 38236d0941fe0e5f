//! The layers of a container and its snapshots: which files, which parents, which names.
//!
//! A container of qcow2 layers lists its layers in `container.json`. A Parallels or ploop disk lists them in
//! `DiskDescriptor.xml`, as its own tools require; `container.json` then has only the names of snapshots.
//!
//! A layer other than the top is a snapshot: the disk as of the time when a new top was put on it. A *hidden* one was
//! deleted, and its layer stays as long as layers above need it.

mod document;
mod edits;
mod staged;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub(crate) use self::staged::StagedTree;
use super::folder::{CONTAINER_FILE, ChainFolder};
use crate::error::corrupt;
pub use crate::formats::ploop::descriptor::FILE_NAME as DESCRIPTOR_FILE;
use crate::model::info::DeltaKind;
use crate::{DiskDescriptor, Error, Format, ImageId, Result};

/// Longer chains cost memory and time for each read.
pub(crate) const LAYER_COUNT_MAX: usize = 64;
const NAME_LENGTH_MAX: usize = 64;

/// A layer of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreeLayer {
    /// The identity of the snapshot, or of the top.
    pub id: ImageId,
    /// The layer below it.
    pub parent: Option<ImageId>,
    /// Its file name in the folder.
    pub file: String,
    /// Its format: raw, qcow2 or Parallels.
    pub format: Format,
}

/// What is known about a snapshot besides its layer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SnapshotEntry {
    /// Its name; without one it is named by its id.
    pub name: Option<String>,
    /// When it was taken, in seconds since 1970.
    pub created_s: Option<u64>,
    /// A comment of the user.
    pub comment: String,
    /// Whether it was deleted, and only its layer is still needed.
    pub is_hidden: bool,
    /// Further facts, for the programs that use the container.
    pub properties: BTreeMap<String, String>,
}

/// Where the layers are listed.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Listing {
    Container,
    Descriptor(Box<DiskDescriptor>),
}

/// The layers and snapshots of a container. Every change makes a new tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerTree {
    id: ImageId,
    layers: Vec<TreeLayer>,
    top: ImageId,
    snapshots: BTreeMap<ImageId, SnapshotEntry>,
    properties: BTreeMap<String, String>,
    listing: Listing,
}

/// Which of the two files of a tree is replaced first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreOrder {
    /// For a change that adds layers: an entry without a layer is ignored.
    EntriesFirst,
    /// For a change that removes layers.
    LayersFirst,
}

impl ContainerTree {
    /// A container whose only layer is `top`.
    pub(crate) fn new(id: ImageId, top: TreeLayer, properties: BTreeMap<String, String>) -> Self {
        Self {
            id,
            top: top.id,
            layers: vec![top],
            snapshots: BTreeMap::new(),
            properties,
            listing: Listing::Container,
        }
    }

    /// A container whose layers are listed by `descriptor`.
    pub(crate) fn of_descriptor(descriptor: DiskDescriptor, properties: BTreeMap<String, String>) -> Result<Self> {
        let id = descriptor.id().map_or_else(ImageId::random, Ok)?;
        Ok(Self {
            id,
            layers: layers_of(&descriptor)?,
            top: descriptor.top(),
            snapshots: BTreeMap::new(),
            properties,
            listing: Listing::Descriptor(Box::new(descriptor)),
        })
    }

    /// Loads the tree of the container in `folder`.
    pub(crate) fn load(folder: &dyn ChainFolder) -> Result<Self> {
        let name = folder.path(CONTAINER_FILE).display().to_string();
        let entries = match folder.load(CONTAINER_FILE)? {
            Some(bytes) => Some(document::decode(&bytes, &name)?),
            None => None,
        };
        let descriptor = match folder.load(DESCRIPTOR_FILE)? {
            Some(bytes) => Some(DiskDescriptor::parse(
                &bytes,
                &folder.path(DESCRIPTOR_FILE).display().to_string(),
            )?),
            None => None,
        };
        let tree = match (entries, descriptor) {
            (None, None) => {
                return Err(Error::NotFound {
                    image: folder.path("").display().to_string(),
                    what: "file",
                    name: format!("{CONTAINER_FILE} or {DESCRIPTOR_FILE}"),
                });
            }
            (None, Some(descriptor)) => Self::of_descriptor(descriptor, BTreeMap::new())?,
            (Some(document), None) => Self::of_document(document, &name)?,
            (Some(document), Some(descriptor)) => {
                let tree = Self::of_descriptor(descriptor, document.properties)?;
                Self {
                    id: document.id,
                    snapshots: document.snapshots,
                    ..tree
                }
            }
        };
        tree.validated(&name)?.without_finished_merges(folder)
    }

    fn of_document(document: document::Document, name: &str) -> Result<Self> {
        let Some(top) = document.top else {
            return Err(corrupt(
                name,
                "container",
                0,
                "it has no top, and there is no descriptor",
            ));
        };
        Ok(Self {
            id: document.id,
            layers: document.layers,
            top,
            snapshots: document.snapshots,
            properties: document.properties,
            listing: Listing::Container,
        })
    }

    /// Checks the relations of the layers, and drops entries without a layer.
    fn validated(mut self, name: &str) -> Result<Self> {
        let wrong = |detail: String| corrupt(name, "container", 0, detail);
        if self.layer(self.top).is_none() {
            return Err(wrong(format!("the top, {}, is not listed", self.top)));
        }
        for (at, layer) in self.layers.iter().enumerate() {
            if self.layers[..at].iter().any(|other| other.id == layer.id) {
                return Err(wrong(format!("the layer {} is listed twice", layer.id)));
            }
            if self.layers[..at].iter().any(|other| other.file == layer.file) {
                return Err(wrong(format!("the file {:?} is listed twice", layer.file)));
            }
            if !is_plain_name(&layer.file) {
                return Err(wrong(format!(
                    "{:?} is not the name of a file in the folder",
                    layer.file
                )));
            }
            if let Some(parent) = layer.parent.filter(|parent| self.layer(*parent).is_none()) {
                return Err(wrong(format!("the parent of {}, {parent}, is not listed", layer.id)));
            }
        }
        for layer in &self.layers {
            let chain = self.chain_of(layer.id);
            if chain.len() > self.layers.len() || chain.last().is_none_or(|root| root.parent.is_some()) {
                return Err(wrong(format!("the layer {} is its own ancestor", layer.id)));
            }
        }
        if self.chain_of(self.top).len() > LAYER_COUNT_MAX {
            return Err(Error::ChainTooLong {
                image: name.to_owned(),
                layer_count_max: LAYER_COUNT_MAX,
            });
        }
        let known: Vec<ImageId> = self.layers.iter().map(|layer| layer.id).collect();
        let top = self.top;
        self.snapshots.retain(|id, _| *id != top && known.contains(id));
        Ok(self)
    }

    /// The identity of the container.
    pub fn id(&self) -> ImageId {
        self.id
    }

    /// All layers of all branches.
    pub fn layers(&self) -> &[TreeLayer] {
        &self.layers
    }

    /// The layer that is written.
    pub fn top(&self) -> ImageId {
        self.top
    }

    /// The layer with this id.
    pub fn layer(&self, id: ImageId) -> Option<&TreeLayer> {
        self.layers.iter().find(|layer| layer.id == id)
    }

    /// The layer `id` and those below it. At most one more than there are layers.
    pub fn chain_of(&self, id: ImageId) -> Vec<&TreeLayer> {
        let below = |layer: &&TreeLayer| layer.parent.and_then(|parent| self.layer(parent));
        std::iter::successors(self.layer(id), below)
            .take(self.layers.len() + 1)
            .collect()
    }

    /// Whether the layers, and which one is the top, are those of `other`.
    pub(crate) fn has_layers_of(&self, other: &Self) -> bool {
        self.layers == other.layers && self.top == other.top
    }

    /// The layers directly above `id`.
    pub fn children_of(&self, id: ImageId) -> Vec<&TreeLayer> {
        self.layers.iter().filter(|layer| layer.parent == Some(id)).collect()
    }

    /// The snapshots that were not deleted, the oldest first, with their layers.
    pub fn snapshots(&self) -> Vec<(ImageId, SnapshotEntry)> {
        let visible = self.layers.iter().filter(|layer| layer.id != self.top);
        let mut found: Vec<(ImageId, SnapshotEntry)> = visible
            .map(|layer| (layer.id, self.entry(layer.id)))
            .filter(|(_, entry)| !entry.is_hidden)
            .collect();
        found.sort_by_key(|(id, entry)| (entry.created_s, self.chain_of(*id).len()));
        found
    }

    /// Whether a layer is that of a deleted snapshot.
    pub fn is_hidden(&self, id: ImageId) -> bool {
        self.snapshots.get(&id).is_some_and(|entry| entry.is_hidden)
    }

    fn entry(&self, id: ImageId) -> SnapshotEntry {
        self.snapshots.get(&id).cloned().unwrap_or_default()
    }

    /// Further facts, for the programs that use the container.
    pub fn properties(&self) -> &BTreeMap<String, String> {
        &self.properties
    }

    /// Finds a snapshot by its name, its id, or the beginning of its id.
    ///
    /// # Errors
    /// There is none, or the beginning is that of several.
    pub fn find_snapshot(&self, name: &str) -> Result<ImageId> {
        let snapshots = self.snapshots();
        if let Some((id, _)) = snapshots.iter().find(|(_, entry)| entry.name.as_deref() == Some(name)) {
            return Ok(*id);
        }
        let wanted = name.trim_start_matches('{').trim_end_matches('}').to_ascii_lowercase();
        let mut found = snapshots
            .iter()
            .map(|(id, _)| *id)
            .filter(|id| wanted.len() >= 4 && id.to_string().starts_with(&wanted));
        match (found.next(), found.next()) {
            (Some(id), None) => Ok(id),
            (Some(_), Some(_)) => Err(Error::InvalidOption {
                option: "snapshot",
                detail: format!("several snapshots begin with {name}; give more of the id"),
            }),
            (None, _) => Err(Error::NotFound {
                image: "the container".to_owned(),
                what: "snapshot",
                name: name.to_owned(),
            }),
        }
    }

    /// The name of a snapshot for users.
    pub fn name_of(&self, id: ImageId) -> String {
        self.entry(id).name.unwrap_or_else(|| id.to_string())
    }

    /// Checks that a snapshot can have this name.
    ///
    /// # Errors
    /// The name is not valid, or another snapshot has it.
    pub fn check_new_name(&self, name: Option<&str>) -> Result<()> {
        let Some(name) = name else { return Ok(()) };
        let refuse = |detail: String| Err(Error::InvalidOption { option: "name", detail });
        let is_valid = |character: char| character.is_ascii_alphanumeric() || "._-+".contains(character);
        if name.is_empty()
            || name.len() > NAME_LENGTH_MAX
            || name.starts_with(['-', '.'])
            || !name.chars().all(is_valid)
        {
            return refuse(format!(
                "{name:?} is no name of a snapshot: use up to {NAME_LENGTH_MAX} letters, digits, and . _ - + inside"
            ));
        }
        if self
            .snapshots()
            .iter()
            .any(|(_, entry)| entry.name.as_deref() == Some(name))
        {
            return refuse(format!(
                "there is a snapshot {name} already; choose another name, or delete it first"
            ));
        }
        Ok(())
    }

    /// The format of new layers.
    pub(crate) fn new_layer_format(&self) -> Format {
        match self.listing {
            Listing::Container => Format::Qcow2,
            Listing::Descriptor(_) => Format::Parallels,
        }
    }

    /// Whether a merge renames the file of the lower layer to that of the upper one, so that qcow2 headers, which name
    /// the layer below, stay right.
    pub(crate) fn merge_renames(&self) -> bool {
        self.listing == Listing::Container
    }

    /// A name for a new file.
    pub(crate) fn new_file(&self) -> Result<String> {
        let id = ImageId::random()?;
        let extension = match self.new_layer_format() {
            Format::Parallels => "hds",
            _ => "qcow2",
        };
        Ok(format!("{LAYER_PREFIX}{id}.{extension}"))
    }

    /// Whether `name` is a file that [`new_file`](Self::new_file) has named and the tree does not list.
    pub(crate) fn is_leftover(&self, name: &str) -> bool {
        let id = name
            .strip_prefix(LAYER_PREFIX)
            .and_then(|rest| rest.strip_suffix(".qcow2").or_else(|| rest.strip_suffix(".hds")));
        id.is_some_and(|id| id.len() == 36 && id.parse::<ImageId>().is_ok())
            && !self.layers.iter().any(|layer| layer.file == name)
    }

    /// The folders with memory that snapshots list.
    pub fn memory_folders(&self) -> Vec<&str> {
        let properties = self.snapshots.values().map(|entry| &entry.properties);
        properties
            .filter_map(|properties| properties.get(MEMORY_PROPERTY))
            .map(String::as_str)
            .collect()
    }

    /// Whether `name` is a folder with the memory of processes, complete or not, that no snapshot lists.
    pub(crate) fn is_memory_leftover(&self, name: &str) -> bool {
        let complete = name.strip_suffix(MEMORY_PARTIAL_SUFFIX).unwrap_or(name);
        is_memory_folder(complete) && !self.memory_folders().contains(&name)
    }

    /// Stores the tree durably in place of `old`.
    ///
    /// # Errors
    /// The stored tree may be the old or the new one.
    pub(crate) fn store(&self, folder: &dyn ChainFolder, old: &Self, order: StoreOrder) -> Result<()> {
        let entries = document::encode(self);
        let store_entries = || {
            if entries == document::encode(old) {
                return Ok(());
            }
            folder.replace(CONTAINER_FILE, &entries)
        };
        let store_layers = || match &self.listing {
            Listing::Descriptor(descriptor) if self.listing != old.listing => {
                folder.replace(DESCRIPTOR_FILE, descriptor.as_text().as_bytes())
            }
            _ => Ok(()),
        };
        match order {
            StoreOrder::EntriesFirst => store_entries().and_then(|()| store_layers()),
            StoreOrder::LayersFirst => store_layers().and_then(|()| store_entries()),
        }
    }

    /// Stores a tree whose layers are listed by `container.json`, whatever is stored.
    pub(crate) fn store_again(&self, folder: &dyn ChainFolder) -> Result<()> {
        folder.replace(CONTAINER_FILE, &document::encode(self))
    }

    /// Stores the tree of a new container.
    pub(crate) fn store_new(&self, folder: &dyn ChainFolder) -> Result<()> {
        folder.replace(CONTAINER_FILE, &document::encode(self))?;
        match &self.listing {
            Listing::Descriptor(descriptor) => folder.replace(DESCRIPTOR_FILE, descriptor.as_text().as_bytes()),
            Listing::Container => Ok(()),
        }
    }
}

/// The property of a snapshot that names the folder with the memory of its processes.
pub const MEMORY_PROPERTY: &str = "memory";
/// How the names of folders with memory begin.
const MEMORY_PREFIX: &str = "memory-";
/// How the name of a folder ends whose memory is not complete.
pub const MEMORY_PARTIAL_SUFFIX: &str = ".partial";

/// A new name for a folder with memory.
///
/// # Errors
/// There are no random numbers.
pub fn new_memory_folder() -> Result<String> {
    Ok(format!("{MEMORY_PREFIX}{}", ImageId::random()?))
}

/// Whether `name` is one that [`new_memory_folder`] makes. Others are neither used nor deleted.
pub fn is_memory_folder(name: &str) -> bool {
    let id = name.strip_prefix(MEMORY_PREFIX);
    id.is_some_and(|id| id.len() == 36 && id.parse::<ImageId>().is_ok())
}

/// How the names of new layer files begin.
const LAYER_PREFIX: &str = "layer-";

/// Whether a name can only be a file in the folder itself.
fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0'])
}

/// The layers of a descriptor. An absolute name may belong to another host; the file is then in the folder.
fn layers_of(descriptor: &DiskDescriptor) -> Result<Vec<TreeLayer>> {
    let mut layers = Vec::new();
    for delta in descriptor.deltas() {
        let name = delta.file.rsplit('/').next().unwrap_or_default();
        if name != delta.file && !delta.file.starts_with('/') {
            return Err(corrupt(
                DESCRIPTOR_FILE,
                "descriptor",
                0,
                format!("the file {:?} is not in the folder of the disk", delta.file),
            ));
        }
        layers.push(TreeLayer {
            id: delta.id,
            parent: delta.parent,
            file: name.to_owned(),
            format: match delta.kind {
                DeltaKind::Expanding => Format::Parallels,
                DeltaKind::Plain => Format::Raw,
            },
        });
    }
    Ok(layers)
}
