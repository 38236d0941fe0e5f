//! Creates containers, and switches containers that are not in use to another snapshot.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use holdfast_block::ExtentKind;

use super::folder::{CONTAINER_FILE, ChainFolder, HostFolder};
use super::layer::{BaseLayer, check_layer, create_layer, open_reader};
use super::snapshot::NewSnapshot;
use super::tree::{ContainerTree, SnapshotEntry, StoreOrder, TreeLayer};
use crate::file::HostFile;
use crate::formats::ploop::create::CLUSTER_BYTES;
use crate::formats::ploop::descriptor::FILE_NAME as DESCRIPTOR_FILE;
use crate::{DiskDescriptor, Error, Format, ImageId, Result};

const OPEN_CACHE_BYTES: u64 = 1 << 20;
/// The first layer of a Parallels disk, as ploop names it.
const ROOT_DELTA: &str = "root.hds";

/// A container to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewContainer {
    /// Size of the disk, a multiple of 512.
    pub size_bytes: u64,
    /// The format of its layers: qcow2 or Parallels.
    pub format: Format,
    /// Further facts.
    pub properties: BTreeMap<String, String>,
}

/// What becomes of the current state in a switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CurrentState {
    /// It becomes a snapshot.
    Keep(NewSnapshot),
    /// What was written since the last snapshot is deleted.
    Discard,
}

/// Checks that a container can have the format and size of `new`; nothing is created.
///
/// # Errors
/// The format or size is not supported.
pub fn check_new_container(new: &NewContainer) -> Result<()> {
    check_layer(new.format, new.size_bytes)
}

/// Creates a container in the folder at `path`, which must not exist or be empty; durable when this returns.
///
/// # Errors
/// The folder is not empty or cannot be created, or the format or size is not supported. Nothing is left then.
pub fn create_container(path: &Path, new: &NewContainer) -> Result<()> {
    let is_new = match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => true,
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => false,
        Err(error) => return Err(Error::io("create", path, error)),
    };
    let created = HostFolder::open(path).and_then(|folder| {
        if !folder.names()?.is_empty() {
            let reason = std::io::Error::from(std::io::ErrorKind::DirectoryNotEmpty);
            return Err(Error::io("create", path, reason));
        }
        let created = create_in(&folder, new);
        if created.is_err() {
            for name in folder.names()? {
                folder.remove(&name).ok();
            }
        }
        created
    });
    if created.is_err() && is_new {
        std::fs::remove_dir(path).ok();
    }
    created?;
    HostFile::sync_directory(path)
}

pub(super) fn create_in(folder: &dyn ChainFolder, new: &NewContainer) -> Result<()> {
    let id = ImageId::random()?;
    let tree = match new.format {
        Format::Parallels => {
            let descriptor = DiskDescriptor::of_new(new.size_bytes, CLUSTER_BYTES, ROOT_DELTA, id)?;
            ContainerTree::of_descriptor(descriptor, new.properties.clone())?
        }
        format => {
            let top = ImageId::random()?;
            let layer = TreeLayer {
                id: top,
                parent: None,
                file: String::new(),
                format,
            };
            let tree = ContainerTree::new(id, layer.clone(), new.properties.clone());
            let file = tree.new_file()?;
            ContainerTree::new(id, TreeLayer { file, ..layer }, new.properties.clone())
        }
    };
    let top = tree.layer(tree.top()).expect("a new tree lists its top");
    create_layer(folder, &top.file, new.format, new.size_bytes, None)?;
    tree.store_new(folder)
}

/// What a switch would delete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwitchPlan {
    /// The snapshot.
    pub snapshot: ImageId,
    /// Bytes that were written since the last snapshot.
    pub written_bytes: u64,
}

/// Finds out what a switch of the container at `path` to the snapshot `snapshot` would delete.
///
/// # Errors
/// The container or its top cannot be opened.
pub fn plan_switch(path: &Path, snapshot: ImageId) -> Result<SwitchPlan> {
    let folder = HostFolder::open(path)?;
    let tree = ContainerTree::load(&folder)?;
    Ok(SwitchPlan {
        snapshot,
        written_bytes: written_bytes(&folder, &tree)?,
    })
}

/// Bytes that the top stores.
fn written_bytes(folder: &dyn ChainFolder, tree: &ContainerTree) -> Result<u64> {
    const EXTENT_COUNT_MAX: usize = 1024;
    let top = tree.layer(tree.top()).expect("a valid tree lists its top");
    let reader = open_reader(folder, top, OPEN_CACHE_BYTES)?;
    let (mut at, mut sum) = (0, 0);
    while at < reader.layer_bytes() {
        let list = reader.extents_alone(at..reader.layer_bytes(), EXTENT_COUNT_MAX)?;
        at = list.end();
        let present = list.into_iter().filter(|extent| extent.kind != ExtentKind::Absent);
        sum += present.map(|extent| extent.length).sum::<u64>();
    }
    Ok(sum)
}

/// Switches the container at `path`, which the caller has locked and which is not in use, to a snapshot; durable when
/// this returns.
///
/// # Errors
/// [`Error::NotFound`] if there is no such snapshot; a file cannot be created or stored.
pub fn switch(path: &Path, snapshot: ImageId, current: &CurrentState) -> Result<()> {
    let folder = HostFolder::open(path)?;
    let tree = ContainerTree::load(&folder)?;
    switch_in(&folder, &tree, snapshot, current)
}

pub(super) fn switch_in(
    folder: &dyn ChainFolder,
    tree: &ContainerTree,
    snapshot: ImageId,
    current: &CurrentState,
) -> Result<()> {
    let base = tree.layer(snapshot).filter(|layer| layer.id != tree.top());
    let Some(base) = base else {
        return Err(Error::NotFound {
            image: folder.path("").display().to_string(),
            what: "snapshot",
            name: snapshot.to_string(),
        });
    };
    let size_bytes = open_reader(folder, base, OPEN_CACHE_BYTES)?.layer_bytes();
    let file = tree.new_file()?;
    let kept = match current {
        CurrentState::Keep(new) if written_bytes(folder, tree)? > 0 => {
            let entry = SnapshotEntry {
                name: new.name.clone(),
                created_s: new.created_s,
                comment: new.comment.clone(),
                is_hidden: false,
                properties: new.properties.clone(),
            };
            tree.with_snapshot(ImageId::random()?, entry, &file)?
        }
        _ => tree.clone(),
    };
    let old_top = kept.layer(kept.top()).expect("a valid tree lists its top").file.clone();
    let new_tree = kept.with_top_over(snapshot, &file)?.with_size(size_bytes)?;
    let of_base = BaseLayer {
        file: &base.file,
        format: base.format,
    };
    create_layer(folder, &file, tree.new_layer_format(), size_bytes, Some(of_base))?;
    if let Err(error) = new_tree.store(folder, tree, StoreOrder::EntriesFirst) {
        match ContainerTree::load(folder) {
            Ok(stored) if stored.has_layers_of(&new_tree) && folder.sync().is_ok() => {}
            Ok(stored) if stored.has_layers_of(tree) => {
                folder.remove(&file).ok();
                return Err(error);
            }
            // The next process that opens the container deletes the file that is not listed.
            _ => return Err(error),
        }
    }
    if old_top != file {
        // The next process that opens the container deletes a file that is left.
        folder.remove(&old_top).ok();
    }
    Ok(())
}

/// Whether the folder at `path` is a container.
pub fn is_container(path: &Path) -> bool {
    path.is_dir() && (path.join(CONTAINER_FILE).is_file() || path.join(DESCRIPTOR_FILE).is_file())
}
