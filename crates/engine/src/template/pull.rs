//! `template pull`: writes a template as an image, or as a folder of a machine.
//!
//! The statement is used only after its signature was verified, and the content only after it matches the digests of
//! the statement: the written bytes are those that were hashed, and no file gets its final name before the last byte
//! was checked.

use std::path::PathBuf;
use std::time::Duration;

use holdfast_host::{Tools, Verdict};
use holdfast_image::Format;
use holdfast_repo::{Environment, Repository, SnapshotId};

use super::entry::Entry;
use super::folder::write_folder;
use super::index::TemplateIndex;
use super::pull_content::Pull;
use super::pull_request::{PullRequest, PullTarget, PulledDisk};
use super::statement::Statement;
use super::trust::{SignedBy, Trust, Unsigned};
use crate::files::block_target::Overwrite;
use crate::job::{Job, Result};
use crate::repository::forget::Execution;
use crate::repository::removed::keep_readable;

/// A pulled template.
#[derive(Debug, Clone)]
pub struct PullReport {
    /// Its snapshot.
    pub snapshot: SnapshotId,
    /// Its statement.
    pub statement: Statement,
    /// Its signer.
    pub signed: SignedBy,
    /// The disks.
    pub disks: Vec<PulledDisk>,
    /// The configuration, and the name of the machine in it.
    pub configuration: Option<(PathBuf, String)>,
    /// The format of the images.
    pub format: Format,
    /// How long it took.
    pub duration: Duration,
}

/// Pulls a template, or plans that.
///
/// # Errors
/// It has no trusted signature, or its content differs from the signed one; nothing is left.
pub fn pull_template(
    repository: &Repository,
    request: &PullRequest,
    trust: &Trust<'_>,
    environment: &Environment,
    tools: &dyn Tools,
    job: Job<'_>,
) -> Result<PullReport> {
    let start = job.clock.now();
    // First of all, so that every template that is found stays readable.
    let is_written = request.execution == Execution::Execute;
    let _pause = is_written.then(|| keep_readable(repository, job.progress));
    let shelf = TemplateIndex::read(repository)?;
    shelf.warn_of_unreadable(job.progress);
    let entry = shelf.find(&request.template, Some(trust))?;
    let signed = vouched(entry, trust, request.unsigned, job)?;
    let pull = Pull {
        repository,
        entry,
        request,
        environment,
        tools,
        job,
    };
    let format = match &request.target {
        PullTarget::Image { format, .. } | PullTarget::Folder { format, .. } | PullTarget::Fitting { format, .. } => {
            *format
        }
    };
    let (disks, configuration) = match request.target.clone() {
        PullTarget::Image {
            path,
            format,
            overwrite,
        } => (pull.image(&path, format, overwrite)?, None),
        PullTarget::Fitting { path, format, .. } if entry.statement.pieces.len() == 1 => {
            (pull.image(&path, format, Overwrite::Refuse)?, None)
        }
        PullTarget::Folder {
            path,
            format,
            name,
            identity,
        } => write_folder(&pull, &path, format, name, identity)?,
        PullTarget::Fitting { path, format, identity } => write_folder(&pull, &path, format, None, identity)?,
    };
    Ok(PullReport {
        snapshot: entry.manifest.id,
        statement: entry.statement.clone(),
        signed,
        disks,
        configuration,
        format,
        duration: job.clock.now().saturating_sub(start),
    })
}

/// The signer of a template, or none if unsigned templates are accepted.
pub(super) fn vouched(entry: &Entry, trust: &Trust<'_>, unsigned: Unsigned, job: Job<'_>) -> Result<SignedBy> {
    if unsigned == Unsigned::Refuse {
        return trust.demand(entry).map(SignedBy::Signed);
    }
    let signed = trust.judge(entry)?;
    if !matches!(signed, SignedBy::Signed(Verdict::Good { .. })) {
        let label = &entry.statement.label;
        job.progress.warning(&format!(
            "{label} has no signature that is trusted: it may come from anyone who can write to the repository"
        ));
    }
    Ok(signed)
}
