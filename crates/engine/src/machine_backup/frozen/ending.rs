//! The end of an instant: what was put into QEMU is taken out, and what went wrong is said.

use holdfast_host::qemu::{Cut, Pause};
use holdfast_host::qmp::QmpCommand;

use super::{Freezer, Frozen};
use crate::error::{Error, Result};
use crate::machine_backup::noted::is_off;
use crate::machine_backup::warden::GivenUp;
use crate::quiesce::Quiesced;
use crate::watchdog::Guard;

impl Freezer<'_> {
    /// Takes everything away; the bitmap of this instant stays if the snapshot does, the older ones if not.
    pub(in super::super) fn finish<T>(&self, frozen: Frozen<'_>, stored: &Result<T>) {
        let Frozen {
            cut,
            disks,
            old_bitmaps,
            guard,
            ..
        } = frozen;
        let nodes: Vec<String> = disks.iter().map(|disk| disk.node.clone()).collect();
        // Connections end before the server is asked to.
        drop(disks);
        self.release(cut);
        if stored.is_ok() {
            self.remove_bitmaps(old_bitmaps.iter().map(|(node, name)| (&node[..], name.clone())));
        } else {
            self.remove_bitmaps(nodes.iter().filter_map(|node| Some((&node[..], self.next_bitmap()?))));
        }
        guard.done();
    }

    /// Takes out of QEMU what was needed for the instant alone; the watchdog watches on.
    pub(in super::super) fn let_go(&self, frozen: Frozen) -> (Guard, Quiesced, Pause) {
        let pause = frozen.pause();
        self.release(frozen.cut);
        (frozen.guard, frozen.quiesced, pause)
    }

    pub(super) fn release(&self, cut: Cut) {
        if let Err(error) = cut.release(self.request.machine.monitor(), self.job.clock) {
            self.job.progress.warning(&format!(
                "not everything could be taken out of QEMU again: {error}; the machine runs on, and its next backup tries again"
            ));
        }
    }

    pub(super) fn remove_bitmaps<'n>(&self, bitmaps: impl Iterator<Item = (&'n str, String)>) {
        for (node, name) in bitmaps {
            let arguments = serde_json::json!({ "node": node, "name": name });
            let removed = self
                .request
                .machine
                .monitor()
                .execute(&QmpCommand::new("block-dirty-bitmap-remove", arguments));
            if let Err(error) = removed {
                self.job
                    .progress
                    .warning(&format!("the bitmap {name} stays in QEMU: {error}"));
            }
        }
    }

    /// Says what a read error of a frozen disk means.
    pub(in super::super) fn explain(&self, error: Error, given_up: Option<GivenUp>) -> Error {
        if let Some(why) = given_up {
            return Error::ScratchLimit {
                machine: self.machine.clone(),
                scratch: self.request.scratch.clone(),
                why,
            };
        }
        match error {
            Error::Repository(holdfast_repo::Error::Device { role: "source", .. }) if is_off(self.request.machine) => {
                Error::MachineEnded {
                    machine: self.machine.clone(),
                }
            }
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
