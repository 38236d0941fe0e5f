//! An instant for which the machine is stopped.

use std::time::Duration;

use serde_json::{Value, json};

use super::bitmaps::{changes_actions, next_actions};
use super::{Pause, PointInTimeEvent, PreparedDisk, SnapshotBuilder};
use crate::qemu::disks::set_drive;
use crate::qemu::memory::{MemoryMode, MemoryPipe, MemorySender, Sent};
use crate::qemu::names::Role;
use crate::qemu::qmp::{MonitorError, Result};

/// The watchdog lets a machine run on after ten seconds, so a longer instant may not have been one.
const LONG: Duration = Duration::from_secs(3);

type MemoryTarget = (MemoryPipe, MemoryMode);

impl SnapshotBuilder<'_> {
    /// The instant of disks of which some must not get a filter while the machine runs.
    pub(super) fn take_paused(&self, disks: &[PreparedDisk], tell: &mut dyn FnMut(PointInTimeEvent)) -> Result<Pause> {
        if disks.is_empty() {
            return Ok(self.pause_for(None, &|| Ok(()), tell)?.0);
        }
        self.begin_next(disks)?;
        let switch = || {
            self.add_filters_of_copied(disks)?;
            self.check_prepared(disks)?;
            self.set_filters(disks)?;
            self.add_frozen_of_copied(disks)
        };
        let (pause, _) = self.pause_for(None, &switch, tell)?;
        self.keep_changes(disks)?;
        Ok(pause)
    }

    /// The instant at which all memory is sent.
    pub(super) fn take_with_memory(
        &self,
        disks: &[PreparedDisk],
        memory: MemoryTarget,
        tell: &mut dyn FnMut(PointInTimeEvent),
    ) -> Result<(Pause, bool)> {
        let switch = || {
            self.take_back(disks)?;
            if disks.is_empty() {
                return Ok(());
            }
            self.check_prepared(disks)?;
            self.set_filters(disks)?;
            // Sending takes long, and bitmaps that began before it would name what the guest has written meanwhile.
            let actions = disks.iter().flat_map(|disk| {
                let mut actions = changes_actions(self.run, disk);
                actions.extend(next_actions(disk));
                actions
            });
            self.transact(&actions.collect::<Vec<_>>())?;
            self.add_frozen_of_copied(disks)
        };
        self.pause_for(Some(memory), &switch, tell)
    }

    /// Stops the machine, does `work`, and lets it run on. Gives whether it is left paused, since others have paused it meanwhile.
    pub(super) fn pause_for(
        &self,
        memory: Option<MemoryTarget>,
        work: &dyn Fn() -> Result<()>,
        tell: &mut dyn FnMut(PointInTimeEvent),
    ) -> Result<(Pause, bool)> {
        let status = self.execute("query-status", Value::Null)?;
        let was_running = status.get("running").and_then(Value::as_bool).unwrap_or_default();
        let stopped = self.stop(was_running, memory, tell);
        // An answer that comes late may stop the machine all the same.
        let (start, sent) = stopped.inspect_err(|_| self.resume_anyway(was_running))?;
        let is_left_paused = was_running && sent.as_ref().is_some_and(|sent| sent.is_paused_by_others);
        let was_running = was_running && !is_left_paused;
        let settings = sent.map(|sent| sent.settings);
        tell(PointInTimeEvent::Stopped);
        let result = work();
        let cut = self.clock.now().saturating_sub(start);
        if result.is_ok() {
            tell(PointInTimeEvent::Reached);
        }
        let others = self.clock.now().saturating_sub(start).saturating_sub(cut);
        let result = result.and_then(|()| self.check_stands_still(was_running && others > LONG));
        if was_running {
            self.execute("cont", Value::Null)
                .inspect_err(|_| self.resume_anyway(was_running))?;
        }
        let total = self.clock.now().saturating_sub(start);
        if let Some(settings) = settings {
            self.sending().reset(&settings);
        }
        result?;
        let pause = if was_running {
            Pause { cut, others, total }
        } else {
            Pause::default()
        };
        Ok((pause, is_left_paused))
    }

    /// Where the instant took long, somebody may have let the machine run on in the middle of it.
    fn check_stands_still(&self, is_doubtful: bool) -> Result<()> {
        if is_doubtful && self.execute("query-status", Value::Null)?["running"] == true {
            return Err(MonitorError::Refused {
                command: "stop".to_owned(),
                class: "GenericError".to_owned(),
                description: "the machine was let run on before the instant was over".to_owned(),
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

    /// Stops the machine, if need be at the end of its memory; gives since when it stands still.
    fn stop(
        &self,
        was_running: bool,
        memory: Option<MemoryTarget>,
        tell: &mut dyn FnMut(PointInTimeEvent),
    ) -> Result<(Duration, Option<Sent>)> {
        if let Some((pipe, mode)) = memory {
            let sent = self
                .sending()
                .send(pipe, mode, &mut || tell(PointInTimeEvent::Running))?;
            return Ok((self.clock.now().saturating_sub(sent.stood_still), Some(sent)));
        }
        let start = self.clock.now();
        if was_running {
            self.execute("stop", Value::Null)?;
        }
        Ok((start, None))
    }

    /// Takes the images back that QEMU has given up, and puts filters on them.
    fn take_back(&self, disks: &[PreparedDisk]) -> Result<()> {
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

    /// Once more: the first attempt may have failed for a reason that has passed. The watchdog is the next in line.
    fn resume_anyway(&self, was_running: bool) {
        if was_running {
            self.monitor.wake().ok();
            self.execute("cont", Value::Null).ok();
        }
    }

    /// Puts the filters under their devices, one after the other.
    pub(super) fn set_filters(&self, disks: &[PreparedDisk]) -> Result<()> {
        for (number, disk) in disks.iter().enumerate() {
            let filter = self.run.node(number, Role::Filter);
            set_drive(self.monitor, &disk.disk.device, &filter)?;
        }
        Ok(())
    }
}
