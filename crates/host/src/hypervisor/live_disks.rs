//! Copies of the disks of running machines, and the switch of a machine to a copy.

use std::num::NonZeroU64;

use crate::hypervisor::domain_xml::DiskPlace;
use crate::hypervisor::error::Result;
use crate::hypervisor::traits::HypervisorMut;

/// A hypervisor that copies disks of running machines.
///
/// Machines are given by name or UUID, disks by target: "vda".
pub trait LiveDisks: HypervisorMut {
    /// Whether a machine is running, and the reason if it is not.
    fn execution_state(&self, machine: &str) -> Result<ExecutionState>;

    /// Resumes a paused machine, whatever the reason of the pause.
    fn unpause(&self, machine: &str) -> Result<()>;

    /// Starts to copy a disk to an existing image at `to` that is large enough, limited to `rate` bytes per second
    /// from the start. New writes are copied as well. The job belongs to the hypervisor, and continues when this
    /// process ends.
    fn begin_copy(&self, machine: &str, disk: &str, to: &DiskPlace, rate: NonZeroU64) -> Result<()>;

    /// Changes the rate of a running copy.
    fn set_copy_rate(&self, machine: &str, disk: &str, rate: NonZeroU64) -> Result<()>;

    /// The progress of a copy; none if no copy runs: it was not started, has failed, or is finished.
    ///
    /// # Errors
    /// Another client has a job on the disk: [`Error::Busy`](crate::Error::Busy).
    fn copy(&self, machine: &str, disk: &str, to: &DiskPlace) -> Result<Option<CopyState>>;

    /// Switches the machine to the copy of a disk, now and for later starts.
    ///
    /// # Errors
    /// Nothing was changed, for example because the copy is not complete.
    fn finish_copy(&self, machine: &str, disk: &str) -> Result<()>;

    /// Starts to pull what an image needs of its backing file into it; afterwards it has none. The job belongs to the hypervisor,
    /// and continues when this process ends. A pull that has failed can be started again.
    fn begin_pull(&self, machine: &str, disk: &str) -> Result<()>;

    /// The progress of a pull; none if none runs: it was not started, has failed, or is finished.
    ///
    /// # Errors
    /// Another client has a job on the disk: [`Error::Busy`](crate::Error::Busy).
    fn pull(&self, machine: &str, disk: &str) -> Result<Option<CopyState>>;

    /// The configuration of a machine that runs; otherwise, the configuration for later starts.
    fn current_configuration(&self, machine: &str) -> Result<String>;

    /// The user and group under which the machines run; none if they are those of the hypervisor.
    fn user_of_machines(&self) -> Result<Option<(u32, u32)>>;
}

/// Whether a machine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExecutionState {
    /// The processors are running.
    Running,
    /// The machine is paused because of an I/O error of a disk.
    StoppedByDisk,
    /// The machine is paused for another reason.
    Paused,
    /// The machine is shut off.
    ShutOff,
}

/// The progress of a copy of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyState {
    /// Bytes copied.
    pub done_bytes: u64,
    /// Bytes to copy in total. The number grows while the machine writes.
    pub total_bytes: u64,
    /// Whether the copy is equal to the disk.
    pub is_complete: bool,
}
