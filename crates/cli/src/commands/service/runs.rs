//! `holdfast runs`: lists past runs.

use std::time::Duration;

use holdfast_daemon::{JobJournal, JournalEntry, NoticeEntry, RunEntry, RunSnapshot};
use jiff::Timestamp;
use serde::Serialize;

use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::holdfast_file::{HoldfastFileArgs, StateFileArgs};
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::output::{Column, Page, Report, Style, Table};
use crate::process::time;
use crate::units;

/// Number of snapshots that the summary of a run names; more are only counted.
const SNAPSHOTS_NAMED_MAX: usize = 4;

/// Arguments of `runs`.
#[derive(Debug, clap::Args)]
pub(crate) struct RunsArgs {
    /// Only runs of this job; may be repeated
    #[arg(long = "job", value_name = "JOB")]
    jobs: Vec<String>,
    /// Only runs that were not done
    #[arg(long)]
    failed: bool,
    /// The newest N
    #[arg(short = 'n', long = "last", value_name = "N", default_value_t = 50)]
    last: usize,
    /// With the last lines that each run said
    #[arg(short, long)]
    long: bool,
    #[command(flatten)]
    state: StateFileArgs,
}

impl Verb for RunsArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See recent runs and their results",
            line: "holdfast runs",
        },
        Example {
            wish: "See why a job fails",
            line: "holdfast runs --job nightly --failed --last 1 --long",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `runs`.
#[derive(Debug, Serialize)]
struct RunsListed {
    runs: Vec<RunDocument>,
    notices: Vec<NoticeEntry>,
    #[serde(skip)]
    is_long: bool,
}

/// A run, as text and in JSON documents.
#[derive(Debug, Serialize)]
pub(crate) struct RunDocument {
    #[serde(flatten)]
    run: RunEntry,
    #[serde(skip)]
    start_local: String,
}

impl Report for RunsListed {
    fn command(&self) -> &'static str {
        "runs"
    }

    fn human(&self, page: &mut Page) {
        if self.runs.is_empty() {
            page.line("no such run");
        }
        if self.is_long {
            for run in &self.runs {
                run.long(page);
            }
        } else {
            run_table(&self.runs, page);
        }
        for notice in self.notices.iter().filter(|notice| notice.error.is_some()) {
            let error = notice.error.as_deref().unwrap_or_default();
            page.styled(
                Style::Bad,
                &format!(
                    "{} could not be notified that {} ({}): {error}",
                    notice.to, notice.subject, notice.time
                ),
            );
        }
    }
}

impl RunDocument {
    fn style(&self) -> Style {
        match &self.run.outcome[..] {
            "done" => Style::Plain,
            "warnings" | "stopped" => Style::Warning,
            _ => Style::Bad,
        }
    }

    fn duration(&self) -> String {
        units::duration(Duration::from_millis(self.run.duration_ms))
    }

    /// The error or the result of the run.
    fn result(&self) -> String {
        self.run.error.clone().unwrap_or_else(|| achieved(&self.run))
    }

    fn long(&self, page: &mut Page) {
        let run = &self.run;
        page.styled(
            self.style(),
            &format!(
                "{}  {}  {}  {}",
                run.job,
                self.start_local,
                self.duration(),
                run.outcome
            ),
        );
        if let Some(error) = &run.error {
            page.line(&format!("  {error}"));
        }
        let achieved = achieved(run);
        if !achieved.is_empty() {
            page.line(&format!("  {achieved}"));
        }
        let several = has_several_machines(run);
        for snapshot in run.result.snapshots.iter().filter(|_| several) {
            page.line(&format!("  snapshot {}/{}", snapshot.machine, snapshot.id));
        }
        for warning in &run.result.warnings {
            page.styled(Style::Warning, &format!("  warning: {warning}"));
        }
        if let Some(at) = &run.retry_at {
            page.line(&format!("  tried again at {at}"));
        }
        for line in &run.lines {
            page.line(&format!("  | {line}"));
        }
    }
}

/// Whether its snapshots belong to several machines.
fn has_several_machines(run: &RunEntry) -> bool {
    let mut snapshots = run.result.snapshots.iter();
    let first = snapshots.next();
    first.is_some_and(|first| snapshots.any(|other| other.machine != first.machine))
}

/// The result and the duration of a run.
pub(crate) fn summary(run: &RunEntry) -> String {
    let took = units::duration(Duration::from_millis(run.duration_ms));
    match achieved(run) {
        achieved if achieved.is_empty() => format!("took {took}"),
        achieved => format!("{achieved}, took {took}"),
    }
}

