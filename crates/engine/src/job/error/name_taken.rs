//! A name is in use for another machine.

use holdfast_repo::SnapshotId;

/// The snapshots of a name are of another machine. Mixed, they would be compared with one another, and retention would
/// remove those of one machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the snapshots listed as {name} (newest: {newest}) are of {present}, and {wanted}")]
pub struct NameTaken {
    /// The name.
    pub name: String,
    /// Its newest snapshot.
    pub newest: SnapshotId,
    /// What the existing snapshots are of.
    pub present: String,
    /// What was to be stored, as the end of a sentence.
    pub wanted: String,
}
