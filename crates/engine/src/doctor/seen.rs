//! What a doctor sees, before anything is made of it.

use std::collections::BTreeSet;
use std::path::PathBuf;

use holdfast_host::MachineState;
use holdfast_host::provider::{HostSnapshotName, ProviderLeftover, TemporaryClone};
use holdfast_host::qemu::{Bitmap, QemuJob, RunId};
use holdfast_repo::Liveness;

use crate::capture::virtualbox::LeftSnapshot;
use crate::host_snapshot::record::SetId;
use crate::host_snapshot::states::Unfinished;
use crate::machine::place_note::HeldSnapshotNote;
use crate::machine::run_journal::RunRecord;
use crate::restore::instant::InstantState;

/// Everything that was looked at.
#[derive(Debug, Clone, Default)]
pub(super) struct Seen {
    pub(super) machines: Vec<SeenMachine>,
    /// Machines that could not be looked at, and why.
    pub(super) unreachable: Vec<(String, String)>,
    pub(super) runs: Vec<SeenRun>,
    /// The command lines of other processes of the program; none where they cannot be seen.
    pub(super) living: Option<Vec<Vec<String>>>,
    /// Processes of the program that may have put something into a QEMU, and that neither a note nor a watchdog ties to a run; in words.
    pub(super) unattached: Vec<String>,
    /// The images of all machines: of each disk itself and all below it, with the name of the machine.
    pub(super) chains: Vec<(String, Vec<PathBuf>)>,
    pub(super) leftovers: Vec<Leftover>,
    pub(super) instants: Vec<SeenInstant>,
    pub(super) places: Vec<SeenPlace>,
    pub(super) emptied: Vec<SeenOverlay>,
    /// The repository, where one was given.
    pub(super) repository: Option<SeenRepository>,
    /// What was left of work on host snapshots.
    pub(super) host: SeenHost,
    /// Machines of VirtualBox with snapshots created by Holdfast.
    pub(super) boxes: Vec<SeenBox>,
    /// What backups have left in pools of XenServer.
    pub(super) pools: Vec<SeenPool>,
    /// Repositories that are gone, as a person says.
    pub(super) forgotten_repositories: Vec<String>,
    pub(super) everything: bool,
    /// The address at which libvirt was examined.
    pub(super) address: String,
}

/// What of a repository matters here.
#[derive(Debug, Clone, Default)]
pub(super) struct SeenRepository {
    pub(super) id: String,
    /// The bitmaps that the newest snapshots of machines need.
    pub(super) needed: Vec<String>,
    /// The disks of pools that snapshots can be compared with, by their UUIDs.
    pub(super) bases: BTreeSet<String>,
}

/// A run that is noted.
#[derive(Debug, Clone)]
pub(super) struct SeenRun {
    pub(super) record: RunRecord,
    pub(super) life: Liveness,
}

/// A machine.
#[derive(Debug, Clone)]
pub(super) struct SeenMachine {
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) address: String,
    pub(super) is_libvirt: bool,
    pub(super) state: MachineState,
    pub(super) runs: Vec<RunId>,
    pub(super) frozen: SeenFreeze,
    pub(super) jobs: Vec<QemuJob>,
    pub(super) disks: Vec<SeenDisk>,
    /// Files that snapshots of libvirt's own name; none where libvirt could not be asked.
    pub(super) snapshot_files: Option<Vec<PathBuf>>,
}

/// What the guest's agent says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SeenFreeze {
    /// There is no guest agent, or it does not answer.
    NotAsked,
    Thawed,
    Frozen,
    /// It is there, and does not answer.
    Silent(String),
}

/// A disk of a machine.
#[derive(Debug, Clone)]
pub(super) struct SeenDisk {
    pub(super) target: String,
    /// Its node in QEMU.
    pub(super) node: Option<String>,
    pub(super) bitmaps: Vec<Bitmap>,
    /// Its image, and what that is based on.
    pub(super) chain: Vec<PathBuf>,
    /// Which of the chain cannot be written, by their own permissions.
    pub(super) write_protected: Vec<PathBuf>,
    /// Whether a commit of it is complete or on its way.
    pub(super) commit: SeenCommit,
}

/// What libvirt says of commits of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SeenCommit {
    None,
    OnItsWay,
    Complete,
}

/// An overlay of a backup that no machine has.
#[derive(Debug, Clone)]
pub(super) struct SeenOverlay {
    pub(super) overlay: PathBuf,
    pub(super) run: RunId,
    /// The image that it was made for.
    pub(super) image: PathBuf,
    /// Whether that holds everything that is in it.
    pub(super) is_in_image: bool,
    pub(super) since_ms: Option<i64>,
}

