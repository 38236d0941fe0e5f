//! The migration settings of a QEMU, which are changed for a migration and restored after it.

use serde_json::{Map, Value, json};

use crate::qemu::qmp::{Monitor, QmpCommand, Result};

/// Capabilities that do not change the format of the stream.
const HARMLESS: [&str; 2] = ["events", "auto-converge"];

/// The settings as they were before.
pub(crate) struct MigrationSettings {
    capabilities: Vec<Value>,
    parameters: Value,
}

impl MigrationSettings {
    /// Switches off capabilities that change the format of the stream, switches on those of `wanted`, and sets `parameters`.
    pub(crate) fn change(monitor: &dyn Monitor, wanted: &[&str], parameters: &Value) -> Result<Self> {
        let execute = |name, arguments| monitor.execute(&QmpCommand::new(name, arguments));
        let found = execute("query-migrate-capabilities", Value::Null)?;
        let changed = found.as_array().into_iter().flatten().filter(|capability| {
            let name = capability["capability"].as_str().unwrap_or_default();
            let is_on = capability["state"] == true;
            let is_kept = is_on == wanted.contains(&name) || (is_on && HARMLESS.contains(&name));
            !is_kept
        });
        let capabilities: Vec<Value> = changed.cloned().collect();
        let other = |capability: &Value| {
            let state = capability["state"] != true;
            json!({ "capability": capability["capability"], "state": state })
        };
        let others: Vec<Value> = capabilities.iter().map(other).collect();
        if !others.is_empty() {
            execute("migrate-set-capabilities", json!({ "capabilities": others }))?;
        }
        let found = execute("query-migrate-parameters", Value::Null)?;
        let names = parameters.as_object().into_iter().flat_map(Map::keys);
        let before = names.filter_map(|name| Some((name.clone(), found.get(name)?.clone())));
        let before: Map<String, Value> = before.collect();
        execute("migrate-set-parameters", parameters.clone())?;
        Ok(Self {
            capabilities,
            parameters: Value::Object(before),
        })
    }

    /// Restores them. A failure does not harm the machine.
    pub(crate) fn restore(&self, monitor: &dyn Monitor) {
        let capabilities = json!({ "capabilities": self.capabilities });
        for (name, arguments) in [
            ("migrate-set-capabilities", capabilities),
            ("migrate-set-parameters", self.parameters.clone()),
        ] {
            monitor.execute(&QmpCommand::new(name, arguments)).ok();
        }
    }
}
