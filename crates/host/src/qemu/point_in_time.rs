//! All disks of a running machine at one point in time.
//!
//! The slow work is done first: the scratch files, the filters, which no request passes yet, and the NBD server. Then
//! the filters are inserted under all devices at the same time, between two requests of the guest: [`switches`]. The
//! machine is paused only if something besides the disks must belong to the same point in time: [`paused`].
//! Afterwards the frozen disks are served.

mod bitmaps;
mod export;
mod paused;
mod permitted;
mod switches;

use std::os::fd::OwnedFd;
use std::time::Duration;

use holdfast_block::Clock;
use serde_json::{Value, json};

use self::bitmaps::{changes_actions, next_actions};
use super::copy::PartCopier;
use super::disks::{QemuDisk, check_nodes, moved};
use super::graph::Graph;
use super::jobs::{refuse_jobs, transact};
use super::memory::{MemoryMode, MemoryPipe};
use super::names::{Role, RunId};
use super::remove::remove_run;
use super::serving::start_server;
use crate::qemu::names::changes_name;
use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand, Result};

/// A filter never delays a write for longer. Linux resets a controller that has not answered for 30 seconds, and a
/// reset with a write in flight may destroy a disk ([`Danger::IdeResetWritesFirstSector`](super::Danger)).
///
/// Source: Linux, `SD_TIMEOUT` in `drivers/scsi/sd.h`, for SCSI disks, including IDE, SATA and USB. virtio-blk has no
/// such timeout, and virtio-scsi restarts it. Windows waits for 60 seconds (`TimeOutValue` of its service Disk).
const WRITE_DELAY_MAX: Duration = Duration::from_secs(10);

/// The disks to freeze, and the options.
pub struct PointInTimeRequest {
    /// The run whose number is in all names of nodes and bitmaps.
    pub run: RunId,
    /// The disks.
    pub disks: Vec<DiskRequest>,
    /// How long a write of the guest waits for its copy before the copy is abandoned: one to ten whole seconds.
    pub write_deadline: Duration,
    /// A listening socket, on which QEMU answers NBD clients.
    pub listener: OwnedFd,
    /// The target of the machine's memory, if it is to be saved, and the mode.
    pub memory: Option<(MemoryPipe, MemoryMode)>,
    /// When the machine is paused for the point in time.
    pub pause_policy: PausePolicy,
}

/// When the machine is paused for the point in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PausePolicy {
    /// Only to save its memory, and for disks in iothreads where this QEMU cannot insert a filter otherwise. Other
    /// disks get their filters between two requests.
    #[default]
    WhereNeeded,
    /// Always, since something besides the disks must belong to the same point in time.
    Always,
}

/// Steps that are reported to the caller while the disks are frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PointInTimeEvent {
    /// The machine still runs while its memory is sent. Reported every few seconds.
    Running,
    /// The machine is paused.
    Stopped,
    /// The point in time is reached. Quick work that belongs to it must be done now.
    Reached,
}

/// A disk to freeze.
pub struct DiskRequest {
    /// The disk.
    pub disk: QemuDisk,
    /// An empty file of the disk's size, in which the filter saves data before it is overwritten.
    pub scratch: OwnedFd,
    /// An empty file of the disk's size for copies of the frozen disk; none if QEMU serves the disk itself.
    pub spool: Option<OwnedFd>,
    /// The name of a new bitmap that records changes from this point in time on.
    pub next_bitmap: Option<String>,
    /// The name of a bitmap with the changes until this point in time. A copy of it is served with the disk.
    pub changes: Option<String>,
    /// The node with that bitmap, if it is below the disk's own node. Writes to the layers above it are served, too.
    pub changes_below: Option<String>,
}

/// How long the machine was paused, and for what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pause {
    /// From the request to stop until the filters were in place, without the time in `others`.
    pub cut: Duration,
    /// Time that the caller's own work took within the pause.
    pub others: Duration,
    /// The whole pause, until the command to resume. Zero if the machine was not running.
    pub total: Duration,
}

/// Frozen disks.
#[derive(Debug)]
pub struct PointInTime {
    run: RunId,
    /// How long the machine was paused.
    pub pause: Pause,
    /// Whether the machine was left paused, because another client had paused it in the meantime.
    pub is_left_paused: bool,
    /// The names of the NBD exports, in the order of the request. The export of a copied disk holds no data: writing
    /// zeroes to a range requests its copy.
    pub exports: Vec<String>,
    /// The copiers of the disks that are not served.
    pub copiers: Vec<Option<PartCopier>>,
    /// The metadata context with the changes of each disk for which a bitmap was named.
    pub change_contexts: Vec<Option<String>>,
    /// The live export of each disk whose bitmap belongs to a node below: it reports which layer holds each byte.
    pub layer_exports: Vec<Option<String>>,
}

