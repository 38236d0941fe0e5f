//! `template list` and `template show`.

use holdfast_repo::{Manifest, Repository};

use super::entry::Entry;
use super::index::TemplateIndex;
use super::label::{TemplateName, TemplateReference};
use super::statement::Statement;
use super::trust::{SignedBy, Trust};
use crate::job::error::TemplateError;
use crate::job::{Progress, Result};
use crate::notes::NOTE_TEMPLATE_OWN_BYTES;

/// A template, and the result of the check of its signature.
#[derive(Debug, Clone)]
pub struct ListedTemplate {
    /// Its snapshot.
    pub snapshot: Manifest,
    /// Its statement.
    pub statement: Statement,
    /// Its signer.
    pub signed: SignedBy,
    /// Whether its tag refers to it now.
    pub is_current: bool,
    /// Bytes of its disks that are not zero.
    pub data_bytes: u64,
    /// Bytes of these that were new to the repository when it was pushed; none if unknown.
    pub own_bytes: Option<u64>,
}

/// Which templates of a tag are listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListedHistory {
    /// The current ones.
    Current,
    /// Also earlier ones.
    All,
}

/// The templates of a repository.
#[derive(Debug)]
pub struct TemplateListing {
    /// Ordered by name and tag, then by time.
    pub templates: Vec<ListedTemplate>,
    /// Invalid templates, with the error.
    pub unreadable: Vec<(Manifest, TemplateError)>,
    /// Errors of snapshots that could not be read: they may be templates.
    pub damaged: Vec<holdfast_repo::Error>,
}

/// A template and its history.
#[derive(Debug)]
pub struct TemplateHistory {
    /// The template.
    pub template: ListedTemplate,
    /// Other templates of its tag, newest first.
    pub history: Vec<ListedTemplate>,
    /// The same content under other tags of the name, or signed at other times, newest first.
    pub same_content: Vec<ListedTemplate>,
}

fn listed(entry: &Entry, shelf: &TemplateIndex, trust: &Trust<'_>) -> Result<ListedTemplate> {
    let manifest = &entry.manifest;
    let data_bytes = manifest
        .logical_bytes()
        .saturating_sub(manifest.statistics().zero_bytes);
    let own_bytes = manifest
        .notes
        .get(NOTE_TEMPLATE_OWN_BYTES)
        .and_then(|text| text.parse().ok());
    Ok(ListedTemplate {
        snapshot: manifest.clone(),
        statement: entry.statement.clone(),
        signed: trust.judge(entry)?,
        is_current: shelf.is_current(entry),
        data_bytes,
        own_bytes: own_bytes.map(|bytes: u64| bytes.min(data_bytes)),
    })
}

/// Lists templates of all names, or of one.
pub fn list_templates(
    repository: &Repository,
    name: Option<&TemplateName>,
    history: ListedHistory,
    trust: &Trust<'_>,
) -> Result<TemplateListing> {
    let shelf = TemplateIndex::read(repository)?;
    let is_wanted = |entry: &&Entry| {
        name.is_none_or(|name| entry.statement.label.name == *name)
            && (history == ListedHistory::All || shelf.is_current(entry))
    };
    let chosen = shelf.entries.iter().filter(is_wanted);
    let mut templates = chosen
        .map(|entry| listed(entry, &shelf, trust))
        .collect::<Result<Vec<_>>>()?;
    templates.sort_by(|one, other| {
        let key = |template: &ListedTemplate| (template.statement.label.clone(), template.statement.time);
        key(one).cmp(&key(other))
    });
    Ok(TemplateListing {
        templates,
        unreadable: shelf.unreadable,
        damaged: shelf.damaged,
    })
}

/// Shows one template and its history.
pub fn show_template(
    repository: &Repository,
    reference: &TemplateReference,
    trust: &Trust<'_>,
    progress: &dyn Progress,
) -> Result<TemplateHistory> {
    let shelf = TemplateIndex::read(repository)?;
    shelf.warn_of_unreadable(progress);
    let entry = shelf.find(reference, Some(trust))?;
    let others = |is_wanted: &dyn Fn(&Entry) -> bool| {
        let others = shelf.entries.iter().rev();
        let others = others.filter(|other| other.manifest.id != entry.manifest.id && is_wanted(other));
        others
            .map(|other| listed(other, &shelf, trust))
            .collect::<Result<Vec<_>>>()
    };
    let content = entry.statement.content();
    Ok(TemplateHistory {
        template: listed(entry, &shelf, trust)?,
        history: others(&|other| other.statement.label == entry.statement.label)?,
        same_content: others(&|other| {
            other.statement.label.name == entry.statement.label.name && other.statement.content() == content
        })?,
    })
}
