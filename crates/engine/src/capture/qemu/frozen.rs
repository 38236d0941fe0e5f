//! Freezes the disks of a running machine: what is created before, read meanwhile, and removed afterwards.

mod bitmaps;
mod ending;
mod written_out;

use std::fs::File;
use std::time::Duration;

use holdfast_host::qemu::memory::{Memory, MemoryMode, MemoryPipe, MemoryReceiver};
use holdfast_host::qemu::{
    DiskRequest, NotServed, Pause, PausePolicy, PointInTime, PointInTimeEvent, PointInTimeRequest, QemuDisk, RunId,
};
use holdfast_host::qmp::{MonitorError, QmpCommand, wake_with_retries};
use holdfast_host::{MachineDisk, MachineState};
use holdfast_serve::nbd::client::{Endpoint, NbdDevice, NbdDeviceMut, NbdOptions};

use super::MachineReadRequest;
use super::changes::{BitmapNames, Changes, ReadAll};
use super::copied_disk::{CopiedDisk, CopyContext, part_bytes};
use super::frozen_device::FrozenDevice;
use super::proof::{NextBitmap, Proof};
use super::supervisor::{CopySpace, Supervisor};
use crate::capture::sink::History;
use crate::job::rate_limit::RateLimit;
use crate::job::{Error, Job, Result};
use crate::machine::devices::{devices_of, monitor_failed};
use crate::machine::hooks::{Downtime, HookCalls, HookEvent};
use crate::machine::lock::{INSTANT_PATIENCE, MachineLock, Work};
use crate::machine::quiesce::{AgentAccess, FreezeState, Guest, Quiesced, RunState};
use crate::machine::state::memory::{LIVE_MEMORY_DEADLINE, MEMORY_DEADLINE, not_kept};
use crate::machine::state::scratch::{Scratch, listen};
use crate::machine::watchdog::Guard;

/// A pause takes milliseconds; after this time the watchdog ends it.
const PAUSE_DEADLINE: Duration = Duration::from_secs(10);

/// Freezes disks, and cleans up.
pub(super) struct GuestFreezer<'a> {
    before: Option<History<'a>>,
    request: &'a MachineReadRequest<'a>,
    machine: String,
    /// None if no later backup uses a bitmap.
    names: Option<BitmapNames>,
    hooks: &'a HookCalls<'a>,
    job: Job<'a>,
    /// How long the machine may be paused.
    pub(super) pause_deadline: Duration,
    /// Whether it must be paused.
    pub(super) pause_policy: PausePolicy,
}

/// Files that QEMU uses for a point in time.
#[derive(Default)]
struct LentFiles {
    disk_requests: Vec<DiskRequest>,
    /// The files that grow while the disks are read.
    watched: Vec<File>,
    /// The file of each disk that is copied while it is read.
    spools: Vec<Option<File>>,
}

/// What is known of a disk's bitmap before the point in time.
type BitmapProof = std::result::Result<Proof, ReadAll>;

pub(super) struct FrozenMachine<'a> {
    cut: PointInTime,
    quiesced: Quiesced,
    guard: Guard,
    disks: Vec<FrozenDisk<'a>>,
    memory: Option<Memory>,
    /// QEMU's names of the disks' devices.
    devices: Vec<String>,
    /// Scratch files for data that the guest overwrites; QEMU has these files open, too.
    scratch: Vec<File>,
    /// Holdfast's earlier bitmaps, with their nodes.
    old_bitmaps: Vec<(String, String)>,
}

pub(super) struct FrozenDisk<'a> {
    pub(super) device: FrozenDevice<'a>,
    pub(super) changes: Changes,
    /// The bitmap that started at this point in time.
    pub(super) next: Option<NextBitmap>,
    node: String,
}

impl<'a> FrozenMachine<'a> {
    pub(super) fn disks(&self) -> &[FrozenDisk<'a>] {
        &self.disks
    }

    pub(super) fn memory(&self) -> Option<&Memory> {
        self.memory.as_ref()
    }

    pub(super) fn pause(&self) -> Pause {
        self.cut.pause
    }

    pub(super) fn quiesced(&self) -> &Quiesced {
        &self.quiesced
    }

    /// The supervisor of the machine while its disks are read. It takes over the scratch files.
    pub(super) fn supervisor<'w>(
        &mut self,
        request: &'w MachineReadRequest<'_>,
        pace: &'w RateLimit<'w>,
        job: Job<'w>,
    ) -> Supervisor<'w> {
        Supervisor {
            machine: request.machine,
            run: RunId(request.capture.run),
            devices: self.devices.clone(),
            scratch: std::mem::take(&mut self.scratch),
            kept: CopySpace::InScratch,
            readers: self.disks.iter().map(|disk| disk.device.stopper()).collect(),
            limits: request.limits,
            pace,
            job,
        }
    }
}

