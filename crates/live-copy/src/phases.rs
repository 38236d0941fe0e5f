//! The time that each phase of a copy took.

use std::time::Duration;

use holdfast_engine::{Progress, Unit};
use holdfast_transfer::SenderState;

/// A phase of a copy, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyPhase {
    /// Until the receiver has accepted the disk; also after each interruption.
    Connecting,
    /// What the receiver holds is compared.
    Comparing,
    /// The first pass.
    FullPass,
    /// What was written is sent again.
    Rounds,
    /// The receiver makes the data durable before the freeze.
    PreSync,
    /// From the request to freeze until the source is frozen.
    Freeze,
    /// The last data is sent.
    LastPass,
    /// The receiver compares, and makes everything durable.
    Seal,
    /// The receiver finishes the copy.
    Commit,
}

impl CopyPhase {
    /// The word for it in JSON.
    pub fn word(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Comparing => "comparing",
            Self::FullPass => "full-pass",
            Self::Rounds => "rounds",
            Self::PreSync => "pre-sync",
            Self::Freeze => "freeze",
            Self::LastPass => "last-pass",
            Self::Seal => "seal",
            Self::Commit => "commit",
        }
    }

    fn of(state: SenderState) -> Option<Self> {
        Some(match state {
            SenderState::New | SenderState::Preflight | SenderState::Resumable | SenderState::InDoubt => {
                Self::Connecting
            }
            SenderState::Comparing => Self::Comparing,
            SenderState::Full => Self::FullPass,
            SenderState::Rounds | SenderState::Throttled => Self::Rounds,
            SenderState::Presync | SenderState::Armed => Self::PreSync,
            SenderState::Frozen => Self::Freeze,
            SenderState::Last => Self::LastPass,
            SenderState::Seal => Self::Seal,
            SenderState::Commit => Self::Commit,
            SenderState::Done | SenderState::Failed => return None,
        })
    }
}

/// How long a phase took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PhaseTime {
    /// The phase.
    pub phase: CopyPhase,
    /// All its parts together.
    pub duration: Duration,
}

/// Measures phases.
pub(crate) struct PhaseTimes {
    current: Option<CopyPhase>,
    since: Duration,
    times: Vec<PhaseTime>,
}

impl PhaseTimes {
    pub(crate) fn new(now: Duration) -> Self {
        Self {
            current: Some(CopyPhase::Connecting),
            since: now,
            times: Vec::new(),
        }
    }

    /// A state was entered, or continues. The first pass is as long as the disk.
    pub(crate) fn enter(&mut self, state: SenderState, now: Duration, progress: &dyn Progress, size_bytes: u64) {
        let phase = CopyPhase::of(state);
        if phase == self.current {
            return;
        }
        self.add(now);
        self.current = phase;
        match phase {
            Some(CopyPhase::FullPass) => {
                progress.phase("copying", Unit::Bytes);
                progress.total(size_bytes);
            }
            Some(CopyPhase::Comparing) => progress.phase("comparing", Unit::Bytes),
            Some(CopyPhase::Rounds) => progress.phase("copying what was written meanwhile", Unit::Bytes),
            _ => {}
        }
    }

    fn add(&mut self, now: Duration) {
        let duration = now.saturating_sub(self.since);
        self.since = now;
        let Some(phase) = self.current else { return };
        match self.times.iter_mut().find(|time| time.phase == phase) {
            Some(time) => time.duration += duration,
            None => self.times.push(PhaseTime { phase, duration }),
        }
    }

    /// All phases, in the order in which they began.
    pub(crate) fn end(&mut self, now: Duration) -> Vec<PhaseTime> {
        self.add(now);
        self.current = None;
        std::mem::take(&mut self.times)
    }
}
