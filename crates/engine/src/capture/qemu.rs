//! `backup` of a machine: one instant of all its disks, with its configuration, its firmware's variables and
//! the state of its TPM.
//!
//! 1. The hypervisor says what the machine is; what is left out is said, with the reason.
//! 2. A machine that is shut off is read from its images. One that runs, or is paused, is frozen: see
//!    `docs/design/0004-live-machines.md`.
//! 3. What changed since the snapshot before comes from QEMU's dirty bitmap, if it can be believed ([`changes`]); otherwise
//!    everything is read, and the reason is said.
//! 4. The snapshot is committed; only then does the bitmap of the next run take the place of the old one.

mod changes;
mod choice;
mod copied_disk;
mod disk_format;
mod fate;
mod from_images;
mod frozen;
mod frozen_device;
mod host_snapshots;
mod keeper;
mod method;
mod noted;
mod notes;
mod others;
mod proof;
mod warden;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use holdfast_block::BlockDevice;
use holdfast_host::qemu::memory::MemoryWay;
use holdfast_host::qemu::{Pause, Standstill};
use holdfast_host::qmp::wake_patiently;
use holdfast_host::{Description, DiskChoice, Machine, MachineDisk, MachineState, Overlays};
use holdfast_repo::{Processes, Repository, Source, SourceData};
use jiff::Timestamp;

use crate::BackupReport;
use crate::host_snapshot::Providers;
use crate::job::bottleneck::Stages;
use crate::job::priority::BulkPriority;
use crate::job::rate_limit::{Pace, PacedDevice};
use crate::job::read_meter::{Meter, MeteredDevice};
use crate::job::{Error, Job, MachineName, Result, Unit};
use crate::machine::hooks::{HookCalls, Hooks};
use crate::machine::quiesce::{Quiesce, Quiesced};
use crate::machine::run_journal::{JournalPlace, Phase};
use crate::machine::state::streams::{Beside, Rest, sources_of};
use changes::Changes;
pub use changes::{Compared, ReadAll};
pub(crate) use changes::{is_bitmap_of, is_bitmap_of_ours};
use choice::{check_choice, decide};
use frozen::Freezer;
use keeper::InRepository;
pub use keeper::SnapshotWish;
pub(crate) use keeper::{Before, Instant, Keeper};
pub use method::Method;
pub(crate) use method::{overlay_of, run_of_overlay};
use noted::Noted;
use notes::notes_of;
use proof::NextBitmap;
pub use warden::{Limits, Load};

/// Which machine is read, and how.
pub struct MachineReadRequest<'a> {
    /// The machine at its hypervisor.
    pub machine: &'a dyn Machine,
    /// What its snapshots are listed under.
    pub name: MachineName,
    /// The way to bring overlays down into their bases, where its hypervisor has one.
    pub overlays: Option<&'a dyn Overlays>,
    /// How its disks are read; the best way that it offers where nobody asks for one.
    pub method: Option<Method>,
    /// Who makes host snapshots of its disks.
    pub providers: &'a Providers,
    /// Which of its disks.
    pub choice: DiskChoice,
    /// Images of a machine that is shut off may be based on these files although they lie elsewhere.
    pub allowed: Vec<PathBuf>,
    /// Tells the time of day; asked at the instant.
    pub now: &'a dyn Fn() -> Timestamp,
    /// The program that reads it.
    pub program: String,
    /// Where what the guest overwrites meanwhile is kept.
    pub scratch: PathBuf,
    /// Where the socket between QEMU and us is: a short path that QEMU's user can reach.
    pub runtime: PathBuf,
    /// How long a write of the guest may wait for its copy, before the copy is given up.
    pub write_deadline: Duration,
    /// Whether the guest's file systems are frozen for the instant.
    pub quiesce: Quiesce,
    /// Whether its memory is wanted, and how it is taken.
    pub memory: Option<MemoryWay>,
    /// The command that starts the watchdog of this run: see [`watch_over`](crate::watch_over).
    pub watchdog: Option<Vec<std::ffi::OsString>>,
    /// What reading may cost the machine and its host.
    pub limits: Limits,
    /// Where the run is noted for whoever has to clear up after it; none where it is not.
    pub journal: Option<JournalPlace>,
    /// Who is alive: another backup of the machine may be.
    pub processes: &'a dyn Processes,
    /// The administrator's own programs.
    pub hooks: Hooks,
    /// How long another backup of the machine is waited for, before this one gives up.
    pub patience: Duration,
    /// A random number, which names what is made in QEMU.
    pub run: u32,
}

