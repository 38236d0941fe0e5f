//! `copy`: copies snapshots to another repository, unchanged.
//!
//! Each snapshot is copied separately, oldest first, like a backup of its disks: it is committed completely or not at
//! all. The next copy reuses what an interrupted copy has stored. Each repository has its own protection and retention.

mod origin;
mod status;

use std::collections::{BTreeSet, HashSet};
use std::num::NonZeroU64;
use std::time::Duration;

use holdfast_repo::{
    CopyMemory, CopySurvey, Error as RepositoryError, GcPause, Manifest, Parent, Repository, SnapshotId, Source,
    SourceData, StoredDisk,
};
use jiff::tz::TimeZone;

use super::calendar::Calendar;
use super::calendar::time_of;
use super::forget::Execution;
use super::list::{ListRequest, check_known, is_wanted};
use super::name_conflict::{MachineIdentity, MachinesByName};
use super::open::{all_snapshots, find_in, find_of_machines};
use super::removed::keep_readable;
use crate::job::rate_limit::RateLimit;
use crate::job::{Counting, Error, Job, Progress, Result, Unit};
use crate::notes::{is_template, is_template_draft};
use crate::{Location, SnapshotReference};
use origin::{CopyPresence, TargetHoldings};
pub use status::{CopyStatus, MachineCopyStatus, copy_status};

/// Which snapshots are copied.
#[derive(Debug, Clone)]
pub enum CopySelection {
    /// These, even if they existed in the target and were removed there.
    Named(Vec<SnapshotReference>),
    /// All snapshots of these machines and tags.
    Matching(ListRequest),
}

/// What to do with snapshots that existed in the target and were removed there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemovedThere {
    /// They are not copied.
    StayAway,
    /// They are copied again.
    ComeBack,
}

/// What to copy, and how.
#[derive(Debug, Clone)]
pub struct CopyRequest {
    /// The snapshots to copy.
    pub selection: CopySelection,
    /// What to do with snapshots that were removed from the target.
    pub removed: RemovedThere,
    /// Whether anything is copied, or only planned.
    pub execution: Execution,
    /// Limit of stored bytes that are read per second.
    pub bytes_per_second: Option<NonZeroU64>,
    /// Time zone of times in names.
    pub zone: TimeZone,
}

/// What happened to a snapshot.
#[derive(Debug)]
pub enum CopyOutcome {
    /// It was copied.
    Copied {
        /// Its id in the target.
        id: SnapshotId,
        /// Stored bytes that were read to copy it.
        read_bytes: u64,
        /// Bytes of disks that were new in the target.
        new_bytes: u64,
        /// Bytes by which the target has grown.
        stored_bytes: u64,
    },
    /// It would be copied.
    Planned(CopySurvey),
    /// The target had it already, under this id.
    Present(SnapshotId),
    /// The target had it, and it was removed there.
    Removed,
    /// It was removed from the source before it was copied.
    Gone,
    /// It cannot be read from the source.
    Failed(RepositoryError),
}

/// A snapshot that was to be copied.
#[derive(Debug)]
pub struct CopiedSnapshot {
    /// The snapshot in the source.
    pub snapshot: Manifest,
    /// What happened to it.
    pub outcome: CopyOutcome,
}

/// Result of a copy.
#[derive(Debug)]
pub struct CopyReport {
    /// All snapshots that were chosen, oldest first.
    pub snapshots: Vec<CopiedSnapshot>,
    /// Errors of other snapshots in the source that cannot be read: they may be of any machine.
    pub damaged: Vec<RepositoryError>,
    /// Whether the two repositories deduplicate alike, so that common data is stored once.
    pub is_alike: bool,
    /// How long it took.
    pub duration: Duration,
}

/// Whether two locations are the same folder.
pub fn is_same_place(first: &Location, second: &Location) -> bool {
    let real = |location: &Location| location.path().canonicalize().ok();
    real(first).is_some_and(|first| Some(first) == real(second))
}

