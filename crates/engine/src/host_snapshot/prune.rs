//! Prunes host snapshots by the rules of retention: plan, then remove.
//!
//! Only snapshots that Holdfast made and named after their point in time are pruned. Snapshots with a name given by the
//! user, those of other programs and those of a sanoid policy are not; held snapshots are kept. It is unknown whether
//! an incomplete set is usable: it does not count for the rules, and `doctor` handles it.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_host::provider::{Dataset, HostSnapshot};
use holdfast_policy::{Candidate, Policy, Protection, RetentionPlan, plan};
use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::remove::remove_looked_at;
use super::series::series_of;
use super::{HostSnapshotState, Providers, SnapshotSizes, list_host_snapshots};
use crate::job::{Job, Result};
use crate::repository::forget::Execution;

/// Host snapshots to prune.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPruneTarget {
    /// Of this dataset.
    pub dataset: Dataset,
    /// Only this series; all series if none.
    pub series: Option<String>,
}

/// What to prune, and by which rules.
pub struct HostPruneRequest<'a> {
    /// The providers of this host.
    pub providers: &'a Providers,
    /// Which host snapshots.
    pub targets: Vec<HostPruneTarget>,
    /// What to keep of each series; without a rule, everything is kept.
    pub policy: Policy,
    /// The current time.
    pub now: Timestamp,
    /// Time zone that defines days, weeks, months and years.
    pub zone: TimeZone,
    /// Whether the plan is carried out.
    pub execution: Execution,
}

/// Decisions for a series of a dataset.
#[derive(Debug, Clone)]
pub struct PrunedSeries {
    /// The dataset.
    pub dataset: Dataset,
    /// The series.
    pub series: String,
    /// A decision for each of its host snapshots, by name; newest first.
    pub plan: RetentionPlan,
    /// Snapshots that no rule keeps but that cannot be removed, by name, and why.
    pub obstacles: BTreeMap<String, String>,
}

/// What was decided, and done unless it was a dry run.
#[derive(Debug, Clone, Default)]
pub struct HostPruneReport {
    /// Each series, by dataset and name.
    pub series: Vec<PrunedSeries>,
    /// Host snapshots that were removed, or would be.
    pub removed_count: u64,
}

/// Plans for each series, then removes what no rule keeps, oldest first. An obstacle to one removal does not stop the others.
pub fn prune_host_snapshots(request: &HostPruneRequest<'_>, job: Job<'_>) -> Result<HostPruneReport> {
    let mut report = HostPruneReport::default();
    for ((dataset, series), snapshots) in all_series(request)? {
        let candidates: Vec<Candidate> = snapshots.iter().map(|(candidate, _)| candidate.clone()).collect();
        let plan = plan(&request.policy, &candidates, request.now, &request.zone);
        let goes: BTreeSet<&str> = plan.removed().map(|candidate| &candidate.id[..]).collect();
        let mut goes: Vec<_> = snapshots
            .into_iter()
            .filter(|(candidate, _)| goes.contains(&candidate.id[..]))
            .collect();
        goes.sort_by_key(|(candidate, _)| candidate.time);
        let goes = goes.into_iter().map(|(_, snapshot)| snapshot).collect();
        let removed = remove_looked_at(request.providers, goes, request.execution, job)?;
        report.removed_count += removed.iter().filter(|one| one.obstacle.is_none()).count() as u64;
        let obstacles = removed
            .into_iter()
            .filter_map(|one| Some((one.snapshot.name.name, one.obstacle?)));
        report.series.push(PrunedSeries {
            obstacles: obstacles.collect(),
            dataset,
            series,
            plan,
        });
    }
    Ok(report)
}

/// Host snapshots with their retention candidates, by dataset and series.
type AllSeries = BTreeMap<(Dataset, String), Vec<(Candidate, HostSnapshot)>>;

fn all_series(request: &HostPruneRequest<'_>) -> Result<AllSeries> {
    let mut found = AllSeries::new();
    let datasets: BTreeSet<Dataset> = request.targets.iter().map(|target| target.dataset.clone()).collect();
    let datasets: Vec<Dataset> = datasets.into_iter().collect();
    for list in list_host_snapshots(request.providers, &datasets, SnapshotSizes::Unknown)? {
        for state in list.snapshots {
            let Some((series, candidate)) = candidate(&state) else {
                continue;
            };
            let is_wanted = request.targets.iter().any(|target| {
                let is_of_it = target.series.as_ref().is_none_or(|wanted| *wanted == series);
                target.dataset == list.dataset && is_of_it
            });
            if is_wanted {
                let of = (list.dataset.clone(), series);
                found.entry(of).or_default().push((candidate, state.snapshot));
            }
        }
    }
    Ok(found)
}

fn candidate(state: &HostSnapshotState) -> Option<(String, Candidate)> {
    let record = state.record.as_ref()?;
    let name = &state.snapshot.name.name;
    let series = series_of(name)?.to_owned();
    let candidate = Candidate {
        // Snapshots of one point in time get the same decision, even if the providers made them at different times.
        time: record.time,
        id: name.clone(),
        tags: Vec::new(),
        protection: if state.snapshot.hold_count > 0 {
            Protection::Protected
        } else {
            Protection::None
        },
    };
    (state.is_whole != Some(false)).then_some((series, candidate))
}
