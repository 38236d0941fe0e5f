//! The parts of a machine in a snapshot.

use std::path::PathBuf;

use holdfast_host::domain_xml::DomainXml;
use holdfast_repo::{DiskContent, DiskRecord, Manifest, Repository};

use crate::job::Result;
use crate::job::error::Refusal;
use crate::notes::{NOTE_PATH, NOTE_UUID, STREAM_NVRAM, STREAM_TPM, is_memory};
use crate::restore::small_stream::bytes_of;

/// The persistent configuration.
const CONFIGURATION: &str = "domain.xml";
/// The configuration of the running machine, which may contain more.
const LIVE_CONFIGURATION: &str = "domain-live.xml";

/// A machine in a snapshot.
pub(super) struct StoredMachine<'m> {
    pub(super) snapshot: &'m Manifest,
    /// Its persistent configuration.
    pub(super) text: String,
    pub(super) xml: DomainXml,
    /// Where its firmware variables were, if any configuration names the path.
    pub(super) nvram_path: Option<PathBuf>,
}

impl<'m> StoredMachine<'m> {
    /// Reads the machine of `snapshot`; an error if the snapshot is of images only.
    pub(super) fn read(repository: &Repository, snapshot: &'m Manifest) -> Result<Self> {
        let Some(text) = text_of(repository, snapshot, CONFIGURATION)? else {
            return Err(Refusal::NoConfiguration {
                snapshot: snapshot.id.to_string(),
            }
            .into());
        };
        let xml = parsed(&text, snapshot)?;
        let mut nvram_path = xml.nvram.clone();
        // libvirt chooses a path when the machine starts, and does not always store it.
        if nvram_path.is_none()
            && let Some(live) = text_of(repository, snapshot, LIVE_CONFIGURATION)?
        {
            nvram_path = parsed(&live, snapshot)?.nvram;
        }
        Ok(Self {
            snapshot,
            text,
            xml,
            nvram_path: nvram_path.map(Into::into),
        })
    }

    /// Its name at its hypervisor at the time of the backup.
    pub(super) fn name(&self) -> &str {
        self.xml.name.as_deref().unwrap_or(&self.snapshot.machine)
    }
}

/// The disks of a snapshot, without its memory and without the files stored beside them.
pub(super) fn disks(snapshot: &Manifest) -> impl Iterator<Item = &DiskRecord> {
    snapshot
        .disks
        .iter()
        .filter(|record| record.content == DiskContent::Blocks && !is_memory(record))
}

pub(super) fn has_memory(snapshot: &Manifest) -> bool {
    snapshot.disks.iter().any(is_memory)
}

pub(super) fn nvram(snapshot: &Manifest) -> Option<&DiskRecord> {
    stream(snapshot, STREAM_NVRAM)
}

pub(super) fn tpm(snapshot: &Manifest) -> Option<&DiskRecord> {
    stream(snapshot, STREAM_TPM)
}

fn stream<'m>(snapshot: &'m Manifest, name: &str) -> Option<&'m DiskRecord> {
    snapshot
        .disks
        .iter()
        .find(|record| record.name == name && record.content == DiskContent::Stream)
}

/// The machine's UUID at its hypervisor.
pub(super) fn uuid(snapshot: &Manifest) -> Option<&str> {
    snapshot.notes.get(NOTE_UUID).map(String::as_str)
}

/// The original path of a disk's image.
pub(super) fn path_of(record: &DiskRecord) -> Option<PathBuf> {
    record.notes.get(NOTE_PATH).map(PathBuf::from)
}

pub(super) fn text_of(repository: &Repository, snapshot: &Manifest, name: &str) -> Result<Option<String>> {
    let Some(record) = snapshot.disks.iter().find(|record| record.name == name) else {
        return Ok(None);
    };
    let text = String::from_utf8(bytes_of(repository, record)?);
    let text = text.map_err(|_| refusal(snapshot, "it is not valid UTF-8".to_owned()))?;
    Ok(Some(text))
}

fn parsed(text: &str, snapshot: &Manifest) -> Result<DomainXml> {
    Ok(DomainXml::parse(text).map_err(|detail| refusal(snapshot, detail))?)
}

fn refusal(snapshot: &Manifest, detail: String) -> Refusal {
    Refusal::Configuration {
        machine: snapshot.machine.clone(),
        detail,
    }
}
