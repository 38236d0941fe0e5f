//! `diff`: what changed between two snapshots.

use std::ops::Range;

use holdfast_repo::{DiskRecord, Manifest, Repository};
use jiff::tz::TimeZone;

use super::calendar::Calendar;
use super::open::{find_in, snapshots};
use crate::SnapshotName;
use crate::job::{Job, Result, Unit};

/// What to compare.
#[derive(Debug, Clone)]
pub struct DiffRequest {
    /// The earlier snapshot, optionally one of its disks.
    pub old: SnapshotName,
    /// The later snapshot, optionally one of its disks.
    pub new: SnapshotName,
    /// Time zone of times in their names.
    pub zone: TimeZone,
    /// Most ranges listed per disk; further ranges are only counted.
    pub range_count_max: usize,
}

/// Differences between two snapshots.
#[derive(Debug, Clone)]
pub struct DiffReport {
    /// The earlier snapshot.
    pub old: Manifest,
    /// The later one.
    pub new: Manifest,
    /// Each disk of either snapshot.
    pub disks: Vec<DiskDiff>,
}

/// Differences of one disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskDiff {
    /// Its name.
    pub name: String,
    /// Its size in the earlier snapshot; none if that does not have the disk.
    pub old_bytes: Option<u64>,
    /// Its size in the later snapshot; none if that does not have the disk.
    pub new_bytes: Option<u64>,
    /// Bytes that differ, in whole blocks of 4096 bytes.
    pub changed_bytes: u64,
    /// Number of ranges with differences.
    pub range_count: u64,
    /// The first of those ranges.
    pub ranges: Vec<Range<u64>>,
}

/// Compares two snapshots disk by disk, or one disk with another. Reads data only to distinguish changed blocks from moved ones.
pub fn diff(repository: &Repository, request: &DiffRequest, job: Job<'_>) -> Result<DiffReport> {
    let manifests = snapshots(repository, job.progress)?;
    let calendar = Calendar::new(repository, &request.zone, job.progress);
    let old = &manifests[find_in(&manifests, &request.old.snapshot, calendar)?];
    let new = &manifests[find_in(&manifests, &request.new.snapshot, calendar)?];
    job.progress.phase("comparing", Unit::Bytes);
    let mut disks = Vec::new();
    for (name, before, after) in pairs(request, old, new)? {
        let disk = one_disk(repository, name, before, after, request.range_count_max, job);
        disks.push(disk.map_err(|error| {
            error
                .unless_removed(repository, old.id)
                .unless_removed(repository, new.id)
        })?);
    }
    Ok(DiffReport {
        old: old.clone(),
        new: new.clone(),
        disks,
    })
}

type Pair<'m> = (String, Option<&'m DiskRecord>, Option<&'m DiskRecord>);

/// The disks to compare: of equal names, or the named ones.
fn pairs<'m>(request: &DiffRequest, old: &'m Manifest, new: &'m Manifest) -> Result<Vec<Pair<'m>>> {
    let before = request.old.disk.as_ref().or(request.new.disk.as_ref());
    let after = request.new.disk.as_ref().or(before);
    if let (Some(before), Some(after)) = (before, after) {
        let old = old.disk(Some(before.as_str()))?;
        let new = new.disk(Some(after.as_str()))?;
        return Ok(vec![(new.name.clone(), Some(old), Some(new))]);
    }
    let find = |manifest: &'m Manifest, name: &str| manifest.disks.iter().find(|disk| disk.name == name);
    let of_new = new
        .disks
        .iter()
        .map(|disk| (disk.name.clone(), find(old, &disk.name), Some(disk)));
    let gone = old.disks.iter().filter(|disk| find(new, &disk.name).is_none());
    Ok(of_new
        .chain(gone.map(|disk| (disk.name.clone(), Some(disk), None)))
        .collect())
}

fn one_disk(
    repository: &Repository,
    name: String,
    old: Option<&DiskRecord>,
    new: Option<&DiskRecord>,
    range_count_max: usize,
    job: Job<'_>,
) -> Result<DiskDiff> {
    let mut diff = DiskDiff {
        name,
        old_bytes: old.map(|disk| disk.size_bytes),
        new_bytes: new.map(|disk| disk.size_bytes),
        changed_bytes: 0,
        range_count: 0,
        ranges: Vec::new(),
    };
    let (Some(old), Some(new)) = (old, new) else {
        return Ok(diff);
    };
    repository.diff(old, new, &mut |range| {
        if job.interrupt.is_requested() {
            return Err(holdfast_repo::Error::Cancelled);
        }
        job.progress.advance(range.end - range.start);
        diff.changed_bytes += range.end - range.start;
        diff.range_count += 1;
        if diff.ranges.len() < range_count_max {
            diff.ranges.push(range);
        }
        Ok(())
    })?;
    job.interrupt.check()?;
    Ok(diff)
}
