//! A diagnosis on its way.

use super::Finding;
use super::seen::Seen;

/// What is known of a run's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// It is at work, or its watchdog is.
    Alive,
    /// It is dead, and so is its watchdog.
    Dead,
    /// It is not known.
    Unknown,
}

pub(super) struct Diagnosis<'a> {
    pub(super) seen: &'a Seen,
    pub(super) findings: Vec<Finding>,
    pub(super) notes: Vec<String>,
}
