//! `template push` and `template tag`: stores the content of a template, if it is not stored yet, and computes its digests.

use std::collections::BTreeMap;
use std::io::empty;
use std::path::PathBuf;

use holdfast_image::Format;
use holdfast_repo::{DiskContent, DiskRecord, Environment, Manifest, Repository};
use jiff::tz::TimeZone;

use super::digest::{digest_bytes, digest_device};
use super::entry::Entry;
use super::index::TemplateIndex;
use super::label::TemplateReference;
use super::publish::{
    DigestedContent, Publication, Replace, TemplateDraft, TemplatePlan, Unsealed, planned, protect_all, unseal,
};
use super::statement::{Piece, PieceKind};
use super::trust::{Trust, Unsigned};
use crate::capture::images::{BackupRequest, ImageListing, store_disks};
use crate::capture::snapshot::{ParentChoice, SnapshotOptions};
use crate::image::source::{DiskOrigin, OpenSource, SourceName, disk_names};
use crate::job::error::TemplateError;
use crate::job::{DiskName, Job, Result, Unit};
use crate::notes::{
    NOTE_TEMPLATE_DRAFT, STREAM_CONTAINER, STREAM_DOMAIN, STREAM_NVRAM, STREAM_TPM, TEMPLATE_MACHINE_PREFIX, is_memory,
};
use crate::repository::open::find_snapshot;
use crate::restore::small_stream::bytes_of;
use crate::{Continuation, SnapshotReference};

/// Default name of the only disk of a template, so that equal content has the same digest under every file name.
const ONLY_DISK: &str = "disk";

/// The source of a template.
#[derive(Debug, Clone)]
pub enum PushSource {
    /// Images.
    Images {
        /// The images, each a disk.
        disks: Vec<SourceName>,
        /// The format of all images, if it is not to be detected.
        format: Option<Format>,
        /// Backing files that are allowed although they are in other folders.
        allowed: Vec<PathBuf>,
    },
    /// A snapshot of a machine: its disks, its configuration and the variables of its firmware.
    Snapshot(SnapshotReference),
}

/// Parameters of a push.
#[derive(Debug, Clone)]
pub struct PushRequest {
    /// The source.
    pub source: PushSource,
    /// Name and description.
    pub publication: Publication,
    /// Time zone of times in a snapshot's name.
    pub zone: TimeZone,
}

/// Prepares a template up to its signature.
///
/// # Errors
/// The tag exists with other content, and its replacement was not requested.
pub fn prepare_push<'r>(
    repository: &'r Repository,
    request: PushRequest,
    environment: &Environment,
    job: Job<'_>,
) -> Result<Unsealed<'r>> {
    let shelf = TemplateIndex::read(repository)?;
    shelf.clear_dead_drafts(repository, environment, job.progress);
    protect_all(repository, &shelf, job.progress)?;
    let content = match request.source {
        PushSource::Images { disks, format, allowed } => {
            let images = Images {
                disks: named(disks)?,
                format,
                allowed,
                publication: &request.publication,
            };
            images.refuse_taken(&shelf, job)?;
            images.store(repository, &shelf, environment, job)?
        }
        PushSource::Snapshot(reference) => {
            let snapshot = find_snapshot(repository, &reference, &request.zone, job.progress)?;
            stored(repository, snapshot, job)?
        }
    };
    unseal(repository, content, request.publication, job.progress)
}

/// Plans a push: the content is read for its digests, and nothing is stored.
///
/// # Errors
/// Those of [`prepare_push`].
pub fn plan_push(repository: &Repository, request: PushRequest, job: Job<'_>) -> Result<TemplatePlan> {
    let shelf = TemplateIndex::read(repository)?;
    shelf.warn_of_unreadable(job.progress);
    let pieces = match request.source {
        PushSource::Images { disks, format, allowed } => digested_images(&named(disks)?, format, &allowed, job)?,
        PushSource::Snapshot(reference) => {
            let snapshot = find_snapshot(repository, &reference, &request.zone, job.progress)?;
            stored(repository, snapshot, job)?.pieces
        }
    };
    planned(&shelf, pieces, &request.publication)
}

