//! `holdfast image compare`: compares the disks in two images.

use std::path::PathBuf;

use holdfast_engine::{CompareReport, compare};
use holdfast_image::Format;
use serde::Serialize;

use super::options::{GateArgs, open_whole};
use crate::args::parse_format;
use crate::args::{Example, JobArgs, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report, Style};
use crate::units;

/// Number of ranges shown as text.
const SHOWN_COUNT_MAX: usize = 20;

/// Arguments of `image compare`.
#[derive(Debug, clap::Args)]
pub(super) struct CompareArgs {
    /// An image
    #[arg(value_name = "IMAGE")]
    first: PathBuf,
    /// The image to compare it with
    #[arg(value_name = "OTHER")]
    second: PathBuf,
    /// Format of the first image (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels) [default: detected]
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// The format of the other image
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    other_format: Option<Format>,
    #[command(flatten)]
    gate: GateArgs,
    #[command(flatten)]
    job: JobArgs,
}

impl Verb for CompareArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Compare a copy with its original: exit code 0 if so, 1 if not",
        line: "holdfast image compare web1.qcow2 copy.raw",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `image compare`.
#[derive(Debug, Serialize)]
struct Answer {
    is_equal: bool,
    size_bytes: [u64; 2],
    first_difference: Option<u64>,
    different_bytes: u64,
    different_range_count: u64,
    different_ranges: Vec<DifferentRange>,
    compared_bytes: u64,
    duration_ms: u64,
}

#[derive(Debug, Serialize)]
struct DifferentRange {
    offset: u64,
    length_bytes: u64,
}

impl From<CompareReport> for Answer {
    fn from(report: CompareReport) -> Self {
        let range = |range: &std::ops::Range<u64>| DifferentRange {
            offset: range.start,
            length_bytes: range.end - range.start,
        };
        Self {
            is_equal: report.is_equal(),
            size_bytes: report.size_bytes,
            first_difference: report.first_difference,
            different_bytes: report.different_bytes,
            different_range_count: report.different_range_count,
            different_ranges: report.different_ranges.iter().map(range).collect(),
            compared_bytes: report.compared_bytes,
            duration_ms: units::millis(report.duration),
        }
    }
}

impl Report for Answer {
    fn command(&self) -> &'static str {
        "image compare"
    }

    fn exit(&self) -> Exit {
        if self.is_equal { Exit::Ok } else { Exit::Error }
    }

    fn human(&self, page: &mut Page) {
        let [first, second] = self.size_bytes;
        if first != second {
            page.line(&format!(
                "the disks have {first} and {second} bytes; what is missing counts as zero"
            ));
        }
        match self.first_difference {
            None => page.styled(Style::Good, "the disks are equal"),
            Some(offset) => {
                page.styled(Style::Bad, &format!("the disks differ, first at offset {offset}"));
                page.line(&format!(
                    "{} bytes differ, in {} ranges",
                    units::count(self.different_bytes),
                    units::count(self.different_range_count)
                ));
            }
        }
        for range in self.different_ranges.iter().take(SHOWN_COUNT_MAX) {
            page.line(&format!("  {} bytes at {}", range.length_bytes, range.offset));
        }
        let shown = self.different_ranges.len().min(SHOWN_COUNT_MAX) as u64;
        let more = self.different_range_count - shown;
        if more > 0 {
            page.line(&format!("  and {} more", units::count(more)));
        }
    }
}

fn run(args: &CompareArgs, context: &Context) -> Result<Exit, Error> {
    let first = open_whole(&args.first, &args.gate.open_options(args.format)?, context)?;
    let second = open_whole(&args.second, &args.gate.open_options(args.other_format)?, context)?;
    let report = context.work(args.job.thread_count(), |job| compare(&first, &second, job))?;
    context.report(&Answer::from(report))
}
