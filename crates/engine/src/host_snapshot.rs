//! `snapshot`: host snapshots of datasets, at an instant at which the machines in them hold still.
//!
//! 1. What can be done before is: names are looked at, folders made, watchdogs started, runs noted.
//! 2. The guests freeze their file systems, all at once. Where what is wanted cannot be cut at one instant, those that cannot freeze
//!    stand still.
//! 3. The providers cut.
//! 4. The machines run on, and thaw.
//! 5. What was cut is made durable, with a record of how it came about.
//!
//! Whatever goes wrong, the machines run on; what was cut before it went wrong is removed again.

mod guests;
mod list;
mod places;
mod record;
mod remove;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_host::Tools;
use holdfast_host::provider::{
    Btrfs, Cutting, Dataset, HostSnapshotName, Provider, ProviderKind, ProviderResult, Reflink, Wanted, Zfs,
};
use jiff::Timestamp;

use crate::error::Result;
use crate::job::Job;
pub use guests::{GuestReport, GuestRequest};
use guests::{Instant, Sessions};
pub use list::{HostSnapshotList, HostSnapshotState, list_host_snapshots};
pub use places::{MachinePlaces, machines_in, places_of};
pub use record::HostSnapshotRecord;
pub use remove::{HostRemovalReport, HostRemovalRequest, PlannedRemoval, remove_host_snapshots};

/// The providers of a host.
pub struct Providers {
    zfs: Zfs,
    btrfs: Btrfs,
    reflink: Reflink,
}

impl Providers {
    /// Those that `tools` reach. What is mounted to look into snapshots is mounted below `views`.
    pub fn new(tools: &Arc<dyn Tools>, views: PathBuf, clock: Arc<dyn Clock>) -> Self {
        Self {
            zfs: Zfs::new(Arc::clone(tools), views, clock),
            btrfs: Btrfs::new(Arc::clone(tools)),
            reflink: Reflink,
        }
    }

    /// One of them.
    pub fn of(&self, kind: ProviderKind) -> &dyn Provider {
        match kind {
            ProviderKind::Zfs => &self.zfs,
            ProviderKind::Btrfs => &self.btrfs,
            ProviderKind::Reflink => &self.reflink,
        }
    }

    /// The provider of a dataset.
    pub fn of_dataset(&self, dataset: &Dataset) -> &dyn Provider {
        self.of(dataset.provider)
    }
}

/// What host snapshots are to be made of, and how.
pub struct HostSnapshotRequest<'a> {
    /// The providers of this host.
    pub providers: &'a Providers,
    /// Of what.
    pub wanted: Vec<Wanted>,
    /// What they are called: each name means one more snapshot of the same instant.
    pub names: Vec<String>,
    /// The machines that hold still meanwhile.
    pub guests: Vec<GuestRequest<'a>>,
    /// Tells the time of day; asked at the instant.
    pub now: &'a dyn Fn() -> Timestamp,
    /// The program that does it.
    pub program: String,
}

/// Host snapshots that were made.
#[derive(Debug)]
pub struct HostSnapshotReport {
    /// What was made, in the order of what was wanted, name by name.
    pub snapshots: Vec<HostSnapshotName>,
    /// Their instant.
    pub time: Timestamp,
    /// Whether all of a name are of one instant, whatever wrote to them.
    pub is_one_instant: bool,
    /// How long the providers took.
    pub cut: Duration,
    /// What became of the machines.
    pub guests: Vec<GuestReport>,
    /// What is noted of them.
    pub record: HostSnapshotRecord,
}

/// What one provider cuts at one instant.
struct Group<'a> {
    provider: &'a dyn Provider,
    wanted: Vec<Wanted>,
}

