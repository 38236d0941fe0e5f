//! Writes disks and files of a template, and checks them meanwhile.

use super::checked::CheckedDevice;
use super::entry::Entry;
use super::pull_request::{PullRequest, PulledDisk, TemplateGuest};
use super::statement::Piece;
use crate::files::block_target::Overwrite;
use crate::image::convert::{ConvertRequest, ConvertSource, VerifyImage, convert_and, plan_convert};
use crate::image::guest_identity::{GuestIdentity, renew_guest};
use crate::image::sector_size::noted_sector;
use crate::job::{Job, Result, Unit};
use crate::repository::forget::Execution;
use holdfast_host::Tools;
use holdfast_image::{BlockOptions, Format, OpenOptions, Qcow2Options};
use holdfast_repo::{Environment, Repository};
use std::path::Path;

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
    pub(super) fn image(&self, path: &Path, format: Format, overwrite: Overwrite) -> Result<Vec<PulledDisk>> {
        let only = self.entry.only_disk(path)?;
        if self.entry.statement.pieces.len() > 1 {
            self.job
                .progress
                .note("the configuration of its machine is left out: a folder as target gets it, too");
        }
        let named = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let renew = |partial: &Path| self.renew_guest(path, &[(partial, format)], named.as_deref());
        Ok(vec![self.disk(only, path, format, overwrite, &renew)?])
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
}