/// Copies snapshots from one repository to another. A snapshot that cannot be read is listed in the report, and the
/// others are copied. An error of the target ends the copy.
pub fn copy(from: &Repository, to: &Repository, request: &CopyRequest, job: Job<'_>) -> Result<CopyReport> {
    let start = job.clock.now();
    // First of all, so that every snapshot that is listed stays readable.
    let pause = match request.execution {
        Execution::Execute => keep_readable(from, job.progress),
        Execution::DryRun => None,
    };
    let (mut all, damaged) = from.snapshots()?;
    // An unfinished push is not a template yet.
    all.retain(|manifest| !is_template_draft(manifest));
    let there = all_snapshots(to, job.progress)?;
    let calendar = Calendar::new(from, &request.zone, job.progress);
    let (chosen, removed) = choose(&all, request, calendar)?;
    warn_of_namesakes(chosen.iter().map(|index| &all[*index]), &there, job.progress);
    let holdings = TargetHoldings::new(to.config().id, there);
    let pace = RateLimit::new(request.bytes_per_second, job);
    let mut copy = RepositoryCopy {
        from,
        to,
        all: &all,
        named: MachinesByName::of(&all),
        holdings,
        planned: HashSet::new(),
        pace: &|bytes| {
            // A copy may take longer than the time after which gc ignores a silent reader.
            pause.iter().for_each(GcPause::renew);
            pace.pass(bytes);
        },
        memory: CopyMemory::default(),
        job,
    };
    let outcomes = chosen
        .iter()
        .map(|&index| copy.without_copying(&all[index], removed, request.execution));
    let mut outcomes = outcomes.collect::<Result<Vec<Option<CopyOutcome>>>>()?;
    let due: Vec<usize> = (0..outcomes.len()).filter(|place| outcomes[*place].is_none()).collect();
    let mut surveyor = match request.execution {
        Execution::DryRun => Some(to.surveyor()?),
        Execution::Execute => None,
    };
    for (number, &place) in (1..).zip(&due) {
        let manifest = &all[chosen[place]];
        copy.report_part(manifest, number, due.len());
        job.interrupt.check()?;
        let outcome = match &mut surveyor {
            Some(surveyor) => copy.survey(manifest, surveyor)?,
            None => copy.bring(manifest)?,
        };
        outcomes[place] = Some(outcome);
    }
    let outcomes = chosen.iter().zip(outcomes).filter_map(|(index, outcome)| {
        Some(CopiedSnapshot {
            snapshot: all[*index].clone(),
            outcome: outcome?,
        })
    });
    Ok(CopyReport {
        snapshots: outcomes.collect(),
        is_alike: to.has_same_fingerprints(from),
        damaged,
        duration: job.clock.now().saturating_sub(start),
    })
}

/// Warns about names that belong to other machines in the target: a copy keeps its name. Only warns while the target
/// has no snapshot of the machine.
fn warn_of_namesakes<'m>(chosen: impl Iterator<Item = &'m Manifest>, there: &[Manifest], progress: &dyn Progress) {
    let new: BTreeSet<(&str, MachineIdentity)> = chosen
        .map(|manifest| (manifest.machine.as_str(), MachineIdentity::of(manifest)))
        .collect();
    for (name, identity) in new {
        let known = there.iter().filter(|manifest| manifest.machine == name);
        let known: BTreeSet<MachineIdentity> = known.map(MachineIdentity::of).collect();
        if !known.is_empty() && !known.contains(&identity) {
            let known: Vec<String> = known.iter().map(ToString::to_string).collect();
            progress.warning(&format!(
                "the snapshots listed as {name} there are of another machine ({known}; this one is {identity}): retention counts \
                 them apart, and snapshots of {name} have to be named by their ids",
                known = known.join(", ")
            ));
        }
    }
}

/// Sorted indexes of the chosen snapshots in `all`, without duplicates; and what to do with those that were removed from the target.
fn choose(all: &[Manifest], request: &CopyRequest, calendar: Calendar<'_>) -> Result<(Vec<usize>, RemovedThere)> {
    let (mut chosen, removed): (Vec<usize>, _) = match &request.selection {
        CopySelection::Named(references) => {
            let find = |reference| find_named(all, reference, calendar);
            let found: Result<_> = references.iter().map(find).collect();
            (found?, RemovedThere::ComeBack)
        }
        CopySelection::Matching(wanted) => {
            check_known(all, wanted)?;
            let matching = all
                .iter()
                .enumerate()
                .filter(|(_, manifest)| is_wanted(manifest, wanted));
            (matching.map(|(index, _)| index).collect(), request.removed)
        }
    };
    chosen.sort_unstable();
    chosen.dedup();
    Ok((chosen, removed))
}

