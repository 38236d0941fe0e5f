//! `holdfast host list`: lists host snapshots, of Holdfast and of other programs.

use std::ffi::OsString;

use holdfast_engine::{HostSnapshotState, KeptState, SnapshotSizes, Unfinished, UnfinishedKind, list_host_snapshots};
use holdfast_host::provider::{Dataset, ProviderKind};
use jiff::Timestamp;
use serde::Serialize;

use super::datasets::is_without;
use super::{Meant, datasets_of, meant};
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::datasets;
use crate::machines::states::StateArgs;
use crate::output::{Column, Page, Report, Style, Table};
use crate::process::time;
use crate::units;

/// Arguments of `host list`.
#[derive(Debug, clap::Args)]
pub(super) struct HostListArgs {
    /// Of these only: datasets, or machines, for the datasets with their disks
    #[arg(value_name = "DATASET|MACHINE")]
    targets: Vec<OsString>,
    /// Measure their size, even if that requires a look at every block (btrfs)
    #[arg(long)]
    space: bool,
    #[command(flatten)]
    states: StateArgs,
    /// The hypervisor's address: qemu:///system, qemu:///session, qemu+ssh://HOST/system
    #[arg(short, long, value_name = "URI")]
    connect: Option<String>,
}

impl Verb for HostListArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See the host snapshots of a dataset",
            line: "holdfast host list tank/vm",
        },
        Example {
            wish: "See the host snapshots in the datasets of a machine, and their sizes",
            line: "holdfast host list web1 --space",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `host list`.
#[derive(Debug, Serialize)]
struct HostSnapshotsListed {
    datasets: Vec<DatasetSnapshots>,
    /// Machines whose rollback is incomplete.
    half_rolled_back: Vec<HalfRolledBack>,
}

/// A machine with an incomplete rollback: some disks are rolled back and others are not, unless a process is
/// still working on it.
#[derive(Debug, Serialize)]
struct HalfRolledBack {
    machine: String,
    uuid: String,
    /// The name of the rollback's target point.
    point: String,
    /// Host snapshots of the previous state, the oldest first.
    safety: Vec<String>,
    /// When the rollback began.
    since: String,
}

impl HalfRolledBack {
    fn of(work: Unfinished) -> Option<Self> {
        (work.kind == UnfinishedKind::Rollback).then(|| Self {
            machine: work.machine,
            uuid: work.uuid,
            point: work.point,
            safety: work.safety,
            since: Timestamp::from_millisecond(work.start_ms)
                .unwrap_or_default()
                .to_string(),
        })
    }
}

#[derive(Debug, Serialize)]
struct DatasetSnapshots {
    dataset: String,
    snapshots: Vec<HostSnapshotDocument>,
}

#[derive(Debug, Serialize)]
struct HostSnapshotDocument {
    name: String,
    time: String,
    #[serde(skip)]
    time_local: String,
    /// ZFS's GUID, or btrfs's UUID.
    identity: String,
    used_bytes: Option<u64>,
    referenced_bytes: Option<u64>,
    hold_count: u64,
    /// The program that created it; null if that is not recorded.
    program: Option<String>,
    /// "file system", "crash" or "shut off", for the disks only.
    consistency: Option<String>,
    /// Common to all host snapshots of the same point in time; null if not recorded.
    set: Option<String>,
    /// Machines whose configuration, firmware variables and TPM are stored with it.
    configurations: Vec<String>,
    /// Those of the machines that can be resumed from their memory.
    memories: Vec<String>,
    machine_count: Option<u64>,
    machines: Vec<String>,
    frozen_ms: Option<u64>,
    paused_ms: Option<u64>,
    /// Whether everything that belongs to it was created; null if that is unknown.
    is_whole: Option<bool>,
}

impl HostSnapshotDocument {
    fn new(state: HostSnapshotState, states: &[KeptState], context: &Context) -> Self {
        let HostSnapshotState {
            snapshot,
            record,
            is_whole,
        } = state;
        let time = Timestamp::from_second(snapshot.time_s).unwrap_or_default();
        let record = record.as_ref();
        let set = record.and_then(|record| record.set);
        let kept: Vec<&KeptState> = states.iter().filter(|kept| Some(kept.set) == set).collect();
        let name = |kept: &&KeptState| kept.manifest.machine.clone();
        Self {
            time: time.to_string(),
            time_local: time::local(time, context.zone()),
            identity: snapshot.identity,
            used_bytes: snapshot.used_bytes,
            referenced_bytes: snapshot.referenced_bytes,
            hold_count: snapshot.hold_count,
            program: record.map(|record| record.program.clone()),
            consistency: record
                .map(|record| record.consistency.clone())
                .filter(|word| !word.is_empty()),
            set: set.map(|set| set.to_string()),
            configurations: kept.iter().map(name).collect(),
            memories: kept.iter().filter(|kept| kept.has_memory()).map(name).collect(),
            machine_count: record.map(|record| record.machine_count),
            machines: record.map(|record| record.machines.clone()).unwrap_or_default(),
            frozen_ms: record.map(|record| record.frozen_ms),
            paused_ms: record.map(|record| record.paused_ms),
            is_whole,
            name: snapshot.name.name,
        }
    }

    fn row(&self) -> [String; 7] {
        let bytes = |bytes: Option<u64>| bytes.map(units::bytes).unwrap_or_default();
        let unnamed = self
            .machine_count
            .unwrap_or_default()
            .saturating_sub(self.machines.len() as u64);
        let mut machines = self.machines.clone();
        if unnamed > 0 {
            machines.push(format!("{} more", units::count(unnamed)));
        }
        [
            self.name.clone(),
            self.time_local.clone(),
            bytes(self.used_bytes),
            bytes(self.referenced_bytes),
            if self.hold_count > 0 {
                "held".to_owned()
            } else {
                String::new()
            },
            if self.is_whole == Some(false) {
                "unfinished".to_owned()
            } else if self.memories.is_empty() {
                self.consistency.clone().unwrap_or_default()
            } else {
                "memory".to_owned()
            },
            machines.join(", "),
        ]
    }
}

impl Report for HostSnapshotsListed {
    fn command(&self) -> &'static str {
        "host list"
    }

    fn human(&self, page: &mut Page) {
        if self.datasets.is_empty() {
            page.line("no host snapshots");
        }
        for half in &self.half_rolled_back {
            page.styled(
                Style::Bad,
                &format!(
                    "{} is on its way back to {} since {}: unless a rollback is running, holdfast rollback {}@{} ends that",
                    half.machine, half.point, half.since, half.machine, half.point
                ),
            );
        }
        for dataset in &self.datasets {
            page.line(&dataset.dataset);
            if dataset.snapshots.is_empty() {
                page.line("  no host snapshot");
                continue;
            }
            let mut table = Table::new([
                Column::long_text("SNAPSHOT"),
                Column::text("TIME"),
                Column::number("USED"),
                Column::number("REFERS"),
                Column::text("HELD"),
                Column::text("CONSISTENT"),
                Column::long_text("MACHINES"),
            ]);
            for snapshot in &dataset.snapshots {
                table.row(snapshot.row());
            }
            page.table(&table);
            page.gap();
        }
    }
}

