//! `monitor metrics`: metrics for Prometheus, printed or written to a file for node_exporter's textfile
//! collector.

mod jobs;
mod repository;

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use holdfast_engine::{DatasetFigures, MonitorReport, PoolFigures, monitor};
use holdfast_policy::Timestamp;
use holdfast_policy::sanoid::{Level, percent};
use serde::Serialize;

use super::{AnswerLimitArgs, request};
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::holdfast_file::{HoldfastFileArgs, StateFileArgs};
use crate::context::sanoid_file::{self, SanoidFileArgs};
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::runs;
use crate::output::prometheus::{Metric, MetricValue, exposition};
use crate::output::{Page, Report};
use crate::process::time;

#[derive(Debug, clap::Args)]
pub(super) struct MetricsArgs {
    /// The policy file: a sanoid.conf [default: /etc/sanoid/sanoid.conf]
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    limit: AnswerLimitArgs,
    #[command(flatten)]
    holdfast_file: HoldfastFileArgs,
    #[command(flatten)]
    state: StateFileArgs,
    /// Write them to this file, which is whole at any time, and print nothing
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl Verb for MetricsArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See the figures",
            line: "holdfast monitor metrics /etc/sanoid/sanoid.conf",
        },
        Example {
            wish: "See those of a repository and its machines, too",
            line: "holdfast monitor metrics -r /backup/vms",
        },
        Example {
            wish: "Write them for node_exporter every 5 minutes",
            line: "holdfast monitor metrics --output /var/lib/node_exporter/holdfast.prom",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// The collector runs as another user than root; the file contains no secrets.
const FILE_MODE: u32 = 0o644;

/// Report of `monitor metrics`.
#[derive(Debug, Serialize)]
struct Measured {
    output: Option<String>,
    metrics: Vec<Metric>,
    /// Whether some values could not be determined.
    #[serde(skip)]
    is_unknown: bool,
}

impl Report for Measured {
    fn command(&self) -> &'static str {
        "monitor metrics"
    }

    fn exit(&self) -> Exit {
        if self.is_unknown { Exit::Warnings } else { Exit::Ok }
    }

    fn human(&self, page: &mut Page) {
        if self.output.is_none() {
            exposition(&self.metrics).lines().for_each(|line| page.line(line));
        }
    }
}

fn run(args: &MetricsArgs, context: &Context) -> Result<Exit, Error> {
    let sources = Sources::of(args, context);
    let now = time::now();
    let mut metrics = vec![of_run(now)];
    let mut is_unknown = false;
    if sources.has_policy {
        let (measured, unknown) = of_policy(args, context)?;
        metrics.extend(measured);
        is_unknown = unknown;
    }
    if sources.has_jobs {
        metrics.extend(jobs::of_jobs(&args.holdfast_file, &args.state, now, context)?);
    }
    if sources.has_repository {
        metrics.extend(repository::of_repository(context)?);
    }
    if let Some(path) = &args.output {
        replace(path, &exposition(&metrics))?;
    }
    context.report(&Measured {
        output: args.output.as_ref().map(|path| path.display().to_string()),
        metrics,
        is_unknown,
    })
}

/// The sources of metrics.
#[derive(Debug, Clone, Copy)]
struct Sources {
    has_policy: bool,
    has_jobs: bool,
    has_repository: bool,
}

impl Sources {
    /// The sources that the command line names; without any, all that exist at the default paths; without those either,
    /// the policy, whose error names the missing file.
    fn of(args: &MetricsArgs, context: &Context) -> Self {
        let named = Self {
            has_policy: args.file.is_some(),
            has_jobs: args.holdfast_file.config.is_some(),
            has_repository: context.is_repository_named(),
        };
        if named.has_policy || named.has_jobs || named.has_repository {
            return named;
        }
        let has_jobs = args.holdfast_file.path(context).exists();
        let has_repository = context.repository().is_ok();
        Self {
            has_policy: Path::new(sanoid_file::SANOID_CONF).exists() || !(has_jobs || has_repository),
            has_jobs,
            has_repository,
        }
    }
}

/// Metrics of a policy, and whether some values could not be determined.
fn of_policy(args: &MetricsArgs, context: &Context) -> Result<(Vec<Metric>, bool), Error> {
    let config = sanoid_file::parse(&SanoidFileArgs {
        file: args.file.clone().unwrap_or_else(|| sanoid_file::SANOID_CONF.into()),
    })?;
    let providers = args.limit.providers(context);
    let request = request(&providers, &config);
    let report = monitor(&request);
    let checks = [&report.snapshots, &report.health, &report.capacity];
    let is_unknown = checks.iter().any(|check| check.level == Level::Unknown);
    for check in checks.iter().filter(|check| check.level == Level::Unknown) {
        context.console().note(&check.line);
    }
    Ok((metrics(&report, request.now), is_unknown))
}

/// Replaces a file atomically: readers get the old or the new text. It need not survive a power failure.
fn replace(path: &Path, text: &str) -> Result<(), Error> {
    let failed = |source| Error::File {
        action: "write",
        path: path.to_owned(),
        source,
    };
    let name = path
        .file_name()
        .ok_or_else(|| failed(std::io::ErrorKind::IsADirectory.into()))?;
    // The collector reads files that end in .prom.
    let partial = format!(".{}.{:08x}.partial", name.to_string_lossy(), runs::new_run()?);
    let partial = path.with_file_name(partial);
    let mut options = File::options();
    let written = options
        .write(true)
        .create_new(true)
        .mode(FILE_MODE)
        .open(&partial)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .and_then(|()| std::fs::rename(&partial, path));
    if written.is_err() {
        std::fs::remove_file(&partial).ok();
    }
    written.map_err(failed)
}

