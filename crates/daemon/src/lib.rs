//! The scheduler: carries out the jobs of a `holdfast.toml` when they are due, each as a process of its own.
//!
//! What is due is decided by [`holdfast_policy::schedule`], which has no clock; here are the clock, the processes and the files. A job is
//! a command line of the program itself, in a process group of its own, so that one that crashes, hangs or is killed harms no other.
//! [`Ledger`] keeps what is known of each job, [`JobJournal`] what happened; both bear `kill -9` and a disk that is full. The locks in
//! `locks.rs` keep two daemons, and a run by hand beside one, from doing a thing twice.
//!
//! There is one loop, woken by what happens ([`DaemonEvent`]) or by the next time that something is due, at the latest after
//! [`LOOK_AGAIN`]: a clock that somebody sets, and a host that slept, is noticed then.

mod alerts;
mod at_work;
mod deliver;
mod journal;
mod ledger;
mod locks;
mod outcome;
mod run_result;
mod telling;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use holdfast_block::Clock;
use holdfast_policy::config::{Config, Job};
use holdfast_policy::schedule::{Candidate, Cause, Claims, Due, turns};
use holdfast_policy::{TimeZone, Timestamp};

use at_work::Running;
use holdfast_engine::Result;
use telling::Told;

pub use alerts::Notice;
pub use deliver::{Message, deliver};
pub use journal::{JobJournal, JournalEntry, NoticeEntry, RunEntry};
pub use ledger::{JobRecord, Ledger};
pub use outcome::Outcome;
pub use run_result::{RunResult, RunSnapshot};

/// The longest sleep.
const LOOK_AGAIN: Duration = Duration::from_secs(30);
/// When to look again for a job that somebody else runs, or that somebody else keeps away.
const ASK_AGAIN: Duration = Duration::from_secs(5);
/// How long notices that are under way are waited for at the end.
const LAST_NOTICES: Duration = Duration::from_secs(10);

/// What is asked of the scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// To do all jobs whenever they are due, until it is told to stop.
    Forever,
    /// To do what is due now, once.
    Due,
    /// To do these jobs now, once, whether they are due or not.
    Jobs(Vec<String>),
}

/// What the scheduler is to work with.
#[derive(Debug)]
pub struct DaemonRequest {
    /// The jobs.
    pub config: Config,
    /// What is asked.
    pub asked: Asked,
    /// The folder for what is kept from run to run.
    pub state: PathBuf,
    /// The program that does the jobs.
    pub program: PathBuf,
    /// This host's name.
    pub host: String,
    /// The zone of calendars that name none.
    pub zone: TimeZone,
    /// Variables of our environment that jobs do not get.
    pub withheld: Vec<String>,
    /// How often a sign of life is wanted.
    pub pulse_every: Option<Duration>,
}

/// Says something, from any thread.
pub type Speaker = Arc<dyn Fn(Severity, &str) + Send + Sync>;

/// The world of the scheduler.
pub struct DaemonWorld<'a> {
    /// The time of day.
    pub now: &'a dyn Fn() -> Timestamp,
    /// A stopwatch.
    pub clock: Arc<dyn Clock>,
    /// Says something.
    pub say: Speaker,
    /// Sums up in words what a run has achieved.
    pub summary: &'a dyn Fn(&RunEntry) -> String,
    /// Reads the configuration again; none where it is no good, which has been said.
    pub reload: &'a dyn Fn() -> Option<Config>,
    /// Tells who watches over us how we are.
    pub pulse: &'a dyn Fn(Pulse),
    /// Where what happens is told.
    pub sender: Sender<DaemonEvent>,
    /// And heard.
    pub events: Receiver<DaemonEvent>,
}

/// Something that happens.
#[derive(Debug)]
pub enum DaemonEvent {
    /// The configuration is to be read again.
    Reload,
    /// It is to say what it does.
    Status,
    /// It is to stop.
    Stop,
    /// The program of a job has ended.
    Ended(String),
    /// A notice was delivered, or given up.
    Told(NoticeEntry),
}

/// How much something matters, as syslog has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// Something is not done.
    Error,
    /// Somebody should look.
    Warning,
    /// It is so.
    Info,
}

/// How the scheduler is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pulse {
    /// It works.
    Ready,
    /// It lives, and does this.
    Alive(String),
    /// It reads its configuration again.
    Reloading,
    /// It is about to end.
    Stopping,
}

/// What was done.
#[derive(Debug, Default)]
pub struct DaemonReport {
    /// Runs that have ended; of a scheduler that runs for ever, none.
    pub runs: Vec<RunEntry>,
    /// Jobs that could not be started since they, or others that exclude them, run already.
    pub busy: Vec<String>,
}

/// Schedules.
///
/// # Errors
/// Another daemon works in the same folder, or the folder cannot be made. What goes wrong with a job is in the journal.
pub fn daemon(request: DaemonRequest, world: DaemonWorld<'_>) -> Result<DaemonReport> {
    locks::make_folders(&request.state)?;
    let _place = match request.asked {
        Asked::Forever => Some(locks::lock_daemon(&request.state)?),
        Asked::Due | Asked::Jobs(_) => None,
    };
    let wanted = match &request.asked {
        Asked::Jobs(jobs) => jobs.clone(),
        Asked::Forever | Asked::Due => Vec::new(),
    };
    let mut daemon = Daemon {
        ledger: Ledger::new(&request.state),
        journal: JobJournal::new(&request.state),
        running: BTreeMap::new(),
        kept_away: BTreeMap::new(),
        told: Told::default(),
        stopping: None,
        wanted,
        report: DaemonReport::default(),
        request,
        world,
    };
    (daemon.world.pulse)(Pulse::Ready);
    while !daemon.turn() {}
    (daemon.world.pulse)(Pulse::Stopping);
    daemon.hear_last_notices();
    Ok(daemon.report)
}

