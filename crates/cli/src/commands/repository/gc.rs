//! `holdfast gc`: frees the space of data that no snapshot uses.

use holdfast_engine::{AcceptedName, GcOutcome, accept_loss, gc};
use holdfast_repo::{GcPlan, GcReport};
use serde::Serialize;

use crate::args::{Example, JobArgs};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report, Style};
use crate::units;

/// Arguments of `gc`.
#[derive(Debug, clap::Args)]
pub(crate) struct GcArgs {
    /// Show how much would be freed; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Rewrite packs of which at most this percentage is in use; 0 rewrites none
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    repack_below: u8,
    /// Accept the loss of a snapshot (start of its id), or of everything lost (all); this is recorded
    #[arg(long, value_name = "SNAPSHOT|all", value_parser = parse_accepted, conflicts_with = "dry_run")]
    accept_loss: Vec<AcceptedName>,
    #[command(flatten)]
    job: JobArgs,
}

/// `all`, or the start of a snapshot's id.
fn parse_accepted(text: &str) -> Result<AcceptedName, String> {
    const DIGITS_MIN: usize = 4;
    if text == "all" {
        return Ok(AcceptedName::All);
    }
    let is_id = text.len() >= DIGITS_MIN && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if is_id {
        Ok(AcceptedName::Snapshot(text.to_owned()))
    } else {
        Err("use all, or at least four digits of the id of a lost snapshot".to_owned())
    }
}

impl Verb for GcArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Free space after prune or forget",
            line: "holdfast gc -r /backup/vms",
        },
        Example {
            wish: "See how much would be freed",
            line: "holdfast gc -r /backup/vms --dry-run",
        },
        Example {
            wish: "Give up a snapshot that was lost and that repair cannot bring back",
            line: "holdfast gc -r /backup/vms --accept-loss 3fa94c21",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `gc`.
#[derive(Debug, Serialize)]
struct Collected {
    dry_run: bool,
    plan: PlanDocument,
    /// Losses accepted by this run.
    accepted: Vec<String>,
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
    /// Missing packs that snapshots need.
    missing_packs: Vec<String>,
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
            missing_packs: plan.missing_packs.iter().map(ToString::to_string).collect(),
        }
    }
}

impl From<GcReport> for Collected {
    fn from(report: GcReport) -> Self {
        Self {
            dry_run: false,
            plan: report.plan.into(),
            accepted: Vec::new(),
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

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn exit(&self) -> Exit {
        match &self.done {
            _ if !self.plan.missing_packs.is_empty() => Exit::Damage,
            Some(done) if !done.damaged.is_empty() => Exit::Damage,
            _ => Exit::Ok,
        }
    }

    fn human(&self, page: &mut Page) {
        let plan = &self.plan;
        let packs = |count, bytes| format!("{}, {}", units::counted(count, "pack", "packs"), units::bytes(bytes));
        page.fields(&[
            ("unused", packs(plan.dead_pack_count, plan.dead_bytes)),
            ("partly used", packs(plan.sparse_pack_count, plan.sparse_bytes)),
            ("used", packs(plan.live_pack_count, plan.live_bytes)),
        ]);
        for accepted in &self.accepted {
            page.line(&format!("given up: {accepted}"));
        }
        for pack in &plan.missing_packs {
            page.styled(Style::Bad, &format!("missing: pack {pack}, and snapshots need it"));
        }
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
            "freed {} ({} deleted, {} rewritten)",
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

fn run(args: &GcArgs, context: &Context) -> Result<Exit, Error> {
    holdfast_engine::lower_priority();
    let repository = context.open_repository()?;
    let execution = crate::args::Switch::execution(args.dry_run);
    let accepted = match &args.accept_loss[..] {
        [] => Vec::new(),
        names => context.work(args.job.thread_count(), |job| accept_loss(&repository, names, job))?,
    };
    let outcome = context.work(args.job.thread_count(), |job| {
        gc(&repository, args.repack_below, execution, job)
    })?;
    context.report(&match outcome {
        GcOutcome::Done(report) => Collected {
            accepted,
            ..Collected::from(report)
        },
        GcOutcome::Planned(plan) => Collected {
            dry_run: true,
            plan: plan.into(),
            accepted: Vec::new(),
            done: None,
        },
    })
}
