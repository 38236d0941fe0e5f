//! What is asked of a backup of a machine of VirtualBox, and what it answers.

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
    /// Whether the memory of a machine that runs is stored, too.
    pub memory: VirtualBoxMemory,
    /// Bytes read each second, at most.
    pub bytes_per_second: Option<NonZeroU64>,
}

/// What is done about the memory of a machine that runs, which is in VirtualBox's snapshot in any case.
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
    /// From what a snapshot of VirtualBox's kept, while it ran on, or was paused as before.
    Snapshot {
        /// How long it took to take the snapshot. VirtualBox does not report how long the machine was paused at the end of that.
        taken_in: Duration,
    },
}

impl VirtualBoxMethod {
    /// A word for scripts.
    pub fn word(self) -> &'static str {
        match self {
            Self::Images => "images",
            Self::Snapshot { .. } => "virtualbox-snapshot",
        }
    }
}

/// How a machine of VirtualBox was read.
#[derive(Debug)]
pub struct VirtualBoxReading {
    /// How its disks were read.
    pub way: VirtualBoxMethod,
    /// Why so, in words.
    pub reason: String,
    /// Its disks, by name.
    pub disks: Vec<String>,
    /// "memory", "crash" or "shut off".
    pub consistency: &'static str,
    /// Bytes of its memory, where that was stored.
    pub memory_bytes: Option<u64>,
    /// Disks that were left out, and why.
    pub left_out: Vec<(String, String)>,
    /// How long reading waited for the limit of its rate.
    pub waited: Duration,
    /// Why VirtualBox still has the snapshot that was taken for it, where it does.
    pub remains: Option<String>,
}
