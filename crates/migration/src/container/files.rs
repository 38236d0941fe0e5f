//! The copy of one file of a container.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use holdfast_block::BlockDevice;
use holdfast_engine::Job;
use holdfast_live_copy::{
    ConvergenceOptions, CopyDirector, CopyObserver, CopyPurpose, CopyWarning, DiskId, ExistingTarget, Forecast,
    FreezeTrigger, InterruptedCopy, LiveCopyReport, LiveCopyRequest, ReceiveRequest, RefusalKind, Seed, StillSource,
    ThrottlePolicy, Unconverged, copy_live, session_of,
};

use super::far::ContainerDigest;
use super::move_tools::ContainerMoveTools;
use crate::error::{Error, Result};
use crate::move_progress::DiskProgress;

/// Nothing waits for a file that does not change.
const FROZEN_MAX: Duration = Duration::from_secs(3600);
/// Attempts to seal a file. Only a lost connection ends one.
const ATTEMPT_COUNT_MAX: u32 = 1000;

/// A file to copy, which does not change meanwhile.
pub(super) struct FileCopy<'a> {
    pub(super) device: &'a dyn BlockDevice,
    /// Relative to the folder of the container.
    pub(super) name: &'a str,
    /// Of the container.
    pub(super) id: &'a str,
    /// An absolute path there.
    pub(super) target: PathBuf,
    /// A file there with a similar content.
    pub(super) seed: Option<PathBuf>,
    /// When the copy is ended, on the clock of the tools.
    pub(super) deadline: Option<Duration>,
}

impl FileCopy<'_> {
    /// Copies the file, or continues a copy. Returns the number of bytes that were sent.
    ///
    /// # Errors
    /// It cannot be read, sent or stored, or the deadline has passed.
    pub(super) fn run(&self, tools: &ContainerMoveTools<'_>, job: Job<'_>) -> Result<u64> {
        let copied = match self.copy(InterruptedCopy::Continue, tools, job) {
            // The file has changed since an earlier attempt.
            Err(holdfast_live_copy::Error::Refused {
                kind: RefusalKind::OtherCopy,
                ..
            }) => self.copy(InterruptedCopy::Delete, tools, job),
            copied => copied,
        };
        match copied {
            Ok(report) => Ok(report.sent_bytes),
            Err(source) => Err(Error::Disk {
                disk: self.name.to_owned(),
                source: Box::new(source),
            }),
        }
    }

    fn copy(
        &self,
        interrupted: InterruptedCopy,
        tools: &ContainerMoveTools<'_>,
        job: Job<'_>,
    ) -> holdfast_live_copy::Result<LiveCopyReport> {
        let receive = ReceiveRequest {
            target: self.target.clone(),
            size_bytes: self.device.size_bytes(),
            expected_bytes: 0,
            existing: ExistingTarget::Replace,
            interrupted,
            format: None,
            seed: self.seed.as_ref().map(|path| Seed {
                path: path.clone(),
                format: Some("raw".to_owned()),
            }),
        };
        let layout = receive.layout().map_err(|error| holdfast_live_copy::Error::Source {
            reason: error.to_string(),
        })?;
        let place = tools.connector.place();
        let target = self.target.as_os_str().as_encoded_bytes();
        let progress = DiskProgress::new(job.progress, receive.size_bytes);
        let director = CopyDirector::default();
        let request = LiveCopyRequest {
            source: &StillSource::new(self.device),
            layout,
            connector: Arc::clone(&tools.connector),
            receive,
            session: session_of(&[self.id.as_bytes(), self.name.as_bytes(), place.as_bytes(), target]),
            disk: DiskId([0; 16]),
            convergence: ConvergenceOptions {
                frozen_max: FROZEN_MAX,
                other_frozen: Duration::ZERO,
                throttle: ThrottlePolicy::Never,
                unconverged: Unconverged::GiveUp,
            },
            purpose: CopyPurpose::Duplicate,
            trigger: FreezeTrigger::WhenReady,
            director: Some(&director),
            attempt_count_max: ATTEMPT_COUNT_MAX,
            retry_time: tools.retry_time,
            compression: tools.compression,
            rate: Arc::clone(&tools.rate),
            clock: Arc::clone(&tools.clock),
            randomness: tools.randomness,
            program: tools.program.clone(),
            observer: &FileObserver { name: self.name, tools },
        };
        let job = Job {
            progress: &progress,
            ..job
        };
        std::thread::scope(|scope| {
            let (ended, end) = channel::<()>();
            if let Some(deadline) = self.deadline {
                let patience = deadline.saturating_sub(tools.clock.now());
                let director = &director;
                scope.spawn(move || {
                    if end.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
                        director.cancel();
                    }
                });
            }
            let copied = copy_live(&request, job);
            drop(ended);
            copied
        })
    }

    /// Whether the file there, which an earlier attempt has received, has the same content.
    ///
    /// # Errors
    /// The file here cannot be read.
    pub(super) fn is_there(&self, tools: &ContainerMoveTools<'_>, folder: &Path) -> Result<bool> {
        std::thread::scope(|scope| {
            let there = scope.spawn(|| tools.far.digest(folder, self.name));
            let here = ContainerDigest::of(self.device);
            let there = there.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let here = here.map_err(holdfast_engine::Error::from)?;
            Ok(there.is_ok_and(|there| there == here))
        })
    }
}

struct FileObserver<'a> {
    name: &'a str,
    tools: &'a ContainerMoveTools<'a>,
}

impl CopyObserver for FileObserver<'_> {
    fn round(&self, _forecast: &Forecast) {}

    fn warning(&self, warning: CopyWarning) {
        self.tools.observer.copy_warning(self.name, warning);
    }
}
