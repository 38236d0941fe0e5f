//! Observations of the doctor, before they are diagnosed.

mod containers;

use std::collections::BTreeSet;
use std::path::PathBuf;

use holdfast_host::MachineState;
use holdfast_host::provider::{HostSnapshotName, ProviderLeftover, TemporaryClone};
use holdfast_host::qemu::{Bitmap, QemuJob, RunId};
use holdfast_repo::Liveness;

use crate::capture::virtualbox::LeftSnapshot;
use crate::container::RuntimeRemains;
use crate::host_snapshot::record::SetId;
use crate::host_snapshot::states::Unfinished;
use crate::machine::place_note::HeldSnapshotNote;
use crate::machine::pull_record::LeftPull;
use crate::machine::run_journal::RunRecord;
use crate::restore::instant::InstantState;

pub(super) use containers::{SeenContainer, SeenLayer, UnneededSnapshot};

/// All observations.
#[derive(Debug, Clone, Default)]
pub(super) struct Seen {
    pub(super) machines: Vec<SeenMachine>,
    /// Machines that could not be examined, and why.
    pub(super) unreachable: Vec<(String, String)>,
    pub(super) runs: Vec<SeenRun>,
    /// The command lines of other Holdfast processes; none if they cannot be listed.
    pub(super) processes: Option<Vec<Vec<String>>>,
    /// Descriptions of Holdfast processes that may have changed a QEMU, but have no note and no watchdog of a run.
    pub(super) unattached: Vec<String>,
    /// The chains of the disks of all machines, each with the name of the machine.
    pub(super) chains: Vec<(String, Vec<PathBuf>)>,
    pub(super) leftovers: Vec<Leftover>,
    pub(super) instants: Vec<SeenInstant>,
    pub(super) places: Vec<SeenPlace>,
    /// Records of machines whose disks no process serves to the host where they run.
    pub(super) pulls: Vec<LeftPull>,
    pub(super) emptied: Vec<SeenOverlay>,
    /// The repository, if one was given.
    pub(super) repository: Option<SeenRepository>,
    /// Leftovers of work on host snapshots.
    pub(super) host: SeenHost,
    /// Machines of VirtualBox with snapshots created by Holdfast.
    pub(super) boxes: Vec<SeenBox>,
    /// Leftovers of backups in XenServer pools.
    pub(super) pools: Vec<SeenPool>,
    /// Folders for mounts of containers whose processes have ended.
    pub(super) runtime_remains: Vec<RuntimeRemains>,
    /// Whether a freeze that was killed has left the kernel with short grace periods.
    pub(super) has_short_grace_periods: bool,
    /// Containers with snapshots of backups.
    pub(super) containers: Vec<SeenContainer>,
    /// Repositories that no longer exist, according to the user.
    pub(super) forgotten_repositories: Vec<String>,
    pub(super) everything: bool,
    /// The address at which libvirt was examined.
    pub(super) address: String,
}

/// The parts of a repository that matter for the diagnosis.
#[derive(Debug, Clone, Default)]
pub(super) struct SeenRepository {
    pub(super) id: String,
    /// The bitmaps that the newest snapshots of machines need.
    pub(super) needed: Vec<String>,
    /// UUIDs of the layers of containers that the newest snapshots were made of.
    pub(super) layers: BTreeSet<String>,
    /// UUIDs of the pools' disks that snapshots are based on.
    pub(super) bases: BTreeSet<String>,
}

/// A noted run.
#[derive(Debug, Clone)]
pub(super) struct SeenRun {
    pub(super) record: RunRecord,
    pub(super) life: Liveness,
}

/// An examined machine.
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
    /// Files of libvirt's own snapshots; none if libvirt could not be queried.
    pub(super) snapshot_files: Option<Vec<PathBuf>>,
}

/// Answer of the guest agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SeenFreeze {
    /// There is no guest agent, or it was not connected.
    NotAsked,
    Thawed,
    Frozen,
    /// The agent is connected, but does not answer.
    Silent(String),
}

