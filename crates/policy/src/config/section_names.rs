//! The names of sections.

/// Groups whose sections have names of their own.
pub(crate) const NAMED: [&str; 5] = ["repositories", "pools", "retention", "jobs", "notify"];

/// Groups that are one section.
pub(crate) const SINGLE: [&str; 2] = ["daemon", "defaults"];

/// What stands before the first section.
pub(crate) const ROOT: &str = "";
