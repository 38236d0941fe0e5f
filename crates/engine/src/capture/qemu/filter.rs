//! Reads a running machine from copy-before-write filters in its QEMU.

use std::fs::File;

use holdfast_host::qemu::PausePolicy;
use jiff::Timestamp;

use super::frozen::{FrozenMachine, GuestFreezer};
use super::proof::NextBitmap;
use super::{HeldMachine, MachineReading, Method, PointOfDisks, QemuCapture, ReadyDisk, notes_of};
use crate::job::Result;
use crate::machine::noted_run::NotedRun;
use crate::machine::quiesce::AgentAccess;
use crate::machine::run_journal::Phase;
use crate::machine::state::streams::FirmwareState;

/// A machine whose disks are frozen by filters.
pub(crate) struct HeldByFilters<'h> {
    freezer: GuestFreezer<'h>,
    frozen: FrozenMachine<'h>,
    note: NotedRun<'h>,
    reason: String,
    time: Timestamp,
    beside: Result<FirmwareState>,
    /// Scratch files, kept open until QEMU has closed them.
    scratch: Vec<File>,
}

impl QemuCapture<'_> {
    pub(super) fn freeze_filters(&self, reason: String) -> Result<HeldMachine<'_>> {
        let has_others = self.description.nvram.is_some() || self.description.tpm.is_some();
        let mut freezer = self.freezer();
        if has_others {
            freezer.pause_policy = PausePolicy::Always;
        }
        let (mut time, mut beside) = (None, Ok(FirmwareState::default()));
        let note = NotedRun::begin(self.request.machine, &self.request.work(), &self.description, self.job);
        let state = self.description.summary.state;
        let mut agent = AgentAccess::of(&self.description);
        if self.request.memory.is_some() {
            // The memory contains data that the file systems have not written yet.
            agent = agent.denied();
        }
        let (frozen, note) = note.freezing(|| {
            freezer.freeze(&self.taken, state, agent, &mut || {
                time = Some((self.request.capture.now)());
                beside = self.read_beside();
            })
        })?;
        Ok(HeldMachine::Filter(Box::new(HeldByFilters {
            freezer,
            frozen,
            note,
            reason,
            time: time.unwrap_or_else(|| (self.request.capture.now)()),
            beside,
            scratch: Vec::new(),
        })))
    }

    pub(super) fn read_filtered<'h>(&'h self, held: &mut HeldByFilters<'h>) -> Result<MachineReading> {
        let pace = self.pace();
        let supervisor = held.frozen.supervisor(&self.request, &pace, self.job);
        let beside = std::mem::replace(&mut held.beside, Ok(FirmwareState::default()));
        let frozen = &held.frozen;
        let consistency = match frozen.memory() {
            Some(_) => "memory",
            None => frozen.quiesced().consistency(),
        };
        let (stored, watched) = supervisor.watch(|| {
            let disks = self.taken.iter().zip(frozen.disks()).map(|(disk, frozen)| {
                let mut notes = notes_of(disk);
                notes.extend(frozen.next.iter().flat_map(NextBitmap::notes));
                ReadyDisk {
                    target: disk.target.clone(),
                    device: &frozen.device,
                    changes: frozen.changes.clone(),
                    notes,
                }
            });
            let disks: Vec<ReadyDisk<'_>> = disks.collect();
            let point = PointOfDisks {
                disks: &disks,
                rest: beside?.rest(frozen.memory(), self.job.progress),
                time: held.time,
                method: Method::Filter,
                consistency,
            };
            self.store(point, &pace)
        });
        held.scratch = watched.scratch;
        let stored = stored.map_err(|error| held.freezer.explain(error, watched.overrun))?;
        Ok(MachineReading {
            pause: self.pause_of_running(frozen.pause()),
            quiesced: frozen.quiesced().clone(),
            memory_bytes: frozen.memory().map(|(state, _)| state.size_bytes()),
            load: watched.load,
            compared: stored.compared,
            ..self.reading(Method::Filter, &held.reason, consistency)
        })
    }

    pub(super) fn release_filters(&self, held: HeldByFilters<'_>, read: &Result<MachineReading>) {
        let HeldByFilters {
            freezer,
            frozen,
            mut note,
            scratch,
            ..
        } = held;
        self.wake();
        note.phase(Phase::ClearingUp);
        freezer.finish(frozen, read);
        drop(scratch);
        note.end();
    }
}
