//! Readers of file systems. Each parses bytes that a guest wrote.

#![deny(clippy::indexing_slicing, reason = "the bytes come from a guest")]

pub(crate) mod ext;
pub(crate) mod fat;
pub(crate) mod ntfs;
pub(crate) mod xfs;

use std::sync::Arc;

use holdfast_block::BlockDevice;

use crate::{Content, Error, FileSystem, Result};

/// Opens the file system of a volume that holds `content`. Readers ask for small pieces: pass a
/// [`CachedDevice`](crate::CachedDevice).
///
/// # Errors
/// [`Error::Unsupported`] if no reader exists for it, or if it uses a feature that the reader does not understand.
pub fn open_file_system(device: Arc<dyn BlockDevice>, content: Content) -> Result<Box<dyn FileSystem>> {
    match content {
        Content::Ext2 | Content::Ext3 | Content::Ext4 => Ok(Box::new(ext::ExtFileSystem::open(device)?)),
        Content::Ntfs => Ok(Box::new(ntfs::NtfsFileSystem::open(device)?)),
        Content::Fat => Ok(Box::new(fat::FatFileSystem::open(device)?)),
        Content::ExFat => Ok(Box::new(fat::ExFatFileSystem::open(device)?)),
        Content::Xfs => Ok(Box::new(xfs::XfsFileSystem::open(device)?)),
        other => Err(Error::unsupported(format!("reading {}", other.name()))),
    }
}
