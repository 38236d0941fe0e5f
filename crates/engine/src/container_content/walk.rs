//! Reads a directory tree on one file system, in the order of names.
//!
//! Every file is opened relative to its folder and without following links, so that a tree that changes meanwhile does not
//! lead elsewhere. Names of one folder are kept in memory, and so are the numbers of files with several names.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use holdfast_archive::{DeviceNumber, TreeEntry, TreeEntryKind, TreeTime};
use holdfast_block::open_past_leases;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::file_attributes::{FileIdentity, read_xattrs};
use super::loss::Account;
use super::root_path::bad_entry;
use super::root_target::LOST_AND_FOUND;
use super::source_file::{ExtentReader, extents_of};
use super::{EntrySink, entry_error};
use crate::job::{Error, Result};

/// Folders that are open at the same time, below the limit on open files.
const DEPTH_MAX: usize = 500;
/// Bytes of remembered paths of files with several names.
const LINKED_PATH_BYTES_MAX: usize = 256 << 20;

const NODE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const FOLDER: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
const FILE: OFlags = OFlags::RDONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NOCTTY)
    .union(OFlags::CLOEXEC);

/// Passes a tree to a sink.
pub(super) struct TreeWalker<'a, 'b> {
    sink: &'a mut dyn EntrySink,
    account: &'a mut Account<'b>,
    /// The target, if it may be in the tree.
    excluded: Option<FileIdentity>,
    device: u64,
    linked: LinkedFiles,
}

/// Files with several names: the first of them, and how many are still missing.
#[derive(Default)]
struct LinkedFiles {
    files: HashMap<FileIdentity, LinkedFile>,
    path_bytes: usize,
}

struct LinkedFile {
    path: Vec<u8>,
    missing_count: u64,
}

/// A file in a folder.
struct Found<'f> {
    folder: &'f OwnedFd,
    name: &'f OsStr,
    path: Vec<u8>,
    stat: Stat,
}

impl<'a, 'b> TreeWalker<'a, 'b> {
    pub(super) fn new(
        sink: &'a mut dyn EntrySink,
        account: &'a mut Account<'b>,
        excluded: Option<FileIdentity>,
    ) -> Self {
        Self {
            sink,
            account,
            excluded,
            device: 0,
            linked: LinkedFiles::default(),
        }
    }

    /// Passes everything in `root`, and first the folder itself with the path `./`.
    ///
    /// # Errors
    /// The folder cannot be read; the sink; an interruption. Files that cannot be read are losses.
    pub(super) fn walk(mut self, root: &Path) -> Result<()> {
        let failed = |source: Errno| Error::File {
            action: "read",
            path: root.to_owned(),
            source: source.into(),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(CWD, root, flags, Mode::empty()).map_err(failed)?;
        let stat = rustix::fs::fstat(&folder).map_err(failed)?;
        self.device = stat.st_dev;
        let mut entry = entry_of(b"./".to_vec(), &stat, TreeEntryKind::Directory);
        self.read_attributes(&folder, &mut entry);
        self.sink.entry(&entry, &mut io::empty(), self.account)?;
        self.content(&folder, b"", 0)
    }

    fn content(&mut self, folder: &OwnedFd, path: &[u8], depth: usize) -> Result<()> {
        if depth > DEPTH_MAX {
            return Err(bad_entry(
                path,
                format!("has folders in folders, more than {DEPTH_MAX}"),
            ));
        }
        let names = match sorted_names(folder) {
            Ok(names) => names,
            Err(error) => {
                self.account.lose(path, format!("the content of this folder: {error}"));
                return Ok(());
            }
        };
        for name in names {
            self.account.job.interrupt.check()?;
            let path = [path, &name].concat();
            let name = OsStr::from_bytes(&name);
            match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => self.file(
                    &Found {
                        folder,
                        name,
                        path,
                        stat,
                    },
                    depth,
                )?,
                Err(error) => self.lose_unread(&path, error),
            }
        }
        Ok(())
    }

    fn lose_unread(&mut self, path: &[u8], error: impl Into<io::Error>) {
        let error = error.into();
        let reason = match error.kind() {
            io::ErrorKind::NotFound => "the file: it was removed meanwhile".to_owned(),
            _ => format!("the file: {error}"),
        };
        self.account.lose(path, reason);
    }

    fn file(&mut self, found: &Found<'_>, depth: usize) -> Result<()> {
        let kind = FileType::from_raw_mode(found.stat.st_mode);
        if found.stat.st_dev != self.device && kind != FileType::Directory {
            let reason = "the file: another file system is mounted on it";
            self.account.lose(&found.path, reason);
            return Ok(());
        }
        match kind {
            FileType::Directory => return self.directory(found, depth),
            FileType::Socket => {
                self.account
                    .lose(&found.path, "a socket, which only its program can create");
                return Ok(());
            }
            _ => {}
        }
        if let Some(first) = self.linked.earlier(found) {
            let entry = entry_of(found.path.clone(), &found.stat, TreeEntryKind::HardLink(first));
            return self.sink.entry(&entry, &mut io::empty(), self.account);
        }
        let is_passed = match kind {
            FileType::RegularFile => self.regular(found)?,
            _ => self.node(found, kind)?,
        };
        if is_passed && found.stat.st_nlink > 1 && !self.linked.remember(found) {
            let reason = "its further names: too many files have several names, and they become separate files";
            self.account.lose(&found.path, reason);
        }
        Ok(())
    }

