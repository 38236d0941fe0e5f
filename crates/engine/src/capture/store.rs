//! Stores the disks of a machine, and the texts and streams that belong to it, in one snapshot.

use std::collections::BTreeMap;
use std::io::Read;
use std::time::Duration;

use holdfast_block::{BlockDevice, DirtyBitmap};
use holdfast_repo::{Source, SourceData};
use jiff::Timestamp;

use super::sink::{PointInTime, SnapshotSink};
use crate::job::bottleneck::Stages;
use crate::job::priority::BulkPriority;
use crate::job::rate_limit::{RateLimit, RateLimitedDevice};
use crate::job::read_meter::{Meter, MeteredDevice};
use crate::job::{Error, Job, Result};

/// A machine, ready to be stored.
pub(crate) struct MachineToStore<'a> {
    pub(crate) time: Timestamp,
    /// Notes of the snapshot.
    pub(crate) notes: BTreeMap<String, String>,
    /// Its disks, which are read one after another.
    pub(crate) disks: Vec<DiskToStore<'a>>,
    /// What is stored after the disks, in this order.
    pub(crate) others: Vec<OtherToStore<'a>>,
    /// Bytes that are read of disks and others, where that is known.
    pub(crate) total_bytes: Option<u64>,
}

pub(crate) struct DiskToStore<'a> {
    /// Its name in the snapshot: `vda`.
    pub(crate) name: String,
    /// Its content, which does not change during the backup.
    pub(crate) device: &'a dyn BlockDevice,
    /// Where it may differ from the disk of this name in the parent; none if that is not known.
    pub(crate) changed: Option<&'a DirtyBitmap>,
    /// Notes of the disk.
    pub(crate) notes: BTreeMap<String, String>,
}

/// Memory, a text, or another stream of the machine.
pub(crate) struct OtherToStore<'a> {
    pub(crate) name: String,
    pub(crate) content: OtherContent<'a>,
    pub(crate) notes: BTreeMap<String, String>,
}

pub(crate) enum OtherContent<'a> {
    /// Memory, in pages.
    Pages(&'a dyn BlockDevice),
    /// A stream, which is read to its end after everything before it.
    Stream(Box<dyn Read + 'a>),
}

impl<'a> OtherToStore<'a> {
    /// A stream without notes.
    pub(crate) fn stream(name: &str, stream: impl Read + 'a) -> Self {
        Self {
            name: name.to_owned(),
            content: OtherContent::Stream(Box::new(stream)),
            notes: BTreeMap::new(),
        }
    }
}

/// Stores a machine, its disks at the given pace. Returns how long it took.
pub(crate) fn store_machine(
    sink: &dyn SnapshotSink,
    machine: MachineToStore<'_>,
    pace: &RateLimit<'_>,
    job: Job<'_>,
) -> Result<Duration> {
    let start = job.clock.now();
    if let Some(total_bytes) = machine.total_bytes {
        job.progress.total(total_bytes);
    }
    let stages = Stages::new(job.clock, job.progress);
    let meters: Vec<Meter> = machine.disks.iter().map(|_| Meter::new()).collect();
    // The pace is outermost: time spent waiting for it is not the source's.
    let devices: Vec<_> = machine
        .disks
        .iter()
        .zip(&meters)
        .map(|(disk, meter)| RateLimitedDevice {
            inner: MeteredDevice {
                inner: disk.device,
                meter,
                progress: job.progress,
                stages: &stages,
            },
            pace,
        })
        .collect();
    let disks = machine.disks.iter().zip(&devices).map(|(disk, device)| Source {
        name: disk.name.clone(),
        data: match disk.changed {
            Some(changed) => SourceData::Changes { device, changed },
            None => SourceData::Disk(device),
        },
        notes: disk.notes.clone(),
    });
    let mut sources: Vec<Source<'_>> = disks.collect();
    let mut others = machine.others;
    sources.extend(others.iter_mut().map(|other| Source {
        name: other.name.clone(),
        data: match &mut other.content {
            OtherContent::Pages(pages) => SourceData::Disk(*pages),
            OtherContent::Stream(stream) => SourceData::Stream(&mut **stream),
        },
        notes: other.notes.clone(),
    }));
    let _bulk = BulkPriority::begin();
    let stored = sink.store(PointInTime {
        time: machine.time,
        notes: machine.notes,
        sources,
        stages: &stages,
    });
    stored.map_err(of_stream)?;
    Ok(job.clock.now().saturating_sub(start))
}

/// An error that a stream passes on is reported as the original error, not as one of the stream.
fn of_stream(error: Error) -> Error {
    match error {
        Error::Repository(holdfast_repo::Error::Stream { source, name }) => match source.downcast::<Error>() {
            Ok(error) => error,
            Err(source) => holdfast_repo::Error::Stream { source, name }.into(),
        },
        error => error,
    }
}
