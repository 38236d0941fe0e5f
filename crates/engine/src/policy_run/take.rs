//! Taking what is due.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_host::MachineState;
use holdfast_host::provider::Wanted;
use holdfast_policy::sanoid::{DatasetPolicy, SnapshotType, repeated_hour_name, snapshot_name};

use super::hooks::{Event, Occasion};
use super::{Run, Snapshots, TakenCut, dataset, typed};
use crate::error::Result;
use crate::forget::Execution;
use crate::host_snapshot::{HostSnapshotRequest, NamedCut, Wholeness, machines_in, take_host_snapshots};

/// A dataset of which snapshots are due.
struct Due<'p> {
    policy: &'p DatasetPolicy,
    wanted: Wanted,
    /// Each with the name of its snapshot.
    types: Vec<(SnapshotType, String)>,
    /// The machines with disks in it, by their places.
    machines: BTreeSet<usize>,
    has_pre_failed: bool,
}

/// Takes snapshots of all datasets where some are due.
pub(super) fn take(run: &Run<'_>, policies: &[&DatasetPolicy], snapshots: &Snapshots) -> Result<Vec<TakenCut>> {
    let places = run.request.guests.places();
    let mut wholeness = Wholeness::new(run.request.providers);
    let mut due = Vec::new();
    for policy in policies {
        let Some(present) = snapshots.get(&policy.dataset) else {
            continue;
        };
        // One of which not all was made is made again.
        let whole: Vec<_> = present
            .iter()
            .filter(|snapshot| wholeness.of(&snapshot.name, snapshot.record.as_deref()) != Some(false))
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
            // The hour that the end of summer time repeats has the names of the one before.
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
        let wanted = Wanted {
            is_tree: policy.is_tree(),
            ..Wanted::all_of(dataset(&policy.dataset))
        };
        let are_there = machines_in(places.iter().copied(), std::slice::from_ref(&wanted));
        let machines = are_there.into_iter().enumerate().filter(|(_, is_there)| *is_there);
        due.push(Due {
            policy,
            wanted,
            types,
            machines: machines.map(|(index, _)| index).collect(),
            has_pre_failed: false,
        });
    }
    let mut taken = Vec::new();
    for together in cut_together(due) {
        run.job.interrupt.check()?;
        taken.extend(take_together(run, together));
    }
    Ok(taken)
}

/// Datasets that share a machine are cut together, and so are those that share one with one of these.
fn cut_together(due: Vec<Due<'_>>) -> Vec<Vec<Due<'_>>> {
    let mut sets: Vec<Vec<Due<'_>>> = Vec::new();
    for one in due {
        let shares = |set: &Vec<Due<'_>>| set.iter().any(|other| !other.machines.is_disjoint(&one.machines));
        let (mut sharing, others): (Vec<_>, Vec<_>) = sets.into_iter().partition(shares);
        sets = others;
        let mut merged: Vec<Due<'_>> = sharing.drain(..).flatten().collect();
        merged.push(one);
        sets.push(merged);
    }
    sets
}

/// What became of datasets that are cut together; one that is left out is told of by itself.
fn take_together(run: &Run<'_>, mut due: Vec<Due<'_>>) -> Vec<TakenCut> {
    let (mut taken, mut left_out) = (TakenCut::default(), Vec::new());
    let is_real = run.request.execution == Execution::Execute;
    if is_real {
        // What nobody has prepared is left out, where its owner wants that.
        due.retain_mut(|one| {
            let called = run.call(one.policy, Event::PreSnapshot, &one.occasion());
            one.has_pre_failed = called.is_err();
            let goes_on = !one.has_pre_failed || !one.policy.hooks().needs_pre_snapshot;
            if let (Err(reason), false) = (called, goes_on) {
                left_out.push(TakenCut {
                    snapshots: cuts_of(std::slice::from_ref(one))
                        .iter()
                        .flat_map(NamedCut::snapshots)
                        .collect(),
                    failure: Some(reason),
                    ..TakenCut::default()
                });
            }
            goes_on
        });
    }
    let cuts = cuts_of(&due);
    let machines: BTreeSet<usize> = due.iter().flat_map(|one| one.machines.iter().copied()).collect();
    taken.snapshots = cuts.iter().flat_map(NamedCut::snapshots).collect();
    if !is_real {
        taken.would_hold_still = machines.into_iter().collect();
        return vec![taken];
    }
    if cuts.is_empty() {
        return left_out;
    }
    match cut(run, cuts, &machines) {
        Ok(guests) => taken.guests = guests,
        Err(error) => {
            let reason = error.to_string();
            run.job.progress.warning(&reason);
            taken.failure = Some(reason);
        }
    }
    for one in &due {
        let hooks = one.policy.hooks();
        if !one.has_pre_failed || hooks.always_post_snapshot {
            let occasion = Occasion {
                has_pre_failed: Some(one.has_pre_failed),
                error: taken.failure.clone(),
                ..one.occasion()
            };
            // It has been told; what was taken is there.
            run.call(one.policy, Event::PostSnapshot, &occasion).ok();
        }
    }
    left_out.push(taken);
    left_out
}

fn cut(run: &Run<'_>, cuts: Vec<NamedCut>, machines: &BTreeSet<usize>) -> Result<Vec<crate::GuestReport>> {
    let guests = machines.iter().map(|index| run.request.guests.request(*index));
    let mut guests = guests.collect::<Result<Vec<_>>>()?;
    leave_out_memories(&mut guests, run.job);
    let now = || (run.request.now)().timestamp();
    let request = HostSnapshotRequest {
        providers: run.request.providers,
        cuts,
        guests,
        now: &now,
        program: run.request.program.clone(),
        set: run.request.guests.new_set()?,
        states: run.request.states,
    };
    Ok(take_host_snapshots(&request, &mut || (), run.job)?.guests)
}

/// The memory of one machine ends at the instant; that of several does not end at one.
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

/// What is made of each name.
fn cuts_of(due: &[Due<'_>]) -> Vec<NamedCut> {
    let mut by_name: BTreeMap<&str, Vec<Wanted>> = BTreeMap::new();
    for one in due {
        for (_, name) in &one.types {
            by_name.entry(name).or_default().push(one.wanted.clone());
        }
    }
    let cut = |(name, wanted): (&str, Vec<Wanted>)| NamedCut {
        name: name.to_owned(),
        wanted,
    };
    by_name.into_iter().map(cut).collect()
}

impl Due<'_> {
    fn occasion(&self) -> Occasion {
        Occasion {
            snapshots: self.types.iter().map(|(_, name)| name.clone()).collect(),
            types: self.types.iter().map(|(kind, _)| kind.to_string()).collect(),
            ..Occasion::default()
        }
    }
}
