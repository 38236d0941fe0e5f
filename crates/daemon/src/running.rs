//! Running jobs: starting, stopping, and recording their results.

use std::fs::File;
use std::time::Duration;

use holdfast_host::{Worker, WorkerRequest};
use holdfast_policy::Timestamp;
use holdfast_policy::config::Job;
use holdfast_policy::schedule::{Cause, Consequence, Due};

use super::job_records::JobRecord;
use super::journal::{JournalEntry, RunEntry};
use super::locks::{is_locked, lock_job};
use super::outcome::{Outcome, RunResult, StopCause, ended};
use super::run_report::RunReport;
use super::{Daemon, DaemonEvent, RECHECK_INTERVAL, RunMode, Severity, alerts};

/// A running job.
pub(super) struct Running {
    pub(super) job: Job,
    worker: Worker,
    cause: Cause,
    start: Timestamp,
    started: Duration,
    failed_before: u32,
    /// The time at which the job exceeds its timeout.
    deadline: Duration,
    /// Why the job was asked to stop, and the time at which it is killed.
    stop: Option<(StopCause, Duration)>,
    is_killed: bool,
    /// Held until the end is recorded. Otherwise another scheduler would record the result as unknown.
    _lock: File,
}

/// The facts about an ended run that are recorded.
struct EndedRun<'a> {
    job: &'a Job,
    start: Timestamp,
    duration: Duration,
    failed_before: u32,
    cause: Cause,
}

impl Running {
    /// The time at which the job must be stopped or killed.
    pub(super) fn next_end(&self) -> Option<Duration> {
        match self.stop {
            _ if self.is_killed => None,
            Some((_, kill_at)) => Some(kill_at),
            None => Some(self.deadline),
        }
    }
}

