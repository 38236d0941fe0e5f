//! A template as a folder: its images, and the configuration of its machine as that of another one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use holdfast_host::domain_xml::{DiskChange, DiskPlace, DomainXml, Identity, Medium, NewIdentity, Rewrite, rewrite};
use holdfast_host::{DiskKind, DiskSource, MacAddress, Uuid};
use holdfast_image::Format;
use holdfast_repo::Surroundings;

use super::error::TemplateError;
use super::pull::{KeepIdentity, Pull, PulledDisk};
use super::push::DOMAIN;
use crate::MachineName;
use crate::error::{Error, Result};
use crate::exchange::{NewFolder, write_file};
use crate::machine_backup::NVRAM;
use crate::new_image::Overwrite;

/// What the statement and its signature are called in a folder: `ssh-keygen -Y verify` checks the one with the other.
const STATEMENT: &str = "template.txt";
const SIGNATURE: &str = "template.txt.sig";

/// What was written: the disks, and the configuration with the name of its machine.
type Written = (Vec<PulledDisk>, Option<(PathBuf, String)>);

/// Writes a template into a new folder. What it was comes last: where that is, all is.
pub(super) fn write_folder(
    pull: &Pull<'_>,
    path: &Path,
    format: Format,
    (name, identity): (Option<String>, KeepIdentity),
) -> Result<Written> {
    let folder = std::path::absolute(path).map_err(|source| Error::File {
        action: "find",
        path: path.to_owned(),
        source,
    })?;
    // What cannot be used is told before anything is written.
    let text = pull.file(DOMAIN)?;
    let nvram = pull.file(NVRAM)?;
    let machine = text
        .map(|text| Configured::new(pull, &folder, (text, format), (name, identity)))
        .transpose()?;
    let mut made = NewFolder::make(&folder)?;
    let mut disks = Vec::new();
    for piece in pull.entry.statement.disks() {
        let disk = made.file(&file_name(piece.name.as_str(), format), |target| {
            pull.disk(piece, (target, format), Overwrite::Refuse, &|_| Ok(()))
        })?;
        disks.push(disk);
    }
    // A guest may have its system on one disk, and what identifies it on another.
    let images: Vec<(&Path, Format)> = disks.iter().map(|disk| (&*disk.path, format)).collect();
    let host_name = match &machine {
        Some(machine) => Some(machine.name.clone()),
        None => folder.file_name().map(|name| name.to_string_lossy().into_owned()),
    };
    pull.renew_guest(&folder, &images, host_name.as_deref())?;
    let write = |made: &mut NewFolder, name: &str, bytes: &[u8]| {
        made.file(name, |path| {
            write_file(path, bytes, pull.surroundings).map(|()| path.to_owned())
        })
    };
    if let Some(bytes) = &nvram {
        let name = machine.as_ref().map_or(NVRAM.to_owned(), Configured::nvram_name);
        write(&mut made, &name, bytes)?;
    }
    let configuration = match machine {
        None => None,
        Some(machine) => {
            let path = write(&mut made, DOMAIN, machine.text.as_bytes())?;
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

fn file_name(disk: &str, format: Format) -> String {
    format!("{disk}.{format}")
}

/// The configuration for its new place.
struct Configured {
    name: String,
    text: String,
}

impl Configured {
    fn new(
        pull: &Pull<'_>,
        folder: &Path,
        (text, format): (Vec<u8>, Format),
        (name, identity): (Option<String>, KeepIdentity),
    ) -> Result<Self> {
        let unfit = |reason: String| TemplateError::Configuration {
            label: pull.entry.statement.label.to_string(),
            reason,
        };
        let text = String::from_utf8(text).map_err(|_| unfit("it is no text".to_owned()))?;
        let xml = DomainXml::parse(&text).map_err(unfit)?;
        let old_name = xml.name.clone().unwrap_or_default();
        let of_folder = || folder.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = match (name, identity) {
            (Some(name), _) => name,
            (None, KeepIdentity::Yes) => old_name.clone(),
            (None, KeepIdentity::No) => of_folder().unwrap_or_default(),
        };
        // Files are called after it.
        let name = MachineName::new(name)?.to_string();
        let identity = match identity {
            KeepIdentity::Yes if name == old_name => Identity::Keep,
            KeepIdentity::Yes => Identity::Named(name.clone()),
            KeepIdentity::No => Identity::New(new_identity(&name, xml.macs.len(), pull.surroundings)?),
        };
        let nvram = folder.join(nvram_name(&name));
        let has_nvram = xml.nvram.is_some() || pull.entry.statement.file(NVRAM).is_some();
        let has_place = xml.tpm.as_ref().is_some_and(|tpm| tpm.source.is_some());
        let wish = Rewrite {
            identity,
            generation: Uuid::from_random(random(pull.surroundings)?),
            disks: changes(pull, folder, format, &xml),
            nvram: has_nvram.then_some(nvram),
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
        nvram_name(&self.name)
    }
}

fn nvram_name(machine: &str) -> String {
    format!("{machine}_VARS.fd")
}

fn random<const N: usize>(surroundings: &Surroundings) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    surroundings.randomness.fill(&mut bytes)?;
    Ok(bytes)
}

fn new_identity(name: &str, card_count: usize, surroundings: &Surroundings) -> Result<NewIdentity> {
    let mut macs: Vec<MacAddress> = Vec::new();
    while macs.len() < card_count {
        let mac = MacAddress::from_random(random(surroundings)?);
        if macs.iter().all(|other| other.to_string() != mac.to_string()) {
            macs.push(mac);
        }
    }
    Ok(NewIdentity {
        name: name.to_owned(),
        uuid: Uuid::from_random(random(surroundings)?),
        macs: Some(macs),
    })
}

/// Its disks are those of the template, and no others: what lies elsewhere belongs to the machine that was pushed.
fn changes(pull: &Pull<'_>, folder: &Path, format: Format, xml: &DomainXml) -> BTreeMap<String, DiskChange> {
    let mut changes = BTreeMap::new();
    for disk in &xml.disks {
        let mut pieces = pull.entry.statement.disks();
        let change = if pieces.any(|piece| piece.name.as_str() == disk.target) {
            DiskChange::Place(DiskPlace {
                path: folder.join(file_name(&disk.target, format)),
                medium: Medium::File,
                format: format.qemu_name().to_owned(),
            })
        } else if matches!(disk.kind, DiskKind::Cdrom | DiskKind::Floppy) {
            if disk.source == DiskSource::Empty {
                continue;
            }
            DiskChange::Empty
        } else {
            let target = &disk.target;
            pull.job.progress.warning(&format!(
                "disk {target} is in the configuration, and not in the template: it is left out"
            ));
            DiskChange::Remove
        };
        changes.insert(disk.target.clone(), change);
    }
    changes
}
