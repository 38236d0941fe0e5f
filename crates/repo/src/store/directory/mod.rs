//! A store in a directory, local or mounted.
//!
//! ```text
//! config                the one object of its kind
//! keys/<name>           likewise index, snapshots, forgotten, writers, condemned, relocations, protected, scrub
//! packs/3f/3fa9...      packs are spread over 256 folders
//! tmp/<32 digits>       objects on their way
//! ```
//!
//! An object is written to `tmp/`, synced, and only then linked to its name: `link` fails if the name is taken, on
//! every file system including NFS, so exactly one put succeeds. Each fsync fulfils one promise of [`Store`]:
//!
//! 1. of the temporary file, before the link: the object is complete or does not exist;
//! 2. of the folder, after the link: durable;
//! 3. of the parent folder, once per process and folder: the folder itself is durable, even if another process created
//!    it.
//!
//! An unnamed file (`O_TMPFILE`) would leave nothing behind after a crash, but NFS, SMB and most FUSE file systems do
//! not support it; a single method that works everywhere is tested everywhere.

mod handles;
mod temporary;
mod tree;

use std::fs::File;
use std::io::{Error as IoError, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use holdfast_block::{open_past_leases, to_usize};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, fstat, fstatvfs, futimens, openat, statat,
    unlinkat,
};
use rustix::io::Errno;

use self::handles::FileHandles;
use self::temporary::TemporaryFile;
use self::tree::{FolderEntry, FolderTree};
use super::name::is_fan_out;
use super::{ObjectKind, ObjectName, ObjectWriter, Put, Result, Store, StoreError};

/// The folder of unfinished objects.
const TEMPORARY_FOLDER: &str = "tmp";

/// A store in a directory.
///
/// The directory may be reached through a symbolic link, and may be read-only; inside it no link is followed, and only
/// regular files are objects. Folders are accessible to their owner only (0700, objects 0600), further restricted by
/// the umask.
#[derive(Debug)]
pub struct DirectoryStore {
    tree: Arc<FolderTree>,
    handles: FileHandles,
}

