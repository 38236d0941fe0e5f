//! Reads a machine that has a QEMU from its images: from clones, from the bases of overlays, or while it is paused.
//!
//! None of these methods has bitmaps: everything is read, and unchanged data is found by its content.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_host::provider::clone_file;
use holdfast_host::qemu::{Pause, RunId};
use holdfast_host::qmp::{Monitor, QmpCommand, query_with_retries};
use holdfast_host::{DiskSource, MachineDisk, Overlays};
use jiff::Timestamp;

use super::changes::{Changes, ReadAll};
use super::disk_format::format_of;
use super::frozen::{FrozenMachine, GuestFreezer};
use super::method::{Method, overlay_of};
use super::supervisor::{CopySpace, Load, Supervisor, SupervisorReport};
use super::{HeldMachine, MachineReading, PointOfDisks, QemuCapture, ReadyDisk, StoredDisks, notes_of};
use crate::files::atomic_file::{Existing, NewFile};
use crate::image::source::OpenSource;
use crate::job::error::ScratchOverrun;
use crate::job::rate_limit::RateLimit;
use crate::job::{Error, Interrupt, Job, Result};
use crate::machine::noted_run::NotedRun;
use crate::machine::overlay_commit::{OverlayCommit, SlowCommit};
use crate::machine::quiesce::{AgentAccess, Quiesced};
use crate::machine::run_journal::Phase;
use crate::machine::state::streams::FirmwareState;
use crate::machine::watchdog::Guard;
use crate::restore::machine::{chain_of, is_same};

/// The maximum pause of a machine that is read while it is paused; the watchdog ends the pause earlier if this process
/// dies.
const READ_DEADLINE: Duration = Duration::from_secs(24 * 3600);

/// What holds the content of the images at the point in time.
enum ImageHold<'a> {
    /// Clones that share their blocks; each has a name only until it is open.
    Clones(Vec<NewFile>),
    /// Overlays, which receive the machine's writes from then on.
    Overlays(&'a dyn Overlays, Vec<PathBuf>),
    /// Nothing: the images are read while the machine is paused.
    Nothing,
}

/// A machine whose images were cloned, put below overlays, or read while it was paused.
pub(crate) struct HeldByImages<'h> {
    method: Method,
    reason: String,
    cut: ImageHold<'h>,
    note: NotedRun<'h>,
    guard: Guard,
    quiesced: Quiesced,
    pause: Pause,
    pace: RateLimit<'h>,
    /// QEMU's names of the devices that are watched.
    devices: Vec<String>,
    /// The point in time of a machine that continues to run.
    point: Option<(Timestamp, Result<FirmwareState>)>,
    /// The result for a machine that was paused until everything was read.
    stored: Option<Result<StoredDisks>>,
}

