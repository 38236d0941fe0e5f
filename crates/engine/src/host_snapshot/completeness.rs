//! Whether all of what was to be cut together was cut: a process that makes host snapshots of several datasets may be killed between two of them.
//!
//! The record of each says so, once everything is there. Where it does not, others of the same instant may: the last thing that is done is
//! to write that into all of them. What none of them says is believed of none.

use std::collections::BTreeMap;

use holdfast_host::provider::{Dataset, HostSnapshot, HostSnapshotName, NotedSnapshot};

use super::{HostSnapshotRecord, Providers};

/// What is known of host snapshots, each dataset asked once.
pub struct SetCompleteness<'a> {
    providers: &'a Providers,
    noted: BTreeMap<Dataset, Vec<NotedSnapshot>>,
}

/// What is known of host snapshots of one name of several datasets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SetState {
    /// They are of one instant.
    Yes,
    /// It is not known, for this reason.
    Unknown(String),
    /// They are not, for this reason.
    No(String),
}

impl<'a> SetCompleteness<'a> {
    /// Nothing has been asked yet.
    pub fn new(providers: &'a Providers) -> Self {
        Self {
            providers,
            noted: BTreeMap::new(),
        }
    }

    /// Whether everything that was to be cut with a host snapshot was, by its record; none where another program made it.
    pub fn of(&mut self, name: &HostSnapshotName, record: Option<&str>) -> Option<bool> {
        let Some(text) = record else {
            // Host snapshots in a folder of Holdfast get a record: this one was cut, and no more.
            return name.dataset.provider.has_folders().then_some(false);
        };
        let record = HostSnapshotRecord::parse(text)?;
        Some(record.is_whole || self.is_whole_elsewhere(name, &record))
    }

    /// Whether one that was cut with it says so.
    fn is_whole_elsewhere(&mut self, name: &HostSnapshotName, record: &HostSnapshotRecord) -> bool {
        let others = self.others(name, record);
        others.iter().any(|(_, found)| {
            let found = found.as_ref();
            found.is_some_and(|found| found.is_whole)
        })
    }

    /// The datasets that were to be cut with it and have no host snapshot of that instant, by their names.
    pub(crate) fn missing(&mut self, name: &HostSnapshotName, record: &HostSnapshotRecord) -> Vec<String> {
        let others = self.others(name, record).into_iter();
        let missing = others.filter(|(_, found)| found.is_none());
        missing.map(|(dataset, _)| dataset.to_string()).collect()
    }

    /// The other datasets that were to be cut with it, and what is noted of those of its instant.
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

    /// What cannot be asked has none.
    fn noted(&mut self, dataset: &Dataset) -> &[NotedSnapshot] {
        let provider = self.providers.of_dataset(dataset);
        let ask = || provider.noted(&dataset.name).unwrap_or_default();
        self.noted.entry(dataset.clone()).or_insert_with(ask)
    }

    /// Whether host snapshots of several datasets, with the disks of one machine, are of one instant.
    pub(crate) fn together(&mut self, snapshots: &[&HostSnapshot]) -> SetState {
        // What is cut of one dataset is of one instant.
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
                "nothing is noted of them that would tell whether they were made at one instant".to_owned(),
            ),
            _ => SetState::Unknown("they were not made at one instant".to_owned()),
        }
    }
}