fn of_run(now: Timestamp) -> Metric {
    let mut run = Metric::new(
        "holdfast_monitor_last_run_timestamp_seconds",
        "When these figures were found out.",
    );
    run.add(&[], MetricValue::Whole(seconds(now)));
    run
}

fn metrics(report: &MonitorReport, now: Timestamp) -> Vec<Metric> {
    let mut levels = Metric::new(
        "holdfast_check_level",
        "What the check says: 0 OK, 1 warning, 2 critical, 3 unknown.",
    );
    let checks = [
        ("snapshots", &report.snapshots),
        ("health", &report.health),
        ("capacity", &report.capacity),
    ];
    for (name, check) in checks {
        levels.add(&[("check", name)], MetricValue::Whole(check.level.code().into()));
    }
    let mut all = vec![levels];
    all.extend(of_datasets(&report.datasets));
    all.extend(of_snapshots(&report.datasets, now));
    all.extend(of_pools(&report.pools));
    all
}

fn seconds(time: Timestamp) -> u64 {
    u64::try_from(time.as_second()).unwrap_or_default()
}

fn of_datasets(datasets: &[DatasetFigures]) -> [Metric; 4] {
    let mut met = Metric::new(
        "holdfast_policy_met",
        "1 where the snapshots of a dataset are as fresh as its policy says, else 0.",
    );
    let mut used = Metric::new(
        "holdfast_dataset_used_bytes",
        "What a dataset takes, with its snapshots and what is below it.",
    );
    let mut snapshots = Metric::new(
        "holdfast_dataset_snapshots_used_bytes",
        "Bytes used only by the snapshots of a dataset.",
    );
    let mut available = Metric::new("holdfast_dataset_available_bytes", "What is free for a dataset.");
    for dataset in datasets {
        let labels = [("dataset", &dataset.dataset[..])];
        let add = |metric: &mut Metric, value: Option<u64>| {
            if let Some(value) = value {
                metric.add(&labels, MetricValue::Whole(value));
            }
        };
        add(&mut met, dataset.is_fresh.map(u64::from));
        let Some(state) = &dataset.state else { continue };
        add(&mut used, state.used_bytes);
        add(&mut snapshots, state.snapshots_bytes);
        add(&mut available, state.available_bytes);
    }
    [met, used, snapshots, available]
}

fn of_snapshots(datasets: &[DatasetFigures], now: Timestamp) -> [Metric; 4] {
    let mut count = Metric::new("holdfast_snapshots", "How many snapshots of a type there are.");
    let mut newest = Metric::new(
        "holdfast_snapshot_newest_timestamp_seconds",
        "When the newest snapshot of a type was taken.",
    );
    let mut age = Metric::new(
        "holdfast_snapshot_newest_age_seconds",
        "How old the newest snapshot of a type was when these figures were found out.",
    );
    let mut used = Metric::new(
        "holdfast_snapshot_used_bytes",
        "What each snapshot of a type takes for itself alone, added up.",
    );
    for dataset in datasets {
        for figures in &dataset.types {
            let labels = [("dataset", &dataset.dataset[..]), ("type", figures.kind.name())];
            count.add(&labels, MetricValue::Whole(figures.count));
            used.add(&labels, MetricValue::Whole(figures.used_bytes));
            if let Some(time) = figures.newest {
                newest.add(&labels, MetricValue::Whole(seconds(time)));
                age.add(&labels, MetricValue::Whole(seconds(now).saturating_sub(seconds(time))));
            }
        }
    }
    [count, newest, age, used]
}

/// States that are exported with the value 0 as well, so that alerts find the series from the start.
const STATES: [&str; 6] = ["ONLINE", "DEGRADED", "FAULTED", "OFFLINE", "REMOVED", "UNAVAIL"];

fn of_pools(pools: &[PoolFigures]) -> [Metric; 5] {
    let mut health = Metric::new(
        "holdfast_pool_health",
        "1 for the state in which a pool is, 0 for the others.",
    );
    let mut used = Metric::new("holdfast_pool_used_ratio", "How full a pool is, of 1.");
    let mut size = Metric::new("holdfast_pool_size_bytes", "The size of a pool.");
    let mut allocated = Metric::new("holdfast_pool_allocated_bytes", "What of a pool is in use.");
    let mut free = Metric::new("holdfast_pool_free_bytes", "What of a pool is free.");
    for PoolFigures { state, room } in pools {
        let pool = ("pool", &state.name[..]);
        let other = Some(&state.health[..]).filter(|health| !STATES.contains(health));
        for word in STATES.into_iter().chain(other) {
            health.add(
                &[pool, ("state", word)],
                MetricValue::Whole((word == state.health).into()),
            );
        }
        if let Some(percent) = percent(&state.capacity) {
            used.add(&[pool], MetricValue::Real(f64::from(percent) / 100.0));
        }
        if let Some(room) = room {
            size.add(&[pool], MetricValue::Whole(room.size_bytes));
            allocated.add(&[pool], MetricValue::Whole(room.allocated_bytes));
            free.add(&[pool], MetricValue::Whole(room.free_bytes));
        }
    }
    [health, used, size, allocated, free]
}
