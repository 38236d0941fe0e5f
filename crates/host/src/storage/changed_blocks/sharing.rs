//! How much data of a file is shared with other files.

use std::fs::File;

use super::error::Result;
use super::extents::io;
use super::fiemap::{EXTENT_COUNT_MAX, FLAG_LAST, FLAG_SHARED, extents};

/// The space of a file on its file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sharing {
    /// Mapped bytes.
    pub mapped_bytes: u64,
    /// Mapped bytes that are shared with other files or host snapshots. Their space is freed when the last of these
    /// is removed.
    pub shared_bytes: u64,
}

/// Queries how much of `file` is shared with other files.
///
/// # Errors
/// The file system does not report extents.
pub fn sharing_of(file: &File) -> Result<Sharing> {
    let mut sharing = Sharing::default();
    let mut start = 0;
    loop {
        let found = extents(file, start).map_err(|errno| io("query the extents of a file", errno))?;
        for extent in &found {
            sharing.mapped_bytes += extent.length;
            if extent.flags & FLAG_SHARED != 0 {
                sharing.shared_bytes += extent.length;
            }
        }
        match found.last() {
            Some(last) if found.len() == EXTENT_COUNT_MAX && last.flags & FLAG_LAST == 0 => {
                start = last.logical.saturating_add(last.length);
            }
            _ => return Ok(sharing),
        }
    }
}
