//! The request for a backup of a VirtualBox machine, and its report.

use std::num::NonZeroU64;
use std::time::Duration;

use super::machine::VirtualBoxMachine;
use crate::capture::CaptureOptions;

/// What to back up.
pub struct VirtualBoxBackup<'a> {
    /// The machine.
    pub machine: &'a VirtualBoxMachine<'a>,
    /// Options that all hypervisors share.
    pub capture: CaptureOptions<'a>,
    /// Whether the memory of a running machine is stored, too.
    pub memory: VirtualBoxMemory,
    /// The maximum rate of reading, in bytes per second.
    pub bytes_per_second: Option<NonZeroU64>,
}

/// What happens to the memory of a running machine, which is in VirtualBox's snapshot in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VirtualBoxMemory {
    /// It is stored.
    Store,
    /// It is not.
    Leave,
}

/// How the disks were read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VirtualBoxMethod {
    /// From its images: it was off.
    Images,
    /// From images that a VirtualBox snapshot kept unchanged, while the machine ran, or was paused as before.
    Snapshot {
        /// How long taking the snapshot took. VirtualBox does not report how long the machine was paused at its end.
        taken_in: Duration,
    },
}

impl VirtualBoxMethod {
    /// The keyword in machine-readable output.
    pub fn word(self) -> &'static str {
        match self {
            Self::Images => "images",
            Self::Snapshot { .. } => "virtualbox-snapshot",
        }
    }
}

/// How a VirtualBox machine was read.
#[derive(Debug)]
pub struct VirtualBoxReading {
    /// How its disks were read.
    pub way: VirtualBoxMethod,
    /// The reason for the method, as text.
    pub reason: String,
    /// Its disks, by name.
    pub disks: Vec<String>,
    /// "memory", "crash" or "shut off".
    pub consistency: &'static str,
    /// The size of its memory in bytes, if it was stored.
    pub memory_bytes: Option<u64>,
    /// Disks that were left out, and why.
    pub left_out: Vec<(String, String)>,
    /// How long reading waited for the rate limit.
    pub waited: Duration,
    /// Why the VirtualBox snapshot still exists, if it does.
    pub remains: Option<String>,
}
