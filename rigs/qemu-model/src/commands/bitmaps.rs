//! Dirty bitmaps, in single commands and in transactions.

use holdfast_block::DirtyBitmap;
use serde_json::Value;

use crate::node::{Bitmap, CLUSTER_BYTES, Driver};
use crate::refusal::{Answer, Refusal, flag, items, text};
use crate::state::State;

impl State {
    /// Executes all actions, or none of them.
    pub(super) fn transact(&mut self, arguments: &Value) -> Answer<()> {
        let bitmaps_of = |(name, node): (&String, &crate::node::Node)| (name.clone(), node.bitmaps.clone());
        let before: Vec<(String, Vec<Bitmap>)> = self.nodes.iter().map(bitmaps_of).collect();
        let done = items(arguments, "actions").iter().try_for_each(|action| {
            let data = &action["data"];
            match text(action, "type")? {
                "block-dirty-bitmap-add" => self.add_bitmap(data),
                "block-dirty-bitmap-remove" => self.remove_bitmap(data),
                "block-dirty-bitmap-merge" => self.merge_bitmap(data),
                "block-dirty-bitmap-clear" => self.clear_bitmap(data),
                "block-dirty-bitmap-disable" => self.disable_bitmap(data),
                other => Err(Refusal::generic(format!("the action {other} is not modelled"))),
            }
        });
        done.inspect_err(|_| {
            for (name, bitmaps) in before {
                if let Some(node) = self.nodes.get_mut(&name) {
                    node.bitmaps = bitmaps;
                }
            }
        })
    }

    pub(super) fn add_bitmap(&mut self, data: &Value) -> Answer<()> {
        let (node_name, name) = (text(data, "node")?, text(data, "name")?);
        let granularity_bytes = data.get("granularity").and_then(Value::as_u64).unwrap_or(CLUSTER_BYTES);
        let node = self.node_mut(node_name)?;
        if node.bitmap(name).is_some() {
            return Err(Refusal::generic(format!("Bitmap already exists: {name}")));
        }
        let is_persistent = flag(data, "persistent");
        if is_persistent && !matches!(node.driver, Driver::Qcow2(_)) {
            return Err(Refusal::generic(format!(
                "Node '{node_name}' does not support persistent bitmaps"
            )));
        }
        let dirty = DirtyBitmap::new(node.size_bytes, granularity_bytes);
        let dirty = dirty.map_err(|error| Refusal::generic(error.to_string()))?;
        let added = Bitmap {
            name: name.to_owned(),
            is_recording: !flag(data, "disabled"),
            is_persistent,
            user_count: 0,
            dirty,
        };
        // Newest first, as QEMU lists them.
        node.bitmaps.insert(0, added);
        Ok(())
    }

    pub(super) fn remove_bitmap(&mut self, data: &Value) -> Answer<()> {
        let (node, name) = (text(data, "node")?, text(data, "name")?);
        self.idle_bitmap(node, name)?;
        self.node_mut(node)?.bitmaps.retain(|bitmap| bitmap.name != name);
        Ok(())
    }

    pub(super) fn clear_bitmap(&mut self, data: &Value) -> Answer<()> {
        let bitmap = self.idle_bitmap(text(data, "node")?, text(data, "name")?)?;
        bitmap.dirty.clear_all();
        Ok(())
    }

    pub(super) fn disable_bitmap(&mut self, data: &Value) -> Answer<()> {
        let bitmap = self.idle_bitmap(text(data, "node")?, text(data, "name")?)?;
        bitmap.is_recording = false;
        Ok(())
    }

    pub(super) fn merge_bitmap(&mut self, data: &Value) -> Answer<()> {
        let (node, target) = (text(data, "node")?, text(data, "target")?);
        self.idle_bitmap(node, target)?;
        for source in items(data, "bitmaps") {
            let source = self
                .bitmap_mut(text(source, "node")?, text(source, "name")?)?
                .dirty
                .clone();
            let target = self.bitmap_mut(node, target)?;
            let merged = target.dirty.merge(&source);
            merged.map_err(|error| Refusal::generic(error.to_string()))?;
        }
        Ok(())
    }

    /// A bitmap that no export and no job uses.
    fn idle_bitmap(&mut self, node: &str, name: &str) -> Answer<&mut Bitmap> {
        let bitmap = self.bitmap_mut(node, name)?;
        if bitmap.user_count > 0 {
            return Err(Refusal::generic(format!(
                "Bitmap '{name}' is currently in use by another operation and cannot be used"
            )));
        }
        Ok(bitmap)
    }
}
