//! QEMU's only NBD server, and its exports.

use serde_json::{Value, json};

use super::CommandContext;
use crate::refusal::{Answer, Refusal, flag, items, text};
use crate::serving::NbdServer;
use crate::state::{Exported, State};

impl State {
    pub(super) fn start_server(&mut self, arguments: &Value, context: &CommandContext<'_>) -> Answer<()> {
        if self.server.is_some() {
            return Err(Refusal::generic("NBD server already running"));
        }
        let name = text(&arguments["addr"]["data"], "str")?;
        let listener = self.files.remove(name);
        let listener =
            listener.ok_or_else(|| Refusal::generic(format!("File descriptor named '{name}' has not been found")))?;
        let server = NbdServer::start(listener, context.shared);
        self.server = Some(server.map_err(|error| Refusal::generic(error.to_string()))?);
        Ok(())
    }

    pub(super) fn stop_server(&mut self, context: &mut CommandContext<'_>) -> Answer<()> {
        let server = self.server.take();
        context.stopped = Some(server.ok_or_else(|| Refusal::generic("NBD server not running"))?);
        let ids: Vec<String> = self.exports.iter().map(|exported| exported.id.clone()).collect();
        for id in &ids {
            self.end_export(id);
        }
        Ok(())
    }

    pub(super) fn add_export(&mut self, arguments: &Value) -> Answer<()> {
        let (id, node) = (text(arguments, "id")?, text(arguments, "node-name")?);
        if self.has_export(id) {
            return Err(Refusal::generic(format!("Block export id '{id}' is already in use")));
        }
        self.node(node)?;
        if self.server.is_none() {
            return Err(Refusal::generic("NBD server not running"));
        }
        let mut bitmaps = Vec::new();
        for bitmap in items(arguments, "bitmaps") {
            let (holder, name) = (text(bitmap, "node")?, text(bitmap, "name")?);
            self.bitmap_mut(holder, name)?;
            bitmaps.push((holder.to_owned(), name.to_owned()));
        }
        let exported = Exported {
            id: id.to_owned(),
            node: node.to_owned(),
            name: arguments.get("name").and_then(Value::as_str).unwrap_or(node).to_owned(),
            is_writable: flag(arguments, "writable"),
            bitmaps,
        };
        self.count_users(&exported, 1);
        self.exports.insert(0, exported);
        self.check_permissions().inspect_err(|_| self.end_export(id))
    }

    pub(super) fn delete_export(&mut self, arguments: &Value) -> Answer<()> {
        let id = text(arguments, "id")?;
        if !self.has_export(id) {
            return Err(Refusal::generic(format!("Export '{id}' is not found")));
        }
        self.end_export(id);
        Ok(())
    }

    fn has_export(&self, id: &str) -> bool {
        self.exports.iter().any(|exported| exported.id == id)
    }

    fn end_export(&mut self, id: &str) {
        if let Some(at) = self.exports.iter().position(|exported| exported.id == id) {
            let exported = self.exports.remove(at);
            self.count_users(&exported, -1);
        }
    }

    fn count_users(&mut self, exported: &Exported, change: isize) {
        for (node, name) in &exported.bitmaps {
            if let Ok(bitmap) = self.bitmap_mut(node, name) {
                bitmap.user_count = bitmap.user_count.saturating_add_signed(change);
            }
        }
    }

    pub(super) fn describe_exports(&self) -> Value {
        let exports = self.exports.iter().map(
            |exported| json!({ "id": exported.id, "type": "nbd", "node-name": exported.node, "shutting-down": false }),
        );
        exports.collect()
    }
}
