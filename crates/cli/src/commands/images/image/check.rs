//! `holdfast image check`: checks whether the metadata of an image is consistent, and repairs it.

use std::path::PathBuf;

use holdfast_image::{CheckReport, Format, RepairAction, RepairIntent, RepairMode, Severity, plan_repair};
use serde::Serialize;

use super::options::GateArgs;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report, Style};
use crate::units;

/// Arguments of `image check`.
#[derive(Debug, clap::Args)]
pub(super) struct ImageCheckArgs {
    /// The image
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Format (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels) [default: detected]
    #[arg(long, value_name = "FORMAT", value_parser = crate::args::parse_format)]
    format: Option<Format>,
    /// Repair what is found: MODE is how far [default: safe]
    #[arg(
        long,
        value_name = "MODE",
        value_enum,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "safe"
    )]
    repair: Option<HowFar>,
    /// Only show what would be repaired
    #[arg(short = 'n', long, requires = "repair")]
    dry_run: bool,
    #[command(flatten)]
    gate: GateArgs,
}

/// How far a repair goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum HowFar {
    /// Free leaked space
    Leaks,
    /// Repair what can be repaired without risk
    Safe,
    /// Also drop references to missing data: these ranges read as zero afterwards
    All,
}

impl HowFar {
    fn name(self) -> &'static str {
        match self {
            Self::Leaks => "leaks",
            Self::Safe => "safe",
            Self::All => "all",
        }
    }
}

impl From<HowFar> for RepairMode {
    fn from(far: HowFar) -> Self {
        match far {
            HowFar::Leaks => Self::Leaks,
            HowFar::Safe => Self::Safe,
            HowFar::All => Self::All,
        }
    }
}

