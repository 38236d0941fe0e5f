//! What a migration needs, and the observer of its steps.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_engine::TrackedMachine;
use holdfast_host::Machine;
use holdfast_live_copy::{Connector, CopyCompression, SendRate, ThrottlePolicy};
use holdfast_repo::key::Randomness;

use crate::disks::CopyEvents;
use crate::error::Result;
use crate::far::{FarHost, MovingHypervisor};
use crate::report::MigrationPhase;
use crate::service_link::ServiceLink;

/// What a migration needs.
pub struct MigrationTools<'a> {
    /// The hypervisor here.
    pub control: &'a dyn MovingHypervisor,
    /// The other host.
    pub far: &'a FarHost,
    /// Starts the program of the other host again, if it or its hypervisor has ended.
    pub reach_far_again: &'a (dyn Fn() -> Result<FarHost> + Sync),
    /// Starts receivers there.
    pub connector: Arc<dyn Connector>,
    /// For disks that are pulled.
    pub pull: PullTools,
    /// What happens to the disks that the machine had there before.
    pub former_disks: FormerDisks,
    /// For how long a lost connection is tried again.
    pub retry_time: Duration,
    /// Whether the data of disks may be compressed.
    pub compression: CopyCompression,
    /// How fast the disks and the memory are sent, together.
    pub rate: Arc<SendRate>,
    /// The clock of all threads.
    pub clock: Arc<dyn Clock>,
    /// Randomness for the numbers of connections.
    pub randomness: &'a dyn Randomness,
    /// Name and version of the program.
    pub program: String,
    /// Sees what happens.
    pub observer: &'a dyn MigrationObserver,
}

/// What is needed to serve disks to the other host.
pub struct PullTools {
    /// Reaches it.
    pub link: Arc<dyn ServiceLink>,
    /// The folder for the records of machines whose disks are served.
    pub records: PathBuf,
    /// The address of the other host, as the user has written it.
    pub destination: String,
}

/// What the migration of a machine that runs needs.
pub struct RunningTools<'a> {
    /// What every migration needs.
    pub common: MigrationTools<'a>,
    /// The hypervisor, with a connection that waits until the machine has moved: two calls on one connection wait for each
    /// other.
    pub hypervisor: &'a dyn MovingHypervisor,
    /// The machine, with a third connection.
    pub watched: &'a dyn Machine,
    /// The machine whose writes are recorded, with a fourth connection.
    pub tracked: &'a TrackedMachine<'a>,
    /// Forwards connections to the first socket, here, to the second one, there.
    pub forward: &'a (dyn Fn(&Path, &Path) -> Result<()> + Sync),
    /// A private folder for sockets.
    pub folder: PathBuf,
    /// The socket here to which the hypervisor sends the memory.
    pub relay_socket: PathBuf,
    /// The socket for the memory at the other host. Hypervisors that reach each other need the same path on both hosts.
    pub memory_socket: PathBuf,
    /// The machine is resumed here if it is stopped for longer.
    pub frozen_max: Duration,
    /// Number of attempts to stop the machine for at most this time.
    pub attempt_count_max: u32,
    /// Whether the guest may be slowed.
    pub throttle: ThrottlePolicy,
}

impl RunningTools<'_> {
    /// The part of the stopped time that the rest of the memory may take.
    pub(crate) fn downtime_max(&self) -> Duration {
        self.frozen_max / 2
    }
}

/// What happens to the disks that the machine had at the other host before, when it runs there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FormerDisks {
    /// They are kept.
    Keep,
    /// They are deleted.
    Delete,
}

/// Sees what happens.
pub trait MigrationObserver: CopyEvents {
    /// A phase begins. [`MigrationPhase::Seal`] is not reported: an output that blocks would extend it.
    fn phase(&self, phase: MigrationPhase);
    /// An attempt would have stopped the machine for too long; it runs here, and the migration continues.
    fn stopped_too_long(&self, stopped: Duration);
    /// The guest changes its memory faster than it is sent; its hypervisor slows its processors by this percentage.
    fn guest_slowed(&self, percent: u64);
    /// Something is left to do.
    fn left(&self, reason: &str);
}
