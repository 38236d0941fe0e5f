//! `holdfast daemon` and `holdfast run`: run the jobs of a holdfast.toml on schedule or immediately.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use holdfast_block::error_text;
use holdfast_daemon::{
    DaemonEnvironment, DaemonEvent, DaemonReport, DaemonRequest, LogSink, Outcome as RunOutcome, RunEntry, RunMode,
    Severity, daemon,
};
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use crate::args::{Example, SharedOptions};
use crate::commands::service::runs::{RunDocument, documents, run_table, summary};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::holdfast_file::{HoldfastFileArgs, StateFileArgs};
use crate::context::service::{self, LogReader, Service};
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::output::{Page, Report, Style};
use crate::process::environment;
use crate::process::time;

/// Arguments of `daemon`.
#[derive(Debug, clap::Args)]
pub(crate) struct DaemonArgs {
    #[command(flatten)]
    file: HoldfastFileArgs,
    #[command(flatten)]
    state: StateFileArgs,
}

/// Arguments of `run`.
#[derive(Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// Jobs to run now
    #[arg(value_name = "JOB", required_unless_present = "due")]
    jobs: Vec<String>,
    /// Run the jobs that are due or were missed: for a timer, where no daemon runs
    #[arg(long, conflicts_with = "jobs")]
    due: bool,
    #[command(flatten)]
    file: HoldfastFileArgs,
    #[command(flatten)]
    state: StateFileArgs,
}

impl Verb for DaemonArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See what it does, before it becomes a service",
            line: "holdfast daemon --config /etc/holdfast/holdfast.toml",
        },
        Example {
            wish: "Try a configuration of your own, as an ordinary user",
            line: "holdfast daemon --config my.toml --state my-state",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Json, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run_daemon(self, context)
    }
}

