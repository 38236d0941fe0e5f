//! Observations of containers.

use std::path::PathBuf;

/// A container with the snapshots that backups and clones have taken.
#[derive(Debug, Clone)]
pub(in crate::doctor) struct SeenContainer {
    pub(in crate::doctor) folder: PathBuf,
    pub(in crate::doctor) layers: Vec<SeenLayer>,
    /// Whether a backup of it is running.
    pub(in crate::doctor) is_backed_up: bool,
    pub(in crate::doctor) left_by_clones: Vec<UnneededSnapshot>,
}

/// A snapshot of a container that is deleted.
#[derive(Debug, Clone)]
pub(in crate::doctor) struct UnneededSnapshot {
    /// The UUID of its layer.
    pub(in crate::doctor) id: String,
    /// When it was taken, in seconds since 1970.
    pub(in crate::doctor) created_s: Option<u64>,
}

/// A snapshot of a container that a backup has taken.
#[derive(Debug, Clone)]
pub(in crate::doctor) struct SeenLayer {
    /// The UUID of its layer.
    pub(in crate::doctor) id: String,
    pub(in crate::doctor) repository: String,
    pub(in crate::doctor) machine: String,
    /// When it was taken, in seconds since 1970.
    pub(in crate::doctor) created_s: Option<u64>,
}
