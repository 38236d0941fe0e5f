//! Restores a file or a whole tree of a guest into a folder.

use std::collections::HashMap;
use std::path::PathBuf;

use holdfast_block::is_zero;
use holdfast_guest_files::{Error as ReadError, FileKind, FilePiece, Metadata, NodeId, PIECE_BYTES_MAX};

use super::target::{AttributeLosses, FileEnd, Owners, TargetConflicts, TargetFileIdentity, TargetFolder};
use super::walk::{UnreadableFile, VisitedDirectories, joined, sorted_entries};
use super::{LocatedFiles, WalkDepth, walk_files};
use crate::job::{Error, Job, Result, Unit};
use crate::repository::forget::Execution;

/// Zeroes of this length become holes.
const HOLE_BYTES: usize = 4096;
/// Folders of the target that are open at the same time, below the limit on open files.
const DEPTH_MAX: usize = 500;
/// Files with several names that are remembered; further ones become copies.
const SHARED_COUNT_MAX: usize = 1 << 20;
/// Failures that are listed; the rest is counted.
const FAILURE_COUNT_MAX: usize = 1000;

/// Where to restore, and how.
#[derive(Debug, Clone)]
pub struct TreeRestoreRequest {
    /// The folder; created if it does not exist. A file or directory gets its name in it; the content of a root directory
    /// lies directly in it.
    pub target: PathBuf,
    /// How existing files are treated.
    pub conflicts: TargetConflicts,
    /// Whether anything is written.
    pub execution: Execution,
}

/// What was restored.
#[derive(Debug, Default)]
pub struct RestoredFiles {
    /// Regular files.
    pub file_count: u64,
    /// Directories.
    pub directory_count: u64,
    /// Symbolic links.
    pub link_count: u64,
    /// Further names of files that were restored, which are hard links in the target too.
    pub hard_link_count: u64,
    /// Extended attributes that only root may set.
    pub skipped_attribute_count: u64,
    /// Extended attributes and access control lists that the target does not take.
    pub failed_attribute_count: u64,
    /// The first of these, with the reason.
    pub failed_attribute: Option<String>,
    /// Bytes of regular files, including holes.
    pub bytes: u64,
    /// Devices, pipes and sockets, which are skipped.
    pub special_count: u64,
    /// Files that were not restored: the first of them.
    pub failures: Vec<UnreadableFile>,
    /// The number of all files that were not restored.
    pub failure_count: u64,
    /// The first error of the snapshot's disk, such as damage in the repository.
    pub disk_error: Option<holdfast_block::Error>,
}

/// Restores what `files` names. A file that cannot be read or written is reported, and the rest is restored.
///
/// # Errors
/// The target folder cannot be opened, or the job is interrupted.
pub fn restore_tree(files: &mut LocatedFiles, request: &TreeRestoreRequest, job: Job<'_>) -> Result<RestoredFiles> {
    job.progress.phase("restoring files", Unit::Bytes);
    if request.execution == Execution::DryRun {
        return count(files, job);
    }
    let failed = |source| Error::File {
        action: "open",
        path: request.target.clone(),
        source,
    };
    let target = TargetFolder::open(&request.target).map_err(failed)?;
    let owners = if rustix::process::geteuid().is_root() {
        Owners::Restore
    } else {
        Owners::Own
    };
    let mut restorer = TreeRestorer {
        files,
        conflicts: request.conflicts,
        owners,
        job,
        report: RestoredFiles::default(),
        visited: VisitedDirectories::default(),
        number: 0,
        root: &target,
        place: Vec::new(),
        shared: HashMap::new(),
    };
    let start = restorer.files.found.clone();
    let path = joined(&start.names);
    match start.names.last() {
        Some(name) => restorer.node(&target, name, start.node, &path, 0)?,
        None => restorer.content(&target, start.node, &path, 0)?,
    }
    let report = restorer.report;
    target.sync().map_err(|source| Error::File {
        action: "sync",
        path: request.target.clone(),
        source,
    })?;
    Ok(report)
}

/// What a restore would write.
fn count(files: &mut LocatedFiles, job: Job<'_>) -> Result<RestoredFiles> {
    let mut report = RestoredFiles::default();
    let mut add = |metadata: &Metadata| match metadata.kind {
        FileKind::File => {
            report.file_count += 1;
            report.bytes = report.bytes.saturating_add(metadata.size_bytes);
        }
        FileKind::Directory => report.directory_count += 1,
        FileKind::Link => report.link_count += 1,
        FileKind::Special => report.special_count += 1,
    };
    if files.found.metadata.kind == FileKind::Directory && !files.found.names.is_empty() {
        add(&files.found.metadata);
    }
    let walked = walk_files(files, WalkDepth::Tree, job, &mut |file| {
        add(&file.metadata);
        Ok(())
    })?;
    report.failure_count = walked.unreadable.len() as u64;
    report.failures = walked.unreadable;
    report.disk_error = walked.disk_error;
    report.failures.truncate(FAILURE_COUNT_MAX);
    Ok(report)
}