/// The folder of an instant restore.
#[derive(Debug, Clone)]
pub(super) struct SeenInstant {
    /// It is beside images of the machines that are examined, or one of them names it; else it is known by its server alone.
    pub(super) is_near: bool,
    pub(super) folder: PathBuf,
    /// The machine that it is to be; none where that cannot be read.
    pub(super) machine: Option<String>,
    /// The snapshot that is held for it.
    pub(super) snapshot: Option<String>,
    /// The machine that will start with it the next time.
    pub(super) owner: Option<String>,
    pub(super) since_ms: Option<i64>,
    pub(super) state: Option<InstantState>,
}

/// A file or folder that may be a leftover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Leftover {
    pub(super) path: PathBuf,
    pub(super) kind: LeftoverKind,
    pub(super) since_ms: Option<i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeftoverKind {
    /// A folder with a socket without a listener.
    Socket,
    /// A folder with scratch files that no process has open.
    Scratch,
    /// Half of a file that was being restored.
    Partial,
    /// A file by which a process tested whether files can be cloned.
    Probe,
    /// The folder of an instant restore that was being made.
    UnfinishedFolder,
    /// A note in the journal of runs that was not written to its end.
    HalfNote,
}

/// What was seen of host snapshots.
#[derive(Debug, Clone, Default)]
pub(super) struct SeenHost {
    pub(super) remains: Vec<ProviderLeftover>,
    pub(super) clones: Vec<SeenClone>,
    pub(super) cuts: Vec<IncompleteSet>,
    pub(super) works: Vec<SeenWork>,
    /// Halves of notes of such work, with the time of their last change.
    pub(super) half_notes: Vec<(PathBuf, Option<i64>)>,
    /// The machines whose states belong to host snapshots that are gone, one name for each state.
    pub(super) states: Vec<String>,
    /// What could not be looked at, in words.
    pub(super) unknown: Vec<String>,
    /// Folders of Holdfast in the datasets.
    pub(super) folders: Vec<PathBuf>,
}

/// A clone of a dataset that was made for a while.
#[derive(Debug, Clone)]
pub(super) struct SeenClone {
    pub(super) clone: TemporaryClone,
    pub(super) life: Liveness,
    /// The machine that has disks in it.
    pub(super) user: Option<String>,
}

/// Host snapshots of one name of which not all were made that were to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct IncompleteSet {
    pub(super) there: Vec<HostSnapshotName>,
    /// Datasets that have none, as far as they are known.
    pub(super) missing: Vec<String>,
    pub(super) since_ms: Option<i64>,
    /// The set that their records name, where all of them say that a process of this host that is dead cut them where they are now.
    pub(super) of_dead: Option<SetId>,
}

/// Work on a machine that has begun and not ended.
#[derive(Debug, Clone)]
pub(super) struct SeenWork {
    pub(super) work: Unfinished,
    pub(super) life: Liveness,
    /// Whether the hypervisor knows the machine; none where that cannot be found out.
    pub(super) is_defined: Option<bool>,
    /// Files of it that are there.
    pub(super) files: Vec<PathBuf>,
}

/// A place that a dead process has noted.
#[derive(Debug, Clone)]
pub(super) struct SeenPlace {
    pub(super) number: u32,
    pub(super) place: PathBuf,
    pub(super) process: u32,
    pub(super) held: Option<HeldSnapshotNote>,
    /// The folder of the instant restore is there.
    pub(super) has_folder: bool,
}

/// What was seen in a pool.
#[derive(Debug, Clone, Default)]
pub(super) struct SeenPool {
    pub(super) title: String,
    pub(super) snapshots: Vec<SeenSnapshots>,
    pub(super) kept: Vec<SeenKept>,
}

/// Snapshots of a machine that backups have made.
#[derive(Debug, Clone)]
pub(super) struct SeenSnapshots {
    /// Its name; none where it is gone.
    pub(super) machine: Option<String>,
    /// The UUID and the name of each of them.
    pub(super) snapshots: Vec<(String, String)>,
    pub(super) since_ms: Option<i64>,
    pub(super) whose: SnapshotOwner,
}

/// Whose a snapshot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SnapshotOwner {
    /// A backup of this host has made it, from where we look.
    Ours(Liveness),
    /// Another host or user has.
    Another,
}

/// Disks that are kept for backups of one machine into one repository.
#[derive(Debug, Clone)]
pub(super) struct SeenKept {
    pub(super) purpose: String,
    pub(super) repository: String,
    /// The name of the machine; none where the pool does not have it any more.
    pub(super) machine: Option<String>,
    /// The UUIDs of these disks.
    pub(super) disks: Vec<String>,
    pub(super) used_bytes: u64,
}

/// A machine of VirtualBox with snapshots created by Holdfast.
#[derive(Debug, Clone)]
pub(super) struct SeenBox {
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) snapshots: Vec<LeftSnapshot>,
    /// Whether the backup lives that has made them.
    pub(super) life: Liveness,
    /// The program that could delete them.
    pub(super) manager: Option<String>,
}

