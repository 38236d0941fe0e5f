//! Visits the files below a directory, in the order of their names.

use std::collections::HashSet;

use holdfast_guest_files::{DirectoryEntry, Error as ReadError, FileKind, FileSystem, Metadata, NodeId};

use super::LocatedFiles;
use crate::job::{Job, Result};

/// Most entries of one directory that are sorted in memory.
const ENTRY_COUNT_MAX: usize = 4 << 20;
/// Linux limits paths to 4096 bytes: deeper directories cannot be named.
const DEPTH_MAX: usize = 1024;

/// How far below a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WalkDepth {
    /// The entries of the directory; of a file, the file itself.
    Entries,
    /// Everything below it.
    Tree,
}

/// A file or directory that is visited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WalkedFile {
    /// The path in the volume, which begins with `/`.
    pub path: Vec<u8>,
    /// The node.
    pub node: NodeId,
    /// Its metadata.
    pub metadata: Metadata,
    /// The target of a link.
    pub target: Option<Vec<u8>>,
}

/// A file or directory that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnreadableFile {
    /// The path in the volume.
    pub path: String,
    /// Why.
    pub reason: String,
}

/// What a walk could not read.
#[derive(Debug, Default)]
pub struct WalkReport {
    /// Files and directories that could not be read.
    pub unreadable: Vec<UnreadableFile>,
    /// The first error of the snapshot's disk, such as damage in the repository.
    pub disk_error: Option<holdfast_block::Error>,
}

/// The path of names from the root.
pub(super) fn joined(names: &[Vec<u8>]) -> Vec<u8> {
    if names.is_empty() {
        return b"/".to_vec();
    }
    names
        .iter()
        .fold(Vec::new(), |path, name| [&path[..], b"/", name].concat())
}

/// The entries of a directory, sorted by name.
pub(super) fn sorted_entries(
    file_system: &mut dyn FileSystem,
    node: NodeId,
) -> std::result::Result<Vec<DirectoryEntry>, ReadError> {
    let mut entries = Vec::new();
    file_system.read_directory(node, &mut |entry| {
        if entries.len() >= ENTRY_COUNT_MAX {
            return Err(ReadError::TooLarge {
                what: "a directory".into(),
                limit: ENTRY_COUNT_MAX as u64,
            });
        }
        entries.push(entry);
        Ok(())
    })?;
    entries.sort_by(|left, right| left.name.cmp(&right.name));
    Ok(entries)
}

/// Directories that were visited: a directory that contains itself must not lead to an endless walk.
#[derive(Debug, Default)]
pub(super) struct VisitedDirectories(HashSet<NodeId>);

impl VisitedDirectories {
    pub(super) fn enter(&mut self, node: NodeId, depth: usize) -> std::result::Result<(), ReadError> {
        if depth > DEPTH_MAX {
            return Err(ReadError::TooLarge {
                what: "the depth of directories".into(),
                limit: DEPTH_MAX as u64,
            });
        }
        if self.0.insert(node) {
            Ok(())
        } else {
            Err(ReadError::Damaged {
                what: "directory".into(),
                detail: "it is in two directories".to_owned(),
            })
        }
    }
}

/// Visits the files that `files` names. What cannot be read is returned; the walk continues with the rest.
pub fn walk_files(
    files: &mut LocatedFiles,
    depth: WalkDepth,
    job: Job<'_>,
    visit: &mut dyn FnMut(WalkedFile) -> Result<()>,
) -> Result<WalkReport> {
    let mut walk = FileWalk {
        file_system: &mut *files.file_system,
        report: WalkReport::default(),
        visited: VisitedDirectories::default(),
    };
    let start = &files.found;
    let path = joined(&start.names);
    if start.metadata.kind != FileKind::Directory {
        let file = walk.file(path, start.node, start.metadata);
        visit(file)?;
        return Ok(walk.report);
    }
    let mut left = vec![PendingDirectory {
        path,
        node: start.node,
        depth: 0,
    }];
    while let Some(directory) = left.pop() {
        job.interrupt.check()?;
        let entries = walk
            .visited
            .enter(directory.node, directory.depth)
            .and_then(|()| sorted_entries(walk.file_system, directory.node));
        let entries = match entries {
            Ok(entries) => entries,
            Err(error) => {
                walk.fail(&directory.path, error);
                continue;
            }
        };
        let mut below = Vec::new();
        for entry in entries {
            let path = if directory.path == b"/" {
                [b"/", &entry.name[..]].concat()
            } else {
                [&directory.path[..], b"/", &entry.name].concat()
            };
            match walk.file_system.metadata(entry.node) {
                Err(error) => walk.fail(&path, error),
                Ok(metadata) => {
                    if metadata.kind == FileKind::Directory && depth == WalkDepth::Tree {
                        below.push(PendingDirectory {
                            path: path.clone(),
                            node: entry.node,
                            depth: directory.depth + 1,
                        });
                    }
                    let file = walk.file(path, entry.node, metadata);
                    visit(file)?;
                    job.progress.advance(1);
                }
            }
        }
        left.extend(below.into_iter().rev());
    }
    Ok(walk.report)
}

struct PendingDirectory {
    path: Vec<u8>,
    node: NodeId,
    depth: usize,
}

struct FileWalk<'a> {
    file_system: &'a mut dyn FileSystem,
    report: WalkReport,
    visited: VisitedDirectories,
}

impl FileWalk<'_> {
    fn file(&mut self, path: Vec<u8>, node: NodeId, metadata: Metadata) -> WalkedFile {
        let target = (metadata.kind == FileKind::Link).then(|| self.file_system.read_link(node));
        let target = target.and_then(|target| match target {
            Ok(target) => Some(target),
            Err(error) => {
                self.fail(&path, error);
                None
            }
        });
        WalkedFile {
            path,
            node,
            metadata,
            target,
        }
    }

    fn fail(&mut self, path: &[u8], error: ReadError) {
        /// A hostile directory must not fill the memory with errors.
        const UNREADABLE_COUNT_MAX: usize = 10_000;
        if self.report.unreadable.len() < UNREADABLE_COUNT_MAX {
            self.report.unreadable.push(UnreadableFile {
                path: String::from_utf8_lossy(path).into_owned(),
                reason: holdfast_block::error_text(&error),
            });
        }
        if let ReadError::Device(error) = error {
            self.report.disk_error.get_or_insert(error);
        }
    }
}