impl DirectoryStore {
    /// The store in the directory at `path`; [`StoreError::NoStore`] if there is none.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self {
            tree: Arc::new(FolderTree::open(path)?),
            handles: FileHandles::default(),
        })
    }

    /// The store in the directory at `path`, which is created durably if it does not exist; its parent directory must
    /// exist.
    pub fn create(path: &Path) -> Result<Self> {
        FolderTree::create(path)?;
        Self::open(path)
    }

    /// Removes temporary files that were last written before `written_before`, and returns the number of bytes freed.
    ///
    /// An active writer touches its file as it writes; a writer whose file was removed gets an error when it
    /// commits. Leftovers of crashed writers can therefore only be recognized by age, according to the clock of
    /// the file system.
    pub fn clean_temporary(&self, written_before: SystemTime) -> Result<u64> {
        let error = |source| self.tree.error("delete", TEMPORARY_FOLDER, source);
        let folder = match self.tree.open_folder(&[TEMPORARY_FOLDER]) {
            Err(source) if source.kind() == ErrorKind::NotFound => return Ok(0),
            other => other.map_err(error)?,
        };
        let limit = written_before
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |age| i64::try_from(age.as_secs()).unwrap_or(i64::MAX));
        let mut freed_bytes = 0;
        self.tree.walk(&folder, TEMPORARY_FOLDER, &mut |entry| {
            if entry.file_type != FileType::RegularFile || entry.modified_seconds >= limit {
                return Ok(());
            }
            match unlinkat(&folder, entry.name, AtFlags::empty()).map_err(IoError::from) {
                Ok(()) if !entry.is_linked => freed_bytes += entry.length,
                Err(source) if source.kind() != ErrorKind::NotFound => return Err(error(source)),
                _ => {}
            }
            Ok(())
        })?;
        Ok(freed_bytes)
    }

    /// The time of the file system's clock, which may be that of another host; `None` if there is no folder of
    /// temporary files.
    fn file_system_time(&self) -> Result<Option<SystemTime>> {
        let touched = self.tree.open_folder(&[TEMPORARY_FOLDER]).and_then(|folder| {
            let now = Timespec {
                tv_sec: 0,
                tv_nsec: UTIME_NOW,
            };
            futimens(
                &folder,
                &Timestamps {
                    last_access: now,
                    last_modification: now,
                },
            )?;
            folder.metadata()?.modified()
        });
        match touched {
            Ok(time) => Ok(Some(time)),
            Err(source) if source.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) => Err(self.tree.error("touch", TEMPORARY_FOLDER, source)),
        }
    }

    /// Opens the file of an object, which must be a regular one.
    fn open_object(&self, name: &ObjectName) -> Result<File> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NOCTTY;
        let file = self
            .tree
            .open_folder(&tree::folders(name))
            .and_then(|folder| {
                let open = |flags| openat(&folder, name.name(), flags, Mode::empty());
                Ok(File::from(open_past_leases(flags, open)?))
            })
            .and_then(|file| match file.metadata()? {
                regular if regular.is_file() => Ok(file),
                _ => Err(IoError::from(Errno::LOOP)),
            });
        file.map_err(|source| self.unusual_object_error("open", name, source))
    }

    /// Converts an error of the operating system about the object `name`, if its name may be taken by something
    /// else.
    ///
    /// A pack, a segment or a key whose name is not that of a regular file does not exist, as in a listing.
    fn unusual_object_error(&self, action: &'static str, name: &ObjectName, source: IoError) -> StoreError {
        let folder = self.tree.open_folder(&tree::folders(name)).ok();
        let stat = folder.and_then(|folder| statat(folder, name.name(), AtFlags::SYMLINK_NOFOLLOW).ok());
        let what = match stat.map(|stat| FileType::from_raw_mode(stat.st_mode)) {
            None | Some(FileType::RegularFile) => return self.tree.object_error(action, name, source),
            Some(FileType::Directory) => "a folder",
            Some(FileType::Symlink) => "a symbolic link",
            Some(_) => "a pipe, a socket or a device",
        };
        let name = name.clone();
        match name.kind() {
            ObjectKind::Pack | ObjectKind::Index | ObjectKind::Key => StoreError::NotFound { name },
            _ => StoreError::NotAnObject { name, what },
        }
    }

    /// An open file of the object, kept for the next read if it is a pack.
    fn handle(&self, name: &ObjectName) -> Result<Arc<File>> {
        if name.kind() != ObjectKind::Pack {
            return Ok(Arc::new(self.open_object(name)?));
        }
        if let Some(file) = self.handles.find(name) {
            // A deleted pack is not found, even if an open handle can still read its bytes.
            match fstat(&*file) {
                Ok(stat) if stat.st_nlink > 0 => return Ok(file),
                _ => self.handles.forget(name),
            }
        }
        let file = Arc::new(self.open_object(name)?);
        self.handles.keep(name, &file);
        Ok(file)
    }

    fn list_folder(&self, kind: ObjectKind, folders: &[&str], visit: &mut ListVisitor<'_>) -> Result<()> {
        self.entries(kind, folders, &mut |name, entry| visit(name, entry.length))
    }

    fn entries(
        &self,
        kind: ObjectKind,
        folders: &[&str],
        visit: &mut dyn FnMut(ObjectName, &FolderEntry<'_>) -> Result<()>,
    ) -> Result<()> {
        let path = folders.join("/");
        let folder = match self.tree.open_folder(folders) {
            Err(source) if source.kind() == ErrorKind::NotFound => return Ok(()),
            other => other.map_err(|source| self.tree.error("list", &path, source))?,
        };
        self.tree
            .walk(&folder, &path, &mut |entry| match listed(kind, folders, entry) {
                Some(name) => visit(name, entry),
                None => Ok(()),
            })
    }

    fn foreign_files_in(
        &self,
        kind: ObjectKind,
        folders: &[&str],
        visit: &mut dyn FnMut(String) -> Result<()>,
    ) -> Result<()> {
        let path = folders.join("/");
        let folder = match self.tree.open_folder(folders) {
            // An entry that is not a folder was reported at its own level.
            Err(source) if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(()),
            other => other.map_err(|source| self.tree.error("list", &path, source))?,
        };
        self.tree.walk(&folder, &path, &mut |entry| {
            let name = entry.name.to_string_lossy();
            if kind == ObjectKind::Pack && folders.len() == 1 && is_fan_out_folder(entry) {
                self.foreign_files_in(kind, &[kind.folder(), &name], visit)
            } else if object(kind, folders, entry).is_none() {
                visit(format!("{path}/{name}"))
            } else {
                Ok(())
            }
        })
    }
}

type ListVisitor<'a> = dyn FnMut(ObjectName, u64) -> Result<()> + 'a;

