//! One instant of all disks of a running machine.
//!
//! Everything that takes time is made before: scratch files, filters that stand on their nodes and that nothing passes yet,
//! the server. Then the machine is paused, the filters go under their devices, the bitmaps of the next run begin, and the
//! machine runs on. What is frozen is served from there on.

use std::os::fd::OwnedFd;
use std::time::Duration;

use holdfast_block::Clock;
use serde_json::{Value, json};

use super::QemuDisk;
use super::names::{Role, RunId};
use super::remove::remove_run;
use crate::qmp::{Monitor, MonitorError, QmpCommand, Result};

/// What is to be frozen, and with what.
pub struct CutRequest {
    /// The run that everything is named after.
    pub run: RunId,
    /// The disks.
    pub disks: Vec<CutDisk>,
    /// How long a write of the guest may wait for its copy, before the copy is given up. Whole seconds, at least one.
    pub write_deadline: Duration,
    /// A socket that listens: QEMU answers NBD clients on it.
    pub listener: OwnedFd,
}

/// A disk to freeze.
pub struct CutDisk {
    /// The disk.
    pub disk: QemuDisk,
    /// An empty file of the disk's size, in which the filter saves what is about to be overwritten.
    pub scratch: OwnedFd,
    /// The name of a bitmap that is to record what changes from this instant on.
    pub next_bitmap: Option<String>,
    /// The name of a bitmap that tells what has changed until this instant; its state is kept, and served with the disk.
    pub changes: Option<String>,
}

/// How long the machine stood still, and for what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pause {
    /// From asking it to stop until the filters were in place; what was done in between by others is not in it.
    pub cut: Duration,
    /// What others did within the pause.
    pub others: Duration,
    /// Until it was told to run on, all in all. Zero where it was not running.
    pub total: Duration,
}

/// Frozen disks.
#[derive(Debug)]
pub struct Cut {
    run: RunId,
    /// How long the machine stood still.
    pub pause: Pause,
    /// The names of the disks at the server, in the order of the request.
    pub exports: Vec<String>,
    /// The context of each disk that tells what has changed, where a bitmap was named.
    pub change_contexts: Vec<Option<String>>,
}

impl Cut {
    /// Freezes. `within` is called while the machine stands still, for what has to be of the same instant and is quick.
    ///
    /// # Errors
    /// Whatever goes wrong, the machine runs on if it was running, and nothing of the run is left in QEMU; where even that
    /// fails, the error says so.
    pub fn make(
        monitor: &dyn Monitor,
        clock: &dyn Clock,
        request: CutRequest,
        within: &mut dyn FnMut(),
    ) -> Result<Self> {
        let run = request.run;
        Making { monitor, clock, run }
            .make(request, within)
            .map_err(|error| match remove_run(monitor, clock, run) {
                Ok(()) => error,
                Err(left) => MonitorError::Left {
                    because: Box::new(error),
                    left: Box::new(left),
                },
            })
    }

    /// Takes everything out of QEMU again; the guest does not notice.
    pub fn release(self, monitor: &dyn Monitor, clock: &dyn Clock) -> Result<()> {
        remove_run(monitor, clock, self.run)
    }
}

/// The bitmap that keeps the state of the changes until this instant.
pub(crate) fn changes_name(run: RunId) -> String {
    run.thing("changes")
}

struct Making<'a> {
    monitor: &'a dyn Monitor,
    clock: &'a dyn Clock,
    run: RunId,
}

