//! `holdfast jobs`: lists the jobs of a holdfast.toml, their next and last runs.

use holdfast_daemon::{JobRecord, JobRecords};
use holdfast_policy::config::Job;
use holdfast_policy::schedule::Due;
use jiff::Timestamp;
use serde::Serialize;

use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::holdfast_file::{HoldfastFileArgs, StateFileArgs};
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Column, Page, Report, Style, Table};
use crate::process::time;

/// Arguments of `jobs`.
#[derive(Debug, clap::Args)]
pub(crate) struct JobsArgs {
    #[command(flatten)]
    file: HoldfastFileArgs,
    #[command(flatten)]
    state: StateFileArgs,
}

impl Verb for JobsArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "See when each job runs next, and how it went",
        line: "holdfast jobs",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `jobs`.
#[derive(Debug, Serialize)]
struct JobsListed {
    jobs: Vec<JobDocument>,
}

#[derive(Debug, Serialize)]
struct JobDocument {
    name: String,
    kind: &'static str,
    enabled: bool,
    /// When it runs next; null if never, or if it is running.
    next: Option<String>,
    /// When the present run began.
    running_since: Option<String>,
    /// When its last run ended.
    last_end: Option<String>,
    last_outcome: Option<&'static str>,
    /// When it began to fail.
    failing_since: Option<String>,
    /// Machines without a recent snapshot.
    silent: Vec<String>,
    /// Local times of the next run, the last run, and the first failure.
    #[serde(skip)]
    local: [String; 3],
}

impl Report for JobsListed {
    fn command(&self) -> &'static str {
        "jobs"
    }

    fn exit(&self) -> Exit {
        let is_ill = |job: &JobDocument| job.failing_since.is_some() || !job.silent.is_empty();
        if self.jobs.iter().any(is_ill) {
            Exit::Warnings
        } else {
            Exit::Ok
        }
    }

    fn human(&self, page: &mut Page) {
        if self.jobs.is_empty() {
            page.line("no jobs");
            return;
        }
        let mut table = Table::new([
            Column::long_text("JOB"),
            Column::text("DOES"),
            Column::text("NEXT"),
            Column::text("LAST"),
            Column::text("OUTCOME"),
            Column::text("FAILING SINCE"),
        ]);
        for job in &self.jobs {
            let [next, last, failing] = job.local.clone();
            let style = if job.failing_since.is_some() {
                Style::Bad
            } else {
                Style::Plain
            };
            table.styled_row([
                (Style::Plain, job.name.clone()),
                (Style::Plain, job.kind.to_owned()),
                (Style::Plain, next),
                (Style::Plain, last),
                (style, job.last_outcome.unwrap_or_default().to_owned()),
                (style, failing),
            ]);
        }
        page.table(&table);
        for job in self.jobs.iter().filter(|job| !job.silent.is_empty()) {
            let machines = job.silent.join(", ");
            page.styled(Style::Bad, &format!("{}: no fresh snapshot of {machines}", job.name));
        }
    }
}

fn run(args: &JobsArgs, context: &Context) -> Result<Exit, Error> {
    let config = args.file.load(context)?;
    let records = JobRecords::new(&args.state.folder(context)?);
    let now = time::now();
    let jobs = config.jobs.iter().map(|job| {
        let record = records.read(&job.name)?.unwrap_or_else(|| JobRecord::new(now));
        Ok(document(job, record, now, context))
    });
    let jobs = jobs.collect::<Result<Vec<_>, Error>>()?;
    context.report(&JobsListed { jobs })
}

/// The next run of a job according to its record, which is corrected if only a wrong clock can explain it; `None` if
/// there is none or the job is running.
pub(super) fn next_run(job: &Job, record: &mut JobRecord, now: Timestamp, context: &Context) -> Option<Timestamp> {
    let timing = job.timing(&crate::process::kernel::host_name());
    record.state.normalize(&timing, context.zone(), now);
    match record.state.due(&timing, context.zone(), now) {
        _ if !job.is_enabled => None,
        Due::Since(since) => Some(since),
        Due::At(at) => Some(at),
        Due::Running | Due::Never => None,
    }
}

fn document(job: &Job, mut record: JobRecord, now: Timestamp, context: &Context) -> JobDocument {
    let timing = job.timing(&crate::process::kernel::host_name());
    let next = next_run(job, &mut record, now, context);
    let due = record.state.due(&timing, context.zone(), now);
    let local = |time: Option<Timestamp>| time.map(|time| time::local(time, context.zone())).unwrap_or_default();
    let failing = record.failing.as_ref().map(|alert| alert.since);
    let last = record.last.map(|(end, _)| end);
    let next_local = match due {
        _ if !job.is_enabled => "disabled".to_owned(),
        Due::Since(_) => "now".to_owned(),
        Due::Running => "runs".to_owned(),
        Due::Never => "never".to_owned(),
        Due::At(_) => local(next),
    };
    let text = |time: Option<Timestamp>| time.map(|time| time.to_string());
    JobDocument {
        name: job.name.clone(),
        kind: job.kind.name,
        enabled: job.is_enabled,
        next: text(next),
        running_since: text(record.state.running),
        last_end: text(last),
        last_outcome: record.last.map(|(_, outcome)| outcome.word()),
        failing_since: text(failing),
        silent: record.silent.keys().cloned().collect(),
        local: [next_local, local(last), local(failing)],
    }
}