/// Why one file was not restored.
#[derive(Debug, thiserror::Error)]
enum FileFailure {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(transparent)]
    Write(#[from] std::io::Error),
    #[error("it exists in the target")]
    Exists,
}

struct TreeRestorer<'a, 'b> {
    files: &'a mut LocatedFiles,
    conflicts: TargetConflicts,
    owners: Owners,
    job: Job<'b>,
    report: RestoredFiles,
    visited: VisitedDirectories,
    /// Files begun so far.
    number: u64,
    /// The folder that the user named.
    root: &'a TargetFolder,
    /// The names of the folders from there to the current one.
    place: Vec<Vec<u8>>,
    /// Files with several names that were restored, by the number that all their names have in common.
    shared: HashMap<u64, SharedFile>,
}

/// A restored file that has more names in the guest.
struct SharedFile {
    /// The names of the folders, and its own name.
    path: Vec<Vec<u8>>,
    identity: TargetFileIdentity,
}

impl TreeRestorer<'_, '_> {
    fn fail(&mut self, path: &[u8], failure: FileFailure) {
        self.report.failure_count += 1;
        if self.report.failures.len() < FAILURE_COUNT_MAX {
            self.report.failures.push(UnreadableFile {
                path: String::from_utf8_lossy(path).into_owned(),
                reason: holdfast_block::error_text(&failure),
            });
        }
        if let FileFailure::Read(ReadError::Device(error)) = failure {
            self.report.disk_error.get_or_insert(error);
        }
    }

    /// Restores one node into `folder`.
    ///
    /// # Errors
    /// Only an interruption; all failures are recorded.
    fn node(&mut self, folder: &TargetFolder, name: &[u8], node: NodeId, path: &[u8], depth: usize) -> Result<()> {
        self.job.interrupt.check()?;
        let metadata = match self.files.file_system.metadata(node) {
            Ok(metadata) => metadata,
            Err(error) => {
                self.fail(path, error.into());
                return Ok(());
            }
        };
        let restored = match metadata.kind {
            FileKind::Directory => return self.directory(folder, name, node, path, depth),
            FileKind::Special => {
                self.report.special_count += 1;
                return Ok(());
            }
            FileKind::File => self.file_or_link(folder, name, node, path, &metadata),
            FileKind::Link => self.link(folder, name, node, &metadata).map_err(FileStop::Failure),
        };
        match restored {
            Ok(()) => Ok(()),
            Err(FileStop::Interrupted(error)) => Err(error),
            Err(FileStop::Failure(failure)) => {
                self.fail(path, failure);
                Ok(())
            }
        }
    }

    fn directory(&mut self, folder: &TargetFolder, name: &[u8], node: NodeId, path: &[u8], depth: usize) -> Result<()> {
        let metadata = self.files.file_system.metadata(node).map_err(FileFailure::from);
        let below = folder.folder(name).map_err(FileFailure::from);
        let (metadata, below) = match (metadata, below) {
            (Ok(metadata), Ok(below)) => (metadata, below),
            (Err(failure), _) | (_, Err(failure)) => {
                self.fail(path, failure);
                return Ok(());
            }
        };
        self.report.directory_count += 1;
        self.place.push(name.to_vec());
        let content = self.content(&below, node, path, depth + 1);
        self.place.pop();
        content?;
        let finished = match self.files.file_system.attributes(node) {
            Ok(attributes) => below
                .finish(&metadata, &attributes, self.owners)
                .map(|losses| self.lose(path, losses))
                .map_err(FileFailure::from),
            Err(error) => Err(error.into()),
        };
        if let Err(failure) = finished {
            self.fail(path, failure);
        }
        Ok(())
    }

    /// Restores the content of a directory into `folder`.
    fn content(&mut self, folder: &TargetFolder, node: NodeId, path: &[u8], depth: usize) -> Result<()> {
        let too_deep = ReadError::TooLarge {
            what: "the depth of directories".into(),
            limit: DEPTH_MAX as u64,
        };
        let entries = if depth > DEPTH_MAX {
            Err(too_deep)
        } else {
            self.visited.enter(node, depth)
        };
        let entries = entries.and_then(|()| sorted_entries(&mut *self.files.file_system, node));
        match entries {
            Err(error) => self.fail(path, error.into()),
            Ok(entries) => {
                for entry in entries {
                    let path = [path.strip_suffix(b"/").unwrap_or(path), b"/", &entry.name].concat();
                    self.node(folder, &entry.name, entry.node, &path, depth)?;
                }
            }
        }
        Ok(())
    }