struct Daemon<'a> {
    request: DaemonRequest,
    world: DaemonWorld<'a>,
    ledger: Ledger,
    journal: JobJournal,
    /// By the names of their jobs.
    running: BTreeMap<String, Running>,
    /// Jobs that somebody else keeps away, and until when nobody asks again.
    kept_away: BTreeMap<String, Duration>,
    told: Told,
    /// Since when it is about to stop.
    stopping: Option<Duration>,
    /// Jobs that a person wants, and that have not begun.
    wanted: Vec<String>,
    report: DaemonReport,
}

/// A job that is due.
struct DueJob {
    job: Job,
    since: Timestamp,
}

impl Daemon<'_> {
    /// Does what there is to do, and sleeps until there is more; whether it is all over.
    fn turn(&mut self) -> bool {
        let now = (self.world.now)();
        let mut sleep = self.request.pulse_every.unwrap_or(LOOK_AGAIN).min(LOOK_AGAIN);
        if self.stopping.is_none() {
            let (due, next) = match self.request.asked {
                Asked::Jobs(_) => (self.wanted_jobs(now), None),
                Asked::Forever | Asked::Due => self.due_jobs(now),
            };
            let begun = self.begin(&due, now);
            // A program that does not start has ended already: what follows from that is due at once.
            if begun > 0 {
                sleep = sleep.min(Duration::from_millis(100));
            }
            let until_next = next.and_then(|next| Duration::try_from(next.duration_since(now)).ok());
            sleep = sleep.min(until_next.unwrap_or(sleep));
        }
        self.catch_up_with_files();
        let is_over = self.running.is_empty() && self.wanted.is_empty();
        if is_over && (self.stopping.is_some() || self.request.asked != Asked::Forever) {
            return true;
        }
        self.enforce_ends();
        (self.world.pulse)(Pulse::Alive(self.status()));
        let clock = self.world.clock.now();
        let ends = self.running.values().filter_map(Running::next_end);
        let asked_again = self.kept_away.values().copied();
        let wake = ends.chain(asked_again).min();
        sleep = sleep.min(wake.map_or(sleep, |wake| wake.saturating_sub(clock)));
        match self.world.events.recv_timeout(sleep.max(Duration::from_millis(5))) {
            Ok(event) => self.hear(event),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
        false
    }

    fn hear(&mut self, event: DaemonEvent) {
        match event {
            DaemonEvent::Ended(job) => self.finish(&job),
            DaemonEvent::Told(entry) => self.note_told(entry),
            DaemonEvent::Reload => {
                (self.world.pulse)(Pulse::Reloading);
                if let Some(config) = (self.world.reload)() {
                    self.say(Severity::Info, "the configuration was read again");
                    self.request.config = config;
                }
                (self.world.pulse)(Pulse::Ready);
            }
            DaemonEvent::Status => self.say(Severity::Info, &self.status()),
            DaemonEvent::Stop => {
                let clock = self.world.clock.now();
                // Whoever asks twice does not want to wait.
                let patience = match self.stopping {
                    None => self.request.config.daemon.stop_within.duration(),
                    Some(_) => Duration::ZERO,
                };
                self.stopping.get_or_insert(clock);
                self.wanted.clear();
                self.stop_all(clock + patience);
            }
        }
    }

    /// The jobs that are due, and when the next one is.
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

    fn wanted_jobs(&self, now: Timestamp) -> Vec<DueJob> {
        let jobs = self.wanted.iter().filter_map(|name| self.request.config.job(name));
        jobs.map(|job| DueJob {
            job: job.clone(),
            since: now,
        })
        .collect()
    }

    /// Starts those whose turn it is; how many.
    fn begin(&mut self, due: &[DueJob], now: Timestamp) -> usize {
        let clock = self.world.clock.now();
        self.kept_away.retain(|_, until| *until > clock);
        let due: Vec<&DueJob> = due
            .iter()
            .filter(|due| !self.kept_away.contains_key(&due.job.name))
            .collect();
        let candidates: Vec<Candidate<'_>> = due
            .iter()
            .map(|due| Candidate {
                since: due.since,
                claims: &due.job.claims,
            })
            .collect();
        let running: Vec<&Claims> = self.running.values().map(|running| &running.job.claims).collect();
        let turns = turns(&candidates, &running, self.request.config.daemon.jobs_at_once);
        let cause = match self.request.asked {
            Asked::Jobs(_) => Cause::Person,
            Asked::Forever | Asked::Due => Cause::Due,
        };
        for index in &turns {
            self.start(&due[*index].job, cause, now);
        }
        turns.len()
    }

    fn status(&self) -> String {
        let names: Vec<&str> = self.running.keys().map(String::as_str).collect();
        if names.is_empty() {
            "waiting for the next job".to_owned()
        } else {
            format!("at work: {}", names.join(", "))
        }
    }

    fn say(&self, severity: Severity, text: &str) {
        (self.world.say)(severity, text);
    }

    /// What says who started a run.
    fn by(&self) -> &'static str {
        match self.request.asked {
            Asked::Forever => "daemon",
            Asked::Due | Asked::Jobs(_) => "run",
        }
    }
}
