//! Takes the snapshots that are due.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_host::MachineState;
use holdfast_host::provider::{Dataset, HostSnapshotName, HostSnapshotScope};
use holdfast_policy::sanoid::{DatasetPolicy, SnapshotType, repeated_hour_name, snapshot_name};

use super::hooks::{Event, ScriptCall};
use super::{PolicyRun, PolicyRunReport, Snapshots, TakenSnapshotSet, dataset, typed};
use crate::host_snapshot::{
    GuestRequest, HostSnapshotRequest, NamedSnapshotSet, NotTaken, SetCompleteness, Subject, machines_in,
    try_host_snapshots,
};
use crate::job::{Error, Result};
use crate::repository::forget::Execution;

/// A dataset with snapshots that are due.
#[derive(Clone)]
struct DueDataset<'p> {
    policy: &'p DatasetPolicy,
    wanted: HostSnapshotScope,
    /// Each type with the name of its snapshot.
    types: Vec<(SnapshotType, String)>,
    /// Indexes of the machines with disks in the dataset.
    machines: BTreeSet<usize>,
    has_pre_failed: bool,
    /// The pre-snapshot script was running when the job was asked to stop.
    is_pre_cut_off: bool,
}

/// Takes the due snapshots of all datasets.
pub(super) fn take(
    run: &PolicyRun<'_>,
    policies: &[&DatasetPolicy],
    snapshots: &Snapshots,
    report: &mut PolicyRunReport,
) {
    let places = run.request.guests.places();
    let mut completeness = SetCompleteness::new(run.request.providers);
    let mut due = Vec::new();
    for policy in policies {
        let Some(present) = snapshots.get(&policy.dataset) else {
            continue;
        };
        // An incomplete set is taken again.
        let whole: Vec<_> = present
            .iter()
            .filter(|snapshot| completeness.of(&snapshot.name, snapshot.record.as_deref()) != Some(false))
            .collect();
        let newest = |kind: SnapshotType| {
            let of_kind = whole
                .iter()
                .filter_map(|snapshot| typed(snapshot))
                .filter(|snapshot| snapshot.kind == kind);
            of_kind.map(|snapshot| snapshot.time).max()
        };
        let name = |kind: SnapshotType| {
            let name = snapshot_name(&run.now, kind);
            // The hour that is repeated at the end of summer time has the same names as the hour before.
            let is_there = present.iter().any(|snapshot| snapshot.name.name == name);
            if is_there {
                repeated_hour_name(&run.now, kind)
            } else {
                name
            }
        };
        let types: Vec<_> = policy
            .due(newest, &run.now)
            .into_iter()
            .map(|kind| (kind, name(kind)))
            .collect();
        if types.is_empty() {
            continue;
        }
        let wanted = HostSnapshotScope {
            is_tree: policy.is_tree(),
            ..HostSnapshotScope::all_of(dataset(&policy.dataset))
        };
        let are_there = machines_in(places.iter().copied(), std::slice::from_ref(&wanted));
        let machines = are_there.into_iter().enumerate().filter(|(_, is_there)| *is_there);
        due.push(DueDataset {
            policy,
            wanted,
            types,
            machines: machines.map(|(index, _)| index).collect(),
            has_pre_failed: false,
            is_pre_cut_off: false,
        });
    }
    for together in cut_together(due) {
        if run.job.interrupt.is_requested() {
            report.is_interrupted = true;
            return;
        }
        report.taken.extend(take_together(run, together));
    }
    // The last snapshots may not have been started.
    report.is_interrupted = run.job.interrupt.is_requested();
}

