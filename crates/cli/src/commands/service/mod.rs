//! Verbs of the scheduler, and those that monitor.

pub(super) mod config;
pub(super) mod daemon;
pub(super) mod jobs;
pub(super) mod monitor;
pub(super) mod notify;
pub(super) mod runs;
