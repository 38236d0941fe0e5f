//! Bitmaps of frozen disks.

use serde_json::{Value, json};

use super::{PointInTime, PreparedDisk};
use crate::qemu::names::{Role, RunId, changes_name};
use crate::qemu::qmp::{Monitor, QmpCommand, Result};

/// The actions that copy the bitmap of the last run.
pub(super) fn changes_actions(run: RunId, disk: &PreparedDisk) -> Vec<Value> {
    let Some(changes) = &disk.changes else {
        return Vec::new();
    };
    let (node, copy) = (&disk.disk.node, changes_name(run));
    let recorded = disk.changes_below.as_ref().unwrap_or(node);
    vec![
        json!({
            "type": "block-dirty-bitmap-add",
            "data": { "node": node, "name": copy, "disabled": true },
        }),
        json!({
            "type": "block-dirty-bitmap-merge",
            "data": { "node": node, "target": copy, "bitmaps": [{ "node": recorded, "name": changes }] },
        }),
    ]
}

/// The action that adds the bitmap of the next run.
pub(super) fn next_actions(disk: &PreparedDisk) -> Option<Value> {
    let next = disk.next_bitmap.as_ref()?;
    // A bitmap of an image that cannot store bitmaps exists only as long as the QEMU process.
    let is_kept = disk.disk.keeps_bitmaps;
    Some(json!({
        "type": "block-dirty-bitmap-add",
        "data": { "node": disk.disk.node, "name": next, "persistent": is_kept },
    }))
}

impl PointInTime {
    /// Starts to record which ranges of the disk `number` the reader discards or requests. See
    /// [`keep_witness`](Self::keep_witness).
    pub fn begin_witness(&self, monitor: &dyn Monitor, number: usize) -> Result<()> {
        let arguments = json!({ "node": self.witness_node(number), "name": self.witness_name() });
        monitor
            .execute(&QmpCommand::new("block-dirty-bitmap-add", arguments))
            .map(drop)
    }

    /// Merges the ranges recorded since [`begin_witness`](Self::begin_witness) into the bitmap `bitmap` of `node`. If
    /// the bitmap later contains these ranges, it was not replaced by a newer one.
    pub fn keep_witness(&self, monitor: &dyn Monitor, number: usize, node: &str, bitmap: &str) -> Result<()> {
        let (noted_at, name) = (self.witness_node(number), self.witness_name());
        let noted = json!([{ "node": noted_at, "name": name }]);
        let arguments = json!({ "node": node, "target": bitmap, "bitmaps": noted });
        monitor.execute(&QmpCommand::new("block-dirty-bitmap-merge", arguments))?;
        let arguments = json!({ "node": noted_at, "name": name });
        monitor
            .execute(&QmpCommand::new("block-dirty-bitmap-remove", arguments))
            .map(drop)
    }

    fn witness_name(&self) -> String {
        self.run.thing("witness")
    }

    /// The node of the disk that the disk's reader can write to.
    fn witness_node(&self, number: usize) -> String {
        let is_copied = self.copiers.get(number).is_some_and(Option::is_some);
        self.run
            .node(number, if is_copied { Role::Marks } else { Role::Frozen })
    }
}
