//! How much of a file is shared with others.

use std::fs::File;

use super::error::Result;
use super::extents::io;
use super::fiemap::{EXTENT_COUNT_MAX, FLAG_LAST, FLAG_SHARED, extents};

/// What a file takes on its medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sharing {
    /// Bytes that are mapped at all.
    pub mapped_bytes: u64,
    /// Those of them that other files, or host snapshots, share: only the last of them gives the room back.
    pub shared_bytes: u64,
}

/// Asks the file system how much of `file` it shares with others.
///
/// # Errors
/// The file system does not tell where files lie.
pub fn sharing_of(file: &File) -> Result<Sharing> {
    let mut sharing = Sharing::default();
    let mut start = 0;
    loop {
        let found = extents(file, start).map_err(|errno| io("ask where a file lies", errno))?;
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
