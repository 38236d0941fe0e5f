//! A plan under construction, and what plans of both kinds need.

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

/// The machine that results from a restore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedMachine {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub uuid: String,
    /// Whether the machine does not exist yet.
    pub is_new: bool,
}

/// The configuration that will be defined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Definition {
    /// The text to compare it with: the snapshot's configuration for a new machine, the current one for a restore in
    /// place.
    pub before: String,
    /// What will be defined.
    pub text: String,
}

/// What plans of both kinds need.
pub(crate) struct Planner<'a> {
    /// The source of everything that is not a disk.
    pub(crate) repository: &'a Repository,
    /// The source of the disks.
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

/// A plan under construction.
pub(super) struct Draft {
    pub(super) machine: PlannedMachine,
    /// Its identity, relative to the snapshot's configuration.
    pub(super) identity: Identity,
    pub(super) definition: Option<Definition>,
    /// The configuration that it will have, even if that does not change.
    pub(super) configuration: Option<String>,
    /// The configuration in the snapshot.
    pub(super) before: Option<String>,
    /// The path of its TPM's state, if the configuration names one.
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

    /// Decides about the disks of a configuration that the snapshot does not contain.
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

/// What happens to a disk that the snapshot does not contain.
enum LeftOut {
    AsItIs,
    Kept(String),
    Emptied(String),
    Dropped(String),
}

fn decide(disk: &MachineDisk, neighbours: &Neighbours) -> LeftOut {
    let is_removable = matches!(disk.kind, DiskKind::Cdrom | DiskKind::Floppy);
    // A disk that is shared or read-only may be used by another machine as well.
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

/// The error of a configuration that cannot be changed as needed.
pub(super) fn unfit(machine: &str, detail: String) -> Error {
    Refusal::Configuration {
        machine: machine.to_owned(),
        detail,
    }
    .into()
}