/// Disks whose filters are in QEMU but not yet in the path of the guest's requests.
pub struct PreparedPointInTime<'a> {
    builder: SnapshotBuilder<'a>,
    disks: Vec<PreparedDisk>,
    way: TakeMethod,
}

/// Disks that are frozen but not served yet.
pub struct UnservedPointInTime<'a> {
    builder: SnapshotBuilder<'a>,
    disks: Vec<PreparedDisk>,
    has_switches: bool,
    pause: Pause,
    is_left_paused: bool,
}

/// How the filters are inserted under the devices.
enum TakeMethod {
    /// Under one device, between two requests.
    Put,
    /// Under all devices at the same time: [`switches`].
    Switched(PausePolicy),
    /// While the machine is paused.
    Stopped,
    /// While the machine is paused after its memory was sent.
    WithMemory(MemoryPipe, MemoryMode),
}

impl PointInTime {
    /// Prepares, takes and serves the point in time. `report` is called as in [`PreparedPointInTime::take`].
    ///
    /// # Errors
    /// See [`prepare`](Self::prepare).
    pub fn make(
        monitor: &dyn Monitor,
        clock: &dyn Clock,
        request: PointInTimeRequest,
        report: &mut dyn FnMut(PointInTimeEvent),
    ) -> Result<Self> {
        Self::prepare(monitor, clock, request)?.take(report)?.serve()
    }

    /// Does the slow work before the point in time. The guest's file systems need not be frozen yet.
    ///
    /// # Errors
    /// After a failure in any stage, the machine continues to run if it was running before, and QEMU has no objects
    /// of the run. If the cleanup fails too, the error reports that.
    pub fn prepare<'a>(
        monitor: &'a dyn Monitor,
        clock: &'a dyn Clock,
        request: PointInTimeRequest,
    ) -> Result<PreparedPointInTime<'a>> {
        let run = request.run;
        let builder = SnapshotBuilder { monitor, clock, run };
        let prepared = builder.prepare(request);
        let (disks, way) = prepared.map_err(|error| builder.remove_after(error))?;
        Ok(PreparedPointInTime { builder, disks, way })
    }

    /// Removes all nodes, bitmaps and exports of the run from QEMU, without effect on the guest.
    pub fn release(self, monitor: &dyn Monitor, clock: &dyn Clock) -> Result<()> {
        remove_run(monitor, clock, self.run)
    }
}

impl<'a> PreparedPointInTime<'a> {
    /// Freezes the disks, and reports the steps to `report`. Afterwards the guest's file systems can be thawed.
    pub fn take(self, report: &mut dyn FnMut(PointInTimeEvent)) -> Result<UnservedPointInTime<'a>> {
        let Self { builder, disks, way } = self;
        let has_switches = matches!(way, TakeMethod::Switched(_));
        let taken = match way {
            TakeMethod::Put => builder.take_one(&disks, report).map(|pause| (pause, false)),
            TakeMethod::Switched(pause_policy) => builder
                .take_switched(&disks, pause_policy, report)
                .map(|pause| (pause, false)),
            TakeMethod::Stopped => builder.take_paused(&disks, report).map(|pause| (pause, false)),
            TakeMethod::WithMemory(pipe, mode) => builder.take_with_memory(&disks, (pipe, mode), report),
        };
        let (pause, is_left_paused) = taken.map_err(|error| builder.remove_after(error))?;
        Ok(UnservedPointInTime {
            builder,
            disks,
            has_switches,
            pause,
            is_left_paused,
        })
    }

    /// Removes the prepared nodes from QEMU without taking the point in time.
    pub fn abandon(self) -> Result<()> {
        remove_run(self.builder.monitor, self.builder.clock, self.builder.run)
    }
}

impl UnservedPointInTime<'_> {
    /// Exports the frozen disks.
    pub fn serve(self) -> Result<PointInTime> {
        let Self { builder, disks, .. } = &self;
        let served = if self.has_switches {
            builder.remove_switches(disks).and_then(|()| builder.serve(disks))
        } else {
            builder.serve(disks)
        };
        let served = served.map_err(|error| builder.remove_after(error))?;
        Ok(PointInTime {
            run: builder.run,
            pause: self.pause,
            is_left_paused: self.is_left_paused,
            exports: served.exports,
            copiers: served.copiers,
            change_contexts: served.change_contexts,
            layer_exports: served.layer_exports,
        })
    }
}

