//! Options of `backup` that limit the load of reading on a machine, and the report about that load.

use std::num::NonZeroU64;
use std::time::Duration;

use holdfast_engine::{Limits, Load};
use serde::Serialize;

use crate::args::parse_rate;
use crate::units::{self, micros};

/// What reading may cost a machine and its host.
#[derive(Debug, clap::Args)]
pub(crate) struct LimitArgs {
    /// Read at most this many bytes per second from the machine (50M)
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    bwlimit: Option<NonZeroU64>,
    /// Give up when old data in the scratch folder exceeds this size, or when its file system is nearly full
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    scratch_max: Option<u64>,
    /// Slow down while the machine's writes take longer than this on average (over one second)
    #[arg(long, value_name = "MS")]
    max_latency: Option<NonZeroU64>,
}

impl LimitArgs {
    /// The first of these options that was given.
    pub(super) fn given(&self) -> Option<&'static str> {
        self.bwlimit.map(|_| "--bwlimit").or_else(|| self.of_guests())
    }

    /// The first of these options that was given and applies to guests only.
    pub(super) fn of_guests(&self) -> Option<&'static str> {
        let given = [
            (self.scratch_max.is_some(), "--scratch-max"),
            (self.max_latency.is_some(), "--max-latency"),
        ];
        given.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name)
    }

    pub(super) fn limits(&self) -> Limits {
        Limits {
            bytes_per_second: self.bwlimit,
            scratch_bytes_max: self.scratch_max,
            write_latency_max: self.max_latency.map(|millis| Duration::from_millis(millis.get())),
        }
    }
}

/// The load that reading put on a machine.
#[derive(Debug, Serialize)]
pub(super) struct LoadDocument {
    write_latency_before_us: Option<u64>,
    write_latency_us: Option<u64>,
    write_latency_highest_us: Option<u64>,
    slowed_count: u32,
    waited_ms: u64,
    scratch_bytes: u64,
    #[serde(skip)]
    is_waiting: bool,
}

impl LoadDocument {
    pub(super) fn new(load: &Load, duration: Duration) -> Self {
        Self {
            write_latency_before_us: load.latency_before.map(micros),
            write_latency_us: load.latency_meanwhile.map(micros),
            write_latency_highest_us: load.latency_highest.map(micros),
            slowed_count: load.slowed_count,
            waited_ms: units::millis(load.waited),
            scratch_bytes: load.scratch_bytes,
            is_waiting: load.waited > duration / 2,
        }
    }

    /// The limit that slowed the backup down as requested, if any.
    pub(super) fn limit(&self) -> Option<&'static str> {
        match (self.is_waiting, self.slowed_count) {
            (false, _) => None,
            (true, 0) => Some("--bwlimit"),
            (true, _) => Some("--max-latency"),
        }
    }

    /// The lines of the report; empty if nothing was measured.
    pub(super) fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let time = |us: u64| match us {
            0..1000 => format!("{us} us"),
            _ => format!("{}.{} ms", us / 1000, us % 1000 / 100),
        };
        if let Some(meanwhile) = self.write_latency_us {
            let highest = self.write_latency_highest_us.filter(|highest| *highest > meanwhile);
            let highest = highest.map(|highest| format!(", {} in the worst second", time(highest)));
            let before = self
                .write_latency_before_us
                .map(|before| match meanwhile.saturating_sub(before) {
                    0 => format!(" ({} before)", time(before)),
                    added => format!(" ({} before; the backup added {})", time(before), time(added)),
                });
            let line = [
                Some(format!("  average write latency {} during the backup", time(meanwhile))),
                highest,
                before,
            ];
            let line: String = line.into_iter().flatten().collect();
            lines.push(line);
        }
        if self.slowed_count > 0 {
            let times = units::counted(self.slowed_count.into(), "time", "times");
            lines.push(format!("  read slower for that, {times}"));
        }
        if self.scratch_bytes > 0 {
            lines.push(format!(
                "  scratch files took {} at most",
                units::bytes(self.scratch_bytes)
            ));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use holdfast_engine::Load;

    use super::LoadDocument;
    use crate::args::parse_rate;

    #[test]
    fn what_is_known_is_reported() {
        let second = Duration::from_secs(1);
        assert_eq!(LoadDocument::new(&Load::default(), second).lines(), [] as [&str; 0]);
        let load = Load {
            latency_before: Some(Duration::from_micros(400)),
            latency_meanwhile: Some(Duration::from_micros(1500)),
            latency_highest: Some(Duration::from_millis(30)),
            slowed_count: 1,
            waited: second * 3 / 4,
            scratch_bytes: 1 << 20,
        };
        let document = LoadDocument::new(&load, second);
        assert_eq!(
            document.lines(),
            [
                "  average write latency 1.5 ms during the backup, 30.0 ms in the worst second (400 us before; the backup added 1.1 ms)",
                "  read slower for that, 1 time",
                "  scratch files took 1.0 MiB at most",
            ]
        );
        assert_eq!(document.limit(), Some("--max-latency"));
    }

    #[test]
    fn a_rate_of_nothing_is_refused() {
        assert_eq!(parse_rate("50M").unwrap().get(), 50 << 20);
        assert!(parse_rate("0").is_err() && parse_rate("fast").is_err());
    }
}