/// Finds a named snapshot. A name for the newest snapshot means one of a machine; a template must be named by its id.
fn find_named(all: &[Manifest], reference: &SnapshotReference, calendar: Calendar<'_>) -> Result<usize> {
    match find_of_machines(all, reference, calendar) {
        Err(Error::Template(_)) => find_in(all, reference, calendar),
        other => other,
    }
}

struct RepositoryCopy<'a> {
    from: &'a Repository,
    to: &'a Repository,
    /// All snapshots of the source, oldest first.
    all: &'a [Manifest],
    /// The machines of the source.
    named: MachinesByName,
    /// The snapshots of the target.
    holdings: TargetHoldings,
    /// Snapshots that a dry run would have copied so far.
    planned: HashSet<SnapshotId>,
    pace: &'a (dyn Fn(u64) + Sync),
    memory: CopyMemory,
    job: Job<'a>,
}

impl<'a> RepositoryCopy<'a> {
    fn report_part(&self, manifest: &Manifest, number: usize, count: usize) {
        let (machine, time) = (&manifest.machine, time_of(manifest));
        self.job.progress.part(number, count);
        self.job
            .progress
            .phase(&format!("copying {machine} of {time}"), Unit::Bytes);
        self.job.progress.total(manifest.logical_bytes());
    }

