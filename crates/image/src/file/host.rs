//! A file or block device of this host as an [`ImageFile`].

use std::fs::File;
use std::io::{ErrorKind, Seek as _, SeekFrom};
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use holdfast_block::{
    DirectPath, Error as BlockError, ExtentKind, ExtentList, FileLock, IoMode, LockOutcome, Result as BlockResult,
    lock_file, lock_file_at_rest, lock_file_shared, open_past_leases, sync_folder_of, to_usize,
};
use rustix::fs::{FallocateFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::ImageFile;
use crate::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Reading only.
    Read,
    /// Reading, with a lock that keeps writers away.
    ReadPinned,
    /// Reading a disk at rest: no program writes it before, and none (also no QEMU) can until it is closed.
    ReadAtRest,
    /// Reading and writing, with a lock that keeps other writers (also QEMU) away.
    Write,
    /// The same, and the programs that this process starts hold the lock too, until the last of them has ended.
    WriteWithChildren,
    /// Reading and writing without a lock, which another process holds for this one.
    WriteUnlocked,
}

/// An open regular file or block device.
#[derive(Debug)]
pub(crate) struct HostFile {
    file: File,
    /// Of a file that is open for writing.
    _lock: Option<FileLock>,
    /// Of a block device at rest.
    _claim: Option<File>,
    /// Writes that bypass the page cache, for a file that is written sequentially once.
    direct: Option<DirectPath>,
    kind: FileKind,
    /// Length when the file was opened for reading. Bytes past it read as zero; bytes that were truncated since are an
    /// error.
    read_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileKind {
    Regular,
    BlockDevice { size_bytes: u64 },
}

impl HostFile {
    /// Opens the file at `path`, following symbolic links: for names given by the user.
    pub(crate) fn open(path: &Path, access: Access) -> Result<Self> {
        let opened = open_past_leases(access.flags(), |flags| rustix::fs::open(path, flags, Mode::empty()));
        let fd = opened.map_err(|errno| Error::io("open", path, errno))?;
        Self::from_fd(fd, path, access)
    }

    /// Opens the file at the canonical `path`, in which no component may be a symbolic link: for names that passed the
    /// gate, so that a link created between the check and the open is not followed.
    pub(crate) fn open_canonical(path: &Path, access: Access) -> Result<Self> {
        let flags = access.flags() | OFlags::NOFOLLOW;
        let resolve = ResolveFlags::NO_SYMLINKS;
        let open = |flags| match rustix::fs::openat2(rustix::fs::CWD, path, flags, Mode::empty(), resolve) {
            // Kernels before 5.6 and some sandboxes have no openat2; the last component is still not followed.
            Err(Errno::NOSYS | Errno::PERM) => rustix::fs::open(path, flags, Mode::empty()),
            other => other,
        };
        let fd = open_past_leases(flags, open).map_err(|errno| Error::io("open", path, errno))?;
        Self::from_fd(fd, path, access)
    }

