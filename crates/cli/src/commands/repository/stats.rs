//! `holdfast stats`: shows statistics of a repository.

use holdfast_engine::stats;
use holdfast_repo::Statistics;
use serde::Serialize;

use crate::args::Example;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report, Style};
use crate::units;

/// Arguments of `stats`.
#[derive(Debug, clap::Args)]
pub(crate) struct StatsArgs {}

impl Verb for StatsArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "See how well a repository stores its snapshots",
        line: "holdfast stats -r /backup/vms",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `stats`.
#[derive(Debug, Serialize)]
struct Figures {
    snapshot_count: u64,
    logical_bytes: u64,
    data_bytes: u64,
    unique_bytes: u64,
    stored_bytes: u64,
    data_pack_bytes: u64,
    tree_pack_bytes: u64,
    index_bytes: u64,
    dead_bytes: u64,
    chunk_count: u64,
    raw_bytes: u64,
    pack_count: u64,
    dedup_ratio: f64,
    compression_ratio: f64,
    /// Snapshots that disappeared without having been removed by Holdfast.
    lost: Vec<String>,
}

impl From<Statistics> for Figures {
    fn from(statistics: Statistics) -> Self {
        Self {
            dedup_ratio: statistics.dedup_ratio(),
            compression_ratio: statistics.compression_ratio(),
            snapshot_count: statistics.snapshot_count,
            logical_bytes: statistics.logical_bytes,
            data_bytes: statistics.data_bytes,
            unique_bytes: statistics.unique_bytes,
            stored_bytes: statistics.stored_bytes,
            data_pack_bytes: statistics.data_pack_bytes,
            tree_pack_bytes: statistics.tree_pack_bytes,
            index_bytes: statistics.index_bytes,
            dead_bytes: statistics.dead_bytes,
            chunk_count: statistics.chunk_count,
            raw_bytes: statistics.raw_bytes,
            pack_count: statistics.pack_count,
            lost: statistics.lost.iter().map(ToString::to_string).collect(),
        }
    }
}

impl Report for Figures {
    fn command(&self) -> &'static str {
        "stats"
    }

    fn exit(&self) -> Exit {
        if self.lost.is_empty() { Exit::Ok } else { Exit::Damage }
    }

    fn human(&self, page: &mut Page) {
        page.fields(&[
            ("snapshots", units::count(self.snapshot_count)),
            ("disks as plain images", units::bytes(self.logical_bytes)),
            ("their data", units::bytes(self.data_bytes)),
            (
                "each byte once",
                format!(
                    "{} ({:.1} times less)",
                    units::bytes(self.unique_bytes),
                    self.dedup_ratio
                ),
            ),
            (
                "compression",
                format!(
                    "{} became {} ({:.1} times less)",
                    units::bytes(self.raw_bytes),
                    units::bytes(self.data_pack_bytes),
                    self.compression_ratio
                ),
            ),
            (
                "the whole repository",
                format!(
                    "{} in {}; {} of it maps, {} index",
                    units::bytes(self.stored_bytes),
                    units::counted(self.pack_count, "pack", "packs"),
                    units::bytes(self.tree_pack_bytes),
                    units::bytes(self.index_bytes)
                ),
            ),
            (
                "needed by no snapshot",
                format!("{} before compression", units::bytes(self.dead_bytes)),
            ),
        ]);
        for lost in &self.lost {
            page.styled(Style::Bad, &format!("lost: {lost}"));
        }
    }
}

fn run(_args: &StatsArgs, context: &Context) -> Result<Exit, Error> {
    let repository = context.open_repository()?;
    let statistics = context.work(1, |job| stats(&repository, job))?;
    context.report(&Figures::from(statistics))
}
