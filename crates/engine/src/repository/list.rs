//! `list` and `show`: snapshots of a repository.

use std::collections::HashSet;

use holdfast_policy::Glob;
use holdfast_repo::{DiskContent, LostSearch, LostSnapshot, Manifest, Repository, SnapshotId};
use jiff::tz::TimeZone;

use super::calendar::Calendar;
use super::name_conflict::{MachineIdentity, MachinesByName};
use super::open::all_snapshots;
use super::open::find_of_machines;
use super::resolve::nearest_names;
use crate::SnapshotName;
use crate::job::error::ResolveError;
use crate::job::{DiskName, Progress, Result};
use crate::notes::{is_memory, is_template};

/// Which snapshots to list; all if nothing is set.
#[derive(Debug, Clone, Default)]
pub struct ListRequest {
    /// Only of these machines: names or patterns.
    pub machines: Vec<Glob>,
    /// With all of these tags.
    pub tags: Vec<String>,
}

/// The snapshots of a repository.
#[derive(Debug)]
pub struct ListReport {
    /// The matching snapshots, oldest first.
    pub snapshots: Vec<Manifest>,
    /// All snapshots that are protected from removal.
    pub protected: HashSet<SnapshotId>,
    /// Errors of snapshots that could not be read: they may be of any machine.
    pub damaged: Vec<holdfast_repo::Error>,
    /// Snapshots that are missing although they were not removed.
    pub lost: Vec<LostSnapshot>,
    /// The machines of all snapshots.
    pub named: MachinesByName,
}

/// Lists snapshots of machines; templates are [elsewhere](crate::list_templates).
///
/// # Errors
/// No snapshot is of a requested machine, or has a requested tag. Not an error if some snapshots cannot be read: these may match.
pub fn list(repository: &Repository, request: &ListRequest) -> Result<ListReport> {
    let (mut snapshots, damaged) = repository.snapshots()?;
    let mut lost = repository.lost_snapshots(&snapshots, LostSearch::Likely)?;
    snapshots.retain(|snapshot| !is_template(snapshot));
    // Snapshots that cannot be read or are lost may be of any machine.
    if damaged.is_empty() && lost.is_empty() {
        check_known(&snapshots, request)?;
    }
    let named = MachinesByName::of(&snapshots);
    lost.retain(|lost| is_named(&lost.machine, &request.machines));
    snapshots.retain(|snapshot| is_wanted(snapshot, request));
    Ok(ListReport {
        snapshots,
        protected: repository.protected()?,
        damaged,
        lost,
        named,
    })
}

/// Whether a machine matches. A name with the characters of a pattern also matches itself.
pub(crate) fn is_named(machine: &str, wanted: &[Glob]) -> bool {
    let means = |glob: &Glob| glob.matches(machine) || glob.to_string() == machine;
    wanted.is_empty() || wanted.iter().any(means)
}

/// Refuses machines and tags without a snapshot: they are misspelt, or meant for another repository.
pub(crate) fn check_known(snapshots: &[Manifest], request: &ListRequest) -> Result<()> {
    let machines = || snapshots.iter().map(|snapshot| snapshot.machine.as_str());
    check_machines(&request.machines, &machines)?;
    let tags = || snapshots.iter().flat_map(|snapshot| &snapshot.tags).map(String::as_str);
    for tag in &request.tags {
        if !tags().any(|known| known == tag) {
            return Err(ResolveError::UnknownTag {
                tag: tag.clone(),
                nearest: nearest_names(tag, tags()),
            }
            .into());
        }
    }
    Ok(())
}

/// Refuses names and patterns that match no machine.
pub(crate) fn check_machines<'n, N: Iterator<Item = &'n str>>(wanted: &[Glob], machines: &dyn Fn() -> N) -> Result<()> {
    let is_unknown = |glob: &&Glob| !machines().any(|machine| is_named(machine, std::slice::from_ref(*glob)));
    let Some(unknown) = wanted.iter().find(is_unknown) else {
        return Ok(());
    };
    let text = unknown.to_string();
    Err(if Glob::is_one(&text) {
        ResolveError::NoMatch { pattern: text }
    } else {
        ResolveError::UnknownMachine {
            nearest: nearest_names(&text, machines()),
            machine: text,
        }
    }
    .into())
}

/// Whether a snapshot matches the request.
pub(crate) fn is_wanted(snapshot: &Manifest, request: &ListRequest) -> bool {
    is_named(&snapshot.machine, &request.machines) && request.tags.iter().all(|tag| snapshot.tags.contains(tag))
}

/// One snapshot, and its disk that was named.
#[derive(Debug)]
pub struct ShowReport {
    /// The snapshot.
    pub snapshot: Manifest,
    /// Whether it is protected from removal.
    pub is_protected: bool,
    /// The identity of its machine.
    pub identity: MachineIdentity,
    /// Number of other machines with the same name.
    pub namesake_count: usize,
    /// The disk, if one was named; it exists.
    pub disk: Option<DiskName>,
}

/// Finds a snapshot and its details.
pub fn show(
    repository: &Repository,
    name: &SnapshotName,
    zone: &TimeZone,
    progress: &dyn Progress,
) -> Result<ShowReport> {
    let mut all = all_snapshots(repository, progress)?;
    let index = find_of_machines(&all, &name.snapshot, Calendar::new(repository, zone, progress))?;
    let named = MachinesByName::of(&all);
    let snapshot = all.swap_remove(index);
    if let Some(disk) = &name.disk {
        snapshot.disk(Some(disk.as_str()))?;
    }
    Ok(ShowReport {
        is_protected: repository.protected()?.contains(&snapshot.id),
        identity: MachineIdentity::of(&snapshot),
        namesake_count: named.count(&snapshot.machine).saturating_sub(1),
        snapshot,
        disk: name.disk.clone(),
    })
}

/// Number of disks of a snapshot; if it has none, the number of streams. Other files of a machine do not count.
pub fn disk_count(snapshot: &Manifest) -> u64 {
    let disks = snapshot.disks.iter();
    let disks = disks.filter(|record| record.content == DiskContent::Blocks && !is_memory(record));
    match disks.count() {
        0 => snapshot.disks.len() as u64,
        count => count as u64,
    }
}