struct SnapshotBuilder<'a> {
    monitor: &'a dyn Monitor,
    clock: &'a dyn Clock,
    run: RunId,
}

impl SnapshotBuilder<'_> {
    fn execute(&self, name: &'static str, arguments: Value) -> Result<Value> {
        self.monitor.execute(&QmpCommand::new(name, arguments))
    }

    /// Removes from QEMU the objects of a failed attempt.
    fn remove_after(&self, error: MonitorError) -> MonitorError {
        match remove_run(self.monitor, self.clock, self.run) {
            Ok(()) => error,
            Err(left) => MonitorError::Left {
                because: Box::new(error),
                left: Box::new(left),
            },
        }
    }

    fn prepare(&self, request: PointInTimeRequest) -> Result<(Vec<PreparedDisk>, TakeMethod)> {
        let named: Vec<QemuDisk> = request.disks.iter().map(|disk| disk.disk.clone()).collect();
        refuse_jobs(self.monitor)?;
        check_nodes(self.monitor, &named)?;
        self.check_exported(&request.disks)?;
        let deadline_s = write_delay_s(request.write_deadline);
        let has_memory = request.memory.is_some();
        let mut disks = Vec::new();
        for (number, disk) in request.disks.into_iter().enumerate() {
            let prepared = PreparedDisk {
                scratch_set: self.pass_file(disk.scratch)?,
                spool_set: disk.spool.map(|spool| self.pass_file(spool)).transpose()?,
                deadline_s,
                disk: disk.disk,
                next_bitmap: disk.next_bitmap,
                changes: disk.changes,
                changes_below: disk.changes_below,
            };
            // QEMU releases its images after a migration, and cannot release one that has a filter.
            if !has_memory {
                self.add_scratch(number, &prepared)?;
                if prepared.spool_set.is_none() {
                    self.add_filter(number, &prepared)?;
                }
            }
            disks.push(prepared);
        }
        if !disks.is_empty() {
            start_server(self.monitor, self.run, request.listener)?;
        }
        let is_served = disks.iter().all(|disk| disk.spool_set.is_none());
        let way = match (&disks[..], request.memory, request.pause_policy) {
            (_, Some((pipe, mode)), _) => TakeMethod::WithMemory(pipe, mode),
            ([_], None, PausePolicy::WhereNeeded) if is_served => TakeMethod::Put,
            ([_, ..], None, pause_policy) if is_served => {
                self.insert_switches(&disks)?;
                TakeMethod::Switched(pause_policy)
            }
            (_, None, _) => TakeMethod::Stopped,
        };
        Ok((disks, way))
    }

    fn serve(&self, disks: &[PreparedDisk]) -> Result<DiskExports> {
        let (mut exports, mut copiers) = (Vec::new(), Vec::new());
        let (mut change_contexts, mut layer_exports) = (Vec::new(), Vec::new());
        for (number, disk) in disks.iter().enumerate() {
            let (export, copier) = if let Some(set) = disk.spool_set {
                self.export_marks(number, disk, set)?
            } else {
                self.add_frozen(number)?;
                (self.export(number, disk, &self.run.node(number, Role::Frozen))?, None)
            };
            exports.push(export);
            copiers.push(copier);
            layer_exports.push(self.export_layers(number, disk)?);
            let changes = disk.changes.as_ref();
            change_contexts.push(changes.map(|_| format!("qemu:dirty-bitmap:{}", changes_name(self.run))));
        }
        Ok(DiskExports {
            exports,
            copiers,
            change_contexts,
            layer_exports,
        })
    }

    fn pass_file(&self, file: OwnedFd) -> Result<u64> {
        // The label identifies the file after the run was killed.
        let label = self.run.thing("scratch");
        let added = QmpCommand::new("add-fd", json!({ "opaque": label })).with_file(file);
        let answer = self.monitor.execute(&added)?;
        let set = answer.get("fdset-id").and_then(Value::as_u64);
        set.ok_or_else(|| MonitorError::Invalid {
            command: "add-fd".to_owned(),
            detail: "no fdset-id".to_owned(),
        })
    }

    fn add_scratch(&self, number: usize, disk: &PreparedDisk) -> Result<()> {
        self.add_file(&self.run.node(number, Role::Scratch), disk.scratch_set)
    }

    /// Adds the filter of a disk above its scratch node; no requests pass it yet.
    fn add_filter(&self, number: usize, disk: &PreparedDisk) -> Result<()> {
        let arguments = json!({
            "driver": "copy-before-write",
            "node-name": self.run.node(number, Role::Filter),
            "file": disk.disk.node,
            "target": self.run.node(number, Role::Scratch),
            "on-cbw-error": "break-snapshot",
            "cbw-timeout": disk.deadline_s,
        });
        self.execute("blockdev-add", arguments).map(drop)
    }

    /// Adds the node of a file that is not needed after the run. It is never flushed: QEMU flushes a node when it
    /// deletes it, and the guest would wait until all cached data is written.
    fn add_file(&self, node: &str, set: u64) -> Result<()> {
        let cache = json!({ "no-flush": true });
        let arguments = json!({
            "driver": "raw",
            "node-name": node,
            "discard": "unmap",
            "cache": cache,
            "file": { "driver": "file", "filename": format!("/dev/fdset/{set}"), "discard": "unmap", "cache": cache },
        });
        self.execute("blockdev-add", arguments).map(drop)
    }

    /// Inserts the filter of a single disk while the machine runs: QEMU does it between two requests.
    fn take_one(&self, disks: &[PreparedDisk], report: &mut dyn FnMut(PointInTimeEvent)) -> Result<Pause> {
        self.add_next_bitmaps(disks)?;
        self.check_prepared(disks)?;
        self.set_filters(disks)?;
        report(PointInTimeEvent::Reached);
        self.copy_changes(disks)?;
        Ok(Pause::default())
    }

    fn check_prepared(&self, disks: &[PreparedDisk]) -> Result<()> {
        let named: Vec<QemuDisk> = disks.iter().map(|disk| disk.disk.clone()).collect();
        check_nodes(self.monitor, &named)
    }

    /// Adds the bitmaps of the next run a moment before the point in time. They record a few earlier changes as well.
    fn add_next_bitmaps(&self, disks: &[PreparedDisk]) -> Result<()> {
        let actions: Vec<Value> = disks.iter().filter_map(next_actions).collect();
        self.transact(&actions)
    }

    /// Copies the bitmaps of the last run a moment after the point in time. They contain all earlier changes, and a
    /// few later ones. Fails if another client took a snapshot in between: its images would have changes that no
    /// bitmap records.
    fn copy_changes(&self, disks: &[PreparedDisk]) -> Result<()> {
        let actions: Vec<Value> = disks.iter().flat_map(|disk| changes_actions(self.run, disk)).collect();
        self.transact(&actions)?;
        let graph = Graph::query(self.monitor)?;
        let is_moved = |(number, disk): &(usize, &PreparedDisk)| {
            graph.child(&self.run.node(*number, Role::Filter), "file") != Some(&disk.disk.node)
        };
        disks
            .iter()
            .enumerate()
            .find(is_moved)
            .map_or(Ok(()), |(_, disk)| Err(moved(&disk.disk.device)))
    }

    fn transact(&self, actions: &[Value]) -> Result<()> {
        transact(self.monitor, actions)
    }
}

/// What readers need to know about each disk: the fields of [`PointInTime`].
struct DiskExports {
    exports: Vec<String>,
    copiers: Vec<Option<PartCopier>>,
    change_contexts: Vec<Option<String>>,
    layer_exports: Vec<Option<String>>,
}

struct PreparedDisk {
    scratch_set: u64,
    /// The fdset of the spool file, if the disk is copied and not exported.
    spool_set: Option<u64>,
    deadline_s: u64,
    disk: QemuDisk,
    next_bitmap: Option<String>,
    changes: Option<String>,
    changes_below: Option<String>,
}

/// QEMU takes whole seconds, and zero would mean no limit.
fn write_delay_s(write_deadline: Duration) -> u64 {
    write_deadline.clamp(Duration::from_secs(1), WRITE_DELAY_MAX).as_secs()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::write_delay_s;

    #[test]
    fn a_filter_delays_writes_less_than_the_timeout_of_controllers() {
        let held =
            [0, 900, 3_000, 30_000, 86_400_000].map(|milliseconds| write_delay_s(Duration::from_millis(milliseconds)));
        assert_eq!(held, [1, 1, 3, 10, 10]);
        assert_eq!(write_delay_s(Duration::MAX), 10);
    }
}
