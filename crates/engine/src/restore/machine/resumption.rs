//! A restored machine resumes from the memory in its snapshot.
//!
//! The memory belongs to the disks of the same snapshot. Both come from one manifest, so that they cannot be mixed with
//! those of another snapshot. The guest keeps its state, including the MAC addresses of its network cards, even if its
//! configuration has others. A machine with a new identity resumes with its network links down, so that no address
//! appears twice on a network.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_host::domain_xml::{
    DiskChange, DiskPlace, DomainXml, Identity, Medium, Rewrite, rewrite, with_links_down,
};
use holdfast_host::{DiskKind, DiskSource, HypervisorMut, MachineDisk, Resumption, agent};
use holdfast_repo::{Environment, Manifest, Repository};

use super::draft::{Draft, Planner, unfit};
use super::places::data_bytes;
use super::planned_file::FileContent;
use super::stored;
use crate::files::atomic_file::{Existing, NewFile};
use crate::job::error::Refusal;
use crate::job::{Job, Result};
use crate::machine::state::scratch::RuntimeFolder;
use crate::notes::is_memory;
use crate::restore::stored_memory::StoredMemory;

/// The configuration that belongs to the memory.
const CONFIGURATION: &str = "domain-migratable.xml";
/// The configuration of the running machine.
const LIVE_CONFIGURATION: &str = "domain-live.xml";
/// How long the guest may take to set its clock.
const CLOCK_DEADLINE: Duration = Duration::from_secs(5);

/// The plan for resuming a machine from its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedResumption {
    /// The configuration that the resumed machine will have.
    pub configuration: String,
    /// The configuration of the machine when it was backed up.
    then: String,
    runtime: PathBuf,
    /// A file of the machine; if the hypervisor needs the memory in a file, that file is written beside this one.
    beside: PathBuf,
    /// Approximate number of bytes of its memory that are not zero.
    data_bytes: u64,
    /// The size of its memory in bytes.
    pub memory_bytes: u64,
    /// Whether its network links are set down.
    pub has_links_down: bool,
}

/// A machine that was resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resumed {
    /// How far its clock is behind; none if its agent has set it.
    pub clock_behind: Option<Duration>,
}

/// Checks whether the machine of a plan can resume from its memory.
pub(super) fn plan(
    planner: &Planner<'_>,
    snapshot: &Manifest,
    runtime: &Path,
    draft: &mut Draft,
) -> Result<PlannedResumption> {
    let refused = |reason: &str| Refusal::CannotResume {
        machine: snapshot.machine.clone(),
        reason: reason.to_owned(),
    };
    let memory = snapshot.disks.iter().find(|record| is_memory(record));
    let memory = memory.ok_or_else(|| refused("the snapshot has no memory: it was not taken with --with-memory"))?;
    let text = |name| -> Result<String> {
        let text = stored::text_of(planner.repository, snapshot, name)?;
        Ok(text.ok_or_else(|| refused("the snapshot has no configuration that goes with its memory"))?)
    };
    let (configuration, then) = (text(CONFIGURATION)?, text(LIVE_CONFIGURATION)?);
    // Unusable memory must be found before anything is changed.
    stored_memory(planner.repository, snapshot)?;
    let is_same = stored::uuid(snapshot).is_some_and(|uuid| uuid.eq_ignore_ascii_case(&draft.machine.uuid));
    if !draft.machine.is_new && !is_same {
        return Err(refused("the machine that is there is another one than the memory is of").into());
    }
    let nvram = draft
        .files
        .iter()
        .find(|file| file.content == FileContent::FirmwareVariables);
    let identity = identity_with_memory(draft);
    let xml = DomainXml::parse(&configuration).map_err(|detail| unfit(&snapshot.machine, detail))?;
    let mut disks = places(draft);
    for disk in xml.disks.iter().filter(|disk| !is_in(snapshot, disk)) {
        match without_record(disk) {
            Ok(None) => {}
            Ok(Some(change)) => drop(disks.insert(disk.target.clone(), change)),
            Err(why) => return Err(refused(&format!("disk {} {why}", disk.target)).into()),
        }
    }
    let has_links_down = matches!(identity, Identity::New(_)) && !xml.macs.is_empty();
    let wish = Rewrite {
        disks,
        nvram: nvram.map(|file| file.to.clone()),
        tpm: draft.tpm.clone(),
        ..Rewrite::new(identity, planner.uuid()?)
    };
    let unfit = |detail| unfit(&snapshot.machine, detail);
    let mut configuration = rewrite(&configuration, &wish).map_err(unfit)?.text;
    if has_links_down {
        configuration = with_links_down(&configuration).map_err(unfit)?;
        draft.warnings.push(
            "the guest keeps its network addresses, so its network links are down; virsh domif-setlink brings them up"
                .to_owned(),
        );
    }
    Ok(PlannedResumption {
        configuration,
        then,
        memory_bytes: memory.size_bytes,
        data_bytes: data_bytes(planner.repository, memory)?,
        runtime: runtime.to_owned(),
        beside: beside(planner, draft, runtime),
        has_links_down,
    })
}

