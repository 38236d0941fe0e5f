//! Removes files and folders of a root folder, without following links.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::root_path::open_below;

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Removes a file, or a folder with everything in it.
pub(super) fn remove_all(folder: &OwnedFd, name: &OsStr) -> io::Result<()> {
    match rustix::fs::unlinkat(folder, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) if is_directory(folder, name) => {}
        Err(error) => return Err(error.into()),
    }
    remove_content(&open_below(folder, name)?)?;
    Ok(rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR)?)
}

/// Empties a folder. Folders in it are moved up before they are emptied, so that the depth needs no open files.
pub(super) fn remove_content(folder: &OwnedFd) -> io::Result<()> {
    let names = |folder: &OwnedFd| -> io::Result<Vec<Vec<u8>>> {
        let readable = rustix::fs::openat(folder, ".", FOLDER, Mode::empty())?;
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&readable)? {
            let name = entry?.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                names.push(name);
            }
        }
        Ok(names)
    };
    let mut number = 0_u64;
    loop {
        let mut folders = Vec::new();
        for name in names(folder)? {
            match rustix::fs::unlinkat(folder, OsStr::from_bytes(&name), AtFlags::empty()) {
                Ok(()) => {}
                Err(Errno::ISDIR | Errno::PERM) => folders.push(name),
                Err(error) => return Err(error.into()),
            }
        }
        if folders.is_empty() {
            return Ok(());
        }
        for name in folders {
            let below = open_below(folder, OsStr::from_bytes(&name))?;
            for child in names(&below)? {
                match rustix::fs::unlinkat(&below, OsStr::from_bytes(&child), AtFlags::empty()) {
                    Ok(()) => {}
                    Err(Errno::ISDIR | Errno::PERM) => {
                        number += 1;
                        let moved = format!(".holdfast-removed-{number}");
                        let child = OsStr::from_bytes(&child);
                        let flags = rustix::fs::RenameFlags::NOREPLACE;
                        match rustix::fs::renameat_with(&below, child, folder, &moved, flags) {
                            // The next number.
                            Ok(()) | Err(Errno::EXIST) => {}
                            Err(error) => return Err(error.into()),
                        }
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            match rustix::fs::unlinkat(folder, OsStr::from_bytes(&name), AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOTEMPTY) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

pub(super) fn is_directory(folder: &OwnedFd, name: &OsStr) -> bool {
    let stat = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW);
    stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}
