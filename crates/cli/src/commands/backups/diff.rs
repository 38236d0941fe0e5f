//! `holdfast diff`: shows the changes between two snapshots.

use holdfast_engine::{DiffReport, DiffRequest, SnapshotName, diff};
use serde::Serialize;

use crate::args::{Example, JobArgs};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Column, Format, Page, Report, Table};
use crate::units;

/// Maximum number of ranges of each disk in a document.
const RANGE_COUNT_MAX: usize = 100_000;

/// Arguments of `diff`.
#[derive(Debug, clap::Args)]
pub(crate) struct DiffArgs {
    /// The earlier snapshot, and with :DISK one of its disks
    #[arg(value_name = "OLD[:DISK]")]
    old: SnapshotName,
    /// The later snapshot, and with :DISK one of its disks
    #[arg(value_name = "NEW[:DISK]")]
    new: SnapshotName,
    /// List the ranges that differ, in bytes: first byte and length
    #[arg(long)]
    ranges: bool,
    #[command(flatten)]
    job: JobArgs,
}

impl Verb for DiffArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See how much a machine wrote since yesterday",
            line: "holdfast diff -r /backup/vms web1@2026-11-19 web1",
        },
        Example {
            wish: "List the ranges of one disk that differ",
            line: "holdfast diff -r /backup/vms 3f2a9c1e:vda web1:vda --ranges",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `diff`.
#[derive(Debug, Serialize)]
struct Differences {
    old: String,
    new: String,
    disks: Vec<DiskDifferences>,
    #[serde(skip)]
    shows_ranges: bool,
}

#[derive(Debug, Serialize)]
struct DiskDifferences {
    name: String,
    old_bytes: Option<u64>,
    new_bytes: Option<u64>,
    changed_bytes: u64,
    range_count: u64,
    /// Pairs of first byte and length, limited to the first ones.
    ranges: Vec<[u64; 2]>,
}

impl From<DiffReport> for Differences {
    fn from(report: DiffReport) -> Self {
        let disks = report.disks.into_iter().map(|disk| DiskDifferences {
            name: disk.name,
            old_bytes: disk.old_bytes,
            new_bytes: disk.new_bytes,
            changed_bytes: disk.changed_bytes,
            range_count: disk.range_count,
            ranges: disk
                .ranges
                .iter()
                .map(|range| [range.start, range.end - range.start])
                .collect(),
        });
        Self {
            old: report.old.id.to_string(),
            new: report.new.id.to_string(),
            disks: disks.collect(),
            shows_ranges: false,
        }
    }
}

impl Report for Differences {
    fn command(&self) -> &'static str {
        "diff"
    }

    fn human(&self, page: &mut Page) {
        page.line(&format!("from snapshot {} to {}", &self.old[..8], &self.new[..8]));
        let mut table = Table::new([
            Column::long_text("DISK"),
            Column::number("OLD SIZE"),
            Column::number("NEW SIZE"),
            Column::number("CHANGED"),
            Column::number("RANGES"),
        ]);
        let size = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), units::bytes);
        for disk in &self.disks {
            let is_on_both = disk.old_bytes.is_some() && disk.new_bytes.is_some();
            let changed = if is_on_both {
                units::bytes(disk.changed_bytes)
            } else {
                "-".to_owned()
            };
            table.row([
                disk.name.clone(),
                size(disk.old_bytes),
                size(disk.new_bytes),
                changed,
                units::count(disk.range_count),
            ]);
        }
        page.table(&table);
        for disk in self.disks.iter().filter(|_| self.shows_ranges) {
            for [start, length] in &disk.ranges {
                page.line(&format!("{} {start} {length}", disk.name));
            }
            let more = disk.range_count - disk.ranges.len() as u64;
            if more > 0 {
                page.line(&format!("{} and {} more", disk.name, units::count(more)));
            }
        }
    }
}

fn run(args: &DiffArgs, context: &Context) -> Result<Exit, Error> {
    let repository = context.open_repository()?;
    let wants_ranges = args.ranges || context.output().format() == Format::Json;
    let request = DiffRequest {
        old: args.old.clone(),
        new: args.new.clone(),
        zone: context.zone().clone(),
        range_count_max: if wants_ranges { RANGE_COUNT_MAX } else { 0 },
    };
    let report = context.work(args.job.thread_count(), |job| diff(&repository, &request, job))?;
    let mut differences = Differences::from(report);
    differences.shows_ranges = args.ranges;
    context.report(&differences)
}
