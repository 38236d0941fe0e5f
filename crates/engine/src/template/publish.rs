//! Publishes stored content as a template: the statement is made, signed with the requested key, and committed with the content.
//!
//! The content is already a snapshot: of a machine, of another template, or a draft stored by a push. The template is a
//! second snapshot that shares all its data. So its statement describes bytes that are in the repository, even if the
//! image has changed meanwhile, and the template appears complete or not at all.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_host::SshSignatures;
use holdfast_repo::{
    BackupRequest, Claim, CopyMemory, Error as RepositoryError, Manifest, Parent, Repository, SnapshotId, Source,
    SourceData, StoredDisk,
};
use jiff::{SignedDuration, Timestamp};

use super::digest::Digest;
use super::index::TemplateIndex;
use super::label::TemplateLabel;
use super::protect;
use super::statement::{Piece, Statement};
use super::trust::signed;
use crate::job::error::TemplateError;
use crate::job::{Counting, Error, Job, Progress, Result, Unit};
use crate::notes::{
    NOTE_FORMAT, NOTE_SECTOR_BYTES, NOTE_TEMPLATE, NOTE_TEMPLATE_OWN_BYTES, NOTE_TEMPLATE_SIGNATURE,
    TEMPLATE_MACHINE_PREFIX, note,
};

/// A template with a time later than this in the future is not explained by a clock that is slightly wrong.
const AHEAD_MAX: SignedDuration = SignedDuration::from_hours(24);

/// What to do if the tag exists with other content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replace {
    /// The push is refused.
    Refuse,
    /// The tag refers to the new content from now on; the old content stays available by its digest.
    Replace,
}

/// Name and description of a new template.
#[derive(Debug, Clone)]
pub struct Publication {
    /// Name and tag.
    pub label: TemplateLabel,
    /// A description in one line; may be empty.
    pub description: String,
    /// What to do if the tag exists.
    pub replace: Replace,
    /// The current time.
    pub time: Timestamp,
    /// The host that pushes.
    pub host: String,
    /// The program that pushes.
    pub program: String,
}

/// A template that is complete except for its signature.
///
/// As long as it exists, no other process can push to its tag. Dropping it removes its draft.
pub struct Unsealed<'r> {
    repository: &'r Repository,
    claim: Claim<'r>,
    statement: Statement,
    source: Manifest,
    /// Removed when this is dropped.
    _draft: Option<TemplateDraft<'r>>,
    publication: Publication,
    own_bytes: u64,
    before: Option<Digest>,
}

/// A published template.
#[derive(Debug, Clone)]
pub struct Published {
    /// Its snapshot.
    pub snapshot: SnapshotId,
    /// Its statement.
    pub statement: Statement,
    /// Bytes that were new to the repository.
    pub own_bytes: u64,
    /// Bytes of its disks that are not zero.
    pub data_bytes: u64,
    /// The content that the tag referred to before; none for a new tag.
    pub before: Option<Digest>,
    /// Duration of the commit.
    pub duration: Duration,
}

/// Content that a push has stored; removed when this is dropped.
pub(super) struct TemplateDraft<'r> {
    pub(super) repository: &'r Repository,
    pub(super) snapshot: SnapshotId,
}

impl Drop for TemplateDraft<'_> {
    fn drop(&mut self) {
        // If it is not removed, the next push removes it.
        self.repository.forget(self.snapshot, "template push: it is over").ok();
    }
}

/// Content in the repository, with its digests.
pub(super) struct DigestedContent<'r> {
    pub(super) source: Manifest,
    pub(super) pieces: Vec<Piece>,
    pub(super) own_bytes: u64,
    pub(super) draft: Option<TemplateDraft<'r>>,
}

/// Makes the statement for content.
///
/// # Errors
/// The tag exists with other content, or another process is pushing to it.
pub(super) fn unseal<'r>(
    repository: &'r Repository,
    content: DigestedContent<'r>,
    publication: Publication,
    progress: &dyn Progress,
) -> Result<Unsealed<'r>> {
    let claim = repository.claim("a push to this tag", &format!("template {}", publication.label))?;
    let shelf = TemplateIndex::read(repository)?;
    shelf.warn_of_unreadable(progress);
    let TemplatePlan { statement, before } = planned(&shelf, content.pieces, &publication)?;
    Ok(Unsealed {
        repository,
        claim,
        statement,
        source: content.source,
        _draft: content.draft,
        own_bytes: content.own_bytes,
        publication,
        before,
    })
}

/// Plan of a push.
#[derive(Debug, Clone)]
pub struct TemplatePlan {
    /// The template.
    pub statement: Statement,
    /// The content that the tag refers to now; none for a new tag.
    pub before: Option<Digest>,
}

/// Makes the statement for content, for a plan.
///
/// # Errors
/// The tag exists with other content.
pub(super) fn planned(shelf: &TemplateIndex, pieces: Vec<Piece>, publication: &Publication) -> Result<TemplatePlan> {
    let current = shelf.current(&publication.label);
    let newest = current.map(|entry| entry.statement.time);
    let time = time_after(publication.time, newest, &publication.label)?;
    let description = publication.description.clone();
    let statement = Statement::new(publication.label.clone(), time, description, pieces)?;
    let before = current.map(|entry| entry.statement.content());
    if publication.replace == Replace::Refuse
        && let Some(current) = current.filter(|current| current.statement.content() != statement.content())
    {
        return Err(TemplateError::TagTaken {
            label: publication.label.to_string(),
            time: current.statement.time,
        }
        .into());
    }
    Ok(TemplatePlan { statement, before })
}

