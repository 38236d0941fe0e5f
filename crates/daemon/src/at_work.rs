//! Jobs at work: how they start, how they are stopped, and what becomes of their end.

use std::fs::File;
use std::time::Duration;

use holdfast_host::{Order, Worker};
use holdfast_policy::Timestamp;
use holdfast_policy::config::Job;
use holdfast_policy::schedule::{Cause, Consequence, Due};

use super::journal::{JournalEntry, RunEntry};
use super::ledger::JobRecord;
use super::locks::{is_locked, lock_job};
use super::outcome::{Ended, Outcome, StopCause, ended};
use super::run_result::RunResult;
use super::{ASK_AGAIN, Asked, Daemon, DaemonEvent, Severity, alerts};

/// A job at work.
pub(super) struct Running {
    pub(super) job: Job,
    worker: Worker,
    cause: Cause,
    start: Timestamp,
    started: Duration,
    failed_before: u32,
    /// When it has taken too long.
    deadline: Duration,
    /// Why it was asked to stop, and when it is killed.
    stop: Option<(StopCause, Duration)>,
    is_killed: bool,
    /// Held until its end is noted: whoever finds it free would believe that nobody saw that.
    _lock: File,
}

/// A run as it is noted.
struct Noted<'a> {
    job: &'a Job,
    start: Timestamp,
    duration: Duration,
    failed_before: u32,
    cause: Cause,
}

impl Running {
    /// When something has to be done about it.
    pub(super) fn next_end(&self) -> Option<Duration> {
        match self.stop {
            _ if self.is_killed => None,
            Some((_, kill_at)) => Some(kill_at),
            None => Some(self.deadline),
        }
    }
}

