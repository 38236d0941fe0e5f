//! Lists the templates of a repository, and finds the one that a user named.

use std::cmp::Reverse;

use holdfast_repo::{
    DiskContent, Environment, Error as RepositoryError, Liveness, Manifest, ProcessIdentity, Repository,
};

use super::entry::Entry;
use super::label::{TemplateLabel, TemplateReference, TemplateVersion};
use super::statement::{PieceKind, Statement};
use super::trust::Trust;
use crate::job::error::TemplateError;
use crate::job::{Progress, Result};
use crate::notes::{NOTE_TEMPLATE, NOTE_TEMPLATE_DRAFT, TEMPLATE_MACHINE_PREFIX, is_template, is_template_draft};

/// A push whose process cannot be seen from this host counts as dead after this time: a week, as for any other writer.
const UNSEEN_AGE_MS: i64 = 7 * 24 * 3600 * 1000;
/// Most names that are suggested.
const SUGGESTED_COUNT_MAX: usize = 5;

/// The templates of a repository.
pub(super) struct TemplateIndex {
    /// Ordered by time, oldest first.
    pub(super) entries: Vec<Entry>,
    /// Invalid templates, with the error.
    pub(super) unreadable: Vec<(Manifest, TemplateError)>,
    /// Drafts of running or killed pushes.
    drafts: Vec<Manifest>,
    /// Errors of snapshots that could not be read: they may be templates.
    pub(super) damaged: Vec<RepositoryError>,
}

/// Parses the statement of a template.
fn statement_of(manifest: &Manifest) -> std::result::Result<Statement, TemplateError> {
    let text = manifest
        .notes
        .get(NOTE_TEMPLATE)
        .map(String::as_str)
        .unwrap_or_default();
    let statement = Statement::decode(text)?;
    match contradiction(manifest, &statement) {
        None => Ok(statement),
        Some(reason) => Err(TemplateError::Contradiction {
            id: manifest.id,
            reason,
        }),
    }
}

/// How the statement contradicts the snapshot, if it does; digests are checked when the data is read.
fn contradiction(manifest: &Manifest, statement: &Statement) -> Option<String> {
    if manifest.disks.len() != statement.pieces.len() {
        return Some("it has another number of disks and files".to_owned());
    }
    for (record, piece) in manifest.disks.iter().zip(&statement.pieces) {
        let content = match piece.kind {
            PieceKind::Disk => DiskContent::Blocks,
            PieceKind::File => DiskContent::Stream,
        };
        if record.name != piece.name.as_str() || record.size_bytes != piece.size_bytes || record.content != content {
            return Some(format!("{} is another disk or file", piece.name));
        }
    }
    None
}

impl TemplateIndex {
    pub(super) fn read(repository: &Repository) -> Result<Self> {
        let (manifests, damaged) = repository.snapshots()?;
        let mut shelf = Self {
            entries: Vec::new(),
            unreadable: Vec::new(),
            drafts: Vec::new(),
            damaged,
        };
        for manifest in manifests.into_iter().filter(is_template) {
            if is_template_draft(&manifest) {
                shelf.drafts.push(manifest);
                continue;
            }
            match statement_of(&manifest) {
                Ok(statement) => shelf.entries.push(Entry::new(manifest, statement)),
                Err(error) => shelf.unreadable.push((manifest, error)),
            }
        }
        shelf.entries.sort_by_key(Entry::order);
        Ok(shelf)
    }

    /// Warns about unreadable templates, in a search for one template.
    pub(super) fn warn_of_unreadable(&self, progress: &dyn Progress) {
        for error in &self.damaged {
            progress.warning(&error.to_string());
        }
        for (manifest, error) in &self.unreadable {
            progress.warning(&format!("template in snapshot {}: {error}", manifest.id.short()));
        }
    }

    /// All templates that were pushed with this name and tag, oldest first; the tag refers to the last.
    pub(super) fn history(&self, label: &TemplateLabel) -> Vec<&Entry> {
        let mut entries: Vec<&Entry> = self
            .entries
            .iter()
            .filter(|entry| entry.statement.label == *label)
            .collect();
        entries.sort_by_key(|entry| entry.order());
        entries
    }