fn run(args: &HostListArgs, context: &Context) -> Result<Exit, Error> {
    let providers = datasets::providers(context);
    let mut wanted: Vec<Dataset> = Vec::new();
    if args.targets.is_empty() {
        for kind in ProviderKind::ALL {
            match providers.of(kind).datasets() {
                Ok(found) => wanted.extend(found.into_iter().map(|state| state.dataset)),
                Err(error) if is_without(&error) => {}
                Err(error) => return Err(holdfast_engine::Error::from(error).into()),
            }
        }
    }
    for meant in meant(&args.targets, args.connect.as_deref(), context)? {
        match meant {
            Meant::Dataset(dataset) => wanted.push(dataset),
            Meant::Machine(guest) => wanted.extend(datasets_of(&guest)),
        }
    }
    wanted.sort();
    wanted.dedup();
    let sizes = if args.space {
        SnapshotSizes::Measured
    } else {
        SnapshotSizes::Unknown
    };
    let lists = list_host_snapshots(&providers, &wanted, sizes)?;
    let is_asked_for = !args.targets.is_empty();
    let lists = lists
        .into_iter()
        .filter(|list| is_asked_for || !list.snapshots.is_empty());
    let (states, unfinished) = context.work(1, |job| match args.states.open(context, job)? {
        Some(store) => Ok((store.states(job)?, store.unfinished()?)),
        None => Ok((Vec::new(), Vec::new())),
    })?;
    let documents = lists.map(|list| DatasetSnapshots {
        dataset: list.dataset.to_string(),
        snapshots: list
            .snapshots
            .into_iter()
            .map(|state| HostSnapshotDocument::new(state, &states, context))
            .collect(),
    });
    context.report(&HostSnapshotsListed {
        datasets: documents.collect(),
        half_rolled_back: unfinished.into_iter().filter_map(HalfRolledBack::of).collect(),
    })
}
