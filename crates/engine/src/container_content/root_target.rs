//! A root folder that receives files.
//!
//! The time of a folder is set with its entry, and is kept when files are added to it later.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use holdfast_archive::{DeviceNumber, TreeEntry, TreeEntryKind};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Timestamps};
use rustix::io::Errno;

use super::file_attributes::{
    FileIdentity, Rights, has_default_acl, proc_path, remove_inherited_acls, set_attributes, timestamps,
};
use super::loss::{Account, LostFiles, shown};
use super::removal::{is_directory, remove_all, remove_content};
use super::root_path::{MissingFolders, bad_entry, components, keeping_time, modified_of, open_below, open_folder};
use super::{EntrySink, entry_error};
use crate::ContainerContentError;
use crate::job::{Error, Result};

const COPY_BYTES: usize = 1 << 20;
/// Folders of a user whose permissions are set at the end, because nothing could be added to them before.
const LOCKED_FOLDER_COUNT_MAX: usize = 100_000;
/// The folder that mkfs.ext4 creates.
pub(super) const LOST_AND_FOUND: &[u8] = b"lost+found";

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
const NODE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A root folder.
pub(super) struct RootTarget {
    root: OwnedFd,
    rights: Rights,
    parent: Option<OpenParent>,
    locked_folders: BTreeMap<Vec<u8>, u32>,
    /// Files that could not be created and are in the account: their further names cannot be created either.
    lost_files: LostFiles,
    has_lost_owners: bool,
}

/// The folder of the previous entry, which is often that of the next one.
struct OpenParent {
    path: Vec<u8>,
    folder: OwnedFd,
    times: Timestamps,
    has_default_acl: bool,
}

/// A place for an entry.
struct Place<'a> {
    folder: &'a OwnedFd,
    name: &'a OsStr,
    has_default_acl: bool,
}

/// Fails if `root` holds anything but an empty file system's `lost+found`.
pub(super) fn check_empty(root: &Path) -> Result<()> {
    let failed = |source: io::Error| Error::File {
        action: "open",
        path: root.to_owned(),
        source,
    };
    for entry in std::fs::read_dir(root).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if name.as_bytes() != LOST_AND_FOUND {
            return Err(ContainerContentError::RootNotEmpty {
                root: root.to_owned(),
                entry: name.to_string_lossy().into_owned(),
            }
            .into());
        }
    }
    Ok(())
}

impl RootTarget {
    pub(super) fn open(root: &Path) -> Result<Self> {
        let opened = rustix::fs::openat(CWD, root, FOLDER, Mode::empty());
        let root = opened.map_err(|source| Error::File {
            action: "open",
            path: root.to_owned(),
            source: source.into(),
        })?;
        Ok(Self {
            root,
            rights: Rights::of_process(),
            parent: None,
            locked_folders: BTreeMap::new(),
            lost_files: LostFiles::default(),
            has_lost_owners: false,
        })
    }

    pub(super) fn identity(&self) -> Result<FileIdentity> {
        let stat = rustix::fs::fstat(&self.root).map_err(|error| entry_error("look at", b"", error))?;
        Ok(FileIdentity::of(&stat))
    }

    /// Sets what had to wait, and makes everything durable.
    pub(super) fn finish(mut self, account: &mut Account<'_>) -> Result<()> {
        self.leave_parent()?;
        for (path, mode) in std::mem::take(&mut self.locked_folders).into_iter().rev() {
            let folder = open_folder(&self.root, &components(&path)?, MissingFolders::Fail);
            let set = folder.and_then(|folder| {
                Ok(rustix::fs::chmodat(
                    CWD,
                    proc_path(&folder),
                    Mode::from_raw_mode(mode),
                    AtFlags::empty(),
                )?)
            });
            if let Err(error) = set {
                account.lose(&path, format!("the permissions: {error}"));
            }
        }
        rustix::fs::syncfs(&self.root).map_err(|error| entry_error("sync", b"", error))
    }