/// A disk of a machine.
#[derive(Debug, Clone)]
pub(super) struct SeenDisk {
    pub(super) target: String,
    /// Its node in QEMU.
    pub(super) node: Option<String>,
    pub(super) bitmaps: Vec<Bitmap>,
    /// Its image and backing images.
    pub(super) chain: Vec<PathBuf>,
    /// The images of the chain that are read-only by their permissions.
    pub(super) write_protected: Vec<PathBuf>,
    /// Whether a commit of it is complete or running.
    pub(super) commit: SeenCommit,
}

/// State of commits of a disk, according to libvirt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SeenCommit {
    None,
    OnItsWay,
    Complete,
}

/// An overlay of a backup that no machine uses.
#[derive(Debug, Clone)]
pub(super) struct SeenOverlay {
    pub(super) overlay: PathBuf,
    pub(super) run: RunId,
    /// Its base image.
    pub(super) image: PathBuf,
    /// Whether the base image contains its whole content.
    pub(super) is_in_image: bool,
    pub(super) since_ms: Option<i64>,
}

/// The folder of an instant restore.
#[derive(Debug, Clone)]
pub(super) struct SeenInstant {
    /// Whether it is beside images of the examined machines, or used by one of them; otherwise only its server was found.
    pub(super) is_near: bool,
    pub(super) folder: PathBuf,
    /// The name of its machine; none if that cannot be read.
    pub(super) machine: Option<String>,
    /// The snapshot that is held for it.
    pub(super) snapshot: Option<String>,
    /// The machine that will start from it next time.
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
    /// A socket of a migration in the folder of the hypervisor.
    MigrationSocket,
    /// A folder with scratch files that no process has open.
    Scratch,
    /// An incomplete file of a restore.
    Partial,
    /// A file with which a process tested whether files can be cloned.
    Probe,
    /// The folder of an instant restore that was not completed.
    UnfinishedFolder,
    /// The folder of a container that was not completed.
    UnfinishedContainer,
    /// An incomplete note in the journal of runs.
    HalfNote,
    /// A mounted repository whose server has ended.
    DeadMount,
}

/// Observations of host snapshots.
#[derive(Debug, Clone, Default)]
pub(super) struct SeenHost {
    pub(super) remains: Vec<ProviderLeftover>,
    pub(super) clones: Vec<SeenClone>,
    pub(super) cuts: Vec<IncompleteSet>,
    pub(super) works: Vec<SeenWork>,
    /// Incomplete notes of such work, with the time of their last change.
    pub(super) half_notes: Vec<(PathBuf, Option<i64>)>,
    /// The machines with states of missing host snapshots, one name for each state.
    pub(super) states: Vec<String>,
    /// Descriptions of what could not be examined.
    pub(super) unknown: Vec<String>,
    /// Folders that Holdfast has created in the datasets.
    pub(super) folders: Vec<PathBuf>,
}

/// A temporary clone of a dataset.
#[derive(Debug, Clone)]
pub(super) struct SeenClone {
    pub(super) clone: TemporaryClone,
    pub(super) life: Liveness,
    /// The machine that has disks in it.
    pub(super) user: Option<String>,
}

/// An incomplete set of host snapshots of one name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct IncompleteSet {
    pub(super) there: Vec<HostSnapshotName>,
    /// Known datasets without a snapshot of the set.
    pub(super) missing: Vec<String>,
    pub(super) since_ms: Option<i64>,
    /// The set in their records, if all of them say that a dead process of this host made them where they are now.
    pub(super) of_dead: Option<SetId>,
}

/// Unfinished work on a machine.
#[derive(Debug, Clone)]
pub(super) struct SeenWork {
    pub(super) work: Unfinished,
    pub(super) life: Liveness,
    /// Whether the hypervisor knows the machine; none if unknown.
    pub(super) is_defined: Option<bool>,
    /// Its existing files.
    pub(super) files: Vec<PathBuf>,
}

