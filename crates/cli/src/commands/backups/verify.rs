//! `holdfast verify`: checks whether snapshots can be read and their data is intact.

use std::collections::BTreeSet;
use std::path::PathBuf;

use holdfast_engine::{SnapshotName, VerifyImageAgainst, VerifyRequest, verify};
use holdfast_image::Format;
use holdfast_repo::{Finding, FindingKind, Repository, SnapshotId, VerifyDepth};
use serde::Serialize;

use crate::args::{Example, JobArgs};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::finding::{self, MonitorFinding, show};
use crate::output::{Page, Report, Style};
use crate::units;

/// Arguments of `verify`.
#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArgs {
    /// Snapshots [default: all]
    #[arg(value_name = "SNAPSHOT[:DISK]")]
    snapshots: Vec<SnapshotName>,
    /// Check only that all data exists; do not read it
    #[arg(long)]
    structure: bool,
    /// Also compare the disk of the given snapshot with this image, byte for byte
    #[arg(long, value_name = "IMAGE")]
    against: Option<PathBuf>,
    /// Format of the image to compare with [default: detected]
    #[arg(long, value_name = "FORMAT", value_parser = crate::args::parse_format, requires = "against")]
    format: Option<Format>,
    #[command(flatten)]
    job: JobArgs,
}

impl Verb for VerifyArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Read all snapshots and check every byte",
            line: "holdfast verify -r /backup/vms",
        },
        Example {
            wish: "Check that the newest snapshot of a machine equals an image",
            line: "holdfast verify -r /backup/vms web1 --against web1.raw",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `verify`.
#[derive(Debug, Serialize)]
struct Verified {
    snapshot_count: u64,
    logical_bytes: u64,
    frame_count: u64,
    decoded_bytes: u64,
    compared_bytes: u64,
    duration_ms: u64,
    findings: Vec<MonitorFinding>,
    unlisted_finding_count: u64,
}

impl Report for Verified {
    fn command(&self) -> &'static str {
        "verify"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn exit(&self) -> Exit {
        finding::exit(&self.findings, self.unlisted_finding_count)
    }

    fn human(&self, page: &mut Page) {
        show(&self.findings, self.unlisted_finding_count, page);
        let compared = match self.compared_bytes {
            0 => String::new(),
            bytes => format!(", {} compared", units::bytes(bytes)),
        };
        let text = format!(
            "verified {} of {}: {} of stored data read{compared}, {}",
            units::counted(self.snapshot_count, "snapshot", "snapshots"),
            units::bytes(self.logical_bytes),
            units::bytes(self.decoded_bytes),
            units::duration(std::time::Duration::from_millis(self.duration_ms))
        );
        page.line(&text);
        if self.findings.is_empty() {
            page.styled(Style::Good, "everything is as it was stored");
        }
    }
}

/// Number of newest snapshots whose packs may be missing in a copy of a repository that was in use while it
/// was copied.
const NEWEST_COUNT: usize = 3;

/// Whether only packs of the newest snapshots are missing, and none of older ones.
fn is_like_a_copy_in_use(findings: &[Finding], repository: &Repository) -> bool {
    let missing = || {
        let damage = findings.iter().filter(|finding| finding.kind.is_damage());
        damage.filter(|finding| finding.object.starts_with("packs/"))
    };
    let is_all_missing = missing().all(|finding| finding.kind == FindingKind::Missing);
    if missing().next().is_none() || !is_all_missing {
        return false;
    }
    let Ok((manifests, _)) = repository.snapshots() else {
        return false;
    };
    let newest = manifests.len().saturating_sub(NEWEST_COUNT);
    let (older, newest) = manifests.split_at(newest);
    let touched: BTreeSet<SnapshotId> = missing()
        .flat_map(|finding| finding.touches.iter().map(|touched| touched.snapshot))
        .collect();
    !older.iter().any(|manifest| touched.contains(&manifest.id))
        && newest.iter().any(|manifest| touched.contains(&manifest.id))
}

fn run(args: &VerifyArgs, context: &Context) -> Result<Exit, Error> {
    holdfast_engine::lower_priority();
    let repository = context.open_repository()?;
    let start = context.clock().now();
    let request = VerifyRequest {
        names: args.snapshots.clone(),
        depth: if args.structure {
            VerifyDepth::Structure
        } else {
            VerifyDepth::Full
        },
        against: args.against.clone().map(|path| VerifyImageAgainst {
            path,
            format: args.format,
        }),
        zone: context.zone().clone(),
    };
    let report = context.work(args.job.thread_count(), |job| verify(&repository, &request, job))?;
    if is_like_a_copy_in_use(&report.findings, &repository) {
        context.console().note(
            "packs are missing that only the newest snapshots need: this looks like a copy that was made while the repository was in use; \
             copy it once more in a quiet time, before gc or repair run here",
        );
    }
    context.report(&Verified {
        snapshot_count: report.snapshot_count,
        logical_bytes: report.logical_bytes,
        frame_count: report.frame_count,
        decoded_bytes: report.decoded_bytes,
        compared_bytes: report.compared_bytes,
        duration_ms: units::millis(context.clock().now().saturating_sub(start)),
        findings: report.findings.iter().map(MonitorFinding::from).collect(),
        unlisted_finding_count: report.unlisted_finding_count,
    })
}