    pub(super) fn current(&self, label: &TemplateLabel) -> Option<&Entry> {
        self.history(label).last().copied()
    }

    pub(super) fn is_current(&self, entry: &Entry) -> bool {
        let current = self.current(&entry.statement.label);
        current.is_some_and(|current| current.manifest.id == entry.manifest.id)
    }

    /// Finds the template that a user named. If several signers have signed the same content, one of a trusted signer
    /// is preferred: another signature of the same content must not hide it.
    pub(super) fn find(&self, reference: &TemplateReference, trust: Option<&Trust<'_>>) -> Result<&Entry> {
        let unknown = || TemplateError::Unknown {
            wanted: reference.to_string(),
            similar: self.similar(reference),
        };
        let found = match &reference.version {
            TemplateVersion::Tag(tag) => self.current(&TemplateLabel {
                name: reference.name.clone(),
                tag: tag.clone(),
            }),
            TemplateVersion::Digest(start) => {
                let of_name = self
                    .entries
                    .iter()
                    .filter(|entry| entry.statement.label.name == reference.name);
                let matching = of_name.filter(|entry| entry.statement.content().to_string().starts_with(start));
                let matching: Vec<&Entry> = matching.collect();
                let mut contents: Vec<String> = matching
                    .iter()
                    .map(|entry| entry.statement.content().to_string())
                    .collect();
                contents.sort();
                contents.dedup();
                if contents.len() > 1 {
                    let wanted = reference.to_string();
                    return Err(TemplateError::Ambiguous { wanted, contents }.into());
                }
                let counts = |entry: &&&Entry| trust.is_some_and(|trust| trust.demand(entry).is_ok());
                matching.iter().rfind(counts).or(matching.last()).copied()
            }
        };
        Ok(found.ok_or_else(unknown)?)
    }

    /// The tags of the name, or else similar names.
    fn similar(&self, reference: &TemplateReference) -> Vec<String> {
        let labels = |is_wanted: &dyn Fn(&TemplateLabel) -> bool| {
            let mut newest: Vec<&Entry> = self
                .entries
                .iter()
                .filter(|entry| is_wanted(&entry.statement.label))
                .collect();
            newest.sort_by_key(|entry| Reverse(entry.order()));
            let mut labels: Vec<String> = Vec::new();
            for entry in newest {
                let label = entry.statement.label.to_string();
                if !labels.contains(&label) {
                    labels.push(label);
                }
            }
            labels.truncate(SUGGESTED_COUNT_MAX);
            labels
        };
        let of_name = labels(&|label| label.name == reference.name);
        if of_name.is_empty() { labels(&|_| true) } else { of_name }
    }

    /// Removes drafts of killed pushes.
    pub(super) fn clear_dead_drafts(
        &self,
        repository: &Repository,
        environment: &Environment,
        progress: &dyn Progress,
    ) {
        for draft in &self.drafts {
            let process = draft.notes.get(NOTE_TEMPLATE_DRAFT);
            let process = process.and_then(|text| serde_json::from_str::<ProcessIdentity>(text).ok());
            let liveness = process.map_or(Liveness::Unknown, |process| environment.processes.liveness(&process));
            let age_ms = (environment.now_ms)().saturating_sub(draft.time_ms);
            let is_dead = match liveness {
                Liveness::Alive => false,
                Liveness::Dead => true,
                Liveness::Unknown => age_ms > UNSEEN_AGE_MS,
            };
            if !is_dead {
                continue;
            }
            let name = draft.machine.trim_start_matches(TEMPLATE_MACHINE_PREFIX);
            match repository.forget(draft.id, "template push: it was killed") {
                Ok(()) => progress.note(&format!("removed what a push of {name} had left that was killed")),
                Err(error) => progress.warning(&format!("what a push of {name} has left stays: {error}")),
            }
        }
    }
}
