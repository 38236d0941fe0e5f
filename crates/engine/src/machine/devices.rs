//! The disks of a machine, and QEMU's devices.

use holdfast_host::qemu::{QemuDisk, disks};
use holdfast_host::qmp::MonitorError;
use holdfast_host::{Decision, Description, DiskChoice, Error as HostError, Machine, MachineDisk};

use crate::job::{Error, Result};

/// QEMU's devices of these disks, in their order.
pub(crate) fn devices_of(machine: &dyn Machine, wanted: &[MachineDisk]) -> Result<Vec<QemuDisk>> {
    let present = disks(machine.monitor()).map_err(|source| monitor_failed(machine.name(), source))?;
    let device = |disk: &MachineDisk| {
        let alias = disk.alias.as_deref();
        let found = alias.and_then(|alias| present.iter().find(|device| device.is_called(alias)));
        found.cloned().ok_or_else(|| Error::NoDevice {
            machine: machine.name().to_owned(),
            disk: disk.target.clone(),
        })
    };
    wanted.iter().map(device).collect()
}

/// Fails if a choice names a disk that the machine does not have.
pub(crate) fn refuse_unknown(description: &Description, choice: &DiskChoice) -> Result<()> {
    let unknown = description.unknown(choice);
    if unknown.is_empty() {
        return Ok(());
    }
    Err(Error::NoSuchDisk {
        machine: description.summary.name.clone(),
        disks: unknown.into_iter().map(str::to_owned).collect(),
        present: description.disks.iter().map(|disk| disk.target.clone()).collect(),
    })
}

/// The chosen disks, and the others with the reason.
pub(crate) fn decide(description: &Description, choice: &DiskChoice) -> (Vec<MachineDisk>, Vec<(String, String)>) {
    let (mut taken, mut left_out) = (Vec::new(), Vec::new());
    for (disk, decision) in description.disks.iter().zip(description.decide(choice)) {
        match decision {
            Decision::Take => taken.push(disk.clone()),
            Decision::Leave(why) => left_out.push((disk.target.clone(), why)),
        }
    }
    (taken, left_out)
}

/// The error of a command to the monitor of a machine.
pub(crate) fn monitor_failed(machine: &str, source: MonitorError) -> Error {
    let machine = machine.to_owned();
    Error::from(match source {
        MonitorError::Busy { with } => HostError::Busy { machine, holder: with },
        source => HostError::Monitor { machine, source },
    })
}