/// Makes host snapshots.
///
/// # Errors
/// None is there then, and every machine runs that ran before.
pub fn take_host_snapshots(request: &HostSnapshotRequest<'_>, job: Job<'_>) -> Result<HostSnapshotReport> {
    let groups = groups(request)?;
    let is_one_instant = is_one_instant(&groups);
    let time = (request.now)();
    let none = HostSnapshotRecord::new(request, time, &[]);
    for name in &request.names {
        let text = none.encode();
        groups
            .iter()
            .try_for_each(|group| group.provider.prepare(&group.wanted, &cutting(name, time, &text)))?;
    }
    job.interrupt.check()?;
    let sessions = Sessions::begin(&request.guests, (time, is_one_instant), job)?;
    let mut instant = Instant::default();
    let (made, guests) = sessions.hold_still(&mut |states| {
        instant.time = (request.now)();
        let record = HostSnapshotRecord::new(request, instant.time, states).encode();
        let start = job.clock.now();
        let made = cut_all(&groups, &request.names, (instant.time, &record));
        instant.cut = job.clock.now().saturating_sub(start);
        made
    })?;
    let record = HostSnapshotRecord::new(request, instant.time, &guests);
    let settled = made.and_then(|()| {
        let text = record.encode();
        let all = request
            .names
            .iter()
            .flat_map(|name| groups.iter().map(move |group| (name, group)));
        let mut all = all.map(|(name, group)| {
            group
                .provider
                .settle(&group.wanted, &cutting(name, instant.time, &text))
        });
        all.try_for_each(|settled| settled)
    });
    if let Err(error) = settled {
        undo(&groups, &request.names, job);
        return Err(error.into());
    }
    let snapshot = |name: &String, one: &Wanted| HostSnapshotName {
        dataset: one.dataset.clone(),
        name: name.clone(),
    };
    let of_name = |name| request.wanted.iter().map(move |one| snapshot(name, one));
    Ok(HostSnapshotReport {
        snapshots: request.names.iter().flat_map(of_name).collect(),
        time: instant.time,
        is_one_instant,
        cut: instant.cut,
        guests,
        record,
    })
}

fn cutting<'a>(name: &'a str, time: Timestamp, record: &'a str) -> Cutting<'a> {
    Cutting {
        name,
        time_s: time.as_second(),
        record,
    }
}

/// What is wanted, by who makes it at one instant.
fn groups<'a>(request: &HostSnapshotRequest<'a>) -> Result<Vec<Group<'a>>> {
    let mut by_provider: BTreeMap<ProviderKind, Vec<Wanted>> = BTreeMap::new();
    for one in &request.wanted {
        by_provider.entry(one.dataset.provider).or_default().push(one.clone());
    }
    let mut groups = Vec::new();
    for (kind, wanted) in by_provider {
        let provider = request.providers.of(kind);
        let made = provider.groups(&wanted)?.into_iter();
        groups.extend(made.map(|wanted| Group { provider, wanted }));
    }
    Ok(groups)
}

/// Clones of files are made one after another, all other groups at once.
fn is_one_instant(groups: &[Group<'_>]) -> bool {
    let is_one_file = |one: &Wanted| one.files.len() == 1;
    match groups {
        [group] if group.provider.kind() == ProviderKind::Reflink => group.wanted.iter().all(is_one_file),
        groups => groups.len() <= 1,
    }
}

/// The instant: the frozen time passes here.
fn cut_all(groups: &[Group<'_>], names: &[String], (time, record): (Timestamp, &str)) -> ProviderResult<()> {
    let mut done: Vec<(&Group<'_>, &str)> = Vec::new();
    for name in names {
        for group in groups {
            if let Err(error) = group.provider.cut(&group.wanted, &cutting(name, time, record)) {
                for (group, name) in done {
                    destroy(group, name);
                }
                return Err(error);
            }
            done.push((group, name));
        }
    }
    Ok(())
}

fn destroy(group: &Group<'_>, name: &str) -> Vec<String> {
    let failed = group.wanted.iter().filter_map(|one| {
        let snapshot = HostSnapshotName {
            dataset: one.dataset.clone(),
            name: name.to_owned(),
        };
        let gone = group.provider.destroy(&snapshot);
        gone.err().map(|error| format!("{snapshot}: {error}"))
    });
    failed.collect()
}

/// Takes back what was cut and could not be settled.
fn undo(groups: &[Group<'_>], names: &[String], job: Job<'_>) {
    for name in names {
        for reason in groups.iter().flat_map(|group| destroy(group, name)) {
            job.progress.note(&format!("taking back what was made: {reason}"));
        }
    }
}