/// Of what kind a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FindingKind {
    /// A run has died.
    DeadRun,
    /// Something of a run is in QEMU.
    Remains,
    /// A dead run left the machine paused.
    Paused,
    /// The guest's file systems are frozen.
    Frozen,
    /// The guest's agent does not answer.
    AgentSilent,
    /// A job of QEMU is stuck.
    Job,
    /// A bitmap is of no use.
    Bitmap,
    /// A disk is on an orphaned overlay.
    Overlay,
    /// Disks of a machine that runs from a snapshot are not filled.
    InstantRestore,
    /// A file or folder was left.
    Leftover,
    /// A rollback was killed while it wrote.
    Rollback,
    /// A clone was killed before its machine was there.
    Clone,
    /// Not all host snapshots were made that were to be made together.
    HostSnapshot,
    /// States of machines are kept whose host snapshots are gone.
    States,
    /// A snapshot of VirtualBox's was left.
    VirtualBoxSnapshot,
    /// A snapshot was left in a pool of XenServer.
    PoolSnapshot,
    /// A pool of XenServer keeps disks for backups that will never come.
    PoolBase,
    /// A machine cannot be examined.
    Unreachable,
}

impl FindingKind {
    /// The word for it in documents: it never changes.
    pub fn word(self) -> &'static str {
        match self {
            Self::DeadRun => "dead-run",
            Self::Remains => "remains",
            Self::Paused => "paused",
            Self::Frozen => "frozen",
            Self::AgentSilent => "agent-silent",
            Self::Job => "job",
            Self::Bitmap => "bitmap",
            Self::Overlay => "overlay",
            Self::InstantRestore => "instant-restore",
            Self::Leftover => "leftover",
            Self::Rollback => "rollback",
            Self::Clone => "clone",
            Self::HostSnapshot => "host-snapshot",
            Self::States => "states",
            Self::VirtualBoxSnapshot => "virtualbox-snapshot",
            Self::PoolSnapshot => "pool-snapshot",
            Self::PoolBase => "pool-base",
            Self::Unreachable => "unreachable",
        }
    }
}

/// A repair. Machines are named as at their hypervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Repair {
    /// Let the machine run on.
    Resume,
    /// Thaw its file systems.
    Thaw,
    /// Take what a run has put into QEMU out.
    RemoveRun(RunId),
    /// Take away what is left of a job.
    DismissJob(String),
    /// Remove a bitmap from a node.
    RemoveBitmap {
        /// The node.
        node: String,
        /// The bitmap.
        name: String,
    },
    /// Bring overlays down into their base.
    Commit {
        /// The disk.
        disk: String,
        /// The overlays, the uppermost first.
        overlays: Vec<PathBuf>,
        /// What they are based on.
        base: PathBuf,
    },
    /// Take the note of a run away.
    ForgetRun(RunId),
    /// Take the note of a place away, and end the protection of a snapshot: its id, and the number of the hold.
    ForgetPlace {
        /// The number of the note.
        number: u32,
        /// The hold.
        held: Option<(String, u32)>,
    },
    /// Delete a folder that was left.
    DeleteFolder(PathBuf),
    /// Delete an overlay of a backup that no machine has, if all of it is in the image that it was made for.
    DeleteEmptied {
        /// The overlay.
        overlay: PathBuf,
        /// The image.
        image: PathBuf,
    },
    /// Delete what was made for an instant restore whose machine never ran; its folder.
    Abandon(PathBuf),
    /// Delete what was left of an image that was being restored.
    DeletePartial(PathBuf),
    /// Delete a note that was not written to its end.
    DeleteHalfNote(PathBuf),
    /// Delete a small file that was left.
    DeleteFile(PathBuf),
    /// Delete what was left of a host snapshot.
    ClearRemain(ProviderLeftover),
    /// Destroy a clone of a dataset that was left.
    DestroyClone(TemporaryClone),
    /// Remove the mark of a clone of a dataset whose machine is there.
    FinishClone(TemporaryClone),
    /// Delete the files of a clone whose machine is not there; its UUID.
    RemoveHalfClone(String),
    /// Remove host snapshots of this set that a dead process did not finish.
    RemoveCut(Vec<HostSnapshotName>, SetId),
    /// Remove host snapshots that were there for clones only; their set.
    RemoveInstant(String),
    /// Take the note of work on a machine away; its UUID.
    ForgetWork(String),
    /// Delete the snapshots that Holdfast has created of a machine of VirtualBox; its UUID.
    DeleteSnapshots(String),
    /// Remove snapshots that backups have left in a pool of XenServer.
    RemovePoolSnapshots {
        /// The pool.
        pool: String,
        /// The UUIDs of the snapshots.
        uuids: Vec<String>,
    },
    /// Remove disks that a pool of XenServer keeps and no backup needs.
    LetGoOfKept {
        /// The pool.
        pool: String,
        /// What they are kept for.
        purpose: String,
        /// Their UUIDs.
        uuids: Vec<String>,
    },
    /// Forget the states whose host snapshots are gone.
    ForgetStates,
}
