//! Metrics of a repository and its machines, from the snapshots and the list of objects; disk data is not read.

use std::collections::BTreeMap;

use holdfast_engine::{ListReport, ListRequest, MachineIdentity, list, time_of};
use holdfast_repo::Manifest;

use super::seconds;
use crate::context::Context;
use crate::errors::Error;
use crate::output::prometheus::{Metric, MetricValue};

/// The snapshots of a machine.
struct MachineFigures<'a> {
    newest: &'a Manifest,
    snapshot_count: u64,
}

/// Metrics of the repository that the command line, the environment or the configuration names.
pub(super) fn of_repository(context: &Context) -> Result<Vec<Metric>, Error> {
    let repository = context.open_repository()?;
    let path = context.repository()?.display().to_string();
    let listed = list(&repository, &ListRequest::default())?;
    let sizes = repository.stored_sizes().map_err(holdfast_engine::Error::from)?;
    let values = [
        (
            "holdfast_repository_stored_bytes",
            "Bytes of a repository in its store.",
            sizes.stored_bytes,
        ),
        (
            "holdfast_repository_index_bytes",
            "Bytes of the index of a repository.",
            sizes.index_bytes,
        ),
        (
            "holdfast_repository_packs",
            "How many packs a repository has.",
            sizes.pack_count,
        ),
        (
            "holdfast_repository_snapshots",
            "How many snapshots of machines a repository has.",
            listed.snapshots.len() as u64,
        ),
        (
            "holdfast_repository_damaged_snapshots",
            "How many snapshots of a repository cannot be read.",
            listed.damaged.len() as u64,
        ),
        (
            "holdfast_repository_lost_snapshots",
            "How many snapshots of a repository are missing although they were not removed.",
            listed.lost.len() as u64,
        ),
    ];
    let labels = [("repository", &path[..])];
    let mut metrics: Vec<Metric> = values
        .into_iter()
        .map(|(name, help, value)| {
            let mut metric = Metric::new(name, help);
            metric.add(&labels, MetricValue::Whole(value));
            metric
        })
        .collect();
    metrics.extend(of_machines(&listed, &path));
    Ok(metrics)
}

fn of_machines(listed: &ListReport, repository: &str) -> [Metric; 4] {
    let mut count = Metric::new("holdfast_machine_snapshots", "How many snapshots a machine has.");
    let mut newest = Metric::new(
        "holdfast_machine_last_snapshot_timestamp_seconds",
        "The instant of the newest snapshot of a machine.",
    );
    let mut size = Metric::new(
        "holdfast_machine_last_snapshot_size_bytes",
        "Size of all disks in the newest snapshot of a machine.",
    );
    let mut stored = Metric::new(
        "holdfast_machine_last_snapshot_stored_bytes",
        "Bytes of the packs that the newest snapshot of a machine added to the repository.",
    );
    let mut machines: BTreeMap<(&str, Option<usize>), MachineFigures<'_>> = BTreeMap::new();
    for snapshot in &listed.snapshots {
        let key = (&snapshot.machine[..], listed.named.place(snapshot));
        let figures = machines.entry(key).or_insert(MachineFigures {
            newest: snapshot,
            snapshot_count: 0,
        });
        figures.snapshot_count += 1;
        if time_of(snapshot) >= time_of(figures.newest) {
            figures.newest = snapshot;
        }
    }
    for MachineFigures {
        newest: snapshot,
        snapshot_count,
    } in machines.values()
    {
        let identity = MachineIdentity::of(snapshot).to_string();
        let labels = [
            ("repository", repository),
            ("machine", &snapshot.machine[..]),
            ("identity", &identity[..]),
        ];
        let add = |metric: &mut Metric, value| metric.add(&labels, MetricValue::Whole(value));
        add(&mut count, *snapshot_count);
        add(&mut newest, seconds(time_of(snapshot)));
        add(&mut size, snapshot.logical_bytes());
        add(&mut stored, snapshot.stored_bytes);
    }
    [count, newest, size, stored]
}