impl Verb for RunArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Run a job now",
            line: "holdfast run nightly",
        },
        Example {
            wish: "Run due jobs from a timer",
            line: "holdfast run --due",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `run`.
#[derive(Debug, Serialize)]
struct Ran {
    runs: Vec<RunDocument>,
    /// Jobs that were not started because they, or jobs that exclude them, are already running.
    busy: Vec<String>,
    #[serde(skip)]
    exit: Exit,
}

impl Report for Ran {
    fn command(&self) -> &'static str {
        "run"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn exit(&self) -> Exit {
        self.exit
    }

    fn human(&self, page: &mut Page) {
        if self.runs.is_empty() && self.busy.is_empty() {
            page.line("nothing is due");
        }
        run_table(&self.runs, page);
        for job in &self.busy {
            page.styled(
                Style::Warning,
                &format!("{job} was not begun: it, or a job that excludes it, runs already"),
            );
        }
    }
}

/// Runs jobs until a signal asks it to stop.
fn run_daemon(args: &DaemonArgs, context: &Context) -> Result<Exit, Error> {
    context.output().refuse_json("daemon")?;
    act(&args.file, &args.state, RunMode::Forever, context)?;
    Ok(Exit::Ok)
}

fn run(args: &RunArgs, context: &Context) -> Result<Exit, Error> {
    let mode = if args.due {
        RunMode::Due
    } else {
        RunMode::Jobs(args.jobs.clone())
    };
    let report = act(&args.file, &args.state, mode, context)?;
    context.report(&Ran {
        exit: exit(&report),
        runs: documents(&report.runs, context),
        busy: report.busy,
    })
}

/// The worst exit code.
fn exit(report: &DaemonReport) -> Exit {
    let outcomes = report.runs.iter().map(|run| RunOutcome::from_word(&run.outcome));
    let exits = outcomes.map(|outcome| match outcome {
        Some(RunOutcome::Done) => Exit::Ok,
        Some(RunOutcome::Warnings) => Exit::Warnings,
        Some(RunOutcome::Locked) => Exit::Locked,
        Some(RunOutcome::Damage) => Exit::Damage,
        _ => Exit::Error,
    });
    let busy = report.busy.iter().map(|_| Exit::Locked);
    let order = [Exit::Damage, Exit::Error, Exit::Locked, Exit::Warnings];
    let all: Vec<Exit> = exits.chain(busy).collect();
    order.into_iter().find(|exit| all.contains(exit)).unwrap_or(Exit::Ok)
}

fn act(
    file: &HoldfastFileArgs,
    state: &StateFileArgs,
    mode: RunMode,
    context: &Context,
) -> Result<DaemonReport, Error> {
    let config = file.load(context)?;
    if let RunMode::Jobs(jobs) = &mode
        && let Some(unknown) = jobs.iter().find(|job| config.job(job).is_none())
    {
        return Err(Error::refused(
            Kind::NotFound,
            format!("there is no job {unknown} in {}", file.path(context).display()),
            "holdfast jobs shows those that there are",
        ));
    }
    let program = std::env::current_exe().map_err(|source| Error::File {
        action: "find the program itself,",
        path: "/proc/self/exe".into(),
        source,
    })?;
    let is_forever = mode == RunMode::Forever;
    let service = Service::of(context);
    let request = DaemonRequest {
        config,
        mode,
        state: state.folder(context)?,
        program,
        host: crate::process::kernel::host_name(),
        zone: context.zone().clone(),
        withheld: withheld(),
        watchdog_interval: service.watchdog_interval(),
    };
    let (sender, events) = channel();
    hear_signals(sender.clone(), is_forever)?;
    let log = log_sink(context);
    let reload_log = Arc::clone(&log);
    let path: PathBuf = file.path(context);
    let environment = DaemonEnvironment {
        now: &time::now,
        clock: Arc::clone(context.clock()),
        log,
        summary: &summary,
        reload: &|| match file.load(context) {
            Ok(config) => Some(config),
            Err(error) => {
                let why = error_text(&error);
                let text = format!(
                    "{} is not taken, and the configuration before stays: {why}",
                    path.display()
                );
                reload_log(Severity::Error, &text);
                None
            }
        },
        report_state: &|state| service.report(&state),
        sender,
        events,
    };
    Ok(daemon(request, environment)?)
}

/// Logs to standard error, from any thread.
fn log_sink(context: &Context) -> LogSink {
    let console = context.shared_console();
    let reader = LogReader::of(context);
    let is_quiet = context.is_quiet();
    Arc::new(move |severity, text| {
        if !(is_quiet && severity == Severity::Info) {
            console.text(&service::line(severity, text, reader));
        }
    })
}

/// Variables that are removed from the environment of jobs: those of this process only, and those that repeat
/// settings of the jobs' command lines.
fn withheld() -> Vec<String> {
    let names = [
        environment::REPOSITORY,
        environment::CONFIG,
        environment::NOTIFY_SOCKET,
        environment::WATCHDOG_USEC,
        "WATCHDOG_PID",
        environment::JOURNAL_STREAM,
    ];
    names.map(str::to_owned).to_vec()
}

/// SIGTERM and SIGINT stop the scheduler; SIGHUP reloads the configuration of a daemon; SIGUSR1 requests its
/// status.
fn hear_signals(sender: Sender<DaemonEvent>, is_forever: bool) -> Result<(), Error> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1]).map_err(Error::Signals)?;
    let hear = move || {
        for signal in signals.forever() {
            let event = match signal {
                SIGUSR1 => DaemonEvent::Status,
                SIGHUP if is_forever => DaemonEvent::Reload,
                _ => DaemonEvent::Stop,
            };
            if sender.send(event).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(hear)
        .map(drop)
        .map_err(Error::Signals)
}

/// Records the run of a verb that is not a job of a holdfast.toml in the same journal.
pub(crate) fn note(entry: RunEntry, context: &Context) {
    let state = StateFileArgs { state: None };
    let Ok(folder) = state.folder(context) else { return };
    let noted = std::fs::create_dir_all(&folder)
        .map_err(|source| Error::File {
            action: "create",
            path: folder.clone(),
            source,
        })
        .and_then(|()| {
            let mut journal = holdfast_daemon::JobJournal::new(&folder);
            Ok(journal.append(holdfast_daemon::JournalEntry::Run(entry))?)
        });
    if let Err(error) = noted {
        context
            .console()
            .warning(&format!("the run is not in the journal: {}", error_text(&error)));
    }
}

#[cfg(test)]
mod tests {
    use holdfast_daemon::{DaemonReport, Outcome as RunOutcome, RunEntry, RunReport};

    use super::exit;
    use crate::exit::Exit;

    #[test]
    fn the_worst_of_all_runs_is_the_exit_code() {
        let run = |outcome: &RunOutcome| RunEntry {
            job: "a".to_owned(),
            kind: "gc".to_owned(),
            by: "run".to_owned(),
            start: String::new(),
            end: String::new(),
            duration_ms: 0,
            outcome: outcome.word().to_owned(),
            exit_code: None,
            failed_before: 0,
            retry_at: None,
            error: None,
            lines: Vec::new(),
            result: RunReport::default(),
        };
        let of = |outcomes: &[RunOutcome], busy: &[&str]| {
            exit(&DaemonReport {
                runs: outcomes.iter().map(run).collect(),
                busy: busy.iter().map(|job| (*job).to_owned()).collect(),
            })
        };
        assert_eq!(of(&[], &[]), Exit::Ok);
        assert_eq!(of(&[RunOutcome::Done, RunOutcome::Warnings], &[]), Exit::Warnings);
        assert_eq!(of(&[RunOutcome::Warnings], &["a"]), Exit::Locked);
        assert_eq!(of(&[RunOutcome::TimedOut, RunOutcome::Locked], &[]), Exit::Error);
        assert_eq!(of(&[RunOutcome::Failed, RunOutcome::Damage], &["a"]), Exit::Damage);
    }
}
