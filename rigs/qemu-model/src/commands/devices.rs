//! Devices of the guest in QEMU's object model.

use serde_json::{Value, json};

use crate::refusal::{Answer, Refusal, text};
use crate::state::{Device, State};

impl State {
    /// `qom-set DEVICE drive=NODE`.
    pub(super) fn set_drive(&mut self, arguments: &Value) -> Answer<()> {
        let (path, node) = (text(arguments, "path")?, text(arguments, "value")?);
        let before = self.device(path)?.node.clone();
        if text(arguments, "property")? != "drive" {
            return Err(Refusal::generic("only the property 'drive' is modelled"));
        }
        if !self.nodes.contains_key(node) {
            return Err(Refusal::generic(format!(
                "Property '{path}.drive' can't find value '{node}'"
            )));
        }
        if before == node {
            // "bdrv_replace_child_noperm: Assertion `old_bs != new_bs' failed" (7.2.22).
            self.aborted = Some(format!("{path} was put on the node that it is on, {node}"));
            return Ok(());
        }
        self.put(path, node);
        self.check_permissions().inspect_err(|_| self.put(path, &before))
    }

    fn put(&mut self, path: &str, node: &str) {
        if let Some(device) = self.devices.iter_mut().find(|device| device.path == path) {
            node.clone_into(&mut device.node);
        }
    }

    pub(super) fn property(&self, arguments: &Value) -> Answer<Value> {
        let (path, property) = (text(arguments, "path")?, text(arguments, "property")?);
        if path == "/machine" && property == "type" {
            return Ok(json!("pc-i440fx-7.2-machine"));
        }
        let device = self.device(path)?;
        let no_property = || Refusal::generic(format!("Property '{}.{property}' not found", device.kind));
        match property {
            "type" => Ok(json!(device.kind)),
            "drive" => Ok(json!(device.node)),
            "share-rw" => Ok(json!(false)),
            "iothread" => Ok(json!(device.iothread.clone().unwrap_or_default())),
            _ => Err(no_property()),
        }
    }

    pub(super) fn properties(&self, arguments: &Value) -> Answer<Value> {
        let path = text(arguments, "path")?;
        if path == "/machine/peripheral" || path == "/machine/peripheral-anon" {
            return Ok(json!([]));
        }
        self.device(path)?;
        let names = ["type", "drive", "share-rw", "iothread"];
        Ok(names
            .iter()
            .map(|name| json!({ "name": name, "type": "string" }))
            .collect())
    }

    pub(super) fn describe_devices(&self) -> Value {
        let described = self.devices.iter().map(|device| {
            let inserted = self.nodes.get(&device.node).map(|node| node.describe(&device.node));
            json!({ "device": "", "qdev": device.path, "type": "unknown", "inserted": inserted })
        });
        described.collect()
    }

    pub(super) fn describe_counters(&self) -> Value {
        let counters =
            |device: &Device| json!({ "qdev": device.path, "stats": { "wr_operations": 0, "wr_total_time_ns": 0 } });
        self.devices.iter().map(counters).collect()
    }

    pub(super) fn describe_iothreads(&self) -> Value {
        let threads = self.devices.iter().filter_map(|device| device.iothread.as_ref());
        threads.map(|thread| json!({ "id": thread })).collect()
    }
}