impl Verb for ImageCheckArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Check for damage: exit code 0 if there is none, 3 if space is wasted, 5 if data is at risk",
            line: "holdfast image check web1.qcow2",
        },
        Example {
            wish: "See what could be repaired",
            line: "holdfast image check web1.qcow2 --repair --dry-run",
        },
        Example {
            wish: "Repair what can be repaired without risk",
            line: "holdfast image check web1.qcow2 --repair",
        },
        Example {
            wish: "Also drop references to missing data, if there is no snapshot to restore",
            line: "holdfast image check web1.qcow2 --repair=all",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `image check`.
#[derive(Debug, Serialize)]
struct ImageChecked {
    corruption_count: u64,
    leak_count: u64,
    problems: Vec<Problem>,
    cluster_count: u64,
    allocated_count: u64,
    compressed_count: u64,
    image_end_bytes: u64,
    repair: Option<ImageRepaired>,
}

#[derive(Debug, Serialize)]
struct Problem {
    /// "leak" or "corruption".
    severity: &'static str,
    message: String,
    /// The number of problems that this entry counts for.
    #[serde(skip)]
    count: u64,
}

/// What a repair did or would do.
#[derive(Debug, Serialize)]
struct ImageRepaired {
    mode: &'static str,
    is_dry_run: bool,
    actions: Vec<Action>,
    corruption_count: u64,
    leak_count: u64,
    problems: Vec<Problem>,
}

#[derive(Debug, Serialize)]
struct Action {
    name: &'static str,
    message: String,
    loses_data: bool,
}

impl From<&RepairAction> for Action {
    fn from(action: &RepairAction) -> Self {
        Self {
            name: action.name(),
            message: action.to_string(),
            loses_data: action.loses_data(),
        }
    }
}

impl From<&holdfast_image::Problem> for Problem {
    fn from(problem: &holdfast_image::Problem) -> Self {
        Self {
            severity: match problem.severity {
                Severity::Leak => "leak",
                Severity::Corruption => "corruption",
            },
            message: problem.kind.to_string(),
            count: problem.count(),
        }
    }
}

impl ImageChecked {
    fn of(report: &CheckReport, repair: Option<ImageRepaired>) -> Self {
        Self {
            corruption_count: report.corruption_count,
            leak_count: report.leak_count,
            problems: report.problems.iter().map(Problem::from).collect(),
            cluster_count: report.cluster_count,
            allocated_count: report.allocated_count,
            compressed_count: report.compressed_count,
            image_end_bytes: report.image_end,
            repair,
        }
    }
}

/// Exit code for the remaining problems.
fn exit_of(corruption_count: u64, leak_count: u64) -> Exit {
    match (corruption_count, leak_count) {
        (0, 0) => Exit::Ok,
        (0, _) => Exit::Warnings,
        _ => Exit::Damage,
    }
}

fn list_problems(page: &mut Page, problems: &[Problem], corruption_count: u64, leak_count: u64) {
    for problem in problems {
        let style = match problem.severity {
            "leak" => Style::Warning,
            _ => Style::Bad,
        };
        page.styled(style, &format!("{}: {}", problem.severity, problem.message));
    }
    let more = (corruption_count + leak_count).saturating_sub(problems.iter().map(|problem| problem.count).sum());
    if more > 0 {
        page.line(&format!("and {} more", units::count(more)));
    }
    if corruption_count + leak_count == 0 {
        page.styled(Style::Good, "no contradictions");
    } else {
        page.line(&format!(
            "{} corruptions, {} leaked clusters",
            units::count(corruption_count),
            units::count(leak_count)
        ));
    }
}

impl ImageRepaired {
    fn human(&self, page: &mut Page, is_clean: bool) {
        let word = if self.is_dry_run {
            "would be repaired"
        } else {
            "repaired"
        };
        for action in &self.actions {
            let style = if action.loses_data { Style::Warning } else { Style::Good };
            page.styled(style, &format!("{word}: {}", action.message));
        }
        let is_mended = self.corruption_count + self.leak_count == 0;
        if self.actions.is_empty() && !is_clean {
            page.line("nothing of that can be repaired in this way: the image is as it was");
        } else if is_mended && !is_clean {
            let word = if self.is_dry_run {
                "nothing would be left"
            } else {
                "nothing is left"
            };
            page.styled(Style::Good, word);
        } else if !is_mended {
            let word = if self.is_dry_run {
                "what would be left:"
            } else {
                "what is left:"
            };
            page.line(word);
            list_problems(page, &self.problems, self.corruption_count, self.leak_count);
        }
        if !is_mended && self.mode == "leaks" {
            page.line("--repair does more, and loses nothing either");
        } else if !is_mended && self.mode == "safe" {
            page.line(
                "--repair=all does more, and gives up what cannot be saved: see what with --dry-run, and keep a copy",
            );
        }
    }
}

impl Report for ImageChecked {
    fn command(&self) -> &'static str {
        "image check"
    }

    /// The exit code for the remaining problems; without a repair these are all problems found.
    fn exit(&self) -> Exit {
        match &self.repair {
            Some(repair) if !repair.is_dry_run => exit_of(repair.corruption_count, repair.leak_count),
            _ => exit_of(self.corruption_count, self.leak_count),
        }
    }

    fn human(&self, page: &mut Page) {
        list_problems(page, &self.problems, self.corruption_count, self.leak_count);
        page.line(&format!(
            "{} of {} clusters are stored, {} of them compressed",
            units::count(self.allocated_count),
            units::count(self.cluster_count),
            units::count(self.compressed_count)
        ));
        if let Some(repair) = &self.repair {
            repair.human(page, self.corruption_count + self.leak_count == 0);
        }
    }
}

/// Checks an image, and repairs it on request.
fn run(args: &ImageCheckArgs, context: &Context) -> Result<Exit, Error> {
    let options = args.gate.open_options(args.format)?;
    let Some(mode) = args.repair else {
        let report = holdfast_image::check(&args.image, &options).map_err(holdfast_engine::Error::from)?;
        return context.report(&ImageChecked::of(&report, None));
    };
    let intent = if args.dry_run {
        RepairIntent::Look
    } else {
        RepairIntent::Repair
    };
    let plan = plan_repair(&args.image, &options, mode.into(), intent).map_err(holdfast_engine::Error::from)?;
    let (before, actions) = (plan.before().clone(), plan.actions().to_vec());
    let after = if args.dry_run || actions.is_empty() {
        plan.after().clone()
    } else {
        plan.execute().map_err(holdfast_engine::Error::from)?
    };
    let repaired = ImageRepaired {
        mode: mode.name(),
        is_dry_run: args.dry_run,
        actions: actions.iter().map(Action::from).collect(),
        corruption_count: after.corruption_count,
        leak_count: after.leak_count,
        problems: after.problems.iter().map(Problem::from).collect(),
    };
    context.report(&ImageChecked::of(&before, Some(repaired)))
}
