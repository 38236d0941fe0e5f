//! Containers that move to another host, also while they are used.
//!
//! The layers below the top do not change, so their files are copied while programs use the container. Each round takes a
//! snapshot, and copies the layer that was written since the last one. At the end, what uses the container is stopped, it is
//! unmounted, and the top follows.
//!
//! - `far`: requests to the `holdfast` of the other host; `arrival`: how that answers them
//! - `plan`: what a migration would do, and what prevents it
//! - `files`: the copy of a file; `rounds`: the copies while the container is used
//! - `mover`: the migration; `move_tools`: what it needs; `report`: its result

mod arrival;
mod far;
mod files;
mod move_tools;
mod mover;
mod plan;
mod report;
mod rounds;

pub use arrival::{ArrivalTools, serve_arrivals};
pub use far::{FarContainers, MountTarget, RECEIVE_CONTAINER_COMMAND};
pub use move_tools::{ContainerMove, ContainerMoveObserver, ContainerMoveTools};
pub use mover::migrate_container;
pub use plan::{ContainerPlan, ContainerPlanRequest, MountThere, plan_container};
pub use report::{ContainerMoveReport, ContainerPhase, ContainerRound};