/// Groups datasets that share a machine, directly or through other datasets.
fn cut_together(due: Vec<DueDataset<'_>>) -> Vec<Vec<DueDataset<'_>>> {
    let mut sets: Vec<Vec<DueDataset<'_>>> = Vec::new();
    for one in due {
        let shares = |set: &Vec<DueDataset<'_>>| set.iter().any(|other| !other.machines.is_disjoint(&one.machines));
        let (mut sharing, others): (Vec<_>, Vec<_>) = sets.into_iter().partition(shares);
        sets = others;
        let mut merged: Vec<DueDataset<'_>> = sharing.drain(..).flatten().collect();
        merged.push(one);
        sets.push(merged);
    }
    sets
}

/// Results for datasets that are snapshotted together; each excluded dataset has its own result.
fn take_together(run: &PolicyRun<'_>, mut due: Vec<DueDataset<'_>>) -> Vec<TakenSnapshotSet> {
    if run.request.execution == Execution::DryRun {
        let machines: BTreeSet<usize> = due.iter().flat_map(|one| one.machines.iter().copied()).collect();
        return vec![TakenSnapshotSet {
            snapshots: snapshots_of(&due),
            would_freeze: machines.into_iter().collect(),
            ..TakenSnapshotSet::default()
        }];
    }
    let (mut taken, mut incomplete) = (Vec::new(), BTreeSet::new());
    let unprepared = prepare(run, &mut due);
    for (dataset, reason) in unprepared {
        // The scripts are not called again: its snapshot was not started.
        taken.extend(leave_out(&mut due, &mut incomplete, &[dataset], &reason));
    }
    while !due.is_empty() {
        match cut(run, &due, &incomplete) {
            Ok(guests) => {
                end(run, &due, None);
                taken.push(TakenSnapshotSet {
                    snapshots: snapshots_of(&due),
                    guests,
                    incomplete: incomplete.into_iter().filter(|machine| is_in(&due, *machine)).collect(),
                    ..TakenSnapshotSet::default()
                });
                return taken;
            }
            Err(NotTaken { error, culprits }) => {
                let reason = error.to_string();
                run.job.progress.warning(&reason);
                let before = due.clone();
                let is_hopeless = culprits.is_empty() || matches!(*error, Error::Interrupted(_));
                let culprits = if is_hopeless { datasets_of(&due) } else { culprits };
                taken.extend(leave_out(&mut due, &mut incomplete, &culprits, &reason));
                let left_out = before.into_iter().filter(|one| !is_due(&due, one));
                end(run, &left_out.collect::<Vec<_>>(), Some(&reason));
            }
        }
    }
    taken
}

/// Calls the pre-snapshot scripts; returns the datasets that must not be snapshotted because their script failed.
fn prepare(run: &PolicyRun<'_>, due: &mut [DueDataset<'_>]) -> Vec<(Dataset, String)> {
    let mut unprepared = Vec::new();
    for one in due {
        let called = run.call(one.policy, Event::PreSnapshot, &one.occasion());
        one.has_pre_failed = called.is_err();
        one.is_pre_cut_off = called.is_err() && run.job.interrupt.is_requested();
        if let Err(reason) = called
            && one.policy.hooks().needs_pre_snapshot
        {
            unprepared.push((one.wanted.dataset.clone(), reason));
        }
    }
    unprepared
}

/// Calls the post-snapshot scripts.
fn end(run: &PolicyRun<'_>, due: &[DueDataset<'_>], error: Option<&str>) {
    for one in due {
        let hooks = one.policy.hooks();
        // A script that was stopped on request may have done a part of its work, which the post script undoes.
        if !one.has_pre_failed || one.is_pre_cut_off || hooks.always_post_snapshot {
            let occasion = ScriptCall {
                has_pre_failed: Some(one.has_pre_failed),
                error: error.map(str::to_owned),
                ..one.occasion()
            };
            // A failure of the script was reported; the snapshots exist.
            run.call(one.policy, Event::PostSnapshot, &occasion).ok();
        }
    }
}

/// Removes from `due` the datasets that cannot be snapshotted, and also the datasets that are used only by machines
/// with disks in these: half a machine is useless. A dataset that other machines use too is kept.
///
/// Returns results for the removed datasets; machines that are no longer complete are added to `incomplete`.
/// Returns results for what is left out; machines that are not whole any more are added to `incomplete`.
fn leave_out(
    due: &mut Vec<DueDataset<'_>>,
    incomplete: &mut BTreeSet<usize>,
    culprits: &[Dataset],
    reason: &str,
) -> Vec<TakenSnapshotSet> {
    let is_culprit = |one: &DueDataset<'_>| culprits.contains(&one.wanted.dataset);
    incomplete.extend(due.iter().filter(|one| is_culprit(one)).flat_map(|one| &one.machines));
    let (left_out, kept): (Vec<_>, Vec<_>) = std::mem::take(due).into_iter().partition(|one| {
        let has_none_but_these = !one.machines.is_empty() && one.machines.is_subset(incomplete);
        is_culprit(one) || has_none_but_these
    });
    *due = kept;
    let results = left_out.iter().map(|one| TakenSnapshotSet {
        snapshots: snapshots_of(std::slice::from_ref(one)),
        failure: Some(if is_culprit(one) {
            reason.to_owned()
        } else {
            format!("its machines have disks that could not be cut with it: {reason}")
        }),
        ..TakenSnapshotSet::default()
    });
    results.collect()
}

