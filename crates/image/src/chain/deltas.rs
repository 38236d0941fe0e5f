//! Opens the deltas of a Parallels or ploop disk: the descriptor lists them, and the gate decides which may be opened.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::{BlockDevice, to_usize};

use super::{ChainLayer, OpenedFile, Opener, stack};
use crate::chain::gate::Gatekeeper;
use crate::chain::options::{Backing, OpenOptions};
use crate::file::{Access, HostFile, ImageFile as _};
use crate::formats::ploop::descriptor::{CHAIN_LENGTH_MAX, DiskDescriptor, FILE_NAME, is_descriptor, load_from};
use crate::model::format;
use crate::model::info::{
    BlockInfo, Delta, DeltaInfo, DeltaKind, FormatSource, ImageKind, LayerInfo, Note, ParentInfo, USUAL_SECTOR_BYTES,
    notes_of,
};
use crate::{Error, Format, ImageId, Result};

/// A disk that was opened by its descriptor. It can open the deltas that its top does not need, too.
pub(crate) struct DeltaTree {
    path: PathBuf,
    descriptor: DiskDescriptor,
    keeper: Gatekeeper,
    backing: Backing,
}

/// Opens the file at `path`, or the descriptor in the folder at `path`; returns the path of the file, too.
///
/// In a folder, a symbolic link in place of the descriptor is not followed: the user named the folder only.
pub(crate) fn open_named(path: &Path, format: Option<Format>, access: Access) -> Result<(PathBuf, HostFile)> {
    let may_be_folder = matches!(format, None | Some(Format::Parallels));
    if may_be_folder && path.is_dir() {
        let folder = path.canonicalize().map_err(|source| Error::io("open", path, source))?;
        let inside = folder.join(FILE_NAME);
        if inside.symlink_metadata().is_ok() {
            let file = HostFile::open_canonical(&inside, access)?;
            return Ok((inside, file));
        }
    }
    Ok((path.to_owned(), HostFile::open(path, access)?))
}

impl Opener {
    /// Parses the descriptor in `file`; none if it is not one.
    pub(super) fn tree_of(&self, file: &HostFile, path: &Path, options: &OpenOptions) -> Result<Option<DeltaTree>> {
        if !matches!(options.format, None | Some(Format::Parallels)) {
            return Ok(None);
        }
        let mut head = vec![0; to_usize(format::HEAD_BYTES.min(file.length_bytes()?))];
        file.read_at(&mut head, 0)?;
        // A damaged descriptor must not be read as a raw disk.
        if !is_descriptor(&head) && path.file_name() != Some(OsStr::new(FILE_NAME)) {
            return Ok(None);
        }
        Ok(Some(DeltaTree {
            path: path.to_owned(),
            descriptor: load_from(file, &path.display().to_string())?,
            keeper: self.keeper.clone(),
            backing: options.backing,
        }))
    }

    /// Opens the deltas of `tree` from its top to its root, or the top only, according to the options; the top with
    /// `access`.
    pub(super) fn open_deltas(
        &mut self,
        tree: &DeltaTree,
        format_source: FormatSource,
        access: Access,
    ) -> Result<Vec<OpenedFile>> {
        let chain = tree.chain_of(tree.descriptor.top())?;
        let mut files = Vec::new();
        for (depth, delta) in chain.into_iter().enumerate() {
            let access = if depth == 0 { access } else { Access::Read };
            let mut opened = self.open_delta(tree, delta, access)?;
            if depth == 0 {
                opened.info.format_source = format_source;
                opened.info.extent_files.push(tree.path.clone());
                self.notes.extend(tree.size_difference_note(opened.info.size_bytes));
            }
            self.notes.extend(notes_of(&opened.info));
            files.push(opened);
        }
        Ok(files)
    }

    fn open_delta(&mut self, tree: &DeltaTree, delta: &Delta, access: Access) -> Result<OpenedFile> {
        let missing = |error| match error {
            Error::Io { action, path, source } => Error::Backing {
                image: tree.path.display().to_string(),
                action,
                path,
                source,
            },
            other => other,
        };
        let path = self.place_of(tree, delta).map_err(missing)?;
        let file = HostFile::open_canonical(&path, access).map_err(missing)?;
        self.register(&file, &path, &tree.path)?;
        // The guest controls the content of a plain delta: its format is not detected.
        let format = match delta.kind {
            DeltaKind::Expanding => Format::Parallels,
            DeltaKind::Plain => Format::Raw,
        };
        let mut opened = self.parse_file(file, &path, Some(format), FormatSource::Overlay, None, access)?;
        tree.describe(delta, &mut opened.info);
        Ok(opened)
    }
}

