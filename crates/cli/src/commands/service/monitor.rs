//! `holdfast monitor`: whether a policy is met and how its pools are, for programs that watch over hosts.

mod check;
mod machines;
mod metrics;

use std::time::Duration;

use holdfast_engine::{MonitorRequest, Providers, check_capacity, check_health, check_snapshots};
use holdfast_policy::sanoid::SanoidConfig;

use crate::args::Example;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::files::sanoid_file::SanoidFileArgs;
use crate::machines::datasets;
use crate::process::time;

pub use check::told as tell_check;

/// Arguments of `monitor`.
#[derive(Debug, clap::Args)]
pub struct MonitorArgs {
    #[command(subcommand)]
    verb: MonitorVerb,
}

#[derive(Debug, clap::Subcommand)]
enum MonitorVerb {
    /// Check that the datasets of a policy have fresh snapshots
    ///
    /// Prints one line, as sanoid --monitor-snapshots does. Exit codes are those of Nagios: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN.
    Snapshots(WatchArgs),
    /// Check that the pools of a policy are healthy
    ///
    /// Prints one line, as sanoid --monitor-health does. Exit codes are those of Nagios: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN.
    Health(WatchArgs),
    /// Check that the pools of a policy have room
    ///
    /// Prints one line, as sanoid --monitor-capacity does. Exit codes are those of Nagios: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN.
    Capacity(WatchArgs),
    /// Check that machines have a fresh snapshot in a repository
    ///
    /// Prints one line. Exit codes are those of Nagios: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN.
    Machines(machines::MachinesArgs),
    /// Print all of that in figures for Prometheus
    Metrics(metrics::MetricsArgs),
}

/// What all of them have.
#[derive(Debug, clap::Args)]
struct WatchArgs {
    #[command(flatten)]
    file: SanoidFileArgs,
    /// How long ZFS may take for its answers, all in all
    #[arg(long, value_name = "SECONDS", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
}

/// What a person may want of it.
const EXAMPLES: &[Example] = &[
    Example {
        wish: "See whether all datasets have fresh snapshots",
        line: "holdfast monitor snapshots /etc/sanoid/sanoid.conf",
    },
    Example {
        wish: "Have Prometheus know, by node_exporter",
        line: "holdfast monitor metrics --output /var/lib/node_exporter/holdfast.prom",
    },
];

const EXAMPLES_SNAPSHOTS: &[Example] = &[Example {
    wish: "See whether all datasets have fresh snapshots",
    line: "holdfast monitor snapshots /etc/sanoid/sanoid.conf",
}];

const EXAMPLES_HEALTH: &[Example] = &[Example {
    wish: "See whether a disk has failed, and wait for a tired pool for 10 seconds",
    line: "holdfast monitor health /etc/sanoid/sanoid.conf --timeout 10",
}];

const EXAMPLES_CAPACITY: &[Example] = &[Example {
    wish: "See whether a pool is fuller than capacity_warn and capacity_crit say",
    line: "holdfast monitor capacity /etc/sanoid/sanoid.conf",
}];

/// What a person may want of its verbs.
pub(in crate::commands) fn examples_of(path: &str) -> &'static [Example] {
    match path {
        "monitor" => EXAMPLES,
        "monitor snapshots" => EXAMPLES_SNAPSHOTS,
        "monitor health" => EXAMPLES_HEALTH,
        "monitor capacity" => EXAMPLES_CAPACITY,
        "monitor machines" => machines::EXAMPLES,
        "monitor metrics" => metrics::EXAMPLES,
        _ => &[],
    }
}

/// Does it.
pub(in crate::commands) fn run(args: &MonitorArgs, context: &Context) -> Result<Exit, Error> {
    match &args.verb {
        MonitorVerb::Snapshots(args) => Ok(check::run("monitor snapshots", args, check_snapshots, context)),
        MonitorVerb::Health(args) => Ok(check::run("monitor health", args, check_health, context)),
        MonitorVerb::Capacity(args) => Ok(check::run("monitor capacity", args, check_capacity, context)),
        MonitorVerb::Machines(args) => Ok(machines::run(args, context)),
        MonitorVerb::Metrics(args) => metrics::run(args, context),
    }
}

impl WatchArgs {
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
