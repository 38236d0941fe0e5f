//! `prune`: remove the snapshots that the rules of retention do not keep.

use std::collections::{BTreeMap, HashSet};

use holdfast_policy::{Candidate, Glob, Policy, Protection, RetentionPlan, plan};
use holdfast_repo::{Loss, LostSearch, Manifest, Repository, SnapshotId};
use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::Unit;
use crate::error::Result;
use crate::forget::Execution;
use crate::job::Job;
use crate::list::{check_machines, is_named};
use crate::namesake::{MachineIdentity, MachinesByName};
use crate::repository::{snapshots, time_of};

/// What to prune, and by which rules.
#[derive(Debug, Clone)]
pub struct PruneRequest {
    /// What to keep; without a rule, everything.
    pub policy: Policy,
    /// These machines only, by names or patterns; without any, all.
    pub machines: Vec<Glob>,
    /// The time.
    pub now: Timestamp,
    /// Whose calendar has the days, weeks, months and years.
    pub zone: TimeZone,
    /// Whether the plan is carried out.
    pub execution: Execution,
}

/// What prune decided for one machine.
#[derive(Debug, Clone)]
pub struct MachinePlan {
    /// The machine.
    pub machine: String,
    /// What it is told from others of its name by; none where it is the only one.
    pub distinction: Option<MachineIdentity>,
    /// A decision for each of its snapshots, the newest first.
    pub plan: RetentionPlan,
}

/// What prune decided, and did unless it was a dry run.
#[derive(Debug, Clone)]
pub struct PruneReport {
    /// Each machine, by name; machines of one name stand beside one another, each with rules of its own.
    pub machines: Vec<MachinePlan>,
    /// Snapshots that are gone, or would be.
    pub removed_count: u64,
}

/// Plans for each machine by itself, also where several have one name, then removes what no rule keeps. Space is given back by the next gc.
///
/// Snapshots that cannot be read are not counted, and stay.
///
/// # Errors
/// A name or pattern is of no machine; then nothing is removed.
pub fn prune(repository: &Repository, request: &PruneRequest, job: Job<'_>) -> Result<PruneReport> {
    refuse_losses(repository, request.execution, job)?;
    let protected = repository.protected()?;
    let all = snapshots(repository, job.progress)?;
    let named = MachinesByName::of(&all);
    let mut by_machine: BTreeMap<(String, Option<usize>), Vec<Manifest>> = BTreeMap::new();
    for manifest in all {
        let key = (manifest.machine.clone(), named.place(&manifest));
        by_machine.entry(key).or_default().push(manifest);
    }
    check_machines(&request.machines, &|| {
        by_machine.keys().map(|(machine, _)| machine.as_str())
    })?;
    by_machine.retain(|(machine, _), _| is_named(machine, &request.machines));

    let mut removed = Vec::new();
    let mut machines = Vec::new();
    for ((machine, _), manifests) in by_machine {
        let candidates: Vec<Candidate> = manifests
            .iter()
            .map(|manifest| candidate(manifest, &protected))
            .collect();
        let plan = plan(&request.policy, &candidates, request.now, &request.zone);
        let goes: HashSet<&str> = plan.removed().map(|candidate| candidate.id.as_str()).collect();
        // Oldest first: whatever stops us, what is left is what a shorter memory would have.
        removed.extend(
            manifests
                .iter()
                .filter(|manifest| goes.contains(manifest.id.to_string().as_str()))
                .map(|manifest| manifest.id),
        );
        machines.push(MachinePlan {
            distinction: manifests.last().and_then(|newest| named.distinction(newest)),
            machine,
            plan,
        });
    }
    if request.execution == Execution::Execute {
        job.progress.phase("removing snapshots", Unit::Items);
        job.progress.total(removed.len() as u64);
        for id in &removed {
            job.interrupt.check()?;
            repository.forget(*id, "prune: no rule keeps it")?;
            job.progress.advance(1);
        }
    }
    Ok(PruneReport {
        machines,
        removed_count: removed.len() as u64,
    })
}

/// Where snapshots were lost, the rules do not see what they are about: nothing is removed until the loss is explained.
fn refuse_losses(repository: &Repository, execution: Execution, job: Job<'_>) -> Result<()> {
    let (manifests, _) = repository.snapshots()?;
    let lost = repository.lost_snapshots(&manifests, LostSearch::Likely)?;
    if lost.is_empty() {
        return Ok(());
    }
    if execution == Execution::DryRun {
        for snapshot in &lost {
            job.progress.warning(&snapshot.to_string());
        }
        return Ok(());
    }
    let losses = lost.into_iter().map(Loss::Snapshot).collect();
    Err(holdfast_repo::Error::Loss { losses }.into())
}

fn candidate(manifest: &Manifest, protected: &HashSet<SnapshotId>) -> Candidate {
    Candidate {
        time: time_of(manifest),
        id: manifest.id.to_string(),
        tags: manifest.tags.clone(),
        protection: if protected.contains(&manifest.id) {
            Protection::Protected
        } else {
            Protection::None
        },
    }
}