/// A folder noted by a dead process.
#[derive(Debug, Clone)]
pub(super) struct SeenPlace {
    pub(super) number: u32,
    pub(super) place: PathBuf,
    pub(super) process: u32,
    pub(super) held: Option<HeldSnapshotNote>,
    /// Whether the folder of the instant restore exists.
    pub(super) has_folder: bool,
    /// Whether another process, which may be alive, has noted the place too.
    pub(super) is_shared: bool,
}

/// Observations of a pool.
#[derive(Debug, Clone, Default)]
pub(super) struct SeenPool {
    pub(super) title: String,
    pub(super) snapshots: Vec<SeenSnapshots>,
    pub(super) kept: Vec<SeenKept>,
}

/// Snapshots of a machine that backups have made.
#[derive(Debug, Clone)]
pub(super) struct SeenSnapshots {
    /// Name of the machine; none if it no longer exists.
    pub(super) machine: Option<String>,
    /// UUID and name of each snapshot.
    pub(super) snapshots: Vec<(String, String)>,
    pub(super) since_ms: Option<i64>,
    pub(super) whose: SnapshotOwner,
}

/// Owner of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SnapshotOwner {
    /// A backup of this host with the same journal folder.
    Ours(Liveness),
    /// Another host or user.
    Another,
}

/// Disks that are kept for backups of one machine to one repository.
#[derive(Debug, Clone)]
pub(super) struct SeenKept {
    pub(super) purpose: String,
    pub(super) repository: String,
    /// Name of the machine; none if the pool no longer has it.
    pub(super) machine: Option<String>,
    /// The UUIDs of the disks.
    pub(super) disks: Vec<String>,
    pub(super) used_bytes: u64,
}

/// A machine of VirtualBox with snapshots created by Holdfast.
#[derive(Debug, Clone)]
pub(super) struct SeenBox {
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) snapshots: Vec<LeftSnapshot>,
    /// Whether the backup that made them is alive.
    pub(super) life: Liveness,
    /// The program that can delete them.
    pub(super) manager: Option<String>,
}

/// Kind of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FindingKind {
    /// A run has died.
    DeadRun,
    /// QEMU contains leftovers of a run.
    Remains,
    /// A dead run left the machine paused.
    Paused,
    /// The guest's file systems are frozen.
    Frozen,
    /// The guest's agent does not answer.
    AgentSilent,
    /// A QEMU job is stuck.
    Job,
    /// A bitmap is useless.
    Bitmap,
    /// A disk is on an orphaned overlay.
    Overlay,
    /// The disks of a machine that runs from a snapshot are not being filled.
    InstantRestore,
    /// Another host needs the disks of a machine, and they are not served.
    Pull,
    /// A leftover file or folder.
    Leftover,
    /// A rollback was killed while it was writing.
    Rollback,
    /// A clone was killed before its machine existed.
    Clone,
    /// A set of host snapshots is incomplete.
    HostSnapshot,
    /// States of missing host snapshots.
    States,
    /// A leftover VirtualBox snapshot.
    VirtualBoxSnapshot,
    /// A leftover snapshot in a XenServer pool.
    PoolSnapshot,
    /// A XenServer pool keeps disks for backups that will never run.
    PoolBase,
    /// The server of a mounted container is dead.
    ContainerMount,
    /// A container has a snapshot that no backup needs.
    ContainerSnapshot,
    /// A machine cannot be examined.
    Unreachable,
}

impl FindingKind {
    /// The word for it in machine-readable output; it never changes.
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
            Self::Pull => "pull",
            Self::Leftover => "leftover",
            Self::Rollback => "rollback",
            Self::Clone => "clone",
            Self::HostSnapshot => "host-snapshot",
            Self::States => "states",
            Self::VirtualBoxSnapshot => "virtualbox-snapshot",
            Self::PoolSnapshot => "pool-snapshot",
            Self::PoolBase => "pool-base",
            Self::ContainerMount => "container-mount",
            Self::ContainerSnapshot => "container-snapshot",
            Self::Unreachable => "unreachable",
        }
    }
}

