//! The scheduler: runs the jobs of a `holdfast.toml` when they are due, each as a separate process.
//!
//! [`holdfast_policy::schedule`], which has no clock, decides which jobs are due; this crate has the clock, the
//! processes and the files. A job is a command line of the program itself, in its own process group, so that a job that
//! crashes, hangs or is killed does not affect others. [`JobRecords`] stores the state of each job, [`JobJournal`] its
//! history; both survive `kill -9` and a full disk. The locks in `locks.rs` prevent two daemons, or a daemon and a
//! manual run, from running a job twice.
//!
//! There is one loop, which a [`DaemonEvent`] or the next due time wakes. It sleeps at most [`POLL_INTERVAL_MAX`], to
//! detect that the clock was set or the host was suspended.

mod alerts;
mod deliver;
mod job_records;
mod journal;
mod locks;
mod notifications;
mod outcome;
mod run_report;
mod running;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_policy::config::{Config, Job};
use holdfast_policy::schedule::{Cause, Claims, Due, StartCandidate, select_startable};
use holdfast_policy::{TimeZone, Timestamp};

use holdfast_engine::Result;
use notifications::NotificationState;
use running::Running;

pub use alerts::Notice;
pub use deliver::{Message, deliver};
pub use job_records::{JobRecord, JobRecords};
pub use journal::{JobJournal, JournalEntry, NoticeEntry, RunEntry};
pub use outcome::Outcome;
pub use run_report::{RunReport, RunSnapshot};

/// The longest sleep.
const POLL_INTERVAL_MAX: Duration = Duration::from_secs(30);
/// Interval of checks for a job that another process runs or excludes.
const RECHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Time limit of waiting for pending notifications at the end.
const FINAL_NOTICE_WAIT: Duration = Duration::from_secs(10);

/// The jobs to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunMode {
    /// All jobs whenever they are due, until the scheduler is stopped.
    Forever,
    /// All jobs that are due now, once.
    Due,
    /// These jobs now, once, due or not.
    Jobs(Vec<String>),
}

/// Options of the scheduler.
#[derive(Debug)]
pub struct DaemonRequest {
    /// The configuration.
    pub config: Config,
    /// The jobs to run.
    pub mode: RunMode,
    /// The state folder.
    pub state: PathBuf,
    /// The program that runs the jobs.
    pub program: PathBuf,
    /// The host's name.
    pub host: String,
    /// The time zone of calendars that name none.
    pub zone: TimeZone,
    /// Environment variables that jobs do not inherit.
    pub withheld: Vec<String>,
    /// The interval of watchdog messages.
    pub watchdog_interval: Option<Duration>,
}

/// Writes a log message, from any thread.
pub type LogSink = Arc<dyn Fn(Severity, &str) + Send + Sync>;

/// The external effects of the scheduler.
pub struct DaemonEnvironment<'a> {
    /// The time of day.
    pub now: &'a dyn Fn() -> Timestamp,
    /// The monotonic clock.
    pub clock: Arc<dyn Clock>,
    /// Writes a log message.
    pub log: LogSink,
    /// Summarizes the results of a run in words.
    pub summary: &'a dyn Fn(&RunEntry) -> String,
    /// Reads the configuration again; `None` if it is invalid, which was already logged.
    pub reload: &'a dyn Fn() -> Option<Config>,
    /// Reports the state to the service manager.
    pub report_state: &'a dyn Fn(ServiceState),
    /// Sends events.
    pub sender: Sender<DaemonEvent>,
    /// Receives events.
    pub events: Receiver<DaemonEvent>,
}

/// An event.
#[derive(Debug)]
pub enum DaemonEvent {
    /// Reload the configuration.
    Reload,
    /// Log the status.
    Status,
    /// Stop.
    Stop,
    /// The program of a job has ended.
    Ended(String),
    /// A notification was delivered, or its delivery failed.
    NoticeDone(NoticeEntry),
}

/// The severity of a log message, as in syslog.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// An error.
    Error,
    /// A warning.
    Warning,
    /// Information.
    Info,
}

