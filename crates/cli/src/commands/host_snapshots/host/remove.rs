//! `holdfast host remove`: removes host snapshots.

use std::ffi::OsString;

use holdfast_engine::{Execution, HostRemovalRequest, remove_host_snapshots};
use serde::Serialize;

use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::datasets;
use crate::machines::states::StateArgs;
use crate::output::{Page, Report, Style};
use crate::units;

/// Arguments of `host remove`.
#[derive(Debug, clap::Args)]
pub(super) struct HostRemoveArgs {
    /// Host snapshots: tank/vm@NAME, btrfs:/srv/vms@NAME, lvm:vg0/web1@NAME
    #[arg(value_name = "DATASET@NAME", required = true)]
    snapshots: Vec<OsString>,
    #[command(flatten)]
    states: StateArgs,
    /// Show what would be removed; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

impl Verb for HostRemoveArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See whether it can be removed, and its size",
            line: "holdfast host remove tank/vm@before-update --dry-run",
        },
        Example {
            wish: "Remove it",
            line: "holdfast host remove tank/vm@before-update",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `host remove`.
#[derive(Debug, Serialize)]
struct HostSnapshotsRemoved {
    dry_run: bool,
    snapshots: Vec<RemovedSnapshotDocument>,
}

#[derive(Debug, Serialize)]
struct RemovedSnapshotDocument {
    snapshot: String,
    /// Bytes that removing it alone would free; null if unknown.
    used_bytes: Option<u64>,
    /// Why it was not removed; null if it was.
    obstacle: Option<String>,
}

impl Report for HostSnapshotsRemoved {
    fn command(&self) -> &'static str {
        "host remove"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn exit(&self) -> Exit {
        let all_go = self.snapshots.iter().all(|snapshot| snapshot.obstacle.is_none());
        if all_go { Exit::Ok } else { Exit::Error }
    }

    fn human(&self, page: &mut Page) {
        for one in &self.snapshots {
            let room = one
                .used_bytes
                .map(|bytes| format!(", {} of its own", units::bytes(bytes)));
            match (&one.obstacle, self.dry_run) {
                (Some(why), _) => page.styled(Style::Bad, &format!("{} stays: {why}", one.snapshot)),
                (None, true) => page.line(&format!("would remove {}{}", one.snapshot, room.unwrap_or_default())),
                (None, false) => page.line(&format!("removed {}{}", one.snapshot, room.unwrap_or_default())),
            }
        }
    }
}

fn run(args: &HostRemoveArgs, context: &Context) -> Result<Exit, Error> {
    let providers = datasets::providers(context);
    let names = args.snapshots.iter().map(|word| datasets::parse_snapshot(word));
    let request = HostRemovalRequest {
        providers: &providers,
        snapshots: names.collect::<Result<_, Error>>()?,
        execution: if args.dry_run {
            Execution::DryRun
        } else {
            Execution::Execute
        },
    };
    let report = context.work(1, |job| {
        let report = remove_host_snapshots(&request, job)?;
        if !args.dry_run {
            args.states.sweep(&providers, context, job);
        }
        Ok(report)
    })?;
    let document = |removal: holdfast_engine::PlannedRemoval| RemovedSnapshotDocument {
        snapshot: removal.snapshot.name.to_string(),
        used_bytes: removal.snapshot.used_bytes,
        obstacle: removal.obstacle,
    };
    context.report(&HostSnapshotsRemoved {
        dry_run: args.dry_run,
        snapshots: report.removals.into_iter().map(document).collect(),
    })
}
