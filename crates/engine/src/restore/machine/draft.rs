//! What both kinds of plans need, and a plan on its way.

use std::collections::BTreeMap;
use std::path::PathBuf;

use holdfast_host::domain_xml::{DiskChange, Identity};
use holdfast_host::{DiskKind, DiskSource, HypervisorMut, MachineDisk, Uuid};
use holdfast_repo::{Environment, Repository};

use super::neighbours::Neighbours;
use super::planned_file::PlannedFile;
use super::stored::StoredMachine;
use crate::job::error::Refusal;
use crate::job::{Error, Result};
use crate::restore::source::StoredContents;

/// A machine that will be there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedMachine {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub uuid: String,
    /// Whether it is there already.
    pub is_new: bool,
}

/// A configuration that will be defined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Definition {
    /// What it is compared with: the snapshot's configuration for a new machine, in place that of today.
    pub before: String,
    /// What will be defined.
    pub text: String,
}

/// What both kinds of plans need.
pub(crate) struct Planner<'a> {
    /// The places of everything that is not a disk.
    pub(crate) repository: &'a Repository,
    /// The disks.
    pub(crate) contents: &'a dyn StoredContents,
    pub(crate) hypervisor: &'a dyn HypervisorMut,
    pub(crate) environment: &'a Environment,
}

impl Planner<'_> {
    pub(super) fn random<const N: usize>(&self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.environment.randomness.fill(&mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn uuid(&self) -> Result<Uuid> {
        Ok(Uuid::from_random(self.random()?))
    }
}

/// A plan on its way.
pub(super) struct Draft {
    pub(super) machine: PlannedMachine,
    /// Its identity, relative to the snapshot's configuration.
    pub(super) identity: Identity,
    pub(super) definition: Option<Definition>,
    /// The configuration that it will have, also where that stays as it is.
    pub(super) configuration: Option<String>,
    /// The one in the snapshot.
    pub(super) before: Option<String>,
    /// Where the state of its TPM goes, where its configuration says so.
    pub(super) tpm: Option<PathBuf>,
    pub(super) files: Vec<PlannedFile>,
    pub(super) notes: Vec<String>,
    pub(super) warnings: Vec<String>,
}

impl Draft {
    pub(super) fn new(machine: PlannedMachine) -> Self {
        Self {
            machine,
            identity: Identity::Keep,
            definition: None,
            configuration: None,
            before: None,
            tpm: None,
            files: Vec::new(),
            notes: Vec::new(),
            warnings: Vec::new(),
        }
    }

    /// Decides about the disks of a configuration that the snapshot does not have.
    pub(super) fn disks_left_out(
        &mut self,
        stored: &StoredMachine<'_>,
        neighbours: &Neighbours,
    ) -> BTreeMap<String, DiskChange> {
        let mut changes = BTreeMap::new();
        for disk in &stored.xml.disks {
            if super::stored::disks(stored.snapshot).any(|record| record.name == disk.target) {
                continue;
            }
            let target = &disk.target;
            match decide(disk, neighbours) {
                LeftOut::AsItIs => {}
                LeftOut::Kept(place) => self.notes.push(format!("{target} stays at {place}")),
                LeftOut::Emptied(place) => {
                    self.notes
                        .push(format!("the drive {target} becomes empty: {place} is not there"));
                    changes.insert(target.clone(), DiskChange::Empty);
                }
                LeftOut::Dropped(why) => {
                    self.warnings.push(format!(
                        "disk {target}, which the snapshot does not have, is left out: {why}"
                    ));
                    changes.insert(target.clone(), DiskChange::Remove);
                }
            }
        }
        changes
    }
}

/// What happens to a disk that the snapshot does not have.
enum LeftOut {
    AsItIs,
    Kept(String),
    Emptied(String),
    Dropped(String),
}

fn decide(disk: &MachineDisk, neighbours: &Neighbours) -> LeftOut {
    let is_removable = matches!(disk.kind, DiskKind::Cdrom | DiskKind::Floppy);
    // A disk that several machines may have open, or that is read only, may be used by another one as well.
    let is_common = disk.is_shared || disk.is_read_only || is_removable;
    let (place, is_there, user) = match &disk.source {
        DiskSource::Empty => return LeftOut::AsItIs,
        DiskSource::File(path) | DiskSource::Device(path) => {
            (path.display().to_string(), path.exists(), neighbours.user_of(path))
        }
        DiskSource::Other(place) => (place.clone(), true, neighbours.user_of_place(place)),
    };
    match user {
        _ if !is_there && is_removable => LeftOut::Emptied(place),
        _ if !is_there => LeftOut::Dropped(format!("{place} is not there")),
        Some(machine) if !is_common => LeftOut::Dropped(format!("{place} is used by the machine {machine}")),
        _ => LeftOut::Kept(place),
    }
}

/// The configuration cannot be changed so.
pub(super) fn unfit(machine: &str, detail: String) -> Error {
    Refusal::Configuration {
        machine: machine.to_owned(),
        detail,
    }
    .into()
}