impl Daemon<'_> {
    /// The record of a job that does not run here; none where it runs elsewhere, or cannot be known.
    pub(super) fn settled_record(&mut self, job: &Job, now: Timestamp) -> Option<JobRecord> {
        let name = &job.name;
        let mut record = match self.ledger.read(name) {
            Ok(Some(record)) => record,
            Ok(None) => {
                let record = JobRecord::new(now);
                self.keep(name, record.clone());
                // Its lock is made now, when there is room for it: a full disk is not to stop it later.
                if let Err(error) = is_locked(&self.request.state, name) {
                    self.say(Severity::Error, &format!("{name}: {error}"));
                }
                record
            }
            Err(error) => {
                self.keep_away(name);
                self.say(Severity::Error, &format!("{name}: {error}"));
                return None;
            }
        };
        if record.state.running.is_some() {
            // Without an answer nobody knows: it is asked again.
            if is_locked(&self.request.state, name).unwrap_or(true) {
                self.keep_away(name);
                return None;
            }
            // It may have ended properly between our two looks.
            record = self.ledger.read(name).ok()??;
            if let Some(start) = record.state.running {
                self.note_unseen(job, &mut record, start, now);
            }
        }
        let before = record.clone();
        record
            .state
            .mend(&job.timing(&self.request.host), &self.request.zone, now);
        let remind_after = self.request.config.daemon.remind_after.duration();
        let reminder = alerts::reminder(name, &mut record, remind_after, now);
        if record != before {
            self.keep(name, record.clone());
        }
        self.tell(reminder, &job.notify, now);
        Some(record)
    }

    /// The lock of a job that is about to start; none where somebody keeps it away.
    fn lock(&mut self, job: &Job) -> Option<File> {
        let name = &job.name;
        let others = self.request.config.jobs.iter().filter(|other| other.name != *name);
        let excluded =
            others.filter(|other| other.claims.exclude(&job.claims) && !self.running.contains_key(&other.name));
        let lock = lock_job(&self.request.state, name, excluded.map(|other| &other.name[..]));
        let is_wanted = matches!(self.request.asked, Asked::Jobs(_));
        self.wanted.retain(|wanted| wanted != name);
        match lock {
            Ok(Some(lock)) => return Some(lock),
            Ok(None) if is_wanted => {}
            Ok(None) => {
                let text = format!("{name} waits: it, or a job that excludes it, runs elsewhere");
                self.say(Severity::Info, &text);
            }
            Err(error) => self.say(Severity::Error, &format!("{name}: {error}")),
        }
        self.keep_away(name);
        if self.request.asked != Asked::Forever {
            self.report.busy.push(name.clone());
        }
        None
    }

    /// Starts a job, where nobody keeps it away.
    pub(super) fn start(&mut self, job: &Job, cause: Cause, now: Timestamp) {
        let name = &job.name;
        let Some(lock) = self.lock(job) else { return };
        let kept = self.ledger.read(name).ok().flatten();
        let mut record = kept.unwrap_or_else(|| JobRecord::new(now));
        let timing = job.timing(&self.request.host);
        let due = record.state.due(&timing, &self.request.zone, now);
        if cause == Cause::Due && !matches!(due, Due::Since(_)) {
            // Somebody else has done it since it was looked at.
            return;
        }
        let failed_before = record.state.failed_count;
        record.state.start(&timing, cause, now);
        self.keep(name, record);
        match self.work(job, &lock) {
            Ok(worker) => {
                self.say(
                    Severity::Info,
                    &format!("{name} begins, as process {}", worker.process()),
                );
                let started = self.world.clock.now();
                let running = Running {
                    job: job.clone(),
                    worker,
                    cause,
                    start: now,
                    started,
                    failed_before,
                    deadline: started + job.timeout.duration(),
                    stop: None,
                    is_killed: false,
                    _lock: lock,
                };
                self.running.insert(name.clone(), running);
            }
            Err(error) => {
                let ended = Ended {
                    outcome: Outcome::Failed,
                    exit_code: None,
                    error: Some(format!("start {}: {error}", self.request.program.display())),
                    lines: Vec::new(),
                    result: RunResult::default(),
                    freshness: Vec::new(),
                };
                let noted = Noted {
                    job,
                    start: now,
                    duration: Duration::ZERO,
                    failed_before,
                    cause,
                };
                self.note_end(&noted, &ended, now);
            }
        }
    }

    fn work(&self, job: &Job, lock: &File) -> std::io::Result<Worker> {
        let mut arguments = vec!["--json".to_owned(), "--no-progress".to_owned()];
        arguments.extend(self.request.config.command(job));
        let order = Order {
            program: &self.request.program,
            arguments: &arguments,
            variables: &[("HOLDFAST_JOB", job.name.clone())],
            withheld: &self.request.withheld,
            lock: lock.try_clone()?,
        };
        let (say, name) = (self.world.say.clone(), job.name.clone());
        let (sender, ended) = (self.world.sender.clone(), job.name.clone());
        Worker::start(
            order,
            move |line| say(Severity::Info, &format!("{name}: {line}")),
            // Nobody hears it who has ended.
            move || drop(sender.send(DaemonEvent::Ended(ended))),
        )
    }

    /// The program of a job has ended.
    pub(super) fn finish(&mut self, name: &str) {
        let Some(running) = self.running.remove(name) else {
            return;
        };
        let now = (self.world.now)();
        let duration = self.world.clock.now().saturating_sub(running.started);
        let stop = running.stop.map(|(cause, _)| cause);
        if stop.is_some() {
            // What it has started and left behind was told to stop with it.
            running.worker.kill();
        }
        let ended = match running.worker.finish() {
            Ok(worked) => ended(&worked, running.job.kind.judgement, stop),
            Err(error) => Ended {
                outcome: Outcome::Unseen,
                exit_code: None,
                error: Some(format!("wait for its end: {error}")),
                lines: Vec::new(),
                result: RunResult::default(),
                freshness: Vec::new(),
            },
        };
        let noted = Noted {
            job: &running.job,
            start: running.start,
            duration,
            failed_before: running.failed_before,
            cause: running.cause,
        };
        self.note_end(&noted, &ended, now);
    }

    /// A run of a scheduler that was killed.
    fn note_unseen(&mut self, job: &Job, record: &mut JobRecord, start: Timestamp, now: Timestamp) {
        let ended = Ended {
            outcome: Outcome::Unseen,
            exit_code: None,
            error: Some("nobody saw how it ended: its scheduler was killed meanwhile".to_owned()),
            lines: Vec::new(),
            result: RunResult::default(),
            freshness: Vec::new(),
        };
        let noted = Noted {
            job,
            start,
            duration: now.duration_since(start).try_into().unwrap_or_default(),
            failed_before: record.state.failed_count,
            cause: Cause::Due,
        };
        self.note_end(&noted, &ended, now);
        if let Ok(Some(after)) = self.ledger.read(&job.name) {
            *record = after;
        }
    }

    /// Keeps, notes, says and tells how a run ended.
    fn note_end(&mut self, noted: &Noted<'_>, ended: &Ended, now: Timestamp) {
        let job = noted.job;
        let name = &job.name;
        let read = self.ledger.read(name).ok().flatten();
        let mut record = read.unwrap_or_else(|| JobRecord::new(now));
        let timing = job.timing(&self.request.host);
        let consequence = record.state.end(&timing, ended.outcome.end(), noted.cause, now);
        record.last = Some((now, ended.outcome));
        let remind_after = self.request.config.daemon.remind_after.duration();
        let mut notices = alerts::after_run(name, &mut record, ended, consequence, remind_after, now);
        self.keep(name, record);
        let retry_at = match consequence {
            Consequence::Retry(at) => Some(at),
            Consequence::Well | Consequence::GivenUp => None,
        };
        let entry = RunEntry {
            job: name.clone(),
            kind: job.kind.name.to_owned(),
            by: self.by().to_owned(),
            start: noted.start.to_string(),
            end: now.to_string(),
            duration_ms: u64::try_from(noted.duration.as_millis()).unwrap_or(u64::MAX),
            outcome: ended.outcome.word().to_owned(),
            exit_code: ended.exit_code,
            failed_before: noted.failed_before,
            retry_at: retry_at.map(|at| at.to_string()),
            error: ended.error.clone(),
            lines: ended.lines.clone(),
            result: ended.result.clone(),
        };
        let summary = (self.world.summary)(&entry);
        for notice in &mut notices {
            notice.add_run(&entry, &summary);
        }
        self.say_end(&entry, ended.outcome, &summary);
        self.note(JournalEntry::Run(entry.clone()));
        if self.request.asked != Asked::Forever {
            self.report.runs.push(entry);
        }
        self.tell(notices, &job.notify, now);
    }

    fn say_end(&self, entry: &RunEntry, outcome: Outcome, summary: &str) {
        let (severity, what) = match outcome {
            Outcome::Done => (Severity::Info, "was done".to_owned()),
            Outcome::Warnings => (Severity::Warning, "was done, with warnings".to_owned()),
            _ => {
                let error = entry.error.as_deref().unwrap_or_default();
                (Severity::Error, format!("was not done ({}): {error}", outcome.word()))
            }
        };
        let again = entry.retry_at.as_ref().map(|at| format!("; it is tried again at {at}"));
        self.say(
            severity,
            &format!("{} {what}; {summary}{}", entry.job, again.unwrap_or_default()),
        );
    }

    /// Stops those that take too long, and kills those that do not stop.
    pub(super) fn enforce_ends(&mut self) {
        let clock = self.world.clock.now();
        let patience = self.request.config.daemon.stop_within.duration();
        let mut said = Vec::new();
        for (name, running) in &mut self.running {
            match running.stop {
                _ if running.is_killed => {}
                None if clock >= running.deadline => {
                    running.worker.stop();
                    running.stop = Some((StopCause::TimedOut, clock + patience));
                    said.push(format!("{name} has taken {} and is stopped", running.job.timeout));
                }
                Some((_, kill_at)) if clock >= kill_at => {
                    running.worker.kill();
                    running.is_killed = true;
                    said.push(format!("{name} does not stop and is killed"));
                }
                _ => {}
            }
        }
        for text in said {
            self.say(Severity::Warning, &text);
        }
    }

    /// Asks all to stop.
    pub(super) fn stop_all(&mut self, kill_at: Duration) {
        for running in self.running.values_mut() {
            if running.stop.is_none() {
                running.worker.stop();
            }
            let cause = running.stop.map_or(StopCause::Asked, |(cause, _)| cause);
            running.stop = Some((cause, kill_at));
        }
    }

    fn keep_away(&mut self, name: &str) {
        self.kept_away
            .insert(name.to_owned(), self.world.clock.now() + ASK_AGAIN);
    }
}