impl Daemon<'_> {
    /// The record of a job that is not running; `None` if another process runs it, or if that cannot be determined.
    pub(super) fn settled_record(&mut self, job: &Job, now: Timestamp) -> Option<JobRecord> {
        let name = &job.name;
        let mut record = match self.records.read(name) {
            Ok(Some(record)) => record,
            Ok(None) => {
                let record = JobRecord::new(now);
                self.save_record(name, record.clone());
                // The lock file is created now, while there is space: later a full disk must not prevent a run.
                if let Err(error) = is_locked(&self.request.state, name) {
                    self.log(Severity::Error, &format!("{name}: {error}"));
                }
                record
            }
            Err(error) => {
                self.defer(name);
                self.log(Severity::Error, &format!("{name}: {error}"));
                return None;
            }
        };
        if record.state.running.is_some() {
            // If this cannot be determined, check again later.
            if is_locked(&self.request.state, name).unwrap_or(true) {
                self.defer(name);
                return None;
            }
            // The run may have ended normally between the two checks.
            record = self.records.read(name).ok()??;
            if let Some(start) = record.state.running {
                self.record_unknown_result(job, &mut record, start, now);
            }
        }
        let before = record.clone();
        record
            .state
            .normalize(&job.timing(&self.request.host), &self.request.zone, now);
        let remind_after = self.request.config.daemon.remind_after.duration();
        let reminder = alerts::reminder(name, &mut record, remind_after, now);
        if record != before {
            self.save_record(name, record.clone());
        }
        self.notify(reminder, &job.notify, now);
        Some(record)
    }

    /// Locks a job that is about to start; `None` if another job or process excludes it.
    fn lock(&mut self, job: &Job) -> Option<File> {
        let name = &job.name;
        let others = self.request.config.jobs.iter().filter(|other| other.name != *name);
        let excluded =
            others.filter(|other| other.claims.excludes(&job.claims) && !self.running.contains_key(&other.name));
        let lock = lock_job(&self.request.state, name, excluded.map(|other| &other.name[..]));
        let is_wanted = matches!(self.request.mode, RunMode::Jobs(_));
        self.requested.retain(|wanted| wanted != name);
        match lock {
            Ok(Some(lock)) => return Some(lock),
            Ok(None) if is_wanted => {}
            Ok(None) => {
                let text = format!("{name} waits: it, or a job that excludes it, runs in another process");
                self.log(Severity::Info, &text);
            }
            Err(error) => self.log(Severity::Error, &format!("{name}: {error}")),
        }
        self.defer(name);
        if self.request.mode != RunMode::Forever {
            self.report.busy.push(name.clone());
        }
        None
    }

    /// Starts a job, unless another job or process excludes it.
    pub(super) fn start(&mut self, job: &Job, cause: Cause, now: Timestamp) {
        let name = &job.name;
        let Some(lock) = self.lock(job) else { return };
        let kept = self.records.read(name).ok().flatten();
        let mut record = kept.unwrap_or_else(|| JobRecord::new(now));
        let timing = job.timing(&self.request.host);
        let due = record.state.due(&timing, &self.request.zone, now);
        if cause == Cause::Due && !matches!(due, Due::Since(_)) {
            // Another process has run the job meanwhile.
            return;
        }
        let failed_before = record.state.failed_count;
        record.state.start(&timing, cause, now);
        self.save_record(name, record);
        match self.spawn(job, &lock) {
            Ok(worker) => {
                self.log(
                    Severity::Info,
                    &format!("{name} started as process {}", worker.process()),
                );
                let started = self.environment.clock.now();
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
                let ended = RunResult {
                    outcome: Outcome::Failed,
                    exit_code: None,
                    error: Some(format!("start {}: {error}", self.request.program.display())),
                    lines: Vec::new(),
                    result: RunReport::default(),
                    freshness: Vec::new(),
                };
                let run = EndedRun {
                    job,
                    start: now,
                    duration: Duration::ZERO,
                    failed_before,
                    cause,
                };
                self.record_end(&run, &ended, now);
            }
        }
    }

    fn spawn(&self, job: &Job, lock: &File) -> std::io::Result<Worker> {
        let mut arguments = vec!["--json".to_owned(), "--no-progress".to_owned()];
        arguments.extend(self.request.config.command(job));
        let order = WorkerRequest {
            program: &self.request.program,
            arguments: &arguments,
            variables: &[("HOLDFAST_JOB", job.name.clone())],
            withheld: &self.request.withheld,
            lock: lock.try_clone()?,
        };
        let (say, name) = (self.environment.log.clone(), job.name.clone());
        let (sender, ended) = (self.environment.sender.clone(), job.name.clone());
        Worker::start(
            order,
            move |line| say(Severity::Info, &format!("{name}: {line}")),
            // The scheduler may have ended.
            move || drop(sender.send(DaemonEvent::Ended(ended))),
        )
    }

    /// Handles the end of a job's program.
    pub(super) fn finish(&mut self, name: &str) {
        let Some(running) = self.running.remove(name) else {
            return;
        };
        let now = (self.environment.now)();
        let duration = self.environment.clock.now().saturating_sub(running.started);
        let stop = running.stop.map(|(cause, _)| cause);
        if stop.is_some() {
            // The remaining child processes were asked to stop together with the program.
            running.worker.kill();
        }
        let ended = match running.worker.finish() {
            Ok(worked) => ended(&worked, running.job.kind.exit_codes, stop),
            Err(error) => RunResult {
                outcome: Outcome::Unseen,
                exit_code: None,
                error: Some(format!("wait for its end: {error}")),
                lines: Vec::new(),
                result: RunReport::default(),
                freshness: Vec::new(),
            },
        };
        let run = EndedRun {
            job: &running.job,
            start: running.start,
            duration,
            failed_before: running.failed_before,
            cause: running.cause,
        };
        self.record_end(&run, &ended, now);
    }

    /// Records a run whose scheduler was killed.
    fn record_unknown_result(&mut self, job: &Job, record: &mut JobRecord, start: Timestamp, now: Timestamp) {
        let ended = RunResult {
            outcome: Outcome::Unseen,
            exit_code: None,
            error: Some("its result is unknown, because the scheduler was killed".to_owned()),
            lines: Vec::new(),
            result: RunReport::default(),
            freshness: Vec::new(),
        };
        let run = EndedRun {
            job,
            start,
            duration: now.duration_since(start).try_into().unwrap_or_default(),
            failed_before: record.state.failed_count,
            cause: Cause::Due,
        };
        self.record_end(&run, &ended, now);
        if let Ok(Some(after)) = self.records.read(&job.name) {
            *record = after;
        }
    }

    /// Saves the record, writes journal and log, and sends notices.
    fn record_end(&mut self, run: &EndedRun<'_>, ended: &RunResult, now: Timestamp) {
        let job = run.job;
        let name = &job.name;
        let read = self.records.read(name).ok().flatten();
        let mut record = read.unwrap_or_else(|| JobRecord::new(now));
        let timing = job.timing(&self.request.host);
        let consequence = record.state.end(&timing, ended.outcome.end(), run.cause, now);
        record.last = Some((now, ended.outcome));
        let remind_after = self.request.config.daemon.remind_after.duration();
        let mut notices = alerts::after_run(name, &mut record, ended, consequence, remind_after, now);
        self.save_record(name, record);
        let retry_at = match consequence {
            Consequence::Retry(at) => Some(at),
            Consequence::Succeeded | Consequence::NoMoreRetries => None,
        };
        let entry = RunEntry {
            job: name.clone(),
            kind: job.kind.name.to_owned(),
            by: self.by().to_owned(),
            start: run.start.to_string(),
            end: now.to_string(),
            duration_ms: u64::try_from(run.duration.as_millis()).unwrap_or(u64::MAX),
            outcome: ended.outcome.word().to_owned(),
            exit_code: ended.exit_code,
            failed_before: run.failed_before,
            retry_at: retry_at.map(|at| at.to_string()),
            error: ended.error.clone(),
            lines: ended.lines.clone(),
            result: ended.result.clone(),
        };
        let summary = (self.environment.summary)(&entry);
        for notice in &mut notices {
            notice.add_run(&entry, &summary);
        }
        self.log_end(&entry, ended.outcome, &summary);
        self.append_entry(JournalEntry::Run(entry.clone()));
        if self.request.mode != RunMode::Forever {
            self.report.runs.push(entry);
        }
        self.notify(notices, &job.notify, now);
    }

    fn log_end(&self, entry: &RunEntry, outcome: Outcome, summary: &str) {
        let (severity, what) = match outcome {
            Outcome::Done => (Severity::Info, "completed".to_owned()),
            Outcome::Warnings => (Severity::Warning, "completed with warnings".to_owned()),
            _ => {
                let error = entry.error.as_deref().unwrap_or_default();
                (
                    Severity::Error,
                    format!("did not complete ({}): {error}", outcome.word()),
                )
            }
        };
        let again = entry.retry_at.as_ref().map(|at| format!("; retry at {at}"));
        self.log(
            severity,
            &format!("{} {what}; {summary}{}", entry.job, again.unwrap_or_default()),
        );
    }

    /// Stops jobs that exceed their timeout, and kills those that do not stop.
    pub(super) fn enforce_ends(&mut self) {
        let clock = self.environment.clock.now();
        let patience = self.request.config.daemon.stop_within.duration();
        let mut said = Vec::new();
        for (name, running) in &mut self.running {
            match running.stop {
                _ if running.is_killed => {}
                None if clock >= running.deadline => {
                    running.worker.stop();
                    running.stop = Some((StopCause::TimedOut, clock + patience));
                    said.push(format!(
                        "{name} has exceeded its timeout of {} and is stopped",
                        running.job.timeout
                    ));
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
            self.log(Severity::Warning, &text);
        }
    }

    /// Asks all jobs to stop.
    pub(super) fn stop_all(&mut self, kill_at: Duration) {
        for running in self.running.values_mut() {
            if running.stop.is_none() {
                running.worker.stop();
            }
            let cause = running.stop.map_or(StopCause::Requested, |(cause, _)| cause);
            running.stop = Some((cause, kill_at));
        }
    }

    fn defer(&mut self, name: &str) {
        self.deferred
            .insert(name.to_owned(), self.environment.clock.now() + RECHECK_INTERVAL);
    }
}
