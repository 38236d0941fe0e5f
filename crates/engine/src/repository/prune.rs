//! `prune`: removes the snapshots that no retention rule keeps.

use std::collections::{BTreeMap, HashSet};

use holdfast_policy::{Candidate, Glob, Policy, Protection, RetentionPlan, plan};
use holdfast_repo::{Loss, LostSearch, Manifest, Repository, SnapshotId};
use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::calendar::time_of;
use super::forget::Execution;
use super::list::{check_machines, is_named};
use super::name_conflict::{MachineIdentity, MachinesByName};
use super::open::snapshots;
use crate::job::{Job, Result, Unit};

/// What to prune, and by which rules.
#[derive(Debug, Clone)]
pub struct PruneRequest {
    /// Rules for what to keep; without a rule, everything is kept.
    pub policy: Policy,
    /// Only these machines, by name or pattern; all if empty.
    pub machines: Vec<Glob>,
    /// The current time.
    pub now: Timestamp,
    /// Time zone that defines days, weeks, months and years.
    pub zone: TimeZone,
    /// Whether the plan is carried out.
    pub execution: Execution,
    /// What to do if the newest snapshot is much newer than the one before it.
    pub gaps: Gaps,
}

/// What to do with a machine whose newest snapshot is more than a year newer than the one before it, if all earlier
/// ones would be removed because of their age. A backup on a host with a wrong clock looks like that.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Gaps {
    /// Keep its snapshots, with a warning.
    #[default]
    Keep,
    /// The user confirms that the times are right.
    Accept,
}

/// Longest plausible time between the two newest snapshots, in milliseconds.
const GAP_MS: i64 = 365 * 24 * 60 * 60 * 1000;

/// What prune decided for one machine.
#[derive(Debug, Clone)]
pub struct MachinePlan {
    /// The machine.
    pub machine: String,
    /// Distinguishes it from other machines of its name; none if its name is unique.
    pub distinction: Option<MachineIdentity>,
    /// A decision for each of its snapshots, newest first.
    pub plan: RetentionPlan,
}

/// What prune decided, and did unless it was a dry run.
#[derive(Debug, Clone)]
pub struct PruneReport {
    /// Each machine, sorted by name. Machines of the same name are separate entries.
    pub machines: Vec<MachinePlan>,
    /// Snapshots that were removed, or would be.
    pub removed_count: u64,
}

/// Plans for each machine separately, also if several have the same name, then removes what no rule keeps. The next gc
/// reclaims the space.
///
/// Snapshots that cannot be read are not counted, and are kept.
///
/// # Errors
/// A name or pattern matches no machine; nothing is removed.
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
        if request.gaps == Gaps::Keep && hides_history(request, &candidates, &plan) {
            let name = manifests.last().map_or_else(String::new, |newest| newest.id.short());
            job.progress.warning(&format!(
                "no snapshot of {machine} is removed: its newest, {name}, is more than a year after the one before it, and --keep-within \
                 would remove what is older; if no clock was wrong, use --accept-gaps"
            ));
            continue;
        }
        let goes: HashSet<&str> = plan.removed().map(|candidate| candidate.id.as_str()).collect();
        // Oldest first: an interruption keeps the newest.
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

/// Refuses to remove anything after a loss until the loss is accepted: the rules do not see the lost snapshots.
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

/// Whether snapshots would be removed because of their age alone, relative to a newest one that may be of a wrong clock.
fn hides_history(request: &PruneRequest, candidates: &[Candidate], plan: &RetentionPlan) -> bool {
    if request.policy.keep_within.is_none() {
        return false;
    }
    let mut past: Vec<&Candidate> = candidates.iter().filter(|one| one.time <= request.now).collect();
    past.sort_unstable_by(|a, b| b.cmp(a));
    let [newest, next, ..] = past[..] else { return false };
    if newest.time.as_millisecond() - next.time.as_millisecond() <= GAP_MS {
        return false;
    }
    let before: Vec<Candidate> = past[1..].iter().map(|one| (*one).clone()).collect();
    let then = holdfast_policy::plan(&request.policy, &before, next.time, &request.zone);
    let kept: HashSet<&str> = then.kept().map(|one| one.id.as_str()).collect();
    plan.removed().any(|one| kept.contains(one.id.as_str()))
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

#[cfg(test)]
mod tests {
    use holdfast_policy::{Candidate, Policy, Protection, plan};
    use jiff::tz::TimeZone;

    use super::{Execution, Gaps, PruneRequest, hides_history};

    fn hides(times: &[&str], policy: Policy) -> bool {
        let request = PruneRequest {
            policy,
            machines: Vec::new(),
            now: "2036-11-25T00:00:00Z".parse().unwrap(),
            zone: TimeZone::UTC,
            execution: Execution::DryRun,
            gaps: Gaps::Keep,
        };
        let numbered = times.iter().enumerate();
        let candidates: Vec<Candidate> = numbered
            .map(|(number, time)| Candidate {
                time: time.parse().unwrap(),
                id: number.to_string(),
                tags: Vec::new(),
                protection: Protection::None,
            })
            .collect();
        let plan = plan(&request.policy, &candidates, request.now, &request.zone);
        hides_history(&request, &candidates, &plan)
    }

    #[test]
    fn one_backup_of_a_wrong_clock_does_not_let_the_history_go() {
        let within = || Policy {
            keep_within: Some("30d".parse().unwrap()),
            ..Policy::default()
        };
        let history = ["2026-11-20T00:00:00Z", "2026-11-21T00:00:00Z", "2026-11-22T00:00:00Z"];
        let with = |newest| [&history[..], &[newest]].concat();
        assert!(hides(&with("2036-11-24T00:00:00Z"), within()));
        assert!(!hides(&with("2026-11-23T00:00:00Z"), within()));
        assert!(!hides(&history, within()), "a machine that is not backed up any more");
        assert!(!hides(
            &["2026-11-20T00:00:00Z", "2036-11-24T00:00:00Z"],
            Policy::default()
        ));
    }
}
