//! Gives an image a new identity, and updates its children.
//!
//! Hypervisors recognize an image by its identity, and refuse a copy with the identity of the original. The content of
//! the disk does not change.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::chain::{Content, OpenedFile, open_single};
use crate::file::{Access, directory_of};
use crate::formats::{vdi, vhd, vhdx, vmdk};
use crate::model::identity::require_other_id;
use crate::operations::image::{refuse_cut_off, refuse_unwritable};
use crate::{Backing, DiskDescriptor, Error, Format, ImageId, OpenOptions, Result};

/// Limit of files that are examined in one folder.
const CANDIDATE_COUNT_MAX: usize = 10_000;

/// The new identity of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewIdentity {
    /// The identity.
    pub id: ImageId,
    /// Children to update.
    pub children: Vec<PathBuf>,
    /// How to treat further children in the folder of the image.
    pub unnamed_children: UnnamedChildren,
    /// The final file name, if the file is renamed later: a VMDK stores it.
    pub name: Option<String>,
}

/// How to treat children of the image that are in its folder and were not named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnnamedChildren {
    /// Fail, and change nothing.
    Refuse,
    /// Update them.
    Change,
    /// Do not change them: the image is a copy, and they are children of the original.
    Leave,
}

/// A changed identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentityChange {
    /// The identity before; none if the image had none.
    pub before: Option<ImageId>,
    /// The identity after; none for a ploop disk, in which only the deltas have one.
    pub after: Option<ImageId>,
    /// The children that were updated.
    pub children: Vec<PathBuf>,
}

/// Gives the image at `path` a new identity, and updates the identity that its children store; durable when this
/// returns.
///
/// Everything is checked before anything changes, and the children change first: an interrupted call can be repeated
/// with the same identity and the children named. Children of a VHDX identify it by its last modification, which
/// stays, so they are not changed.
///
/// # Errors
/// - [`Error::NoIdentity`] for raw and qcow2 images, and for single deltas of Parallels, whose identity is in the
///   descriptor in their folder: opened by that, the disk gets it, and all of its deltas get new ones;
/// - [`Error::HasChildren`] if there are children in the folder of the image that must not be changed.
pub fn set_identity(path: &Path, options: &OpenOptions, new: &NewIdentity) -> Result<IdentityChange> {
    let children = children_of_change(path, options, new)?;
    let image = open_single(path, options, Access::Write)?;
    if let Some(delta) = &image.info.delta {
        let (change, renewed) = renew_deltas(&delta.descriptor, new)?;
        renewed.store(&delta.descriptor)?;
        return Ok(change);
    }
    let opened = open_children(&image, &children, options, new, Access::Write)?;
    let change = change_of(&image, children, new);
    for child in opened {
        set_parent(&child, new.id)?;
    }
    set(image, new)?;
    Ok(change)
}

/// Plans the same change: everything is checked, and nothing is changed.
///
/// # Errors
/// Those of [`set_identity`].
pub fn plan_identity(path: &Path, options: &OpenOptions, new: &NewIdentity) -> Result<IdentityChange> {
    let children = children_of_change(path, options, new)?;
    refuse_unwritable(path, options)?;
    let image = open_single(path, options, Access::Read)?;
    if let Some(delta) = &image.info.delta {
        return Ok(renew_deltas(&delta.descriptor, new)?.0);
    }
    for child in &children {
        refuse_unwritable(child, &options_of_child(&image, options))?;
    }
    open_children(&image, &children, options, new, Access::Read)?;
    Ok(change_of(&image, children, new))
}

/// The children to change.
fn children_of_change(path: &Path, options: &OpenOptions, new: &NewIdentity) -> Result<Vec<PathBuf>> {
    if new.id.is_nil() {
        return Err(Error::InvalidOption {
            option: "uuid",
            detail: "the nil UUID identifies no image".to_owned(),
        });
    }
    let mut children = new.children.clone();
    refuse_cut_off(path, options)?;
    let others: Vec<PathBuf> = match new.unnamed_children {
        UnnamedChildren::Leave => Vec::new(),
        UnnamedChildren::Change | UnnamedChildren::Refuse => children_to_change(path, options)?,
    }
    .into_iter()
    .filter(|found| !children.iter().any(|child| is_same(child, found)))
    .collect();
    match new.unnamed_children {
        UnnamedChildren::Change => children.extend(others),
        UnnamedChildren::Refuse if !others.is_empty() => {
            return Err(Error::HasChildren {
                image: path.display().to_string(),
                children: others.iter().map(|child| child.display().to_string()).collect(),
            });
        }
        UnnamedChildren::Refuse | UnnamedChildren::Leave => {}
    }
    Ok(children)
}

