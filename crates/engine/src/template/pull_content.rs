//! Writes disks and files of a template, and checks them meanwhile.

use super::checked::CheckedDevice;
use super::digest::digest_bytes;
use super::entry::Entry;
use super::pull_request::{PullRequest, PulledDisk, TemplateGuest};
use super::statement::Piece;
use crate::files::block_target::Overwrite;
use crate::image::convert::{ConvertRequest, ConvertSource, VerifyImage, convert_and, plan_convert};
use crate::image::guest_identity::{GuestIdentity, renew_guest};
use crate::image::sector_size::noted_sector;
use crate::job::error::TemplateError;
use crate::job::{Job, Result, Unit};
use crate::repository::forget::Execution;
use crate::restore::small_stream::bytes_of;
use holdfast_host::Tools;
use holdfast_image::{BlockOptions, Format, OpenOptions, Qcow2Options};
use holdfast_repo::{Environment, Repository};
use std::path::{Path, PathBuf};

/// A template that is being pulled.
pub(super) struct Pull<'a> {
    pub(super) repository: &'a Repository,
    pub(super) entry: &'a Entry,
    pub(super) request: &'a PullRequest,
    pub(super) environment: &'a Environment,
    pub(super) tools: &'a dyn Tools,
    pub(super) job: Job<'a>,
}

impl Pull<'_> {
    /// The only disk, as an image.
    pub(super) fn image(&self, path: PathBuf, format: Format, overwrite: Overwrite) -> Result<Vec<PulledDisk>> {
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
        Ok(vec![self.disk(only, &path, format, overwrite, &renew)?])
    }

    /// Gives the guest a new identity, if requested.
    pub(super) fn renew_guest(&self, name: &Path, images: &[(&Path, Format)], host_name: Option<&str>) -> Result<()> {
        let TemplateGuest::Renew(program) = &self.request.guest else {
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

    /// Writes a disk, which gets its name only after its content was checked, and the changes to it were made.
    pub(super) fn disk(
        &self,
        piece: &Piece,
        path: &Path,
        format: Format,
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
        match self.request.execution {
            Execution::Execute => convert_and(source, &request, change, self.environment, self.job).map(drop)?,
            Execution::DryRun => plan_convert(source, &request, self.job).map(drop)?,
        }
        Ok(PulledDisk {
            name: piece.name.to_string(),
            path: path.to_owned(),
            size_bytes: piece.size_bytes,
        })
    }

    /// A small file of the template, with checked content; none if the template does not have it.
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
