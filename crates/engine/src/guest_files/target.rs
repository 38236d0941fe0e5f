//! The folder that receives files of a guest.
//!
//! Names and links of a guest must not lead out of the folder. Every folder is opened relative to the one above it, by
//! one name, and without following links; a file is always a new file.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use holdfast_guest_files::Metadata;
use rustix::fs::{
    AtFlags, CWD, Gid, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, Uid, chownat, fchmod, fchown, fstat, ftruncate,
    futimens, mkdirat, openat, renameat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;

/// How existing files in the target folder are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TargetConflicts {
    /// They stay, and are reported.
    #[default]
    Keep,
    /// Files and links are replaced by files and links; folders are never replaced.
    Replace,
}

/// Whether owners are restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owners {
    Restore,
    /// A user other than root can only own files.
    Own,
}

/// A folder in the target.
#[derive(Debug)]
pub(super) struct TargetFolder {
    folder: OwnedFd,
}

/// A new file, which has its name when it is complete.
#[derive(Debug)]
pub(super) struct TargetFile<'a> {
    folder: &'a TargetFolder,
    file: OwnedFd,
    /// The name while it is written.
    partial: String,
}

fn name(bytes: &[u8]) -> &OsStr {
    OsStr::from_bytes(bytes)
}

const FOLDER_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

impl TargetFolder {
    /// Opens the folder that the user named, and creates it if it does not exist.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(path)?;
        let folder = openat(CWD, path, FOLDER_FLAGS, Mode::empty())?;
        Ok(Self { folder })
    }

    /// Opens a folder of this name, which is created if it does not exist. A link of this name is an error.
    pub(super) fn folder(&self, folder_name: &[u8]) -> io::Result<Self> {
        match mkdirat(&self.folder, name(folder_name), Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let flags = FOLDER_FLAGS.union(OFlags::NOFOLLOW);
        let folder = openat(&self.folder, name(folder_name), flags, Mode::empty())?;
        Ok(Self { folder })
    }

    /// Whether something has this name.
    pub(super) fn has(&self, file_name: &[u8]) -> bool {
        rustix::fs::statat(&self.folder, name(file_name), AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// Begins a new file. `number` is different for each file of a restore.
    pub(super) fn file(&self, number: u64) -> io::Result<TargetFile<'_>> {
        let partial = format!(".holdfast-{}-{number}.partial", std::process::id());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.folder, &partial, flags, Mode::RUSR | Mode::WUSR)?;
        Ok(TargetFile {
            folder: self,
            file,
            partial,
        })
    }

    /// Creates a link. Its target is not interpreted.
    pub(super) fn link(&self, link_name: &[u8], target: &[u8], metadata: &Metadata, owners: Owners) -> io::Result<()> {
        symlinkat(name(target), &self.folder, name(link_name))?;
        if let Some((uid, gid)) = ids(metadata, owners) {
            chownat(
                &self.folder,
                name(link_name),
                Some(uid),
                Some(gid),
                AtFlags::SYMLINK_NOFOLLOW,
            )?;
        }
        if let Some(times) = times(metadata) {
            utimensat(&self.folder, name(link_name), &times, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }

    /// Removes a file or link, to be replaced.
    pub(super) fn remove(&self, file_name: &[u8]) -> io::Result<()> {
        match unlinkat(&self.folder, name(file_name), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Sets owner, permissions and time of this folder, after its content was written.
    pub(super) fn finish(&self, metadata: &Metadata, owners: Owners) -> io::Result<()> {
        set_attributes(&self.folder, metadata, owners)
    }

    /// Makes everything on the file system of this folder durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(&self.folder)?)
    }
}

impl TargetFile<'_> {
    /// Writes at an offset; what is not written is a hole.
    pub(super) fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut rest = bytes;
        let mut at = offset;
        while !rest.is_empty() {
            let count = rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.file, rest, at))?;
            if count == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            rest = rest.get(count..).unwrap_or_default();
            at += count as u64;
        }
        Ok(())
    }

    /// Completes the file: its length, owner, permissions and time, and then its name.
    pub(super) fn finish(
        self,
        file_name: &[u8],
        metadata: &Metadata,
        owners: Owners,
        conflicts: TargetConflicts,
    ) -> io::Result<()> {
        ftruncate(&self.file, metadata.size_bytes)?;
        set_attributes(&self.file, metadata, owners)?;
        let folder = &self.folder.folder;
        match conflicts {
            TargetConflicts::Replace => renameat(folder, &self.partial, folder, name(file_name))?,
            TargetConflicts::Keep => {
                let flags = rustix::fs::RenameFlags::NOREPLACE;
                match rustix::fs::renameat_with(folder, &self.partial, folder, name(file_name), flags) {
                    // The file system does not know this way: the name was free before.
                    Err(Errno::INVAL | Errno::NOSYS) if !self.folder.has(file_name) => {
                        renameat(folder, &self.partial, folder, name(file_name))?;
                    }
                    other => other?,
                }
            }
        }
        Ok(())
    }
}

impl Drop for TargetFile<'_> {
    /// Removes a file that was not completed; a completed one has another name.
    fn drop(&mut self) {
        unlinkat(&self.folder.folder, &self.partial, AtFlags::empty()).ok();
    }
}

fn ids(metadata: &Metadata, owners: Owners) -> Option<(Uid, Gid)> {
    let ids = metadata.uid.zip(metadata.gid).filter(|_| owners == Owners::Restore);
    ids.map(|(uid, gid)| (Uid::from_raw(uid), Gid::from_raw(gid)))
}

fn times(metadata: &Metadata) -> Option<Timestamps> {
    let modified = metadata.modified?;
    Some(Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        },
        last_modification: Timespec {
            tv_sec: modified.seconds,
            tv_nsec: modified.nanoseconds.into(),
        },
    })
}

fn set_attributes(file: &OwnedFd, metadata: &Metadata, owners: Owners) -> io::Result<()> {
    if let Some((uid, gid)) = ids(metadata, owners) {
        fchown(file, Some(uid), Some(gid))?;
    }
    if let Some(mode) = metadata.mode {
        // Without its owner a program must not run with the rights of the one who restored it.
        let kept = if owners == Owners::Restore { 0o7777 } else { 0o777 };
        fchmod(file, Mode::from_raw_mode(mode & kept))?;
    } else if fstat(file)?.st_mode & 0o777 == 0o600 {
        fchmod(file, Mode::from_raw_mode(0o644))?;
    }
    if let Some(times) = times(metadata) {
        futimens(file, &times)?;
    }
    Ok(())
}
