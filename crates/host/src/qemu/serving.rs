//! QEMU's NBD server, disks that it must not export, and disks that must not get a filter.

use std::os::fd::OwnedFd;

use serde_json::{Value, json};

use super::names::RunId;
use super::{Danger, DiskContext, QemuDisk, QemuVersion};
use crate::qemu::jobs::{jobs, list};
use crate::qemu::qmp::{Monitor, MonitorError, QmpCommand, Result};

/// Part of QEMU's message if its NBD server is already running.
const SERVER_RUNNING_MESSAGE: &str = "already running";

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

/// Fails if one of these disks must not be exported.
pub(crate) fn refuse_unserved(monitor: &dyn Monitor, disks: &[&QemuDisk]) -> Result<()> {
    if disks.is_empty() {
        return Ok(());
    }
    let found = NotServed::query(monitor, disks)?;
    match disks.iter().zip(found).find_map(|(disk, why)| Some((disk, why?))) {
        Some((disk, why)) => Err(MonitorError::Dangerous {
            device: disk.device.clone(),
            why: why.to_string(),
        }),
        None => Ok(()),
    }
}

/// Starts QEMU's only NBD server on a listening socket.
pub(crate) fn start_server(monitor: &dyn Monitor, run: RunId, listener: OwnedFd) -> Result<()> {
    let name = run.thing("nbd");
    let given = QmpCommand::new("getfd", json!({ "fdname": name })).with_file(listener);
    monitor.execute(&given)?;
    let address = json!({ "type": "fd", "data": { "str": name } });
    let started = monitor.execute(&QmpCommand::new("nbd-server-start", json!({ "addr": address })));
    started.map(drop).map_err(|error| match error {
        MonitorError::Refused { description, .. } if description.contains(SERVER_RUNNING_MESSAGE) => {
            MonitorError::Busy {
                with: other_use(monitor),
            }
        }
        other => other,
    })
}

/// Describes the client that uses QEMU's NBD server.
fn other_use(monitor: &dyn Monitor) -> String {
    let jobs = jobs(monitor).unwrap_or_default();
    match jobs.into_iter().find(|job| job.kind == "backup") {
        Some(job) => format!("the backup job {}, which uses its NBD server", job.id),
        None => "another use of its only NBD server".to_owned(),
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
