//! Detects changes of a file since it was opened.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// A change of a file since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileChange {
    /// The file grew or shrank.
    Size {
        /// Size in bytes when the file was opened.
        before: u64,
        /// Current size in bytes.
        now: u64,
    },
    /// Bytes were written.
    Contents,
    /// Only the owner, mode, links or other attributes changed, or the modification time was set manually.
    Attributes,
}

impl std::fmt::Display for FileChange {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Size { before, now } => write!(formatter, "its size went from {before} to {now} bytes"),
            Self::Contents => formatter.write_str("its contents were written"),
            Self::Attributes => formatter.write_str("its attributes were changed"),
        }
    }
}

/// Seconds and nanoseconds.
type Time = (i64, i64);

/// The attributes that identify a state of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    size_bytes: u64,
    modified: Time,
    status_changed: Time,
}

impl Stamp {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size_bytes: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            status_changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
    pub(super) fn changes(&self, now: &Self) -> Vec<FileChange> {
        let mut changes = Vec::new();
        if now.size_bytes != self.size_bytes {
            changes.push(FileChange::Size {
                before: self.size_bytes,
                now: now.size_bytes,
            });
        }
        if now.modified != self.modified {
            changes.push(FileChange::Contents);
        } else if now.status_changed != self.status_changed {
            changes.push(FileChange::Attributes);
        }
        changes
    }
}
