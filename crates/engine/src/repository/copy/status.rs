//! What is where, and how far behind.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_repo::{Manifest, Repository};
use jiff::Timestamp;

use super::origin::{CopyPresence, TargetHoldings};
use crate::job::{Job, Result};
use crate::notes::is_template_draft;
use crate::repository::calendar::time_of;
use crate::repository::list::{ListRequest, check_known, is_wanted};
use crate::repository::name_conflict::{MachineIdentity, MachinesByName};
use crate::repository::open::all_snapshots;

/// One machine in two repositories.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachineCopyStatus {
    /// The machine.
    pub machine: String,
    /// What to tell it by; none where its name is of this machine alone in both repositories.
    pub distinction: Option<MachineIdentity>,
    /// Its snapshots here.
    pub here_count: u64,
    /// Its snapshots there, from wherever they are.
    pub there_count: u64,
    /// The instant of its newest snapshot here.
    pub newest_here: Option<Timestamp>,
    /// The instant of its newest snapshot there.
    pub newest_there: Option<Timestamp>,
    /// The instant of the newest snapshot here that is also there.
    pub newest_common: Option<Timestamp>,
    /// Snapshots here that were never there.
    pub missing_count: u64,
    /// Snapshots here that were there and were removed.
    pub removed_count: u64,
}

impl MachineCopyStatus {
    /// From the newest snapshot that is in both to the newest here; none where none is in both.
    pub fn behind(&self) -> Option<Duration> {
        let (here, common) = (self.newest_here?, self.newest_common?);
        Some(Duration::try_from(here.duration_since(common)).unwrap_or_default())
    }
}

/// Two repositories, compared.
#[derive(Debug, Clone)]
pub struct CopyStatus {
    /// Each machine, in the order of names. Machines of one name are apart.
    pub machines: Vec<MachineCopyStatus>,
}

/// Compares what two repositories have of the machines and tags that are wanted. What cannot be read becomes a warning.
pub fn copy_status(from: &Repository, to: &Repository, wanted: &ListRequest, job: Job<'_>) -> Result<CopyStatus> {
    let mut here = all_snapshots(from, job.progress)?;
    let mut there = all_snapshots(to, job.progress)?;
    let holdings = TargetHoldings::new(to.config().id, there.clone());
    let both: Vec<Manifest> = here.iter().chain(&there).cloned().collect();
    check_known(&both, wanted)?;
    here.retain(|manifest| !is_template_draft(manifest) && is_wanted(manifest, wanted));
    there.retain(|manifest| !is_template_draft(manifest) && is_wanted(manifest, wanted));
    Ok(CopyStatus {
        machines: compare(&here, &there, &holdings, &MachinesByName::of(&both)),
    })
}

/// Snapshots come oldest first.
fn compare(
    here: &[Manifest],
    there: &[Manifest],
    holdings: &TargetHoldings,
    named: &MachinesByName,
) -> Vec<MachineCopyStatus> {
    let mut machines: BTreeMap<(&str, Option<usize>), MachineCopyStatus> = BTreeMap::new();
    for manifest in here {
        let status = of_machine(&mut machines, manifest, named);
        let time = Some(time_of(manifest));
        status.here_count += 1;
        status.newest_here = time;
        match holdings.standing(manifest) {
            CopyPresence::Present(_) => status.newest_common = time,
            CopyPresence::Removed => status.removed_count += 1,
            CopyPresence::Missing => status.missing_count += 1,
        }
    }
    for manifest in there {
        let status = of_machine(&mut machines, manifest, named);
        status.there_count += 1;
        status.newest_there = Some(time_of(manifest));
    }
    machines.into_values().collect()
}

/// The status of the machine that a snapshot is of.
fn of_machine<'s, 'm>(
    machines: &'s mut BTreeMap<(&'m str, Option<usize>), MachineCopyStatus>,
    manifest: &'m Manifest,
    named: &MachinesByName,
) -> &'s mut MachineCopyStatus {
    let key = (manifest.machine.as_str(), named.place(manifest));
    machines.entry(key).or_insert_with(|| MachineCopyStatus {
        machine: manifest.machine.clone(),
        distinction: named.distinction(manifest),
        ..MachineCopyStatus::default()
    })
}
