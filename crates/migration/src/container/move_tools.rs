//! What the migration of a container needs, and the observer of its steps.

use std::sync::Arc;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_engine::ContainerPlace;
use holdfast_live_copy::{CommandFreezer, Connector, CopyCompression, CopyWarning, SendRate};
use holdfast_repo::key::Randomness;
use holdfast_repo::{ProcessIdentity, Processes};

use super::far::FarContainers;
use super::plan::ContainerPlan;
use super::report::{ContainerPhase, ContainerRound};
use crate::error::Result;
use crate::migration_tools::FormerDisks;

/// A container to migrate.
pub struct ContainerMove<'a> {
    /// The container.
    pub place: &'a ContainerPlace,
    /// What is done.
    pub plan: &'a ContainerPlan,
    /// What starts the programs that use it, at the other host.
    pub start_command: Option<&'a str>,
    /// How long the programs may be stopped for the last pass.
    pub frozen_max: Duration,
    /// What happens to a former container there.
    pub former: FormerDisks,
    /// The current time, in seconds since 1970.
    pub now_s: u64,
    /// This process.
    pub process: &'a ProcessIdentity,
}

/// What the migration of a container needs.
pub struct ContainerMoveTools<'a> {
    /// The other host.
    pub far: &'a FarContainers,
    /// Starts the program of the other host again.
    pub reach_far_again: &'a (dyn Fn() -> Result<FarContainers> + Sync),
    /// Starts receivers there.
    pub connector: Arc<dyn Connector>,
    /// Stops what uses the container here, and unmounts it; and undoes that, also if this process is killed. None if it is not
    /// mounted.
    pub stopper: Option<&'a CommandFreezer>,
    /// For how long a lost connection is tried again.
    pub retry_time: Duration,
    /// Whether data is compressed.
    pub compression: CopyCompression,
    /// How fast it is sent while the container is used.
    pub rate: Arc<SendRate>,
    /// The clock of all threads.
    pub clock: Arc<dyn Clock>,
    /// Randomness for the numbers of connections.
    pub randomness: &'a dyn Randomness,
    /// Name and version of the program.
    pub program: String,
    /// Finds out which processes live.
    pub processes: &'a dyn Processes,
    /// Sees what happens.
    pub observer: &'a dyn ContainerMoveObserver,
}

/// Sees what happens.
pub trait ContainerMoveObserver: Sync {
    /// A phase begins.
    fn phase(&self, phase: ContainerPhase);
    /// A round has ended.
    fn round(&self, round: &ContainerRound);
    /// The copy of a file has a warning.
    fn copy_warning(&self, file: &str, warning: CopyWarning);
    /// Something is left to do.
    fn left(&self, reason: &str);
}
