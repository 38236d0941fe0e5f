//! Compares two repositories: which snapshots each has, and how far the target is behind.

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
    /// Distinguishes the machine from others of its name; none if its name is unique in both repositories.
    pub distinction: Option<MachineIdentity>,
    /// Number of its snapshots in the source.
    pub here_count: u64,
    /// Number of its snapshots in the target, from any source.
    pub there_count: u64,
    /// Time of its newest snapshot in the source.
    pub newest_here: Option<Timestamp>,
    /// Time of its newest snapshot in the target.
    pub newest_there: Option<Timestamp>,
    /// Time of the newest snapshot that both have.
    pub newest_common: Option<Timestamp>,
    /// Snapshots of the source that the target never had.
    pub missing_count: u64,
    /// Snapshots of the source that were removed from the target.
    pub removed_count: u64,
}

impl MachineCopyStatus {
    /// Time from the newest common snapshot to the newest in the source; none if there is no common snapshot.
    pub fn behind(&self) -> Option<Duration> {
        let (here, common) = (self.newest_here?, self.newest_common?);
        Some(Duration::try_from(here.duration_since(common)).unwrap_or_default())
    }
}

/// Two repositories, compared.
#[derive(Debug, Clone)]
pub struct CopyStatus {
    /// Each machine, sorted by name. Machines of the same name are listed separately.
    pub machines: Vec<MachineCopyStatus>,
}

/// Compares which snapshots of the wanted machines and tags two repositories have. Snapshots that cannot be read become warnings.
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

/// Expects snapshots oldest first.
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

/// The status of the machine of a snapshot.
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
