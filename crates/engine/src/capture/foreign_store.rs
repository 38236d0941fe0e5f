//! What stores a machine that comes from another hypervisor: its disks, and behind them the texts that describe it.

use std::collections::BTreeMap;
use std::io::Read;

use holdfast_block::{BlockDevice, DirtyBitmap};
use holdfast_repo::{Manifest, Parent, Repository, Source, SourceData};
use jiff::Timestamp;

use super::images::BackupReport;
use crate::job::bottleneck::Stages;
use crate::job::priority::BulkPriority;
use crate::job::read_meter::{Meter, MeteredDevice};
use crate::job::{Counting, Error, Job, MachineName, Result, Unit};

/// A machine, ready to be stored.
pub(crate) struct MachineToStore<'a> {
    /// What its snapshots are listed under.
    pub(crate) name: MachineName,
    /// What the phase is called: "importing", "backing up".
    pub(crate) doing: &'a str,
    /// The snapshot that it is compared with.
    pub(crate) parent: Option<&'a Manifest>,
    /// Words to find the snapshot by.
    pub(crate) tags: Vec<String>,
    /// The instant that it is of.
    pub(crate) time: Timestamp,
    /// The host that stores it.
    pub(crate) host: String,
    /// The program that stores it.
    pub(crate) program: String,
    /// Notes of the snapshot.
    pub(crate) notes: BTreeMap<String, String>,
    /// Its disks, which are read one after another.
    pub(crate) disks: Vec<DiskToStore<'a>>,
    /// What is stored behind the disks, in this order.
    pub(crate) streams: Vec<(String, Box<dyn Read + Send + 'a>)>,
}

/// A disk of it.
pub(crate) struct DiskToStore<'a> {
    /// Its name in the snapshot: `vda`.
    pub(crate) name: String,
    /// Its content, which does not change meanwhile.
    pub(crate) device: &'a dyn BlockDevice,
    /// Where it may differ from the disk of this name in the parent, where that is known.
    pub(crate) changed: Option<&'a DirtyBitmap>,
    /// Notes of the disk.
    pub(crate) notes: BTreeMap<String, String>,
}

/// Stores it as a snapshot.
pub(crate) fn store_machine(
    repository: &Repository,
    machine: MachineToStore<'_>,
    job: Job<'_>,
) -> Result<BackupReport> {
    let start = job.clock.now();
    job.progress
        .phase(&format!("{} {}", machine.doing, machine.name), Unit::Bytes);
    let stages = Stages::new(job.clock, job.progress);
    let meters: Vec<Meter> = machine.disks.iter().map(|_| Meter::new()).collect();
    let metered: Vec<MeteredDevice<'_>> = machine
        .disks
        .iter()
        .zip(&meters)
        .map(|(disk, meter)| MeteredDevice {
            inner: disk.device,
            meter,
            progress: job.progress,
            stages: &stages,
        })
        .collect();
    let disks = machine.disks.iter().zip(&metered).map(|(disk, device)| Source {
        name: disk.name.clone(),
        data: match disk.changed {
            Some(changed) => SourceData::Changes { device, changed },
            None => SourceData::Disk(device),
        },
        notes: disk.notes.clone(),
    });
    let mut sources: Vec<Source<'_>> = disks.collect();
    let mut streams = machine.streams;
    sources.extend(streams.iter_mut().map(|(name, bytes)| Source {
        name: name.clone(),
        data: SourceData::Stream(&mut **bytes),
        notes: BTreeMap::new(),
    }));
    let _bulk = BulkPriority::begin();
    let report = repository.backup(
        holdfast_repo::BackupRequest {
            machine: machine.name.to_string(),
            time_ms: machine.time.as_millisecond(),
            tags: machine.tags,
            parent: machine.parent.map_or(Parent::None, |parent| Parent::Named(parent.id)),
            host: machine.host,
            program: machine.program,
            notes: machine.notes,
            sources,
            thread_count: job.thread_count,
        },
        &job.watch_stages(Counting::Elsewhere, &stages),
    );
    let report = report.map_err(of_stream)?;
    Ok(BackupReport {
        snapshot: report.snapshot,
        stored_bytes: report.stored_bytes,
        bottleneck: stages.bottleneck(),
        duration: job.clock.now().saturating_sub(start),
    })
}

/// What a stream says was wrong with where it comes from, and not with the text that was being stored then.
fn of_stream(error: holdfast_repo::Error) -> Error {
    match error {
        holdfast_repo::Error::Stream { source, name } => match source.downcast::<Error>() {
            Ok(error) => error,
            Err(source) => holdfast_repo::Error::Stream { source, name }.into(),
        },
        error => error.into(),
    }
}
