//! Writes a machine as a folder: images, the variables of its firmware, and a libvirt configuration with their paths.

use std::path::Path;

use holdfast_archive::Packed;
use holdfast_hardware::libvirt::OF_ITS_HOST;
use holdfast_host::Uuid;
use holdfast_host::domain_xml::{DomainXml, Emulator, HostNeeds, Identity, Rewrite, rewrite};
use holdfast_image::{BlockOptions, Format, OpenOptions, Qcow2Options, Storage};
use holdfast_repo::Environment;

use super::Exported;
use super::content::VARIABLES;
use crate::capture::foreign_machine::warn_of_format;
use crate::files::block_target::Overwrite;
use crate::image::convert::{ConvertRequest, ConvertSource, VerifyImage, convert};
use crate::image::new_folder::{NewFolder, disks_in, image_name, variables_name, write_file};
use crate::job::{Error, Job, Result};
use crate::notes::STREAM_DOMAIN;

impl Exported<'_> {
    /// Writes the folder. The configuration is last: if it exists, the folder is complete.
    pub(super) fn write_folder(
        &mut self,
        made: &mut NewFolder,
        format: Format,
        storage: Storage,
        environment: &Environment,
        job: Job<'_>,
    ) -> Result<Packed> {
        let folder = made.absolute_path()?;
        let configuration = self.text.clone();
        let configuration = configuration
            .map(|text| self.configuration(&text, &folder, format, environment, job))
            .transpose()?;
        match configuration {
            Some(_) => self.report_host_parts(format, job),
            None => job
                .progress
                .warning("the hardware of the machine is not known: the folder has its images, and no domain.xml"),
        }
        let mut written = Packed::default();
        for (number, disk) in (1..).zip(&self.disks) {
            job.progress.part(number, self.disks.len());
            let file = image_name(crate::DiskName::new(disk.name.as_str())?.as_str(), format);
            let report = made.file(&file, |target| {
                convert(
                    ConvertSource::Device(&disk.device),
                    &ConvertRequest {
                        open: OpenOptions::default(),
                        target: target.to_owned(),
                        format,
                        qcow2: Qcow2Options::default(),
                        blocks: BlockOptions::default(),
                        storage,
                        overwrite: Overwrite::Refuse,
                        verify: VerifyImage::No,
                    },
                    environment,
                    job,
                )
            })?;
            written.unpacked_bytes += report.size_bytes;
            written.written_bytes += report.allocated_bytes.unwrap_or_default();
            self.names.push((disk.name.clone(), file, report.size_bytes));
        }
        if let Some(bytes) = &self.variables {
            made.file(&variables_name(&self.machine.name), |path| {
                write_file(path, bytes, environment)
            })?;
            // A folder for libvirt keeps the variables.
            self.dropped.retain(|dropped| dropped.what != VARIABLES);
        }
        if let Some(text) = configuration {
            made.file(STREAM_DOMAIN, |path| write_file(path, text.as_bytes(), environment))?;
        }
        Ok(written)
    }

    /// Warns of what the user has to check before starting a machine from the folder.
    fn report_host_parts(&self, format: Format, job: Job<'_>) {
        for lost in self.lost.iter().filter(|lost| lost.why == OF_ITS_HOST) {
            job.progress.note(&format!(
                "domain.xml still has {}, which {}: remove it to start the machine on another host",
                lost.what, lost.why
            ));
        }
        warn_of_format(format, job);
    }

    /// The original configuration with the images in the folder: disks elsewhere belong to the original machine.
    fn configuration(
        &self,
        text: &str,
        folder: &Path,
        format: Format,
        environment: &Environment,
        job: Job<'_>,
    ) -> Result<String> {
        let name = &self.machine.name;
        let unfit = |detail: String| {
            Error::from(holdfast_host::Error::Configuration {
                machine: name.clone(),
                detail,
            })
        };
        let xml = DomainXml::parse(text).map_err(unfit)?;
        let mut random = [0; 16];
        environment.randomness.fill(&mut random)?;
        let has = |target: &str| self.disks.iter().any(|disk| disk.name == target);
        let wish = Rewrite {
            identity: match &xml.name {
                Some(known) if known != name => Identity::Named(name.clone()),
                _ => Identity::Keep,
            },
            generation: Some(Uuid::from_random(random)),
            // A warning named the excluded disks.
            disks: disks_in(folder, format, &xml, has, &mut |_| ()),
            // Another machine must not write to the variables of the original one.
            nvram: (self.variables.is_some() || xml.nvram.is_some()).then(|| folder.join(variables_name(name))),
            tpm: None,
            domain_type: None,
            emulator: Emulator::Keep,
        };
        if self.variables.is_none() && xml.nvram.is_some() {
            let detail = "the variables of its firmware are not there: the machine starts with fresh ones";
            job.progress.warning(detail);
        }
        let done = rewrite(text, &wish).map_err(unfit)?;
        let needs = HostNeeds::of(&done.text).map_err(unfit)?.descriptions();
        if !needs.is_empty() {
            job.progress.note(&format!(
                "where the machine of domain.xml is to start, there must be: {}",
                needs.join(", ")
            ));
        }
        for note in &done.notes {
            job.progress.note(note);
        }
        for warning in &done.warnings {
            job.progress.warning(warning);
        }
        Ok(done.text)
    }
}
