//! Turns cut host snapshots into complete ones.
//!
//! 1. Snapshots that get their name only when they are settled are settled, with a record that names their maker and
//!    marks them incomplete.
//! 2. The states of the machines are stored.
//! 3. All records are marked complete.
//!
//! If the maker is killed before step 3, the record shows it, and `doctor` removes the host snapshot and its states.
//! After an error they are removed here.

use holdfast_host::provider::{Dataset, HostSnapshotName, HostSnapshotScope};
use holdfast_repo::{ProcessIdentity, SnapshotId};
use jiff::Timestamp;

use super::guests::{FrozenGuests, GuestRequest};
use super::states::{StateStore, StateToKeep};
use super::{Group, HostSnapshotRecord, HostSnapshotRequest, NamedSnapshotSet, remove_unusable};
use crate::job::{Job, Result};
use crate::machine::state::streams::FirmwareState;

/// The configuration of a machine: file names and contents.
pub(super) type Configuration = Vec<(String, Vec<u8>)>;

/// Parameters for storing the states of machines.
pub(super) struct KeptStates<'a> {
    pub(super) held: &'a FrozenGuests,
    pub(super) time: Timestamp,
    pub(super) configurations: Vec<Configuration>,
    pub(super) besides: Vec<Result<FirmwareState>>,
}

/// Completes the host snapshots that were cut.
///
/// # Errors
/// All of them were removed.
pub(super) fn complete(
    request: &HostSnapshotRequest<'_>,
    groups: &[Group<'_>],
    record: &HostSnapshotRecord,
    maker: Option<&ProcessIdentity>,
    kept: KeptStates<'_>,
    job: Job<'_>,
) -> Result<()> {
    let mut ids = Vec::new();
    let done = name_all(request, groups, record, maker)
        .and_then(|()| keep_states(request, kept, &mut ids, job))
        .and_then(|()| record_all(groups, record, job));
    done.inspect_err(|_| {
        // States are removed after their host snapshots: if a kill comes in between, the states are found as orphans.
        remove_unusable(groups, job);
        forget(request.states, &ids, job);
    })
}

/// Gives names to snapshots that have none before they are settled, if further steps have to follow before they are complete.
fn name_all(
    request: &HostSnapshotRequest<'_>,
    groups: &[Group<'_>],
    record: &HostSnapshotRecord,
    maker: Option<&ProcessIdentity>,
) -> Result<()> {
    let without_name = groups.iter().filter(|group| group.provider.kind().has_folders());
    if without_name.clone().count() < 2 && !request.keeps_states() {
        return Ok(());
    }
    for group in without_name {
        let open = record.unconfirmed(group, maker).encode();
        group.provider.commit(&group.wanted, &group.label(record.time, &open))?;
    }
    Ok(())
}

/// Writes the complete record to all host snapshots.
fn record_all(groups: &[Group<'_>], record: &HostSnapshotRecord, job: Job<'_>) -> Result<()> {
    let exists_since_cut = |group: &&Group<'_>| !group.provider.kind().has_folders();
    let (others, without_name): (Vec<_>, Vec<_>) = groups.iter().partition(exists_since_cut);
    for group in without_name.into_iter().chain(others) {
        let text = record.of_cut(group.cut).encode();
        let settled = group.provider.commit(&group.wanted, &group.label(record.time, &text));
        match settled {
            // Its first record already marks it complete.
            Err(error) if group.is_whole_at_cut && !group.provider.kind().has_folders() => {
                let name = &group.cut.name;
                let message = format!("the record of {name} was not updated after its point in time: {error}");
                job.progress.warning(&message);
            }
            other => other?,
        }
    }
    Ok(())
}

fn forget(states: Option<&StateStore>, ids: &[SnapshotId], job: Job<'_>) {
    let Some(store) = states else { return };
    for id in ids {
        let forgotten = store.repository().forget(*id, "its host snapshots were taken back");
        if let Err(error) = forgotten {
            job.progress
                .note(&format!("forgetting a state that is not needed: {error}"));
        }
    }
}

/// The configurations of the machines whose states are stored. Queried before the point in time, since this takes time.
///
/// A machine that has disappeared must not prevent the point in time of the others. A machine whose memory is wanted
/// needs its configuration.
pub(super) fn configurations(request: &HostSnapshotRequest<'_>, job: Job<'_>) -> Result<Vec<Configuration>> {
    let ask = |guest: &GuestRequest<'_>| match guest.machine.configuration() {
        Err(error) if guest.memory.is_none() => {
            let machine = &guest.description.summary.name;
            let message = format!("the configuration of {machine} is not kept with the snapshot: {error}");
            job.progress.warning(&message);
            Ok(Configuration::new())
        }
        other => Ok(other?),
    };
    let asked = request.guests.iter().filter(|_| request.states.is_some());
    asked.map(ask).collect()
}

/// Stores the states of the machines, and adds their ids to `ids`. Only a missing memory that was requested is an error.
fn keep_states(
    request: &HostSnapshotRequest<'_>,
    of: KeptStates<'_>,
    ids: &mut Vec<SnapshotId>,
    job: Job<'_>,
) -> Result<()> {
    let Some(store) = request.states else { return Ok(()) };
    let guests = request.guests.iter().zip(&of.held.guests);
    for ((guest, report), (configuration, beside)) in guests.zip(of.configurations.iter().zip(of.besides)) {
        let datasets = guest.places.wanted();
        let snapshots = request.cuts.iter().flat_map(NamedSnapshotSet::snapshots);
        let is_of_it = |name: &HostSnapshotName| {
            let is_below = |one: &HostSnapshotScope| one.dataset == name.dataset || holds(&name.dataset, &one.dataset);
            datasets.iter().any(is_below)
        };
        let snapshots: Vec<HostSnapshotName> = snapshots.filter(is_of_it).collect();
        let kept = beside.and_then(|beside| {
            let state = StateToKeep {
                set: request.set,
                snapshots: &snapshots,
                description: &guest.description,
                places: &guest.places,
                configuration,
                beside,
                memory: of.held.memory.as_ref().filter(|_| report.memory_bytes.is_some()),
                time: of.time,
                consistency: report.consistency(),
                program: &request.program,
            };
            store.keep(state, job)
        });
        match kept {
            Ok(id) => ids.push(id),
            Err(error) if report.memory_bytes.is_some() => return Err(error),
            Err(error) => {
                let machine = &report.name;
                let message = format!("the configuration of {machine} is not kept with the snapshot: {error}");
                job.progress.warning(&message);
            }
        }
    }
    Ok(())
}

/// Whether a named dataset contains another one: as part of a recursive snapshot, or of a folder of clones.
fn holds(named: &Dataset, inner: &Dataset) -> bool {
    let prefix = format!("{}/", named.name.trim_end_matches('/'));
    named.provider == inner.provider && inner.name.starts_with(&prefix)
}
