//! `holdfast monitor`: checks policies and pools, for monitoring systems.

mod check;
mod machines;
mod metrics;

use std::time::Duration;

use holdfast_engine::{MonitorRequest, Providers, check_capacity, check_health, check_snapshots};
use holdfast_policy::sanoid::SanoidConfig;

use crate::args::{Example, SharedOptions, VerbEntry};
use crate::commands::verb::{Verb, VerbSet, verbs};
use crate::context::Context;
use crate::context::sanoid_file::SanoidFileArgs;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::datasets;
use crate::process::time;

pub use check::unknown_line;

/// Arguments of `monitor`.
#[derive(Debug, clap::Args)]
pub(crate) struct MonitorArgs {
    #[command(subcommand)]
    verb: MonitorVerb,
}

verbs! {
    enum MonitorVerb {
        /// Check that the datasets of a policy have recent snapshots
        ///
        /// Prints one line, as sanoid --monitor-snapshots does. Exit codes are those of Nagios: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN.
        "snapshots" => Snapshots(CheckSnapshotsArgs),
        /// Check that the pools of a policy are healthy
        ///
        /// Prints one line, as sanoid --monitor-health does. Exit codes are those of Nagios: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN.
        "health" => Health(HealthArgs),
        /// Check that the pools of a policy have free space
        ///
        /// Prints one line, as sanoid --monitor-capacity does. Exit codes are those of Nagios: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN.
        "capacity" => Capacity(CapacityArgs),
        /// Check that machines have recent snapshots in a repository
        ///
        /// Prints one line. Exit codes are those of Nagios: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN.
        "machines" => Machines(machines::MonitorMachinesArgs),
        /// Print metrics for Prometheus
        "metrics" => Metrics(metrics::MetricsArgs),
    }
}

/// Arguments of `monitor snapshots`.
#[derive(Debug, clap::Args)]
struct CheckSnapshotsArgs {
    #[command(flatten)]
    watch: WatchArgs,
}

/// Arguments of `monitor health`.
#[derive(Debug, clap::Args)]
struct HealthArgs {
    #[command(flatten)]
    watch: WatchArgs,
}

/// Arguments of `monitor capacity`.
#[derive(Debug, clap::Args)]
struct CapacityArgs {
    #[command(flatten)]
    watch: WatchArgs,
}

/// What checks of a policy have in common.
#[derive(Debug, clap::Args)]
struct WatchArgs {
    #[command(flatten)]
    file: SanoidFileArgs,
    #[command(flatten)]
    limit: AnswerLimitArgs,
}

/// How long ZFS may take.
#[derive(Debug, clap::Args)]
struct AnswerLimitArgs {
    /// Total time limit for the answers of ZFS
    #[arg(long, value_name = "SECONDS", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
}

impl Verb for MonitorArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See whether all datasets have fresh snapshots",
            line: "holdfast monitor snapshots /etc/sanoid/sanoid.conf",
        },
        Example {
            wish: "Write metrics for Prometheus's node_exporter",
            line: "holdfast monitor metrics --output /var/lib/node_exporter/holdfast.prom",
        },
    ];
    const BELOW: &'static [VerbEntry] = MonitorVerb::TABLE;

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        self.verb.run(context)
    }
}

impl Verb for CheckSnapshotsArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "See whether all datasets have fresh snapshots",
        line: "holdfast monitor snapshots /etc/sanoid/sanoid.conf",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        Ok(check::run("monitor snapshots", &self.watch, check_snapshots, context))
    }
}

impl Verb for HealthArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "See whether a disk has failed; wait up to 10 seconds for the pool",
        line: "holdfast monitor health /etc/sanoid/sanoid.conf --timeout 10",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        Ok(check::run("monitor health", &self.watch, check_health, context))
    }
}

impl Verb for CapacityArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "See whether a pool is fuller than capacity_warn and capacity_crit say",
        line: "holdfast monitor capacity /etc/sanoid/sanoid.conf",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        Ok(check::run("monitor capacity", &self.watch, check_capacity, context))
    }
}

impl AnswerLimitArgs {
    fn providers(&self, context: &Context) -> Providers {
        let tools = datasets::tools_until(context, Duration::from_secs(self.timeout));
        datasets::providers_of(&tools, context)
    }
}

fn request<'a>(providers: &'a Providers, config: &'a SanoidConfig) -> MonitorRequest<'a> {
    MonitorRequest {
        providers,
        config,
        now: time::now(),
    }
}
