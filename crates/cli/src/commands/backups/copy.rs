//! `holdfast copy`: copies snapshots to another repository, or compares two repositories.

mod done;
mod status;

use std::ffi::OsString;
use std::num::NonZeroU64;

use holdfast_engine::{
    CopyRequest, CopySelection, ListRequest, RemovedThere, SnapshotName, copy, copy_status, is_same_place,
};
use holdfast_policy::Glob;
use holdfast_repo::Repository;

use self::done::CopyDone;
use self::status::Compared;
use crate::args::{Example, JobArgs, ToPasswordArgs};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `copy`.
#[derive(Debug, clap::Args)]
pub(crate) struct CopyArgs {
    #[command(flatten)]
    what: WhatArgs,
    /// The repository to copy to [env: HOLDFAST_TO_REPOSITORY]
    #[arg(long, value_name = "LOCATION")]
    to: Option<OsString>,
    #[command(flatten)]
    to_password: ToPasswordArgs,
    /// Compare the two repositories; copy nothing
    #[arg(long, conflicts_with_all = ["again", "dry_run", "bwlimit"])]
    status: bool,
    /// Show what would be copied, and how much; copy nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Read at most this many bytes per second from this repository (50M)
    #[arg(long, value_name = "SIZE", value_parser = crate::args::parse_rate)]
    bwlimit: Option<NonZeroU64>,
    #[command(flatten)]
    job: JobArgs,
}

/// Which snapshots are copied.
#[derive(Debug, clap::Args)]
struct WhatArgs {
    /// Snapshots; one that was removed from the target before is copied again
    #[arg(value_name = "SNAPSHOT", conflicts_with_all = ["all", "machines", "tags", "again", "status"])]
    snapshots: Vec<SnapshotName>,
    /// Copy all snapshots that the target lacks
    #[arg(long)]
    all: bool,
    /// Copy snapshots of this machine, by name or pattern ('web*'); may be repeated
    #[arg(short, long = "machine", value_name = "NAME", value_parser = Glob::parse)]
    machines: Vec<Glob>,
    /// Copy snapshots with this tag; with several, those that have all of them
    #[arg(short, long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Also copy snapshots that were removed from the target after an earlier copy
    #[arg(long)]
    again: bool,
}

impl Verb for CopyArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Copy everything that the target lacks",
            line: "holdfast copy -r /backup/vms --to /offsite/vms --all",
        },
        Example {
            wish: "Copy the newest snapshot of a machine, at most 20 MiB per second",
            line: "holdfast copy -r /backup/vms --to /offsite/vms web1 --bwlimit 20M",
        },
        Example {
            wish: "Copy the snapshots of a machine back",
            line: "holdfast copy -r /offsite/vms --to /backup/vms --machine web1 --again",
        },
        Example {
            wish: "Compare both sides, and see how far the target is behind",
            line: "holdfast copy -r /backup/vms --to /offsite/vms --status",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

fn run(args: &CopyArgs, context: &Context) -> Result<Exit, Error> {
    holdfast_engine::lower_priority();
    let wanted = ListRequest {
        machines: args.what.machines.clone(),
        tags: args.what.tags.clone(),
    };
    let is_all = wanted.machines.is_empty() && wanted.tags.is_empty();
    if args.what.all && !is_all {
        return Err(Error::usage(
            "--all selects all snapshots, so it does not go with --machine and --tag",
            "remove --all, or remove --machine and --tag",
        ));
    }
    let selection = match references(&args.what.snapshots)? {
        names if !names.is_empty() => CopySelection::Named(names),
        _ if args.status || args.what.all || !is_all => CopySelection::Matching(wanted.clone()),
        _ => {
            return Err(Error::usage(
                "no snapshots are selected",
                "name snapshots, or use --all, --machine NAME or --tag TAG",
            ));
        }
    };
    let (from, to) = open_both(args, context)?;
    if args.status {
        let status = context.work(1, |job| copy_status(&from, &to, &wanted, job))?;
        return context.report(&Compared::new(status, to.describe(), context.zone()));
    }
    let execution = crate::args::Switch::execution(args.dry_run);
    let request = CopyRequest {
        selection,
        removed: if args.what.again {
            RemovedThere::ComeBack
        } else {
            RemovedThere::StayAway
        },
        execution,
        bytes_per_second: args.bwlimit,
        zone: context.zone().clone(),
    };
    let report = context.work(args.job.thread_count(), |job| copy(&from, &to, &request, job))?;
    context.report(&CopyDone::new(&report, execution, to.describe(), context.zone()))
}

/// The snapshots of the names. A name of a single disk is an error.
fn references(names: &[SnapshotName]) -> Result<Vec<holdfast_engine::SnapshotReference>, Error> {
    if let Some(SnapshotName { disk: Some(disk), .. }) = names.iter().find(|name| name.disk.is_some()) {
        return Err(Error::usage(
            format!("disk {disk} is named, and snapshots are copied whole"),
            "name the snapshot only",
        ));
    }
    Ok(names.iter().map(|name| name.snapshot.clone()).collect())
}

/// Opens both repositories. They must be different.
fn open_both(args: &CopyArgs, context: &Context) -> Result<(Repository, Repository), Error> {
    let location = context.location()?;
    let other = context.other_location(args.to.as_deref())?;
    if is_same_place(&location, &other) {
        return Err(Error::usage(
            "the repository to copy to is the one to copy from",
            "choose another --to",
        ));
    }
    let source = context.password_to(args.to.as_deref(), &args.to_password)?;
    let from = context.open_repository()?;
    let options = "--to-password-file FILE or --to-password-command COMMAND, set HOLDFAST_TO_PASSWORD_FILE or \
                   HOLDFAST_TO_PASSWORD_COMMAND, or add the systemd credential holdfast.to-password";
    let to = context.open_other(&other, &source, options)?;
    Ok((from, to))
}
