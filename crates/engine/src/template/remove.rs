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

/// Which templates to remove.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RemovalSelection {
    /// A tag with its whole history, or a content under all tags of its name.
    One(TemplateReference),
    /// Everything under a name, including invalid templates.
    Name(TemplateName),
}

/// Removed templates, or those that would be.
#[derive(Debug)]
pub struct TemplateRemoval {
    /// Templates, oldest first.
    pub templates: Vec<(Manifest, Statement)>,
    /// Snapshots that are invalid templates.
    pub unreadable: Vec<Manifest>,
}

/// Removes templates. The next gc reclaims the space.
///
/// # Errors
/// There is no such template, or it is the current one of a tag, and the tag would refer to an earlier one again.
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
        // Oldest first: after an interruption a tag never refers to an older template.
        let readable = chosen.iter().map(|entry| entry.manifest.id);
        for id in readable.chain(unreadable.iter().map(|manifest| manifest.id)) {
            job.interrupt.check()?;
            repository.unprotect(id)?;
            match repository.forget(id, "template remove: by hand") {
                // Another process has removed it.
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

/// The templates to remove, oldest first.
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