/// The result of a run: its snapshots, bytes and warnings; empty if its program reported nothing.
fn achieved(run: &RunEntry) -> String {
    let result = &run.result;
    let mut parts = Vec::new();
    let snapshots = &result.snapshots;
    if snapshots.len() > SNAPSHOTS_NAMED_MAX {
        parts.push(units::counted(snapshots.len() as u64, "snapshot", "snapshots"));
    } else if !snapshots.is_empty() {
        let several = has_several_machines(run);
        let name = |snapshot: &RunSnapshot| {
            let id = snapshot.id.get(..8).unwrap_or(&snapshot.id);
            if several {
                format!("{}/{id}", snapshot.machine)
            } else {
                id.to_owned()
            }
        };
        let names: Vec<String> = snapshots.iter().map(name).collect();
        parts.push(format!("snapshot {}", names.join(" ")));
    }
    parts.extend(result.read_bytes.map(|read| format!("{} read", units::bytes(read))));
    parts.extend(
        result
            .stored_bytes
            .map(|stored| format!("{} stored", units::bytes(stored))),
    );
    if !result.warnings.is_empty() {
        parts.push(units::counted(result.warnings.len() as u64, "warning", "warnings"));
    }
    parts.join(", ")
}

/// Runs as a table.
pub(crate) fn run_table(runs: &[RunDocument], page: &mut Page) {
    if runs.is_empty() {
        return;
    }
    let mut table = Table::new([
        Column::long_text("JOB"),
        Column::text("BEGAN"),
        Column::number("TOOK"),
        Column::text("BY"),
        Column::text("OUTCOME"),
        Column::long_text("RESULT"),
    ]);
    for run in runs {
        table.styled_row([
            (Style::Plain, run.run.job.clone()),
            (Style::Plain, run.start_local.clone()),
            (Style::Plain, run.duration()),
            (Style::Plain, run.run.by.clone()),
            (run.style(), run.run.outcome.clone()),
            (Style::Plain, run.result()),
        ]);
    }
    page.table(&table);
}

/// Runs with local times.
pub(crate) fn documents(runs: &[RunEntry], context: &Context) -> Vec<RunDocument> {
    let local = |text: &str| {
        let time = text.parse::<Timestamp>().ok();
        time.map_or_else(|| text.to_owned(), |time| time::local(time, context.zone()))
    };
    let document = |run: &RunEntry| RunDocument {
        start_local: local(&run.start),
        run: run.clone(),
    };
    runs.iter().map(document).collect()
}

fn has_job(entries: &[JournalEntry], wanted: &str) -> bool {
    entries.iter().any(|entry| match entry {
        JournalEntry::Run(run) => run.job == wanted,
        JournalEntry::Notice(notice) => notice.job == wanted,
    })
}

/// Returns an error for a job that has never run and is not in holdfast.toml.
fn refuse_unknown(job: &str, context: &Context) -> Result<(), Error> {
    let file = HoldfastFileArgs::default();
    if file.load(context).is_ok_and(|config| config.job(job).is_some()) {
        return Ok(());
    }
    Err(Error::refused(
        Kind::NotFound,
        format!(
            "there is no job {job}: it has no runs, and {} does not have it",
            file.path(context).display()
        ),
        "holdfast jobs shows those that there are; holdfast runs shows those that have run",
    ))
}

fn run(args: &RunsArgs, context: &Context) -> Result<Exit, Error> {
    let journal = JobJournal::new(&args.state.folder(context)?);
    let is_wanted = |job: &String| args.jobs.is_empty() || args.jobs.contains(job);
    let (mut runs, mut notices) = (Vec::new(), Vec::new());
    let entries = journal.read()?;
    if let Some(job) = args.jobs.iter().find(|job| !has_job(&entries, job)) {
        refuse_unknown(job, context)?;
    }
    for entry in entries {
        match entry {
            JournalEntry::Run(run) if is_wanted(&run.job) => {
                if !(args.failed && ["done", "warnings"].contains(&&run.outcome[..])) {
                    runs.push(run);
                }
            }
            JournalEntry::Notice(notice) if is_wanted(&notice.job) => notices.push(notice),
            JournalEntry::Run(_) | JournalEntry::Notice(_) => {}
        }
    }
    let runs = &runs[runs.len().saturating_sub(args.last)..];
    let notices = notices.split_off(notices.len().saturating_sub(args.last));
    context.report(&RunsListed {
        runs: documents(runs, context),
        notices,
        is_long: args.long,
    })
}