/// A machine that was backed up.
#[derive(Debug)]
pub struct MachineBackupReport {
    /// The snapshot.
    pub backup: BackupReport,
    /// How it was read.
    pub reading: MachineReading,
}

/// How a machine was read.
#[derive(Debug)]
pub struct MachineReading {
    /// How the disks were read.
    pub method: Method,
    /// Why so, in words.
    pub method_reason: String,
    /// Of what kind the instant is.
    pub consistency: String,
    /// How long the machine stood still; none where it was not running.
    pub pause: Option<Pause>,
    /// What became of freezing the guest's file systems.
    pub quiesced: Quiesced,
    /// Bytes of its memory, where that was taken.
    pub memory_bytes: Option<u64>,
    /// What reading did to it.
    pub load: Load,
    /// Disks that were left out, and why.
    pub left_out: Vec<(String, String)>,
    /// How each disk was compared with the snapshot before, in the order of the snapshot.
    pub compared: Vec<(String, Compared)>,
}

/// Backs up a machine.
///
/// # Errors
/// A machine that is harmed by nothing: whatever goes wrong, it runs on if it was running.
pub fn back_up_machine(
    repository: &Repository,
    request: MachineReadRequest<'_>,
    wish: SnapshotWish,
    job: Job<'_>,
) -> Result<MachineBackupReport> {
    let keeper = InRepository::new(repository, wish, job);
    let reading = read_machine(&keeper, request, job)?;
    let backup = keeper.into_report().expect("what was read was kept");
    Ok(MachineBackupReport { backup, reading })
}

/// Reads a machine; `keeper` takes it in.
pub(crate) fn read_machine(
    keeper: &dyn Keeper,
    request: MachineReadRequest<'_>,
    job: Job<'_>,
) -> Result<MachineReading> {
    let description = request.machine.describe()?;
    let unknown = description.unknown(&request.choice);
    if !unknown.is_empty() {
        return Err(Error::NoSuchDisk {
            machine: description.summary.name.clone(),
            disks: unknown.into_iter().map(str::to_owned).collect(),
            present: description.disks.iter().map(|disk| disk.target.clone()).collect(),
        });
    }
    let (_lock, description) = others::keep_away(&request, description, job)?;
    let hooks = request.hooks.clone();
    let listed = request.name.to_string();
    let calls = HookCalls::new(&hooks, &listed, &description.summary, request.run, job);
    calls.around(
        || read_described(keeper, request, description.clone(), &calls, job),
        |reading| (keeper.snapshot(), reading.consistency.clone()),
    )
}

fn read_described(
    keeper: &dyn Keeper,
    request: MachineReadRequest<'_>,
    description: Description,
    hooks: &HookCalls<'_>,
    job: Job<'_>,
) -> Result<MachineReading> {
    let (taken, left_out) = decide(&description, &request.choice);
    check_choice(&description, (&taken, request.memory.is_some()), job)?;
    // Before anything is put into QEMU: it is not to be in what describes the machine.
    let configuration = request.machine.configuration()?;
    keeper.begin(&request.name, &description.summary.uuid)?;
    job.interrupt.check()?;
    job.progress.phase(&keeper.phase(&request.name), Unit::Bytes);
    let backup = MachineBackup {
        keeper,
        request,
        description,
        configuration,
        taken,
        left_out,
        hooks,
        job,
    };
    match backup.description.summary.state {
        MachineState::ShutOff => match (backup.request.method, backup.no_snapshot()) {
            (Some(Method::Snapshot), None) => backup.read_host_snapshots("asked for".to_owned()),
            (Some(Method::Snapshot), Some(reason)) => Err(Error::NoMethod {
                machine: backup.request.name.to_string(),
                reason: format!("snapshot: {reason}"),
            }),
            _ => backup.read_images(),
        },
        MachineState::Running | MachineState::Paused => {
            let (machine, name) = (backup.request.machine, backup.description.summary.name.clone());
            fate::explained(backup.read_living(), (machine, &name), job)
        }
        MachineState::Between => Err(Error::MachineBetween {
            machine: backup.description.summary.name,
        }),
    }
}

