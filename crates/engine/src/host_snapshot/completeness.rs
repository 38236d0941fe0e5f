//! Whether a set of host snapshots is complete: a process that snapshots several datasets may be killed between two of them.
//!
//! The record of each snapshot says so once all of them exist. Writing this into all records is the last step, so if
//! one record does not say it, another record of the same set may. If no record says it, the set counts as incomplete.

use std::collections::BTreeMap;

use holdfast_host::provider::{Dataset, HostSnapshot, HostSnapshotName, NotedSnapshot};

use super::{HostSnapshotRecord, Providers};

/// Known host snapshots; each dataset is queried once.
pub struct SetCompleteness<'a> {
    providers: &'a Providers,
    noted: BTreeMap<Dataset, Vec<NotedSnapshot>>,
}

/// What is known about host snapshots of one name of several datasets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SetState {
    /// They are of one point in time.
    Yes,
    /// Unknown, for this reason.
    Unknown(String),
    /// They are not of one point in time, for this reason.
    No(String),
}

impl<'a> SetCompleteness<'a> {
    /// Completeness of host snapshots of these providers; nothing is read yet.
    pub fn new(providers: &'a Providers) -> Self {
        Self {
            providers,
            noted: BTreeMap::new(),
        }
    }

    /// Whether the set of a host snapshot is complete, according to its record; none if another program made it.
    pub fn of(&mut self, name: &HostSnapshotName, record: Option<&str>) -> Option<bool> {
        let Some(text) = record else {
            // Host snapshots in a folder of Holdfast always get a record: without one, only the cut itself was done.
            return name.dataset.provider.has_folders().then_some(false);
        };
        let record = HostSnapshotRecord::parse(text)?;
        Some(record.is_whole || self.is_whole_elsewhere(name, &record))
    }

    /// Whether another snapshot of the set records that the set is complete.
    fn is_whole_elsewhere(&mut self, name: &HostSnapshotName, record: &HostSnapshotRecord) -> bool {
        let others = self.others(name, record);
        others.iter().any(|(_, found)| {
            let found = found.as_ref();
            found.is_some_and(|found| found.is_whole)
        })
    }

    /// The datasets of the set that have no host snapshot of that point in time, by name.
    pub(crate) fn missing(&mut self, name: &HostSnapshotName, record: &HostSnapshotRecord) -> Vec<String> {
        let others = self.others(name, record).into_iter();
        let missing = others.filter(|(_, found)| found.is_none());
        missing.map(|(dataset, _)| dataset.to_string()).collect()
    }

    /// The other datasets of the set, and their noted snapshots of the same point in time.
    fn others(
        &mut self,
        name: &HostSnapshotName,
        record: &HostSnapshotRecord,
    ) -> Vec<(Dataset, Option<HostSnapshotRecord>)> {
        let datasets = record.datasets.iter().filter_map(|text| Dataset::parse(text));
        let datasets = datasets.filter(|dataset| *dataset != name.dataset);
        let mut others = Vec::new();
        for dataset in datasets {
            let noted = self.noted(&dataset).iter();
            let mut of_name = noted.filter(|one| one.name.name == name.name);
            let found = of_name.find_map(|one| {
                let found = HostSnapshotRecord::parse(one.record.as_deref()?)?;
                (found.set.is_some() && found.set == record.set).then_some(found)
            });
            others.push((dataset, found));
        }
        others
    }

    /// The noted snapshots of a dataset; empty if it cannot be queried.
    fn noted(&mut self, dataset: &Dataset) -> &[NotedSnapshot] {
        let provider = self.providers.of_dataset(dataset);
        let ask = || provider.noted(&dataset.name).unwrap_or_default();
        self.noted.entry(dataset.clone()).or_insert_with(ask)
    }

    /// Whether host snapshots of several datasets, with the disks of one machine, are of one point in time.
    pub(crate) fn together(&mut self, snapshots: &[&HostSnapshot]) -> SetState {
        // A snapshot of one dataset is always of one point in time.
        if snapshots.len() < 2 {
            return SetState::Yes;
        }
        let record = |snapshot: &HostSnapshot| snapshot.record.as_deref().and_then(HostSnapshotRecord::parse);
        let mut sets: Vec<_> = snapshots.iter().map(|snapshot| record(snapshot)?.set).collect();
        sets.sort();
        sets.dedup();
        let complete: Vec<Option<bool>> = snapshots
            .iter()
            .map(|snapshot| self.of(&snapshot.name, snapshot.record.as_deref()))
            .collect();
        let is_unfinished = complete.contains(&Some(false));
        match &sets[..] {
            _ if is_unfinished => SetState::No(
                "the process that made its host snapshots died before all of them were made, so they may be of several points in time"
                    .to_owned(),
            ),
            [Some(_)] => SetState::Yes,
            [None] => SetState::Unknown(
                "no record says whether they were taken at the same point in time".to_owned(),
            ),
            _ => SetState::Unknown("they were not made at one instant".to_owned()),
        }
    }
}
