//! `holdfast template push` and `template tag`.

use std::ffi::OsString;
use std::path::PathBuf;

use holdfast_engine::{
    Publication, Published, PushRequest, PushSource, Replace, SnapshotName, SourceName, TemplateLabel, TemplatePlan,
    TemplateReference, Trust, Unsealed, Vouching, plan_push, plan_tag, prepare_push, prepare_tag,
};
use holdfast_host::SshSignatures;
use holdfast_image::Format;
use holdfast_repo::{Processes as _, SystemProcesses};
use serde::Serialize;

use super::document::StatementDocument;
use super::signers::{SignArgs, TrustArgs, is_file, signatures};
use crate::PROGRAM;
use crate::args::{Example, JobArgs};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::no_image;
use crate::output::{Page, Report};
use crate::process::time;
use crate::units;

/// Arguments of `template push`.
#[derive(Debug, clap::Args)]
pub(super) struct PushArgs {
    /// Name and tag of the template [default tag: latest]
    #[arg(value_name = "NAME[:TAG]")]
    label: TemplateLabel,
    /// Images, each with NAME= before it to name the disk; or one snapshot of a machine in the repository, with
    /// its configuration (the name of a machine selects its newest snapshot)
    #[arg(value_name = "IMAGE|SNAPSHOT|MACHINE", required = true)]
    sources: Vec<OsString>,
    #[command(flatten)]
    wording: WordingArgs,
    /// Format of all images (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels) [default: detected]
    #[arg(long, value_name = "FORMAT", value_parser = crate::args::parse_format)]
    format: Option<Format>,
    /// Allow a backing file in another folder; may be repeated
    #[arg(long = "allow", value_name = "FILE")]
    allowed: Vec<PathBuf>,
    #[command(flatten)]
    sign: SignArgs,
    #[command(flatten)]
    job: JobArgs,
}

/// Arguments of `template tag`.
#[derive(Debug, clap::Args)]
pub(super) struct TagArgs {
    /// The template, by its tag or by its digest
    #[arg(value_name = "NAME[:TAG]|NAME@DIGEST")]
    template: TemplateReference,
    /// The new name and tag
    #[arg(value_name = "NAME[:TAG]")]
    label: TemplateLabel,
    #[command(flatten)]
    wording: WordingArgs,
    #[command(flatten)]
    sign: SignArgs,
    #[command(flatten)]
    trust: TrustArgs,
    #[command(flatten)]
    job: JobArgs,
}

impl TagArgs {
    fn vouching<'a>(&self, trust: &'a Trust<'a>) -> Vouching<'a> {
        Vouching {
            trust,
            unsigned: self.sign.unsigned(),
        }
    }
}

/// What is said of a template.
#[derive(Debug, clap::Args)]
struct WordingArgs {
    /// Description, in one line
    #[arg(long, value_name = "TEXT", default_value = "")]
    description: String,
    /// Move an existing tag to this content; the old content stays as NAME@DIGEST
    #[arg(long)]
    replace: bool,
    /// Read the content, check the tag, and show what would be stored; store nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

impl Verb for PushArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Share a prepared image",
            line: "holdfast template push -r /srv/templates debian12:2026-11 debian12.qcow2 --sign ~/.ssh/id_ed25519",
        },
        Example {
            wish: "Share a machine with its configuration, after it was backed up to the same repository",
            line: "holdfast template push -r /srv/templates web web1 --description 'nginx, hardened'",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

impl Verb for TagArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Publish a tested version as latest",
            line: "holdfast template tag -r /srv/templates debian12:2026-11 debian12:stable --replace",
        },
        Example {
            wish: "Move a tag back to an earlier version",
            line: "holdfast template tag -r /srv/templates debian12@9f86d081884c debian12:stable --replace",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run_tag(self, context)
    }
}

/// Report of `template push` and `template tag` with `--dry-run`.
#[derive(Debug, Serialize)]
struct PushPlanned {
    #[serde(skip)]
    command: &'static str,
    dry_run: bool,
    #[serde(flatten)]
    statement: StatementDocument,
    /// Whether it would be signed.
    is_signed: bool,
    /// The present content of the tag.
    before: Option<String>,
}

impl PushPlanned {
    fn unsigned(command: &'static str, plan: &TemplatePlan) -> Self {
        Self {
            command,
            dry_run: true,
            statement: StatementDocument::new(&plan.statement, None),
            is_signed: false,
            before: plan.before.as_ref().map(ToString::to_string),
        }
    }
}

impl Report for PushPlanned {
    fn command(&self) -> &'static str {
        self.command
    }

    fn human(&self, page: &mut Page) {
        page.line(&format!(
            "would store {} with {} of {}, {}",
            self.statement.label(),
            units::counted(self.statement.disks.len() as u64, "disk", "disks"),
            units::bytes(self.statement.size_bytes),
            if self.is_signed { "signed" } else { "not signed" }
        ));
        page.line(&format!("  content {}", self.statement.content));
        show_previous_content(&self.statement, self.before.as_ref(), "now, it means", page);
    }
}

/// Notes the present content of the tag, if it is different.
fn show_previous_content(statement: &StatementDocument, before: Option<&String>, when: &str, page: &mut Page) {
    if let Some(before) = before.filter(|before| **before != statement.content) {
        page.line(&format!("  {when} {}@{}, which stays", statement.name, &before[..12]));
    }
}

/// Report of `template push` and `template tag`.
#[derive(Debug, Serialize)]
struct Pushed {
    #[serde(skip)]
    command: &'static str,
    dry_run: bool,
    #[serde(flatten)]
    statement: StatementDocument,
    is_signed: bool,
    data_bytes: u64,
    own_bytes: u64,
    /// The previous content of the tag.
    before: Option<String>,
    duration_ms: u64,
}

