//! `holdfast template remove`.

use holdfast_engine::{RemovalSelection, TemplateReference, TemplateVersion, remove_templates};
use serde::Serialize;

use super::document::StatementDocument;
use crate::args::Example;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};

/// Arguments of `template remove`.
#[derive(Debug, clap::Args)]
pub(super) struct TemplateRemoveArgs {
    /// A tag with all its versions, or one content under all tags of the name
    #[arg(value_name = "NAME[:TAG]|NAME@DIGEST")]
    template: TemplateReference,
    /// Remove everything under the name: all tags, and templates that cannot be read
    #[arg(long)]
    all: bool,
    /// Show what would be removed; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

impl Verb for TemplateRemoveArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See what would be removed with a tag",
            line: "holdfast template remove -r /srv/templates debian12:2026-10 --dry-run",
        },
        Example {
            wish: "Remove an old version by its digest",
            line: "holdfast template remove -r /srv/templates debian12@9f86d081884c",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `template remove`.
#[derive(Debug, Serialize)]
struct TemplateRemoved {
    dry_run: bool,
    templates: Vec<StatementDocument>,
    /// Snapshots that are marked as templates but invalid.
    unreadable: Vec<String>,
}

impl Report for TemplateRemoved {
    fn command(&self) -> &'static str {
        "template remove"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        let verb = if self.dry_run { "would remove" } else { "removed" };
        for template in &self.templates {
            page.line(&format!(
                "{verb} {} of {} ({}@{})",
                template.label(),
                template.time,
                template.name,
                template.short_content()
            ));
        }
        for id in &self.unreadable {
            page.line(&format!("{verb} the template in snapshot {id}, which cannot be read"));
        }
    }
}

fn run(args: &TemplateRemoveArgs, context: &Context) -> Result<Exit, Error> {
    let selection = match (&args.template.version, args.all) {
        (_, false) => RemovalSelection::One(args.template.clone()),
        (TemplateVersion::Tag(tag), true) if *tag == holdfast_engine::TemplateTag::default() => {
            RemovalSelection::Name(args.template.name.clone())
        }
        (_, true) => {
            return Err(Error::usage(
                format!(
                    "--all removes all versions of a name, and {} is one version",
                    args.template
                ),
                "use the name without a tag, or remove --all",
            ));
        }
    };
    let repository = context.open_repository()?;
    let environment = context.environment();
    let execution = crate::args::Switch::execution(args.dry_run);
    let gone = context.work(1, |job| {
        remove_templates(&repository, &selection, execution, &environment, job)
    })?;
    let documents = gone.templates.iter();
    let documents = documents.map(|(manifest, statement)| StatementDocument::new(statement, Some(manifest.id)));
    context.report(&TemplateRemoved {
        dry_run: args.dry_run,
        templates: documents.collect(),
        unreadable: gone.unreadable.iter().map(|manifest| manifest.id.to_string()).collect(),
    })
}