impl<'a> GuestFreezer<'a> {
    pub(super) fn new(
        before: Option<History<'a>>,
        request: &'a MachineReadRequest<'a>,
        machine: String,
        hooks: &'a HookCalls<'a>,
        job: Job<'a>,
    ) -> Self {
        let names =
            |before: History<'_>| BitmapNames::new(&before.repository.config().id.to_string(), request.capture.run);
        Self {
            names: before.map(names),
            before,
            request,
            machine,
            hooks,
            job,
            pause_deadline: PAUSE_DEADLINE,
            pause_policy: PausePolicy::default(),
        }
    }

    fn failed(&self, source: MonitorError) -> Error {
        monitor_failed(&self.machine, source)
    }

    /// Freezes the disks; `within` is called while the machine is paused.
    ///
    /// A machine that is not running need not be watched, and one without an agent cannot be quiesced.
    pub(super) fn freeze(
        &self,
        taken: &[MachineDisk],
        state: MachineState,
        agent: AgentAccess,
        within: &mut dyn FnMut(),
    ) -> Result<FrozenMachine<'a>> {
        let wanted = self.devices(taken)?;
        let usable = self.proofs(&wanted)?;
        self.write_out(&wanted, state)?;
        let (folder, listener) = listen(&self.request.runtime)?;
        let LentFiles {
            disk_requests,
            watched,
            spools,
        } = self.lend(&wanted, &usable)?;
        let (memory, receiving) = self.begin_memory()?.unzip();
        let request = PointInTimeRequest {
            run: RunId(self.request.capture.run),
            disks: disk_requests,
            write_deadline: self.request.write_deadline,
            listener,
            memory,
            pause_policy: self.pause_policy,
        };
        let mut guard = Guard::start(self.request.watchdog.as_deref())?;
        let made = self.cut(request, state, agent, within, &mut guard);
        let failed = |source| not_kept(&self.machine, &self.request.scratch, source);
        let memory = receiving.map(|receiving| receiving.finish().map_err(failed));
        let (cut, quiesced) = match made {
            Ok(made) => made,
            Err(error) => {
                // An error of the memory is more useful than QEMU's error about it.
                let error = match memory {
                    Some(Err(of_memory @ Error::MemoryNotKept { .. })) => of_memory,
                    _ => error,
                };
                self.leave(guard, state);
                return Err(error);
            }
        };
        let opened = memory.transpose().and_then(|memory| {
            let disks = self.open(&cut, &folder.path().join("nbd"), &wanted, usable, spools)?;
            Ok((disks, memory))
        });
        let old_bitmaps = self.earlier_bitmaps(&wanted);
        match opened {
            Ok((disks, memory)) => Ok(FrozenMachine {
                cut,
                quiesced,
                guard,
                disks,
                memory,
                devices: wanted.into_iter().map(|(_, disk)| disk.device).collect(),
                scratch: watched,
                old_bitmaps,
            }),
            Err(error) => {
                // A lost connection may be the cause, and the cleanup needs a new one.
                wake_with_retries(self.request.machine.monitor(), self.job.clock).ok();
                self.release(cut);
                let begun = wanted.iter().enumerate();
                self.remove_bitmaps(
                    begun.filter_map(|(number, (_, disk))| Some((&disk.node[..], self.next_bitmap(number)?))),
                );
                guard.done();
                Err(error)
            }
        }
    }

    /// Starts to receive the memory, if it is wanted.
    fn begin_memory(&self) -> Result<Option<((MemoryPipe, MemoryMode), MemoryReceiver)>> {
        let Some(way) = self.request.memory else {
            return Ok(None);
        };
        let monitor = self.request.machine.monitor();
        crate::machine::state::memory::begin(way, monitor, &self.machine, &self.request.scratch, self.job).map(Some)
    }

    /// The disks to freeze, with new scratch files for each.
    fn lend(&self, wanted: &[(String, QemuDisk)], usable: &[BitmapProof]) -> Result<LentFiles> {
        let disks: Vec<&QemuDisk> = wanted.iter().map(|(_, disk)| disk).collect();
        let not_served = NotServed::query(self.request.machine.monitor(), &disks);
        let not_served = not_served.map_err(|error| self.failed(error))?;
        let mut lent = LentFiles::default();
        for ((number, usable), why) in (0..).zip(usable).zip(not_served) {
            let (target, disk) = &wanted[number];
            let scratch = Scratch::create(&self.request.scratch, disk.size_bytes)?;
            lent.watched.push(scratch.watched);
            let spool = match why {
                Some(why) => Some(self.spool(target, disk, &why)?),
                None => None,
            };
            let (given, read) = spool.map(|spool| (spool.given, spool.watched)).unzip();
            let watched = read.as_ref().map(|file| self.clone_of(file)).transpose()?;
            lent.watched.extend(watched);
            lent.spools.push(read);
            lent.disk_requests.push(DiskRequest {
                scratch: scratch.given,
                spool: given,
                disk: disk.clone(),
                next_bitmap: self.next_bitmap(number),
                changes: usable.as_ref().ok().map(|proof| proof.bitmap.clone()),
                changes_below: usable.as_ref().ok().and_then(|proof| proof.below.clone()),
            });
        }
        Ok(lent)
    }

    /// A file for the parts of a disk that must not be served.
    fn spool(&self, target: &str, disk: &QemuDisk, why: &NotServed) -> Result<Scratch> {
        let scratch = &self.request.scratch;
        self.job.progress.note(&format!(
            "disk {target} of {}: {why}; QEMU copies it in parts to {} instead",
            self.request.capture.name,
            scratch.display()
        ));
        Scratch::create(scratch, disk.size_bytes)
    }

    fn clone_of(&self, file: &File) -> Result<File> {
        file.try_clone().map_err(|source| Error::File {
            action: "open a scratch file again in",
            path: self.request.scratch.clone(),
            source,
        })
    }

    /// Cleans up after a failure. If even that failed the machine may still be paused: then the watchdog resumes it. A
    /// machine that was paused before stays paused.
    fn leave(&self, mut guard: Guard, state: MachineState) {
        if state == MachineState::Running && !self.runs() {
            guard.about_to_pause(PAUSE_DEADLINE).ok();
            guard.hand_over();
        } else {
            guard.done();
        }
    }

    /// Takes the point in time, with the hook programs before and after it.
    fn cut(
        &self,
        request: PointInTimeRequest,
        state: MachineState,
        agent: AgentAccess,
        within: &mut dyn FnMut(),
        guard: &mut Guard,
    ) -> Result<(PointInTime, Quiesced)> {
        if state == MachineState::Running {
            guard.owes(&[HookEvent::PostThaw, HookEvent::JobAbort])?;
        }
        let prepared = self.hooks.pre_freeze(state);
        let made = prepared.and_then(|()| self.cut_quiesced(request, state, agent, within, guard));
        let held_up = made.as_ref().map_or_else(
            |_| Downtime::default(),
            |(cut, quiesced)| Downtime {
                frozen: quiesced.frozen(),
                paused: cut.pause.total,
            },
        );
        self.hooks.post_thaw(state, Some(held_up));
        guard.owes(&[HookEvent::JobAbort])?;
        made
    }

    fn cut_quiesced(
        &self,
        request: PointInTimeRequest,
        state: MachineState,
        agent: AgentAccess,
        within: &mut dyn FnMut(),
        guard: &mut Guard,
    ) -> Result<(PointInTime, Quiesced)> {
        let is_running = state == MachineState::Running;
        let summary = self.request.machine.describe()?.summary;
        let (journal, now) = (self.request.capture.journal.as_ref(), (self.request.capture.now)());
        let _lock = MachineLock::take(journal, &summary, Work::Instant, INSTANT_PATIENCE, now, self.job)?;
        let guest = Guest {
            machine: self.request.machine,
            shown: &self.request.capture.name,
            quiesce: self.request.quiesce,
        };
        // The guest's file systems are frozen as briefly as possible: slow steps are done before and after.
        let monitor = self.request.machine.monitor();
        let with_memory = request.memory.as_ref().map(|(_, mode)| *mode);
        let prepared = PointInTime::prepare(monitor, self.job.clock, request).map_err(|error| self.failed(error))?;
        let quiescence = match FreezeState::begin(guest, agent, guard, self.job) {
            Ok(quiescence) => quiescence,
            Err(error) => {
                prepared.abandon().map_err(|error| self.failed(error))?;
                return Err(error);
            }
        };
        let announced = match with_memory {
            _ if !is_running => Ok(()),
            None => guard.about_to_pause(self.pause_deadline),
            Some(MemoryMode::Live) => guard.about_to_pause(LIVE_MEMORY_DEADLINE),
            Some(MemoryMode::Stopped) => guard.about_to_pause(MEMORY_DEADLINE),
        };
        let taken = match announced {
            Ok(()) => {
                let tell = &mut |moment| match moment {
                    // A watchdog that has died cannot be notified; the pause ends before that matters.
                    PointInTimeEvent::Stopped if is_running => drop(guard.about_to_pause(self.pause_deadline)),
                    PointInTimeEvent::Running if is_running => drop(guard.about_to_pause(LIVE_MEMORY_DEADLINE)),
                    PointInTimeEvent::Stopped | PointInTimeEvent::Running => {}
                    PointInTimeEvent::Reached => within(),
                };
                prepared.take(tell).map_err(|error| self.failed(error))
            }
            Err(error) => {
                let abandoned = prepared.abandon();
                Err(abandoned.map_or_else(|left| self.failed(left), |()| error))
            }
        };
        let after = if taken.is_ok() || !is_running || self.runs() {
            RunState::Restored
        } else {
            RunState::StillPaused
        };
        let quiesced = quiescence.end(guest, guard, after, self.job);
        let cut = taken?.serve().map_err(|error| self.failed(error))?;
        Ok((cut, quiesced))
    }

    /// Whether the machine is known to run.
    fn runs(&self) -> bool {
        let status = QmpCommand::new("query-status", serde_json::Value::Null);
        let status = self.request.machine.monitor().execute(&status);
        status.is_ok_and(|status| status["running"] == true)
    }

    /// QEMU's devices of these disks.
    pub(super) fn devices(&self, taken: &[MachineDisk]) -> Result<Vec<(String, QemuDisk)>> {
        let found = devices_of(self.request.machine, taken)?;
        let named = taken.iter().zip(found);
        Ok(named.map(|(disk, device)| (disk.target.clone(), device)).collect())
    }

    /// QEMU's names of the devices of these disks.
    pub(super) fn devices_of(&self, taken: &[MachineDisk]) -> Result<Vec<String>> {
        let devices = self.devices(taken)?;
        Ok(devices.into_iter().map(|(_, disk)| disk.device).collect())
    }

    fn open(
        &self,
        cut: &PointInTime,
        socket: &std::path::Path,
        wanted: &[(String, QemuDisk)],
        usable: Vec<BitmapProof>,
        spools: Vec<Option<File>>,
    ) -> Result<Vec<FrozenDisk<'a>>> {
        let endpoint = Endpoint::Unix(socket.to_owned());
        let copied_count = spools.iter().flatten().count();
        let layers = self.layers(wanted)?;
        let mut opened = Vec::new();
        for (number, (usable, spool)) in usable.into_iter().zip(spools).enumerate() {
            let ((target, disk), context) = (&wanted[number], &cut.change_contexts[number]);
            let options = NbdOptions {
                contexts: context.iter().cloned().collect(),
                is_stopped: Some(self.job.interrupt.question()),
                ..NbdOptions::default()
            };
            let device = NbdDevice::connect(&endpoint, &cut.exports[number], options).and_then(NbdDeviceMut::new);
            let device = device.map_err(|source| Error::Frozen {
                machine: self.machine.clone(),
                source: Box::new(source),
            })?;
            let mut device = match (spool, cut.copiers[number].clone()) {
                (Some(spool), Some(copier)) => {
                    let part_bytes = part_bytes(self.room(&spool), copied_count);
                    let copied = CopiedDisk::new(device, copier, spool, part_bytes, self.copy_context());
                    FrozenDevice::Copied(Box::new(copied))
                }
                _ => FrozenDevice::Served(Box::new(device)),
            };
            let layers = layers.as_ref().and_then(|layers| layers.of(&disk.node));
            let changes = usable.and_then(|proof| {
                let context = context.as_ref().filter(|_| proof.still_holds(layers.as_deref()));
                let context = context.ok_or(ReadAll::LayersChanged)?;
                let above = cut.layer_exports[number]
                    .as_ref()
                    .map(|export| (&endpoint, &export[..]));
                self.changes(&device, context, &proof, above, target)
            });
            let changes = changes.map_or_else(Changes::Unknown, Changes::Only);
            device.read_in_order(match &changes {
                Changes::Only(changed) | Changes::Between(changed) => Some(changed),
                Changes::Unknown(_) => None,
            });
            opened.push(FrozenDisk {
                device,
                changes,
                next: self.next(number, layers.as_deref(), disk),
                node: disk.node.clone(),
            });
        }
        Ok(opened)
    }

    fn copy_context(&self) -> CopyContext<'a> {
        CopyContext {
            monitor: self.request.machine.monitor(),
            clock: self.job.clock,
            interrupt: self.job.interrupt,
        }
    }

    /// Bytes that scratch files may take.
    fn room(&self, scratch: &File) -> u64 {
        let free_bytes = rustix::fs::fstatvfs(scratch)
            .map(|found| found.f_bavail.saturating_mul(found.f_frsize))
            .unwrap_or_default();
        let max_bytes = self.request.limits.scratch_bytes_max;
        max_bytes.map_or(free_bytes, |max_bytes| max_bytes.min(free_bytes))
    }
}