    /// Removes `name` in the folder `parent` with everything below, as a layer of an image requests it; nothing happens if
    /// it does not exist.
    pub(super) fn remove(&mut self, parent: &[u8], name: &[u8]) -> Result<()> {
        let path = [parent, b"/", name].concat();
        let Some(folder) = self.existing_folder(&components(parent)?, &path)? else {
            return Ok(());
        };
        let removed = keeping_time(&folder, || remove_all(&folder, OsStr::from_bytes(name)));
        removed.map_err(|error| entry_error("remove", &path, error))
    }

    /// Removes everything in a folder; nothing happens if it does not exist, or is a link: the folder that a link leads to
    /// is another one.
    pub(super) fn clear(&mut self, path: &[u8]) -> Result<()> {
        let parts = components(path)?;
        let folder = match parts.split_last() {
            None => self.existing_folder(&[], path)?,
            Some((name, parent)) => match self.existing_folder(parent, path)? {
                None => None,
                Some(parent) => if_exists(open_below(&parent, OsStr::from_bytes(name)))
                    .map_err(|error| entry_error("clear", path, error))?,
            },
        };
        let Some(folder) = folder else {
            return Ok(());
        };
        let cleared = keeping_time(&folder, || remove_content(&folder));
        cleared.map_err(|error| entry_error("clear", path, error))
    }

    /// Removes the file or link at the path of a folder that a layer has: a link would lead the whiteouts in this folder to
    /// another one.
    pub(super) fn make_way_for_folder(&mut self, path: &[u8]) -> Result<()> {
        let parts = components(path)?;
        let Some((name, parent)) = parts.split_last() else {
            return Ok(());
        };
        let name = OsStr::from_bytes(name);
        match self.existing_folder(parent, path)? {
            Some(folder) if !is_directory(&folder, name) => {
                let removed = keeping_time(&folder, || remove_all(&folder, name));
                removed.map_err(|error| entry_error("replace", path, error))
            }
            _ => Ok(()),
        }
    }

    /// Opens the folder `parts`, unless it does not exist. `path` is the entry that is about it.
    fn existing_folder(&mut self, parts: &[&[u8]], path: &[u8]) -> Result<Option<OwnedFd>> {
        self.leave_parent()?;
        let opened = if_exists(open_folder(&self.root, parts, MissingFolders::Fail));
        opened.map_err(|error| entry_error("open the folder of", path, error))
    }

