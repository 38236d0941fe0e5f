//! `repair`: repairs what can be repaired, and reports what is lost.

use holdfast_repo::{RepairPlan, RepairReport, RepairRequest, Repository};

use super::forget::Execution;
use crate::job::{Counting, Job, Result, Unit};

/// Result of a repair or of its dry run.
#[derive(Debug, Clone)]
pub enum RepairOutcome {
    /// A dry run.
    Planned(RepairPlan),
    /// The repair was done.
    Done(RepairReport),
}

/// Reads `percent` of the repository, plans the repair, and executes the plan.
pub fn repair(repository: &Repository, percent: u8, execution: Execution, job: Job<'_>) -> Result<RepairOutcome> {
    job.progress.phase("looking for damage", Unit::Bytes);
    let request = RepairRequest {
        percent,
        thread_count: job.thread_count,
    };
    let plan = repository.plan_repair(request, &job.watch(Counting::Bytes))?;
    if execution == Execution::DryRun {
        return Ok(RepairOutcome::Planned(plan));
    }
    job.interrupt.check()?;
    job.progress.phase("mending", Unit::Bytes);
    let report = repository.repair(&plan, job.thread_count, &job.watch(Counting::Bytes))?;
    Ok(RepairOutcome::Done(report))
}