fn is_due(due: &[DueDataset<'_>], one: &DueDataset<'_>) -> bool {
    due.iter().any(|other| other.wanted == one.wanted)
}

fn is_in(due: &[DueDataset<'_>], machine: usize) -> bool {
    due.iter().any(|one| one.machines.contains(&machine))
}

fn datasets_of(due: &[DueDataset<'_>]) -> Vec<Dataset> {
    due.iter().map(|one| one.wanted.dataset.clone()).collect()
}

fn snapshots_of(due: &[DueDataset<'_>]) -> Vec<HostSnapshotName> {
    cuts_of(due).iter().flat_map(NamedSnapshotSet::snapshots).collect()
}

fn cut(
    run: &PolicyRun<'_>,
    due: &[DueDataset<'_>],
    incomplete: &BTreeSet<usize>,
) -> std::result::Result<Vec<crate::GuestReport>, NotTaken> {
    let machines: BTreeSet<usize> = due.iter().flat_map(|one| one.machines.iter().copied()).collect();
    let guest = |index: &usize| {
        let guest = run.request.guests.request(*index)?;
        // A machine cannot resume from memory without all its disks.
        let memory = guest.memory.clone().filter(|_| !incomplete.contains(index));
        Ok(GuestRequest { memory, ..guest })
    };
    let mut guests = machines.iter().map(guest).collect::<Result<Vec<_>>>()?;
    leave_out_memories(&mut guests, run.job);
    let now = || (run.request.now)().timestamp();
    let newcomers = |wanted: &[HostSnapshotScope]| run.request.guests.newcomers(wanted);
    let request = HostSnapshotRequest {
        providers: run.request.providers,
        cuts: cuts_of(due),
        guests,
        subject: Subject::Datasets(&newcomers),
        now: &now,
        program: run.request.program.clone(),
        set: run.request.guests.new_set()?,
        states: run.request.states,
    };
    Ok(try_host_snapshots(&request, &mut || (), run.job)?.guests)
}

/// Excludes the memory if several machines request it: captures of several memories do not end at one point in time.
fn leave_out_memories(guests: &mut [crate::GuestRequest<'_>], job: crate::Job<'_>) {
    let runs = |guest: &&crate::GuestRequest<'_>| {
        guest.memory.is_some() && guest.description.summary.state == MachineState::Running
    };
    let names: Vec<String> = guests
        .iter()
        .filter(runs)
        .map(|guest| guest.description.summary.name.clone())
        .collect();
    if names.len() > 1 {
        job.progress.warning(&format!(
            "{} are snapshotted together, and their memories are not kept: that works for one machine at a time",
            names.join(", ")
        ));
        for guest in guests.iter_mut() {
            guest.memory = None;
        }
    }
}

/// The datasets for each snapshot name.
fn cuts_of(due: &[DueDataset<'_>]) -> Vec<NamedSnapshotSet> {
    let mut by_name: BTreeMap<&str, Vec<HostSnapshotScope>> = BTreeMap::new();
    for one in due {
        for (_, name) in &one.types {
            by_name.entry(name).or_default().push(one.wanted.clone());
        }
    }
    let cut = |(name, wanted): (&str, Vec<HostSnapshotScope>)| NamedSnapshotSet {
        name: name.to_owned(),
        wanted,
    };
    by_name.into_iter().map(cut).collect()
}

impl DueDataset<'_> {
    fn occasion(&self) -> ScriptCall {
        ScriptCall {
            snapshots: self.types.iter().map(|(_, name)| name.clone()).collect(),
            types: self.types.iter().map(|(kind, _)| kind.to_string()).collect(),
            ..ScriptCall::default()
        }
    }
}
