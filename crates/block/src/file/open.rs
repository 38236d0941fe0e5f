//! Opening and making files; what is known about them from then on.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::OFlags;

use super::IoMode;
use super::stamp::Stamp;
use crate::device::range_length;
use crate::{Error, Result};

/// Shortest request that is large: a disk is about as fast with requests of this length as with longer ones.
pub(super) const LARGE_LENGTH: usize = 128 << 10;

/// What is asked of the operating system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    ReadWrite,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Medium {
    RegularFile,
    BlockDevice,
}

/// An open file or block device.
#[derive(Debug)]
pub(super) struct OpenFile {
    /// Through the page cache.
    pub(super) file: File,
    /// The same past the page cache, where that was asked for and is possible.
    pub(super) direct: Option<File>,
    /// Shortest request that goes past the page cache.
    pub(super) direct_length_min: usize,
    /// Why direct I/O was refused, at opening or later.
    pub(super) direct_refusal: OnceLock<String>,
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

fn flag(flags: OFlags) -> i32 {
    flags.bits().cast_signed()
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
        // Asked before opening, since opening a pipe would wait for its other end.
        let expected = medium(&std::fs::metadata(path).map_err(&error)?, path)?;
        let mut options = OpenOptions::new();
        options.read(true).write(access == Access::ReadWrite);
        if expected == Medium::BlockDevice && access == Access::ReadWrite {
            // On a block device this means: not while a file system or an array uses it.
            options.custom_flags(flag(OFlags::EXCL));
        }
        let file = options.open(path).map_err(&error)?;
        Self::from_file(file, path, access, mode)
    }

    pub(super) fn create_new(path: &Path, size_bytes: u64, mode: IoMode) -> Result<Self> {
        let error = path_error("create", path);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            // The bytes of a disk are nobody else's business.
            .mode(0o600)
            .open(path)
            .map_err(&error)?;
        let made = file
            .set_len(size_bytes)
            // The size is metadata that a later flush (fdatasync) relies on; the directory entry is what makes a flushed
            // file still be there after a power cut.
            .and_then(|()| file.sync_all())
            .and_then(|()| File::open(directory_of(path))?.sync_all())
            .map_err(&error)
            .and_then(|()| Self::from_file(file, path, Access::ReadWrite, mode));
        if made.is_err() {
            // Not to leave half a file; the first error is the one to report.
            drop(std::fs::remove_file(path));
        }
        made
    }

    fn from_file(mut file: File, path: &Path, access: Access, mode: IoMode) -> Result<Self> {
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
        let direct_refusal = OnceLock::new();
        let direct = match mode {
            IoMode::Buffered => None,
            IoMode::Direct | IoMode::LargeDirect => open_direct(path, &metadata, access)
                .map_err(|reason| direct_refusal.set(reason))
                .ok(),
        };
        Ok(Self {
            file,
            direct,
            direct_length_min: if mode == IoMode::LargeDirect { LARGE_LENGTH } else { 1 },
            direct_refusal,
            medium,
            size_bytes,
            block_size_bytes: block_size_bytes.next_power_of_two(),
            stamp: Stamp::of(&metadata),
        })
    }

    pub(super) fn io_mode(&self) -> IoMode {
        match self.direct {
            Some(_) if self.direct_refusal.get().is_none() => match self.direct_length_min {
                LARGE_LENGTH => IoMode::LargeDirect,
                _ => IoMode::Direct,
            },
            _ => IoMode::Buffered,
        }
    }

    pub(super) fn direct_io_refusal(&self) -> Option<&str> {
        self.direct_refusal.get().map(String::as_str)
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

/// Opens the same file a second time, past the page cache, or says why not.
fn open_direct(path: &Path, metadata: &std::fs::Metadata, access: Access) -> std::result::Result<File, String> {
    let direct = OpenOptions::new()
        .read(true)
        .write(access == Access::ReadWrite)
        .custom_flags(flag(OFlags::DIRECT))
        .open(path)
        .map_err(|error| format!("the file system refuses direct I/O: {error}"))?;
    let same = direct
        .metadata()
        .is_ok_and(|other| Stamp::of(&other).is_same_file(&Stamp::of(metadata)));
    if same {
        Ok(direct)
    } else {
        Err("the file was replaced by another one while it was opened".into())
    }
}

fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}