/// The state of the service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServiceState {
    /// The service is ready.
    Ready,
    /// The service is alive, with a status text.
    Alive(String),
    /// The service reloads its configuration.
    Reloading,
    /// The service is about to stop.
    Stopping,
}

/// The result of a scheduler.
#[derive(Debug, Default)]
pub struct DaemonReport {
    /// Completed runs; empty for a daemon.
    pub runs: Vec<RunEntry>,
    /// Jobs that were not started because they, or jobs that exclude them, are already running.
    pub busy: Vec<String>,
}

/// Runs the scheduler.
///
/// # Errors
/// Another daemon uses the same folder, or the folder cannot be created. Errors of jobs are in the journal.
pub fn daemon(request: DaemonRequest, environment: DaemonEnvironment<'_>) -> Result<DaemonReport> {
    locks::make_folders(&request.state)?;
    let _place = match request.mode {
        RunMode::Forever => Some(locks::lock_daemon(&request.state)?),
        RunMode::Due | RunMode::Jobs(_) => None,
    };
    let requested = match &request.mode {
        RunMode::Jobs(jobs) => jobs.clone(),
        RunMode::Forever | RunMode::Due => Vec::new(),
    };
    let mut daemon = Daemon {
        records: JobRecords::new(&request.state),
        journal: JobJournal::new(&request.state),
        running: BTreeMap::new(),
        deferred: BTreeMap::new(),
        notifications: NotificationState::default(),
        stopping: None,
        requested,
        report: DaemonReport::default(),
        request,
        environment,
    };
    (daemon.environment.report_state)(ServiceState::Ready);
    while !daemon.run_once() {}
    (daemon.environment.report_state)(ServiceState::Stopping);
    daemon.finish_notices();
    Ok(daemon.report)
}

struct Daemon<'a> {
    request: DaemonRequest,
    environment: DaemonEnvironment<'a>,
    records: JobRecords,
    journal: JobJournal,
    /// Running jobs by name.
    running: BTreeMap<String, Running>,
    /// Jobs that another process excludes, and the time of the next check.
    deferred: BTreeMap<String, Duration>,
    notifications: NotificationState,
    /// The time at which stopping began.
    stopping: Option<Duration>,
    /// Requested jobs that were not started yet.
    requested: Vec<String>,
    report: DaemonReport,
}

struct DueJob {
    job: Job,
    since: Timestamp,
}

