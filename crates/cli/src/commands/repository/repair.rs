//! `holdfast repair`: repairs what can be repaired, and lists what is lost.

use holdfast_engine::{RepairOutcome, repair};
use holdfast_repo::RepairAction;
use serde::Serialize;

use crate::args::{Example, JobArgs};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::finding::{self, MonitorFinding, show};
use crate::output::{Page, Report, Style};
use crate::units;

/// Arguments of `repair`.
#[derive(Debug, clap::Args)]
pub(crate) struct RepairArgs {
    /// Show what would be done, and why; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Percentage of the repository to read first; 0 repairs only what scrub has found
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u8).range(0..=100))]
    percent: u8,
    #[command(flatten)]
    job: JobArgs,
}

impl Verb for RepairArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See what is damaged and what can be done",
            line: "holdfast repair -r /backup/vms --dry-run",
        },
        Example {
            wish: "Repair it; after new backups of the same machines, a second repair can restore more",
            line: "holdfast repair -r /backup/vms",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `repair`.
#[derive(Debug, Serialize)]
struct Repaired {
    dry_run: bool,
    actions: Vec<ActionDocument>,
    healed_bytes: u64,
    lost_bytes: u64,
    deleted_packs: Vec<String>,
    /// The present problems; after a repair the remaining ones.
    findings: Vec<MonitorFinding>,
    unlisted_finding_count: u64,
}

#[derive(Debug, Serialize)]
struct ActionDocument {
    action: String,
    reason: String,
}

impl From<&(RepairAction, String)> for ActionDocument {
    fn from(done: &(RepairAction, String)) -> Self {
        let (action, reason) = done;
        Self {
            action: describe(action),
            reason: reason.clone(),
        }
    }
}

fn describe(action: &RepairAction) -> String {
    match action {
        RepairAction::RestoreConfig => "write the configuration again".to_owned(),
        RepairAction::RestoreSnapshot { snapshot, copy } => {
            format!("write snapshot {} again from its copy in pack {copy}", snapshot.short())
        }
        RepairAction::RestoreRelocation { object } => format!("write {object} again from its copy"),
        RepairAction::Replace { object } => format!("replace {object}"),
        RepairAction::RebuildIndex { segments } => {
            format!(
                "write the index again, instead of {}",
                units::counted(segments.len() as u64, "segment", "segments")
            )
        }
        RepairAction::RecordLoss { pack } => format!("remember what is lost of pack {pack}"),
        RepairAction::Salvage { pack } => format!("save what is whole of pack {pack}"),
        RepairAction::DeletePack { pack } => format!("delete pack {pack}"),
        RepairAction::ForgetDamage { pack } => format!("forget the damage of pack {pack}"),
    }
}

impl Report for Repaired {
    fn command(&self) -> &'static str {
        "repair"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn exit(&self) -> Exit {
        finding::exit(&self.findings, self.unlisted_finding_count)
    }

    fn human(&self, page: &mut Page) {
        for action in &self.actions {
            let verb = if self.dry_run { "would" } else { "did" };
            page.line(&format!("{verb}: {} ({})", action.action, action.reason));
        }
        if !self.findings.is_empty() {
            let heading = if self.dry_run {
                "what is wrong"
            } else {
                "what is still wrong"
            };
            page.styled(Style::Heading, heading);
            show(&self.findings, self.unlisted_finding_count, page);
        }
        if self.dry_run {
            page.line("dry run: nothing was repaired");
        } else if self.actions.is_empty() && self.findings.is_empty() {
            page.styled(Style::Good, "nothing to repair");
        } else {
            page.line(&format!(
                "healed {}, {} are lost for now, {} deleted",
                units::bytes(self.healed_bytes),
                units::bytes(self.lost_bytes),
                units::counted(self.deleted_packs.len() as u64, "pack", "packs")
            ));
        }
        if self.lost_bytes > 0 {
            page.line("back up the same machines again, then repair once more: what is the same comes back");
        }
    }
}

fn run(args: &RepairArgs, context: &Context) -> Result<Exit, Error> {
    holdfast_engine::lower_priority();
    let repository = context.open_repository()?;
    let execution = crate::args::Switch::execution(args.dry_run);
    let outcome = context.work(args.job.thread_count(), |job| {
        repair(&repository, args.percent, execution, job)
    })?;
    let documents = |findings: &[holdfast_repo::Finding]| findings.iter().map(MonitorFinding::from).collect();
    context.report(&match outcome {
        RepairOutcome::Planned(plan) => Repaired {
            dry_run: true,
            actions: plan.actions.iter().map(ActionDocument::from).collect(),
            healed_bytes: 0,
            lost_bytes: 0,
            deleted_packs: Vec::new(),
            findings: documents(&plan.findings),
            unlisted_finding_count: plan.unlisted_finding_count,
        },
        RepairOutcome::Done(report) => Repaired {
            dry_run: false,
            actions: report.done.iter().map(ActionDocument::from).collect(),
            healed_bytes: report.healed_bytes,
            lost_bytes: report.lost_bytes,
            deleted_packs: report.deleted_packs.iter().map(ToString::to_string).collect(),
            findings: documents(&report.findings),
            unlisted_finding_count: report.unlisted_finding_count,
        },
    })
}