/// The object for which an `entry` of a folder is listed.
///
/// For kinds whose absence permits a deletion, every entry with a valid name is listed, even if it is not a regular
/// file: reading it is an error. A pack, a segment or a key that is not a regular file is skipped: others are used
/// instead.
fn listed(kind: ObjectKind, folders: &[&str], entry: &FolderEntry<'_>) -> Option<ObjectName> {
    match kind {
        ObjectKind::Config | ObjectKind::Key | ObjectKind::Pack | ObjectKind::Index => object(kind, folders, entry),
        ObjectKind::Snapshot
        | ObjectKind::Forgotten
        | ObjectKind::Writer
        | ObjectKind::Condemned
        | ObjectKind::Relocation
        | ObjectKind::Protected
        | ObjectKind::Scrub => ObjectName::new(kind, entry.name.to_str().ok()?).ok(),
    }
}

/// The object in an `entry` of the folder, if it is one and is in the correct folder.
fn object(kind: ObjectKind, folders: &[&str], entry: &FolderEntry<'_>) -> Option<ObjectName> {
    let name = ObjectName::new(kind, entry.name.to_str().ok()?).ok()?;
    (entry.file_type == FileType::RegularFile && tree::folders(&name) == folders).then_some(name)
}

fn is_fan_out_folder(entry: &FolderEntry<'_>) -> bool {
    entry.file_type == FileType::Directory && is_fan_out(entry.name.to_bytes())
}

impl Store for DirectoryStore {
    fn put(&self, name: &ObjectName, bytes: &[u8]) -> Result<Put> {
        if self.tree.has_object(name)? {
            self.tree.sync_folder_of(name)?;
            return Ok(Put::AlreadyExists);
        }
        log::debug!("writes {name}: {} bytes", bytes.len());
        let mut temporary = TemporaryFile::create(&self.tree, name)?;
        temporary.append(bytes)?;
        temporary.publish()
    }

    fn create(&self, name: &ObjectName) -> Result<Box<dyn ObjectWriter>> {
        log::debug!("writes {name}");
        Ok(Box::new(TemporaryFile::create(&self.tree, name)?))
    }

    fn get(&self, name: &ObjectName, length_max: u64) -> Result<Vec<u8>> {
        log::trace!("reads {name}");
        let file = self.open_object(name)?;
        let error = |source| self.tree.object_error("read", name, source);
        let length = file.metadata().map_err(error)?.len();
        if length > length_max {
            return Err(StoreError::TooLarge {
                name: name.clone(),
                length,
                length_max,
            });
        }
        let mut bytes = vec![0; to_usize(length)];
        file.read_exact_at(&mut bytes, 0).map_err(error)?;
        Ok(bytes)
    }

    fn get_range(&self, name: &ObjectName, offset: u64, buffer: &mut [u8]) -> Result<()> {
        log::trace!("reads {} bytes at {offset} of {name}", buffer.len());
        let mut file = self.handle(name)?;
        let mut answer = file.read_exact_at(buffer, offset);
        if matches!(&answer, Err(source) if source.kind() == ErrorKind::StaleNetworkFileHandle) {
            // Another host has deleted the pack, or replaced it by a repaired one.
            self.handles.forget(name);
            file = self.handle(name)?;
            answer = file.read_exact_at(buffer, offset);
        }
        let error = |source| self.tree.object_error("read", name, source);
        match answer {
            Err(source) if source.kind() == ErrorKind::UnexpectedEof => Err(StoreError::ShortObject {
                name: name.clone(),
                expected: offset.saturating_add(buffer.len() as u64),
                actual: file.metadata().map_err(error)?.len(),
            }),
            other => other.map_err(error),
        }
    }

