//! The folder that receives files of a guest.
//!
//! Names and links of a guest must not lead out of the folder. Every folder is opened relative to the one above it, by
//! one name, and without following links; a file is always a new file.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use holdfast_guest_files::{ExtendedAttribute, Metadata};
use rustix::fs::{
    AtFlags, CWD, Gid, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_OMIT, Uid, XattrFlags, chownat, fchmod, fchown,
    fsetxattr, fstat, ftruncate, futimens, linkat, mkdirat, openat, renameat, symlinkat, unlinkat, utimensat,
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

/// What completes a file.
pub(super) struct FileEnd<'a> {
    pub(super) metadata: &'a Metadata,
    pub(super) attributes: &'a [ExtendedAttribute],
    pub(super) owners: Owners,
    pub(super) conflicts: TargetConflicts,
}

/// Extended attributes of a file that were not restored.
#[derive(Debug, Default)]
pub(super) struct AttributeLosses {
    /// Those that only root may set.
    pub(super) skipped_count: u64,
    /// Those that the target refused.
    pub(super) failed_count: u64,
    /// The first that it refused, and why.
    pub(super) first: Option<String>,
}

/// Which file of the host a file is, whatever its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TargetFileIdentity {
    device: u64,
    inode: u64,
}

impl TargetFileIdentity {
    fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }
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

    /// Sets owner, permissions, extended attributes and time of this folder, after its content was written.
    pub(super) fn finish(
        &self,
        metadata: &Metadata,
        attributes: &[ExtendedAttribute],
        owners: Owners,
    ) -> io::Result<AttributeLosses> {
        set_attributes(&self.folder, metadata, attributes, owners)
    }

    /// Gives a restored file another name in this folder. `path` leads from `root` to it.
    ///
    /// # Errors
    /// The file is not there any more, or the file system makes no link of it.
    pub(super) fn hard_link(
        &self,
        link_name: &[u8],
        root: &Self,
        path: &[Vec<u8>],
        identity: TargetFileIdentity,
        conflicts: TargetConflicts,
    ) -> io::Result<()> {
        let (file_name, folders) = path.split_last().ok_or(io::ErrorKind::NotFound)?;
        let mut folder = root.folder.try_clone()?;
        let flags = FOLDER_FLAGS.union(OFlags::NOFOLLOW);
        for folder_name in folders {
            folder = openat(&folder, name(folder_name), flags, Mode::empty())?;
        }
        let stat = rustix::fs::statat(&folder, name(file_name), AtFlags::SYMLINK_NOFOLLOW)?;
        if TargetFileIdentity::of(&stat) != identity {
            return Err(io::ErrorKind::NotFound.into());
        }
        if conflicts == TargetConflicts::Replace {
            self.remove(link_name)?;
        }
        Ok(linkat(
            &folder,
            name(file_name),
            &self.folder,
            name(link_name),
            AtFlags::empty(),
        )?)
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

    /// Which file this is, whatever its name.
    pub(super) fn identity(&self) -> io::Result<TargetFileIdentity> {
        Ok(TargetFileIdentity::of(&fstat(&self.file)?))
    }

    /// Completes the file: its length, owner, permissions, extended attributes and time, and then its name.
    pub(super) fn finish(self, file_name: &[u8], end: &FileEnd<'_>) -> io::Result<AttributeLosses> {
        ftruncate(&self.file, end.metadata.size_bytes)?;
        let losses = set_attributes(&self.file, end.metadata, end.attributes, end.owners)?;
        let folder = &self.folder.folder;
        match end.conflicts {
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
        Ok(losses)
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

fn set_attributes(
    file: &OwnedFd,
    metadata: &Metadata,
    attributes: &[ExtendedAttribute],
    owners: Owners,
) -> io::Result<AttributeLosses> {
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
    // A change of the owner removes capabilities, and one of the permissions changes an access control list.
    let losses = set_extended(file, attributes, owners);
    if let Some(times) = times(metadata) {
        futimens(file, &times)?;
    }
    Ok(losses)
}

fn set_extended(file: &OwnedFd, attributes: &[ExtendedAttribute], owners: Owners) -> AttributeLosses {
    let mut losses = AttributeLosses::default();
    for attribute in attributes {
        let is_own = |space: &[u8]| attribute.name.starts_with(space);
        // What the integrity checks of the guest's kernel signed is void elsewhere.
        if is_own(b"security.evm") || is_own(b"security.ima") {
            losses.skipped_count += 1;
            continue;
        }
        if owners == Owners::Own && !is_own(b"user.") && !is_own(b"system.posix_acl_") {
            losses.skipped_count += 1;
            continue;
        }
        if let Err(error) = fsetxattr(file, name(&attribute.name), &attribute.value, XattrFlags::empty()) {
            losses.failed_count += 1;
            let shown = String::from_utf8_lossy(&attribute.name);
            losses
                .first
                .get_or_insert_with(|| format!("{shown}: {}", io::Error::from(error)));
        }
    }
    losses
}
