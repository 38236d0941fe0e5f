//! In which thread of QEMU a disk is worked at.

use serde_json::{Value, json};

use crate::qemu::jobs::list;
use crate::qemu::qmp::{Monitor, QmpCommand, Result};

/// The thread that a device of the guest gives its node to.
///
/// This is what the device is set up for, not where its node is at this moment: a guest that resets a device, or does not use it yet, has
/// its node in the main loop until it uses it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskContext {
    /// QEMU's main loop.
    MainLoop,
    /// An iothread; its path in QEMU's object model.
    Iothread(String),
    /// QEMU does not say.
    Unknown,
}

impl DiskContext {
    /// Asks QEMU for the context of the device at `device`, a path of its object model.
    ///
    /// # Errors
    /// The monitor is gone. What QEMU refuses to say is [`DiskContext::Unknown`].
    pub fn query(monitor: &dyn Monitor, device: &str) -> Result<Self> {
        let asked = ContextQuery { monitor }.ask(device);
        match asked {
            Err(error) if error.is_refusal() => Ok(Self::Unknown),
            other => other,
        }
    }

    /// Whether it is known that the main loop has the disk.
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

    /// The context that a device has by its own properties; none where it has none of these.
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
