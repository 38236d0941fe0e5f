//! The parameters that every job gets, and how jobs of the repository report through them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use holdfast_block::Clock;
use holdfast_repo::{BackupProgress, JobProgress, NoStageTimer, StageTimer};

use super::bottleneck::Stages;
use super::error::Result;
use crate::{Interrupt, Interrupted, Progress, Unit};

/// The environment of a job: progress, interruption, the clock, and how many threads it may use.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    /// Receives progress and warnings of the job.
    pub progress: &'a dyn Progress,
    /// A request to stop the job.
    pub interrupt: &'a Interrupt,
    /// Measures durations.
    pub clock: &'a dyn Clock,
    /// Threads for each kind of work; at least 1.
    pub thread_count: usize,
}

impl<'a> Job<'a> {
    /// The job as the repository crate expects it.
    pub(crate) fn watch(&self, counting: Counting) -> Watch<'a> {
        Watch {
            progress: self.progress,
            cancelled: self.interrupt.flag(),
            counting,
            stages: None,
        }
    }

    /// Like [`watch`](Self::watch), and also measures the stages of a backup.
    pub(crate) fn watch_stages(&self, counting: Counting, stages: &'a Stages<'a>) -> Watch<'a> {
        Watch {
            stages: Some(stages),
            ..self.watch(counting)
        }
    }

    /// Calls `work` on all threads. Each thread takes items by `next`, which returns none when no items are left, and
    /// an error when the job has to stop. Returns the first error.
    pub(crate) fn share<'i, T: Sync>(
        &self,
        items: &'i [T],
        work: impl Fn(&dyn Fn() -> Result<Option<&'i T>>) -> Result<()> + Sync,
    ) -> Result<()> {
        let taken = AtomicUsize::new(0);
        let interrupt = self.interrupt;
        let next = || match items.get(taken.fetch_add(1, Ordering::Relaxed)) {
            Some(_) if interrupt.is_requested() => Err(Interrupted.into()),
            item => Ok(item),
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (1..self.thread_count.min(items.len()))
                .map(|_| scope.spawn(|| work(&next)))
                .collect();
            let mine = work(&next);
            workers.into_iter().fold(mine, |result, worker| {
                result.and(worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            })
        })
    }
}

/// Who counts the progress of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counting {
    /// The repository: its count of bytes done is the progress.
    Bytes,
    /// The job itself.
    Elsewhere,
}

pub(crate) struct Watch<'a> {
    progress: &'a dyn Progress,
    cancelled: Arc<AtomicBool>,
    counting: Counting,
    stages: Option<&'a Stages<'a>>,
}

impl Watch<'_> {
    fn count(&self, bytes: u64) {
        if self.counting == Counting::Bytes {
            self.progress.advance(bytes);
        }
    }
}

impl BackupProgress for Watch<'_> {
    fn advance(&self, bytes: u64) {
        self.count(bytes);
    }

    fn note(&self, message: String) {
        self.progress.note(&message);
    }

    fn warn(&self, message: String) {
        self.progress.warning(&message);
    }

    fn cancelled(&self) -> &AtomicBool {
        &self.cancelled
    }

    fn timer(&self) -> &dyn StageTimer {
        match self.stages {
            Some(stages) => stages,
            None => &NoStageTimer,
        }
    }
}

impl JobProgress for Watch<'_> {
    fn advance(&self, bytes: u64) {
        self.count(bytes);
    }

    fn total(&self, total: u64) {
        if self.counting == Counting::Bytes {
            self.progress.total(total);
        }
    }

    fn items(&self, name: &'static str, total: u64) {
        self.progress.phase(name, Unit::Items);
        self.progress.total(total);
    }

    fn cancelled(&self) -> &AtomicBool {
        &self.cancelled
    }
}