impl Making<'_> {
    fn execute(&self, name: &'static str, arguments: Value) -> Result<Value> {
        self.monitor.execute(&QmpCommand::new(name, arguments))
    }

    fn make(&self, request: CutRequest, within: &mut dyn FnMut()) -> Result<Cut> {
        let deadline_s = request.write_deadline.as_secs().max(1);
        let mut disks = Vec::new();
        for (number, disk) in request.disks.into_iter().enumerate() {
            self.add_scratch(number, disk.scratch)?;
            self.add_filter(number, &disk.disk.node, deadline_s)?;
            disks.push(Prepared {
                disk: disk.disk,
                next_bitmap: disk.next_bitmap,
                changes: disk.changes,
            });
        }
        self.start_server(request.listener)?;
        let pause = self.cut(&disks, within)?;
        let mut exports = Vec::new();
        let mut change_contexts = Vec::new();
        for (number, disk) in disks.iter().enumerate() {
            exports.push(self.export(number, disk)?);
            let changes = disk.changes.as_ref();
            change_contexts.push(changes.map(|_| format!("qemu:dirty-bitmap:{}", changes_name(self.run))));
        }
        Ok(Cut {
            run: self.run,
            pause,
            exports,
            change_contexts,
        })
    }

    fn add_scratch(&self, number: usize, file: OwnedFd) -> Result<()> {
        // The label is how the file is found again when nobody knows of it any more.
        let label = self.run.thing("scratch");
        let added = QmpCommand::new("add-fd", json!({ "opaque": label })).with_file(file);
        let answer = self.monitor.execute(&added)?;
        let set = answer.get("fdset-id").and_then(Value::as_u64);
        let set = set.ok_or_else(|| MonitorError::Senseless {
            command: "add-fd".to_owned(),
            detail: "there is no fdset-id".to_owned(),
        })?;
        let arguments = json!({
            "driver": "raw",
            "node-name": self.run.node(number, Role::Scratch),
            "discard": "unmap",
            "file": { "driver": "file", "filename": format!("/dev/fdset/{set}"), "discard": "unmap" },
        });
        self.execute("blockdev-add", arguments).map(drop)
    }

    fn add_filter(&self, number: usize, node: &str, deadline_s: u64) -> Result<()> {
        let arguments = json!({
            "driver": "copy-before-write",
            "node-name": self.run.node(number, Role::Filter),
            "file": node,
            "target": self.run.node(number, Role::Scratch),
            "on-cbw-error": "break-snapshot",
            "cbw-timeout": deadline_s,
        });
        self.execute("blockdev-add", arguments).map(drop)
    }

    fn start_server(&self, listener: OwnedFd) -> Result<()> {
        let name = self.run.thing("nbd");
        let given = QmpCommand::new("getfd", json!({ "fdname": name })).with_file(listener);
        self.monitor.execute(&given)?;
        let address = json!({ "type": "fd", "data": { "str": name } });
        self.execute("nbd-server-start", json!({ "addr": address })).map(drop)
    }

    /// The instant.
    fn cut(&self, disks: &[Prepared], within: &mut dyn FnMut()) -> Result<Pause> {
        let status = self.execute("query-status", Value::Null)?;
        let was_running = status.get("running").and_then(Value::as_bool).unwrap_or_default();
        let start = self.clock.now();
        if was_running {
            // An answer that comes late may stop the machine all the same.
            self.execute("stop", Value::Null)
                .inspect_err(|_| self.resume_anyway())?;
        }
        let result = self.switch(disks);
        let cut = self.clock.now().saturating_sub(start);
        if result.is_ok() {
            within();
        }
        let others = self.clock.now().saturating_sub(start).saturating_sub(cut);
        if was_running {
            self.execute("cont", Value::Null)
                .inspect_err(|_| self.resume_anyway())?;
        }
        let total = self.clock.now().saturating_sub(start);
        result?;
        Ok(if was_running {
            Pause { cut, others, total }
        } else {
            Pause::default()
        })
    }

    /// Once more: the first attempt may have failed for a reason that has passed. The watchdog is the next in line.
    fn resume_anyway(&self) {
        self.execute("cont", Value::Null).ok();
    }

    /// Puts the filters under their devices, and begins new bitmaps.
    fn switch(&self, disks: &[Prepared]) -> Result<()> {
        for (number, disk) in disks.iter().enumerate() {
            let filter = self.run.node(number, Role::Filter);
            set_drive(self.monitor, &disk.disk.device, &filter)?;
        }
        let actions: Vec<Value> = disks.iter().flat_map(|disk| self.bitmap_actions(disk)).collect();
        if actions.is_empty() {
            return Ok(());
        }
        self.execute("transaction", json!({ "actions": actions })).map(drop)
    }

    fn bitmap_actions(&self, disk: &Prepared) -> Vec<Value> {
        let node = &disk.disk.node;
        let mut actions = Vec::new();
        if let Some(changes) = &disk.changes {
            let copy = changes_name(self.run);
            actions.push(json!({
                "type": "block-dirty-bitmap-add",
                "data": { "node": node, "name": copy, "disabled": true },
            }));
            actions.push(json!({
                "type": "block-dirty-bitmap-merge",
                "data": { "node": node, "target": copy, "bitmaps": [changes] },
            }));
        }
        if let Some(next) = &disk.next_bitmap {
            // Only qcow2 keeps bitmaps; those of other images live as long as QEMU does.
            let is_kept = disk.disk.driver == "qcow2";
            actions.push(json!({
                "type": "block-dirty-bitmap-add",
                "data": { "node": node, "name": next, "persistent": is_kept },
            }));
        }
        actions
    }

    /// Serves a frozen disk; gives its name at the server.
    fn export(&self, number: usize, disk: &Prepared) -> Result<String> {
        let frozen = self.run.node(number, Role::Frozen);
        // What was read and is given back is no longer copied before it is overwritten: `discard` lets that through.
        let arguments = json!({
            "driver": "snapshot-access",
            "node-name": frozen,
            "file": self.run.node(number, Role::Filter),
            "discard": "unmap",
        });
        self.execute("blockdev-add", arguments)?;
        let name = self.run.thing(&format!("disk{number}"));
        let mut arguments = json!({
            "type": "nbd",
            "id": name,
            "node-name": frozen,
            "name": name,
            "writable": true,
        });
        if disk.changes.is_some() {
            arguments["bitmaps"] = json!([{ "node": disk.disk.node, "name": changes_name(self.run) }]);
        }
        self.execute("block-export-add", arguments)?;
        Ok(name)
    }
}

struct Prepared {
    disk: QemuDisk,
    next_bitmap: Option<String>,
    changes: Option<String>,
}

/// Puts a node under a device of the guest.
pub(crate) fn set_drive(monitor: &dyn Monitor, device: &str, node: &str) -> Result<()> {
    let arguments = json!({ "path": device, "property": "drive", "value": node });
    monitor.execute(&QmpCommand::new("qom-set", arguments)).map(drop)
}
