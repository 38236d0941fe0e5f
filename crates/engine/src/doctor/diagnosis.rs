//! State of a diagnosis in progress.

use super::Finding;
use super::seen::Seen;

/// State of a run's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// The process or its watchdog is alive.
    Alive,
    /// The process and its watchdog are dead.
    Dead,
    /// Unknown.
    Unknown,
}

pub(super) struct Diagnosis<'a> {
    pub(super) seen: &'a Seen,
    pub(super) findings: Vec<Finding>,
    pub(super) notes: Vec<String>,
}
