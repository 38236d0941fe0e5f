//! The time in which a machine runs at the other host, and its disks are pulled from here.

use std::path::PathBuf;
use std::time::Duration;

use holdfast_block::{Clock as _, error_text};
use holdfast_engine::{Interrupted, Job, Progress, Unit};

use super::source::PullSource;
use crate::complete::{ArrivedMachine, complete_arrived};
use crate::error::{Error, Result};
use crate::far::{FarHost, FarRequest, FarState, Pulling, PullingDisk};
use crate::migration_tools::MigrationTools;
use crate::report::PulledDiskReport;

/// Interval of asking how far the disks are.
const ASK_INTERVAL: Duration = Duration::from_millis(500);
/// Interval of looking for an interrupt meanwhile.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// A machine whose disks are pulled.
pub(crate) struct PulledMachine<'a> {
    pub(crate) name: &'a str,
    pub(crate) uuid: &'a str,
    /// With the reactions to I/O errors that it has when its disks are complete.
    pub(crate) configuration: &'a str,
    /// What it had there before, and is deleted then.
    pub(crate) obsolete_files: Vec<PathBuf>,
    /// What could not be done when it arrived, and is done at the end.
    pub(crate) unfinished: Option<ArrivedMachine<'a>>,
}

/// Lets the other host pull the disks, until all are complete there.
///
/// # Errors
/// The job was interrupted, or the other host does not answer. The machine runs there, and needs the disks here.
pub(crate) fn pull(
    machine: &PulledMachine<'_>,
    source: &PullSource,
    tools: &MigrationTools<'_>,
    job: Job<'_>,
) -> Result<Vec<PulledDiskReport>> {
    let mut watch = PullWatch {
        machine,
        tools,
        progress: PullProgress::begin(source, job.progress),
        far: None,
        lost_since: None,
        shown: None,
    };
    while !watch.look(job.progress)? {
        watch.wait(job)?;
    }
    if let Err(error) = watch.ask_far(|far| end(machine, far, tools)) {
        tools.observer.left(&error_text(&error));
    }
    source.forget()?;
    let reports = source.disks().map(|(disk, size_bytes, read_bytes)| PulledDiskReport {
        target: disk.target.clone(),
        path: disk.path.clone(),
        size_bytes,
        read_bytes,
    });
    Ok(reports.collect())
}

/// The steps after the pull.
fn end(machine: &PulledMachine<'_>, far: &FarHost, tools: &MigrationTools<'_>) -> Result<()> {
    if let Some(arrived) = &machine.unfinished {
        complete_arrived(arrived.clone(), far, tools)?;
    }
    let request = FarRequest::EndPull {
        uuid: machine.uuid.to_owned(),
        configuration: machine.configuration.to_owned(),
        obsolete_files: machine.obsolete_files.clone(),
    };
    far.ask(&request).map(drop)
}

struct PullWatch<'a> {
    machine: &'a PulledMachine<'a>,
    tools: &'a MigrationTools<'a>,
    progress: PullProgress,
    /// The other host, if it was started again.
    far: Option<FarHost>,
    /// Since when it does not answer.
    lost_since: Option<Duration>,
    /// What was shown last.
    shown: Option<String>,
}

