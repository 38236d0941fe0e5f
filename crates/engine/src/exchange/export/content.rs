//! The content of a machine to export.

use std::sync::Arc;

use holdfast_block::BlockDevice;
use holdfast_hardware::Untranslated;
use holdfast_hardware::xen::XenRecords;
use holdfast_image::USUAL_SECTOR_BYTES;
use holdfast_repo::{DiskContent, DiskRecord, Manifest, Repository};

use super::XvaExport;
use super::reads::DiskReads;
use super::suspended::Suspended;
use super::virtualbox::VirtualBoxStreams;
use crate::image::sector_size::noted_sector;
use crate::job::Result;
use crate::job::error::ExchangeError;
use crate::notes::{
    STREAM_DOMAIN, STREAM_NVRAM, STREAM_TPM, STREAM_VIRTUALBOX_NVRAM, STREAM_XEN_MEMORY, STREAM_XEN_RECORDS,
    STREAM_XEN_SUSPENDED_RECORDS, is_memory,
};
use crate::restore::small_stream::bytes_of;

/// Description of firmware variables that are dropped for another hypervisor.
pub(super) const VARIABLES: &str = "variables of the firmware";
/// Why the memory is dropped.
const ELSEWHERE: &str = "another hypervisor cannot resume from it: the machine starts";

/// The content of a machine.
pub(super) struct MachineContent<'m> {
    /// Its original name.
    pub(super) machine: String,
    pub(super) disks: Vec<ContentDisk<'m>>,
    pub(super) reads: DiskReads,
    /// Its configuration as libvirt writes it, if known.
    pub(super) text: Option<String>,
    /// The variables of its firmware, if it is a QEMU machine.
    pub(super) variables: Option<Vec<u8>>,
    /// Why the configuration is unknown, if it is.
    pub(super) why_unknown: &'static str,
    /// Content that is never exported.
    pub(super) dropped: Vec<Untranslated>,
    pub(super) of_virtualbox: VirtualBoxStreams,
    /// The records of its pool, if it is a XenServer machine.
    pub(super) of_xen: Option<XenRecords>,
    /// Memory and records to resume from; none if the machine boots.
    pub(super) suspended: Option<Suspended>,
}

/// A disk to export.
pub(super) struct ContentDisk<'m> {
    pub(super) name: String,
    pub(super) device: Arc<dyn BlockDevice + 'm>,
}

/// The machine in a snapshot, without the excluded disks.
pub(super) fn of_snapshot<'m>(
    repository: &Repository,
    snapshot: &Manifest,
    left_out: &[String],
    xva: Option<XvaExport>,
    name: Option<&str>,
) -> Result<MachineContent<'m>> {
    let is_disk = |record: &&DiskRecord| record.content == DiskContent::Blocks && !is_memory(record);
    let present: Vec<&DiskRecord> = snapshot.disks.iter().filter(is_disk).collect();
    if let Some(name) = left_out
        .iter()
        .find(|name| present.iter().all(|record| record.name != **name))
    {
        return Err(ExchangeError::NoSuchDisk {
            snapshot: snapshot.id.to_string(),
            name: name.clone(),
            present: present.iter().map(|record| record.name.clone()).collect(),
        }
        .into());
    }
    let chosen = present.into_iter().filter(|record| !left_out.contains(&record.name));
    let chosen: Vec<&DiskRecord> = chosen.collect();
    let large = chosen
        .iter()
        .filter(|record| noted_sector(&record.notes) != USUAL_SECTOR_BYTES);
    let sectors: Vec<Untranslated> = large.map(|record| lost_sectors(record)).collect();
    let disks: Vec<ContentDisk<'_>> = chosen
        .into_iter()
        .map(|record| ContentDisk {
            name: record.name.clone(),
            device: Arc::new(repository.device_checking_prints(record)),
        })
        .collect();
    if disks.is_empty() {
        return Err(ExchangeError::NoDisk {
            machine: format!("snapshot {}", snapshot.id),
        }
        .into());
    }
    let text = snapshot.disks.iter().find(|record| record.name == STREAM_DOMAIN);
    let text = text.map(|record| bytes_of(repository, record)).transpose()?;
    let variables = snapshot.disks.iter().find(|record| record.name == STREAM_NVRAM);
    let variables = variables.map(|record| bytes_of(repository, record)).transpose()?;
    let suspended = match xva {
        Some(XvaExport { resumes: true, .. }) => Some(Suspended::read(repository, snapshot, name, left_out)?),
        _ => None,
    };
    let mut dropped = match &suspended {
        Some(_) => Vec::new(),
        None => left_of(snapshot, xva),
    };
    dropped.extend(sectors);
    Ok(MachineContent {
        machine: snapshot.machine.clone(),
        disks,
        reads: DiskReads::Any,
        text: text.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()),
        variables,
        why_unknown: "the snapshot is of images only",
        dropped,
        of_virtualbox: VirtualBoxStreams::read(repository, snapshot)?,
        of_xen: of_xen(repository, snapshot)?,
        suspended,
    })
}

/// Reports the sector size of the image, which other hypervisors do not get.
fn lost_sectors(record: &DiskRecord) -> Untranslated {
    Untranslated {
        what: format!(
            "sectors of {} bytes of disk {}",
            noted_sector(&record.notes),
            record.name
        ),
        why: "it has sectors of 512 bytes there: the guest may not find its partitions".to_owned(),
    }
}

/// The pool's records of the machine in a snapshot. If they cannot be parsed, the other configuration of the machine is used.
fn of_xen(repository: &Repository, snapshot: &Manifest) -> Result<Option<XenRecords>> {
    let record = snapshot.disks.iter().find(|record| record.name == STREAM_XEN_RECORDS);
    let bytes = record.map(|record| bytes_of(repository, record)).transpose()?;
    Ok(bytes.and_then(|bytes| XenRecords::parse(&String::from_utf8_lossy(&bytes)).ok()))
}

/// Content of a snapshot that is dropped because the machine boots.
fn left_of(snapshot: &Manifest, xva: Option<XvaExport>) -> Vec<Untranslated> {
    let mut dropped = left_behind(snapshot.disks.iter().map(|record| &record.name[..]));
    let has = |name: &str| snapshot.disks.iter().any(|record| record.name == name);
    let why = if has(STREAM_XEN_MEMORY) {
        match (xva, has(STREAM_XEN_SUSPENDED_RECORDS)) {
            (Some(_), true) => "stays behind: the machine starts; --with-memory resumes it instead",
            (Some(_), false) => "the snapshot lacks what its pool knew beside it: the machine starts",
            (None, _) => ELSEWHERE,
        }
    } else if snapshot.disks.iter().any(is_memory) {
        ELSEWHERE
    } else {
        return dropped;
    };
    dropped.push(Untranslated {
        what: "memory".to_owned(),
        why: why.to_owned(),
    });
    dropped
}

/// Content with these names that is useless for another hypervisor.
pub(super) fn left_behind<'n>(names: impl Iterator<Item = &'n str>) -> Vec<Untranslated> {
    let what = |name| match name {
        STREAM_NVRAM | STREAM_VIRTUALBOX_NVRAM => Some(VARIABLES),
        STREAM_TPM => Some("state of the TPM"),
        _ => None,
    };
    let left = names.filter_map(what);
    left.map(|what| Untranslated {
        what: what.to_owned(),
        why: "stays behind: it is of another hypervisor's make".to_owned(),
    })
    .collect()
}
