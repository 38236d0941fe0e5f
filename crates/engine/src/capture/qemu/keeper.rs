//! What becomes of a machine that is read: a snapshot in a repository, or whatever else takes it in as it is read.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_repo::{Manifest, Parent, Repository, Source};
use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::BackupReport;
use crate::capture::images::{ParentChoice, choose_parent};
use crate::job::bottleneck::Stages;
use crate::job::{Counting, Job, MachineName, Result};
use crate::repository::calendar::Calendar;
use crate::repository::name_conflict::{Claim, Claimant, Continuation};
use crate::repository::open::snapshots;

/// Who takes in what is read of a machine.
pub(crate) trait Keeper {
    /// What is being done, for whoever watches.
    fn phase(&self, machine: &MachineName) -> String;

    /// Told of it once nobody else works at the machine, before anything is done to it.
    fn begin(&self, machine: &MachineName, uuid: &str) -> Result<()>;

    /// What it has of the machine; none where nothing is kept for a next time.
    fn before(&self) -> Option<Before<'_>>;

    /// Takes in the machine, once. Each disk is to be read once, from its beginning to its end: what was read is given back.
    fn keep(&self, instant: Instant<'_>) -> Result<()>;

    /// Takes back what was kept, for the reason that is given: it is of no instant.
    fn take_back(&self, reason: &str) -> Result<()>;

    /// The snapshot that was made.
    fn snapshot(&self) -> Option<String>;
}

/// What is there of a machine already.
#[derive(Clone, Copy)]
pub(crate) struct Before<'k> {
    pub(crate) repository: &'k Repository,
    /// The snapshot that this one is compared with.
    pub(crate) parent: Option<&'k Manifest>,
}

/// A machine at its instant.
pub(crate) struct Instant<'i> {
    pub(crate) time: Timestamp,
    /// What is known of the instant.
    pub(crate) notes: BTreeMap<String, String>,
    pub(crate) sources: Vec<Source<'i>>,
    pub(crate) stages: &'i Stages<'i>,
}

/// How the snapshot is to be.
#[derive(Debug, Clone)]
pub struct SnapshotWish {
    /// What to compare with.
    pub parent: ParentChoice,
    /// Whether the snapshots that the name has may be of another machine.
    pub continuation: Continuation,
    /// Words to find the snapshot by.
    pub tags: Vec<String>,
    /// The host that backs up.
    pub host: String,
    /// The program that backs up.
    pub program: String,
    /// In which times of a parent's name are meant.
    pub zone: TimeZone,
}

/// A repository that gets a snapshot.
pub(super) struct InRepository<'a> {
    repository: &'a Repository,
    wish: SnapshotWish,
    job: Job<'a>,
    begun: OnceCell<Begun>,
    report: RefCell<Option<BackupReport>>,
}

struct Begun {
    machine: MachineName,
    parent: Option<Manifest>,
    /// What the snapshot says of other machines of its name.
    note: Option<(String, String)>,
    /// On the job's clock.
    start: Duration,
}

impl<'a> InRepository<'a> {
    pub(super) fn new(repository: &'a Repository, wish: SnapshotWish, job: Job<'a>) -> Self {
        Self {
            repository,
            wish,
            job,
            begun: OnceCell::new(),
            report: RefCell::new(None),
        }
    }

    /// The snapshot that was made.
    pub(super) fn into_report(self) -> Option<BackupReport> {
        self.report.into_inner()
    }
}

impl Keeper for InRepository<'_> {
    fn phase(&self, machine: &MachineName) -> String {
        format!("backing up {machine}")
    }

    fn begin(&self, machine: &MachineName, uuid: &str) -> Result<()> {
        let start = self.job.clock.now();
        let manifests = snapshots(self.repository, self.job.progress)?;
        let claim = Claim {
            name: machine.as_str(),
            claimant: Claimant::Machine(uuid),
            continuation: self.wish.continuation,
        };
        let calendar = Calendar::new(self.repository, &self.wish.zone, self.job.progress);
        let granted = claim.check(&manifests, calendar, self.job.progress)?;
        let parent = choose_parent(&self.wish.parent, calendar, &manifests, &granted)?;
        self.begun.get_or_init(|| Begun {
            machine: machine.clone(),
            parent: parent.cloned(),
            note: granted.note,
            start,
        });
        Ok(())
    }

    fn before(&self) -> Option<Before<'_>> {
        Some(Before {
            repository: self.repository,
            parent: self.begun.get().and_then(|begun| begun.parent.as_ref()),
        })
    }

    fn keep(&self, instant: Instant<'_>) -> Result<()> {
        let begun = self.begun.get().expect("it was begun");
        let parent = begun.parent.as_ref();
        let mut notes = instant.notes;
        notes.extend(begun.note.clone());
        let stored = self.repository.backup(
            holdfast_repo::BackupRequest {
                machine: begun.machine.to_string(),
                time_ms: instant.time.as_millisecond(),
                tags: self.wish.tags.clone(),
                parent: parent.map_or(Parent::None, |parent| Parent::Named(parent.id)),
                host: self.wish.host.clone(),
                program: self.wish.program.clone(),
                notes,
                sources: instant.sources,
                thread_count: self.job.thread_count,
            },
            &self.job.watch_stages(Counting::Elsewhere, instant.stages),
        )?;
        self.report.replace(Some(BackupReport {
            snapshot: stored.snapshot,
            stored_bytes: stored.stored_bytes,
            bottleneck: instant.stages.bottleneck(),
            duration: self.job.clock.now().saturating_sub(begun.start),
        }));
        Ok(())
    }

    fn take_back(&self, reason: &str) -> Result<()> {
        if let Some(report) = self.report.take() {
            self.repository.forget(report.snapshot.id, reason)?;
        }
        Ok(())
    }

    fn snapshot(&self) -> Option<String> {
        Some(self.report.borrow().as_ref()?.snapshot.id.to_string())
    }
}