impl QemuCapture<'_> {
    /// The image files of the disks.
    pub(super) fn images(&self) -> Result<Vec<&Path>> {
        fn image(disk: &MachineDisk) -> std::result::Result<&Path, String> {
            match &disk.source {
                DiskSource::File(path) => Ok(path),
                DiskSource::Device(path) => Err(path.display().to_string()),
                DiskSource::Other(place) => Err(place.clone()),
                DiskSource::Empty => Err("nothing".to_owned()),
            }
        }
        let named = |disk| {
            image(disk).map_err(|place| Error::NoImageFile {
                disk: disk.target.clone(),
                place,
            })
        };
        self.taken.iter().map(named).collect()
    }

    /// Opens the images. One that is read while the machine is paused may be a device.
    pub(super) fn open_images(&self, clones: &[NewFile]) -> Result<Vec<OpenSource>> {
        let open = |(index, disk): (usize, &MachineDisk)| match (&disk.source, clones.get(index)) {
            (_, Some(clone)) => self.open_image(disk, clone.partial()),
            (DiskSource::File(path) | DiskSource::Device(path), None) => self.open_image(disk, path),
            (DiskSource::Other(place), None) => Err(Error::Unreachable {
                disk: disk.target.clone(),
                place: place.clone(),
            }),
            (DiskSource::Empty, None) => unreachable!("an empty drive is never taken"),
        };
        self.taken.iter().enumerate().map(open).collect()
    }

    /// Opens the images of a machine that is shut off: they do not change.
    pub(super) fn open_at_rest(&self) -> Result<Vec<OpenSource>> {
        let opened = self.open_images(&[])?;
        let progress = self.job.progress;
        let checked = self.request.machine.rights().exercise(|| {
            opened
                .iter()
                .try_for_each(|source| source.warn_of_inconsistencies(progress))
        });
        checked.map_err(|source| Error::File {
            action: "check",
            path: opened
                .first()
                .and_then(|source| source.paths().next())
                .unwrap_or(Path::new(""))
                .to_owned(),
            source,
        })??;
        Ok(opened)
    }

    fn open_image(&self, disk: &MachineDisk, path: &Path) -> Result<OpenSource> {
        let format = Some(format_of(disk, path)?);
        let allowed = &self.request.capture.allowed;
        let open = || OpenSource::open(path, format, allowed);
        let opened = self.request.machine.rights().exercise(open);
        opened.map_err(|source| Error::File {
            action: "open",
            path: path.to_owned(),
            source,
        })?
    }

    pub(super) fn freeze_images(&self, method: Method, reason: String) -> Result<HeldMachine<'_>> {
        let is_still = method == Method::Pause;
        let mut freezer = self.freezer();
        if is_still {
            freezer.pause_deadline = READ_DEADLINE;
        }
        let pace = self.pace();
        let devices = freezer.devices_of(&self.taken)?;
        let mut cut = self.prepare_images(method)?;
        let (mut point, mut stored) = (None, None);
        let frozen = self.freeze_with(&freezer, method, &mut || {
            let time = (self.request.capture.now)();
            let made = self.make(&mut cut);
            let beside = made.and_then(|()| self.read_beside());
            if is_still {
                stored = Some(beside.and_then(|beside| self.store_while_paused(beside, time, &pace)));
            } else {
                point = Some((time, beside));
            }
        });
        let (frozen, note) = match frozen {
            Ok(frozen) => frozen,
            Err(error) => {
                self.wake();
                self.undo(cut, Guard::start(self.request.watchdog.as_deref()).ok());
                // An error of reading is more useful than this one.
                return Err(stored.and_then(Result::err).unwrap_or(error));
            }
        };
        let (guard, quiesced, pause) = freezer.release_frozen(frozen);
        Ok(HeldMachine::Images(Box::new(HeldByImages {
            method,
            reason,
            cut,
            note,
            guard,
            quiesced,
            pause,
            pace,
            devices,
            point,
            stored,
        })))
    }

    fn store_while_paused(&self, beside: FirmwareState, time: Timestamp, pace: &RateLimit<'_>) -> Result<StoredDisks> {
        let opened = self.open_images(&[])?;
        let stored = self.store_images(&opened, beside, time, Method::Pause, "crash", pace)?;
        self.check_still_paused()?;
        Ok(stored)
    }

    pub(super) fn read_images<'h>(&'h self, held: &mut HeldByImages<'h>) -> Result<MachineReading> {
        let consistency = held.quiesced.consistency();
        let (stored, mut watched) = match held.stored.take() {
            Some(stored) => (stored, SupervisorReport::default()),
            None => self.read_after_freeze(held),
        };
        let overrun = watched.overrun.take();
        let stored = stored.map_err(|error| self.explain_overrun(error, overrun))?;
        Ok(MachineReading {
            pause: self.pause_of_running(held.pause),
            quiesced: held.quiesced.clone(),
            load: Load {
                waited: held.pace.waited(stored.duration),
                ..watched.load
            },
            compared: stored.compared,
            ..self.reading(held.method, &held.reason, consistency)
        })
    }

    fn read_after_freeze<'h>(&'h self, held: &mut HeldByImages<'h>) -> (Result<StoredDisks>, SupervisorReport) {
        let HeldByImages {
            cut,
            pace,
            devices,
            point,
            method,
            quiesced,
            ..
        } = held;
        let pace = &*pace;
        let supervisor = self.supervisor(cut, std::mem::take(devices), pace);
        supervisor.watch(|| {
            let (time, beside) = point.take().expect("the machine was frozen");
            let opened = self.open_cut(cut)?;
            self.store_images(&opened, beside?, time, *method, quiesced.consistency(), pace)
        })
    }

    pub(super) fn release_images(&self, held: HeldByImages<'_>) {
        let HeldByImages {
            cut, mut note, guard, ..
        } = held;
        self.wake();
        if matches!(cut, ImageHold::Overlays(..)) {
            note.phase(Phase::Committing);
        }
        if self.undo(cut, Some(guard)) {
            note.end();
        }
    }

    /// Opens what is read after the point in time.
    fn open_cut(&self, cut: &mut ImageHold<'_>) -> Result<Vec<OpenSource>> {
        match cut {
            // The clones lose their names; they exist as long as they are open.
            ImageHold::Clones(clones) => self.open_images(&std::mem::take(clones)),
            _ => self.open_images(&[]),
        }
    }

    /// Fails if the machine was resumed while it was read: then the snapshot is of no single point in time, and is
    /// removed.
    fn check_still_paused(&self) -> Result<()> {
        let monitor = self.request.machine.monitor();
        let command = QmpCommand::new("query-status", serde_json::Value::Null);
        let status = query_with_retries(monitor, self.job.clock, &|monitor: &dyn Monitor| {
            monitor.execute(&command)
        });
        if status.is_ok_and(|status| status["running"] != true) {
            return Ok(());
        }
        let reason = "it was resumed while it was read".to_owned();
        self.sink.withdraw(&reason)?;
        Err(Error::from(holdfast_host::Error::Refused {
            action: "read",
            machine: self.request.capture.name.to_string(),
            reason,
        }))
    }

    /// Freezes the machine; `within` is called at the point in time.
    fn freeze_with<'s>(
        &'s self,
        freezer: &GuestFreezer<'s>,
        method: Method,
        within: &mut dyn FnMut(),
    ) -> Result<(FrozenMachine<'s>, NotedRun<'s>)> {
        let state = self.description.summary.state;
        let mut agent = AgentAccess::of(&self.description);
        if method == Method::Pause {
            // Frozen file systems may thaw by themselves, and the guest agent of a paused machine cannot thaw them.
            agent = agent.denied();
        }
        let noted = NotedRun::begin(self.request.machine, &self.request.work(), &self.description, self.job);
        noted.freezing(|| freezer.freeze(&[], state, agent, within))
    }

    /// Explains a read error that was caused by giving up the copy.
    fn explain_overrun(&self, error: Error, overrun: Option<ScratchOverrun>) -> Error {
        let Some(why) = overrun else { return error };
        let images = self.images().unwrap_or_default();
        let folder = images.first().and_then(|image| image.parent());
        Error::ScratchLimit {
            machine: self.request.capture.name.to_string(),
            scratch: folder.map(Path::to_owned).unwrap_or_default(),
            why,
        }
    }

    /// Prepares the images before the point in time.
    fn prepare_images(&self, method: Method) -> Result<ImageHold<'_>> {
        let run = self.request.capture.run;
        match (method, self.request.overlays) {
            (Method::Reflink, _) => {
                let clone = |image| NewFile::begin_as(image, Existing::Replace, run);
                Ok(ImageHold::Clones(
                    self.images()?.into_iter().map(clone).collect::<Result<_>>()?,
                ))
            }
            (Method::Overlay, Some(overlays)) => {
                let files = self.images()?.into_iter().map(|image| overlay_of(image, run));
                Ok(ImageHold::Overlays(overlays, files.collect()))
            }
            _ => Ok(ImageHold::Nothing),
        }
    }

    /// Creates the clones or overlays at the point in time.
    fn make(&self, cut: &mut ImageHold<'_>) -> Result<()> {
        // A snapshot may have been taken since the machine was described: then other images are written.
        let now = self.request.machine.describe()?;
        let is_there = |disk: &&MachineDisk| {
            let now = now.disks.iter().find(|now| now.target == disk.target);
            now.is_some_and(|now| now.source == disk.source)
        };
        if let Some(moved) = self.taken.iter().find(|disk| !is_there(disk)) {
            return Err(Error::from(holdfast_host::Error::Busy {
                machine: self.request.capture.name.to_string(),
                holder: format!(
                    "another program that has attached another image as disk {} just now",
                    moved.target
                ),
            }));
        }
        match cut {
            ImageHold::Nothing => Ok(()),
            ImageHold::Clones(clones) => {
                let images = self.images()?;
                images.iter().zip(clones).try_for_each(|(image, clone)| {
                    clone_file(image, clone.partial()).map_err(|source| Error::File {
                        action: "clone",
                        path: (*image).to_owned(),
                        source,
                    })
                })
            }
            ImageHold::Overlays(overlays, files) => {
                let disks = self.taken.iter().zip(&*files);
                let disks: Vec<_> = disks.map(|(disk, file)| (disk.target.clone(), file.clone())).collect();
                let taken: BTreeSet<&str> = self.taken.iter().map(|disk| &disk.target[..]).collect();
                let others = self.description.disks.iter().map(|disk| disk.target.clone());
                let others: Vec<String> = others.filter(|target| !taken.contains(&target[..])).collect();
                Ok(overlays.begin_overlays(&self.description.summary.uuid, &disks, &others)?)
            }
        }
    }

    /// Stores the whole content of the opened images.
    fn store_images(
        &self,
        opened: &[OpenSource],
        beside: FirmwareState,
        time: Timestamp,
        method: Method,
        consistency: &str,
        pace: &RateLimit<'_>,
    ) -> Result<StoredDisks> {
        let disks = self.taken.iter().zip(opened).map(|(disk, source)| ReadyDisk {
            target: disk.target.clone(),
            device: &*source.device,
            changes: Changes::all(ReadAll::NoBitmapNow(method)),
            notes: notes_of(disk),
        });
        let point = PointOfDisks {
            disks: &disks.collect::<Vec<_>>(),
            rest: beside.rest(None, self.job.progress),
            time,
            method,
            consistency,
        };
        self.store(point, pace)
    }

    fn supervisor<'w>(&'w self, cut: &ImageHold<'_>, devices: Vec<String>, pace: &'w RateLimit<'w>) -> Supervisor<'w> {
        let open = |path: &PathBuf| File::open(path).ok();
        let (scratch, kept) = match cut {
            ImageHold::Overlays(_, files) => (files.iter().filter_map(open).collect(), CopySpace::InScratch),
            ImageHold::Clones(clones) => {
                let files = clones.iter().filter_map(|clone| File::open(clone.partial()).ok());
                (files.collect(), CopySpace::shared())
            }
            ImageHold::Nothing => (Vec::new(), CopySpace::InScratch),
        };
        Supervisor {
            machine: self.request.machine,
            run: RunId(self.request.capture.run),
            devices,
            scratch,
            kept,
            readers: Vec::new(),
            limits: self.request.limits,
            pace,
            job: self.job,
        }
    }

    /// Removes the clones or overlays; if something is left, warns and returns false.
    fn undo(&self, cut: ImageHold<'_>, guard: Option<Guard>) -> bool {
        let ImageHold::Overlays(overlays, files) = cut else {
            guard.into_iter().for_each(Guard::done);
            return true;
        };
        // An interrupted backup does not stop this: the machine must not be left on a forgotten overlay.
        let interrupt = Interrupt::new();
        let job = Job {
            interrupt: &interrupt,
            ..self.job
        };
        let mut guard = guard;
        let mut is_clean = true;
        for (disk, overlay) in self.taken.iter().zip(&files) {
            match self.bring_down(overlays, disk, overlay, guard.as_mut(), job) {
                Ok(paused) if paused > Duration::ZERO => job.progress.warning(&format!(
                    "{} wrote faster than the overlay of disk {} could be committed, and was paused for {} ms to commit the rest",
                    self.request.capture.name,
                    disk.target,
                    paused.as_millis()
                )),
                Ok(_) => {}
                Err(reason) => {
                    is_clean = false;
                    job.progress.warning(&format!(
                        "disk {} of {} stays on the overlay {}: {reason}; holdfast doctor {} says what is to be done",
                        disk.target,
                        self.request.capture.name,
                        overlay.display(),
                        self.description.summary.name
                    ));
                }
            }
        }
        guard.into_iter().for_each(Guard::done);
        is_clean
    }

    /// Commits an overlay of the run, deletes it, and returns how long the machine was paused for that.
    fn bring_down(
        &self,
        overlays: &dyn Overlays,
        disk: &MachineDisk,
        overlay: &Path,
        guard: Option<&mut Guard>,
        job: Job<'_>,
    ) -> std::result::Result<Duration, String> {
        let DiskSource::File(base) = &disk.source else {
            return Ok(Duration::ZERO);
        };
        let now = self.request.machine.describe().map_err(|error| error.to_string())?;
        let source = now.disks.into_iter().find(|now| now.target == disk.target);
        match source.map(|disk| disk.source) {
            Some(DiskSource::File(path)) if path == overlay => {}
            // The overlay was never used.
            Some(DiskSource::File(path)) if path == *base => return Ok(Duration::ZERO),
            Some(DiskSource::File(path)) => {
                return Err(format!(
                    "the machine was put onto {}, above it: remove that layer first with the program that added it",
                    path.display()
                ));
            }
            _ => return Err("the machine has no such disk any more, or has it elsewhere".to_owned()),
        }
        // Nothing is committed into an image of another chain.
        let chain = chain_of(overlay, Some("qcow2"));
        if !chain.get(1).is_some_and(|below| is_same(below, base)) {
            return Err(format!("it is not based on {} any more", base.display()));
        }
        let commit = OverlayCommit {
            overlays,
            machine: &self.description.summary.uuid,
            disk: &disk.target,
            rate: self.request.limits.bytes_per_second,
            job,
        };
        let persistence = match guard {
            Some(guard) => SlowCommit::Pause(self.request.machine.monitor(), guard),
            None => SlowCommit::GiveUp,
        };
        let paused = commit.to_the_end(base, persistence).or_else(|error| {
            // The reply to the last step may be lost.
            let now = self.request.machine.describe().map_err(|_| error.clone())?;
            let is_on_base = now
                .disks
                .iter()
                .any(|now| now.target == disk.target && now.source == disk.source);
            if is_on_base { Ok(Duration::ZERO) } else { Err(error) }
        })?;
        if let Err(error) = std::fs::remove_file(overlay) {
            let shown = overlay.display();
            job.progress
                .warning(&format!("{shown} is empty by now, and cannot be deleted: {error}"));
        }
        Ok(paused)
    }
}
