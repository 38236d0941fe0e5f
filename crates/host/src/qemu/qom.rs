//! QEMU's object model, through its monitor.

use serde_json::{Value, json};

use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand};

const AGENT_PORT: &str = "org.qemu.guest_agent.0";

pub(crate) fn text(value: &Value, key: &str) -> Option<String> {
    Some(value.get(key)?.as_str()?.to_owned())
}

pub(crate) fn property(monitor: &dyn Monitor, path: &str, name: &str) -> std::result::Result<Value, MonitorError> {
    monitor.execute(&QmpCommand::new("qom-get", json!({ "path": path, "property": name })))
}

/// The character device of the guest agent's port.
pub(crate) fn agent_channel(monitor: &dyn Monitor) -> std::result::Result<Option<String>, MonitorError> {
    let mut wanted = None;
    for folder in ["/machine/peripheral", "/machine/peripheral-anon"] {
        let children = monitor.execute(&QmpCommand::new("qom-list", json!({ "path": folder })))?;
        let children = children.as_array().cloned().unwrap_or_default();
        let ports = children
            .iter()
            .filter(|child| text(child, "type").as_deref() == Some("child<virtserialport>"));
        for port in ports.filter_map(|port| text(port, "name")) {
            let path = format!("{folder}/{port}");
            if property(monitor, &path, "name")?.as_str() == Some(AGENT_PORT) {
                wanted = property(monitor, &path, "chardev")?.as_str().map(str::to_owned);
            }
        }
    }
    Ok(wanted)
}