    /// Creates a file that must not exist yet, readable by its owner only, and locks it.
    pub(crate) fn create_new(path: &Path) -> Result<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::CREATE | OFlags::EXCL;
        // Disk contents must not be readable by other users.
        let fd =
            rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|errno| Error::io("create", path, errno))?;
        Self::from_fd(fd, path, Access::Write)
    }

    /// Makes this new file share the bytes of another one. Returns whether the file system has done that.
    pub(crate) fn share_bytes_of(&self, other: &Self) -> bool {
        rustix::fs::ioctl_ficlone(&self.file, &other.file).is_ok()
    }

    /// For a file that is written once from start to end and not read soon: large writes bypass the page cache where
    /// possible; elsewhere their writeback starts at once.
    pub(crate) fn written_once(mut self) -> Self {
        self.direct = Some(DirectPath::open(
            &self.file,
            holdfast_block::Access::ReadWrite,
            DirectPath::LARGE_LENGTH,
        ));
        self
    }

    fn from_fd(fd: OwnedFd, path: &Path, access: Access) -> Result<Self> {
        let mut file = File::from(fd);
        let metadata = file.metadata().map_err(|source| Error::io("open", path, source))?;
        let file_type = metadata.file_type();
        let kind = if file_type.is_file() {
            FileKind::Regular
        } else if file_type.is_block_device() {
            let size_bytes = file
                .seek(SeekFrom::End(0))
                .map_err(|source| Error::io("open", path, source))?;
            FileKind::BlockDevice { size_bytes }
        } else {
            let reason = std::io::Error::new(ErrorKind::InvalidInput, "neither a regular file nor a block device");
            return Err(Error::io("open", path, reason));
        };
        let lock = match access {
            Access::Read | Access::WriteUnlocked => None,
            Access::ReadPinned => outcome_of(lock_file_shared(&file), path)?,
            Access::ReadAtRest => outcome_of(lock_file_at_rest(&file), path)?,
            Access::Write | Access::WriteWithChildren => outcome_of(lock_file(&file), path)?,
        };
        let claim = match (access, kind) {
            (Access::ReadAtRest, FileKind::BlockDevice { .. }) => Some(claim_device(&file, path)?),
            _ => None,
        };
        if access == Access::WriteWithChildren {
            let inherited = rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty());
            inherited.map_err(|errno| Error::io("share", path, errno))?;
        }
        Ok(Self {
            file,
            _lock: lock,
            _claim: claim,
            direct: None,
            kind,
            read_bytes: match access {
                Access::Read | Access::ReadPinned | Access::ReadAtRest => metadata.len(),
                Access::Write | Access::WriteWithChildren | Access::WriteUnlocked => 0,
            },
        })
    }

    /// Makes the directory entry of the file at `path` durable.
    pub(crate) fn sync_directory(path: &Path) -> Result<()> {
        sync_folder_of(path).map_err(|source| Error::io("sync", &directory_of(path), source))
    }

    /// Fails if the file was truncated since it was opened: the missing bytes must not read as zero.
    fn check_not_cut(&self, offset: u64) -> BlockResult<()> {
        if offset < self.read_bytes {
            let reason = std::io::Error::other("the file was cut off while it was read");
            return Err(BlockError::io("read", offset, reason));
        }
        Ok(())
    }

    /// Device and inode number.
    pub(crate) fn identity(&self) -> BlockResult<(u64, u64)> {
        let metadata = self
            .file
            .metadata()
            .map_err(|source| BlockError::io("stat", 0, source))?;
        Ok((metadata.dev(), metadata.ino()))
    }
}

/// The directory that holds `path`; `.` for a bare name.
pub(crate) fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Opens a block device exclusively: it is not mounted, nor a part of another device, and cannot become that.
fn claim_device(file: &File, path: &Path) -> Result<File> {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    let same = format!("/proc/self/fd/{}", file.as_raw_fd());
    match rustix::fs::open(same, flags, Mode::empty()) {
        Ok(claim) => Ok(claim.into()),
        Err(Errno::BUSY) => Err(Error::Locked {
            image: path.display().to_string(),
        }),
        Err(errno) => Err(Error::io("open", path, errno)),
    }
}

impl Access {
    pub(crate) fn is_write(self) -> bool {
        !matches!(self, Self::Read | Self::ReadPinned | Self::ReadAtRest)
    }

    fn flags(self) -> OFlags {
        let common = OFlags::CLOEXEC | OFlags::NOCTTY;
        match self {
            Self::Read | Self::ReadPinned | Self::ReadAtRest => OFlags::RDONLY | common,
            Self::Write | Self::WriteWithChildren | Self::WriteUnlocked => OFlags::RDWR | common,
        }
    }
}

/// The lock on a whole file.
///
/// QEMU keeps shared open-file-description locks on single bytes of every image that it has open. They conflict with
/// an exclusive lock in both directions: the disk of a running machine cannot be opened for writing, and a machine
/// cannot open a file that is locked here.
fn outcome_of(outcome: std::io::Result<LockOutcome>, path: &Path) -> Result<Option<FileLock>> {
    match outcome.map_err(|source| Error::io("lock", path, source))? {
        LockOutcome::HeldElsewhere => Err(Error::Locked {
            image: path.display().to_string(),
        }),
        LockOutcome::Locked(lock) => Ok(Some(lock)),
        // File systems without locks protect no program, including QEMU.
        LockOutcome::Unsupported => Ok(None),
    }
}