    /// The parent of an entry, which stays open for the next entry.
    fn place<'a>(&'a mut self, path: &[u8], parts: &[&'a [u8]]) -> Result<Place<'a>> {
        let Some((name, parent)) = parts.split_last() else {
            return Err(bad_entry(path, "is the root folder, which has to be a folder"));
        };
        let parent_path = parent.join(&b'/');
        if self.parent.as_ref().is_none_or(|open| open.path != parent_path) {
            self.leave_parent()?;
            let opened = open_folder(&self.root, parent, MissingFolders::Create).and_then(|folder| {
                let folder = rustix::fs::openat(&folder, ".", FOLDER, Mode::empty())?;
                let stat = rustix::fs::fstat(&folder)?;
                Ok(OpenParent {
                    path: parent_path,
                    times: modified_of(&stat),
                    has_default_acl: has_default_acl(&folder),
                    folder,
                })
            });
            self.parent = Some(opened.map_err(|error| entry_error("open the folder of", path, error))?);
        }
        let parent = self.parent.as_ref().expect("it was opened");
        Ok(Place {
            folder: &parent.folder,
            name: OsStr::from_bytes(name),
            has_default_acl: parent.has_default_acl,
        })
    }

    /// Closes the folder of the previous entry, with the time that it had before files were added.
    fn leave_parent(&mut self) -> Result<()> {
        if let Some(parent) = self.parent.take() {
            let set = rustix::fs::futimens(&parent.folder, &parent.times);
            set.map_err(|error| entry_error("set the time of", &parent.path, error))?;
        }
        Ok(())
    }

    /// Sets the attributes of an open file, and reports those that it cannot have.
    fn set(&mut self, file: &OwnedFd, entry: &TreeEntry, account: &mut Account<'_>) -> Result<()> {
        let mut mode = entry.mode;
        if self.rights == Rights::User {
            // Without its owner, a program must not run with the rights of the one who restored it.
            if !self.has_own_owner(file, entry, account) {
                mode &= 0o1777;
            }
            let is_locked = entry.kind == TreeEntryKind::Directory && mode & 0o700 != 0o700;
            if is_locked && self.locked_folders.len() < LOCKED_FOLDER_COUNT_MAX {
                self.locked_folders.insert(entry.path.clone(), mode);
                mode |= 0o700;
            }
        }
        let unset = set_attributes(file, entry, mode, self.rights);
        let unset = unset.map_err(|error| entry_error("set owner and permissions of", &entry.path, error))?;
        for attribute in unset {
            account.lose(&entry.path, attribute.to_string());
        }
        if entry.unresolved_acl_count > 0 {
            let count = entry.unresolved_acl_count;
            account.lose(
                &entry.path,
                format!("{count} entries of its ACL: they have names instead of numbers"),
            );
        }
        Ok(())
    }

    /// Whether the owner is the one that the process gives to its files; otherwise reports it, once for all files.
    fn has_own_owner(&mut self, file: &OwnedFd, entry: &TreeEntry, account: &mut Account<'_>) -> bool {
        let is_own = rustix::fs::fstat(file).is_ok_and(|stat| stat.st_uid == entry.uid && stat.st_gid == entry.gid);
        if !is_own && !self.has_lost_owners {
            self.has_lost_owners = true;
            let reason = "the owner of this file and of others: only root can set owners";
            account.lose(&entry.path, reason);
        }
        is_own
    }

    fn directory(&mut self, entry: &TreeEntry, parts: &[&[u8]], account: &mut Account<'_>) -> Result<()> {
        let failed = |error: io::Error| entry_error("create", &entry.path, error);
        let mut inherits = false;
        if !parts.is_empty() {
            let place = self.place(&entry.path, parts)?;
            inherits = place.has_default_acl;
            let made = rustix::fs::mkdirat(place.folder, place.name, Mode::RWXU);
            if made == Err(Errno::EXIST) && !is_directory(place.folder, place.name) {
                remove_all(place.folder, place.name).map_err(failed)?;
                rustix::fs::mkdirat(place.folder, place.name, Mode::RWXU).map_err(|error| failed(error.into()))?;
            } else if made != Err(Errno::EXIST) {
                made.map_err(|error| failed(error.into()))?;
            }
        }
        // Its own time must not be replaced by an earlier one of the same folder.
        self.leave_parent()?;
        let folder = self.exact_folder(parts).map_err(failed)?;
        if inherits {
            remove_inherited_acls(&folder, entry);
        }
        self.set(&folder, entry, account)?;
        let times = timestamps(entry.modified);
        rustix::fs::utimensat(CWD, proc_path(&folder), &times, AtFlags::empty())
            .map_err(|error| failed(error.into()))?;
        account.counts.directory_count += 1;
        Ok(())
    }

    /// Opens a folder that is no link itself.
    fn exact_folder(&self, parts: &[&[u8]]) -> io::Result<OwnedFd> {
        match parts.split_last() {
            None => open_below(&self.root, OsStr::new(".")),
            Some((name, parent)) => open_below(
                &open_folder(&self.root, parent, MissingFolders::Fail)?,
                OsStr::from_bytes(name),
            ),
        }
    }

    fn file(
        &mut self,
        entry: &TreeEntry,
        parts: &[&[u8]],
        data: &mut dyn Read,
        account: &mut Account<'_>,
    ) -> Result<()> {
        let failed = |error: io::Error| entry_error("write", &entry.path, error);
        let place = self.place(&entry.path, parts)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let create = || rustix::fs::openat(place.folder, place.name, flags, Mode::RUSR | Mode::WUSR);
        let file = replacing(&place, create).map_err(failed)?;
        if place.has_default_acl {
            remove_inherited_acls(&file, entry);
        }
        let mut buffer = Vec::new();
        for extent in &entry.extents {
            let mut at = extent.start;
            while at < extent.end {
                let length = usize::try_from(extent.end - at).unwrap_or(COPY_BYTES).min(COPY_BYTES);
                buffer.resize(length.max(buffer.len()), 0);
                let piece = buffer.get_mut(..length).unwrap_or_default();
                data.read_exact(piece)
                    .map_err(|error| entry_error("read", &entry.path, error))?;
                write_all_at(&file, piece, at).map_err(failed)?;
                at += length as u64;
                account.advance(length as u64)?;
            }
        }
        if entry.extents.last().is_none_or(|last| last.end < entry.size_bytes) {
            rustix::fs::ftruncate(&file, entry.size_bytes).map_err(|error| failed(error.into()))?;
        }
        self.set(&file, entry, account)?;
        rustix::fs::futimens(&file, &timestamps(entry.modified)).map_err(|error| failed(error.into()))?;
        account.counts.file_count += 1;
        Ok(())
    }

    fn hard_link(
        &mut self,
        entry: &TreeEntry,
        parts: &[&[u8]],
        target: &[u8],
        account: &mut Account<'_>,
    ) -> Result<()> {
        let target_parts = components(target).map_err(|_| {
            bad_entry(
                &entry.path,
                format!("is a link to {:?}, which leads out of a folder", shown(target)),
            )
        })?;
        let missing = |error: io::Error| {
            let target = shown(target);
            bad_entry(
                &entry.path,
                format!("is another name of {target:?}, which does not exist before it: {error}"),
            )
        };
        let Some((target_name, target_parent)) = target_parts.split_last() else {
            return Err(bad_entry(&entry.path, "is another name of the root folder"));
        };
        let target_folder = open_folder(&self.root, target_parent, MissingFolders::Fail).map_err(missing)?;
        let target_name = OsStr::from_bytes(target_name);
        let stat = rustix::fs::statat(&target_folder, target_name, AtFlags::SYMLINK_NOFOLLOW);
        if matches!(stat, Err(Errno::NOENT)) && self.lost_files.has(&target_parts) {
            let reason = format!("another name of {:?}, which could not be created", shown(target));
            account.lose(&entry.path, reason);
            self.lost_files.add(parts);
            return Ok(());
        }
        let stat = stat.map_err(|error| missing(error.into()))?;
        let place = self.place(&entry.path, parts)?;
        let existing = rustix::fs::statat(place.folder, place.name, AtFlags::SYMLINK_NOFOLLOW);
        // The file itself: if it were replaced, it would be lost.
        let is_done = existing.is_ok_and(|existing| FileIdentity::of(&existing) == FileIdentity::of(&stat));
        if !is_done {
            let link = || rustix::fs::linkat(&target_folder, target_name, place.folder, place.name, AtFlags::empty());
            replacing(&place, link).map_err(|error| entry_error("create", &entry.path, error))?;
        }
        account.counts.hard_link_count += 1;
        Ok(())
    }

    /// Creates a symbolic link, a device or a pipe.
    fn node(&mut self, entry: &TreeEntry, parts: &[&[u8]], account: &mut Account<'_>) -> Result<()> {
        let failed = |error: io::Error| entry_error("create", &entry.path, error);
        let is_user = self.rights == Rights::User;
        let place = self.place(&entry.path, parts)?;
        let node = |kind, device: DeviceNumber| {
            let device = rustix::fs::makedev(device.major, device.minor);
            replacing(&place, || {
                rustix::fs::mknodat(place.folder, place.name, kind, Mode::RUSR, device)
            })
        };
        let none = DeviceNumber { major: 0, minor: 0 };
        let created = match &entry.kind {
            TreeEntryKind::SymbolicLink(target) => {
                let target = OsStr::from_bytes(target);
                replacing(&place, || rustix::fs::symlinkat(target, place.folder, place.name))
            }
            TreeEntryKind::CharacterDevice(device) => node(FileType::CharacterDevice, *device),
            TreeEntryKind::BlockDevice(device) => node(FileType::BlockDevice, *device),
            _ => node(FileType::Fifo, none),
        };
        if let Err(error) = created {
            let is_refused = matches!(error.raw_os_error().map(Errno::from_raw_os_error), Some(Errno::PERM));
            let is_device = matches!(
                entry.kind,
                TreeEntryKind::CharacterDevice(_) | TreeEntryKind::BlockDevice(_)
            );
            if is_device && is_refused {
                let why = if is_user {
                    "only root can create devices"
                } else {
                    "the system does not permit devices"
                };
                account.lose(&entry.path, format!("a device: {why}"));
                self.lost_files.add(parts);
                return Ok(());
            }
            return Err(failed(error));
        }
        let (folder, name) = (place.folder, place.name);
        let file = rustix::fs::openat(folder, name, NODE, Mode::empty()).map_err(|error| failed(error.into()))?;
        if place.has_default_acl && !matches!(entry.kind, TreeEntryKind::SymbolicLink(_)) {
            remove_inherited_acls(&file, entry);
        }
        let times = timestamps(entry.modified);
        rustix::fs::utimensat(folder, name, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(|error| failed(error.into()))?;
        self.set(&file, entry, account)?;
        match entry.kind {
            TreeEntryKind::SymbolicLink(_) => account.counts.link_count += 1,
            _ => account.counts.special_count += 1,
        }
        Ok(())
    }
}

impl EntrySink for RootTarget {
    fn entry(&mut self, entry: &TreeEntry, data: &mut dyn Read, account: &mut Account<'_>) -> Result<()> {
        account.job.interrupt.check()?;
        let parts = components(&entry.path)?;
        match &entry.kind {
            TreeEntryKind::Directory => self.directory(entry, &parts, account),
            TreeEntryKind::File => self.file(entry, &parts, data, account),
            TreeEntryKind::HardLink(target) => self.hard_link(entry, &parts, target, account),
            TreeEntryKind::Unknown(letter) => {
                account.lose(
                    &entry.path,
                    format!("a file of the unknown type {:?}", char::from(*letter)),
                );
                self.lost_files.add(&parts);
                Ok(())
            }
            _ => self.node(entry, &parts, account),
        }
    }
}

/// `None` if there is no such folder. Other errors must not look like that: what a layer removes would stay.
fn if_exists(opened: io::Result<OwnedFd>) -> io::Result<Option<OwnedFd>> {
    match opened {
        Ok(folder) => Ok(Some(folder)),
        Err(error) => match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            _ => Err(error),
        },
    }
}

/// Creates a file, in the place of one that has its name: a later entry replaces an earlier one.
fn replacing<T>(place: &Place<'_>, create: impl Fn() -> rustix::io::Result<T>) -> io::Result<T> {
    match create() {
        Err(Errno::EXIST) => {
            remove_all(place.folder, place.name)?;
            Ok(create()?)
        }
        other => Ok(other?),
    }
}

fn write_all_at(file: &OwnedFd, bytes: &[u8], offset: u64) -> io::Result<()> {
    let mut rest = bytes;
    let mut at = offset;
    while !rest.is_empty() {
        let count = rustix::io::retry_on_intr(|| rustix::io::pwrite(file, rest, at))?;
        if count == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        rest = rest.get(count..).unwrap_or_default();
        at += count as u64;
    }
    Ok(())
}