/// The identity of a machine that resumes from its memory.
fn identity_with_memory(draft: &Draft) -> Identity {
    match &draft.identity {
        // The guest's memory contains its MAC addresses.
        Identity::New(new) => Identity::New(holdfast_host::domain_xml::NewIdentity {
            macs: None,
            ..new.clone()
        }),
        // The machine was renamed since the backup; it keeps its new name.
        _ if !draft.machine.is_new => Identity::Named(draft.machine.name.clone()),
        other => other.clone(),
    }
}

/// A file of the machine whose folder holds the memory: leftovers of a killed restore beside it are found and deleted
/// by the next one.
fn beside(planner: &Planner<'_>, draft: &Draft, runtime: &Path) -> PathBuf {
    let mut files = draft.files.iter().filter(|file| file.medium() == Medium::File);
    let folder = || planner.hypervisor.image_folder().filter(|folder| folder.is_dir());
    match files.next() {
        Some(file) => file.to.clone(),
        None => folder().unwrap_or_else(|| runtime.to_owned()).join(&draft.machine.name),
    }
}

impl PlannedResumption {
    /// If the hypervisor needs the memory in a file: its folder, and the maximum number of bytes.
    pub(super) fn room(&self, hypervisor: &dyn HypervisorMut) -> Option<(&Path, u64)> {
        let folder = self.beside.parent().filter(|_| hypervisor.wants_memory_in_file());
        Some((folder?, self.data_bytes))
    }

    /// Resumes the machine `uuid` from its memory.
    pub(super) fn resume(
        &self,
        repository: &Repository,
        snapshot: &Manifest,
        hypervisor: &dyn HypervisorMut,
        uuid: &str,
        environment: &Environment,
        job: Job<'_>,
    ) -> Result<Resumed> {
        let memory = stored_memory(repository, snapshot)?;
        let folder = RuntimeFolder::make(&self.runtime)?;
        let mut random = [0; 4];
        environment.randomness.fill(&mut random)?;
        // The file never gets its final name: it is deleted when this value is dropped, and a leftover of a killed
        // restore is recognised by its temporary name.
        let file = NewFile::begin_as(&self.beside, Existing::Replace, u32::from_be_bytes(random))?;
        hypervisor.resume(&Resumption {
            file: file.partial(),
            configuration: &self.configuration,
            original_configuration: &self.then,
            clock: job.clock,
            folder: folder.path(),
            write: &|output| memory.write(output),
        })?;
        let machine = hypervisor.machine(uuid)?;
        let now_ms = (environment.now_ms)();
        let is_set = agent::set_clock(&*machine, now_ms, CLOCK_DEADLINE).is_ok();
        let behind_ms = u64::try_from(now_ms.saturating_sub(snapshot.time_ms)).unwrap_or_default();
        Ok(Resumed {
            clock_behind: (!is_set).then(|| Duration::from_millis(behind_ms)),
        })
    }
}

/// The memory of a snapshot, with the state of its devices.
fn stored_memory<'r>(repository: &'r Repository, snapshot: &Manifest) -> Result<StoredMemory<'r>> {
    let memory = StoredMemory::open(repository, snapshot)?;
    Ok(memory.ok_or_else(|| Refusal::CannotResume {
        machine: snapshot.machine.clone(),
        reason: "the snapshot has its memory's pages only, and not its devices".to_owned(),
    })?)
}

/// Whether the snapshot has a disk.
fn is_in(snapshot: &Manifest, disk: &MachineDisk) -> bool {
    stored::disks(snapshot).any(|record| record.name == disk.target)
}

/// What happens to a disk that the snapshot does not contain, or why the memory cannot be used without it: the guest
/// would write its cached content over a disk that was written since.
fn without_record(disk: &MachineDisk) -> std::result::Result<Option<DiskChange>, &'static str> {
    let is_removable = matches!(disk.kind, DiskKind::Cdrom | DiskKind::Floppy);
    match &disk.source {
        DiskSource::Empty => Ok(None),
        _ if !disk.is_read_only && !is_removable => {
            Err("is not in the snapshot, but the guest continues to write to it")
        }
        DiskSource::File(path) | DiskSource::Device(path) if !path.exists() && is_removable => {
            Ok(Some(DiskChange::Empty))
        }
        DiskSource::File(path) | DiskSource::Device(path) if !path.exists() => {
            Err("is not in the snapshot, and not there")
        }
        _ => Ok(None),
    }
}

/// The future paths of the disks of a plan.
fn places(draft: &Draft) -> BTreeMap<String, DiskChange> {
    let places = draft.files.iter().filter_map(|file| match &file.content {
        FileContent::Disk(name) => Some((
            name.clone(),
            DiskChange::Place(DiskPlace {
                path: file.to.clone(),
                medium: file.medium(),
                format: file.format.qemu_name().to_owned(),
            }),
        )),
        FileContent::FirmwareVariables | FileContent::TpmState(_) => None,
    });
    places.collect()
}
