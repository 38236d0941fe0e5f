//! How a user stops a job: a flag that long jobs check between two steps.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A request to stop, shared between the requester (a signal handler, a server) and the threads of the job.
///
/// Once set it stays set. Clones share one flag.
#[derive(Debug, Clone, Default)]
pub struct Interrupt {
    requested: Arc<AtomicBool>,
}

/// The job stopped on request; everything committed before stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

impl Interrupt {
    /// A flag that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks the job to stop at its next step.
    pub fn request(&self) {
        self.requested.store(true, Ordering::Relaxed);
    }

    /// Whether the job has been asked to stop.
    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::Relaxed)
    }

    /// Ends the job with [`Interrupted`] if it has been asked to stop; to be called between steps with `?`.
    pub fn check(&self) -> Result<(), Interrupted> {
        if self.is_requested() { Err(Interrupted) } else { Ok(()) }
    }

    /// Whether the job has been asked to stop, as a function for callers that do not know [`Interrupt`].
    pub fn question(&self) -> Arc<dyn Fn() -> bool + Send + Sync> {
        let interrupt = self.clone();
        Arc::new(move || interrupt.is_requested())
    }

    /// The flag itself, for a signal handler that can only store `true`.
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.requested)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::{Interrupt, Interrupted};

    #[test]
    fn a_request_reaches_every_clone_and_stays() {
        let asker = Interrupt::new();
        let worker = asker.clone();
        assert_eq!(worker.check(), Ok(()));
        asker.request();
        assert_eq!(worker.check(), Err(Interrupted));
        assert_eq!(worker.check(), Err(Interrupted));
    }

    #[test]
    fn the_raw_flag_is_the_same_request() {
        let interrupt = Interrupt::new();
        interrupt.flag().store(true, Ordering::Relaxed);
        assert!(interrupt.is_requested());
    }
}
