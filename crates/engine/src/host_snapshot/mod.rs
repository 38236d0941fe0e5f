//! `snapshot`: host snapshots of datasets, at a point in time at which the machines on them are frozen or paused.
//!
//! 1. Preparation: names are checked, folders created, watchdogs started, runs noted.
//! 2. The guests freeze their file systems, all at once. If the snapshots cannot be made at one point in time, guests that cannot freeze
//!    are paused.
//! 3. The providers make the snapshots.
//! 4. The machines are resumed and thawed.
//! 5. The snapshots are made durable, and the states of the machines are stored.
//! 6. The record of each snapshot is marked complete.
//!
//! After any error the machines are resumed, and the host snapshots that were made before the error are removed.

pub(crate) mod compare_images;
mod completeness;
mod completion;
mod guest_report;
mod guests;
mod list;
mod look_again;
pub(crate) mod monitor;
mod not_taken;
pub(crate) mod places;
pub(crate) mod policy;
mod providers;
mod prune;
pub(crate) mod record;
mod remove;
pub(crate) mod rollback;
mod series;
pub(crate) mod states;
mod subject;
mod with_memory;

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast_host::provider::{
    Dataset, HostSnapshotLabel, HostSnapshotName, HostSnapshotScope, Provider, ProviderError, ProviderKind,
    ProviderResult,
};
use holdfast_repo::ProcessIdentity;
use jiff::Timestamp;

use crate::job::{Error, Job, Result};
use crate::machine::lock::MachineLock;
use crate::machine::state::streams::FirmwareState;
pub use completeness::SetCompleteness;
pub(crate) use completeness::SetState;
use completion::{KeptStates, complete, configurations};
pub use guest_report::GuestReport;
pub use guests::GuestRequest;
use guests::{GuestPoint, Sessions};
pub use list::{HostSnapshotList, HostSnapshotState, SnapshotSizes, list_host_snapshots};
pub(crate) use not_taken::NotTaken;
pub use places::{MachinePlaces, machines_in, places_of};
pub use providers::Providers;
pub use prune::{HostPruneReport, HostPruneRequest, HostPruneTarget, PrunedSeries, prune_host_snapshots};
pub use record::HostSnapshotRecord;
use record::SetId;
pub use remove::{HostRemovalReport, HostRemovalRequest, PlannedRemoval, remove_host_snapshots};
pub use series::{name_of_instant, series_name};
use states::StateStore;
use subject::CutMode;
pub use subject::Subject;

/// Which host snapshots to make, and how.
pub struct HostSnapshotRequest<'a> {
    /// The providers of this host.
    pub providers: &'a Providers,
    /// The snapshots to make, all during the same pause.
    pub cuts: Vec<NamedSnapshotSet>,
    /// The machines to freeze or pause meanwhile.
    pub guests: Vec<GuestRequest<'a>>,
    /// Whether the request is for machines, or for datasets with everything in them.
    pub subject: Subject<'a>,
    /// The clock; read at the point in time.
    pub now: &'a dyn Fn() -> Timestamp,
    /// The program that makes the snapshots.
    pub program: String,
    /// The random number that all snapshots of the set share.
    pub set: SetId,
    /// Where the states of the machines are stored; none if they are not.
    pub states: Option<&'a StateStore>,
}

/// Host snapshots of one name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedSnapshotSet {
    /// The name.
    pub name: String,
    /// The datasets.
    pub wanted: Vec<HostSnapshotScope>,
}

/// Host snapshots that were made.
#[derive(Debug)]
pub struct HostSnapshotReport {
    /// The snapshots, in the order of the request, name by name.
    pub snapshots: Vec<HostSnapshotName>,
    /// Their point in time.
    pub time: Timestamp,
    /// Whether all snapshots of a name are of one point in time even if the guests were not stopped.
    pub is_one_instant: bool,
    /// How long the providers took.
    pub cut: Duration,
    /// What happened to the machines.
    pub guests: Vec<GuestReport>,
    /// The record of the snapshots.
    pub record: HostSnapshotRecord,
}

/// Datasets that one provider snapshots at one point in time.
struct Group<'a> {
    provider: &'a dyn Provider,
    cut: &'a NamedSnapshotSet,
    wanted: Vec<HostSnapshotScope>,
    /// Whether the set is complete with this snapshot: no other has its name, and no states of machines are stored with it.
    is_whole_at_cut: bool,
}

