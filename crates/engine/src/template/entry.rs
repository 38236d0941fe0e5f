//! One template of a repository.

use std::path::Path;

use holdfast_repo::{Manifest, Repository};

use super::digest::digest_bytes;
use super::statement::{Piece, Statement};
use crate::job::Result;
use crate::job::error::TemplateError;
use crate::notes::NOTE_TEMPLATE_SIGNATURE;
use crate::restore::small_stream::bytes_of;

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

    /// The only disk, for a target that can hold one.
    ///
    /// # Errors
    /// There are several.
    pub(super) fn only_disk(&self, target: &Path) -> Result<&Piece> {
        let disks: Vec<&Piece> = self.statement.disks().collect();
        match disks[..] {
            [only] => Ok(only),
            _ => Err(TemplateError::SeveralDisks {
                label: self.statement.label.to_string(),
                disk_count: disks.len(),
                target: target.to_owned(),
            }
            .into()),
        }
    }

    /// A small file of the template, with checked content; none if the template does not have it.
    pub(super) fn file(&self, name: &str, repository: &Repository) -> Result<Option<Vec<u8>>> {
        let Some(piece) = self.statement.file(name) else {
            return Ok(None);
        };
        let record = self.manifest.disk(Some(name))?;
        let bytes = bytes_of(repository, record)?;
        if bytes.len() as u64 != piece.size_bytes || digest_bytes(&bytes) != piece.digest {
            let name = name.to_owned();
            return Err(TemplateError::OtherContent { name }.into());
        }
        Ok(Some(bytes))
    }

    pub(super) fn order(&self) -> (jiff::Timestamp, holdfast_repo::SnapshotId) {
        (self.statement.time, self.manifest.id)
    }
}