impl Daemon<'_> {
    /// Handles all due work, and sleeps until the next event; returns whether the scheduler has finished.
    fn run_once(&mut self) -> bool {
        let now = (self.environment.now)();
        let mut sleep = self
            .request
            .watchdog_interval
            .unwrap_or(POLL_INTERVAL_MAX)
            .min(POLL_INTERVAL_MAX);
        if self.stopping.is_none() {
            let (due, next) = match self.request.mode {
                RunMode::Jobs(_) => (self.requested_jobs(now), None),
                RunMode::Forever | RunMode::Due => self.due_jobs(now),
            };
            let begun = self.begin(&due, now);
            // A program that could not be started has already ended: handle that at once.
            if begun > 0 {
                sleep = sleep.min(Duration::from_millis(100));
            }
            let until_next = next.and_then(|next| Duration::try_from(next.duration_since(now)).ok());
            sleep = sleep.min(until_next.unwrap_or(sleep));
        }
        self.write_pending();
        let is_over = self.running.is_empty() && self.requested.is_empty();
        if is_over && (self.stopping.is_some() || self.request.mode != RunMode::Forever) {
            return true;
        }
        self.enforce_ends();
        (self.environment.report_state)(ServiceState::Alive(self.status()));
        let clock = self.environment.clock.now();
        let ends = self.running.values().filter_map(Running::next_end);
        let asked_again = self.deferred.values().copied();
        let wake = ends.chain(asked_again).min();
        sleep = sleep.min(wake.map_or(sleep, |wake| wake.saturating_sub(clock)));
        match self
            .environment
            .events
            .recv_timeout(sleep.max(Duration::from_millis(5)))
        {
            Ok(event) => self.handle(event),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
        false
    }

    fn handle(&mut self, event: DaemonEvent) {
        match event {
            DaemonEvent::Ended(job) => self.finish(&job),
            DaemonEvent::NoticeDone(entry) => self.record_notice(entry),
            DaemonEvent::Reload => {
                (self.environment.report_state)(ServiceState::Reloading);
                if let Some(config) = (self.environment.reload)() {
                    self.log(Severity::Info, "the configuration was reloaded");
                    self.request.config = config;
                }
                (self.environment.report_state)(ServiceState::Ready);
            }
            DaemonEvent::Status => self.log(Severity::Info, &self.status()),
            DaemonEvent::Stop => {
                let clock = self.environment.clock.now();
                // After a second request, stop without waiting.
                let patience = match self.stopping {
                    None => self.request.config.daemon.stop_within.duration(),
                    Some(_) => Duration::ZERO,
                };
                self.stopping.get_or_insert(clock);
                self.requested.clear();
                self.stop_all(clock + patience);
            }
        }
    }

    /// The due jobs, and the time at which the next one is due.
    fn due_jobs(&mut self, now: Timestamp) -> (Vec<DueJob>, Option<Timestamp>) {
        let (mut due, mut next) = (Vec::new(), None::<Timestamp>);
        let jobs: Vec<Job> = self
            .request
            .config
            .jobs
            .iter()
            .filter(|job| job.is_enabled)
            .cloned()
            .collect();
        for job in jobs {
            if self.running.contains_key(&job.name) {
                continue;
            }
            let Some(record) = self.settled_record(&job, now) else {
                continue;
            };
            match record
                .state
                .due(&job.timing(&self.request.host), &self.request.zone, now)
            {
                Due::Since(since) => due.push(DueJob { job, since }),
                Due::At(at) => next = Some(next.map_or(at, |next| next.min(at))),
                Due::Running | Due::Never => {}
            }
        }
        (due, next)
    }

    fn requested_jobs(&self, now: Timestamp) -> Vec<DueJob> {
        let jobs = self.requested.iter().filter_map(|name| self.request.config.job(name));
        jobs.map(|job| DueJob {
            job: job.clone(),
            since: now,
        })
        .collect()
    }

    /// Starts the jobs that may start; returns their number.
    fn begin(&mut self, due: &[DueJob], now: Timestamp) -> usize {
        let clock = self.environment.clock.now();
        self.deferred.retain(|_, until| *until > clock);
        let due: Vec<&DueJob> = due
            .iter()
            .filter(|due| !self.deferred.contains_key(&due.job.name))
            .collect();
        let candidates: Vec<StartCandidate<'_>> = due
            .iter()
            .map(|due| StartCandidate {
                since: due.since,
                claims: &due.job.claims,
            })
            .collect();
        let running: Vec<&Claims> = self.running.values().map(|running| &running.job.claims).collect();
        let startable = select_startable(&candidates, &running, self.request.config.daemon.jobs_at_once);
        let cause = match self.request.mode {
            RunMode::Jobs(_) => Cause::Person,
            RunMode::Forever | RunMode::Due => Cause::Due,
        };
        for index in &startable {
            self.start(&due[*index].job, cause, now);
        }
        startable.len()
    }

    fn status(&self) -> String {
        let names: Vec<&str> = self.running.keys().map(String::as_str).collect();
        if names.is_empty() {
            "waiting for the next job".to_owned()
        } else {
            format!("running: {}", names.join(", "))
        }
    }

    fn log(&self, severity: Severity, text: &str) {
        (self.environment.log)(severity, text);
    }

    /// What started a run, for the journal.
    fn by(&self) -> &'static str {
        match self.request.mode {
            RunMode::Forever => "daemon",
            RunMode::Due | RunMode::Jobs(_) => "run",
        }
    }
}
