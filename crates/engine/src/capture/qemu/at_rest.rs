//! Reads a machine that is shut off from its images.

use holdfast_host::MachineState;
use jiff::Timestamp;

use super::changes::{Changes, ReadAll};
use super::supervisor::Load;
use super::{HeldMachine, MachineReading, Method, PointOfDisks, QemuCapture, ReadyDisk, notes_of};
use crate::image::source::OpenSource;
use crate::job::Result;
use crate::machine::state::streams::FirmwareState;

/// The opened images of a machine that is shut off.
pub(crate) struct HeldAtRest {
    opened: Vec<OpenSource>,
    beside: FirmwareState,
    time: Timestamp,
}

impl QemuCapture<'_> {
    pub(super) fn open_stopped(&self) -> Result<HeldMachine<'_>> {
        if self.request.memory.is_some() {
            self.job.progress.note("the machine is shut off, so it has no memory");
        }
        Ok(HeldMachine::AtRest(HeldAtRest {
            opened: self.open_at_rest()?,
            beside: self.read_beside()?,
            time: (self.request.capture.now)(),
        }))
    }

    pub(super) fn read_at_rest(&self, held: &mut HeldAtRest) -> Result<MachineReading> {
        let disks = self.taken.iter().zip(&held.opened).map(|(disk, source)| ReadyDisk {
            target: disk.target.clone(),
            device: &*source.device,
            changes: Changes::all(ReadAll::ShutOff),
            notes: notes_of(disk),
        });
        let disks: Vec<ReadyDisk<'_>> = disks.collect();
        let point = PointOfDisks {
            disks: &disks,
            rest: std::mem::take(&mut held.beside).rest(None, self.job.progress),
            time: held.time,
            method: Method::Images,
            consistency: "shut off",
        };
        let pace = self.pace();
        let stored = self.store(point, &pace)?;
        self.warn_if_started(&held.opened)?;
        Ok(MachineReading {
            load: Load {
                waited: pace.waited(stored.duration),
                ..Load::default()
            },
            compared: stored.compared,
            ..self.reading(Method::Images, "it is shut off", "shut off")
        })
    }

    /// Warns if the machine was started during the backup: it has written to the images, even if it is shut off again.
    fn warn_if_started(&self, opened: &[OpenSource]) -> Result<()> {
        let now = self.request.machine.describe()?;
        let mut has_changed = now.summary.state != MachineState::ShutOff;
        for source in opened {
            has_changed |= !source.changes()?.is_empty();
        }
        if has_changed {
            self.job.progress.warning(&format!(
                "{} was started during the backup: the snapshot is not of one point in time",
                self.request.capture.name
            ));
        }
        Ok(())
    }
}
