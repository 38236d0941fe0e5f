//! Opens and creates files and block devices.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::IoMode;
use super::direct::{Access, DirectPath};
use super::lease::open_past_leases;
use super::replace::sync_folder_of;
use super::stamp::{FileChange, Stamp};
use crate::device::range_length;
use crate::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Medium {
    RegularFile,
    BlockDevice,
}

/// An open file or block device.
#[derive(Debug)]
pub(super) struct OpenFile {
    /// With the page cache.
    pub(super) file: File,
    /// The same file for direct I/O, if it was requested.
    pub(super) direct: DirectPath,
    pub(super) medium: Medium,
    pub(super) size_bytes: u64,
    pub(super) block_size_bytes: u32,
    pub(super) stamp: Stamp,
}

fn path_error(action: &'static str, path: &Path) -> impl Fn(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Path {
        action,
        path: path.clone(),
        source,
    }
}

fn medium(metadata: &std::fs::Metadata, path: &Path) -> Result<Medium> {
    let file_type = metadata.file_type();
    if file_type.is_file() {
        Ok(Medium::RegularFile)
    } else if file_type.is_block_device() {
        Ok(Medium::BlockDevice)
    } else {
        Err(Error::Unsupported {
            what: "this kind of file",
            detail: format!("{} is neither a regular file nor a block device", path.display()),
        })
    }
}

impl OpenFile {
    pub(super) fn open(path: &Path, access: Access, mode: IoMode) -> Result<Self> {
        let error = path_error("open", path);
        // Checked before opening, because opening a pipe would wait for its other end.
        let expected = medium(&std::fs::metadata(path).map_err(&error)?, path)?;
        let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY;
        flags |= match access {
            Access::Read => OFlags::RDONLY,
            Access::ReadWrite => OFlags::RDWR,
        };
        if expected == Medium::BlockDevice && access == Access::ReadWrite {
            // For a block device this excludes file systems and arrays that use it.
            flags |= OFlags::EXCL;
        }
        // A FIFO may have replaced the file since the check.
        let opened = open_past_leases(flags, |flags| rustix::fs::open(path, flags, Mode::empty()));
        let file = File::from(opened.map_err(|errno| error(errno.into()))?);
        Self::from_file(file, path, access, mode)
    }

    pub(super) fn create_new(path: &Path, size_bytes: u64, mode: IoMode) -> Result<Self> {
        let error = path_error("create", path);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            // Other users must not be able to read the bytes of a disk.
            .mode(0o600)
            .open(path)
            .map_err(&error)?;
        let made = file
            .set_len(size_bytes)
            // The size is metadata that a later flush (fdatasync) relies on. Syncing the directory entry ensures that
            // the file still exists after a power cut.
            .and_then(|()| file.sync_all())
            .and_then(|()| sync_folder_of(path))
            .map_err(&error)
            .and_then(|()| Self::from_file(file, path, Access::ReadWrite, mode));
        if made.is_err() {
            // Removes the incomplete file; the first error is the one to report.
            drop(std::fs::remove_file(path));
        }
        made
    }

    pub(super) fn from_file(mut file: File, path: &Path, access: Access, mode: IoMode) -> Result<Self> {
        let error = path_error("open", path);
        let metadata = file.metadata().map_err(&error)?;
        let medium = medium(&metadata, path)?;
        let (size_bytes, block_size_bytes) = match medium {
            Medium::RegularFile => (metadata.len(), 4096),
            Medium::BlockDevice => {
                let sector = rustix::fs::ioctl_blksszget(&file).map_err(|errno| error(errno.into()))?;
                (file.seek(SeekFrom::End(0)).map_err(&error)?, sector)
            }
        };
        let direct = match mode {
            IoMode::Buffered => DirectPath::default(),
            IoMode::Direct => DirectPath::open(&file, access, 1),
            IoMode::LargeDirect => DirectPath::open(&file, access, DirectPath::LARGE_LENGTH),
        };
        Ok(Self {
            file,
            direct,
            medium,
            size_bytes,
            block_size_bytes: block_size_bytes.next_power_of_two(),
            stamp: Stamp::of(&metadata),
        })
    }

    pub(super) fn io_mode(&self) -> IoMode {
        match self.direct.length_min() {
            _ if !self.direct.is_usable() => IoMode::Buffered,
            DirectPath::LARGE_LENGTH => IoMode::LargeDirect,
            _ => IoMode::Direct,
        }
    }

    pub(super) fn direct_io_refusal(&self) -> Option<&str> {
        self.direct.refusal()
    }

    pub(super) fn check_range(&self, range: &Range<u64>) -> Result<()> {
        let length = range_length(range);
        match range.start.checked_add(length) {
            Some(end) if end <= self.size_bytes => Ok(()),
            _ => Err(Error::OutOfBounds {
                offset: range.start,
                length,
                size_bytes: self.size_bytes,
            }),
        }
    }
}

impl OpenFile {
    pub(super) fn changed_since_open(&self) -> Result<Vec<FileChange>> {
        if self.medium == Medium::BlockDevice {
            return Ok(Vec::new());
        }
        let metadata = self
            .file
            .metadata()
            .map_err(|error| Error::io("look for changes", 0, error))?;
        Ok(self.stamp.changes(&Stamp::of(&metadata)))
    }
}
