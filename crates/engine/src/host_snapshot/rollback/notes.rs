//! Notes of a running rollback or clone, so that a killed one is detected.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use holdfast_host::Tools;
use holdfast_host::provider::HostSnapshotName;
use holdfast_image::Format;

use super::{ClonePlan, HostPoint, HostRestore};
use crate::host_snapshot::states::{StateStore, Unfinished, UnfinishedFile, UnfinishedKind};
use crate::image::guest_identity::{GuestIdentity, renew_guest};
use crate::job::{Job, Result, Unit};
use crate::restore::machine::{FileContent, FileWay, MachineRestorePlan, RestoreObserver};

/// Note of a rollback, from its first written byte on.
pub(super) struct RollbackNote<'a> {
    states: &'a StateStore,
    work: Unfinished,
}

impl<'a> RollbackNote<'a> {
    /// Prepares the note; nothing is written yet. After an unfinished rollback, its safety snapshot stays the oldest in the list.
    pub(super) fn new(
        restore: &HostRestore<'a>,
        point: &HostPoint,
        plan: &MachineRestorePlan,
        safety: &[HostSnapshotName],
    ) -> Result<Self> {
        let before = restore.states.unfinished_on(&point.uuid)?;
        let before = before.into_iter().flat_map(|before| before.safety);
        let safety = before.chain(safety.iter().map(ToString::to_string)).collect();
        Ok(Self {
            states: restore.states,
            work: Unfinished {
                safety,
                ..work(UnfinishedKind::Rollback, restore, point, plan)
            },
        })
    }
}

impl RestoreObserver for RollbackNote<'_> {
    fn about_to_write(&mut self) -> Result<()> {
        self.states.note_unfinished(&self.work)
    }
}

/// Note of a clone, from before its first file on.
pub(super) struct CloneNote<'a> {
    states: &'a StateStore,
    work: Unfinished,
    plan: &'a MachineRestorePlan,
    guest: Option<&'a OwnGuest<'a>>,
    job: Job<'a>,
}

/// A new identity for the guest of a clone.
pub struct OwnGuest<'a> {
    /// What is renewed.
    pub identity: GuestIdentity,
    /// The programs of this host.
    pub tools: &'a dyn Tools,
}

impl<'a> CloneNote<'a> {
    pub(super) fn begin(
        restore: &HostRestore<'a>,
        point: &HostPoint,
        plan: &'a ClonePlan,
        guest: Option<&'a OwnGuest<'a>>,
        job: Job<'a>,
    ) -> Result<Self> {
        let is_new = |way| matches!(way, FileWay::NewFile | FileWay::Shared);
        let files = plan.restore.files.iter().filter(|file| is_new(file.way));
        let files = files.map(|file| UnfinishedFile {
            path: file.to.clone(),
            identity: None,
        });
        let note = Self {
            states: restore.states,
            work: Unfinished {
                files: files.collect(),
                ..work(UnfinishedKind::Clone, restore, point, &plan.restore)
            },
            plan: &plan.restore,
            guest,
            job,
        };
        note.states.note_unfinished(&note.work)?;
        Ok(note)
    }
}

impl RestoreObserver for CloneNote<'_> {
    /// From now on the files may get their names: the note records their device and inode, which distinguish them from
    /// other files of these names.
    fn about_to_name(&mut self, new: &[(&Path, &Path)]) -> Result<()> {
        for file in &mut self.work.files {
            let partial = new.iter().find(|(path, _)| *path == file.path);
            let found = partial.and_then(|(_, partial)| partial.symlink_metadata().ok());
            file.identity = found.map(|found| (found.dev(), found.ino()));
        }
        self.states.note_unfinished(&self.work)
    }

    fn has_files(&mut self) -> Result<()> {
        let Some(OwnGuest { identity, tools }) = self.guest else {
            return Ok(());
        };
        let phase = format!("giving the guest of {} an identity of its own", self.plan.machine.name);
        self.job.progress.phase(&phase, Unit::Items);
        let files = self.plan.files.iter();
        let disks = files.filter(|file| matches!(file.content, FileContent::Disk(_)));
        let images: Vec<(&Path, Format)> = disks.map(|file| (&*file.to, file.format)).collect();
        renew_guest(Path::new(&self.plan.machine.name), &images, identity, *tools)
    }
}

fn work(kind: UnfinishedKind, restore: &HostRestore<'_>, point: &HostPoint, plan: &MachineRestorePlan) -> Unfinished {
    Unfinished {
        kind,
        machine: plan.machine.name.clone(),
        uuid: plan.machine.uuid.clone(),
        of: point.manifest.machine.clone(),
        point: point.name.clone(),
        safety: Vec::new(),
        files: Vec::new(),
        process: restore.environment.processes.this(),
        start_ms: (restore.environment.now_ms)(),
    }
}
