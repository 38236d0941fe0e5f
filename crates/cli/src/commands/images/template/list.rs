//! `holdfast template list` and `template show`.

use holdfast_engine::{ListedHistory, ListedTemplate, TemplateName, TemplateReference, list_templates, show_template};
use serde::Serialize;

use super::document::ListedDocument;
use super::signers::{TrustArgs, signatures};
use crate::args::Example;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::output::{Column, Page, Report, Style, Table};
use crate::units;

/// Arguments of `template list`.
#[derive(Debug, clap::Args)]
pub(super) struct TemplateListArgs {
    /// Only templates of this name
    #[arg(value_name = "NAME", value_parser = parse_name)]
    name: Option<TemplateName>,
    /// Also list earlier versions of tags
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    trust: TrustArgs,
}

/// Arguments of `template show`.
#[derive(Debug, clap::Args)]
pub(super) struct TemplateShowArgs {
    /// The template, by its tag or by its digest
    #[arg(value_name = "NAME[:TAG]|NAME@DIGEST")]
    template: TemplateReference,
    #[command(flatten)]
    trust: TrustArgs,
}

fn parse_name(text: &str) -> Result<TemplateName, String> {
    TemplateName::new(text).map_err(|error| error.to_string())
}

impl Verb for TemplateListArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See which templates there are, and who signed them",
            line: "holdfast template list -r /srv/templates",
        },
        Example {
            wish: "See all versions of one",
            line: "holdfast template list -r /srv/templates debian12 --all",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

impl Verb for TemplateShowArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "See who signed a template, and what its tag referred to before",
        line: "holdfast template show -r /srv/templates debian12:stable",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run_show(self, context)
    }
}

/// Report of `template list`.
#[derive(Debug, Serialize)]
struct TemplatesListed {
    templates: Vec<ListedDocument>,
    unreadable: Vec<UnreadableTemplate>,
    /// Why snapshots could not be read.
    damaged: Vec<String>,
}

/// A snapshot that is marked as a template but invalid.
#[derive(Debug, Serialize)]
struct UnreadableTemplate {
    snapshot: String,
    reason: String,
}

fn table(templates: &[ListedDocument], page: &mut Page) {
    let mut table = Table::new([
        Column::long_text("TEMPLATE"),
        Column::text("TIME"),
        Column::text("CONTENT"),
        Column::long_text("SIGNED BY"),
        Column::number("SIZE"),
        Column::number("DATA"),
        Column::number("NEW"),
        Column::long_text("DESCRIPTION"),
    ]);
    for template in templates {
        let statement = &template.statement;
        table.row([
            statement.label(),
            template.local_time.clone(),
            statement.short_content().to_owned(),
            template.signed.brief(),
            units::bytes(statement.size_bytes),
            units::bytes(template.data_bytes),
            template.own_bytes.map(units::bytes).unwrap_or_default(),
            statement.description.clone(),
        ]);
    }
    page.table(&table);
}

impl Report for TemplatesListed {
    fn command(&self) -> &'static str {
        "template list"
    }

    fn exit(&self) -> Exit {
        match (self.damaged.is_empty(), self.unreadable.is_empty()) {
            (true, true) => Exit::Ok,
            (true, false) => Exit::Warnings,
            (false, _) => Exit::Damage,
        }
    }

    fn human(&self, page: &mut Page) {
        if self.templates.is_empty() {
            page.line("there is no such template");
        } else {
            table(&self.templates, page);
        }
        for unreadable in &self.unreadable {
            let id = &unreadable.snapshot[..8];
            page.styled(
                Style::Warning,
                &format!("template in snapshot {id}: {}", unreadable.reason),
            );
        }
        for damaged in &self.damaged {
            page.styled(Style::Bad, &format!("damaged: {damaged}"));
        }
    }
}

/// Report of `template show`.
#[derive(Debug, Serialize)]
struct TemplateShown {
    template: ListedDocument,
    /// The text that is signed.
    statement: String,
    history: Vec<ListedDocument>,
    same_content: Vec<ListedDocument>,
}

impl TemplateShown {
    fn fields(&self) -> Vec<(&'static str, String)> {
        let (template, statement) = (&self.template, &self.template.statement);
        let mut fields = vec![
            ("time", template.local_time.clone()),
            ("content", statement.content.clone()),
            ("snapshot", statement.snapshot.clone().unwrap_or_default()),
            ("pushed on", template.host.clone()),
            ("data", units::bytes(template.data_bytes)),
        ];
        if let Some(bytes) = template.own_bytes {
            fields.push(("new when pushed", units::bytes(bytes)));
        }
        if !statement.description.is_empty() {
            fields.push(("description", statement.description.clone()));
        }
        if !template.is_current {
            fields.push(("now", "the tag means something else".to_owned()));
        }
        fields
    }
}

impl Report for TemplateShown {
    fn command(&self) -> &'static str {
        "template show"
    }

    fn human(&self, page: &mut Page) {
        let (template, statement) = (&self.template, &self.template.statement);
        page.styled(Style::Heading, &statement.label());
        page.styled(template.signed.style(), &format!("  {}", template.signed.full()));
        page.fields(&self.fields());
        page.gap();
        let mut parts = Table::new([
            Column::long_text("PART"),
            Column::number("SIZE"),
            Column::long_text("DIGEST"),
        ]);
        for piece in statement.disks.iter().chain(&statement.files) {
            parts.row([piece.name.clone(), units::bytes(piece.size_bytes), piece.digest.clone()]);
        }
        page.table(&parts);
        for (heading, others) in [
            ("What the tag meant at other times", &self.history),
            ("The same content under other tags and signatures", &self.same_content),
        ] {
            if !others.is_empty() {
                page.gap();
                page.styled(Style::Heading, heading);
                table(others, page);
            }
        }
    }
}

fn run(args: &TemplateListArgs, context: &Context) -> Result<Exit, Error> {
    let repository = context.open_repository()?;
    let signatures = signatures(context);
    let trust = args.trust.trust(&signatures, context);
    let history = if args.all {
        ListedHistory::All
    } else {
        ListedHistory::Current
    };
    let listing = list_templates(&repository, args.name.as_ref(), history, &trust)?;
    if let Some(name) = &args.name
        && listing.templates.is_empty()
        && listing.unreadable.is_empty()
        && listing.damaged.is_empty()
    {
        return Err(Error::refused(
            Kind::NotFound,
            format!("there is no template {name}"),
            "holdfast template list shows the templates",
        ));
    }
    let templates = listing.templates.iter();
    let unreadable = listing.unreadable.iter().map(|(manifest, error)| UnreadableTemplate {
        snapshot: manifest.id.to_string(),
        reason: error.to_string(),
    });
    context.report(&TemplatesListed {
        templates: templates
            .map(|template| ListedDocument::new(template, context))
            .collect(),
        unreadable: unreadable.collect(),
        damaged: listing.damaged.iter().map(ToString::to_string).collect(),
    })
}

fn run_show(args: &TemplateShowArgs, context: &Context) -> Result<Exit, Error> {
    let repository = context.open_repository()?;
    let signatures = signatures(context);
    let trust = args.trust.trust(&signatures, context);
    let found = context.work(1, |job| {
        show_template(&repository, &args.template, &trust, job.progress)
    })?;
    let documents = |templates: &[ListedTemplate]| {
        let documents = templates.iter().map(|template| ListedDocument::new(template, context));
        documents.collect()
    };
    context.report(&TemplateShown {
        statement: found.template.statement.encode(),
        template: ListedDocument::new(&found.template, context),
        history: documents(&found.history),
        same_content: documents(&found.same_content),
    })
}
