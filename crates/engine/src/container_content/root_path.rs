//! Resolves paths in a root folder.
//!
//! A path of an entry is resolved as a process with this root folder would do it, by this process and not by the kernel: one
//! component at a time, each opened without following links. A symbolic link is read, and its target is resolved from the
//! folder that holds it, or from the root folder. So neither `..` nor a link leads out of the root folder.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_OMIT};
use rustix::io::Errno;

use super::file_attributes::proc_path;
use super::loss::shown;
use crate::ContainerContentError;
use crate::job::{Error, Result};

/// Components of a path, and so the depth of a tree.
pub(super) const DEPTH_MAX: usize = 1000;
/// Links that one path may follow, as in Linux.
const LINK_COUNT_MAX: usize = 40;
const SEARCH: OFlags = OFlags::PATH
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Whether folders of a path are created.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum MissingFolders {
    Create,
    Fail,
}

/// The components of a path in an archive, without those that stay in place.
///
/// # Errors
/// A component leads upwards, or there are too many.
pub(super) fn components(path: &[u8]) -> Result<Vec<&[u8]>> {
    let parts = path.split(|byte| *byte == b'/');
    let parts = parts.filter(|part| !part.is_empty() && *part != b".");
    // A hostile path of megabytes has millions of them.
    let parts: Vec<&[u8]> = parts.take(DEPTH_MAX + 1).collect();
    let reason = if parts.contains(&&b".."[..]) {
        "leads out of a folder by \"..\""
    } else if parts.len() > DEPTH_MAX {
        "lies deeper than 1000 folders"
    } else {
        return Ok(parts);
    };
    Err(bad_entry(path, reason))
}

pub(super) fn bad_entry(path: &[u8], reason: impl Into<String>) -> Error {
    ContainerContentError::BadEntry {
        entry: shown(path),
        reason: reason.into(),
    }
    .into()
}

/// Opens a folder, from the root folder on.
pub(super) fn open_folder(root: &OwnedFd, path: &[&[u8]], missing: MissingFolders) -> io::Result<OwnedFd> {
    let mut pending: Vec<Vec<u8>> = path.iter().rev().map(|name| name.to_vec()).collect();
    let mut names: Vec<Vec<u8>> = Vec::new();
    let mut folder = open_below(root, OsStr::new("."))?;
    let mut link_count = 0;
    while let Some(name) = pending.pop() {
        if name == b".." {
            names.pop();
            folder = open_below(root, OsStr::new("."))?;
            for name in &names {
                folder = open_below(&folder, OsStr::from_bytes(name))?;
            }
            continue;
        }
        match open_below(&folder, OsStr::from_bytes(&name)) {
            Ok(below) => {
                folder = below;
                names.push(name);
            }
            Err(error)
                if error.raw_os_error() == Some(Errno::NOENT.raw_os_error()) && missing == MissingFolders::Create =>
            {
                keeping_time(&folder, || make_folder(&folder, OsStr::from_bytes(&name)))?;
                pending.push(name);
            }
            Err(error) => {
                let Ok(target) = rustix::fs::readlinkat(&folder, OsStr::from_bytes(&name), Vec::new()) else {
                    return Err(error);
                };
                link_count += 1;
                if link_count > LINK_COUNT_MAX {
                    return Err(Errno::LOOP.into());
                }
                let target = target.to_bytes();
                if target.starts_with(b"/") {
                    names.clear();
                    folder = open_below(root, OsStr::new("."))?;
                }
                let parts = target.split(|byte| *byte == b'/').rev();
                pending.extend(
                    parts
                        .filter(|part| !part.is_empty() && *part != b".")
                        .map(<[u8]>::to_vec),
                );
            }
        }
        if names.len() + pending.len() > DEPTH_MAX {
            return Err(Errno::NAMETOOLONG.into());
        }
    }
    Ok(folder)
}

/// Creates a folder that no entry describes. Its permissions depend neither on the umask of the process nor on a default
/// ACL of its parent.
fn make_folder(parent: &OwnedFd, name: &OsStr) -> io::Result<()> {
    rustix::fs::mkdirat(parent, name, Mode::RWXU)?;
    let folder = open_below(parent, name)?;
    let mode = Mode::from_raw_mode(0o755);
    Ok(rustix::fs::chmodat(CWD, proc_path(&folder), mode, AtFlags::empty())?)
}

/// Changes what is in a folder, which keeps its time.
pub(super) fn keeping_time<T>(folder: &OwnedFd, change: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let times = modified_of(&rustix::fs::fstat(folder)?);
    let changed = change()?;
    rustix::fs::utimensat(CWD, proc_path(folder), &times, AtFlags::empty())?;
    Ok(changed)
}

pub(super) fn modified_of(stat: &Stat) -> Timestamps {
    Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        },
        last_modification: Timespec {
            tv_sec: stat.st_mtime,
            tv_nsec: i64::try_from(stat.st_mtime_nsec).unwrap_or(0),
        },
    }
}

/// Opens a folder in a folder, if it is no link.
pub(super) fn open_below(folder: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(folder, name, SEARCH, Mode::empty())?)
}