fn options_of_child(image: &OpenedFile, options: &OpenOptions) -> OpenOptions {
    OpenOptions {
        format: Some(image.info.format),
        ..options.clone()
    }
}

/// Opens the children, after checking that all of them and the image can have the new identity.
fn open_children(
    image: &OpenedFile,
    children: &[PathBuf],
    options: &OpenOptions,
    new: &NewIdentity,
    access: Access,
) -> Result<Vec<OpenedFile>> {
    require_identity(image)?;
    require_other_id(new.id, parent_id(image))?;
    let options = options_of_child(image, options);
    let mut opened = Vec::new();
    for child in children {
        let child = open_single(child, &options, access)?;
        require_child(&child, image, new.id)?;
        require_other_id(new.id, child.info.blocks.as_ref().and_then(|blocks| blocks.id))?;
        opened.push(child);
    }
    Ok(opened)
}

fn change_of(image: &OpenedFile, children: Vec<PathBuf>, new: &NewIdentity) -> IdentityChange {
    IdentityChange {
        before: image.info.blocks.as_ref().and_then(|blocks| blocks.id),
        after: Some(new.id),
        children: match image.info.format {
            Format::Vhdx => Vec::new(),
            _ => children,
        },
    }
}

/// The children in the folder of `path` that store its identity. Those of a VHDX do not.
fn children_to_change(path: &Path, options: &OpenOptions) -> Result<Vec<PathBuf>> {
    let format = open_single(path, options, Access::Read)?.info.format;
    if format == Format::Vhdx {
        return Ok(Vec::new());
    }
    children_in_folder(path, options)
}

/// The descriptor with new identities for itself and its deltas; it is not stored yet.
fn renew_deltas(path: &Path, new: &NewIdentity) -> Result<(IdentityChange, DiskDescriptor)> {
    let old = DiskDescriptor::load(path)?;
    let mut renewed = old.renewed(ImageId::random)?;
    let mut after = None;
    if let Some(own) = renewed.id() {
        renewed = renewed.with_ids(&BTreeMap::from([(own, new.id)]))?;
        after = Some(new.id);
    }
    let change = IdentityChange {
        before: old.id(),
        after,
        children: Vec::new(),
    };
    Ok((change, renewed))
}

/// The children of the image at `path` in its folder and in the subfolder `Snapshots`: they store its identity, or its
/// last modification in case of a VHDX.
pub fn children_in_folder(path: &Path, options: &OpenOptions) -> Result<Vec<PathBuf>> {
    let image = open_single(path, options, Access::Read)?;
    let extensions: &[&str] = match image.info.format {
        Format::Vdi => &["vdi"],
        Format::Vhd => &["vhd", "avhd", "vpc"],
        Format::Vmdk => &["vmdk"],
        Format::Vhdx => &["vhdx", "avhdx"],
        _ => return Ok(Vec::new()),
    };
    let Some(blocks) = image.info.blocks else {
        return Ok(Vec::new());
    };
    let child_options = OpenOptions {
        format: Some(image.info.format),
        backing: Backing::Ignore,
        ..options.clone()
    };
    Ok(images_in_folder(path, extensions, |found| {
        let opened = open_single(found, &child_options, Access::Read);
        opened.is_ok_and(|opened| match opened.info.format {
            Format::Vhdx => {
                blocks.modification.is_some() && parent_modification(&opened) == blocks.modification.as_ref()
            }
            _ => blocks.id.is_some() && parent_id(&opened) == blocks.id,
        })
    }))
}

/// The images in the folder of `path` and in its subfolder `Snapshots` that depend on it: its children, and qcow2
/// overlays, which store its path.
pub fn dependents_in_folder(path: &Path, options: &OpenOptions) -> Result<Vec<PathBuf>> {
    let image = open_single(path, options, Access::Read)?;
    let child_options = |format| OpenOptions {
        format: Some(format),
        backing: Backing::Ignore,
        ..options.clone()
    };
    match image.info.format {
        Format::Qcow2 | Format::Raw => {
            let options = child_options(Format::Qcow2);
            Ok(images_in_folder(path, &["qcow2", "qcow", "img"], |found| {
                let opened = open_single(found, &options, Access::Read).ok();
                let qcow2 = opened.and_then(|opened| opened.info.qcow2);
                let backing = qcow2.and_then(|qcow2| qcow2.backing_file);
                // `join` with an absolute path replaces the folder.
                backing.is_some_and(|backing| is_same(&directory_of(found).join(backing), path))
            }))
        }
        _ => children_in_folder(path, options),
    }
}

