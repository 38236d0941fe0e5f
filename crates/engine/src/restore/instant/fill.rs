//! Fills the disks of a running machine.
//!
//! The hypervisor is asked again and again where each disk is. That is not written down, so it cannot be wrong after a
//! crash.

use std::collections::BTreeMap;
use std::fs::File;
use std::num::NonZeroU64;
use std::time::Duration;

use holdfast_host::domain_xml::with_own_disks;
use holdfast_host::{DiskSource, ExecutionState, LiveDisks, MachineDisk};

use super::attempts::{Attempt, Attempts};
use super::rate::FillRate;
use super::{InstantReport, ServerLauncher, pause, server};
use crate::job::error::InstantError;
use crate::job::error::Refusal;
use crate::job::{Error, Job, Result, Unit};
use crate::restore::instant_job::{InstantDisk, InstantJob};

/// The lock file of the process that creates the machine and fills its disks.
pub(super) const LOCK: &str = "filling";
/// How often a server that dies is restarted.
const LAUNCH_COUNT_MAX: u32 = 5;

/// How the disks of a machine are filled.
pub struct FillOptions<'a> {
    /// Starts a server.
    pub launch: &'a ServerLauncher<'a>,
    /// The rate of all copies.
    pub rate: FillRate,
}

pub(super) struct DiskFill<'a> {
    hypervisor: &'a dyn LiveDisks,
    instant: &'a InstantJob,
    options: &'a FillOptions<'a>,
    job: Job<'a>,
    start: Duration,
    /// The rate that was set for the copy of each disk.
    disk_rate: Option<NonZeroU64>,
    /// How often the server was started.
    launch_count: u32,
    unpausing: RepeatedRequest,
    was_started: bool,
    /// The start of each disk's copy.
    copying: BTreeMap<&'a str, RepeatedRequest>,
    /// The end of each disk's copy.
    finishing: BTreeMap<&'a str, RepeatedRequest>,
}

/// A request that a busy hypervisor may refuse once and accept the next time, or that it may report as failed after it
/// was done.
#[derive(Default)]
struct RepeatedRequest {
    attempts: Attempts,
    /// The error of the last attempt, for the user if no attempt succeeds.
    failure: Option<String>,
}

impl RepeatedRequest {
    /// Notes the result of an attempt. Returns whether it succeeded.
    fn note(&mut self, result: holdfast_host::Result<()>) -> bool {
        self.failure = result.err().map(|error| error.to_string());
        self.failure.is_none()
    }

    /// `reason`, and the error of the last attempt if it failed.
    fn explain(&self, reason: &str) -> String {
        match &self.failure {
            Some(failure) => format!("{reason}: {failure}"),
            None => reason.to_owned(),
        }
    }
}

