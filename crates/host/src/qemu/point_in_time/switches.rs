//! One instant of several disks, without a stop: each device is put on a switch, a node that passes everything on to its disk, and one
//! command turns all switches onto the filters.
//!
//! `qom-set` puts a node under one device, and no transaction has such an action, so several devices would get their filters one after
//! the other. `blockdev-reopen` takes a list of nodes. QEMU first drains all of them: every request of the guest has ended, and none
//! begins. Then it changes the children of all, or of none, and lets the requests go on. What the guest was told to be written before is
//! below all filters, and what it writes in answer to that passes one. QEMU drains and changes within one command of its main loop, also
//! where the disks are in several iothreads.

use serde_json::{Value, json};

use super::{Pause, PausePolicy, PointInTimeEvent, PreparedDisk, SnapshotBuilder};
use crate::qemu::disks as qemu_disks;
use crate::qemu::disks::set_drive;
use crate::qemu::graph::about_node;
use crate::qemu::names::Role;
use crate::qemu::qmp::Result;

impl SnapshotBuilder<'_> {
    /// The instant of disks that can all be served, and that have their switches.
    pub(super) fn take_switched(
        &self,
        disks: &[PreparedDisk],
        pause_policy: PausePolicy,
        tell: &mut dyn FnMut(PointInTimeEvent),
    ) -> Result<Pause> {
        self.begin_next(disks)?;
        let pause = match pause_policy {
            PausePolicy::WhereNeeded => match self.turn_switches(disks) {
                Ok(()) => {
                    tell(PointInTimeEvent::Reached);
                    Pause::default()
                }
                Err(error) if error.is_refusal() => self.pause_for(None, &|| self.set_filters(disks), tell)?.0,
                Err(error) => return Err(error),
            },
            PausePolicy::Always => self.pause_for(None, &|| self.turn_switches_or_set(disks), tell)?.0,
        };
        self.keep_changes(disks)?;
        Ok(pause)
    }

    /// Puts a switch under each device, before the instant.
    pub(super) fn insert_switches(&self, disks: &[PreparedDisk]) -> Result<()> {
        for (number, disk) in disks.iter().enumerate() {
            self.execute("blockdev-add", self.switch(number, &disk.disk.node))?;
        }
        // A snapshot by others from here on puts its overlay below the switch and the filter as well.
        self.check_prepared(disks)?;
        for (number, disk) in disks.iter().enumerate() {
            set_drive(self.monitor, &disk.disk.device, &self.run.node(number, Role::Switch))?;
        }
        Ok(())
    }

    /// A switch on a node.
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

    /// What one command cannot do takes several, while the machine is paused.
    fn turn_switches_or_set(&self, disks: &[PreparedDisk]) -> Result<()> {
        match self.turn_switches(disks) {
            Err(error) if error.is_refusal() => self.set_filters(disks),
            other => other,
        }
    }

    /// Leaves the filters alone under the devices. Those that could not be moved there with their switches are on them already.
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
