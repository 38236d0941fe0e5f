//! Containers: a disk in a folder of layers, mounted with its file system, with snapshots while it is used.
//!
//! ```text
//! CONTAINER/           layers, container.json         holdfast-image: live
//! RUNTIME/holdfast-container-ID/disk/disk.raw          the disk as a file (FUSE), served by a worker
//! /dev/loopN                                           a block device of that file; or /dev/nbdN, without FUSE
//! FOLDER/                                              the file system on it
//! ```
//! The processes are those of a mounted image: a supervisor that holds what must outlive a worker, and a worker that can
//! be replaced. The worker listens on a socket for requests that change the chain.

mod attach;
mod change;
mod clone;
mod control;
mod create;
mod freezer;
mod hold;
mod memory;
mod nbd;
mod pause;
mod place;
mod relocation;
mod remains;
mod resume;
mod runtime;
mod serve;
mod snapshot_mount;
mod state;
mod traffic;
mod worker;

pub use attach::FileSystemKind;
pub(crate) use attach::find_file_system;
pub use change::{
    ContainerState, ContainerTraffic, Growth, SnapshotDeletion, SnapshotRequest, TakenSnapshot, container_state,
    delete_snapshots, fold_layers, grow_container, plan_container_switch, switch_container, take_snapshot,
    trim_container,
};
pub use clone::{CloneContainerReport, CloneContainerRequest, check_clone, clone_container};
pub use control::Consistency;
pub use create::{CreateContainerReport, CreateContainerRequest, RootFiller, check_create, create_container};
pub(crate) use create::{PARTIAL_ENDING, check_new_folder, create_complete};
pub use freezer::{FreezerLauncher, serve_freezer};
pub(crate) use hold::open_snapshot;
pub use hold::{ContainerHold, HoldContainerRequest, is_left_by_killed_process};
pub use memory::{TakenMemory, take_memory_snapshot};
pub use place::{ContainerPlace, DiskTransport};
pub use relocation::{ContainerDocument, IdleContainer, RelocatedUse, Relocation};
pub(crate) use remains::{FoundRuntimeState, RuntimeRemains, clear_runtime_remains, is_of_mount, runtime_remains};
pub use resume::{
    ResumeChoice, ResumePlan, check_resume, plan_resume, preview_resume, restore_memory, return_to_memory,
};
pub use runtime::RuntimeRequest;
pub(crate) use serve::GROW_PROPERTY;
pub use serve::{
    ContainerMount, ContainerMountRequest, ContainerMounter, MountedDisk, UnmountedContainer, unmount_container,
};
pub use snapshot_mount::{
    MountedSnapshot, ServeUntil, SnapshotServeRequest, is_mounted_from_container, mount_snapshot, unmount_snapshot,
    wait_for_unmount,
};
pub(crate) use snapshot_mount::{ServedFileSystem, with_served_file_system};
pub(crate) use state::REPOSITORY_PROPERTY;
pub use state::SnapshotState;
pub use worker::{ContainerWorkerRequest, serve_container};