    fn link(
        &mut self,
        folder: &TargetFolder,
        name: &[u8],
        node: NodeId,
        metadata: &Metadata,
    ) -> std::result::Result<(), FileFailure> {
        let target = self.files.file_system.read_link(node)?;
        self.free(folder, name)?;
        if self.conflicts == TargetConflicts::Replace {
            folder.remove(name)?;
        }
        folder.link(name, &target, metadata, self.owners)?;
        self.report.link_count += 1;
        Ok(())
    }

    fn free(&self, folder: &TargetFolder, name: &[u8]) -> std::result::Result<(), FileFailure> {
        if self.conflicts == TargetConflicts::Keep && folder.has(name) {
            return Err(FileFailure::Exists);
        }
        Ok(())
    }

    /// Counts attributes that were not restored.
    fn lose(&mut self, path: &[u8], losses: AttributeLosses) {
        self.report.skipped_attribute_count += losses.skipped_count;
        self.report.failed_attribute_count += losses.failed_count;
        if let Some(first) = losses.first
            && self.report.failed_attribute.is_none()
        {
            self.report.failed_attribute = Some(format!("{}: {first}", String::from_utf8_lossy(path)));
        }
    }

    /// Restores a file; one that was restored under another name becomes a hard link to it.
    fn file_or_link(
        &mut self,
        folder: &TargetFolder,
        name: &[u8],
        node: NodeId,
        path: &[u8],
        metadata: &Metadata,
    ) -> std::result::Result<(), FileStop> {
        if let Some(shared) = metadata.shared_id.and_then(|id| self.shared.get(&id)) {
            self.free(folder, name)?;
            // Where links cannot be made, the file is restored once more.
            if folder
                .hard_link(name, self.root, &shared.path, shared.identity, self.conflicts)
                .is_ok()
            {
                self.report.hard_link_count += 1;
                return Ok(());
            }
        }
        let identity = self.file(folder, name, node, path, metadata)?;
        if let Some(id) = metadata.shared_id
            && self.shared.len() < SHARED_COUNT_MAX
        {
            let names = self.place.iter().cloned().chain([name.to_vec()]);
            let path = names.collect();
            self.shared.insert(id, SharedFile { path, identity });
        }
        Ok(())
    }

    fn file(
        &mut self,
        folder: &TargetFolder,
        name: &[u8],
        node: NodeId,
        path: &[u8],
        metadata: &Metadata,
    ) -> std::result::Result<TargetFileIdentity, FileStop> {
        self.free(folder, name)?;
        self.number += 1;
        let file = folder.file(self.number)?;
        let mut offset = 0;
        loop {
            self.job
                .interrupt
                .check()
                .map_err(|error| FileStop::Interrupted(error.into()))?;
            let length = match self.files.file_system.read_file(node, offset, PIECE_BYTES_MAX)? {
                FilePiece::End => break,
                FilePiece::Hole(length) => length,
                FilePiece::Data(bytes) => {
                    let mut at = offset;
                    for run in bytes
                        .chunks(HOLE_BYTES)
                        .collect::<Vec<_>>()
                        .chunk_by(|left, right| is_zero(left) == is_zero(right))
                    {
                        let length: usize = run.iter().map(|block| block.len()).sum();
                        if run.first().is_some_and(|block| !is_zero(block)) {
                            file.write_at(&run.concat(), at)?;
                        }
                        at += length as u64;
                    }
                    bytes.len() as u64
                }
            };
            offset = offset.saturating_add(length);
            self.job.progress.advance(length);
        }
        if offset != metadata.size_bytes {
            let detail = format!("{offset} bytes of {}", metadata.size_bytes);
            return Err(FileFailure::from(ReadError::Damaged {
                what: "file".into(),
                detail,
            })
            .into());
        }
        let attributes = self.files.file_system.attributes(node)?;
        let identity = file.identity()?;
        let losses = file.finish(
            name,
            &FileEnd {
                metadata,
                attributes: &attributes,
                owners: self.owners,
                conflicts: self.conflicts,
            },
        )?;
        self.lose(path, losses);
        self.report.file_count += 1;
        self.report.bytes = self.report.bytes.saturating_add(offset);
        Ok(identity)
    }
}

/// Why a file is not complete.
enum FileStop {
    Failure(FileFailure),
    Interrupted(Error),
}

impl<E: Into<FileFailure>> From<E> for FileStop {
    fn from(failure: E) -> Self {
        Self::Failure(failure.into())
    }
}
