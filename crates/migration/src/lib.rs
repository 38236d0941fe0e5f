//! Machines that move to another host, also while they run.
//!
//! libvirt moves the memory, through a relay of ours that holds the last bytes back: [`MemoryRelay`]. Meanwhile `live-copy`
//! copies the disks. When libvirt has stopped the machine for the rest of its memory, the rest of the disks is sent, and the
//! relay is opened as soon as the other host has sealed all of them. If anything fails before, the relay breaks the stream, and
//! libvirt resumes the machine here.
//!
//! - `memory_relay`: the relay of the memory
//! - `memory_receiver`: the other host, for hypervisors that do not reach each other
//! - `memory_watch`, `memory_convergence`: the progress of the memory, and whether it will ever be sent
//! - `request_link`: requests to a process of the other host, and its answers
//! - `far`: requests to the `holdfast` of the other host, and how that answers them
//! - `socket_host`, `command_host`: another host that is reached by a socket or a command instead of ssh;
//!   `forwarded_sockets`: sockets here whose connections it gets; `streams`: the bytes of one
//! - `service_link`: connections to services of another host, however it is reached
//! - `plan`, `image_file`: what a migration would do, and what prevents it
//! - `machine_files`: the files of a machine that moves with its snapshots
//! - `move_progress`: the progress of all disks together, and of the memory
//! - `disks`, `disk_copy`: the copies of all disks, directed together, and the copy of one
//! - `mover`: what follows on each event; `move_watch`: what its threads wait for; `resolution`: where the machine runs after a
//!   failure at the end
//! - `post_copy`: machines that run there before their disks are complete
//! - `container`: containers that move
//! - `interrupted`: a machine that an interrupted migration has left paused
//! - `run`: the migration of a machine that runs; `shut_off`: of one that is shut off; `complete`: the end of both

mod command_host;
mod complete;
mod container;
mod disk_copy;
mod disks;
mod error;
mod far;
mod forwarded_sockets;
mod image_file;
mod interrupted;
mod machine_files;
mod memory_convergence;
mod memory_receiver;
mod memory_relay;
mod memory_watch;
mod migration_tools;
mod move_progress;
mod move_watch;
mod mover;
mod plan;
mod post_copy;
mod report;
mod request_link;
mod resolution;
mod run;
mod service_link;
mod shut_off;
mod socket_host;
mod streams;

pub use command_host::CommandHost;
pub use container::{
    ArrivalTools, ContainerMove, ContainerMoveObserver, ContainerMoveReport, ContainerMoveTools, ContainerPhase,
    ContainerPlan, ContainerPlanRequest, ContainerRound, FarContainers, MountTarget, MountThere,
    RECEIVE_CONTAINER_COMMAND, migrate_container, plan_container, serve_arrivals,
};
pub use disks::CopyEvents;
pub use error::{Error, Result};
pub use far::{
    FarHost, FarTools, HostRequests, HostServices, MovingHypervisor, RECEIVE_MACHINE_COMMAND, RequestSubject,
    serve_connection, serve_far, serve_host,
};
pub use image_file::ImageFile;
pub use interrupted::{Settlement, settle};
pub use memory_relay::{MemoryRelay, RelayEnd};
pub use migration_tools::{FormerDisks, MigrationObserver, MigrationTools, PullTools, RunningTools};
pub use plan::{DiskArrival, IncompleteMemory, LiveMemory, MigrationPlan, MovingForm, PlanRequest, PlannedDisk, plan};
pub use post_copy::{ResumedPull, resume_pull};
pub use report::{MigrationPhase, MigrationReport, MovedDisk, PhaseDuration, PulledDiskReport};
pub use run::migrate_running;
pub use service_link::{RECEIVE_MIGRATION_COMMAND, ServiceLink, ServiceProgram};
pub use shut_off::migrate_shut_off;
pub use socket_host::SocketHost;
