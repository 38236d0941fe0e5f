//! Snapshots of a repository as files.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::error_text;
use holdfast_repo::{GcPause, Manifest, Repository, SnapshotId};
use holdfast_serve::fuse::{Directory, FileTree, FuseServer};
use jiff::tz::TimeZone;

use super::MountPlace;
use super::tree::TreeSource;
use crate::SnapshotName;
use crate::job::{DiskName, Job, Result};
use crate::notes::is_template;
use crate::repository::open::find_snapshot;
use crate::repository::removed::keep_readable;

/// The interval between two searches for new and removed snapshots.
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);

/// Which snapshots to mount, and where.
pub struct MountRequest {
    /// What the folder shows.
    pub content: MountContent,
    /// The mount.
    pub place: MountPlace,
    /// The time zone of names with times.
    pub zone: TimeZone,
    /// Describes a snapshot for `snapshot.json`.
    pub describe: fn(&Manifest) -> Vec<u8>,
}

/// What a mounted folder shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MountContent {
    /// All snapshots of machines in the repository, also those of later.
    Repository,
    /// The files of one snapshot, or one of its disks.
    Snapshot(SnapshotName),
}

/// What is mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedContent {
    /// Number of snapshots.
    pub snapshot_count: usize,
    /// The snapshot, if only one is shown.
    pub snapshot: Option<SnapshotId>,
}

/// Mounts snapshots until they are unmounted, which is the normal end, or until the job is interrupted. `ready` is
/// called when the files can be read.
///
/// While a file of a repository is open, or a snapshot is mounted, garbage collection keeps the data of snapshots that
/// are removed.
pub fn mount(
    repository: &Arc<Repository>,
    request: &MountRequest,
    job: Job<'_>,
    ready: &mut dyn FnMut(&MountedContent),
) -> Result<()> {
    let mut shown = Shown::find(repository, request, job)?;
    let root = shown.root(job);
    request.place.serve(&root, job, &mut |server, tree| {
        ready(&MountedContent {
            snapshot_count: shown.manifests.len(),
            snapshot: shown.single(),
        });
        shown.watch(server, tree, job);
    })
}

/// The snapshots that are shown.
struct Shown<'a> {
    repository: &'a Arc<Repository>,
    request: &'a MountRequest,
    manifests: Vec<Manifest>,
    disk: Option<DiskName>,
    /// Snapshots that cannot be read, which were reported.
    unreadable: HashSet<String>,
    pause: Option<GcPause<'a>>,
}

impl<'a> Shown<'a> {
    fn find(repository: &'a Arc<Repository>, request: &'a MountRequest, job: Job<'_>) -> Result<Self> {
        let mut shown = Self {
            repository,
            request,
            manifests: Vec::new(),
            disk: None,
            unreadable: HashSet::new(),
            pause: None,
        };
        match &request.content {
            MountContent::Repository => {
                shown.refresh(job)?;
            }
            MountContent::Snapshot(name) => {
                shown.pause = keep_readable(repository, job.progress);
                let manifest = find_snapshot(repository, &name.snapshot, &request.zone, job.progress)?;
                if let Some(disk) = &name.disk {
                    manifest.disk(Some(disk.as_str()))?;
                }
                shown.disk.clone_from(&name.disk);
                shown.manifests.push(manifest);
            }
        }
        Ok(shown)
    }

    fn single(&self) -> Option<SnapshotId> {
        match &self.request.content {
            MountContent::Repository => None,
            MountContent::Snapshot(_) => self.manifests.first().map(|manifest| manifest.id),
        }
    }

    /// The files to show. Content with a name that no file can have is reported, and not shown.
    fn root(&self, job: Job<'_>) -> Directory {
        let source = TreeSource {
            repository: self.repository,
            zone: &self.request.zone,
            describe: self.request.describe,
            progress: job.progress,
        };
        match (&self.request.content, self.manifests.first()) {
            (MountContent::Snapshot(_), Some(manifest)) => source.snapshot(manifest, self.disk.as_ref()),
            _ => source.repository(&self.manifests),
        }
    }

    /// Reads new snapshots, and drops removed ones. Returns whether anything changed.
    fn refresh(&mut self, job: Job<'_>) -> Result<bool> {
        let (present, removed) = self.repository.snapshot_ids()?;
        let count = self.manifests.len();
        self.manifests
            .retain(|manifest| present.contains(&manifest.id) && !removed.contains(&manifest.id));
        let has_less = self.manifests.len() < count;
        let known = self.manifests.iter().map(|manifest| manifest.id).collect();
        let (new, damaged) = self.repository.snapshots_except(&known)?;
        for error in damaged {
            let text = error_text(&error);
            if !self.unreadable.contains(&text) {
                job.progress.warning(&format!("a snapshot is not shown: {text}"));
                self.unreadable.insert(text);
            }
        }
        let count = self.manifests.len();
        self.manifests
            .extend(new.into_iter().filter(|manifest| !is_template(manifest)));
        self.manifests.sort_by_key(|manifest| (manifest.time_ms, manifest.id));
        Ok(has_less || self.manifests.len() > count)
    }

    /// Keeps the files up to date until they are unmounted or the job is interrupted.
    fn watch(&mut self, server: &FuseServer, tree: &FileTree, job: Job<'_>) {
        let is_repository = self.request.content == MountContent::Repository;
        let (mut refreshed, mut used) = (job.clock.now(), tree.use_count());
        let mut has_failed = false;
        while !server.is_ended() && job.interrupt.check().is_ok() {
            job.clock.sleep(super::LOOK_INTERVAL);
            if is_repository && server.open_file_count() == 0 {
                self.pause = None;
            } else if self.pause.is_none() {
                self.pause = keep_readable(self.repository, job.progress);
            }
            self.pause.iter().for_each(GcPause::renew);
            let is_due = job.clock.now() >= refreshed + REFRESH_INTERVAL && tree.use_count() != used;
            if !is_repository || !is_due {
                continue;
            }
            (refreshed, used) = (job.clock.now(), tree.use_count());
            match self.refresh(job) {
                Ok(false) => has_failed = false,
                Ok(true) => {
                    has_failed = false;
                    tree.replace(&self.root(job));
                }
                Err(error) if !has_failed => {
                    has_failed = true;
                    job.progress.warning(&format!(
                        "new snapshots are not shown, since the repository cannot be read: {}",
                        error_text(&error)
                    ));
                }
                Err(_) => {}
            }
        }
    }
}