/// The time of a push, after that of the previous push: a tag refers to its newest template.
fn time_after(now: Timestamp, newest: Option<Timestamp>, label: &TemplateLabel) -> Result<Timestamp> {
    let now = Timestamp::from_millisecond(now.as_millisecond()).unwrap_or(now);
    let Some(newest) = newest.filter(|newest| *newest >= now) else {
        return Ok(now);
    };
    let next = newest.checked_add(SignedDuration::from_millis(1));
    match next {
        Ok(next) if newest.duration_since(now) <= AHEAD_MAX => Ok(next),
        _ => Err(TemplateError::FromTheFuture {
            label: label.to_string(),
            time: newest,
        }
        .into()),
    }
}

impl Unsealed<'_> {
    /// The text to sign.
    pub fn text(&self) -> String {
        self.statement.encode()
    }

    /// The statement.
    pub fn statement(&self) -> &Statement {
        &self.statement
    }

    /// Commits the template, with its signature if it has one.
    ///
    /// # Errors
    /// The signature does not match the text.
    pub fn publish(self, signature: Option<(String, &SshSignatures<'_>)>, job: Job<'_>) -> Result<Published> {
        let start = job.clock.now();
        let text = self.statement.encode();
        if let Some((signature, signatures)) = &signature {
            let judged = signatures.verify(&signed(&text, signature, self.statement.time), None);
            if let holdfast_host::Verdict::Bad { reason } = judged.map_err(TemplateError::from)? {
                return Err(TemplateError::SignedWrong { reason }.into());
            }
        }
        let mut notes = BTreeMap::from([
            (NOTE_TEMPLATE.to_owned(), text),
            (NOTE_TEMPLATE_OWN_BYTES.to_owned(), self.own_bytes.to_string()),
        ]);
        notes.extend(signature.map(|(signature, _)| (NOTE_TEMPLATE_SIGNATURE.to_owned(), signature)));
        job.progress.phase("committing the template", Unit::Bytes);
        job.progress.total(self.statement.size_bytes());
        job.interrupt.check()?;
        if !self.claim.holds()? {
            return Err(TemplateError::LostClaim.into());
        }
        let manifest = self.commit(notes, job)?;
        // Programs that do not know templates may see it from the commit on, so it is protected immediately. If this
        // process is killed in between, the next push protects it.
        protect(self.repository, &manifest)?;
        let statistics = manifest.statistics();
        Ok(Published {
            snapshot: manifest.id,
            own_bytes: self.own_bytes,
            data_bytes: manifest.logical_bytes().saturating_sub(statistics.zero_bytes),
            before: self.before,
            statement: self.statement,
            duration: job.clock.now().saturating_sub(start),
        })
    }

    fn commit(&self, notes: BTreeMap<String, String>, job: Job<'_>) -> Result<Manifest> {
        let memory = CopyMemory::default();
        let sources = self.statement.pieces.iter().map(|piece| {
            let disk = self.source.disk(Some(piece.name.as_str()))?;
            let data = SourceData::Stored(StoredDisk {
                repository: self.repository,
                disk,
                base: Some(disk),
                pace: &|_| {},
                memory: &memory,
            });
            // The path of an image is not published.
            let shared = [NOTE_FORMAT, NOTE_SECTOR_BYTES];
            let notes = shared
                .iter()
                .filter_map(|key| Some(((*key).to_owned(), note(&disk.notes, key)?.clone())));
            Ok(Source {
                name: disk.name.clone(),
                data,
                notes: notes.collect(),
            })
        });
        let sources = sources.collect::<std::result::Result<Vec<_>, RepositoryError>>()?;
        let request = BackupRequest {
            machine: format!("{TEMPLATE_MACHINE_PREFIX}{}", self.publication.label.name),
            time_ms: self.statement.time.as_millisecond(),
            tags: Vec::new(),
            parent: Parent::Named(self.source.id),
            host: self.publication.host.clone(),
            program: self.publication.program.clone(),
            notes,
            sources,
            thread_count: job.thread_count,
        };
        let report = self
            .repository
            .backup(request, &job.watch(Counting::Bytes))
            .map_err(Error::from)?;
        Ok(report.snapshot)
    }
}

/// Protects templates whose push was killed before it could, or that an earlier version has copied.
pub(super) fn protect_all(repository: &Repository, shelf: &TemplateIndex, progress: &dyn Progress) -> Result<()> {
    let protected = repository.protected()?;
    for entry in shelf
        .entries
        .iter()
        .filter(|entry| !protected.contains(&entry.manifest.id))
    {
        if let Err(error) = protect(repository, &entry.manifest) {
            let label = &entry.statement.label;
            progress.warning(&format!("{label} is not protected from earlier programs: {error}"));
        }
    }
    Ok(())
}
