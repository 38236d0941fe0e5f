//! Containers that move to another host. The former container here is marked, so that it is not used by mistake.

use std::path::PathBuf;

use holdfast_image::{
    CONTAINER_FILE, ContainerLock, ContainerTree, DESCRIPTOR_FILE, ImageId, LiveChain, LiveOptions, PinnedLayers,
};
use serde::{Deserialize, Serialize};

use super::place::{ContainerPlace, DiskTransport};
use crate::job::error::ContainerError;
use crate::job::{Error, Result};

/// The property of a container with its [`Relocation`], as JSON.
const RELOCATION_PROPERTY: &str = "migration";

/// Where a container is that was migrated to another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Relocation {
    /// The address of its folder.
    pub target: String,
    /// Where it is mounted there; none if it was not mounted here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount_point: Option<PathBuf>,
    /// What makes a block device of its disk there.
    pub transport: DiskTransport,
}

impl Relocation {
    /// The mark of a container; none if it is to be used here.
    ///
    /// # Errors
    /// The mark is of a later version.
    pub fn of(place: &ContainerPlace) -> Result<Option<Self>> {
        let tree = ContainerTree::open(&place.folder).map_err(|error| Error::from(error).on(&place.folder))?;
        let Some(text) = tree.properties().get(RELOCATION_PROPERTY) else {
            return Ok(None);
        };
        serde_json::from_str(text).map(Some).map_err(|_| {
            ContainerError::Relocated {
                container: place.folder.clone(),
                target: "another host".to_owned(),
            }
            .into()
        })
    }

    /// Removes the mark of a container, which the caller has locked.
    ///
    /// # Errors
    /// The list cannot be written.
    pub(super) fn end(place: &ContainerPlace) -> Result<()> {
        let on = |error: holdfast_image::Error| Error::from(error).on(&place.folder);
        let chain = LiveChain::open(&place.folder, LiveOptions::default()).map_err(on)?;
        let mut properties = chain.tree().properties().clone();
        match properties.remove(RELOCATION_PROPERTY) {
            Some(_) => chain.set_properties(properties).map_err(on),
            None => Ok(()),
        }
    }

    /// Refuses a container that was migrated to another host.
    ///
    /// # Errors
    /// It was.
    pub(crate) fn refuse(place: &ContainerPlace) -> Result<()> {
        match Self::of(place)? {
            None => Ok(()),
            Some(relocation) => Err(ContainerError::Relocated {
                container: place.folder.clone(),
                target: relocation.target,
            }
            .into()),
        }
    }
}

/// Whether a container may be mounted that was migrated to another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RelocatedUse {
    /// It is refused.
    #[default]
    Refuse,
    /// It is used here again, as it was before.
    TakeBack,
}

/// A file that lists the layers of a container, or its snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerDocument {
    /// Its name in the folder.
    pub name: &'static str,
    /// Its content.
    pub text: String,
}

/// A container that no other process can use.
pub struct IdleContainer<'a> {
    place: &'a ContainerPlace,
    _lock: ContainerLock,
}

impl<'a> IdleContainer<'a> {
    /// Locks it, and completes what a killed process has left.
    ///
    /// # Errors
    /// It is in use, or damaged.
    pub fn lock(place: &'a ContainerPlace) -> Result<Self> {
        let lock = match ContainerLock::take(&place.folder) {
            Err(holdfast_image::Error::Locked { .. }) => {
                return Err(ContainerError::Mounted {
                    container: place.folder.clone(),
                }
                .into());
            }
            lock => lock.map_err(|error| Error::from(error).on(&place.folder))?,
        };
        let idle = Self { place, _lock: lock };
        idle.chain()?;
        Ok(idle)
    }

    fn chain(&self) -> Result<LiveChain> {
        let folder = &self.place.folder;
        LiveChain::open(folder, LiveOptions::default()).map_err(|error| Error::from(error).on(folder))
    }

    /// Deletes snapshots. Their layers are merged when the container is used.
    ///
    /// # Errors
    /// The list cannot be written.
    pub fn hide_snapshots(&self, ids: &[ImageId]) -> Result<()> {
        let hidden = self.chain()?.hide_snapshots(ids);
        hidden.map_err(|error| Error::from(error).on(&self.place.folder))
    }

    /// Marks the container as migrated, durably.
    ///
    /// # Errors
    /// The list cannot be written.
    pub fn mark(&self, relocation: &Relocation) -> Result<()> {
        let chain = self.chain()?;
        let mut properties = chain.tree().properties().clone();
        let text = serde_json::to_string(relocation).expect("strings are JSON");
        properties.insert(RELOCATION_PROPERTY.to_owned(), text);
        let marked = chain.set_properties(properties);
        marked.map_err(|error| Error::from(error).on(&self.place.folder))
    }

    /// Removes the mark: the container is used here.
    ///
    /// # Errors
    /// The list cannot be written.
    pub fn unmark(&self) -> Result<()> {
        Relocation::end(self.place)
    }

    /// All its layers.
    ///
    /// # Errors
    /// A file cannot be opened.
    pub fn layers(&self) -> Result<PinnedLayers> {
        PinnedLayers::whole(&self.place.folder).map_err(|error| Error::from(error).on(&self.place.folder))
    }

    /// The files that list its layers and snapshots.
    ///
    /// # Errors
    /// One cannot be read.
    pub fn documents(&self) -> Result<Vec<ContainerDocument>> {
        let mut documents = Vec::new();
        for name in [CONTAINER_FILE, DESCRIPTOR_FILE] {
            let path = self.place.folder.join(name);
            match std::fs::read_to_string(&path) {
                Ok(text) => documents.push(ContainerDocument { name, text }),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(source) => {
                    return Err(Error::File {
                        action: "read",
                        path,
                        source,
                    });
                }
            }
        }
        Ok(documents)
    }
}
