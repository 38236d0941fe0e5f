//! Metrics of the jobs of a holdfast.toml, from the scheduler's records and the journal of runs.

use std::time::Duration;

use holdfast_daemon::{JobJournal, JobRecord, JobRecords, JournalEntry, Outcome, RunEntry};
use holdfast_policy::Timestamp;
use holdfast_policy::config::Job;

use super::seconds;
use crate::commands::service::jobs::next_run;
use crate::context::Context;
use crate::context::holdfast_file::{HoldfastFileArgs, StateFileArgs};
use crate::errors::Error;
use crate::output::prometheus::{Metric, MetricValue};

/// The known data of a job.
struct JobFigures<'a> {
    job: &'a Job,
    record: JobRecord,
    next: Option<Timestamp>,
    /// Its last completed run.
    last: Option<&'a RunEntry>,
    last_success: Option<&'a RunEntry>,
}

/// Metrics of all jobs.
pub(super) fn of_jobs(
    file: &HoldfastFileArgs,
    state: &StateFileArgs,
    now: Timestamp,
    context: &Context,
) -> Result<Vec<Metric>, Error> {
    let config = file.load(context)?;
    let folder = state.folder(context)?;
    let ledger = JobRecords::new(&folder);
    let runs: Vec<RunEntry> = JobJournal::new(&folder)
        .read()?
        .into_iter()
        .filter_map(|entry| match entry {
            JournalEntry::Run(run) => Some(run),
            JournalEntry::Notice(_) => None,
        })
        .collect();
    let is_success = |run: &&RunEntry| Outcome::from_word(&run.outcome).is_some_and(Outcome::is_done);
    let figures = config.jobs.iter().map(|job| {
        let mut record = ledger.read(&job.name)?.unwrap_or_else(|| JobRecord::new(now));
        let next = next_run(job, &mut record, now, context);
        let own = || runs.iter().rev().filter(|run| run.job == job.name);
        Ok(JobFigures {
            job,
            record,
            next,
            last: own().next(),
            last_success: own().find(is_success),
        })
    });
    let figures = figures.collect::<Result<Vec<_>, Error>>()?;
    let mut metrics = of_schedule(&figures).to_vec();
    metrics.extend(of_last_runs(&figures));
    metrics.push(of_outcomes(&figures));
    Ok(metrics)
}

impl JobFigures<'_> {
    fn labels(&self) -> [(&'static str, &str); 2] {
        [("job", &self.job.name), ("kind", self.job.kind.name)]
    }
}

fn of_schedule(figures: &[JobFigures<'_>]) -> [Metric; 3] {
    let mut enabled = Metric::new("holdfast_job_enabled", "1 where a job is enabled, else 0.");
    let mut running = Metric::new("holdfast_job_running", "1 while a job runs, else 0.");
    let mut next = Metric::new(
        "holdfast_job_next_run_timestamp_seconds",
        "When a job runs next; in the past where it is due.",
    );
    for one in figures {
        enabled.add(&one.labels(), MetricValue::Whole(one.job.is_enabled.into()));
        let is_running = one.record.state.running.is_some();
        running.add(&one.labels(), MetricValue::Whole(is_running.into()));
        if let Some(time) = one.next {
            next.add(&one.labels(), MetricValue::Whole(seconds(time)));
        }
    }
    [enabled, running, next]
}

fn of_last_runs(figures: &[JobFigures<'_>]) -> [Metric; 6] {
    let mut start = Metric::new(
        "holdfast_job_last_start_timestamp_seconds",
        "When the last run of a job began.",
    );
    let mut success = Metric::new(
        "holdfast_job_last_success_timestamp_seconds",
        "When the last run of a job that succeeded ended.",
    );
    let mut duration = Metric::new(
        "holdfast_job_last_duration_seconds",
        "How long the last run of a job that has ended took.",
    );
    let mut exit_code = Metric::new(
        "holdfast_job_last_exit_code",
        "Exit code of the last run of a job that has ended.",
    );
    let mut read = Metric::new(
        "holdfast_job_last_read_bytes",
        "Bytes that the last run of a job that has ended read.",
    );
    let mut stored = Metric::new(
        "holdfast_job_last_stored_bytes",
        "Bytes by which the last run of a job that has ended made the repository grow.",
    );
    for one in figures {
        let labels = one.labels();
        let add = |metric: &mut Metric, value: Option<u64>| {
            if let Some(value) = value {
                metric.add(&labels, MetricValue::Whole(value));
            }
        };
        let started = one.record.state.running.or_else(|| time(&one.last?.start));
        add(&mut start, started.map(seconds));
        let succeeded = one.last_success.and_then(|run| time(&run.end));
        add(&mut success, succeeded.map(seconds));
        let Some(last) = one.last else { continue };
        let took = Duration::from_millis(last.duration_ms).as_secs_f64();
        duration.add(&labels, MetricValue::Real(took));
        add(&mut exit_code, last.exit_code.and_then(|code| u64::try_from(code).ok()));
        add(&mut read, last.result.read_bytes);
        add(&mut stored, last.result.stored_bytes);
    }
    [start, success, duration, exit_code, read, stored]
}

fn of_outcomes(figures: &[JobFigures<'_>]) -> Metric {
    let mut outcomes = Metric::new(
        "holdfast_job_last_outcome",
        "1 for the outcome of the last run of a job that has ended, 0 for the others.",
    );
    for one in figures {
        let Some(last) = one.last else { continue };
        for outcome in Outcome::ALL {
            let [job, kind] = one.labels();
            let is_it = last.outcome == outcome.word();
            outcomes.add(
                &[job, kind, ("outcome", outcome.word())],
                MetricValue::Whole(is_it.into()),
            );
        }
    }
    outcomes
}

fn time(text: &str) -> Option<Timestamp> {
    text.parse().ok()
}