/// Makes host snapshots; `within` is called while the machines are frozen or paused.
///
/// # Errors
/// No snapshot exists, and every machine that ran before runs.
pub fn take_host_snapshots(
    request: &HostSnapshotRequest<'_>,
    within: &mut dyn FnMut(),
    job: Job<'_>,
) -> Result<HostSnapshotReport> {
    Ok(try_host_snapshots(request, within, job)?)
}

/// Like [`take_host_snapshots`]; an error also names the datasets that cannot be snapshotted, if it is about them.
///
/// # Errors
/// Those of [`take_host_snapshots`].
pub(crate) fn try_host_snapshots(
    request: &HostSnapshotRequest<'_>,
    within: &mut dyn FnMut(),
    job: Job<'_>,
) -> std::result::Result<HostSnapshotReport, NotTaken> {
    let (groups, mode) = all_groups(request)?;
    // The preparations are removed wherever the error occurred.
    make(request, &groups, mode, within, job).inspect_err(|_| abandon(&groups))
}

/// Checks whether host snapshots can be made, as far as that is known without making them.
pub(crate) fn check_host_snapshots(request: &HostSnapshotRequest<'_>) -> Result<()> {
    let (groups, _) = all_groups(request)?;
    let prepared = prepare(request, &groups, (request.now)());
    abandon(&groups);
    Ok(prepared?)
}

/// All groups, in the order in which they are cut.
fn all_groups<'a>(request: &'a HostSnapshotRequest<'a>) -> Result<(Vec<Group<'a>>, CutMode)> {
    let (mut groups, mut mode) = (Vec::new(), CutMode::AtOnce);
    for cut in &request.cuts {
        let mut of_name = groups_of(cut, request.providers)?;
        if !is_cut_at_once(&of_name) {
            mode = CutMode::InTurn;
        }
        if let [group] = &mut of_name[..] {
            group.is_whole_at_cut = !request.keeps_states();
        }
        groups.extend(of_name);
    }
    Ok((groups, mode))
}

