//! Disks of a machine that are copied elsewhere while it runs, and then used from there.

use std::num::NonZeroU64;

use crate::hypervisor::domain_xml::DiskPlace;
use crate::hypervisor::error::Result;
use crate::hypervisor::traits::HypervisorMut;

/// A hypervisor that copies disks of machines that run.
///
/// Machines are named by their name or UUID, disks by what they are to the machine: "vda".
pub trait LiveDisks: HypervisorMut {
    /// Whether a machine runs, and if not, why.
    fn life(&self, machine: &str) -> Result<ExecutionState>;

    /// Resumes a paused machine, whether it was paused by an error of a disk or for another reason.
    fn run_on(&self, machine: &str) -> Result<()>;

    /// Begins to copy a disk to what is there already at `to`, and large enough, with at most `rate` bytes each second from the first
    /// one on. What is written meanwhile is copied as well. The job belongs to the hypervisor: it goes on without us.
    fn begin_copy(&self, machine: &str, disk: &str, to: &DiskPlace, rate: NonZeroU64) -> Result<()>;

    /// Changes the rate of a copy that is under way.
    fn set_copy_rate(&self, machine: &str, disk: &str, rate: NonZeroU64) -> Result<()>;

    /// How far the copy of a disk is; none where none is under way: it was not begun, has failed, or is finished.
    ///
    /// # Errors
    /// Another client copies it, or works on it in another way: [`Error::Busy`](crate::Error::Busy).
    fn copy(&self, machine: &str, disk: &str, to: &DiskPlace) -> Result<Option<CopyState>>;

    /// Has the machine use the copy of a disk instead of the disk, now and when it starts again.
    ///
    /// # Errors
    /// Nothing has changed then, as where the copy is not complete.
    fn finish_copy(&self, machine: &str, disk: &str) -> Result<()>;

    /// The user and the group as whom its machines run, where it is not its own.
    fn user_of_machines(&self) -> Result<Option<(u32, u32)>>;
}

/// Whether a machine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExecutionState {
    /// Its processors run.
    Running,
    /// It is paused because a disk could not be read or written.
    StoppedByDisk,
    /// It is paused for another reason.
    Paused,
    /// It is switched off.
    ShutOff,
}

/// How far the copy of a disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyState {
    /// Bytes done.
    pub done_bytes: u64,
    /// Bytes to do, which may become more while the machine writes.
    pub total_bytes: u64,
    /// Whether the copy is what the disk is.
    pub is_complete: bool,
}
