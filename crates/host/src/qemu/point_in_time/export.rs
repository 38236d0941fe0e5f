//! What a reader of frozen disks gets at QEMU's server.

use serde_json::{Value, json};

use super::{PreparedDisk, SnapshotBuilder};
use crate::qemu::copy::PartCopier;
use crate::qemu::names::{Role, RunId, changes_name};
use crate::qemu::qmp::Result;

impl SnapshotBuilder<'_> {
    /// Adds the node that shows a disk as it was.
    pub(super) fn add_frozen(&self, number: usize) -> Result<()> {
        // What was read and is given back is no longer copied before it is overwritten: `discard` lets that through.
        let arguments = json!({
            "driver": "snapshot-access",
            "node-name": self.run.node(number, Role::Frozen),
            "file": self.run.node(number, Role::Filter),
            "discard": "unmap",
        });
        self.execute("blockdev-add", arguments).map(drop)
    }

    /// Adds the filters of disks in iothreads, while the machine is paused: QEMU aborts where a node is put on one in an iothread that has
    /// requests on their way.
    pub(super) fn add_filters_of_copied(&self, disks: &[PreparedDisk]) -> Result<()> {
        for (number, disk) in disks.iter().enumerate().filter(|(_, disk)| disk.spool_set.is_some()) {
            self.add_filter(number, disk)?;
        }
        Ok(())
    }

    /// The same for the nodes that show them as they were.
    pub(super) fn add_frozen_of_copied(&self, disks: &[PreparedDisk]) -> Result<()> {
        for (number, _) in disks.iter().enumerate().filter(|(_, disk)| disk.spool_set.is_some()) {
            self.add_frozen(number)?;
        }
        Ok(())
    }

    /// Serves a node that stands for a disk, with its bitmap of changes; gives its name at the server.
    pub(super) fn export(&self, number: usize, disk: &PreparedDisk, node: &str) -> Result<String> {
        let name = self.run.thing(&format!("disk{number}"));
        let mut arguments = json!({
            "type": "nbd",
            "id": name,
            "node-name": node,
            "name": name,
            "writable": true,
        });
        if disk.changes.is_some() {
            // A bitmap of another node than the export's has to be one of a node below it.
            let is_copied = disk.spool_set.is_some();
            let holder = if is_copied { node } else { &disk.disk.node };
            arguments["bitmaps"] = json!([{ "node": holder, "name": changes_name(self.run) }]);
        }
        self.execute("block-export-add", arguments)?;
        Ok(name)
    }

    /// Serves the node of a disk whose bitmap of changes is one of a node below it; gives its name at the server. A disk that must not be
    /// served has none.
    pub(super) fn export_layers(&self, number: usize, disk: &PreparedDisk) -> Result<Option<String>> {
        if disk.changes_below.is_none() || disk.spool_set.is_some() {
            return Ok(None);
        }
        let name = self.run.thing(&format!("layers{number}"));
        let arguments = json!({
            "type": "nbd",
            "id": name,
            "node-name": disk.disk.node,
            "name": name,
            "allocation-depth": true,
        });
        self.execute("block-export-add", arguments)?;
        Ok(Some(name))
    }

    /// Serves the marks of a disk that is copied, and its bitmap of changes.
    pub(super) fn export_marks(
        &self,
        number: usize,
        disk: &PreparedDisk,
        set: u64,
    ) -> Result<(String, Option<PartCopier>)> {
        self.add_file(&self.run.node(number, Role::Spool), set)?;
        let copier = PartCopier::new(self.run, number);
        copier.prepare(self.monitor, disk.disk.size_bytes)?;
        let marks = self.run.node(number, Role::Marks);
        if disk.changes.is_some() {
            self.transact(&copied_changes(self.run, &disk.disk.node, &marks))?;
        }
        Ok((self.export(number, disk, &marks)?, Some(copier)))
    }
}

/// Copies the bitmap of changes from a node to the one that is served instead of it.
fn copied_changes(run: RunId, from: &str, to: &str) -> [Value; 2] {
    let name = changes_name(run);
    [
        json!({
            "type": "block-dirty-bitmap-add",
            "data": { "node": to, "name": name, "disabled": true },
        }),
        json!({
            "type": "block-dirty-bitmap-merge",
            "data": { "node": to, "target": name, "bitmaps": [{ "node": from, "name": name }] },
        }),
    ]
}
