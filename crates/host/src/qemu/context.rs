//! The AioContext of a disk: the thread of QEMU that processes its requests.

use serde_json::{Value, json};

use crate::qemu::jobs::list;
use crate::qemu::qmp::{Monitor, QmpCommand, Result};

/// The thread in which a guest device runs its node.
///
/// This is the configuration of the device, not the current state of the node. While a guest resets the device or
/// does not use it yet, the node is in the main loop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskContext {
    /// QEMU's main loop.
    MainLoop,
    /// An iothread, by its QOM path.
    Iothread(String),
    /// QEMU does not report the thread.
    Unknown,
}

impl DiskContext {
    /// Queries the context of the device at the QOM path `device`.
    ///
    /// # Errors
    /// The connection to the monitor is lost. If QEMU refuses the query, the context is [`DiskContext::Unknown`].
    pub fn query(monitor: &dyn Monitor, device: &str) -> Result<Self> {
        let answer = ContextQuery { monitor }.ask(device);
        match answer {
            Err(error) if error.is_refusal() => Ok(Self::Unknown),
            other => other,
        }
    }

    /// Whether the disk is known to be in the main loop.
    pub fn is_main_loop(&self) -> bool {
        *self == Self::MainLoop
    }
}

struct ContextQuery<'a> {
    monitor: &'a dyn Monitor,
}

impl ContextQuery<'_> {
    fn ask(&self, device: &str) -> Result<DiskContext> {
        if list(self.monitor, "query-iothreads", Value::Null)?.is_empty() {
            return Ok(DiskContext::MainLoop);
        }
        let own = self.properties(device)?;
        if let Some(context) = self.context(device, &own)? {
            return Ok(context);
        }
        // A disk on a SCSI bus is in the thread of the bus's controller.
        if !own.iter().any(|name| name == "parent_bus") {
            return Ok(DiskContext::Unknown);
        }
        let bus = self.get(device, "parent_bus")?;
        let Some((controller, _)) = bus.as_str().and_then(|bus| bus.rsplit_once('/')) else {
            return Ok(DiskContext::Unknown);
        };
        let properties = self.properties(controller)?;
        Ok(self.context(controller, &properties)?.unwrap_or(DiskContext::MainLoop))
    }

    /// The context from a device's own properties; none if the device has no such property.
    fn context(&self, device: &str, properties: &[String]) -> Result<Option<DiskContext>> {
        let has = |wanted: &str| properties.iter().any(|name| name == wanted);
        if has("iothread-vq-mapping") {
            let mapping = self.get(device, "iothread-vq-mapping")?;
            if mapping.as_array().is_some_and(|threads| !threads.is_empty()) {
                let first = mapping[0]["iothread"].as_str().unwrap_or("several").to_owned();
                return Ok(Some(DiskContext::Iothread(first)));
            }
        }
        if !has("iothread") {
            return Ok(None);
        }
        let thread = self.get(device, "iothread")?;
        Ok(Some(match thread.as_str() {
            Some("") => DiskContext::MainLoop,
            Some(path) => DiskContext::Iothread(path.to_owned()),
            None => DiskContext::Unknown,
        }))
    }

    fn properties(&self, device: &str) -> Result<Vec<String>> {
        let properties = list(self.monitor, "qom-list", json!({ "path": device }))?;
        let name = |property: &Value| Some(property.get("name")?.as_str()?.to_owned());
        Ok(properties.iter().filter_map(name).collect())
    }

    fn get(&self, device: &str, property: &str) -> Result<Value> {
        let arguments = json!({ "path": device, "property": property });
        self.monitor.execute(&QmpCommand::new("qom-get", arguments))
    }
}