impl Report for Pushed {
    fn command(&self) -> &'static str {
        self.command
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        let disks = units::counted(self.statement.disks.len() as u64, "disk", "disks");
        page.line(&format!(
            "{}  {disks} of {}, {} of data, {} new, in {}",
            self.statement.label(),
            units::bytes(self.statement.size_bytes),
            units::bytes(self.data_bytes),
            units::bytes(self.own_bytes),
            units::duration(std::time::Duration::from_millis(self.duration_ms)),
        ));
        page.line(&format!("  content {}", self.statement.content));
        if !self.is_signed {
            page.line("  not signed");
        }
        show_previous_content(&self.statement, self.before.as_ref(), "before, it meant", page);
    }
}

impl WordingArgs {
    fn publication(&self, label: &TemplateLabel) -> Publication {
        Publication {
            label: label.clone(),
            description: self.description.clone(),
            replace: if self.replace {
                Replace::Replace
            } else {
                Replace::Refuse
            },
            time: time::now(),
            host: SystemProcesses.this().host,
            program: PROGRAM.to_owned(),
        }
    }
}

fn source(args: &PushArgs) -> Result<PushSource, Error> {
    if let [only] = &args.sources[..]
        && !is_file(only)
    {
        let about_images = [
            ("--format", args.format.is_some()),
            ("--allow", !args.allowed.is_empty()),
        ];
        if let Some((option, _)) = about_images.iter().find(|(_, is_given)| *is_given) {
            let what = format!("{option} is about images, and {} is a snapshot", only.display());
            return Err(Error::usage(what, "the path of an image has a /"));
        }
        let name: SnapshotName = only.to_string_lossy().parse().map_err(holdfast_engine::Error::from)?;
        if name.disk.is_some() {
            return Err(Error::usage(
                "a machine is pushed, and this names a disk",
                "remove the disk from the name; holdfast restore makes an image of a disk, which can be pushed",
            ));
        }
        return Ok(PushSource::Snapshot(name.snapshot));
    }
    if args.format.is_none() {
        args.sources.iter().try_for_each(|word| no_image::refuse(word))?;
    }
    let disks = args.sources.iter().map(|word| SourceName::parse(word));
    Ok(PushSource::Images {
        disks: disks.collect::<holdfast_engine::Result<_>>()?,
        format: args.format,
        allowed: args.allowed.clone(),
    })
}

fn run(args: &PushArgs, context: &Context) -> Result<Exit, Error> {
    let start = context.clock().now();
    let key = args.sign.key(context)?;
    let request = PushRequest {
        source: source(args)?,
        publication: args.wording.publication(&args.label),
        zone: context.zone().clone(),
    };
    let repository = context.open_repository()?;
    let environment = context.environment();
    let threads = args.job.thread_count();
    if args.wording.dry_run {
        let plan = context.work(threads, |job| plan_push(&repository, request, job))?;
        return context.report(&PushPlanned {
            is_signed: key.is_some(),
            ..PushPlanned::unsigned("template push", &plan)
        });
    }
    let unsealed = context.work(threads, |job| prepare_push(&repository, request, &environment, job))?;
    let signatures = signatures(context);
    let (published, is_signed) = publish(unsealed, key, &signatures, context, threads)?;
    let duration = context.clock().now().saturating_sub(start);
    context.report(&pushed("template push", &published, is_signed, duration))
}

fn run_tag(args: &TagArgs, context: &Context) -> Result<Exit, Error> {
    let start = context.clock().now();
    let key = args.sign.key(context)?;
    let publication = args.wording.publication(&args.label);
    let repository = context.open_repository()?;
    let threads = args.job.thread_count();
    let signatures = signatures(context);
    let trust = args.trust.trust(&signatures, context);
    if args.wording.dry_run {
        let plan = context.work(threads, |job| {
            let vouching = args.vouching(&trust);
            plan_tag(&repository, &args.template, publication, vouching, job)
        })?;
        return context.report(&PushPlanned {
            is_signed: key.is_some(),
            ..PushPlanned::unsigned("template tag", &plan)
        });
    }
    let unsealed = context.work(threads, |job| {
        let vouching = args.vouching(&trust);
        prepare_tag(&repository, &args.template, publication, vouching, job)
    })?;
    let (published, is_signed) = publish(unsealed, key, &signatures, context, threads)?;
    let duration = context.clock().now().saturating_sub(start);
    context.report(&pushed("template tag", &published, is_signed, duration))
}

fn publish(
    unsealed: Unsealed<'_>,
    key: Option<PathBuf>,
    signatures: &SshSignatures<'_>,
    context: &Context,
    threads: usize,
) -> Result<(Published, bool), Error> {
    let signature = key
        .map(|key| SignArgs::sign(&key, &unsealed, signatures, context))
        .transpose()?;
    let is_signed = signature.is_some();
    let signature = signature.map(|signature| (signature, signatures));
    let published = context.work(threads, |job| unsealed.publish(signature, job))?;
    Ok((published, is_signed))
}

fn pushed(command: &'static str, published: &Published, is_signed: bool, duration: std::time::Duration) -> Pushed {
    Pushed {
        command,
        dry_run: false,
        statement: StatementDocument::new(&published.statement, Some(published.snapshot)),
        is_signed,
        data_bytes: published.data_bytes,
        own_bytes: published.own_bytes,
        before: published.before.map(|before| before.to_string()),
        duration_ms: units::millis(duration),
    }
}
