//! Records the guest's writes to disks, so that a copy can send them again.
//!
//! Bitmaps of a disk follow one another. [`WriteTracker::take`] adds a bitmap and disables the one before in one
//! transaction, so every write is recorded by one of them. The disabled bitmap is exported over NBD, read, and removed.
//! Clearing one bitmap instead is not possible: QEMU clears none that is exported, and one that records changes while it
//! is read.
//!
//! QEMU marks a write when it has completed. A reader that takes the marks before it reads the disk misses no write.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use holdfast_block::Clock;
use serde_json::json;

use super::disks::{QemuDisk, check_nodes, disks};
use super::jobs::{refuse_jobs, remove_bitmap, transact};
use super::names::RunId;
use super::remove::{delete_export, remove_run};
use super::serving::{refuse_unserved, start_server};
use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand, Result};

/// How long a bitmap is in use after its export was deleted, at most.
const RELEASE_ATTEMPT_COUNT: u32 = 200;
const RELEASE_INTERVAL: Duration = Duration::from_millis(5);

/// The disks whose writes are recorded.
pub struct TrackingRequest {
    /// The run whose number is in the names of all bitmaps and exports.
    pub run: RunId,
    /// The disks.
    pub disks: Vec<QemuDisk>,
    /// Bytes that one mark covers: a power of two, at least 512.
    pub granularity_bytes: u32,
    /// A listening socket, on which QEMU answers NBD clients.
    pub listener: OwnedFd,
}

/// Records writes to disks of a running machine.
#[derive(Debug)]
pub struct WriteTracker {
    run: RunId,
    granularity_bytes: u32,
    disks: Vec<TrackedDisk>,
}

#[derive(Debug)]
struct TrackedDisk {
    device: String,
    node: String,
    /// The number of the bitmap that records.
    generation: Mutex<u64>,
}

/// Marks that were taken: an export that has them as a metadata context.
#[derive(Debug)]
pub struct TakenMarks {
    /// The name of the NBD export.
    pub export: String,
    /// The metadata context.
    pub context: String,
    bitmap: String,
}

impl TakenMarks {
    /// The name of the bitmap in the metadata context.
    pub fn bitmap(&self) -> &str {
        &self.bitmap
    }
}

impl WriteTracker {
    /// Records the writes to disks from now on, and exports the disks.
    ///
    /// # Errors
    /// QEMU has no objects of the run afterwards, unless the error says otherwise.
    pub fn start(monitor: &dyn Monitor, clock: &dyn Clock, request: TrackingRequest) -> Result<Self> {
        let run = request.run;
        Self::try_start(monitor, request).map_err(|error| match remove_run(monitor, clock, run) {
            Ok(()) => error,
            Err(left) => MonitorError::Left {
                because: Box::new(error),
                left: Box::new(left),
            },
        })
    }

    fn try_start(monitor: &dyn Monitor, request: TrackingRequest) -> Result<Self> {
        refuse_jobs(monitor)?;
        check_nodes(monitor, &request.disks)?;
        refuse_unserved(monitor, &request.disks.iter().collect::<Vec<_>>())?;
        let tracked = request.disks.into_iter().map(|disk| TrackedDisk {
            device: disk.device,
            node: disk.node,
            generation: Mutex::new(0),
        });
        let tracker = Self {
            run: request.run,
            granularity_bytes: request.granularity_bytes,
            disks: tracked.collect(),
        };
        let added: Vec<_> = (0..tracker.disks.len())
            .map(|number| tracker.addition(number, 0))
            .collect();
        // The bitmaps come first: they show whose server it is.
        transact(monitor, &added)?;
        // QEMU's server is found by its exports afterwards.
        if !tracker.disks.is_empty() {
            start_server(monitor, tracker.run, request.listener)?;
        }
        for (number, disk) in tracker.disks.iter().enumerate() {
            let export = tracker.export(number);
            let arguments = json!({ "type": "nbd", "id": export, "node-name": disk.node, "name": export });
            monitor.execute(&QmpCommand::new("block-export-add", arguments))?;
        }
        Ok(tracker)
    }

    /// Number of disks.
    pub fn disk_count(&self) -> usize {
        self.disks.len()
    }

    /// Bytes that one mark covers.
    pub fn granularity_bytes(&self) -> u32 {
        self.granularity_bytes
    }