impl ImageFile for HostFile {
    fn length_bytes(&self) -> BlockResult<u64> {
        match self.kind {
            FileKind::BlockDevice { size_bytes } => Ok(size_bytes),
            FileKind::Regular => match self.file.metadata() {
                Ok(metadata) => Ok(metadata.len()),
                Err(source) => Err(BlockError::io("stat", 0, source)),
            },
        }
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> BlockResult<()> {
        if i64::try_from(offset.saturating_add(buffer.len() as u64)).is_err() {
            buffer.fill(0);
            return Ok(());
        }
        let mut done = 0;
        while done < buffer.len() {
            match self.file.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => {
                    self.check_not_cut(offset + done as u64)?;
                    buffer[done..].fill(0);
                    break;
                }
                Ok(count) => done += count,
                Err(source) if source.kind() == ErrorKind::Interrupted => {}
                Err(source) => return Err(BlockError::io("read", offset + done as u64, source)),
            }
        }
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64) -> BlockResult<()> {
        let written = match &self.direct {
            None => self.file.write_all_at(data, offset),
            Some(direct) => direct.write(&self.file, data, offset).map(|mode| {
                if mode == IoMode::Buffered && data.len() >= DirectPath::LARGE_LENGTH {
                    // Linux starts the writeback of dirty pages on this advice, and does not wait for it. Without it,
                    // the sync at the end of a large copy starts only when the copy is done.
                    let length = NonZero::new(data.len() as u64);
                    rustix::fs::fadvise(&self.file, offset, length, rustix::fs::Advice::DontNeed).ok();
                }
            }),
        };
        written.map_err(|source| BlockError::io("write", offset, source))
    }

    fn set_length(&self, length_bytes: u64) -> BlockResult<()> {
        match self.kind {
            FileKind::Regular => self
                .file
                .set_len(length_bytes)
                .map_err(|source| BlockError::io("resize", length_bytes, source)),
            FileKind::BlockDevice { size_bytes } if length_bytes <= size_bytes => Ok(()),
            FileKind::BlockDevice { .. } => Err(BlockError::io("resize", length_bytes, Errno::NOSPC)),
        }
    }

    fn punch(&self, range: Range<u64>) -> BlockResult<()> {
        let length_bytes = range.end.saturating_sub(range.start);
        if length_bytes == 0 {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.file, flags, range.start, length_bytes) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::NODEV) => self.fill_with_zeroes(range),
            Err(errno) => Err(BlockError::io("punch", range.start, errno)),
        }
    }

    fn sync(&self) -> BlockResult<()> {
        self.file
            .sync_data()
            .map_err(|source| BlockError::io("flush", 0, source))
    }

    fn extents(&self, range: Range<u64>, extent_count_max: usize) -> BlockResult<ExtentList> {
        let mut list = ExtentList::new(range.start, extent_count_max);
        while list.end() < range.end {
            let at = list.end();
            let data = match rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(at)) {
                Ok(data) => data.clamp(at, range.end),
                Err(Errno::NXIO) => {
                    if self.length_bytes()? < self.read_bytes {
                        self.check_not_cut(at)?;
                    }
                    range.end
                }
                // Block devices and file systems without hole reporting: everything may be data.
                Err(_) => {
                    list.push(range.end - at, ExtentKind::Data);
                    return Ok(list);
                }
            };
            if !list.push(data - at, ExtentKind::Zero) || data == range.end {
                return Ok(list);
            }
            let hole = match rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Hole(data)) {
                // A hole at this offset means that the file changed in between: treat the rest as data.
                Ok(hole) if hole > data => hole.min(range.end),
                _ => range.end,
            };
            if !list.push(hole - data, ExtentKind::Data) {
                return Ok(list);
            }
        }
        Ok(list)
    }

    fn allocated_bytes(&self) -> BlockResult<Option<u64>> {
        match self.kind {
            FileKind::BlockDevice { .. } => Ok(None),
            FileKind::Regular => {
                let metadata = self
                    .file
                    .metadata()
                    .map_err(|source| BlockError::io("stat", 0, source))?;
                Ok(Some(metadata.blocks() * 512))
            }
        }
    }
}

impl HostFile {
    /// Writes zeroes if the file system cannot punch holes, but never past the end of the file.
    fn fill_with_zeroes(&self, range: Range<u64>) -> BlockResult<()> {
        static ZEROES: [u8; 64 * 1024] = [0; 64 * 1024];
        let end = range.end.min(self.length_bytes()?);
        let mut at = range.start;
        while at < end {
            let piece = (end - at).min(ZEROES.len() as u64);
            self.write_at(&ZEROES[..to_usize(piece)], at)?;
            at += piece;
        }
        Ok(())
    }
}
