//! `holdfast prune`: removes the snapshots that no rule keeps, or simulates the rules.

mod simulation;
mod timeline;

use holdfast_engine::{Gaps, MachinePlan, PruneRequest, prune};
use holdfast_policy::{Glob, Verdict};
use serde::Serialize;
use simulation::SimulateArgs;

use crate::args::{Example, JobArgs, RetentionArgs};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Column, Page, Report, Style, Table};
use crate::process::time;
use crate::units;

/// Arguments of `prune`.
#[derive(Debug, clap::Args)]
pub(crate) struct PruneArgs {
    /// Only these machines, by name or pattern ('web*') [default: all]
    #[arg(value_name = "MACHINE", value_parser = Glob::parse)]
    machines: Vec<Glob>,
    /// Show which snapshots would be removed, and why the others stay; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Also prune machines by age whose newest snapshot is more than a year younger than the one before it
    #[arg(long, conflicts_with = "simulate")]
    accept_gaps: bool,
    #[command(flatten)]
    simulate: SimulateArgs,
    #[command(flatten)]
    retention: RetentionArgs,
    #[command(flatten)]
    job: JobArgs,
}

impl Verb for PruneArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Try retention rules without a repository",
            line: "holdfast prune --simulate --days 90 --every hourly --keep-hourly 24 --keep-daily 14 --keep-weekly 8",
        },
        Example {
            wish: "See which snapshots would be removed, and why the others stay",
            line: "holdfast prune -r /backup/vms --keep-daily 7 --keep-weekly 4 --keep-monthly 12 --dry-run",
        },
        Example {
            wish: "Remove it; holdfast gc then frees its space",
            line: "holdfast prune -r /backup/vms --keep-daily 7 --keep-weekly 4 --keep-monthly 12",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `prune`.
#[derive(Debug, Serialize)]
struct Pruned {
    dry_run: bool,
    kept_count: u64,
    removed_count: u64,
    machines: Vec<PrunedMachine>,
}

#[derive(Debug, Serialize)]
struct PrunedMachine {
    machine: String,
    /// Distinguishes it from other machines of its name; null if it is the only one.
    distinction: Option<String>,
    snapshots: Vec<DecisionDocument>,
}

#[derive(Debug, Serialize)]
struct DecisionDocument {
    id: String,
    time: String,
    #[serde(skip)]
    time_local: String,
    /// Whether it is kept.
    keep: bool,
    reasons: Vec<String>,
}

impl Report for Pruned {
    fn command(&self) -> &'static str {
        "prune"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        for machine in &self.machines {
            page.styled(
                Style::Heading,
                &match &machine.distinction {
                    Some(distinction) => format!("{} ({distinction})", machine.machine),
                    None => machine.machine.clone(),
                },
            );
            let mut table = Table::new([
                Column::text("SNAPSHOT"),
                Column::text("TIME"),
                Column::text("PLAN"),
                Column::long_text("WHY"),
            ]);
            for decision in &machine.snapshots {
                let (style, plan) = if decision.keep {
                    (Style::Plain, "keep")
                } else {
                    (Style::Warning, "remove")
                };
                table.styled_row([
                    (Style::Plain, decision.id[..8].to_owned()),
                    (Style::Plain, decision.time_local.clone()),
                    (style, plan.to_owned()),
                    (Style::Plain, decision.reasons.join("; ")),
                ]);
            }
            page.table(&table);
            page.gap();
        }
        let removed = units::counted(self.removed_count, "snapshot", "snapshots");
        let kept = units::count(self.kept_count);
        page.line(&match (self.dry_run, self.removed_count) {
            (true, _) => format!("would remove {removed} and keep {kept}; nothing was changed"),
            (false, 0) => format!("removed no snapshot, kept {kept}"),
            (false, _) => format!("removed {removed}, kept {kept}; holdfast gc frees their space"),
        });
    }
}

fn run(args: &PruneArgs, context: &Context) -> Result<Exit, Error> {
    holdfast_engine::lower_priority();
    if args.simulate.simulate {
        return simulation::run(&args.simulate, &args.retention.policy(), context);
    }
    let repository = context.open_repository()?;
    let request = PruneRequest {
        policy: args.retention.policy(),
        machines: args.machines.clone(),
        now: time::now(),
        zone: context.zone().clone(),
        execution: crate::args::Switch::execution(args.dry_run),
        gaps: if args.accept_gaps { Gaps::Accept } else { Gaps::Keep },
    };
    let report = context.work(args.job.thread_count(), |job| prune(&repository, &request, job))?;
    let machines: Vec<PrunedMachine> = report
        .machines
        .iter()
        .map(|machine| document(machine, context))
        .collect();
    let count: u64 = machines.iter().map(|machine| machine.snapshots.len() as u64).sum();
    context.report(&Pruned {
        dry_run: args.dry_run,
        kept_count: count - report.removed_count,
        removed_count: report.removed_count,
        machines,
    })
}

fn document(machine: &MachinePlan, context: &Context) -> PrunedMachine {
    let decisions = machine.plan.decisions().iter().map(|decision| DecisionDocument {
        id: decision.candidate.id.clone(),
        time: decision.candidate.time.to_string(),
        time_local: time::local(decision.candidate.time, context.zone()),
        keep: decision.verdict == Verdict::Keep,
        reasons: decision.reasons.iter().map(ToString::to_string).collect(),
    });
    PrunedMachine {
        machine: machine.machine.clone(),
        distinction: machine.distinction.as_ref().map(ToString::to_string),
        snapshots: decisions.collect(),
    }
}
