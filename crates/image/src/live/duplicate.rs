//! Makes a container of a snapshot of another one, with files of its own.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use holdfast_block::{Error as BlockError, ExtentKind, to_usize};

use super::folder::{ChainFolder, HostFolder};
use super::layer::{BaseLayer, create_layer, open_reader};
use super::tree::ContainerTree;
use crate::file::{Access, HostFile, ImageFile};
use crate::pipeline::copy_pipeline::{Continue, stopped};
use crate::{Error, ImageId, Result};

const OPEN_CACHE_BYTES: u64 = 1 << 20;
const COPY_BYTES: u64 = 1 << 20;
const EXTENT_COUNT: usize = 256;

/// A container to make of a snapshot.
pub struct ContainerDuplicate<'a> {
    /// The container with the snapshot.
    pub source: &'a Path,
    /// The snapshot. The caller keeps its layers from being merged: a [`PointInTime`](super::PointInTime) does.
    pub snapshot: ImageId,
    /// The folder of the new container, which must not exist.
    pub target: &'a Path,
    /// Snapshots that the new container does not show; their layers are merged when it is used.
    pub hidden: &'a [ImageId],
}

/// How the files of a duplicate were made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DuplicateReport {
    /// The id of the new container.
    pub id: ImageId,
    /// Size of its disk.
    pub size_bytes: u64,
    /// Bytes that were copied. The file system shares all others with the source.
    pub copied_bytes: u64,
    /// Files that share their bytes with the source.
    pub shared_count: usize,
    /// Files that were copied.
    pub copied_count: usize,
}

/// Makes the new container, durably. It has the snapshot as its state, and the visible snapshots below it, without the
/// memory of processes. `observe` gets the number of bytes of each step of a copy.
///
/// # Errors
/// [`Error::NotFound`] if there is no such snapshot; a file cannot be read or written. The target may have files then.
pub fn duplicate_container(
    new: &ContainerDuplicate<'_>,
    observe: &mut dyn FnMut(u64) -> Continue,
) -> Result<DuplicateReport> {
    let source = HostFolder::open(new.source)?;
    let old = ContainerTree::load(&source)?;
    let Some(base) = old.layer(new.snapshot).filter(|layer| layer.id != old.top()) else {
        return Err(Error::NotFound {
            image: new.source.display().to_string(),
            what: "snapshot",
            name: new.snapshot.to_string(),
        });
    };
    let size_bytes = open_reader(&source, base, OPEN_CACHE_BYTES)?.layer_bytes();
    let top_file = old.new_file()?;
    let tree = old.duplicate_of(new.snapshot, &top_file)?;
    let tree = new.hidden.iter().fold(tree.with_size(size_bytes)?, |tree, id| {
        if tree.layer(*id).is_some() {
            tree.with_hidden(*id)
        } else {
            tree
        }
    });
    let made = DirBuilder::new().mode(0o700).create(new.target);
    made.map_err(|error| Error::io("create", new.target, error))?;
    let target = HostFolder::open(new.target)?;
    let mut report = DuplicateReport {
        id: tree.id(),
        size_bytes,
        copied_bytes: 0,
        shared_count: 0,
        copied_count: 0,
    };
    for layer in tree.chain_of(new.snapshot) {
        let (from, to) = (source.path(&layer.file), target.path(&layer.file));
        match clone_file(&from, &to, observe)? {
            None => report.shared_count += 1,
            Some(copied_bytes) => {
                report.copied_bytes += copied_bytes;
                report.copied_count += 1;
            }
        }
    }
    let of_base = BaseLayer {
        file: &base.file,
        format: base.format,
    };
    create_layer(&target, &top_file, old.new_layer_format(), size_bytes, Some(of_base))?;
    tree.store_new(&target)?;
    HostFile::sync_directory(new.target)?;
    Ok(report)
}

/// Makes a file with the bytes of another one, durably: shared if the file system can do that. Returns the number of
/// bytes that were copied instead.
fn clone_file(from: &Path, to: &Path, observe: &mut dyn FnMut(u64) -> Continue) -> Result<Option<u64>> {
    let source = HostFile::open_canonical(from, Access::Read)?;
    let target = HostFile::create_new(to)?;
    let written = |error: BlockError| Error::from(error).in_file("write", to);
    let copied = if target.share_bytes_of(&source) {
        None
    } else {
        let length = source
            .length_bytes()
            .map_err(|error| Error::from(error).in_file("read", from))?;
        target.set_length(length).map_err(written)?;
        Some(copy(&source, from, &mut |bytes, offset| {
            target.write_at(bytes, offset).map_err(written)?;
            match observe(bytes.len() as u64) {
                Continue::Go => Ok(()),
                Continue::Stop => Err(stopped(offset)),
            }
        })?)
    };
    target.sync().map_err(written)?;
    Ok(copied)
}

/// Passes the data of a file to `write`; returns the number of bytes. Holes are left out.
fn copy(source: &HostFile, path: &Path, write: &mut dyn FnMut(&[u8], u64) -> Result<()>) -> Result<u64> {
    let read = |error: BlockError| Error::from(error).in_file("read", path);
    let length = source.length_bytes().map_err(read)?;
    let mut buffer = vec![0; to_usize(COPY_BYTES)];
    let (mut at, mut copied) = (0, 0);
    while at < length {
        let list = source.extents(at..length, EXTENT_COUNT).map_err(read)?;
        at = list.end();
        for extent in list.into_iter().filter(|extent| extent.kind == ExtentKind::Data) {
            let end = extent.offset + extent.length;
            let mut offset = extent.offset;
            while offset < end {
                let bytes = &mut buffer[..to_usize(COPY_BYTES.min(end - offset))];
                source.read_at(bytes, offset).map_err(read)?;
                write(bytes, offset)?;
                copied += bytes.len() as u64;
                offset += bytes.len() as u64;
            }
        }
    }
    Ok(copied)
}
