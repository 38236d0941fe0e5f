//! The end of a point in time: removes the run's objects from QEMU, and reports failures.

use holdfast_host::MachineEnd;
use holdfast_host::qemu::{Layers, Pause, PointInTime, remove_bitmap};

use super::{FrozenMachine, GuestFreezer};
use crate::capture::qemu::fate::Fate;
use crate::job::error::ScratchOverrun;
use crate::job::{Error, Interrupted, Result};
use crate::machine::quiesce::Quiesced;
use crate::machine::watchdog::Guard;

impl GuestFreezer<'_> {
    /// Removes everything. The bitmap of this point in time is kept if its snapshot was stored, otherwise the older
    /// ones are.
    pub(in crate::capture::qemu) fn finish<T>(&self, frozen: FrozenMachine<'_>, stored: &Result<T>) {
        let FrozenMachine {
            cut,
            disks,
            old_bitmaps,
            guard,
            ..
        } = frozen;
        if stored.is_ok() {
            self.keep_witnesses(&cut, &disks);
        }
        let begun = disks
            .iter()
            .filter_map(|disk| Some((disk.node.clone(), disk.next.as_ref()?.name.clone())));
        let begun: Vec<(String, String)> = begun.collect();
        // QEMU flushes what cannot be written out now.
        if let Ok(layers) = Layers::query(self.request.machine.monitor()) {
            let nodes = disks.iter().map(|disk| &disk.node[..]);
            self.write_out_nodes(&layers, nodes).ok();
        }
        // Connections end before the server is asked to.
        drop(disks);
        self.release(cut);
        if stored.is_ok() {
            self.remove_bitmaps(old_bitmaps.iter().map(|(node, name)| (&node[..], name.clone())));
        } else {
            self.remove_bitmaps(begun.iter().map(|(node, name)| (&node[..], name.clone())));
        }
        guard.done();
    }

    /// Removes from QEMU what was needed only for the point in time; the watchdog keeps watching.
    pub(in crate::capture::qemu) fn release_frozen(&self, frozen: FrozenMachine) -> (Guard, Quiesced, Pause) {
        let pause = frozen.pause();
        self.release(frozen.cut);
        (frozen.guard, frozen.quiesced, pause)
    }

    pub(super) fn release(&self, cut: PointInTime) {
        let machine = self.request.machine;
        let Err(error) = cut.release(machine.monitor(), self.job.clock) else {
            return;
        };
        let progress = self.job.progress;
        match Fate::of(machine, self.job) {
            // The run's objects in QEMU have ended with it.
            Fate::Ended(MachineEnd::SwitchedOff) => progress.note(&format!("{} was switched off", self.machine)),
            Fate::Ended(how) => progress.warning(&format!("{} {how}", self.machine)),
            fate => progress.warning(&format!(
                "not everything could be taken out of QEMU again: {error}; {fate}, and its next backup tries again"
            )),
        }
    }

    pub(super) fn remove_bitmaps<'n>(&self, bitmaps: impl Iterator<Item = (&'n str, String)>) {
        let machine = self.request.machine;
        for (node, name) in bitmaps {
            let Err(error) = remove_bitmap(machine.monitor(), node, &name) else {
                continue;
            };
            if let Fate::Ended(_) = Fate::of(machine, self.job) {
                // Bitmaps that QEMU saved stay in the images, and the next backup removes them.
                return;
            }
            self.job
                .progress
                .warning(&format!("the bitmap {name} stays in QEMU: {error}"));
        }
    }

    /// Explains a read error of a frozen disk.
    pub(in crate::capture::qemu) fn explain(&self, error: Error, overrun: Option<ScratchOverrun>) -> Error {
        if let Some(why) = overrun {
            return Error::ScratchLimit {
                machine: self.machine.clone(),
                scratch: self.request.scratch.clone(),
                why,
            };
        }
        match error {
            // The copy of a part was cancelled.
            _ if self.job.interrupt.is_requested() => Error::Interrupted(Interrupted),
            Error::Repository(holdfast_repo::Error::Device {
                role: "source",
                name,
                source,
            }) => Error::FrozenBroken {
                machine: self.machine.clone(),
                disk: name,
                scratch: self.request.scratch.clone(),
                source: Box::new(source),
            },
            other => other,
        }
    }
}
