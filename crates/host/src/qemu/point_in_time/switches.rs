//! One point in time of several disks without a pause. Each device gets a switch, a node that passes all requests to
//! its disk, and one command redirects all switches to the filters.
//!
//! `qom-set` sets the node of one device, and no transaction has such an action, so several devices would get their
//! filters one after the other. `blockdev-reopen` takes a list of nodes. QEMU first drains all of them: all requests
//! of the guest have completed, and no new ones begin. Then QEMU changes the children of all nodes, or of none, and
//! accepts requests again. So every write that was reported to the guest as completed is below all filters, and every
//! write that depends on it passes a filter. QEMU drains and changes the nodes within one command of its main loop,
//! also for disks in several iothreads.

use serde_json::{Value, json};

use super::{Pause, PausePolicy, PointInTimeEvent, PreparedDisk, SnapshotBuilder};
use crate::qemu::disks as qemu_disks;
use crate::qemu::disks::set_drive;
use crate::qemu::graph::about_node;
use crate::qemu::names::Role;
use crate::qemu::qmp::Result;

impl SnapshotBuilder<'_> {
    /// Takes the point in time of disks that all have switches and can all be exported.
    pub(super) fn take_switched(
        &self,
        disks: &[PreparedDisk],
        pause_policy: PausePolicy,
        report: &mut dyn FnMut(PointInTimeEvent),
    ) -> Result<Pause> {
        self.add_next_bitmaps(disks)?;
        let pause = match pause_policy {
            PausePolicy::WhereNeeded => match self.turn_switches(disks) {
                Ok(()) => {
                    report(PointInTimeEvent::Reached);
                    Pause::default()
                }
                Err(error) if error.is_refusal() => self.pause_for(None, &|| self.set_filters(disks), report)?.0,
                Err(error) => return Err(error),
            },
            PausePolicy::Always => self.pause_for(None, &|| self.turn_switches_or_set(disks), report)?.0,
        };
        self.copy_changes(disks)?;
        Ok(pause)
    }

    /// Inserts a switch under each device, before the point in time.
    pub(super) fn insert_switches(&self, disks: &[PreparedDisk]) -> Result<()> {
        for (number, disk) in disks.iter().enumerate() {
            self.execute("blockdev-add", self.switch(number, &disk.disk.node))?;
        }
        // If another client takes a snapshot later, its overlay will be below the switch and the filter as well.
        self.check_prepared(disks)?;
        for (number, disk) in disks.iter().enumerate() {
            set_drive(self.monitor, &disk.disk.device, &self.run.node(number, Role::Switch))?;
        }
        Ok(())
    }

    /// The options of a switch above a node.
    fn switch(&self, number: usize, on: &str) -> Value {
        json!({
            "driver": "raw",
            "node-name": self.run.node(number, Role::Switch),
            "file": on,
            "discard": "unmap",
        })
    }

    fn turn_switches(&self, disks: &[PreparedDisk]) -> Result<()> {
        let switches = (0..disks.len()).map(|number| self.switch(number, &self.run.node(number, Role::Filter)));
        let arguments = json!({ "options": switches.collect::<Vec<_>>() });
        self.execute("blockdev-reopen", arguments).map(drop)
    }

    /// If the single command fails, redirects the switches with several commands while the machine is paused.
    fn turn_switches_or_set(&self, disks: &[PreparedDisk]) -> Result<()> {
        match self.turn_switches(disks) {
            Err(error) if error.is_refusal() => self.set_filters(disks),
            other => other,
        }
    }

    /// Removes the switches, so that the filters are directly under the devices. Devices whose switch could not be
    /// redirected have their filters already.
    pub(super) fn remove_switches(&self, disks: &[PreparedDisk]) -> Result<()> {
        let present = qemu_disks(self.monitor)?;
        for (number, disk) in disks.iter().enumerate() {
            let (device, switch) = (&disk.disk.device, self.run.node(number, Role::Switch));
            if present.iter().any(|now| now.device == *device && now.node == switch) {
                set_drive(self.monitor, device, &self.run.node(number, Role::Filter))?;
            }
            self.monitor.execute(&about_node("blockdev-del", &switch))?;
        }
        Ok(())
    }
}