impl PullWatch<'_> {
    /// Continues the pull. Whether all disks are complete.
    fn look(&mut self, progress: &dyn Progress) -> Result<bool> {
        let request = FarRequest::Pull {
            uuid: self.machine.uuid.to_owned(),
        };
        match self.ask_far(|far| far.pulling(&request)) {
            Ok(pulling) if pulling.state == FarState::Absent => {
                Err(self.not_pulled("it is not defined there any more"))
            }
            Ok(pulling) if pulling.disks.is_empty() => Ok(true),
            Ok(pulling) => {
                self.lost_since = None;
                self.progress.update(&pulling.disks, progress);
                self.show(self.problem_of(&pulling), progress);
                Ok(false)
            }
            Err(error) => {
                self.reach_again(&error, progress)?;
                Ok(false)
            }
        }
    }

    fn ask_far<T>(&self, ask: impl Fn(&FarHost) -> Result<T>) -> Result<T> {
        ask(self.far.as_ref().unwrap_or(self.tools.far))
    }

    fn reach_again(&mut self, error: &Error, progress: &dyn Progress) -> Result<()> {
        let now = self.tools.clock.now();
        let since = *self.lost_since.get_or_insert(now);
        if now.saturating_sub(since) > self.tools.retry_time {
            return Err(self.not_pulled(&error_text(error)));
        }
        let text = format!(
            "{}; {} is paused there when it needs what is missing, and the pull continues when the host answers again",
            error_text(error),
            self.machine.name
        );
        self.show(Some(text), progress);
        // A request is also refused if the hypervisor there has ended, and was started again.
        self.far = (self.tools.reach_far_again)().ok().or(self.far.take());
        Ok(())
    }

    fn problem_of(&self, pulling: &Pulling) -> Option<String> {
        let machine = self.machine.name;
        match pulling.state {
            FarState::ShutOff => Some(format!(
                "{machine} is shut off there: the rest of its disks is pulled when it is started there"
            )),
            FarState::Paused => Some(match &pulling.problem {
                Some(problem) => format!("{machine} is paused there: {problem}"),
                None => format!("{machine} is paused there"),
            }),
            FarState::Running | FarState::Absent => pulling.problem.clone(),
        }
    }

    /// Shows what has changed.
    fn show(&mut self, problem: Option<String>, progress: &dyn Progress) {
        if problem != self.shown
            && let Some(text) = &problem
        {
            progress.note(text);
        }
        self.shown = problem;
    }

    /// # Errors
    /// The job is interrupted.
    fn wait(&self, job: Job<'_>) -> Result<()> {
        let until = self.tools.clock.now() + ASK_INTERVAL;
        while self.tools.clock.now() < until {
            if job.interrupt.is_requested() {
                self.tools.observer.left(&self.not_pulled_text());
                return Err(holdfast_engine::Error::from(Interrupted).into());
            }
            self.tools.clock.sleep(LOOK_INTERVAL);
        }
        Ok(())
    }

    fn not_pulled_text(&self) -> String {
        format!(
            "{} is at {}, and needs its disks here until the same command has completed them there",
            self.machine.name,
            self.tools.far.host()
        )
    }

    fn not_pulled(&self, reason: &str) -> Error {
        Error::NotPulled {
            machine: self.machine.name.to_owned(),
            host: self.tools.far.host().to_owned(),
            reason: reason.to_owned(),
        }
    }
}

/// The progress of all disks together.
struct PullProgress {
    /// Sizes by the targets of the disks.
    sizes: Vec<(String, u64)>,
    counted_bytes: u64,
}

impl PullProgress {
    fn begin(source: &PullSource, progress: &dyn Progress) -> Self {
        let sizes = source
            .disks()
            .map(|(disk, size_bytes, _)| (disk.target.clone(), size_bytes));
        let sizes: Vec<(String, u64)> = sizes.collect();
        progress.phase("pulling the disks", Unit::Bytes);
        progress.total(sizes.iter().map(|(_, size_bytes)| size_bytes).sum());
        Self {
            sizes,
            counted_bytes: 0,
        }
    }

    /// A disk that is not among those that are pulled is complete.
    fn update(&mut self, pulling: &[PullingDisk], progress: &dyn Progress) {
        let done = self.sizes.iter().map(|(target, size_bytes)| {
            let disk = pulling.iter().find(|disk| disk.disk == *target);
            disk.map_or(*size_bytes, |disk| disk.done_bytes.min(*size_bytes))
        });
        let done: u64 = done.sum();
        progress.advance(done.saturating_sub(self.counted_bytes));
        self.counted_bytes = self.counted_bytes.max(done);
    }
}
