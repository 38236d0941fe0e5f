//! The phases of a migration, and its result.

use std::path::PathBuf;
use std::time::Duration;

use holdfast_live_copy::LiveCopyReport;

use crate::plan::MigrationPlan;

/// A phase of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MigrationPhase {
    /// The disks are copied, until little is left.
    Disks,
    /// The memory is sent; the disks continue.
    Memory,
    /// The machine is stopped: the rest of the disks is sent and sealed.
    Seal,
    /// The hypervisor starts the machine there.
    Start,
    /// The machine runs there; the hypervisor here ends its process.
    End,
    /// The machine runs there; its hypervisor there pulls the disks.
    Pull,
    /// The hypervisor there defines a machine that is shut off.
    Define,
}

impl MigrationPhase {
    /// The word for it in JSON.
    pub fn word(self) -> &'static str {
        match self {
            Self::Disks => "disks",
            Self::Memory => "memory",
            Self::Seal => "seal",
            Self::Start => "start",
            Self::End => "end",
            Self::Pull => "pull",
            Self::Define => "define",
        }
    }
}

/// How long a phase took in the last attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PhaseDuration {
    /// The phase.
    pub phase: MigrationPhase,
    /// How long it took.
    pub duration: Duration,
}

/// A disk that has moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MovedDisk {
    /// Its target in the machine.
    pub target: String,
    /// Its file at the other host.
    pub path: PathBuf,
    /// The report of its copy.
    pub copy: LiveCopyReport,
}

/// A disk that was pulled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PulledDiskReport {
    /// Its target in the machine.
    pub target: String,
    /// Its image at the other host.
    pub path: PathBuf,
    /// Its size.
    pub size_bytes: u64,
    /// What the other host has read.
    pub read_bytes: u64,
}

/// The disks of a plan with the reports of their copies, in the same order.
pub(crate) fn moved_disks(plan: &MigrationPlan, copies: Vec<LiveCopyReport>) -> Vec<MovedDisk> {
    let moved = plan.disks.iter().zip(copies).map(|(disk, copy)| MovedDisk {
        target: disk.target.clone(),
        path: disk.path.clone(),
        copy,
    });
    moved.collect()
}

/// The result of a migration.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MigrationReport {
    /// The disks that were copied.
    pub disks: Vec<MovedDisk>,
    /// The disks that were pulled.
    pub pulled: Vec<PulledDiskReport>,
    /// Bytes of memory that were sent.
    pub memory_bytes: u64,
    /// The phases, in order.
    pub phases: Vec<PhaseDuration>,
    /// From the stop of the machine until its hypervisor has reported that it runs there.
    pub stopped: Duration,
    /// Number of attempts.
    pub attempt_count: u32,
    /// How long everything took.
    pub duration: Duration,
}

/// Measures phases.
pub(crate) struct PhaseClock {
    pub(crate) since: Duration,
    pub(crate) times: Vec<PhaseDuration>,
}

impl PhaseClock {
    pub(crate) fn begin(now: Duration) -> Self {
        Self {
            since: now,
            times: Vec::new(),
        }
    }

    /// The phase has ended. A repeated phase counts with the time of its last attempt, except for the disks.
    pub(crate) fn end(&mut self, phase: MigrationPhase, now: Duration) {
        let duration = now.saturating_sub(self.since);
        self.since = now;
        match self.times.iter_mut().find(|time| time.phase == phase) {
            Some(time) if phase == MigrationPhase::Disks => time.duration += duration,
            Some(time) => time.duration = duration,
            None => self.times.push(PhaseDuration { phase, duration }),
        }
    }
}
