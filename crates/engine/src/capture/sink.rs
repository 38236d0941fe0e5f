//! The target of a captured machine: a snapshot in a repository, or another consumer, such as an export of a running
//! machine.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_repo::{Manifest, Parent, Repository, Source};
use jiff::Timestamp;

use super::snapshot::{BackupReport, SnapshotOptions, choose_parent};
use crate::job::bottleneck::Stages;
use crate::job::{Counting, Job, MachineName, Result};
use crate::repository::calendar::Calendar;
use crate::repository::name_conflict::{Claimant, NameClaim};
use crate::repository::open::snapshots;

/// A consumer of one point in time of a machine.
pub(crate) trait SnapshotSink {
    /// The name of the phase in which the machine is read, for progress.
    fn phase(&self, machine: &MachineName) -> String;

    /// Called once, after the machine was locked and before anything is done to it.
    ///
    /// # Errors
    /// The name belongs to another machine.
    fn begin(&self, machine: &MachineName, claimant: Claimant<'_>) -> Result<()>;

    /// Earlier snapshots of the machine; none if nothing is kept that a later backup could be compared with.
    fn history(&self) -> Option<History<'_>>;

    /// Stores the point in time, once. Each disk must be read once, from start to end: the scratch space of ranges that
    /// were read is freed.
    fn store(&self, point: PointInTime<'_>) -> Result<()>;

    /// Removes what was stored, because it is of no single point in time.
    fn withdraw(&self, reason: &str) -> Result<()>;

    /// The id of the snapshot that was stored.
    fn snapshot(&self) -> Option<String>;
}

/// Earlier snapshots of a machine.
#[derive(Clone, Copy)]
pub(crate) struct History<'k> {
    pub(crate) repository: &'k Repository,
    /// The newest snapshot under the machine's name.
    pub(crate) newest: Option<&'k Manifest>,
    /// The snapshot that this one is compared with.
    pub(crate) parent: Option<&'k Manifest>,
}

/// A machine at one point in time.
pub(crate) struct PointInTime<'i> {
    pub(crate) time: Timestamp,
    /// Notes of the snapshot.
    pub(crate) notes: BTreeMap<String, String>,
    pub(crate) sources: Vec<Source<'i>>,
    pub(crate) stages: &'i Stages<'i>,
}

/// Stores the machine as a snapshot in a repository.
pub(crate) struct RepositorySink<'a> {
    repository: &'a Repository,
    options: SnapshotOptions,
    job: Job<'a>,
    start: OnceCell<BackupStart>,
    report: RefCell<Option<BackupReport>>,
}

struct BackupStart {
    machine: MachineName,
    newest: Option<Manifest>,
    parent: Option<Manifest>,
    /// A note about other machines of this name.
    note: Option<(String, String)>,
    /// On the job's clock.
    start: Duration,
}

impl<'a> RepositorySink<'a> {
    pub(crate) fn new(repository: &'a Repository, options: SnapshotOptions, job: Job<'a>) -> Self {
        Self {
            repository,
            options,
            job,
            start: OnceCell::new(),
            report: RefCell::new(None),
        }
    }

    /// The snapshot that was made.
    pub(crate) fn into_report(self) -> Option<BackupReport> {
        self.report.into_inner()
    }
}

impl SnapshotSink for RepositorySink<'_> {
    fn phase(&self, machine: &MachineName) -> String {
        format!("backing up {machine}")
    }

    fn begin(&self, machine: &MachineName, claimant: Claimant<'_>) -> Result<()> {
        let start = self.job.clock.now();
        let manifests = snapshots(self.repository, self.job.progress)?;
        let claim = NameClaim {
            name: machine.as_str(),
            claimant,
            continuation: self.options.continuation,
        };
        let calendar = Calendar::new(self.repository, &self.options.zone, self.job.progress);
        let granted = claim.check(&manifests, calendar, self.job.progress)?;
        let parent = choose_parent(&self.options.parent, calendar, &manifests, &granted)?;
        self.start.get_or_init(|| BackupStart {
            machine: machine.clone(),
            newest: granted.newest(calendar).cloned(),
            parent: parent.cloned(),
            note: granted.note,
            start,
        });
        Ok(())
    }

    fn history(&self) -> Option<History<'_>> {
        let begun = self.start.get();
        Some(History {
            repository: self.repository,
            newest: begun.and_then(|begun| begun.newest.as_ref()),
            parent: begun.and_then(|begun| begun.parent.as_ref()),
        })
    }

    fn store(&self, point: PointInTime<'_>) -> Result<()> {
        let begun = self.start.get().expect("begin is called before store");
        let parent = begun.parent.as_ref();
        let mut notes = point.notes;
        notes.extend(begun.note.clone());
        let stored = self.repository.backup(
            holdfast_repo::BackupRequest {
                machine: begun.machine.to_string(),
                time_ms: point.time.as_millisecond(),
                tags: self.options.tags.clone(),
                parent: parent.map_or(Parent::None, |parent| Parent::Named(parent.id)),
                host: self.options.host.clone(),
                program: self.options.program.clone(),
                notes,
                sources: point.sources,
                thread_count: self.job.thread_count,
            },
            &self.job.watch_stages(Counting::Elsewhere, point.stages),
        )?;
        self.report.replace(Some(BackupReport {
            snapshot: stored.snapshot,
            stored_bytes: stored.stored_bytes,
            bottleneck: point.stages.bottleneck(),
            duration: self.job.clock.now().saturating_sub(begun.start),
        }));
        Ok(())
    }

    fn withdraw(&self, reason: &str) -> Result<()> {
        if let Some(report) = self.report.take() {
            self.repository.forget(report.snapshot.id, reason)?;
        }
        Ok(())
    }

    fn snapshot(&self) -> Option<String> {
        Some(self.report.borrow().as_ref()?.snapshot.id.to_string())
    }
}
