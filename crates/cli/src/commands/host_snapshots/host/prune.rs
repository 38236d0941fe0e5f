//! `holdfast host prune`: removes the host snapshots that no rule keeps.

use std::ffi::OsString;

use holdfast_engine::{HostPruneRequest, HostPruneTarget, PrunedSeries, prune_host_snapshots, series_name};
use holdfast_policy::Verdict;
use serde::Serialize;

use super::{Meant, datasets_of, meant};
use crate::args::Switch as _;
use crate::args::{Example, RetentionArgs, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::datasets;
use crate::machines::states::StateArgs;
use crate::output::{Column, Page, Report, Style, Table};
use crate::process::time;
use crate::units;

/// Arguments of `host prune`.
#[derive(Debug, clap::Args)]
pub(super) struct HostPruneArgs {
    /// Of these: machines, or datasets with the host snapshots of all machines in them
    #[arg(value_name = "DATASET|MACHINE", required = true)]
    targets: Vec<OsString>,
    /// Show which snapshots would be removed, and why the others stay; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    retention: RetentionArgs,
    #[command(flatten)]
    states: StateArgs,
    /// The hypervisor's address: qemu:///system, qemu:///session, qemu+ssh://HOST/system
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
}

impl Verb for HostPruneArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See which snapshots would be removed, and why the others stay",
            line: "holdfast host prune web1 --keep-hourly 24 --keep-daily 7 --dry-run",
        },
        Example {
            wish: "Remove it, of all machines in a subvolume",
            line: "holdfast host prune /srv/vms --keep-hourly 24 --keep-daily 7",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `host prune`.
#[derive(Debug, Serialize)]
struct HostPruned {
    dry_run: bool,
    kept_count: u64,
    removed_count: u64,
    series: Vec<SeriesDocument>,
}

#[derive(Debug, Serialize)]
struct SeriesDocument {
    dataset: String,
    /// The common prefix of its host snapshots' names.
    series: String,
    snapshots: Vec<HostDecisionDocument>,
}

#[derive(Debug, Serialize)]
struct HostDecisionDocument {
    name: String,
    time: String,
    #[serde(skip)]
    time_local: String,
    /// Whether a rule keeps it.
    keep: bool,
    reasons: Vec<String>,
    /// Why it stays although no rule keeps it; null if it is removed.
    obstacle: Option<String>,
}

impl Report for HostPruned {
    fn command(&self) -> &'static str {
        "host prune"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn exit(&self) -> Exit {
        let mut all = self.series.iter().flat_map(|series| &series.snapshots);
        if all.any(|snapshot| snapshot.obstacle.is_some()) {
            Exit::Warnings
        } else {
            Exit::Ok
        }
    }

    fn human(&self, page: &mut Page) {
        for series in &self.series {
            page.styled(Style::Heading, &format!("{}: {}", series.dataset, series.series));
            let mut table = Table::new([
                Column::long_text("SNAPSHOT"),
                Column::text("TIME"),
                Column::text("PLAN"),
                Column::long_text("WHY"),
            ]);
            for one in &series.snapshots {
                let (style, plan, why) = match (&one.obstacle, one.keep) {
                    (Some(why), _) => (Style::Bad, "stays", why.clone()),
                    (None, true) => (Style::Plain, "keep", one.reasons.join("; ")),
                    (None, false) => (Style::Warning, "remove", one.reasons.join("; ")),
                };
                table.styled_row([
                    (Style::Plain, one.name.clone()),
                    (Style::Plain, one.time_local.clone()),
                    (style, plan.to_owned()),
                    (Style::Plain, why),
                ]);
            }
            page.table(&table);
            page.gap();
        }
        let removed = units::counted(self.removed_count, "host snapshot", "host snapshots");
        let kept = units::count(self.kept_count);
        page.line(&match (self.dry_run, self.removed_count) {
            (true, _) => format!("would remove {removed} and keep {kept}; nothing was changed"),
            (false, 0) => format!("removed no host snapshot, kept {kept}"),
            (false, _) => format!("removed {removed}, kept {kept}"),
        });
    }
}

fn run(args: &HostPruneArgs, context: &Context) -> Result<Exit, Error> {
    let providers = datasets::providers(context);
    let request = HostPruneRequest {
        providers: &providers,
        targets: targets(args, context)?,
        policy: args.retention.policy(),
        now: time::now(),
        zone: context.zone().clone(),
        execution: args.dry_run.execution(),
    };
    let report = context.work(1, |job| {
        let report = prune_host_snapshots(&request, job)?;
        if !args.dry_run {
            args.states.sweep(&providers, context, job);
        }
        Ok(report)
    })?;
    let series: Vec<SeriesDocument> = report.series.iter().map(|one| document(one, context)).collect();
    let count: u64 = series.iter().map(|one| one.snapshots.len() as u64).sum();
    context.report(&HostPruned {
        dry_run: args.dry_run,
        kept_count: count - report.removed_count,
        removed_count: report.removed_count,
        series,
    })
}

/// The selected series: all series of a dataset; of a machine its own series in all datasets.
fn targets(args: &HostPruneArgs, context: &Context) -> Result<Vec<HostPruneTarget>, Error> {
    let mut targets = Vec::new();
    for meant in meant(&args.targets, args.connect.as_deref(), context)? {
        match meant {
            Meant::Dataset(dataset) => targets.push(HostPruneTarget { dataset, series: None }),
            Meant::Machine(guest) => {
                let series = series_name(Some(&guest.description.summary.name));
                targets.extend(datasets_of(&guest).map(|dataset| HostPruneTarget {
                    dataset,
                    series: Some(series.clone()),
                }));
            }
        }
    }
    Ok(targets)
}

fn document(series: &PrunedSeries, context: &Context) -> SeriesDocument {
    let decisions = series.plan.decisions().iter().map(|decision| HostDecisionDocument {
        name: decision.candidate.id.clone(),
        time: decision.candidate.time.to_string(),
        time_local: time::local(decision.candidate.time, context.zone()),
        keep: decision.verdict == Verdict::Keep,
        reasons: decision.reasons.iter().map(ToString::to_string).collect(),
        obstacle: series.obstacles.get(&decision.candidate.id).cloned(),
    });
    SeriesDocument {
        dataset: series.dataset.to_string(),
        series: series.series.clone(),
        snapshots: decisions.collect(),
    }
}