/// The lock of a job: while it is held, no other process works on the job.
pub(super) struct JobLock(#[expect(dead_code, reason = "it is a lock as long as it is open")] File);

/// Locks a job against other processes.
///
/// # Errors
/// [`InstantError::Busy`] if another process has locked it.
pub(super) fn lock(instant: &InstantJob) -> Result<JobLock> {
    let lock = instant.lock(LOCK)?.ok_or_else(|| InstantError::Busy {
        machine: instant.machine.clone(),
    })?;
    Ok(JobLock(lock))
}

/// The progress of a disk.
enum Step {
    Done,
    Copying { done_bytes: u64 },
}

impl<'a> DiskFill<'a> {
    pub(super) fn new(
        hypervisor: &'a dyn LiveDisks,
        instant: &'a InstantJob,
        options: &'a FillOptions<'a>,
        job: Job<'a>,
    ) -> Self {
        Self {
            hypervisor,
            instant,
            options,
            job,
            start: job.clock.now(),
            disk_rate: None,
            launch_count: 0,
            unpausing: RepeatedRequest::default(),
            was_started: false,
            copying: BTreeMap::new(),
            finishing: BTreeMap::new(),
        }
    }

    /// Fills all disks, then deletes the files of the instant restore.
    pub(super) fn run(self, _lock: JobLock) -> Result<InstantReport> {
        let (instant, job) = (self.instant, self.job);
        self.fill().inspect_err(|_| instant.warn_of_resume(job))
    }

    /// Makes sure that the machine runs, unless its disks are filled.
    pub(super) fn revive(mut self) -> Result<()> {
        let machine = self.hypervisor.machine(&self.instant.uuid)?;
        let present = machine.describe()?.disks;
        let disks = &self.instant.disks;
        if disks.iter().all(|disk| is_there(&present, disk)) {
            return Ok(());
        }
        self.tend()
    }

    fn fill(mut self) -> Result<InstantReport> {
        let instant = self.instant;
        let size_bytes = instant.disks.iter().map(|disk| disk.size_bytes).sum();
        let phase = format!("filling the disks of {}", instant.machine);
        self.job.progress.phase(&phase, Unit::Bytes);
        self.job.progress.total(size_bytes);
        let mut reported_bytes: u64 = 0;
        loop {
            self.job.interrupt.check()?;
            let (done_bytes, is_done) = self.step()?;
            self.job.progress.advance(done_bytes.saturating_sub(reported_bytes));
            reported_bytes = reported_bytes.max(done_bytes);
            if is_done {
                break;
            }
            pause(self.job.clock);
        }
        // The machine may be paused because a request failed before its disks were available; it continues with that
        // request.
        if self.hypervisor.execution_state(&instant.uuid)? == ExecutionState::StoppedByDisk {
            self.hypervisor.unpause(&instant.uuid)?;
        }
        self.clear()?;
        Ok(InstantReport {
            machine: instant.machine.clone(),
            uuid: instant.uuid.clone(),
            runs_after: None,
            size_bytes,
            fill_duration: self.job.clock.now().saturating_sub(self.start),
        })
    }

    fn stopped(&self, reason: &str) -> Error {
        InstantError::Stopped {
            machine: self.instant.machine.clone(),
            reason: reason.to_owned(),
        }
        .into()
    }

    /// Returns the number of bytes that are in their images, and whether all disks are complete.
    fn step(&mut self) -> Result<(u64, bool)> {
        let machine = self.hypervisor.machine(&self.instant.uuid)?;
        let present = machine.describe()?.disks;
        let instant = self.instant;
        if instant.disks.iter().all(|disk| is_there(&present, disk)) {
            return Ok((instant.disks.iter().map(|disk| disk.size_bytes).sum(), true));
        }
        self.tend()?;
        let rate = self.set_rate(&present);
        let mut bytes = 0;
        for disk in &instant.disks {
            bytes += match self.step_of(&present, disk, rate)? {
                Step::Done => disk.size_bytes,
                Step::Copying { done_bytes } => done_bytes.min(disk.size_bytes),
            };
        }
        Ok((bytes, false))
    }

    /// Sets the current rate for the disks that are being copied.
    fn set_rate(&mut self, present: &[MachineDisk]) -> NonZeroU64 {
        let disks = &self.instant.disks;
        let unfilled: Vec<_> = disks.iter().filter(|disk| !is_there(present, disk)).collect();
        let elapsed = self.job.clock.now().saturating_sub(self.start);
        let rate = self.options.rate.of_each(unfilled.len(), elapsed);
        if self.disk_rate == Some(rate) {
            return rate;
        }
        self.disk_rate = Some(rate);
        for disk in unfilled {
            // A copy that has not started or has just ended has no rate; the next one starts with the right one.
            self.hypervisor.set_copy_rate(&self.instant.uuid, &disk.name, rate).ok();
        }
        rate
    }

    /// Makes sure that the server and the machine run.
    fn tend(&mut self) -> Result<()> {
        let uuid = &self.instant.uuid;
        if !server::lives(self.instant)? {
            if self.launch_count == LAUNCH_COUNT_MAX {
                return Err(self.stopped("its server died repeatedly"));
            }
            self.launch_count += 1;
            self.unpausing = RepeatedRequest::default();
            self.copying.clear();
            (self.options.launch)(self.instant)?;
        }
        match self.hypervisor.execution_state(uuid)? {
            ExecutionState::Running | ExecutionState::Paused => Ok(()),
            ExecutionState::StoppedByDisk => match self.unpausing.attempts.next(self.job.clock.now()) {
                Attempt::Now => {
                    self.unpausing.note(self.hypervisor.unpause(uuid));
                    Ok(())
                }
                Attempt::Later => Ok(()),
                Attempt::Exhausted => Err(self.stopped(&self.unpausing.explain(
                    "it is paused, since its disks cannot be read from the repository, or there is no room for \
                        what it writes",
                ))),
            },
            ExecutionState::ShutOff if self.was_started || !self.copying.is_empty() => {
                Err(self.stopped("it was shut off"))
            }
            ExecutionState::ShutOff => {
                self.was_started = true;
                Ok(self.hypervisor.start(uuid)?)
            }
        }
    }

    fn step_of(&mut self, present: &[MachineDisk], disk: &'a InstantDisk, rate: NonZeroU64) -> Result<Step> {
        let uuid = &self.instant.uuid;
        if is_there(present, disk) {
            return Ok(Step::Done);
        }
        match self.hypervisor.copy(uuid, &disk.name, &disk.place())? {
            Some(copy) if copy.is_complete => return self.finish(disk),
            Some(copy) => {
                // A copy that another process started may be about to fail because its server died. That does not count
                // as a failure of this process.
                return Ok(Step::Copying {
                    done_bytes: copy.done_bytes,
                });
            }
            None => {}
        }
        // A copy that is missing has failed, for example because its server died; the next check restarts the server.
        let copying = self.copying.entry(&disk.name).or_default();
        match copying.attempts.next(self.job.clock.now()) {
            Attempt::Now => {
                copying.note(self.hypervisor.begin_copy(uuid, &disk.name, &disk.place(), rate));
            }
            Attempt::Exhausted
                if self.hypervisor.execution_state(uuid)? != ExecutionState::ShutOff
                    && server::lives(self.instant)? =>
            {
                let reason = format!("the hypervisor could not complete the copy of disk {}", disk.name);
                let reason = copying.explain(&reason);
                return Err(self.stopped(&reason));
            }
            Attempt::Later | Attempt::Exhausted => {}
        }
        Ok(Step::Copying { done_bytes: 0 })
    }

    /// Lets the machine use the complete copy of a disk. The next check sees whether it does.
    fn finish(&mut self, disk: &'a InstantDisk) -> Result<Step> {
        let (uuid, name) = (&self.instant.uuid, &disk.name);
        let finishing = self.finishing.entry(name).or_default();
        match finishing.attempts.next(self.job.clock.now()) {
            Attempt::Now => {
                if finishing.note(self.hypervisor.finish_copy(uuid, name)) {
                    return Ok(Step::Done);
                }
            }
            Attempt::Later => {}
            Attempt::Exhausted => {
                let reason = finishing.explain(&format!("the hypervisor does not finish the copy of disk {name}"));
                return Err(self.stopped(&reason));
            }
        }
        Ok(Step::Copying {
            done_bytes: disk.size_bytes,
        })
    }

    /// Removes everything temporary.
    ///
    /// The job's file is removed last: it must exist as long as the configuration names its folder.
    fn clear(&self) -> Result<()> {
        let instant = self.instant;
        server::stop(instant, self.job.clock);
        let removed = |path: &std::path::Path, removed: std::io::Result<()>| match removed {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(Error::File {
                action: "remove",
                path: path.to_owned(),
                source,
            }),
            _ => Ok(()),
        };
        self.hypervisor.define(&self.definition()?)?;
        // The overlays hold the guest's writes. They are removed only after the hypervisor's configuration, wherever it
        // is stored, durably no longer names them.
        rustix::fs::sync();
        let overlays = instant.overlays();
        removed(&overlays, std::fs::remove_dir_all(&overlays))?;
        removed(&instant.folder, std::fs::remove_dir_all(&instant.folder))
    }

    /// The machine's current configuration without the temporary parts. It may have been changed since the restore
    /// started.
    fn definition(&self) -> Result<String> {
        let instant = self.instant;
        let files = self.hypervisor.machine(&instant.uuid)?.configuration()?;
        // The first configuration is the persistent one.
        let present = files
            .into_iter()
            .next()
            .and_then(|(_, bytes)| String::from_utf8(bytes).ok());
        let present = present.as_ref().unwrap_or(&instant.definition);
        let own = with_own_disks(present, &instant.definition, &instant.socket());
        Ok(own.map_err(|detail| Refusal::Configuration {
            machine: instant.machine.clone(),
            detail,
        })?)
    }
}

/// Whether the machine already uses the image of a disk.
fn is_there(present: &[MachineDisk], disk: &InstantDisk) -> bool {
    let found = present.iter().find(|found| found.target == disk.name);
    found.is_some_and(|found| match &found.source {
        DiskSource::File(path) | DiskSource::Device(path) => *path == disk.target,
        DiskSource::Other(_) | DiskSource::Empty => false,
    })
}

#[cfg(test)]
mod tests {
    use holdfast_host::{DiskKind, DiskSource, MachineDisk};

    use super::{InstantDisk, is_there};

    #[test]
    fn a_disk_is_there_when_the_machine_uses_its_image() {
        let disk = InstantDisk {
            name: "vda".to_owned(),
            target: "/i".into(),
            format: "raw".to_owned(),
            is_block_device: false,
            size_bytes: 1,
        };
        let present = |target: &str, source| MachineDisk {
            target: target.to_owned(),
            kind: DiskKind::Disk,
            source,
            format: None,
            is_read_only: false,
            is_shared: false,
            alias: None,
        };
        assert!(is_there(&[present("vda", DiskSource::File("/i".into()))], &disk));
        for other in [
            present("vdb", DiskSource::File("/i".into())),
            present("vda", DiskSource::File("/j".into())),
            present("vda", DiskSource::Other("network nbd web1/vda".to_owned())),
        ] {
            assert!(!is_there(&[other], &disk));
        }
    }
}
