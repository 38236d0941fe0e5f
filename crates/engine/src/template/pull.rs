//! `template pull`: a template becomes an image, or a folder of a machine.
//!
//! The statement counts only after its signature was judged, and the content only after it was found to have the digests of the statement:
//! the bytes that are written are those that were hashed, and nothing has its name before the last of them was.

use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_host::{Tools, Verdict};
use holdfast_image::{BlockOptions, Format, OpenOptions, Qcow2Options, Storage};
use holdfast_repo::{Repository, SnapshotId, Surroundings};

use super::checked::CheckedDevice;
use super::digest::digest_bytes;
use super::folder::write_folder;
use super::label::TemplateReference;
use super::shelf::{Entry, Shelf};
use super::statement::{Piece, Statement};
use super::trust::{SignedBy, Trust, Unsigned};
use crate::files::block_target::Overwrite;
use crate::image::convert::{ConvertRequest, ConvertSource, VerifyImage, convert_and};
use crate::image::guest_identity::{GuestIdentity, renew_guest};
use crate::image::sector_size::noted_sector;
use crate::job::error::TemplateError;
use crate::job::{Job, Result, Unit};
use crate::restore::small_stream::bytes_of;

/// Whether the machine becomes another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepIdentity {
    /// It gets a name, a UUID and network addresses of its own.
    No,
    /// It is the one that was pushed.
    Yes,
}

/// Where a template goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullTarget {
    /// An image, or a block device: of a template with one disk.
    Image {
        /// Where.
        path: PathBuf,
        /// Its format.
        format: Format,
        /// What to do about what is there.
        overwrite: Overwrite,
    },
    /// A new folder: images, and the configuration of libvirt where there is one.
    Folder {
        /// Where.
        path: PathBuf,
        /// The format of the images.
        format: Format,
        /// What the machine is to be called; like the folder where not given.
        name: Option<String>,
        /// Whether it becomes another one.
        identity: KeepIdentity,
    },
    /// The first of the two where there is one disk and no configuration, or else the second.
    Fitting {
        /// Where.
        path: PathBuf,
        /// The format of the images.
        format: Format,
        /// Whether the machine becomes another one.
        identity: KeepIdentity,
    },
}

/// What to pull.
#[derive(Debug, Clone)]
pub struct PullRequest {
    /// The template.
    pub template: TemplateReference,
    /// Where to.
    pub target: PullTarget,
    /// What becomes of one that nobody vouches for.
    pub unsigned: Unsigned,
    /// Whether clusters are compressed.
    pub storage: Storage,
    /// When the images are made, in seconds since 1970; a VHD says it.
    pub created_s: u64,
    /// Whether the guest gets an identity of its own, and is called like its machine, or the image.
    pub guest: Guest,
}

/// What becomes of a guest's own identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Guest {
    /// It stays as it was pushed.
    Keep,
    /// It is made anew, by the `virt-sysprep` that is there; not on a block device.
    Renew(PathBuf),
}

/// A disk that was pulled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PulledDisk {
    /// Its name in the template.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// Its size in bytes.
    pub size_bytes: u64,
}

