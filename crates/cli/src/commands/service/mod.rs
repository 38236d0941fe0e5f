//! Verbs of the scheduler, and those that monitor.

mod config;
pub(crate) mod daemon;
mod jobs;
mod monitor;
mod notify;
mod runs;

pub use monitor::tell_check;

use crate::commands::verb::verbs;

verbs! {
    pub(crate) enum ServiceVerb {
        /// Do the jobs of a holdfast.toml whenever they are due, until it is stopped
        "daemon" => Daemon(daemon::DaemonArgs),
        /// Do jobs of a holdfast.toml now
        "run" => Run(daemon::RunArgs),
        /// List the jobs of a holdfast.toml: when they run next, and how they went
        "jobs" => Jobs(jobs::JobsArgs),
        /// List what ran, and how it ended
        "runs" => Runs(runs::RunsArgs),
        /// Send a test message to somebody of a holdfast.toml
        "notify" => Notify(notify::NotifyArgs),
        /// Check whether a policy is met, and how its pools are, for Nagios and Prometheus
        "monitor" => Monitor(monitor::MonitorArgs),
        /// Check a configuration, and show what it means
        "config" => Config(config::ConfigArgs),
    }
}