/// Reads images for their digests.
fn digested_images(
    disks: &[SourceName],
    format: Option<Format>,
    allowed: &[PathBuf],
    job: Job<'_>,
) -> Result<Vec<Piece>> {
    let names = disk_names(disks, job.progress)?;
    job.progress.phase("hashing the images", Unit::Bytes);
    let mut pieces = Vec::new();
    for (disk, name) in disks.iter().zip(names) {
        let DiskOrigin::Path(path) = &disk.origin else { continue };
        let image = OpenSource::open(path, format, allowed)?;
        pieces.push(Piece {
            kind: PieceKind::Disk,
            size_bytes: image.device.size_bytes(),
            digest: digest_device(&*image.device, job)?,
            name: DiskName::new(name)?,
        });
    }
    Ok(pieces)
}

/// How to verify the template that gets another tag.
#[derive(Clone, Copy)]
pub struct Vouching<'a> {
    /// The trusted signers.
    pub trust: &'a Trust<'a>,
    /// What to do if none of them has signed it.
    pub unsigned: Unsigned,
}

/// Prepares another name or tag for a template, up to its signature. The signer vouches for the content, so the
/// signature of the template is verified, and its content is read.
pub fn prepare_tag<'r>(
    repository: &'r Repository,
    of: &TemplateReference,
    publication: Publication,
    vouching: Vouching<'_>,
    job: Job<'_>,
) -> Result<Unsealed<'r>> {
    let shelf = TemplateIndex::read(repository)?;
    protect_all(repository, &shelf, job.progress)?;
    let (content, publication) = tagged(repository, &shelf, of, publication, vouching, job)?;
    unseal(repository, content, publication, job.progress)
}

/// Plans another name or tag for a template: its content is read, and nothing is stored.
///
/// # Errors
/// Those of [`prepare_tag`].
pub fn plan_tag(
    repository: &Repository,
    of: &TemplateReference,
    publication: Publication,
    vouching: Vouching<'_>,
    job: Job<'_>,
) -> Result<TemplatePlan> {
    let shelf = TemplateIndex::read(repository)?;
    let (content, publication) = tagged(repository, &shelf, of, publication, vouching, job)?;
    planned(&shelf, content.pieces, &publication)
}

/// The content of a template that gets another tag, and its new description.
fn tagged<'r>(
    repository: &'r Repository,
    shelf: &TemplateIndex,
    of: &TemplateReference,
    publication: Publication,
    vouching: Vouching<'_>,
    job: Job<'_>,
) -> Result<(DigestedContent<'r>, Publication)> {
    shelf.warn_of_unreadable(job.progress);
    let entry = shelf.find(of, Some(vouching.trust))?;
    if vouching.unsigned == Unsigned::Refuse {
        vouching.trust.demand(entry)?;
    }
    let content = DigestedContent {
        pieces: digested(
            repository,
            &entry.manifest,
            &entry.manifest.disks.iter().collect::<Vec<_>>(),
            job,
        )?,
        source: entry.manifest.clone(),
        own_bytes: 0,
        draft: None,
    };
    if let Some((piece, _)) = content
        .pieces
        .iter()
        .zip(&entry.statement.pieces)
        .find(|(found, said)| found != said)
    {
        let name = piece.name.to_string();
        return Err(TemplateError::OtherContent { name }.into());
    }
    let description = match publication.description.as_str() {
        "" => entry.statement.description.clone(),
        given => given.to_owned(),
    };
    let publication = Publication {
        description,
        ..publication
    };
    Ok((content, publication))
}

/// Gives the only disk a default name, if it has none.
fn named(mut disks: Vec<SourceName>) -> Result<Vec<SourceName>> {
    if disks.iter().any(|disk| disk.origin == DiskOrigin::StandardInput) {
        return Err(TemplateError::NoStream.into());
    }
    if let [only] = &mut disks[..]
        && only.disk.is_none()
    {
        only.disk = Some(DiskName::new(ONLY_DISK)?);
    }
    Ok(disks)
}

struct Images<'a> {
    disks: Vec<SourceName>,
    format: Option<Format>,
    allowed: Vec<PathBuf>,
    publication: &'a Publication,
}

