//! `list` and `show`: what there is.

use std::collections::HashSet;

use holdfast_repo::{DiskContent, LostSearch, LostSnapshot, Manifest, Repository, SnapshotId};
use jiff::tz::TimeZone;

use crate::error::Result;
use crate::machine_backup::is_memory;
use crate::repository::find_snapshot;
use crate::template::is_template;
use crate::{DiskName, MachineName, Progress, SnapshotName};

/// Which snapshots are wanted; without any wish, all.
#[derive(Debug, Clone, Default)]
pub struct ListRequest {
    /// Of these machines only.
    pub machines: Vec<MachineName>,
    /// With all of these tags.
    pub tags: Vec<String>,
}

/// The snapshots of a repository.
#[derive(Debug)]
pub struct ListReport {
    /// Those that are wanted, oldest first.
    pub snapshots: Vec<Manifest>,
    /// Those of all that are kept from being removed.
    pub protected: HashSet<SnapshotId>,
    /// Why others could not be read: they may be of any machine.
    pub damaged: Vec<holdfast_repo::Error>,
    /// Snapshots that are gone although nobody removed them.
    pub lost: Vec<LostSnapshot>,
}

/// Lists snapshots of machines; templates are [elsewhere](crate::list_templates).
pub fn list(repository: &Repository, request: &ListRequest) -> Result<ListReport> {
    let (mut snapshots, damaged) = repository.snapshots()?;
    let mut lost = repository.lost_snapshots(&snapshots, LostSearch::Likely)?;
    lost.retain(|lost| of_machine(&lost.machine, request));
    snapshots.retain(|snapshot| !is_template(snapshot) && is_wanted(snapshot, request));
    Ok(ListReport {
        snapshots,
        protected: repository.protected()?,
        damaged,
        lost,
    })
}

fn of_machine(name: &str, request: &ListRequest) -> bool {
    let mut machines = request.machines.iter();
    request.machines.is_empty() || machines.any(|machine| machine.as_str() == name)
}

/// Whether a snapshot is one of those that are wanted.
pub(crate) fn is_wanted(snapshot: &Manifest, request: &ListRequest) -> bool {
    of_machine(&snapshot.machine, request) && request.tags.iter().all(|tag| snapshot.tags.contains(tag))
}

/// One snapshot, and the disk of it that was named.
#[derive(Debug)]
pub struct ShowReport {
    /// The snapshot.
    pub snapshot: Manifest,
    /// Whether it is kept from being removed.
    pub is_protected: bool,
    /// The disk, where one was named: it is there.
    pub disk: Option<DiskName>,
}

/// Finds a snapshot, with everything that is known of it.
pub fn show(
    repository: &Repository,
    name: &SnapshotName,
    zone: &TimeZone,
    progress: &dyn Progress,
) -> Result<ShowReport> {
    let snapshot = find_snapshot(repository, &name.snapshot, zone, progress)?;
    if let Some(disk) = &name.disk {
        snapshot.disk(Some(disk.as_str()))?;
    }
    Ok(ShowReport {
        is_protected: repository.protected()?.contains(&snapshot.id),
        snapshot,
        disk: name.disk.clone(),
    })
}

/// How many disks a snapshot has; where it has none, how many streams. What else belongs to a machine does not count.
pub fn disk_count(snapshot: &Manifest) -> u64 {
    let disks = snapshot.disks.iter();
    let disks = disks.filter(|record| record.content == DiskContent::Blocks && !is_memory(record));
    match disks.count() {
        0 => snapshot.disks.len() as u64,
        count => count as u64,
    }
}
