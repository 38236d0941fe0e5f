//! Options for opening an image.

use std::path::PathBuf;

use crate::{Format, Gate};

/// Options for opening an image.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// The format, if known. The guest of a raw disk controls its content, which may look like another format.
    pub format: Option<Format>,
    /// The rule for other files that the image refers to.
    pub gate: Gate,
    /// Files and folders (with their subfolders) that may be opened although the gate refuses them.
    pub allow: Vec<PathBuf>,
    /// Pairs of folders: a file in the first one is looked up in the second one, and used if it exists there. This
    /// is for images in a snapshot of the file system, which refer to their backing files by the original path. The
    /// first matching pair takes precedence.
    pub relocate: Vec<(PathBuf, PathBuf)>,
    /// The external data file to use instead of the one that the image refers to.
    pub data_file: Option<PathBuf>,
    /// Whether backing files are opened.
    pub backing: Backing,
    /// Whether an image that is opened for writing is locked.
    pub locking: Locking,
}

/// Whether an image that is opened for writing is locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Locking {
    /// It is locked, so no other process can write it.
    #[default]
    Lock,
    /// Another process holds an [`ImageLock`](crate::ImageLock) for this one.
    HeldElsewhere,
}

/// Whether backing files are opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backing {
    /// Open the chain down to its base: the image reads as its guest sees it.
    #[default]
    Follow,
    /// Open the image alone: what it does not contain reads as zero.
    Ignore,
}
