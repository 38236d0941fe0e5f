//! Writes a template as a folder: its images, and the configuration of a new machine.

use std::path::{Path, PathBuf};

use holdfast_host::domain_xml::{DomainXml, Emulator, Identity, NewIdentity, Rewrite, rewrite};
use holdfast_host::{MacAddress, Uuid};
use holdfast_image::Format;
use holdfast_repo::Environment;

use super::pull_content::Pull;
use super::pull_request::{KeepIdentity, PulledDisk};
use crate::files::block_target::Overwrite;
use crate::image::new_folder::{NewFolder, disks_in, image_name, variables_name, write_file};
use crate::job::error::TemplateError;
use crate::job::{Error, MachineName, Result};
use crate::notes::{STREAM_DOMAIN, STREAM_NVRAM};
use crate::repository::forget::Execution;

/// Name of the file with the statement, beside its signature: `ssh-keygen -Y verify` can check them.
const STATEMENT: &str = "template.txt";
const SIGNATURE: &str = "template.txt.sig";

/// The written disks, and the configuration with the name of its machine.
type Written = (Vec<PulledDisk>, Option<(PathBuf, String)>);

/// Writes a template into a new folder. The statement is last: if it exists, the folder is complete.
pub(super) fn write_folder(
    pull: &Pull<'_>,
    path: &Path,
    format: Format,
    name: Option<String>,
    identity: KeepIdentity,
) -> Result<Written> {
    let folder = std::path::absolute(path).map_err(|source| Error::File {
        action: "find",
        path: path.to_owned(),
        source,
    })?;
    // An unusable configuration is an error before anything is written.
    let text = pull.entry.file(STREAM_DOMAIN, pull.repository)?;
    let nvram = pull.entry.file(STREAM_NVRAM, pull.repository)?;
    let machine = text
        .map(|text| Configured::new(pull, &folder, text, format, name, identity))
        .transpose()?;
    if pull.request.execution == Execution::DryRun {
        NewFolder::check(&folder)?;
        return Ok(planned(pull, &folder, format, machine));
    }
    let mut made = NewFolder::make(&folder)?;
    let mut disks = Vec::new();
    let disk_count = pull.entry.statement.disks().count();
    for (number, piece) in (1..).zip(pull.entry.statement.disks()) {
        pull.job.progress.part(number, disk_count);
        let disk = made.file(&image_name(piece.name.as_str(), format), |target| {
            pull.disk(piece, target, format, Overwrite::Refuse, &|_| Ok(()))
        })?;
        disks.push(disk);
    }
    pull.job.progress.part(1, 1);
    // A guest may have its system on one disk, and its identity on another.
    let images: Vec<(&Path, Format)> = disks.iter().map(|disk| (&*disk.path, format)).collect();
    let host_name = match &machine {
        Some(machine) => Some(machine.name.clone()),
        None => folder.file_name().map(|name| name.to_string_lossy().into_owned()),
    };
    pull.renew_guest(&folder, &images, host_name.as_deref())?;
    let write = |made: &mut NewFolder, name: &str, bytes: &[u8]| {
        made.file(name, |path| {
            write_file(path, bytes, pull.environment).map(|()| path.to_owned())
        })
    };
    if let Some(bytes) = &nvram {
        let name = machine.as_ref().map_or(STREAM_NVRAM.to_owned(), Configured::nvram_name);
        write(&mut made, &name, bytes)?;
    }
    let configuration = match machine {
        None => None,
        Some(machine) => {
            let path = write(&mut made, STREAM_DOMAIN, machine.text.as_bytes())?;
            Some((path, machine.name))
        }
    };
    if let Some(signature) = &pull.entry.signature {
        write(&mut made, SIGNATURE, signature.as_bytes())?;
    }
    write(&mut made, STATEMENT, pull.entry.statement.encode().as_bytes())?;
    made.keep();
    Ok((disks, configuration))
}

/// The result that a pull would have.
fn planned(pull: &Pull<'_>, folder: &Path, format: Format, machine: Option<Configured>) -> Written {
    let disks = pull.entry.statement.disks().map(|piece| PulledDisk {
        name: piece.name.to_string(),
        path: folder.join(image_name(piece.name.as_str(), format)),
        size_bytes: piece.size_bytes,
    });
    let configuration = machine.map(|machine| (folder.join(STREAM_DOMAIN), machine.name));
    (disks.collect(), configuration)
}

/// The configuration for the new folder.
struct Configured {
    name: String,
    text: String,
}

impl Configured {
    fn new(
        pull: &Pull<'_>,
        folder: &Path,
        text: Vec<u8>,
        format: Format,
        name: Option<String>,
        identity: KeepIdentity,
    ) -> Result<Self> {
        let unfit = |reason: String| TemplateError::Configuration {
            label: pull.entry.statement.label.to_string(),
            reason,
        };
        let text = String::from_utf8(text).map_err(|_| unfit("it is not valid UTF-8".to_owned()))?;
        let xml = DomainXml::parse(&text).map_err(unfit)?;
        let old_name = xml.name.clone().unwrap_or_default();
        let of_folder = || folder.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = match (name, identity) {
            (Some(name), _) => name,
            (None, KeepIdentity::Yes) => old_name.clone(),
            (None, KeepIdentity::No) => of_folder().unwrap_or_default(),
        };
        // The names of files contain it.
        let name = MachineName::new(name)?.to_string();
        let identity = match identity {
            KeepIdentity::Yes if name == old_name => Identity::Keep,
            KeepIdentity::Yes => Identity::Named(name.clone()),
            KeepIdentity::No => Identity::New(new_identity(&name, xml.macs.len(), pull.environment)?),
        };
        let nvram = folder.join(variables_name(&name));
        let has_nvram = xml.nvram.is_some() || pull.entry.statement.file(STREAM_NVRAM).is_some();
        let has_place = xml.tpm.as_ref().is_some_and(|tpm| tpm.source.is_some());
        let has = |target: &str| pull.entry.statement.disks().any(|piece| piece.name.as_str() == target);
        let wish = Rewrite {
            identity,
            generation: Some(Uuid::from_random(random(pull.environment)?)),
            disks: disks_in(folder, format, &xml, has, &mut |target| {
                pull.job.progress.warning(&format!(
                    "disk {target} is in the configuration, and not in the template: it is left out"
                ));
            }),
            nvram: has_nvram.then_some(nvram),
            domain_type: None,
            emulator: Emulator::Keep,
            tpm: has_place.then(|| folder.join(format!("{name}-tpm"))),
        };
        let done = rewrite(&text, &wish).map_err(unfit)?;
        for note in &done.notes {
            pull.job.progress.note(note);
        }
        for warning in &done.warnings {
            pull.job.progress.warning(warning);
        }
        Ok(Self { name, text: done.text })
    }

    fn nvram_name(&self) -> String {
        variables_name(&self.name)
    }
}

fn random<const N: usize>(environment: &Environment) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    environment.randomness.fill(&mut bytes)?;
    Ok(bytes)
}

fn new_identity(name: &str, card_count: usize, environment: &Environment) -> Result<NewIdentity> {
    let mut macs: Vec<MacAddress> = Vec::new();
    while macs.len() < card_count {
        let mac = MacAddress::from_random(random(environment)?);
        if macs.iter().all(|other| other.to_string() != mac.to_string()) {
            macs.push(mac);
        }
    }
    Ok(NewIdentity {
        name: name.to_owned(),
        uuid: Uuid::from_random(random(environment)?),
        macs: Some(macs),
    })
}
