//! Disks that QEMU's NBD server must not export, and disks that must not get a filter.

use serde_json::{Value, json};

use super::{Danger, DiskContext, QemuDisk, QemuVersion};
use crate::qemu::jobs::list;
use crate::qemu::qmp::{Monitor, Result};

/// Drivers of nodes that QEMU always has to wait for when another node is inserted above them, even without requests.
const WAITED_FOR: [&str; 2] = ["throttle", "qed"];

/// Why a disk must not be exported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotServed {
    /// The version of QEMU.
    pub version: QemuVersion,
    /// The context of the disk.
    pub context: DiskContext,
}

impl NotServed {
    /// Determines for each disk whether it must not be exported.
    pub fn query(monitor: &dyn Monitor, disks: &[&QemuDisk]) -> Result<Vec<Option<Self>>> {
        let version = QemuVersion::query(monitor)?;
        let dangers = [Danger::NbdClientOfIothread, Danger::NodeOnBusyIothread];
        if dangers.iter().all(|danger| version.defect(*danger).is_none()) {
            return Ok(vec![None; disks.len()]);
        }
        let ask = |disk: &&QemuDisk| {
            let context = DiskContext::query(monitor, &disk.device)?;
            Ok((!context.is_main_loop()).then_some(Self { version, context }))
        };
        disks.iter().map(ask).collect()
    }
}

/// Why no node may be inserted above these disks in a running QEMU; none if insertion is safe.
pub fn no_filter(monitor: &dyn Monitor, disks: &[&QemuDisk]) -> Result<Option<String>> {
    let version = QemuVersion::query(monitor)?;
    if version.defect(Danger::NodeOnBusyIothread).is_none() {
        return Ok(None);
    }
    let nodes = list(monitor, "query-named-block-nodes", json!({ "flat": true }))?;
    let driver = |node: &Value| node.get("drv").and_then(Value::as_str).map(str::to_owned);
    // It does not matter which disk is above such a node: one such node is enough.
    let mut drivers = nodes.iter().filter_map(driver);
    let Some(driver) = drivers.find(|driver| WAITED_FOR.contains(&&driver[..])) else {
        return Ok(None);
    };
    for disk in disks {
        if !DiskContext::query(monitor, &disk.device)?.is_main_loop() {
            return Ok(Some(format!(
                "QEMU {version} may crash if a filter is inserted above a node of the driver {driver} in an iothread"
            )));
        }
    }
    Ok(None)
}

impl std::fmt::Display for NotServed {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let version = self.version;
        match &self.context {
            DiskContext::Iothread(path) => {
                let name = path.rsplit('/').next().unwrap_or(path);
                write!(formatter, "it is in the iothread {name}")?;
            }
            DiskContext::Unknown | DiskContext::MainLoop => write!(formatter, "it may be in an iothread")?,
        }
        write!(formatter, ", and QEMU {version} may crash if it exports such a disk")
    }
}
