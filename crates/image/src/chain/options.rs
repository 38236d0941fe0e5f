//! How to open an image.

use std::path::PathBuf;

use crate::{Format, Gate};

/// How to open an image.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// The format, if the caller knows it: the content of a raw disk is the guest's, and may look like another format.
    pub format: Option<Format>,
    /// Which other files the image may open.
    pub gate: Gate,
    /// Files, and directories with all that is below them, that may be opened although the gate would not let them.
    pub allow: Vec<PathBuf>,
    /// Files below the first folder of a pair are those below the second one, where they are there: an image names what it is based on by
    /// its path, also where it is looked at in a snapshot of the file system. The first pair that fits counts.
    pub relocate: Vec<(PathBuf, PathBuf)>,
    /// The external data file, in place of the one that the image names.
    pub data_file: Option<PathBuf>,
    /// What to do about a backing file.
    pub backing: Backing,
}

/// What to do about a backing file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Backing {
    /// Open it, and so on to the base: the image reads as its guest sees it.
    #[default]
    Follow,
    /// Leave it: what the image itself does not hold reads as zero.
    Ignore,
}
