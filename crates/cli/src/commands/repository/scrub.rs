//! `holdfast scrub`: reads all stored data to find damage before a restore needs it.

use holdfast_engine::scrub;
use serde::Serialize;

use crate::args::{Example, JobArgs};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::finding::{self, MonitorFinding, show};
use crate::output::{Page, Report, Style};
use crate::units;

/// Arguments of `scrub`.
#[derive(Debug, clap::Args)]
pub(crate) struct ScrubArgs {
    /// Percentage of the repository to read; the data that was not read for longest comes first
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u8).range(1..=100))]
    percent: u8,
    #[command(flatten)]
    job: JobArgs,
}

impl Verb for ScrubArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Read the whole repository and check it",
            line: "holdfast scrub -r /backup/vms",
        },
        Example {
            wish: "Read another twentieth every day",
            line: "holdfast scrub -r /backup/vms --percent 5",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `scrub`.
#[derive(Debug, Serialize)]
struct Scrubbed {
    pack_count: u64,
    pack_bytes: u64,
    read_pack_count: u64,
    read_bytes: u64,
    damaged_pack_count: u64,
    is_remembered: bool,
    duration_ms: u64,
    findings: Vec<MonitorFinding>,
    unlisted_finding_count: u64,
}

impl Report for Scrubbed {
    fn command(&self) -> &'static str {
        "scrub"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn exit(&self) -> Exit {
        finding::exit(&self.findings, self.unlisted_finding_count)
    }

    fn human(&self, page: &mut Page) {
        show(&self.findings, self.unlisted_finding_count, page);
        page.line(&format!(
            "read {} of {}, {} of {}, {}",
            units::count(self.read_pack_count),
            units::counted(self.pack_count, "pack", "packs"),
            units::bytes(self.read_bytes),
            units::bytes(self.pack_bytes),
            units::duration(std::time::Duration::from_millis(self.duration_ms))
        ));
        if !self.is_remembered {
            page.line("what was read is not remembered: the repository cannot be written");
        }
        if self.findings.is_empty() {
            page.styled(Style::Good, "everything that was read is as it was stored");
        }
    }
}

fn run(args: &ScrubArgs, context: &Context) -> Result<Exit, Error> {
    holdfast_engine::lower_priority();
    let repository = context.open_repository()?;
    let start = context.clock().now();
    let report = context.work(args.job.thread_count(), |job| scrub(&repository, args.percent, job))?;
    context.report(&Scrubbed {
        pack_count: report.pack_count,
        pack_bytes: report.pack_bytes,
        read_pack_count: report.read_pack_count,
        read_bytes: report.read_bytes,
        damaged_pack_count: report.damaged_pack_count,
        is_remembered: report.is_remembered,
        duration_ms: units::millis(context.clock().now().saturating_sub(start)),
        findings: report.findings.iter().map(MonitorFinding::from).collect(),
        unlisted_finding_count: report.unlisted_finding_count,
    })
}