    /// The name of the NBD export of the disk `number`, which shows its current content.
    pub fn export(&self, number: usize) -> String {
        self.run.thing(&format!("disk{number}"))
    }

    /// Takes the marks of the disk `number`; writes from now on are recorded in other ones. The caller reads them, ends its
    /// connection, and calls [`drop_marks`](Self::drop_marks).
    ///
    /// # Errors
    /// The marks are lost.
    pub fn take(&self, monitor: &dyn Monitor, number: usize) -> Result<TakenMarks> {
        let disk = &self.disks[number];
        let mut generation = disk.generation.lock().unwrap_or_else(PoisonError::into_inner);
        let bitmap = self.bitmap(number, *generation);
        let disabled = json!({
            "type": "block-dirty-bitmap-disable",
            "data": { "node": disk.node, "name": bitmap },
        });
        transact(monitor, &[self.addition(number, *generation + 1), disabled])?;
        *generation += 1;
        let export = self.run.thing(&format!("marks{number}-{generation}"));
        self.export_marks(monitor, number, export, bitmap)
    }

    /// Exports marks again that could not be read: QEMU 10 refuses that if it has given up the disk since the export was made,
    /// and takes the disk back for a new export.
    ///
    /// # Errors
    /// The marks are lost.
    pub fn export_again(&self, monitor: &dyn Monitor, number: usize, taken: TakenMarks) -> Result<TakenMarks> {
        delete_export(monitor, &taken.export)?;
        let export = format!("{}-again", taken.export);
        self.export_marks(monitor, number, export, taken.bitmap)
    }

    fn export_marks(&self, monitor: &dyn Monitor, number: usize, export: String, bitmap: String) -> Result<TakenMarks> {
        let node = &self.disks[number].node;
        let arguments = json!({
            "type": "nbd",
            "id": export,
            "node-name": node,
            "name": export,
            "bitmaps": [{ "node": node, "name": bitmap }],
        });
        monitor.execute(&QmpCommand::new("block-export-add", arguments))?;
        Ok(TakenMarks {
            export,
            context: format!("qemu:dirty-bitmap:{bitmap}"),
            bitmap,
        })
    }

    /// Removes marks that were taken and read.
    pub fn drop_marks(
        &self,
        monitor: &dyn Monitor,
        clock: &dyn Clock,
        number: usize,
        taken: &TakenMarks,
    ) -> Result<()> {
        delete_export(monitor, &taken.export)?;
        let node = &self.disks[number].node;
        let mut removed = remove_bitmap(monitor, node, &taken.bitmap);
        for _ in 1..RELEASE_ATTEMPT_COUNT {
            match &removed {
                Err(error) if error.is_refusal() => clock.sleep(RELEASE_INTERVAL),
                _ => break,
            }
            removed = remove_bitmap(monitor, node, &taken.bitmap);
        }
        removed
    }

    /// Number of bytes that are marked in the disk `number`. None if writes may have been missed: the device has another
    /// node, or the bitmap does not record.
    pub fn dirty_bytes(&self, monitor: &dyn Monitor, number: usize) -> Result<Option<u64>> {
        let disk = &self.disks[number];
        let generation = disk.generation.lock().unwrap_or_else(PoisonError::into_inner);
        let name = self.bitmap(number, *generation);
        let present = disks(monitor)?;
        let found = present
            .iter()
            .find(|now| now.device == disk.device && now.node == disk.node);
        let bitmap = found.and_then(|now| now.bitmaps.iter().find(|bitmap| bitmap.name == name));
        let valid = bitmap.filter(|bitmap| bitmap.is_recording && !bitmap.is_inconsistent);
        Ok(valid.map(|bitmap| bitmap.dirty_bytes))
    }

    /// Removes all bitmaps and exports of the run from QEMU.
    pub fn stop(self, monitor: &dyn Monitor, clock: &dyn Clock) -> Result<()> {
        remove_run(monitor, clock, self.run)
    }

    fn bitmap(&self, number: usize, generation: u64) -> String {
        self.run.thing(&format!("writes{number}-{generation}"))
    }

    fn addition(&self, number: usize, generation: u64) -> serde_json::Value {
        json!({
            "type": "block-dirty-bitmap-add",
            "data": {
                "node": self.disks[number].node,
                "name": self.bitmap(number, generation),
                "granularity": self.granularity_bytes,
            },
        })
    }
}
