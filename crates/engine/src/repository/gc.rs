//! `gc` and `stats`: reclaim space, and measure it.

use holdfast_repo::{
    AcceptedLoss, GcPlan, GcReport, GcRequest, LostSearch, LostSnapshot, Repository, SnapshotId, Statistics,
};

use super::forget::Execution;
use crate::job::error::ResolveError;
use crate::job::{Counting, Job, Result};

/// What gc did, or would do.
#[derive(Debug, Clone)]
pub enum GcOutcome {
    /// A dry run.
    Planned(GcPlan),
    /// Result of a run.
    Done(GcReport),
}

/// Reclaims the space of unreferenced data. Packs of which at most `repack_below_percent` is used are rewritten.
pub fn gc(repository: &Repository, repack_below_percent: u8, execution: Execution, job: Job<'_>) -> Result<GcOutcome> {
    job.interrupt.check()?;
    let request = GcRequest {
        repack_below_percent,
        thread_count: job.thread_count,
    };
    Ok(match execution {
        Execution::DryRun => {
            GcOutcome::Planned(repository.gc_plan_with_progress(request, &job.watch(Counting::Bytes))?)
        }
        Execution::Execute => {
            let report = repository.gc_with_progress(request, &job.watch(Counting::Bytes))?;
            for damaged in &report.damaged {
                job.progress.warning(damaged);
            }
            GcOutcome::Done(report)
        }
    })
}

/// A loss that the user accepts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AcceptedName {
    /// Everything that gc finds lost now.
    All,
    /// The lost snapshot whose id starts with these digits.
    Snapshot(String),
}

/// Records that losses are accepted; returns a description of each.
pub fn accept_loss(repository: &Repository, names: &[AcceptedName], job: Job<'_>) -> Result<Vec<String>> {
    job.interrupt.check()?;
    let accepted = if names.contains(&AcceptedName::All) {
        AcceptedLoss::All
    } else {
        let (manifests, _) = repository.snapshots()?;
        let lost = repository.lost_snapshots(&manifests, LostSearch::Thorough)?;
        let mut ids: Vec<SnapshotId> = Vec::new();
        for name in names {
            let AcceptedName::Snapshot(start) = name else { continue };
            let found: Vec<&LostSnapshot> = lost
                .iter()
                .filter(|lost| lost.id.to_string().starts_with(start))
                .collect();
            let word = start.clone();
            match &found[..] {
                [only] => ids.push(only.id),
                [] => {
                    let nearest = Vec::new();
                    return Err(ResolveError::Unknown { word, nearest }.into());
                }
                several => {
                    return Err(ResolveError::Ambiguous {
                        word,
                        matches: several.iter().map(ToString::to_string).collect(),
                        match_count: several.len(),
                    }
                    .into());
                }
            }
        }
        AcceptedLoss::Snapshots(ids)
    };
    let losses = repository.accept_loss(&accepted, &job.watch(Counting::Bytes))?;
    Ok(losses.iter().map(ToString::to_string).collect())
}

/// Measures a repository.
pub fn stats(repository: &Repository, job: Job<'_>) -> Result<Statistics> {
    Ok(repository.statistics_with_progress(&job.watch(Counting::Bytes))?)
}
