//! Progress and cancellation of a job.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// Receives the progress of a job on a disk, and may cancel it.
pub trait JobProgress: Sync {
    /// Reports that this many more bytes are done.
    fn advance(&self, bytes: u64);

    /// Set to stop the job.
    fn cancelled(&self) -> &AtomicBool;

    /// Sets the total amount of work.
    fn total(&self, _total: u64) {}

    /// Begins a phase that counts items instead of bytes: its name and the number of items.
    fn items(&self, _name: &'static str, _total: u64) {}
}

impl JobProgress for NoProgress {
    fn advance(&self, _bytes: u64) {}

    fn cancelled(&self) -> &AtomicBool {
        &self.0
    }
}

/// Fails if the job was cancelled; called between steps.
pub(crate) fn check_cancelled(progress: &dyn JobProgress) -> Result<()> {
    if progress.cancelled().load(Ordering::Relaxed) {
        Err(Error::Cancelled)
    } else {
        Ok(())
    }
}

/// No progress display and no cancellation.
#[derive(Debug, Default)]
pub struct NoProgress(AtomicBool);
