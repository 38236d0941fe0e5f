//! Chooses paths for new files, and checks the free space.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use holdfast_block::{BlockDevice, ExtentKind, for_each_extent};
use holdfast_image::Format;
use holdfast_repo::DiskRecord;

use super::neighbours::Neighbours;
use super::planned_file::nearest_folder;
use super::planned_file::{FileContent, FileWay, PlannedFile};
use crate::job::error::Refusal;
use crate::job::{Error, Result};
use crate::restore::source::StoredContents;

/// The space that is needed on a file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpaceNeeded {
    /// A folder on the file system.
    pub folder: PathBuf,
    /// Bytes that will be written, at least.
    pub needed_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
}

/// Approximate allocation unit of images and file systems: data is rounded up to it.
const PIECE_BYTES: u64 = 64 << 10;
/// The estimated metadata of a file in its image and file system.
const OVERHEAD_BYTES: u64 = 1 << 20;

/// Chooses paths that are not used by a file, a machine or this plan.
pub(super) struct Paths<'a> {
    neighbours: &'a Neighbours,
    taken: Vec<PathBuf>,
}

impl<'a> Paths<'a> {
    pub(super) fn new(neighbours: &'a Neighbours) -> Self {
        Self {
            neighbours,
            taken: Vec::new(),
        }
    }

    /// `path`, or the next free variant of it: `a-2.qcow2`.
    pub(super) fn free(&mut self, path: &Path) -> PathBuf {
        let stem = path.file_stem().unwrap_or_default().to_owned();
        let numbered = |number: u64| {
            let mut name: OsString = stem.clone();
            name.push(format!("-{number}"));
            if let Some(extension) = path.extension() {
                name.push(".");
                name.push(extension);
            }
            path.with_file_name(name)
        };
        let mut candidates = std::iter::once(path.to_owned()).chain((2..).map(numbered));
        let chosen = candidates.find(|path| self.is_free(path)).expect("numbers do not end");
        self.taken.push(chosen.clone());
        chosen
    }

    /// Reserves exactly this path, for a new file.
    pub(super) fn exactly(&mut self, path: &Path) -> Result<()> {
        if path.symlink_metadata().is_ok() {
            return Err(Refusal::PathTaken { path: path.to_owned() }.into());
        }
        self.replaced(path)
    }

    /// Reserves exactly this path, for a file that may replace an existing one.
    pub(super) fn replaced(&mut self, path: &Path) -> Result<()> {
        if self.taken.iter().any(|taken| taken == path) {
            return Err(Refusal::PathTaken { path: path.to_owned() }.into());
        }
        self.unused(path)?;
        self.taken.push(path.to_owned());
        Ok(())
    }

    /// Refuses a path that a machine uses.
    pub(super) fn unused(&self, path: &Path) -> Result<()> {
        match self.neighbours.user_of(path) {
            None => Ok(()),
            Some(machine) => Err(Refusal::InUse {
                path: path.to_owned(),
                machine: machine.to_owned(),
            }
            .into()),
        }
    }

    fn is_free(&self, path: &Path) -> bool {
        path.symlink_metadata().is_err()
            && self.neighbours.user_of(path).is_none()
            && self.taken.iter().all(|taken| taken != path)
    }
}

/// The folder of a path, which must exist.
pub(super) fn folder_of(path: &Path) -> Result<&Path> {
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    let folder = folder.unwrap_or(Path::new("."));
    if folder.is_dir() {
        return Ok(folder);
    }
    Err(Refusal::NoFolder {
        folder: folder.to_owned(),
    }
    .into())
}

/// A file name for an image of `format`: an extension of another format is replaced.
pub(super) fn with_extension(path: &Path, format: Format) -> PathBuf {
    let extension = path.extension().and_then(std::ffi::OsStr::to_str);
    let named = extension.and_then(|extension| Format::from_name(&extension.to_ascii_lowercase()));
    match named {
        Some(named) if named != format => path.with_extension(format.name()),
        _ => path.to_owned(),
    }
}

/// Bytes of a disk that are not known to be zero.
pub(super) fn data_bytes(contents: &dyn StoredContents, record: &DiskRecord) -> Result<u64> {
    let device = contents.device(record)?;
    let (mut pieces, mut next) = (0, 0);
    for_each_extent(&device, 0..device.size_bytes(), |extent| {
        if extent.kind == ExtentKind::Data {
            let first = (extent.offset / PIECE_BYTES).max(next);
            next = extent.end().div_ceil(PIECE_BYTES);
            pieces += next.saturating_sub(first);
        }
        Ok(())
    })?;
    Ok((pieces * PIECE_BYTES).min(record.size_bytes.next_multiple_of(PIECE_BYTES)))
}

/// The space that the files need on each file system, and the free space there.
///
/// For a target that is an existing image, this is an estimate: the difference between the snapshot's data and the
/// space that the image already takes is the minimum.
///
/// `memory` is the folder and the size of a file with the machine's memory.
pub(super) fn rooms(files: &[PlannedFile], memory: Option<(&Path, u64)>) -> Result<Vec<SpaceNeeded>> {
    let mut rooms: Vec<(u64, SpaceNeeded)> = Vec::new();
    for file in files {
        let needed_bytes = match file.way {
            FileWay::NewFile | FileWay::Replace | FileWay::SetAside => file.data_bytes.saturating_add(OVERHEAD_BYTES),
            FileWay::InPlace => match file.to.metadata() {
                Ok(found) if found.is_file() => file.data_bytes.saturating_sub(found.blocks() * 512),
                _ => 0,
            },
            // Shared blocks take no space.
            FileWay::BlockDevice | FileWay::Shared | FileWay::Cloned => 0,
        };
        if needed_bytes == 0 {
            continue;
        }
        let folder = match file.content {
            FileContent::TpmState(_) => nearest_folder(&file.to),
            FileContent::Disk(_) | FileContent::FirmwareVariables => folder_of(&file.to)?,
        };
        add_room(&mut rooms, folder, needed_bytes)?;
    }
    if let Some((folder, size_bytes)) = memory {
        add_room(&mut rooms, folder, size_bytes)?;
    }
    Ok(rooms.into_iter().map(|(_, room)| room).collect())
}

fn add_room(rooms: &mut Vec<(u64, SpaceNeeded)>, folder: &Path, needed_bytes: u64) -> Result<()> {
    let failed = |source| Error::File {
        action: "look at",
        path: folder.to_owned(),
        source,
    };
    let device = folder.metadata().map_err(failed)?.dev();
    if let Some((_, room)) = rooms.iter_mut().find(|(other, _)| *other == device) {
        room.needed_bytes = room.needed_bytes.saturating_add(needed_bytes);
        return Ok(());
    }
    let space = rustix::fs::statvfs(folder).map_err(|errno| failed(errno.into()))?;
    let room = SpaceNeeded {
        folder: folder.to_owned(),
        needed_bytes,
        free_bytes: space.f_bavail.saturating_mul(space.f_frsize),
    };
    rooms.push((device, room));
    Ok(())
}

/// Refuses a plan for which there is not enough space.
pub(super) fn check_rooms(rooms: &[SpaceNeeded]) -> Result<()> {
    match rooms.iter().find(|room| room.needed_bytes > room.free_bytes) {
        None => Ok(()),
        Some(room) => Err(Refusal::NoRoom {
            folder: room.folder.clone(),
            free_bytes: room.free_bytes,
            needed_bytes: room.needed_bytes,
        }
        .into()),
    }
}