impl Images<'_> {
    /// Detects a refusal before anything is stored.
    fn refuse_taken(&self, shelf: &TemplateIndex, job: Job<'_>) -> Result<()> {
        let current = shelf.current(&self.publication.label);
        let Some(current) = current.filter(|_| self.publication.replace == Replace::Refuse) else {
            return Ok(());
        };
        let names = disk_names(&self.disks, job.progress)?;
        let mut is_same = names.len() == current.statement.pieces.len();
        job.progress
            .phase("comparing with the template that is there", Unit::Bytes);
        for ((disk, name), piece) in self.disks.iter().zip(&names).zip(&current.statement.pieces) {
            let DiskOrigin::Path(path) = &disk.origin else { continue };
            let image = OpenSource::open(path, self.format, &self.allowed)?;
            let is_alike = is_same && piece.name.as_str() == name && piece.size_bytes == image.device.size_bytes();
            is_same = is_alike && digest_device(&*image.device, job)? == piece.digest;
        }
        if is_same {
            return Ok(());
        }
        Err(TemplateError::TagTaken {
            label: self.publication.label.to_string(),
            time: current.statement.time,
        }
        .into())
    }

    /// Stores the images as a draft.
    fn store<'r>(
        self,
        repository: &'r Repository,
        shelf: &TemplateIndex,
        environment: &Environment,
        job: Job<'_>,
    ) -> Result<DigestedContent<'r>> {
        let name = &self.publication.label.name;
        let of_name = |entry: &&Entry| entry.statement.label.name == *name;
        let process = serde_json::to_string(&environment.processes.this());
        let process = process.expect("an identity is made of strings and numbers");
        let listing = ImageListing {
            machine: format!("{TEMPLATE_MACHINE_PREFIX}{name}"),
            notes: BTreeMap::from([(NOTE_TEMPLATE_DRAFT.to_owned(), process)]),
            parent: shelf.entries.iter().rfind(of_name).map(|entry| &entry.manifest),
        };
        let request = BackupRequest {
            sources: self.disks,
            machine: None,
            format: self.format,
            allowed: self.allowed,
            snapshot: SnapshotOptions {
                parent: ParentChoice::None,
                continuation: Continuation::default(),
                tags: Vec::new(),
                host: self.publication.host.clone(),
                program: self.publication.program.clone(),
                zone: TimeZone::UTC,
            },
            time: self.publication.time,
            stdin: &mut empty(),
        };
        let report = store_disks(repository, request, listing, job)?;
        let draft = TemplateDraft {
            repository,
            snapshot: report.snapshot.id,
        };
        let disks: Vec<&DiskRecord> = report.snapshot.disks.iter().collect();
        Ok(DigestedContent {
            pieces: digested(repository, &report.snapshot, &disks, job)?,
            own_bytes: report.snapshot.statistics().new_bytes,
            source: report.snapshot,
            draft: Some(draft),
        })
    }
}

/// The content of a machine's snapshot for a template.
fn stored<'r>(repository: &'r Repository, snapshot: Manifest, job: Job<'_>) -> Result<DigestedContent<'r>> {
    let is_disk = |record: &&DiskRecord| record.content == DiskContent::Blocks && !is_memory(record);
    let has_file = |name: &str| snapshot.disks.iter().find(|record| record.name == name);
    let files = [STREAM_DOMAIN, STREAM_NVRAM, STREAM_CONTAINER]
        .into_iter()
        .filter_map(has_file);
    let records: Vec<&DiskRecord> = snapshot.disks.iter().filter(is_disk).chain(files).collect();
    if snapshot.disks.iter().any(is_memory) {
        job.progress
            .note("the memory of the machine is left out: a template starts anew");
    }
    if snapshot.disks.iter().any(|record| record.name == STREAM_TPM) {
        job.progress
            .note("the state of the TPM is left out: its secrets are for one machine only");
    }
    if let (true, Some(stream)) = (records.is_empty(), snapshot.disks.first()) {
        let (id, name) = (snapshot.id, stream.name.clone());
        return Err(TemplateError::StreamDisk { id, name }.into());
    }
    Ok(DigestedContent {
        pieces: digested(repository, &snapshot, &records, job)?,
        own_bytes: 0,
        source: snapshot,
        draft: None,
    })
}

/// Reads the disks and files of a snapshot for their digests.
fn digested(repository: &Repository, snapshot: &Manifest, records: &[&DiskRecord], job: Job<'_>) -> Result<Vec<Piece>> {
    job.progress.phase("hashing what is stored", Unit::Bytes);
    job.progress.total(snapshot.logical_bytes());
    let mut pieces = Vec::new();
    for record in records {
        let (kind, digest) = match record.content {
            DiskContent::Blocks => {
                let device = repository.device_checking_prints(record);
                (PieceKind::Disk, digest_device(&device, job)?)
            }
            DiskContent::Stream => (PieceKind::File, digest_bytes(&bytes_of(repository, record)?)),
        };
        pieces.push(Piece {
            kind,
            size_bytes: record.size_bytes,
            digest,
            name: DiskName::new(record.name.as_str())?,
        });
    }
    Ok(pieces)
}
