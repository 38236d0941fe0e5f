//! NBD exports of frozen disks.

use serde_json::{Value, json};

use super::{PreparedDisk, SnapshotBuilder};
use crate::qemu::copy::PartCopier;
use crate::qemu::names::{Role, RunId, changes_name};
use crate::qemu::qmp::Result;

impl SnapshotBuilder<'_> {
    /// Adds the node that shows the frozen disk.
    pub(super) fn add_frozen(&self, number: usize) -> Result<()> {
        // Ranges that the reader discards are no longer copied before they are overwritten. `discard` passes the
        // discards on to the filter.
        let arguments = json!({
            "driver": "snapshot-access",
            "node-name": self.run.node(number, Role::Frozen),
            "file": self.run.node(number, Role::Filter),
            "discard": "unmap",
        });
        self.execute("blockdev-add", arguments).map(drop)
    }

    /// Adds the filters of disks in iothreads, while the machine is paused: QEMU aborts when a node is inserted above
    /// one in an iothread that has requests in flight.
    pub(super) fn add_filters_of_copied(&self, disks: &[PreparedDisk]) -> Result<()> {
        for (number, disk) in disks.iter().enumerate().filter(|(_, disk)| disk.spool_set.is_some()) {
            self.add_filter(number, disk)?;
        }
        Ok(())
    }

    /// Adds the nodes that show the frozen disks, for the same reason while the machine is paused.
    pub(super) fn add_frozen_of_copied(&self, disks: &[PreparedDisk]) -> Result<()> {
        for (number, _) in disks.iter().enumerate().filter(|(_, disk)| disk.spool_set.is_some()) {
            self.add_frozen(number)?;
        }
        Ok(())
    }

    /// Exports a node for a disk, with its bitmap of changes, and returns the export name.
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
            // The bitmap of another node can be exported only if that node is below the exported one.
            let is_copied = disk.spool_set.is_some();
            let holder = if is_copied { node } else { &disk.disk.node };
            arguments["bitmaps"] = json!([{ "node": holder, "name": changes_name(self.run) }]);
        }
        self.execute("block-export-add", arguments)?;
        Ok(name)
    }

    /// Exports the node of a disk whose bitmap of changes belongs to a layer below, and returns the export name. None
    /// for a disk that must not be exported.
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

    /// Exports the marks node of a disk that is copied, with its bitmap of changes.
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

/// Copies the bitmap of changes to the node that is exported instead.
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
