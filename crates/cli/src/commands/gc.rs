//! `holdfast gc`: give back the space of what no snapshot needs.

use holdfast_engine::{GcOutcome, gc};
use holdfast_repo::{GcPlan, GcReport};
use serde::Serialize;

use crate::args::{Example, JobArgs};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};
use crate::units;

/// Arguments of `gc`.
#[derive(Debug, clap::Args)]
pub struct GcArgs {
    /// Show what would be given back; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Rewrite packs of which at most this share is needed; 0 rewrites none
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    repack_below: u8,
    #[command(flatten)]
    job: JobArgs,
}

/// What a person may want of it.
pub(super) const EXAMPLES: &[Example] = &[
    Example {
        wish: "Give back space after prune or forget",
        line: "holdfast gc -r /backup/vms",
    },
    Example {
        wish: "See how much that would be",
        line: "holdfast gc -r /backup/vms --dry-run",
    },
];

/// What `gc` answers.
#[derive(Debug, Serialize)]
struct Collected {
    dry_run: bool,
    plan: PlanDocument,
    #[serde(skip_serializing_if = "Option::is_none")]
    done: Option<DoneDocument>,
}

#[derive(Debug, Serialize)]
struct PlanDocument {
    dead_pack_count: u64,
    dead_bytes: u64,
    sparse_pack_count: u64,
    sparse_bytes: u64,
    live_pack_count: u64,
    live_bytes: u64,
    writers: Vec<String>,
}

#[derive(Debug, Serialize)]
struct DoneDocument {
    deleted_pack_count: u64,
    freed_bytes: u64,
    rewritten_bytes: u64,
    unfinished_bytes: u64,
    cleared_writers: Vec<String>,
    waiting_for: Vec<String>,
    damaged: Vec<String>,
}

impl From<GcPlan> for PlanDocument {
    fn from(plan: GcPlan) -> Self {
        Self {
            dead_pack_count: plan.dead_pack_count,
            dead_bytes: plan.dead_bytes,
            sparse_pack_count: plan.sparse_pack_count,
            sparse_bytes: plan.sparse_bytes,
            live_pack_count: plan.live_pack_count,
            live_bytes: plan.live_bytes,
            writers: plan.writers,
        }
    }
}

impl From<GcReport> for Collected {
    fn from(report: GcReport) -> Self {
        Self {
            dry_run: false,
            plan: report.plan.into(),
            done: Some(DoneDocument {
                deleted_pack_count: report.deleted_pack_count,
                freed_bytes: report.freed_bytes,
                rewritten_bytes: report.rewritten_bytes,
                unfinished_bytes: report.unfinished_bytes,
                cleared_writers: report.cleared_writers,
                waiting_for: report.waiting_for,
                damaged: report.damaged,
            }),
        }
    }
}

impl Report for Collected {
    fn command(&self) -> &'static str {
        "gc"
    }

    fn exit(&self) -> Exit {
        match &self.done {
            Some(done) if !done.damaged.is_empty() => Exit::Damage,
            _ => Exit::Ok,
        }
    }

    fn human(&self, page: &mut Page) {
        let plan = &self.plan;
        let packs = |count, bytes| format!("{}, {}", units::counted(count, "pack", "packs"), units::bytes(bytes));
        page.fields(&[
            ("needed by nobody", packs(plan.dead_pack_count, plan.dead_bytes)),
            ("needed in part", packs(plan.sparse_pack_count, plan.sparse_bytes)),
            ("needed", packs(plan.live_pack_count, plan.live_bytes)),
        ]);
        let Some(done) = &self.done else {
            for writer in &plan.writers {
                page.line(&format!("at work: {writer}"));
            }
            page.line("nothing was changed");
            return;
        };
        for writer in &done.cleared_writers {
            page.line(&format!("cleared away what is left of {writer}"));
        }
        page.line(&format!(
            "gave back {} ({} deleted, {} rewritten)",
            units::bytes(done.freed_bytes),
            units::counted(done.deleted_pack_count, "pack", "packs"),
            units::bytes(done.rewritten_bytes)
        ));
        if done.unfinished_bytes > 0 {
            page.line(&format!(
                "removed {} that dead writers had begun to store",
                units::bytes(done.unfinished_bytes)
            ));
        }
        for writer in &done.waiting_for {
            page.line(&format!("the rest follows when this has ended: {writer}"));
        }
    }
}

/// Gives back space.
pub(super) fn run(args: &GcArgs, context: &Context) -> Result<Exit, Error> {
    let repository = context.open_repository()?;
    let execution = super::execution(args.dry_run);
    let outcome = context.work(args.job.thread_count(), |job| {
        gc(&repository, args.repack_below, execution, job)
    })?;
    context.report(&match outcome {
        GcOutcome::Done(report) => Collected::from(report),
        GcOutcome::Planned(plan) => Collected {
            dry_run: true,
            plan: plan.into(),
            done: None,
        },
    })
}
