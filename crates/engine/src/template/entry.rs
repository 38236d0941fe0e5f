//! One template of a repository.

use holdfast_repo::Manifest;

use super::statement::Statement;
use crate::notes::NOTE_TEMPLATE_SIGNATURE;

/// A template.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) manifest: Manifest,
    pub(super) statement: Statement,
    pub(super) signature: Option<String>,
}

impl Entry {
    pub(super) fn new(manifest: Manifest, statement: Statement) -> Self {
        Self {
            signature: manifest.notes.get(NOTE_TEMPLATE_SIGNATURE).cloned(),
            manifest,
            statement,
        }
    }

    pub(super) fn order(&self) -> (jiff::Timestamp, holdfast_repo::SnapshotId) {
        (self.statement.time, self.manifest.id)
    }
}
