//! `holdfast image check`: whether the metadata of an image contradicts itself.

use std::path::PathBuf;

use holdfast_image::{CheckReport, Severity};
use serde::Serialize;

use super::options::GateArgs;
use crate::args::Example;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report, Style};
use crate::units;

/// Arguments of `image check`.
#[derive(Debug, clap::Args)]
pub(super) struct CheckArgs {
    /// The image
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    #[command(flatten)]
    gate: GateArgs,
}

/// What a person may want of it.
pub(super) const EXAMPLES: &[Example] = &[Example {
    wish: "Look for damage: exit code 0 if there is none, 3 if space is wasted, 5 if data is in danger",
    line: "holdfast image check web1.qcow2",
}];

/// What `image check` answers.
#[derive(Debug, Serialize)]
struct Checked {
    corruption_count: u64,
    leak_count: u64,
    problems: Vec<Problem>,
    cluster_count: u64,
    allocated_count: u64,
    compressed_count: u64,
    image_end_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Problem {
    /// "leak" or "corruption".
    severity: &'static str,
    message: String,
}

impl From<CheckReport> for Checked {
    fn from(report: CheckReport) -> Self {
        let problem = |problem: &holdfast_image::Problem| Problem {
            severity: match problem.severity {
                Severity::Leak => "leak",
                Severity::Corruption => "corruption",
            },
            message: problem.kind.to_string(),
        };
        Self {
            corruption_count: report.corruption_count,
            leak_count: report.leak_count,
            problems: report.problems.iter().map(problem).collect(),
            cluster_count: report.cluster_count,
            allocated_count: report.allocated_count,
            compressed_count: report.compressed_count,
            image_end_bytes: report.image_end,
        }
    }
}

impl Report for Checked {
    fn command(&self) -> &'static str {
        "image check"
    }

    fn exit(&self) -> Exit {
        match (self.corruption_count, self.leak_count) {
            (0, 0) => Exit::Ok,
            (0, _) => Exit::Warnings,
            _ => Exit::Damage,
        }
    }

    fn human(&self, page: &mut Page) {
        for problem in &self.problems {
            let style = match problem.severity {
                "leak" => Style::Warning,
                _ => Style::Bad,
            };
            page.styled(style, &format!("{}: {}", problem.severity, problem.message));
        }
        let told = self.problems.len() as u64;
        let more = (self.corruption_count + self.leak_count).saturating_sub(told);
        if more > 0 {
            page.line(&format!("and {} more", units::count(more)));
        }
        if self.exit() == Exit::Ok {
            page.styled(Style::Good, "no contradictions");
        } else {
            page.line(&format!(
                "{} corruptions, {} leaked clusters",
                units::count(self.corruption_count),
                units::count(self.leak_count)
            ));
        }
        page.line(&format!(
            "{} of {} clusters are stored, {} of them compressed",
            units::count(self.allocated_count),
            units::count(self.cluster_count),
            units::count(self.compressed_count)
        ));
    }
}

/// Checks an image.
pub(super) fn run(args: &CheckArgs, context: &Context) -> Result<Exit, Error> {
    let options = args.gate.open_options(None)?;
    let report = holdfast_image::check(&args.image, &options).map_err(holdfast_engine::Error::from)?;
    context.report(&Checked::from(report))
}
