//! The names of sections.

/// Groups of named sections.
pub(crate) const NAMED: [&str; 5] = ["repositories", "pools", "retention", "jobs", "notify"];

/// Groups with a single section.
pub(crate) const SINGLE: [&str; 2] = ["daemon", "defaults"];

/// The lines before the first section.
pub(crate) const ROOT: &str = "";
