//! Verbs of the scheduler, and of monitoring.

mod config;
pub(crate) mod daemon;
mod jobs;
mod monitor;
mod notify;
mod runs;

pub use monitor::unknown_line;

use crate::commands::verb::verbs;

verbs! {
    pub(crate) enum ServiceVerb {
        /// Run the jobs of holdfast.toml on schedule
        "daemon" => Daemon(daemon::DaemonArgs),
        /// Run jobs of holdfast.toml now
        "run" => Run(daemon::RunArgs),
        /// List the jobs of holdfast.toml, their last and next runs
        "jobs" => Jobs(jobs::JobsArgs),
        /// List past runs and their results
        "runs" => Runs(runs::RunsArgs),
        /// Send a test notification
        "notify" => Recipient(notify::NotifyArgs),
        /// Check snapshots, pools and backups for Nagios and Prometheus
        "monitor" => Monitor(monitor::MonitorArgs),
        /// Check a configuration, or show what it means
        "config" => Config(config::ConfigArgs),
    }
}
