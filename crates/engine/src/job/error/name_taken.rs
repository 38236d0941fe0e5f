//! A name is in use for another machine.

use holdfast_repo::SnapshotId;

/// The snapshots of a name are of another machine: they would be compared with one another, and retention would keep those of one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the snapshots listed as {name} (newest: {newest}) are of {theirs}, and {ours}")]
pub struct NameTaken {
    /// The name.
    pub name: String,
    /// Its newest snapshot.
    pub newest: SnapshotId,
    /// What the snapshots are of.
    pub theirs: String,
    /// What was to be stored, as the end of a sentence.
    pub ours: String,
}
