//! Counts what is carried, and lists what is not.

use std::collections::BTreeSet;

use crate::job::{Job, Result};

/// Losses that are listed; the rest is counted.
const LOSS_COUNT_MAX: usize = 200;
/// Bytes of remembered paths of files that could not be created.
const LOST_PATH_BYTES_MAX: usize = 16 << 20;

/// Numbers of files by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ContentCounts {
    /// Regular files, without further names of the same file.
    pub file_count: u64,
    /// Directories.
    pub directory_count: u64,
    /// Symbolic links.
    pub link_count: u64,
    /// Further names of files.
    pub hard_link_count: u64,
    /// Devices and named pipes.
    pub special_count: u64,
    /// Bytes of regular files without holes.
    pub data_bytes: u64,
}

/// A file or attribute that was not carried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContentLoss {
    /// The path in the container.
    pub path: String,
    /// What was not carried, and why.
    pub reason: String,
}

/// The counts of a job.
pub(super) struct Account<'a> {
    pub(super) job: Job<'a>,
    pub(super) counts: ContentCounts,
    pub(super) losses: Vec<ContentLoss>,
    pub(super) loss_count: u64,
}

impl<'a> Account<'a> {
    pub(super) fn new(job: Job<'a>) -> Self {
        Self {
            job,
            counts: ContentCounts::default(),
            losses: Vec::new(),
            loss_count: 0,
        }
    }

    pub(super) fn lose(&mut self, path: &[u8], reason: impl Into<String>) {
        self.loss_count += 1;
        if self.losses.len() < LOSS_COUNT_MAX {
            self.losses.push(ContentLoss {
                path: shown(path),
                reason: reason.into(),
            });
        }
    }

    /// Counts data, and stops an interrupted job.
    pub(super) fn advance(&mut self, bytes: u64) -> Result<()> {
        self.counts.data_bytes += bytes;
        self.job.progress.advance(bytes);
        Ok(self.job.interrupt.check()?)
    }
}

/// The paths of files that could not be created, up to a limit. Beyond it, a further name of such a file is an error.
#[derive(Default)]
pub(super) struct LostFiles {
    paths: BTreeSet<Vec<u8>>,
    path_bytes: usize,
}

impl LostFiles {
    pub(super) fn add(&mut self, parts: &[&[u8]]) {
        let path = parts.join(&b'/');
        if self.path_bytes + path.len() <= LOST_PATH_BYTES_MAX {
            self.path_bytes += path.len();
            self.paths.insert(path);
        }
    }

    pub(super) fn has(&self, parts: &[&[u8]]) -> bool {
        self.paths.contains(&parts.join(&b'/'))
    }
}

/// A path in the container as text.
pub(super) fn shown(path: &[u8]) -> String {
    let path = path.strip_suffix(b"/").unwrap_or(path);
    match path {
        b"" | b"." => "/".to_owned(),
        path => String::from_utf8_lossy(path).into_owned(),
    }
}
