//! Plans what a backup of a QEMU machine would read.

use holdfast_host::MachineState;

use super::QemuCapture;
use super::changes::ReadAll;
use super::method::{self, Method};
use crate::capture::plan::{PlannedCapture, PlannedMethod, PlannedRead};
use crate::job::{Error, Result};

impl QemuCapture<'_> {
    pub(super) fn plan_reading(&self) -> Result<PlannedCapture> {
        let (method, reason, disks) = match self.description.summary.state {
            MachineState::ShutOff => self.plan_stopped()?,
            MachineState::Running | MachineState::Paused => {
                let (method, reason) = method::choose(self.request.method, &self.offer()?)?;
                (method, reason, self.plan_disks(method)?)
            }
            MachineState::Between => {
                return Err(Error::MachineBetween {
                    machine: self.description.summary.name.clone(),
                });
            }
        };
        Ok(PlannedCapture {
            method: PlannedMethod {
                word: method.word(),
                reason,
            },
            disks,
            left_out: self.left_out.clone(),
        })
    }

    fn plan_stopped(&self) -> Result<(Method, String, Vec<PlannedRead>)> {
        let (method, reason, why) = match (self.request.method, self.no_snapshot()) {
            (Some(Method::Snapshot), None) => (Method::Snapshot, "asked for", None),
            (Some(Method::Snapshot), Some(reason)) => return Err(self.no_method_snapshot(&reason)),
            _ => (Method::Images, "it is shut off", Some(ReadAll::ShutOff.to_string())),
        };
        let opened = self.open_at_rest()?;
        let disks = self.taken.iter().zip(&opened).map(|(disk, source)| {
            let allocated_bytes = source.allocated_bytes()?;
            Ok(PlannedRead {
                name: disk.target.clone(),
                size_bytes: Some(source.device.size_bytes()),
                read_bytes: why.as_ref().map(|_| allocated_bytes),
                reason: why.clone(),
            })
        });
        Ok((method, reason.to_owned(), disks.collect::<Result<_>>()?))
    }

    /// The reads of the disks of a machine that has a QEMU, by its bitmaps.
    fn plan_disks(&self, method: Method) -> Result<Vec<PlannedRead>> {
        let freezer = self.freezer();
        let devices = freezer.devices(&self.taken)?;
        let proofs = freezer.proofs(&devices)?;
        let disks = devices.iter().zip(proofs).map(|((target, disk), proof)| {
            let (read_bytes, reason) = match (method, proof) {
                (Method::Filter, Ok(proof)) => {
                    let mut bitmaps = disk.bitmaps.iter();
                    let bitmap = bitmaps.find(|bitmap| proof.below.is_none() && bitmap.name == proof.bitmap);
                    (bitmap.map(|bitmap| bitmap.dirty_bytes), None)
                }
                (Method::Filter, Err(why)) => (Some(disk.size_bytes), Some(why.to_string())),
                // Host snapshots can be compared only when the second one exists.
                (Method::Snapshot, _) => (None, None),
                _ => (Some(disk.size_bytes), Some(ReadAll::NoBitmapNow(method).to_string())),
            };
            PlannedRead {
                name: target.clone(),
                size_bytes: Some(disk.size_bytes),
                read_bytes,
                reason,
            }
        });
        Ok(disks.collect())
    }
}
