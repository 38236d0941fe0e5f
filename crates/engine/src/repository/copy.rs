//! `copy`: snapshots go to another repository, as they are.
//!
//! Each is brought over by itself, the oldest first, as a backup of the disks that it has: committed whole or not at all. What an
//! interrupted copy stored is found by the next one. Protection and retention are matters of each repository.

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
    /// These, also if they were there before and were removed.
    Named(Vec<SnapshotReference>),
    /// All of these machines and tags.
    Matching(ListRequest),
}

/// What happens to snapshots that were there before and were removed there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemovedThere {
    /// They stay away.
    StayAway,
    /// They are copied again.
    ComeBack,
}

/// What to copy, and how.
#[derive(Debug, Clone)]
pub struct CopyRequest {
    /// Which snapshots.
    pub selection: CopySelection,
    /// What happens to those that were removed there.
    pub removed: RemovedThere,
    /// Whether anything is copied, or only planned.
    pub execution: Execution,
    /// Stored bytes read each second, at most.
    pub bytes_per_second: Option<NonZeroU64>,
    /// In which times of names are meant.
    pub zone: TimeZone,
}

/// What happened to a snapshot.
#[derive(Debug)]
pub enum CopyOutcome {
    /// It is there now.
    Copied {
        /// Under this id.
        id: SnapshotId,
        /// Stored bytes that were read for it.
        read_bytes: u64,
        /// Bytes of disks that were new there.
        new_bytes: u64,
        /// Bytes that the repository there has grown by.
        stored_bytes: u64,
    },
    /// It would be copied.
    Planned(CopySurvey),
    /// It was there already, under this id.
    Present(SnapshotId),
    /// It was there, and was removed there.
    Removed,
    /// It was removed here while it was to be copied.
    Gone,
    /// It cannot be read here.
    Failed(RepositoryError),
}

/// A snapshot that was to be copied.
#[derive(Debug)]
pub struct CopiedSnapshot {
    /// The snapshot here.
    pub snapshot: Manifest,
    /// What happened to it.
    pub outcome: CopyOutcome,
}

/// What was copied.
#[derive(Debug)]
pub struct CopyReport {
    /// All snapshots that were chosen, oldest first.
    pub snapshots: Vec<CopiedSnapshot>,
    /// Why other snapshots here cannot be read at all: they may be of any machine.
    pub damaged: Vec<RepositoryError>,
    /// Whether the two repositories recognise bytes alike.
    pub is_alike: bool,
    /// How long it took.
    pub duration: Duration,
}

/// Whether two locations are the same folder.
pub fn is_same_place(first: &Location, second: &Location) -> bool {
    let real = |location: &Location| location.path().canonicalize().ok();
    real(first).is_some_and(|first| Some(first) == real(second))
}

/// Copies snapshots from one repository to another. One that cannot be read is listed in the report, and the others are copied; where
/// the other repository fails, all ends.
pub fn copy(from: &Repository, to: &Repository, request: &CopyRequest, job: Job<'_>) -> Result<CopyReport> {
    let start = job.clock.now();
    // Before anything is looked at: what is seen then stays readable.
    let pause = match request.execution {
        Execution::Execute => keep_readable(from, job.progress),
        Execution::DryRun => None,
    };
    let (mut all, damaged) = from.snapshots()?;
    // What a push has not finished is nothing yet.
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
            // A copy may take longer than a silent reader is waited for.
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

/// Says which names stand for other machines there: a copy keeps its name. It is said as long as nothing of the machine is there.
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

/// The places of the chosen snapshots in `all`, ascending, each once; and what happens to those that were removed there.
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

/// Of what means the newest snapshot, that of a machine; a template is meant where its id is given.
fn find_named(all: &[Manifest], reference: &SnapshotReference, calendar: Calendar<'_>) -> Result<usize> {
    match find_of_machines(all, reference, calendar) {
        Err(Error::Template(_)) => find_in(all, reference, calendar),
        other => other,
    }
}

struct RepositoryCopy<'a> {
    from: &'a Repository,
    to: &'a Repository,
    /// All snapshots here, oldest first.
    all: &'a [Manifest],
    /// The machines here.
    named: MachinesByName,
    /// What is there.
    holdings: TargetHoldings,
    /// What would be there by now.
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

    /// The snapshot here that shares most with `manifest`, of those that are there: what it was compared with, or its neighbour.
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

    /// What happens to a snapshot that need not be copied; none for one that is to be.
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

    /// Templates are protected in every repository, from programs that do not know them; also one that such a program has copied.
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

    /// Copies a snapshot.
    fn bring(&mut self, manifest: &Manifest) -> Result<CopyOutcome> {
        if self.is_gone(manifest) {
            return Ok(CopyOutcome::Gone);
        }
        // Another process may have been faster.
        let (new, _) = self.to.snapshots_except(self.holdings.known())?;
        for other in new {
            self.holdings.add(other);
        }
        if let CopyPresence::Present(id) = self.holdings.standing(manifest) {
            return Ok(CopyOutcome::Present(id));
        }
        let base = self.base(manifest, &|other| self.holdings.counterpart(other).is_some());
        let report = match self.store(manifest, base) {
            // The snapshot there that was to be built on was removed meanwhile.
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

    /// Another process may have copied the same. A process that sees two keeps the one with the smallest id, which is the same for
    /// all; and each looks after it has committed, so at least one sees both.
    fn settle(&mut self, manifest: &Manifest, copy: Manifest) -> Result<SnapshotId> {
        let ours = copy.id;
        let (new, _) = self.to.snapshots_except(self.holdings.known())?;
        let identity = origin::identity(manifest);
        let (mut twins, others): (Vec<_>, Vec<_>) =
            new.into_iter().partition(|other| origin::identity(other) == identity);
        for other in others {
            self.holdings.add(other);
        }
        twins.sort_unstable_by_key(|twin| twin.id);
        let mut twins = twins.into_iter();
        let first = twins.next().unwrap_or(copy);
        for twin in twins {
            match self.to.forget(twin.id, "copy: it was copied twice at once") {
                Ok(()) | Err(RepositoryError::NoSnapshot { .. }) => {}
                Err(error) => self.job.progress.warning(&format!(
                    "{} was copied twice at once, and {} stays: {error}",
                    manifest.id, twin.id
                )),
            }
        }
        let id = first.id;
        if id != ours {
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

    /// What to make of a snapshot that cannot be read here.
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
