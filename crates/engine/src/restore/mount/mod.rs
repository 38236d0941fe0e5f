//! `mount`: snapshots as folders with the disks as files, until they are unmounted or the job is interrupted.

mod content;
mod names;
mod tree;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::error_text;
use holdfast_host::fuse_mount::{
    FuseMountError, FuseMountRequest, MountReaders, UnmountMode, mount_fuse, unmount_fuse,
};
use holdfast_repo::{GcPause, Manifest, Repository, SnapshotId};
use holdfast_serve::fuse::{Directory, FileTree, FuseServer, MountEvents, Owner};
use jiff::tz::TimeZone;

use self::tree::TreeSource;
use crate::SnapshotName;
use crate::job::{DiskName, Error, Job, Result};
use crate::notes::is_template;
use crate::repository::open::find_snapshot;
use crate::repository::removed::keep_readable;

/// The interval between two checks for the end of the mount.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// The interval between two searches for new and removed snapshots.
const REFRESH_INTERVAL: Duration = Duration::from_secs(5);
/// How long pending reads may take after the file system is unmounted.
const PATIENCE: Duration = Duration::from_secs(10);

/// What to mount, and where.
pub struct MountRequest {
    /// What the folder shows.
    pub content: MountContent,
    /// Name of the repository in the list of mounts.
    pub source: String,
    /// An empty folder: an absolute path without symbolic links.
    pub folder: PathBuf,
    /// Which users can read the files.
    pub readers: MountReaders,
    /// The time zone of names with times.
    pub zone: TimeZone,
    /// Describes a snapshot for `snapshot.json`.
    pub describe: fn(&Manifest) -> Vec<u8>,
    /// Receives errors of reads.
    pub events: Arc<dyn MountEvents>,
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
    let owner = Owner {
        user: rustix::process::geteuid().as_raw(),
        group: rustix::process::getegid().as_raw(),
    };
    let tree = Arc::new(FileTree::new(&shown.root(job), owner));
    let device = mount_fuse(&FuseMountRequest {
        source: &request.source,
        folder: &request.folder,
        readers: request.readers,
    })?;
    let mount = Mount {
        folder: &request.folder,
        is_mounted: true,
    };
    let server = FuseServer::start(device, Arc::clone(&tree), Arc::clone(&request.events)).map_err(Error::Serve)?;
    ready(&MountedContent {
        snapshot_count: shown.manifests.len(),
        snapshot: shown.single(),
    });
    shown.watch(&server, &tree, job);
    mount.end(&server, job)
}

/// A mounted folder. It is unmounted on drop.
struct Mount<'a> {
    folder: &'a Path,
    is_mounted: bool,
}

impl Mount<'_> {
    /// Unmounts the folder, if the user has not done that, and waits for pending reads.
    fn end(mut self, server: &FuseServer, job: Job<'_>) -> Result<()> {
        self.is_mounted = false;
        if !server.is_ended() {
            match unmount_fuse(self.folder, UnmountMode::Unused) {
                Ok(()) => {}
                Err(FuseMountError::InUse { .. }) => {
                    job.progress.warning(&format!(
                        "programs still use files below {}; they can no longer read them",
                        self.folder.display()
                    ));
                    unmount_fuse(self.folder, UnmountMode::Detach)?;
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
        }
        let deadline = job.clock.now() + PATIENCE;
        while !server.is_ended() && job.clock.now() < deadline {
            job.clock.sleep(LOOK_INTERVAL);
        }
        Ok(())
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        if self.is_mounted {
            // The error that ends the job is reported instead.
            unmount_fuse(self.folder, UnmountMode::Detach).ok();
        }
    }
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
            job.clock.sleep(LOOK_INTERVAL);
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
