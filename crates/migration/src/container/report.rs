//! The result of the migration of a container.

use std::path::PathBuf;
use std::time::Duration;

/// A phase of the migration of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContainerPhase {
    /// The layers are copied, while the container is used.
    Layers,
    /// What uses it is stopped, and it is unmounted.
    Stop,
    /// The top is copied.
    LastPass,
    /// The folder there gets its name.
    Complete,
    /// It is mounted there.
    Mount,
    /// What uses it is started there.
    Start,
}

impl ContainerPhase {
    /// The word for it in JSON.
    pub fn word(self) -> &'static str {
        match self {
            Self::Layers => "layers",
            Self::Stop => "stop",
            Self::LastPass => "last-pass",
            Self::Complete => "complete",
            Self::Mount => "mount",
            Self::Start => "start",
        }
    }
}

/// A round: the layers that were written since the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContainerRound {
    /// Bytes of their files.
    pub bytes: u64,
    /// Bytes that were sent.
    pub sent_bytes: u64,
    /// How long writes waited for the snapshot; zero if the container was not mounted.
    pub paused: Duration,
    /// How long the round took.
    pub duration: Duration,
}

/// The result of the migration of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerMoveReport {
    /// The rounds, the last pass too.
    pub rounds: Vec<ContainerRound>,
    /// The phases, in order.
    pub phases: Vec<(ContainerPhase, Duration)>,
    /// From the stop of what uses the container until it was started there; none if it was not mounted.
    pub stopped: Option<Duration>,
    /// Where it is mounted there.
    pub mount_point: Option<PathBuf>,
    /// The new name of a former container there, if it was kept.
    pub former: Option<PathBuf>,
    /// How long everything took.
    pub duration: Duration,
}

impl ContainerMoveReport {
    /// Bytes that were sent in all.
    pub fn sent_bytes(&self) -> u64 {
        self.rounds.iter().map(|round| round.sent_bytes).sum()
    }
}