struct MachineBackup<'a> {
    keeper: &'a dyn Keeper,
    request: MachineReadRequest<'a>,
    description: Description,
    configuration: Vec<(String, Vec<u8>)>,
    taken: Vec<MachineDisk>,
    left_out: Vec<(String, String)>,
    hooks: &'a HookCalls<'a>,
    job: Job<'a>,
}

/// A disk, ready to be read.
struct Ready<'a> {
    target: String,
    device: &'a dyn BlockDevice,
    changes: Changes,
    notes: BTreeMap<String, String>,
}

impl Ready<'_> {
    /// The disk, as `device` reads it.
    fn source<'s>(&'s self, device: &'s dyn BlockDevice) -> Source<'s> {
        Source {
            name: self.target.clone(),
            data: match &self.changes {
                Changes::Only(changed) | Changes::Between(changed) => SourceData::Changes { device, changed },
                Changes::Unknown(_) => SourceData::Disk(device),
            },
            notes: self.notes.clone(),
        }
    }
}

/// All of it was read in so long; how each disk was compared.
type Stored = (Duration, Vec<(String, Compared)>);

impl MachineBackup<'_> {
    /// Reads a machine that has a QEMU.
    fn read_living(self) -> Result<MachineReading> {
        others::make_way(&self.request, &self.description.summary, self.job)?;
        match method::choose(self.request.method, &self.offer()?)? {
            (Method::Filter, reason) => self.read_frozen_disks(reason),
            (Method::Snapshot, reason) => self.read_host_snapshots(reason),
            way => self.read_from_images(way),
        }
    }

    fn read_images(self) -> Result<MachineReading> {
        if self.request.memory.is_some() {
            self.job.progress.note("the machine is shut off, so it has no memory");
        }
        let opened = self.open_at_rest()?;
        let beside = Beside::read(&self.description, &self.request.machine.rights(), self.job.clock)?;
        let disks = self.taken.iter().zip(&opened).map(|(disk, source)| Ready {
            target: disk.target.clone(),
            device: &*source.device,
            changes: Changes::all(ReadAll::ShutOff),
            notes: notes_of(disk),
        });
        let time = (self.request.now)();
        let disks = disks.collect::<Vec<_>>();
        let pace = Pace::new(self.request.limits.bytes_per_second, self.job);
        let rest = beside.rest(None, self.job.progress);
        let (duration, compared) = self.store(&disks, rest, time, (Method::Images, "shut off"), &pace)?;
        let load = Load {
            waited: pace.waited(duration),
            ..Load::default()
        };
        // What was started meanwhile has written to what was read, even if it was shut off again.
        let now = self.request.machine.describe()?;
        let mut has_changed = now.summary.state != MachineState::ShutOff;
        for source in &opened {
            has_changed |= !source.changes()?.is_empty();
        }
        if has_changed {
            self.job.progress.warning(&format!(
                "{} was started while it was read: what was read is not of one instant",
                self.request.name
            ));
        }
        let method = (Method::Images, "it is shut off".to_owned());
        Ok(self.reading(method, "shut off", (None, Quiesced::NotNeeded, load), compared))
    }

    fn freezer(&self) -> Freezer<'_> {
        Freezer::new(
            self.keeper.before(),
            &self.request,
            self.description.summary.name.clone(),
            self.hooks,
            self.job,
        )
    }

    fn read_frozen_disks(self, reason: String) -> Result<MachineReading> {
        let has_others = self.description.nvram.is_some() || self.description.tpm.is_some();
        let mut freezer = self.freezer();
        if has_others {
            freezer.standstill = Standstill::Always;
        }
        let (mut time, mut beside) = (None, Ok(Beside::default()));
        let noted = Noted::begin(&self.request, &self.description, self.job);
        let state = self.description.summary.state;
        // Memory holds what the file systems have not written yet.
        let can_quiesce =
            state == MachineState::Running && self.description.has_agent_channel && self.request.memory.is_none();
        let (mut frozen, mut noted) = noted.freezing(|| {
            freezer.freeze(&self.taken, (state, can_quiesce), &mut || {
                time = Some((self.request.now)());
                beside = Beside::read(&self.description, &self.request.machine.rights(), self.job.clock);
            })
        })?;
        let pace = Pace::new(self.request.limits.bytes_per_second, self.job);
        let warden = frozen.warden(&self.request, &pace, self.job);
        let consistency = match frozen.memory() {
            Some(_) => "memory",
            None => frozen.quiesced().consistency(),
        };
        let read = || {
            let beside = beside?;
            let disks = self.taken.iter().zip(frozen.disks()).map(|(disk, frozen)| {
                let mut notes = notes_of(disk);
                notes.extend(frozen.next.iter().flat_map(NextBitmap::notes));
                Ready {
                    target: disk.target.clone(),
                    device: &frozen.device,
                    changes: frozen.changes.clone(),
                    notes,
                }
            });
            let time = time.unwrap_or_else(|| (self.request.now)());
            let rest = beside.rest(frozen.memory(), self.job.progress);
            let of = (Method::Filter, consistency);
            self.store(&disks.collect::<Vec<_>>(), rest, time, of, &pace)
        };
        let (stored, watched) = warden.watch(read);
        self.wake();
        let held_up = (Some(frozen.pause()), frozen.quiesced().clone(), watched.load);
        let memory_bytes = frozen.memory().map(|(state, _)| state.size_bytes());
        let stored = stored.map_err(|error| freezer.explain(error, watched.given_up));
        noted.phase(Phase::ClearingUp);
        freezer.finish(frozen, &stored);
        drop(watched.scratch);
        noted.end();
        let (_, compared) = stored?;
        Ok(MachineReading {
            memory_bytes,
            ..self.reading((Method::Filter, reason), consistency, held_up, compared)
        })
    }

    /// What stands between us and QEMU may have been restarted while its disks were read.
    fn wake(&self) {
        if let Err(error) = wake_patiently(self.request.machine.monitor(), self.job.clock) {
            self.job.progress.note(&format!("{}: {error}", self.request.name));
        }
    }

    fn reading(
        self,
        (method, method_reason): (Method, String),
        consistency: &str,
        (pause, quiesced, load): (Option<Pause>, Quiesced, Load),
        compared: Vec<(String, Compared)>,
    ) -> MachineReading {
        MachineReading {
            method,
            method_reason,
            consistency: consistency.to_owned(),
            quiesced,
            memory_bytes: None,
            load,
            pause: pause.filter(|_| self.description.summary.state == MachineState::Running),
            left_out: self.left_out,
            compared,
        }
    }

    /// Has disks, and what belongs to the instant besides, kept.
    fn store(
        &self,
        disks: &[Ready<'_>],
        rest: Rest<'_>,
        time: Timestamp,
        (method, consistency): (Method, &str),
        pace: &Pace<'_>,
    ) -> Result<Stored> {
        let start = self.job.clock.now();
        let compared = disks.iter().map(|disk| (disk.target.clone(), disk.changes.compared()));
        let compared: Vec<(String, Compared)> = compared.collect();
        self.job
            .progress
            .total(disks.iter().map(|disk| disk.changes.bytes_to_read(disk.device)).sum());
        let stages = Stages::new(self.job.clock, self.job.progress);
        let meters: Vec<Meter> = disks.iter().map(|_| Meter::new()).collect();
        let watched = disks.iter().zip(&meters);
        let devices: Vec<_> = watched
            .map(|(disk, meter)| self.watched(disk, meter, &stages, pace))
            .collect();
        let memory = rest.memory.map(|(_, pages)| &**pages);
        let streams = rest.streams(&self.configuration);
        let mut readers: Vec<&[u8]> = streams.iter().map(|stream| &stream.bytes[..]).collect();
        let mut sources: Vec<Source<'_>> = disks
            .iter()
            .zip(&devices)
            .map(|(disk, device)| disk.source(device))
            .collect();
        sources.extend(sources_of(memory.as_ref(), &streams, &mut readers));
        let _bulk = BulkPriority::begin();
        self.keeper.keep(Instant {
            time,
            notes: self.notes(method, consistency),
            sources,
            stages: &stages,
        })?;
        Ok((self.job.clock.now().saturating_sub(start), compared))
    }

    /// A disk as it is read: at the pace that it may be, and measured.
    fn watched<'d>(
        &'d self,
        disk: &'d Ready<'_>,
        meter: &'d Meter,
        stages: &'d Stages<'d>,
        pace: &'d Pace<'d>,
    ) -> PacedDevice<'d, MeteredDevice<'d>> {
        let inner = MeteredDevice {
            inner: disk.device,
            meter,
            progress: self.job.progress,
            stages,
        };
        // Outermost: time spent waiting is none that the source took.
        PacedDevice { inner, pace }
    }
}