/// A repair. Machines have their names at the hypervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Repair {
    /// Resume the machine.
    Resume,
    /// Thaw its file systems.
    Thaw,
    /// Remove the leftovers of a run from QEMU.
    RemoveRun(RunId),
    /// Dismiss a finished job.
    DismissJob(String),
    /// Remove a bitmap from a node.
    RemoveBitmap {
        /// The node.
        node: String,
        /// The bitmap.
        name: String,
    },
    /// Commit overlays into their base.
    Commit {
        /// The disk.
        disk: String,
        /// The overlays, topmost first.
        overlays: Vec<PathBuf>,
        /// Their base.
        base: PathBuf,
    },
    /// Delete the note of a run.
    ForgetRun(RunId),
    /// Delete the note of a place, and release the hold on a snapshot.
    ForgetPlace {
        /// The number of the note.
        number: u32,
        /// The hold: the id of the snapshot, and the number of the hold.
        held: Option<(String, u32)>,
    },
    /// Delete a leftover folder.
    DeleteFolder(PathBuf),
    /// Delete an overlay of a backup that no machine uses, if its whole content is in its base image.
    DeleteEmptied {
        /// The overlay.
        overlay: PathBuf,
        /// The base image.
        image: PathBuf,
    },
    /// Delete the folder of an instant restore whose machine never ran.
    Abandon(PathBuf),
    /// Delete the incomplete image of a restore.
    DeletePartial(PathBuf),
    /// Unmount a repository whose server has ended.
    Unmount(PathBuf),
    /// Delete an incomplete note.
    DeleteHalfNote(PathBuf),
    /// Delete a small leftover file.
    DeleteFile(PathBuf),
    /// Delete the leftovers of a host snapshot.
    ClearRemain(ProviderLeftover),
    /// Destroy a leftover clone of a dataset.
    DestroyClone(TemporaryClone),
    /// Remove the mark of a dataset clone whose machine exists.
    FinishClone(TemporaryClone),
    /// Delete the files of a clone whose machine does not exist; identified by its UUID.
    RemoveHalfClone(String),
    /// Remove host snapshots of this set, which a dead process did not finish.
    RemoveCut(Vec<HostSnapshotName>, SetId),
    /// Remove temporary host snapshots for clones; identified by their set.
    RemoveInstant(String),
    /// Delete the note of work on a machine; identified by its UUID.
    ForgetWork(String),
    /// Delete the snapshots that Holdfast has created of a VirtualBox machine; identified by its UUID.
    DeleteSnapshots(String),
    /// Remove snapshots of backups from a XenServer pool.
    RemovePoolSnapshots {
        /// The pool.
        pool: String,
        /// The UUIDs of the snapshots.
        uuids: Vec<String>,
    },
    /// Remove disks that a XenServer pool keeps but no backup needs.
    RemoveKeptDisks {
        /// The pool.
        pool: String,
        /// The purpose for which they were kept.
        purpose: String,
        /// Their UUIDs.
        uuids: Vec<String>,
    },
    /// Unmount the disk of a container whose server is dead, and delete the folder of the mount.
    ClearRuntime(PathBuf),
    /// Reset the switch of the kernel for grace periods.
    ResetGracePeriods,
    /// Delete snapshots of a container that no backup needs.
    DeleteContainerSnapshots {
        /// The container.
        folder: PathBuf,
        /// Their UUIDs.
        ids: Vec<String>,
    },
    /// Delete the folder of a container that was not completed.
    DeleteUnfinishedContainer(PathBuf),
    /// Remove states whose host snapshots no longer exist.
    ForgetStates,
}