/// A template that was pulled.
#[derive(Debug, Clone)]
pub struct PullReport {
    /// The snapshot that it is.
    pub snapshot: SnapshotId,
    /// What it is.
    pub statement: Statement,
    /// Who vouches for it.
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

/// Pulls a template.
///
/// # Errors
/// Nobody vouches for it, or its content is not what was signed: then nothing is left.
pub fn pull_template(
    repository: &Repository,
    request: &PullRequest,
    trust: &Trust<'_>,
    (surroundings, tools): (&Surroundings, &dyn Tools),
    job: Job<'_>,
) -> Result<PullReport> {
    let start = job.clock.now();
    // Before anything is looked at: what is removed meanwhile stays readable. A repository that cannot be written has no gc that could
    // delete it.
    let _pause = repository
        .pause_gc()
        .map_err(|error| {
            let text = format!("gc is not kept from deleting what is removed meanwhile: {error}");
            job.progress.note(&text);
        })
        .ok();
    let shelf = Shelf::read(repository)?;
    shelf.tell_of_unreadable(job.progress);
    let entry = shelf.find(&request.template, Some(trust))?;
    let signed = vouched(entry, trust, request.unsigned, job)?;
    let pull = Pull {
        repository,
        entry,
        request,
        surroundings,
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
        } => (pull.image(path, format, overwrite)?, None),
        PullTarget::Fitting { path, format, .. } if entry.statement.pieces.len() == 1 => {
            (pull.image(path, format, Overwrite::Refuse)?, None)
        }
        PullTarget::Folder {
            path,
            format,
            name,
            identity,
        } => write_folder(&pull, &path, format, (name, identity))?,
        PullTarget::Fitting { path, format, identity } => write_folder(&pull, &path, format, (None, identity))?,
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

/// Who vouches for a template, for whoever takes also what nobody vouches for.
fn vouched(entry: &Entry, trust: &Trust<'_>, unsigned: Unsigned, job: Job<'_>) -> Result<SignedBy> {
    if unsigned == Unsigned::Refuse {
        return trust.demand(entry).map(SignedBy::Signed);
    }
    let signed = trust.judge(entry)?;
    if !matches!(signed, SignedBy::Signed(Verdict::Good { .. })) {
        let label = &entry.statement.label;
        job.progress.warning(&format!(
            "nobody whose signature counts vouches for {label}: whoever can write to the repository may have made it"
        ));
    }
    Ok(signed)
}

/// A template on its way out.
pub(super) struct Pull<'a> {
    pub(super) repository: &'a Repository,
    pub(super) entry: &'a Entry,
    request: &'a PullRequest,
    pub(super) surroundings: &'a Surroundings,
    tools: &'a dyn Tools,
    pub(super) job: Job<'a>,
}

impl Pull<'_> {
    /// The only disk, as an image.
    fn image(&self, path: PathBuf, format: Format, overwrite: Overwrite) -> Result<Vec<PulledDisk>> {
        let statement = &self.entry.statement;
        let disks: Vec<&Piece> = statement.disks().collect();
        let [only] = disks[..] else {
            return Err(TemplateError::SeveralDisks {
                label: statement.label.to_string(),
                disk_count: disks.len(),
                target: path,
            }
            .into());
        };
        if statement.pieces.len() > 1 {
            self.job
                .progress
                .note("the configuration of its machine is left out: a folder as target gets it, too");
        }
        let named = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let renew = |partial: &Path| self.renew_guest(&path, &[(partial, format)], named.as_deref());
        Ok(vec![self.disk(only, (&path, format), overwrite, &renew)?])
    }

    /// Gives the guest an identity of its own, if that is wanted.
    pub(super) fn renew_guest(&self, name: &Path, images: &[(&Path, Format)], host_name: Option<&str>) -> Result<()> {
        let Guest::Renew(program) = &self.request.guest else {
            return Ok(());
        };
        self.job
            .progress
            .phase("giving the guest an identity of its own", Unit::Items);
        let identity = GuestIdentity {
            host_name: host_name.map(str::to_owned),
            program: program.clone(),
        };
        renew_guest(name, images, &identity, self.tools)
    }

    /// Writes a disk, which gets its name when all of it was found to be what was signed, and then was changed.
    pub(super) fn disk(
        &self,
        piece: &Piece,
        (path, format): (&Path, Format),
        overwrite: Overwrite,
        change: &dyn Fn(&Path) -> Result<()>,
    ) -> Result<PulledDisk> {
        let record = self.entry.manifest.disk(Some(piece.name.as_str()))?;
        let stored = self.repository.device_checking_prints(record);
        let checked = CheckedDevice::new(&stored);
        let check = || checked.check_end(piece);
        let request = ConvertRequest {
            open: OpenOptions::default(),
            target: path.to_owned(),
            format,
            qcow2: Qcow2Options::default(),
            blocks: BlockOptions {
                created_s: self.request.created_s,
                sector_bytes: noted_sector(&record.notes),
                ..BlockOptions::default()
            },
            storage: self.request.storage,
            overwrite,
            verify: VerifyImage::No,
        };
        let source = ConvertSource::Checked(&checked, &check);
        convert_and(source, &request, change, (self.surroundings, self.job))?;
        Ok(PulledDisk {
            name: piece.name.to_string(),
            path: path.to_owned(),
            size_bytes: piece.size_bytes,
        })
    }

    /// A small file of the template, found to be what was signed; none where it has none of this name.
    pub(super) fn file(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(piece) = self.entry.statement.file(name) else {
            return Ok(None);
        };
        let record = self.entry.manifest.disk(Some(name))?;
        let bytes = bytes_of(self.repository, record)?;
        if bytes.len() as u64 != piece.size_bytes || digest_bytes(&bytes) != piece.digest {
            let name = name.to_owned();
            return Err(TemplateError::OtherContent { name }.into());
        }
        Ok(Some(bytes))
    }
}
