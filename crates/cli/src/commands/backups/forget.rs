//! `holdfast forget`, `protect` and `unprotect`: act on single snapshots.

use holdfast_engine::{Job, ProtectionChange, SnapshotName, SnapshotReference, change_protection, forget};
use holdfast_repo::Manifest;
use serde::Serialize;

use crate::args::Example;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::snapshot::SnapshotDocument;
use crate::output::{Page, Report};

/// Arguments of `forget`.
#[derive(Debug, clap::Args)]
pub(crate) struct ForgetArgs {
    /// Snapshots, by the start of their ids or as MACHINE@TIME; unreadable ones by their full ids
    #[arg(value_name = "SNAPSHOT", required = true)]
    snapshots: Vec<SnapshotName>,
    /// Show what would be removed; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

/// Arguments of `protect`.
#[derive(Debug, clap::Args)]
pub(crate) struct ProtectArgs {
    /// Snapshots, by the start of their ids or as MACHINE@TIME
    #[arg(value_name = "SNAPSHOT", required = true)]
    snapshots: Vec<SnapshotName>,
    /// Show which snapshots would be protected; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

/// Arguments of `unprotect`.
#[derive(Debug, clap::Args)]
pub(crate) struct UnprotectArgs {
    /// Snapshots, by the start of their ids or as MACHINE@TIME
    #[arg(value_name = "SNAPSHOT", required = true)]
    snapshots: Vec<SnapshotName>,
    /// Also unprotect snapshots that live restores use; make sure that no machine runs from them
    #[arg(long)]
    held: bool,
    /// Show which snapshots would lose their protection; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

impl Verb for ForgetArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Remove one snapshot",
        line: "holdfast forget -r /backup/vms 3f2a9c1e",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run_forget(self, context)
    }
}

impl Verb for ProtectArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Keep the newest snapshot of a machine regardless of the rules",
        line: "holdfast protect -r /backup/vms web1",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run_protect(self, context)
    }
}

impl Verb for UnprotectArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Remove the protection",
        line: "holdfast unprotect -r /backup/vms 3f2a9c1e",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run_unprotect(self, context)
    }
}

/// Report of all three verbs.
#[derive(Debug, Serialize)]
struct ForgetChanged {
    #[serde(skip)]
    command: &'static str,
    #[serde(skip)]
    verb: &'static str,
    dry_run: bool,
    snapshots: Vec<SnapshotDocument>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unreadable: Vec<String>,
}

impl Report for ForgetChanged {
    fn command(&self) -> &'static str {
        self.command
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        for snapshot in &self.snapshots {
            page.line(&format!(
                "{} snapshot {} of {} ({})",
                self.verb,
                &snapshot.id[..8],
                snapshot.machine,
                snapshot.time
            ));
        }
        for id in &self.unreadable {
            page.line(&format!("{} snapshot {id}, which is lost or cannot be read", self.verb));
        }
    }
}

/// The snapshots of the names. A name of a disk is an error.
fn references(names: &[SnapshotName]) -> Result<Vec<SnapshotReference>, Error> {
    let reference = |name: &SnapshotName| match name.disk {
        None => Ok(name.snapshot.clone()),
        Some(_) => Err(Error::usage(
            "a disk is named, where only whole snapshots can be",
            "leave :DISK out",
        )),
    };
    names.iter().map(reference).collect()
}

fn changed(command: &'static str, verb: &'static str, dry_run: bool, manifests: &[Manifest]) -> ForgetChanged {
    ForgetChanged {
        command,
        verb,
        dry_run,
        snapshots: manifests.iter().map(SnapshotDocument::from).collect(),
        unreadable: Vec::new(),
    }
}

fn run_forget(args: &ForgetArgs, context: &Context) -> Result<Exit, Error> {
    let references = references(&args.snapshots)?;
    let execution = crate::args::Switch::execution(args.dry_run);
    let gone = with_repository(context, |repository, job| {
        forget(repository, &references, execution, context.zone(), job)
    })?;
    let verb = if args.dry_run { "would remove" } else { "removed" };
    context.report(&ForgetChanged {
        unreadable: gone.unreadable.iter().map(ToString::to_string).collect(),
        ..changed("forget", verb, args.dry_run, &gone.snapshots)
    })
}

fn run_protect(args: &ProtectArgs, context: &Context) -> Result<Exit, Error> {
    let references = references(&args.snapshots)?;
    let execution = crate::args::Switch::execution(args.dry_run);
    let done = with_repository(context, |repository, job| {
        let change = ProtectionChange::Protect;
        change_protection(repository, &references, change, execution, context.zone(), job)
    })?;
    let verb = if args.dry_run { "would protect" } else { "protected" };
    context.report(&changed("protect", verb, args.dry_run, &done))
}

fn run_unprotect(args: &UnprotectArgs, context: &Context) -> Result<Exit, Error> {
    let references = references(&args.snapshots)?;
    let change = if args.held {
        ProtectionChange::UnprotectHeld
    } else {
        ProtectionChange::Unprotect
    };
    let execution = crate::args::Switch::execution(args.dry_run);
    let done = with_repository(context, |repository, job| {
        change_protection(repository, &references, change, execution, context.zone(), job)
    })?;
    let verb = if args.dry_run {
        "would unprotect"
    } else {
        "no longer protected:"
    };
    context.report(&changed("unprotect", verb, args.dry_run, &done))
}

fn with_repository<T>(
    context: &Context,
    work: impl FnOnce(&holdfast_repo::Repository, Job<'_>) -> holdfast_engine::Result<T>,
) -> Result<T, Error> {
    let repository = context.open_repository()?;
    context.work(1, |job| work(&repository, job))
}
