//! A point in time for which the machine is paused.

use std::time::Duration;

use serde_json::{Value, json};

use super::bitmaps::{changes_actions, next_actions};
use super::{Pause, PointInTimeEvent, PreparedDisk, SnapshotBuilder};
use crate::qemu::disks::set_drive;
use crate::qemu::memory::{MemoryMode, MemoryPipe, MemorySender, Sent};
use crate::qemu::names::Role;
use crate::qemu::qmp::{MonitorError, Result};

/// The watchdog resumes a machine after ten seconds, so during a longer pause the machine may have run.
const LONG: Duration = Duration::from_secs(3);

type MemoryTarget = (MemoryPipe, MemoryMode);

impl SnapshotBuilder<'_> {
    /// Takes the point in time of disks if some of them must not get a filter while the machine runs.
    pub(super) fn take_paused(
        &self,
        disks: &[PreparedDisk],
        report: &mut dyn FnMut(PointInTimeEvent),
    ) -> Result<Pause> {
        if disks.is_empty() {
            return Ok(self.pause_for(None, &|| Ok(()), report)?.0);
        }
        self.add_next_bitmaps(disks)?;
        let switch = || {
            self.add_filters_of_copied(disks)?;
            self.check_prepared(disks)?;
            self.set_filters(disks)?;
            self.add_frozen_of_copied(disks)
        };
        let (pause, _) = self.pause_for(None, &switch, report)?;
        self.copy_changes(disks)?;
        Ok(pause)
    }

    /// Takes the point in time when all memory has been sent.
    pub(super) fn take_with_memory(
        &self,
        disks: &[PreparedDisk],
        memory: MemoryTarget,
        report: &mut dyn FnMut(PointInTimeEvent),
    ) -> Result<(Pause, bool)> {
        let switch = || {
            self.activate_images(disks)?;
            if disks.is_empty() {
                return Ok(());
            }
            self.check_prepared(disks)?;
            self.set_filters(disks)?;
            // Sending takes long. Bitmaps that were added before it would contain all writes of the guest during that
            // time.
            let actions = disks.iter().flat_map(|disk| {
                let mut actions = changes_actions(self.run, disk);
                actions.extend(next_actions(disk));
                actions
            });
            self.transact(&actions.collect::<Vec<_>>())?;
            self.add_frozen_of_copied(disks)
        };
        self.pause_for(Some(memory), &switch, report)
    }

    /// Pauses the machine, runs `work`, and resumes it. Returns whether it is left paused because another client has
    /// paused it in the meantime.
    pub(super) fn pause_for(
        &self,
        memory: Option<MemoryTarget>,
        work: &dyn Fn() -> Result<()>,
        report: &mut dyn FnMut(PointInTimeEvent),
    ) -> Result<(Pause, bool)> {
        let status = self.execute("query-status", Value::Null)?;
        let was_running = status.get("running").and_then(Value::as_bool).unwrap_or_default();
        let stopped = self.stop(was_running, memory, report);
        // If the answer is late, the machine may be stopped nevertheless.
        let (start, sent) = stopped.inspect_err(|_| {
            if was_running {
                self.try_resume();
            }
        })?;
        let is_left_paused = was_running && sent.as_ref().is_some_and(|sent| sent.is_paused_by_others);
        let was_running = was_running && !is_left_paused;
        let settings = sent.map(|sent| sent.settings);
        report(PointInTimeEvent::Stopped);
        let result = work();
        let cut = self.clock.now().saturating_sub(start);
        if result.is_ok() {
            report(PointInTimeEvent::Reached);
        }
        let others = self.clock.now().saturating_sub(start).saturating_sub(cut);
        let result = if was_running && others > LONG {
            result.and_then(|()| self.check_still_paused())
        } else {
            result
        };
        if was_running {
            self.execute("cont", Value::Null).inspect_err(|_| self.try_resume())?;
        }
        let total = self.clock.now().saturating_sub(start);
        if let Some(settings) = settings {
            settings.restore(self.monitor);
        }
        result?;
        let pause = if was_running {
            Pause { cut, others, total }
        } else {
            Pause::default()
        };
        Ok((pause, is_left_paused))
    }

    /// During a long pause, the watchdog or another client may have resumed the machine.
    fn check_still_paused(&self) -> Result<()> {
        if self.execute("query-status", Value::Null)?["running"] == true {
            return Err(MonitorError::Refused {
                command: "stop".to_owned(),
                class: "GenericError".to_owned(),
                description: "the machine was resumed before the point in time was complete".to_owned(),
            });
        }
        Ok(())
    }

    fn sending(&self) -> MemorySender<'_> {
        MemorySender {
            monitor: self.monitor,
            clock: self.clock,
            run: self.run,
        }
    }

    /// Stops the machine, after sending its memory if requested, and returns the time of the stop.
    fn stop(
        &self,
        was_running: bool,
        memory: Option<MemoryTarget>,
        report: &mut dyn FnMut(PointInTimeEvent),
    ) -> Result<(Duration, Option<Sent>)> {
        if let Some((pipe, mode)) = memory {
            let sent = self
                .sending()
                .send(pipe, mode, &mut || report(PointInTimeEvent::Running))?;
            return Ok((self.clock.now().saturating_sub(sent.paused_for), Some(sent)));
        }
        let start = self.clock.now();
        if was_running {
            self.execute("stop", Value::Null)?;
        }
        Ok((start, None))
    }

    /// Activates the images that QEMU has released, and inserts the filters.
    fn activate_images(&self, disks: &[PreparedDisk]) -> Result<()> {
        for (number, disk) in disks.iter().enumerate() {
            let id = self.run.thing(&format!("awake{number}"));
            let arguments = json!({ "type": "nbd", "id": id, "node-name": disk.disk.node, "name": id });
            self.execute("block-export-add", arguments)?;
            self.execute("block-export-del", json!({ "id": id, "mode": "hard" }))?;
            self.add_scratch(number, disk)?;
            self.add_filter(number, disk)?;
        }
        Ok(())
    }

    /// Tries again to resume the machine: the first attempt may have failed for a temporary reason. If this fails,
    /// the watchdog resumes the machine.
    fn try_resume(&self) {
        self.monitor.wake().ok();
        self.execute("cont", Value::Null).ok();
    }

    /// Inserts the filters under their devices, one after the other.
    pub(super) fn set_filters(&self, disks: &[PreparedDisk]) -> Result<()> {
        for (number, disk) in disks.iter().enumerate() {
            let filter = self.run.node(number, Role::Filter);
            set_drive(self.monitor, &disk.disk.device, &filter)?;
        }
        Ok(())
    }
}