impl Opener {
    /// The path of a delta, if it may be opened. An absolute path may belong to another host, or be outdated after
    /// the disk was moved or copied: then the file in the descriptor's folder is used, unless it belongs to another
    /// delta.
    fn place_of(&self, tree: &DeltaTree, delta: &Delta) -> Result<PathBuf> {
        let named = self.keeper.admit(&tree.path, &delta.file);
        let Some(name) = Path::new(&delta.file).file_name().and_then(OsStr::to_str) else {
            return named;
        };
        let is_called_so = |other: &&Delta| Path::new(&other.file).file_name() == Some(OsStr::new(name));
        let is_moved =
            Path::new(&delta.file).is_absolute() && tree.descriptor.deltas().iter().filter(is_called_so).count() == 1;
        match named {
            Err(error) if is_moved => self.keeper.admit(&tree.path, name).map_err(|_| error),
            named => named,
        }
    }
}

impl DeltaTree {
    /// The delta `id` and its ancestors, or only itself, according to the options.
    fn chain_of(&self, id: ImageId) -> Result<Vec<&Delta>> {
        let mut chain = self.descriptor.chain_of(id);
        if self.backing == Backing::Ignore {
            chain.truncate(1);
        }
        if chain.len() > CHAIN_LENGTH_MAX {
            return Err(Error::ChainTooLong {
                image: self.path.display().to_string(),
                layer_count_max: CHAIN_LENGTH_MAX,
            });
        }
        Ok(chain)
    }

    /// Adds the descriptor's entry of `delta`.
    fn describe(&self, delta: &Delta, info: &mut LayerInfo) {
        let blocks = info.blocks.take();
        info.blocks = Some(BlockInfo {
            kind: match (delta.kind, delta.parent) {
                (DeltaKind::Plain, _) => ImageKind::Fixed,
                (DeltaKind::Expanding, None) => ImageKind::Dynamic,
                (DeltaKind::Expanding, Some(_)) => ImageKind::Differencing,
            },
            block_bytes: blocks.map_or(512, |blocks| blocks.block_bytes),
            sector_bytes: USUAL_SECTOR_BYTES,
            id: Some(delta.id),
            modification: None,
            parent: delta.parent.map(|parent| ParentInfo {
                id: Some(parent),
                modification: None,
                names: self
                    .descriptor
                    .delta(parent)
                    .map(|parent| parent.file.clone())
                    .into_iter()
                    .collect(),
            }),
            creator: None,
        });
        let is_top = delta.id == self.descriptor.top();
        let others = self
            .descriptor
            .deltas()
            .iter()
            .filter(|other| is_top && other.id != delta.id);
        info.delta = Some(DeltaInfo {
            descriptor: self.path.clone(),
            file: delta.file.clone(),
            snapshots: others.cloned().collect(),
        });
    }

    /// When ploop grows a disk, it resizes the top delta first, so the size of the top delta takes
    /// precedence.
    fn size_difference_note(&self, delta_bytes: u64) -> Option<Note> {
        let descriptor_bytes = self.descriptor.disk_bytes();
        (descriptor_bytes != delta_bytes).then(|| Note::DiskSizeDiffers {
            image: self.path.clone(),
            descriptor_bytes,
            size_bytes: delta_bytes,
        })
    }

    /// Fails if a write to the top would change snapshots, too, or is not supported.
    pub(crate) fn check_writable(&self) -> Result<()> {
        let top = self.descriptor.top();
        let refuse = |detail: String| {
            Err(Error::NotWritable {
                image: self.path.display().to_string(),
                detail,
            })
        };
        if self.descriptor.has_children(top) {
            return refuse(format!("its top, {{{top}}}, is also the parent of another snapshot"));
        }
        match self.descriptor.delta(top) {
            Some(Delta {
                kind: DeltaKind::Plain,
                file,
                ..
            }) => refuse(format!(
                "its top is a plain image; open {file} itself, with the format raw"
            )),
            _ => Ok(()),
        }
    }

    /// Opens the disk as of the snapshot `name`. `layers` and `infos` are the chain of the top; deltas that both
    /// chains share are not opened again.
    pub(crate) fn snapshot(
        &self,
        name: &str,
        layers: &[ChainLayer],
        infos: &[LayerInfo],
    ) -> Result<Arc<dyn BlockDevice>> {
        let chain = match name.parse::<ImageId>() {
            Ok(id) => self.chain_of(id)?,
            Err(_) => Vec::new(),
        };
        if chain.is_empty() {
            return Err(Error::NotFound {
                image: self.path.display().to_string(),
                what: "snapshot",
                name: name.to_owned(),
            });
        }
        let mut opener = Opener {
            keeper: self.keeper.clone(),
            seen: HashSet::new(),
            notes: Vec::new(),
        };
        let (mut files, mut below) = (Vec::new(), None);
        for delta in chain {
            let is_it = |info: &LayerInfo| info.blocks.as_ref().is_some_and(|blocks| blocks.id == Some(delta.id));
            if let Some(depth) = infos.iter().position(is_it) {
                below = Some(Arc::clone(&layers[depth].device));
                break;
            }
            files.push(opener.open_delta(self, delta, Access::Read)?);
        }
        let stacked = stack(files, below.clone())?;
        let top = stacked.first().map(|layer| Arc::clone(&layer.device)).or(below);
        Ok(top.expect("a chain has a layer"))
    }
}