    /// The snapshot of the source that shares most data with `manifest` and that the target has: its parent, or a neighbour.
    fn base(&self, manifest: &Manifest, is_there: &dyn Fn(&Manifest) -> bool) -> Option<&'a Manifest> {
        let usable = || {
            let of_machine = self.all.iter().filter(|other| self.named.is_same(other, manifest));
            of_machine.filter(|other| other.id != manifest.id && is_there(other))
        };
        let key = |manifest: &Manifest| (manifest.time_ms, manifest.id);
        usable()
            .find(|other| Some(other.id) == manifest.parent)
            .or_else(|| usable().rfind(|other| key(other) < key(manifest)))
            .or_else(|| usable().next())
    }

    /// The outcome of a snapshot that need not be copied; none if it has to be copied.
    fn without_copying(
        &self,
        manifest: &Manifest,
        removed: RemovedThere,
        execution: Execution,
    ) -> Result<Option<CopyOutcome>> {
        Ok(match (self.holdings.standing(manifest), removed) {
            (CopyPresence::Present(id), _) => {
                self.keep_template(manifest, execution)?;
                Some(CopyOutcome::Present(id))
            }
            (CopyPresence::Removed, RemovedThere::StayAway) => Some(CopyOutcome::Removed),
            (CopyPresence::Removed, RemovedThere::ComeBack) | (CopyPresence::Missing, _) => None,
        })
    }

    /// Protects a template in the target against programs that do not know templates, even if such a program has copied it.
    fn keep_template(&self, manifest: &Manifest, execution: Execution) -> Result<()> {
        match self.holdings.counterpart(manifest) {
            Some(there) if is_template(there) && execution == Execution::Execute => Ok(self.to.protect(there.id)?),
            _ => Ok(()),
        }
    }

    fn survey(&mut self, manifest: &Manifest, surveyor: &mut holdfast_repo::Surveyor<'_>) -> Result<CopyOutcome> {
        let base = self.base(manifest, &|other| {
            self.planned.contains(&other.id) || self.holdings.counterpart(other).is_some()
        });
        let mut sum = CopySurvey::default();
        for disk in &manifest.disks {
            let stored = self.stored(disk, base);
            match surveyor.survey_disk(&stored) {
                Ok(found) => {
                    sum.read_bytes += found.read_bytes;
                    sum.new_bytes += found.new_bytes;
                }
                Err(error) => return self.unreadable(manifest, error),
            }
            self.job.interrupt.check()?;
            self.job.progress.advance(disk.size_bytes);
        }
        self.planned.insert(manifest.id);
        Ok(CopyOutcome::Planned(sum))
    }

    fn stored<'m>(&'m self, disk: &'m holdfast_repo::DiskRecord, base: Option<&'m Manifest>) -> StoredDisk<'m> {
        StoredDisk {
            repository: self.from,
            disk,
            base: base.and_then(|base| base.disks.iter().find(|other| other.name == disk.name)),
            pace: self.pace,
            memory: &self.memory,
        }
    }

    fn bring(&mut self, manifest: &Manifest) -> Result<CopyOutcome> {
        if self.is_gone(manifest) {
            return Ok(CopyOutcome::Gone);
        }
        // Another process may have copied it meanwhile.
        let (new, _) = self.to.snapshots_except(self.holdings.known())?;
        for other in new {
            self.holdings.add(other);
        }
        if let CopyPresence::Present(id) = self.holdings.standing(manifest) {
            return Ok(CopyOutcome::Present(id));
        }
        let base = self.base(manifest, &|other| self.holdings.counterpart(other).is_some());
        let report = match self.store(manifest, base) {
            // The base in the target was removed meanwhile.
            Err(RepositoryError::NoSnapshot { .. }) if let Some(base) = base => {
                self.holdings.remove(base);
                self.store(manifest, None)
            }
            other => other,
        };
        let report = match report {
            Err(error @ RepositoryError::Origin { .. }) => return self.unreadable(manifest, error),
            other => other?,
        };
        let id = self.settle(manifest, report.snapshot)?;
        self.keep_template(manifest, Execution::Execute)?;
        Ok(CopyOutcome::Copied {
            id,
            read_bytes: report.statistics.read_bytes,
            new_bytes: report.statistics.new_bytes,
            stored_bytes: report.stored_bytes,
        })
    }

    fn store(
        &self,
        manifest: &Manifest,
        base: Option<&Manifest>,
    ) -> std::result::Result<holdfast_repo::BackupReport, RepositoryError> {
        let sources = manifest.disks.iter().map(|disk| Source {
            name: disk.name.clone(),
            data: SourceData::Stored(self.stored(disk, base)),
            notes: disk.notes.clone(),
        });
        let counterpart = base.and_then(|base| self.holdings.counterpart(base));
        let request = holdfast_repo::BackupRequest {
            machine: manifest.machine.clone(),
            time_ms: manifest.time_ms,
            tags: manifest.tags.clone(),
            parent: counterpart.map_or(Parent::None, |there| Parent::Named(there.id)),
            host: manifest.host.clone(),
            program: manifest.program.clone(),
            notes: self.holdings.notes_of_copy(manifest, self.from.config().id, self.all),
            sources: sources.collect(),
            thread_count: self.job.thread_count,
        };
        self.to.backup(request, &self.job.watch(Counting::Bytes))
    }

    /// Removes a duplicate if another process has copied the same snapshot. Every process keeps the copy with the
    /// smallest id. Each process checks after its commit, so at least one of them sees both copies.
    fn settle(&mut self, manifest: &Manifest, copy: Manifest) -> Result<SnapshotId> {
        let own_id = copy.id;
        let (new, _) = self.to.snapshots_except(self.holdings.known())?;
        let identity = origin::identity(manifest);
        let (mut copies, others): (Vec<_>, Vec<_>) =
            new.into_iter().partition(|other| origin::identity(other) == identity);
        for other in others {
            self.holdings.add(other);
        }
        copies.sort_unstable_by_key(|copy| copy.id);
        let mut copies = copies.into_iter();
        let first = copies.next().unwrap_or(copy);
        for copy in copies {
            match self.to.forget(copy.id, "copy: it was copied twice at once") {
                Ok(()) | Err(RepositoryError::NoSnapshot { .. }) => {}
                Err(error) => self.job.progress.warning(&format!(
                    "{} was copied twice at once, and {} stays: {error}",
                    manifest.id, copy.id
                )),
            }
        }
        let id = first.id;
        if id != own_id {
            self.job.progress.note(&format!(
                "{} was copied by another process at the same time",
                manifest.id
            ));
        }
        self.holdings.add(first);
        Ok(id)
    }

    fn is_gone(&self, manifest: &Manifest) -> bool {
        matches!(self.from.snapshot(manifest.id), Err(RepositoryError::NoSnapshot { .. }))
    }

    /// The outcome of a snapshot that cannot be read from the source.
    fn unreadable(&self, manifest: &Manifest, error: RepositoryError) -> Result<CopyOutcome> {
        self.job.interrupt.check()?;
        if self.is_gone(manifest) {
            return Ok(CopyOutcome::Gone);
        }
        if matches!(error, RepositoryError::Cancelled) {
            return Err(Error::from(error));
        }
        Ok(CopyOutcome::Failed(error))
    }
}
