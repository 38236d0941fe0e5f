//! `gc` and `stats`: how much space there is to give back, and giving it back.

use holdfast_repo::{GcPlan, GcReport, GcRequest, Repository, Statistics};

use crate::error::Result;
use crate::forget::Execution;
use crate::job::{Counting, Job};

/// What gc did, or would do.
#[derive(Debug, Clone)]
pub enum GcOutcome {
    /// A dry run.
    Planned(GcPlan),
    /// It was done.
    Done(GcReport),
}

/// Gives back the space of what no snapshot needs. Packs of which at most `repack_below_percent` is needed are rewritten.
pub fn gc(repository: &Repository, repack_below_percent: u8, execution: Execution, job: Job<'_>) -> Result<GcOutcome> {
    job.interrupt.check()?;
    let request = GcRequest {
        repack_below_percent,
        thread_count: job.thread_count,
    };
    Ok(match execution {
        Execution::DryRun => GcOutcome::Planned(repository.gc_plan_watched(request, &job.watch(Counting::Bytes))?),
        Execution::Execute => {
            let report = repository.gc_watched(request, &job.watch(Counting::Bytes))?;
            for damaged in &report.damaged {
                job.progress.warning(damaged);
            }
            GcOutcome::Done(report)
        }
    })
}

/// Measures a repository.
pub fn stats(repository: &Repository, job: Job<'_>) -> Result<Statistics> {
    Ok(repository.statistics_watched(&job.watch(Counting::Bytes))?)
}