/// The images in the folder of `path` and in its subfolder `Snapshots` that have one of these extensions and are its
/// children.
fn images_in_folder(path: &Path, extensions: &[&str], is_child: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let folder = directory_of(path);
    let mut children: Vec<PathBuf> = [folder.join("Snapshots"), folder]
        .iter()
        .flat_map(|folder| {
            std::fs::read_dir(folder)
                .into_iter()
                .flatten()
                .take(CANDIDATE_COUNT_MAX)
        })
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|found| {
            let extension = found.extension().and_then(|extension| extension.to_str());
            extension.is_some_and(|found| extensions.iter().any(|known| known.eq_ignore_ascii_case(found)))
        })
        .filter(|found| is_child(found))
        .map(|found| found.strip_prefix("./").map_or(found.clone(), Path::to_owned))
        .collect();
    children.sort();
    children
}

fn parent_id(child: &OpenedFile) -> Option<ImageId> {
    child.info.blocks.as_ref()?.parent.as_ref()?.id
}

fn parent_modification(child: &OpenedFile) -> Option<&String> {
    child.info.blocks.as_ref()?.parent.as_ref()?.modification.as_ref()
}

fn is_same(one: &Path, other: &Path) -> bool {
    match (one.canonicalize(), other.canonicalize()) {
        (Ok(one), Ok(other)) => one == other,
        _ => one == other,
    }
}

/// Fails unless the child stores the identity of its parent from before, or already the new one.
fn require_child(child: &OpenedFile, parent: &OpenedFile, after: ImageId) -> Result<()> {
    let (blocks, parent_blocks) = (child.info.blocks.as_ref(), parent.info.blocks.as_ref());
    let named = blocks.and_then(|blocks| blocks.parent.as_ref());
    let before = parent_blocks.and_then(|blocks| blocks.id);
    let modification = parent_blocks.and_then(|blocks| blocks.modification.as_ref());
    let detail = match named {
        Some(named) => match (named.id, &named.modification) {
            (Some(id), _) if id == after || Some(id) == before => return Ok(()),
            (Some(id), _) => format!("its parent is {id}"),
            // A VHDX, and a VMDK without a parent UUID, identify the parent by its last modification.
            (None, named) if named.as_ref() == modification => return Ok(()),
            (None, named) => format!(
                "the last modification of its parent is {}",
                named.as_deref().unwrap_or("unknown")
            ),
        },
        None => "it has no parent".to_owned(),
    };
    Err(Error::NotAChild {
        image: child.path.display().to_string(),
        parent: parent.path.display().to_string(),
        detail,
    })
}

fn require_identity(image: &OpenedFile) -> Result<()> {
    let detail = match image.content {
        Content::Vdi(_) | Content::Vhd(_) | Content::Vhdx(_) | Content::Vmdk(_) => return Ok(()),
        Content::Raw => "a raw disk has none, except in data of its guest",
        Content::Qcow2(_) => "qcow2 has none: an overlay refers to its backing file by path",
        Content::Ploop(_) => "that of a delta is in the DiskDescriptor.xml in its folder",
    };
    Err(Error::NoIdentity {
        image: image.path.display().to_string(),
        detail,
    })
}

fn set(image: OpenedFile, new: &NewIdentity) -> Result<()> {
    let id = new.id;
    let name = image.path.display().to_string();
    match image.content {
        Content::Vdi(_) => vdi::identity::set(&*image.file, id),
        Content::Vhd(header) => vhd::identity::set(&*image.file, &header, id),
        Content::Vhdx(mut opened) => vhdx::identity::set(&mut opened, &name, id),
        Content::Vmdk(vmdk) => vmdk::identity::set(&vmdk, &name, id, new.name.as_deref()),
        Content::Raw | Content::Qcow2(_) | Content::Ploop(_) => Ok(()),
    }
}

fn set_parent(child: &OpenedFile, id: ImageId) -> Result<()> {
    match &child.content {
        Content::Vdi(_) => vdi::identity::set_parent(&*child.file, id),
        Content::Vhd(header) => match &header.sparse {
            Some(sparse) => vhd::identity::set_parent(&*child.file, sparse.offset, id),
            None => Ok(()),
        },
        Content::Vmdk(vmdk) => vmdk::identity::set_parent(vmdk, &child.path.display().to_string(), id),
        Content::Vhdx(_) | Content::Raw | Content::Qcow2(_) | Content::Ploop(_) => Ok(()),
    }
}
