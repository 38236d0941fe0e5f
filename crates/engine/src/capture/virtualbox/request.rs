//! What is asked of a backup of a machine of VirtualBox, and what it answers.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use holdfast_host::DiskChoice;
use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::machine::VirtualBoxMachine;
use crate::capture::images::{BackupReport, ParentChoice};
use crate::job::MachineName;
use crate::machine::hooks::Hooks;
use crate::machine::run_journal::JournalPlace;
use crate::repository::name_conflict::Continuation;

/// What to back up.
pub struct VirtualBoxBackup<'a> {
    /// The machine.
    pub machine: &'a VirtualBoxMachine<'a>,
    /// What its snapshots are listed under.
    pub name: MachineName,
    /// Which of its disks.
    pub choice: DiskChoice,
    /// Files and folders that its settings may name although they lie elsewhere.
    pub allowed: Vec<PathBuf>,
    /// Whether the memory of a machine that runs is stored, too.
    pub memory: VirtualBoxMemory,
    /// What to compare with.
    pub parent: ParentChoice,
    /// Whether the snapshots that the name has may be of another machine.
    pub continuation: Continuation,
    /// Words to find the snapshot by.
    pub tags: Vec<String>,
    /// Tells the time of day; asked at the instant.
    pub now: &'a (dyn Fn() -> Timestamp + Sync),
    /// The host that backs up.
    pub host: String,
    /// The program that backs up.
    pub program: String,
    /// In which times of a parent's name are meant.
    pub zone: TimeZone,
    /// Where other backups of the machine are kept away; none where they are not.
    pub journal: Option<JournalPlace>,
    /// How long another backup of the machine is waited for, before this one gives up.
    pub patience: Duration,
    /// Programs to call on the way.
    pub hooks: Hooks,
    /// Bytes read each second, at most.
    pub bytes_per_second: Option<NonZeroU64>,
    /// A random number, which names what is made at VirtualBox.
    pub run: u32,
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
pub enum VirtualBoxWay {
    /// From its images: it was off.
    Images,
    /// From what a snapshot of VirtualBox's kept, while it ran on or stood still as before.
    Snapshot {
        /// How long it took to take the snapshot. VirtualBox does not tell how long the machine stood still at the end of that.
        taken_in: Duration,
    },
}

impl VirtualBoxWay {
    /// A word for scripts.
    pub fn word(self) -> &'static str {
        match self {
            Self::Images => "images",
            Self::Snapshot { .. } => "virtualbox-snapshot",
        }
    }
}

/// A machine of VirtualBox that was backed up.
#[derive(Debug)]
pub struct VirtualBoxReport {
    /// The snapshot.
    pub backup: BackupReport,
    /// How its disks were read.
    pub way: VirtualBoxWay,
    /// Why so, in words.
    pub reason: String,
    /// Its disks, by name.
    pub disks: Vec<String>,
    /// Bytes of its memory, where that was stored.
    pub memory_bytes: Option<u64>,
    /// Disks that were left out, and why.
    pub left_out: Vec<(String, String)>,
    /// How long reading waited, to be no faster than it may.
    pub waited: Duration,
    /// Why VirtualBox still has the snapshot that was taken for it, where it does.
    pub remains: Option<String>,
}