fn prepare(
    request: &HostSnapshotRequest<'_>,
    groups: &[Group<'_>],
    time: Timestamp,
) -> std::result::Result<(), NotTaken> {
    let unknown = HostSnapshotRecord::new(request, time, &[]).encode();
    for group in groups {
        let prepared = group.provider.prepare(&group.wanted, &group.label(time, &unknown));
        prepared.map_err(|error| NotTaken::of_group(group, error))?;
    }
    Ok(())
}

fn abandon(groups: &[Group<'_>]) {
    for group in groups {
        group
            .provider
            .abandon(&group.wanted, &group.label(Timestamp::default(), ""));
    }
}

fn make(
    request: &HostSnapshotRequest<'_>,
    groups: &[Group<'_>],
    mode: CutMode,
    within: &mut dyn FnMut(),
    job: Job<'_>,
) -> std::result::Result<HostSnapshotReport, NotTaken> {
    let time = (request.now)();
    prepare(request, groups, time)?;
    let configurations = configurations(request, job)?;
    let guests = request.guests.iter();
    let machines = guests.map(|guest| (guest.journal.as_ref(), &guest.description.summary));
    let _locks = MachineLock::instants(machines, time, job)?;
    job.interrupt.check().map_err(Error::from)?;
    let sessions = Sessions::begin(&request.guests, time, mode, request.subject.coverage(), job)?;
    let (mut instant, mut cut_count) = (GuestPoint::default(), 0);
    let mut besides = Vec::new();
    let maker = request.providers.maker.as_ref();
    let held = sessions.hold_still(&mut |states| {
        instant.time = (request.now)();
        let record = HostSnapshotRecord::new(request, instant.time, states);
        let start = job.clock.now();
        let made = cut_all(groups, &record, maker, &mut cut_count);
        instant.cut = job.clock.now().saturating_sub(start);
        if request.states.is_some() {
            let guests = request.guests.iter();
            besides.extend(
                guests.map(|guest| FirmwareState::read(&guest.description, &guest.machine.rights(), job.clock)),
            );
        }
        within();
        made
    });
    // An existing snapshot of this name belongs to another owner: only new snapshots are removed, after all machines run.
    let made = &groups[..cut_count];
    let held = held.map_err(NotTaken::from).and_then(|held| match held.made {
        Ok(()) => Ok(held),
        Err(error) => Err(NotTaken::of_group(&groups[cut_count], error)),
    });
    let held = held.inspect_err(|_| remove_unusable(made, job))?;
    let held = held.with_newcomers(request, job);
    let record = HostSnapshotRecord::new(request, instant.time, &held.guests);
    complete(
        request,
        groups,
        &record,
        maker,
        KeptStates {
            held: &held,
            time: instant.time,
            configurations,
            besides,
        },
        job,
    )?;
    Ok(HostSnapshotReport {
        snapshots: request.cuts.iter().flat_map(NamedSnapshotSet::snapshots).collect(),
        time: instant.time,
        is_one_instant: mode == CutMode::AtOnce,
        cut: instant.cut,
        guests: held.guests,
        record,
    })
}

/// Removes snapshots that were cut but are unusable.
fn remove_unusable(groups: &[Group<'_>], job: Job<'_>) {
    for reason in groups.iter().flat_map(Group::destroy) {
        job.progress.note(&format!("taking back what was made: {reason}"));
    }
}

impl HostSnapshotRequest<'_> {
    /// Whether states of machines are stored with the host snapshots.
    fn keeps_states(&self) -> bool {
        self.states.is_some() && !self.guests.is_empty()
    }
}

impl NamedSnapshotSet {
    /// The snapshots, by their full names.
    pub fn snapshots(&self) -> impl Iterator<Item = HostSnapshotName> {
        self.wanted.iter().map(|one| HostSnapshotName {
            dataset: one.dataset.clone(),
            name: self.name.clone(),
        })
    }
}

/// The host snapshots of one name, grouped by what one provider can make at one point in time.
fn groups_of<'a>(cut: &'a NamedSnapshotSet, providers: &'a Providers) -> Result<Vec<Group<'a>>> {
    let mut by_provider: BTreeMap<ProviderKind, Vec<HostSnapshotScope>> = BTreeMap::new();
    for one in &cut.wanted {
        by_provider.entry(one.dataset.provider).or_default().push(one.clone());
    }
    let mut groups = Vec::new();
    for (kind, wanted) in by_provider {
        let provider = providers.of(kind);
        groups.extend(provider.groups(&wanted)?.into_iter().map(|wanted| Group {
            provider,
            cut,
            wanted,
            is_whole_at_cut: false,
        }));
    }
    Ok(groups)
}

/// Clones of files are made one after another, all other groups at once.
fn is_cut_at_once(groups: &[Group<'_>]) -> bool {
    let is_one_file = |one: &HostSnapshotScope| one.files.len() == 1;
    match groups {
        [group] if group.provider.kind() == ProviderKind::Reflink => group.wanted.iter().all(is_one_file),
        groups => groups.len() <= 1,
    }
}

/// Makes the snapshots while the machines are frozen: this is the frozen time. Counts the groups that were cut.
fn cut_all(
    groups: &[Group<'_>],
    record: &HostSnapshotRecord,
    maker: Option<&ProcessIdentity>,
    cut_count: &mut usize,
) -> ProviderResult<()> {
    for group in groups {
        let text = record.unconfirmed(group, maker).encode();
        group.provider.create(&group.wanted, &group.label(record.time, &text))?;
        *cut_count += 1;
    }
    Ok(())
}

impl Group<'_> {
    fn label<'c>(&'c self, time: Timestamp, record: &'c str) -> HostSnapshotLabel<'c> {
        HostSnapshotLabel {
            name: &self.cut.name,
            time_s: time.as_second(),
            record,
        }
    }

    /// Removes the snapshots that were cut; returns errors about those that remain.
    fn destroy(&self) -> Vec<String> {
        let failed = self
            .wanted
            .iter()
            .flat_map(|one| self.with_below(one))
            .filter_map(|dataset| {
                let snapshot = HostSnapshotName {
                    dataset,
                    name: self.cut.name.clone(),
                };
                match self.provider.destroy(&snapshot) {
                    Ok(()) | Err(ProviderError::NotFound { .. }) => None,
                    Err(error) => Some(error.to_string()),
                }
            });
        failed.collect()
    }

    /// A dataset, and its descendants if they were cut with it.
    fn with_below(&self, one: &HostSnapshotScope) -> Vec<Dataset> {
        let all = if one.is_tree {
            self.provider.datasets().unwrap_or_default()
        } else {
            Vec::new()
        };
        let prefix = format!("{}/", one.dataset.name);
        let below = all
            .into_iter()
            .map(|state| state.dataset)
            .filter(|dataset| dataset.name.starts_with(&prefix));
        std::iter::once(one.dataset.clone()).chain(below).collect()
    }
}
