//! Measures the time that the threads of a backup spend in each stage, to find the bottleneck.
//!
//! The repository has no clock. It reports the beginning and end of each stage to a listener; without a listener
//! nothing is measured.

use std::time::Duration;

/// A stage of a backup thread's work or waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// A reader reads the source and hashes the data.
    ReadAndHash,
    /// The coordinator waits for readers.
    AwaitReaders,
    /// A sealer compresses and encrypts.
    Seal,
    /// A sealer waits for the store.
    AwaitStore,
    /// The coordinator waits for a sealer.
    AwaitSealers,
    /// The coordinator waits for packs to be durable.
    AwaitDurable,
}

impl Stage {
    /// All stages.
    pub const ALL: [Self; 6] = [
        Self::ReadAndHash,
        Self::AwaitReaders,
        Self::Seal,
        Self::AwaitStore,
        Self::AwaitSealers,
        Self::AwaitDurable,
    ];
}

/// Measures stages; called from all threads of a backup, for every frame.
pub trait StageTimer: Sync {
    /// The time of a monotonic clock.
    fn now(&self) -> Duration;

    /// Adds the time that a thread spent in `stage`.
    fn spent(&self, stage: Stage, time: Duration);
}

/// Measures nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoStageTimer;

impl StageTimer for NoStageTimer {
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn spent(&self, _stage: Stage, _time: Duration) {}
}

/// Runs `work`, and reports its duration to `timer`.
pub(crate) fn timed<T>(timer: &dyn StageTimer, stage: Stage, work: impl FnOnce() -> T) -> T {
    let start = timer.now();
    let result = work();
    timer.spent(stage, timer.now().saturating_sub(start));
    result
}
