//! The records that are stored with a machine's memory, so that it can resume: those of the suspended snapshot.
//!
//! The records of the machine itself are not sufficient: it runs, so they describe neither its memory nor what the
//! hypervisor needs to load it.

use holdfast_hardware::xen::SuspendedMachine;

use super::instant::PoolSnapshot;
use super::{XenCapture, records_in};
use crate::job::Result;

impl XenCapture<'_> {
    /// The records of the point in time, if memory is captured. Missing parts are reported now, while they can be
    /// corrected.
    pub(super) fn suspended(&self, instant: &PoolSnapshot<'_>) -> Result<Option<Vec<u8>>> {
        if !self.request.with_memory {
            return Ok(None);
        }
        let records = records_in(&instant.records()?)?;
        let warn = |why: &str| {
            let name = &self.request.capture.name;
            let text = format!("{name} will start instead of resuming from its memory: {why}");
            self.job.progress.warning(&text);
        };
        match SuspendedMachine::read(&String::from_utf8_lossy(&records)) {
            Err(error) => warn(&format!("what the pool says of its checkpoint cannot be used: {error}")),
            Ok(machine) => {
                let taken = |uuid: &String| {
                    let mut snapshots = self.taken.iter().filter_map(|taken| instant.snapshot_of(&taken.live));
                    snapshots.any(|disk| disk.uuid == *uuid)
                };
                let missing = machine.disks.iter().filter(|disk| !taken(&disk.uuid));
                let missing: Vec<String> = missing
                    .map(|disk| format!("{} ({})", disk.device, disk.label))
                    .collect();
                if !missing.is_empty() {
                    warn(&format!(
                        "it knows disks that are left out here: {}",
                        missing.join(", ")
                    ));
                }
            }
        }
        Ok(Some(records))
    }
}