    fn length(&self, name: &ObjectName) -> Result<u64> {
        let stat = self
            .tree
            .open_folder(&tree::folders(name))
            .and_then(|folder| Ok(statat(folder, name.name(), AtFlags::SYMLINK_NOFOLLOW)?))
            .and_then(|stat| match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => Ok(stat),
                _ => Err(IoError::from(Errno::LOOP)),
            })
            .map_err(|source| self.unusual_object_error("look up", name, source))?;
        Ok(stat.st_size.cast_unsigned())
    }

    fn list(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, u64) -> Result<()>) -> Result<()> {
        match kind {
            ObjectKind::Config => match self.length(&ObjectName::config()) {
                Ok(length) => visit(ObjectName::config(), length),
                Err(StoreError::NotFound { .. }) => Ok(()),
                Err(error) => Err(error),
            },
            ObjectKind::Pack => {
                let mut fan_outs = Vec::new();
                let folder = match self.tree.open_folder(&[kind.folder()]) {
                    Err(source) if source.kind() == ErrorKind::NotFound => return Ok(()),
                    other => other.map_err(|source| self.tree.error("list", kind.folder(), source))?,
                };
                self.tree.walk(&folder, kind.folder(), &mut |entry| {
                    if is_fan_out_folder(entry) {
                        fan_outs.push(entry.name.to_string_lossy().into_owned());
                    }
                    Ok(())
                })?;
                fan_outs
                    .iter()
                    .try_for_each(|fan_out| self.list_folder(kind, &[kind.folder(), fan_out], visit))
            }
            _ => self.list_folder(kind, &[kind.folder()], visit),
        }
    }

    fn ages(&self, kind: ObjectKind, visit: &mut dyn FnMut(ObjectName, Option<Duration>) -> Result<()>) -> Result<()> {
        let mut times = Vec::new();
        if kind == ObjectKind::Config || kind == ObjectKind::Pack {
            self.list(kind, &mut |name, _| {
                let modified = self.open_object(&name).and_then(|file| {
                    let found = file.metadata().and_then(|found| found.modified());
                    found.map_err(|source| self.tree.object_error("look up", &name, source))
                });
                match modified {
                    Ok(time) => times.push((name, time)),
                    Err(StoreError::NotFound { .. }) => {}
                    Err(error) => return Err(error),
                }
                Ok(())
            })?;
        } else {
            self.entries(kind, &[kind.folder()], &mut |name, entry| {
                times.push((name, entry.modified()));
                Ok(())
            })?;
        }
        if times.is_empty() {
            return Ok(());
        }
        let now =
            match TemporaryFile::create(&self.tree, &ObjectName::config()).and_then(TemporaryFile::modification_time) {
                Ok(now) => Some(now),
                Err(StoreError::ReadOnly { .. } | StoreError::Permission { .. } | StoreError::NoSpace { .. }) => None,
                Err(error) => return Err(error),
            };
        let age = |time| now.map(|now: SystemTime| now.duration_since(time).unwrap_or_default());
        times.into_iter().try_for_each(|(name, time)| visit(name, age(time)))
    }

    fn delete(&self, name: &ObjectName) -> Result<()> {
        log::debug!("deletes {name}");
        self.handles.forget(name);
        let deleted = self.tree.open_folder(&tree::folders(name)).and_then(|folder| {
            unlinkat(&folder, name.name(), AtFlags::empty())?;
            if name.kind() != ObjectKind::Pack {
                tree::sync(&folder)?;
            }
            Ok(())
        });
        match deleted {
            Err(source) if source.kind() != ErrorKind::NotFound => Err(self.tree.object_error("delete", name, source)),
            _ => Ok(()),
        }
    }

    fn foreign_files(&self, visit: &mut dyn FnMut(String) -> Result<()>) -> Result<()> {
        let kinds = ObjectKind::ALL.into_iter().filter(|kind| *kind != ObjectKind::Config);
        let folder = self
            .tree
            .open_folder(&[])
            .map_err(|source| self.tree.error("list", "the root", source))?;
        self.tree.walk(&folder, "the root", &mut |entry| {
            let name = entry.name.to_string_lossy();
            let known = match entry.file_type {
                FileType::RegularFile => name == ObjectKind::Config.folder(),
                // The root of a dedicated file system contains a `lost+found`.
                FileType::Directory => {
                    name == TEMPORARY_FOLDER || name == "lost+found" || kinds.clone().any(|kind| name == kind.folder())
                }
                _ => false,
            };
            if known { Ok(()) } else { visit(name.into_owned()) }
        })?;
        kinds
            .clone()
            .try_for_each(|kind| self.foreign_files_in(kind, &[kind.folder()], visit))
    }

    fn clean(&self, age: Duration) -> Result<u64> {
        match self.file_system_time()? {
            Some(now) => {
                self.clean_temporary(now - age.min(now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()))
            }
            None => Ok(0),
        }
    }

    fn describe(&self) -> String {
        self.tree.describe()
    }

    fn free_bytes(&self) -> Option<u64> {
        let space = self.tree.open_folder(&[]).ok().and_then(|root| fstatvfs(root).ok())?;
        Some(space.f_bavail.saturating_mul(space.f_frsize))
    }
}

#[cfg(test)]
mod tests;