    fn directory(&mut self, found: &Found<'_>, depth: usize) -> Result<()> {
        let opened = rustix::fs::openat(found.folder, found.name, FOLDER, Mode::empty());
        let opened = opened.and_then(|folder| rustix::fs::fstat(&folder).map(|stat| (folder, stat)));
        let (folder, stat) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                self.lose_unread(&found.path, error);
                return Ok(());
            }
        };
        if self.excluded == Some(FileIdentity::of(&stat)) {
            self.account.lose(&found.path, "the target itself");
            return Ok(());
        }
        if depth == 0 && found.path == LOST_AND_FOUND && is_own_lost_and_found(&folder, &stat) {
            return Ok(());
        }
        let path = [&found.path[..], b"/"].concat();
        let mut entry = entry_of(path.clone(), &stat, TreeEntryKind::Directory);
        self.read_attributes(&folder, &mut entry);
        self.sink.entry(&entry, &mut io::empty(), self.account)?;
        if stat.st_dev != self.device {
            self.account.lose(
                &path,
                "the content of this folder: another file system is mounted on it",
            );
            return Ok(());
        }
        self.content(&folder, &path, depth + 1)
    }

    fn regular(&mut self, found: &Found<'_>) -> Result<bool> {
        // A pipe that took the place of a file must not block.
        let open = |flags| rustix::fs::openat(found.folder, found.name, flags, Mode::empty());
        let opened = open_past_leases(FILE, open);
        let opened = opened.and_then(|file| rustix::fs::fstat(&file).map(|stat| (file, stat)));
        let (file, stat) = match opened {
            Ok((file, stat)) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => (file, stat),
            Ok(_) => {
                self.account.lose(&found.path, "the file: it was replaced meanwhile");
                return Ok(false);
            }
            Err(error) => {
                self.lose_unread(&found.path, error);
                return Ok(false);
            }
        };
        let mut entry = entry_of(found.path.clone(), &stat, TreeEntryKind::File);
        entry.size_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        let allocated_bytes = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
        let extents = extents_of(&file, entry.size_bytes, allocated_bytes);
        entry.extents = extents.map_err(|error| entry_error("read", &found.path, error))?;
        self.read_attributes(&file, &mut entry);
        let mut data = ExtentReader::new(&file, &entry.extents);
        self.sink.entry(&entry, &mut data, self.account)?;
        if data.is_shorter {
            self.account.lose(
                &found.path,
                "its end, which is zero: the file became shorter while it was read",
            );
        }
        Ok(true)
    }

    /// A symbolic link, a device or a pipe.
    fn node(&mut self, found: &Found<'_>, kind: FileType) -> Result<bool> {
        let device = || DeviceNumber {
            major: rustix::fs::major(found.stat.st_rdev),
            minor: rustix::fs::minor(found.stat.st_rdev),
        };
        let kind = match kind {
            FileType::Symlink => match rustix::fs::readlinkat(found.folder, found.name, Vec::new()) {
                Ok(target) => TreeEntryKind::SymbolicLink(target.into_bytes()),
                Err(error) => {
                    self.lose_unread(&found.path, error);
                    return Ok(false);
                }
            },
            FileType::CharacterDevice => TreeEntryKind::CharacterDevice(device()),
            FileType::BlockDevice => TreeEntryKind::BlockDevice(device()),
            FileType::Fifo => TreeEntryKind::Fifo,
            _ => {
                self.account.lose(&found.path, "a file of an unknown type");
                return Ok(false);
            }
        };
        let mut entry = entry_of(found.path.clone(), &found.stat, kind);
        match rustix::fs::openat(found.folder, found.name, NODE, Mode::empty()) {
            Ok(file) => self.read_attributes(&file, &mut entry),
            Err(error) => self.account.lose(&found.path, format!("its attributes: {error}")),
        }
        self.sink.entry(&entry, &mut io::empty(), self.account)?;
        Ok(true)
    }

    fn read_attributes(&mut self, file: &OwnedFd, entry: &mut TreeEntry) {
        match read_xattrs(file) {
            Ok(attributes) => entry.attributes = attributes,
            Err(error) => self
                .account
                .lose(&entry.path, format!("its extended attributes: {error}")),
        }
    }
}

impl LinkedFiles {
    /// The first name of a file that came before.
    fn earlier(&mut self, found: &Found<'_>) -> Option<Vec<u8>> {
        if found.stat.st_nlink < 2 {
            return None;
        }
        let identity = FileIdentity::of(&found.stat);
        let file = self.files.get_mut(&identity)?;
        file.missing_count -= 1;
        if file.missing_count > 0 {
            return Some(file.path.clone());
        }
        let file = self.files.remove(&identity)?;
        self.path_bytes -= file.path.len();
        Some(file.path)
    }

    /// Whether there was room for one more.
    fn remember(&mut self, found: &Found<'_>) -> bool {
        let path = found.path.clone();
        if self.path_bytes + path.len() > LINKED_PATH_BYTES_MAX {
            return false;
        }
        self.path_bytes += path.len();
        let missing_count = found.stat.st_nlink - 1;
        let file = LinkedFile { path, missing_count };
        self.files.insert(FileIdentity::of(&found.stat), file);
        true
    }
}

/// Whether it is the empty folder that mkfs created: the target has its own.
fn is_own_lost_and_found(folder: &OwnedFd, stat: &Stat) -> bool {
    stat.st_uid == 0 && stat.st_mode & 0o7777 == 0o700 && sorted_names(folder).is_ok_and(|names| names.is_empty())
}

fn sorted_names(folder: &OwnedFd) -> io::Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(folder)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

fn entry_of(path: Vec<u8>, stat: &Stat, kind: TreeEntryKind) -> TreeEntry {
    TreeEntry {
        path,
        kind,
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        modified: TreeTime {
            seconds: stat.st_mtime,
            nanoseconds: u32::try_from(stat.st_mtime_nsec).unwrap_or(0),
        },
        attributes: Vec::new(),
        unresolved_acl_count: 0,
        size_bytes: 0,
        extents: Vec::new(),
        offset: 0,
    }
}
