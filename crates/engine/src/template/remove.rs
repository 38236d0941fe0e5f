//! `template remove`: plan, then execute.

use holdfast_repo::{Environment, Error as RepositoryError, Manifest, Repository};

use super::entry::Entry;
use super::index::TemplateIndex;
use super::label::{TemplateName, TemplateReference, TemplateVersion};
use super::statement::Statement;
use crate::job::error::TemplateError;
use crate::job::{Job, Result};
use crate::notes::TEMPLATE_MACHINE_PREFIX;
use crate::repository::forget::Execution;

/// Which templates go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RemovalSelection {
    /// A tag with all that it has meant, or a content under all tags of its name.
    One(TemplateReference),
    /// Everything under a name, also what makes no sense.
    Name(TemplateName),
}

/// What was removed, or would be.
#[derive(Debug)]
pub struct TemplateRemoval {
    /// Templates, the oldest first.
    pub templates: Vec<(Manifest, Statement)>,
    /// Snapshots that are templates, and make no sense.
    pub unreadable: Vec<Manifest>,
}

/// Removes templates. Space is given back by the next gc.
///
/// # Errors
/// There is none, or what is to go is what a tag means now, and the tag would go back to what it meant before.
pub fn remove_templates(
    repository: &Repository,
    selection: &RemovalSelection,
    execution: Execution,
    environment: &Environment,
    job: Job<'_>,
) -> Result<TemplateRemoval> {
    let shelf = TemplateIndex::read(repository)?;
    let chosen = choose(&shelf, selection)?;
    let listed_as = |name: &TemplateName| format!("{TEMPLATE_MACHINE_PREFIX}{name}");
    let unreadable: Vec<Manifest> = match selection {
        RemovalSelection::One(_) => Vec::new(),
        RemovalSelection::Name(name) => {
            let manifests = shelf.unreadable.iter().map(|(manifest, _)| manifest);
            manifests
                .filter(|manifest| manifest.machine == listed_as(name))
                .cloned()
                .collect()
        }
    };
    if chosen.is_empty() && unreadable.is_empty() {
        let wanted = match selection {
            RemovalSelection::One(reference) => reference.to_string(),
            RemovalSelection::Name(name) => name.to_string(),
        };
        let similar = Vec::new();
        return Err(TemplateError::Unknown { wanted, similar }.into());
    }
    if execution == Execution::Execute {
        shelf.clear_dead_drafts(repository, environment, job.progress);
        // The oldest first: when this is interrupted, a tag still does not mean an older template.
        let readable = chosen.iter().map(|entry| entry.manifest.id);
        for id in readable.chain(unreadable.iter().map(|manifest| manifest.id)) {
            job.interrupt.check()?;
            repository.unprotect(id)?;
            match repository.forget(id, "template remove: by hand") {
                // Another process was faster.
                Ok(()) | Err(RepositoryError::NoSnapshot { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    let templates = chosen
        .into_iter()
        .map(|entry| (entry.manifest.clone(), entry.statement.clone()));
    Ok(TemplateRemoval {
        templates: templates.collect(),
        unreadable,
    })
}

/// What goes, the oldest first.
fn choose<'s>(shelf: &'s TemplateIndex, selection: &RemovalSelection) -> Result<Vec<&'s Entry>> {
    let all = || shelf.entries.iter();
    match selection {
        RemovalSelection::Name(name) => Ok(all().filter(|entry| entry.statement.label.name == *name).collect()),
        RemovalSelection::One(reference) => {
            let found = shelf.find(reference, None)?;
            let content = found.statement.content();
            if matches!(reference.version, TemplateVersion::Tag(_)) {
                return Ok(shelf.history(&found.statement.label));
            }
            let goes =
                |entry: &&Entry| entry.statement.label.name == reference.name && entry.statement.content() == content;
            let chosen: Vec<&Entry> = all().filter(goes).collect();
            for entry in chosen.iter().filter(|entry| shelf.is_current(entry)) {
                let label = &entry.statement.label;
                if shelf
                    .history(label)
                    .iter()
                    .any(|other| other.statement.content() != content)
                {
                    return Err(TemplateError::IsCurrent {
                        label: label.to_string(),
                        content: content.short(),
                    }
                    .into());
                }
            }
            Ok(chosen)
        }
    }
}
