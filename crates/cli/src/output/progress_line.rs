//! The progress line.

use std::time::Duration;

use holdfast_engine::{Bottleneck, Unit};
use unicode_width::UnicodeWidthStr as _;

use crate::units;

/// The progress of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgressLine<'a> {
    /// Which of several machines or disks it is.
    pub part: Option<Part>,
    /// Name of the phase.
    pub phase: &'a str,
    /// The unit of the numbers.
    pub unit: Unit,
    /// The amount done.
    pub done: u64,
    /// The total amount, if known.
    pub total: Option<u64>,
    /// Amount per second.
    pub rate: Option<u64>,
    /// Time since the job began.
    pub elapsed: Duration,
    /// Estimated time until the phase ends.
    pub left: Option<Duration>,
    /// The bottleneck.
    pub bottleneck: Option<Bottleneck>,
}

/// A job's position among several of one command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The position, from 1.
    pub number: usize,
    /// The number of jobs.
    pub count: usize,
}

/// Characters of a bar, without its brackets.
const BAR_WIDTH: usize = 20;

/// The bar on a terminal.
fn bar(done: u64, total: u64) -> String {
    let filled = (u128::from(done.min(total)) * BAR_WIDTH as u128).checked_div(u128::from(total));
    let filled = filled
        .and_then(|filled| usize::try_from(filled).ok())
        .unwrap_or(BAR_WIDTH);
    format!("[{}{}]", "#".repeat(filled), "-".repeat(BAR_WIDTH - filled))
}

impl ProgressLine<'_> {
    /// The full line for a file, without a bar.
    pub fn in_full(&self) -> String {
        self.join(self.parts())
    }

    /// The line in at most `width` characters; the least important parts are dropped first.
    pub fn fit(&self, width: usize) -> String {
        let mut parts = self.parts();
        if let Some(total) = self.total {
            parts.insert(1, (5, bar(self.done, total)));
        }
        loop {
            let line = self.join(parts.clone());
            if parts.len() == 1 || line.width() <= width {
                return line;
            }
            let last = (0..parts.len()).max_by_key(|&index| parts[index].0);
            parts.remove(last.expect("there are two parts or more"));
        }
    }

    fn join(&self, parts: Vec<(u8, String)>) -> String {
        let parts: Vec<String> = parts.into_iter().map(|(_, part)| part).collect();
        let line = parts.join("  ");
        match self.part {
            Some(part) => format!("{} of {}: {line}", part.number, part.count),
            None => line,
        }
    }

    /// The parts of the line, each with its rank: the highest rank is dropped first.
    fn parts(&self) -> Vec<(u8, String)> {
        let amount = |amount| match self.unit {
            Unit::Bytes => units::bytes(amount),
            Unit::Items => units::count(amount),
        };
        let percent = self.total.map(|total| units::percent(self.done, total));
        let done = match self.total {
            Some(total) => format!("{} of {}", amount(self.done), amount(total)),
            None => amount(self.done),
        };
        let rate = self.rate.map(|rate| format!("{}/s", amount(rate)));
        let left = self.left.map(|left| format!("{} left", whole_seconds(left)));
        let limit = self.bottleneck.map(|bottleneck| format!("limited by {bottleneck}"));
        let elapsed = (self.elapsed.as_secs() > 0).then(|| format!("{} elapsed", whole_seconds(self.elapsed)));
        [
            (0, Some(self.phase.to_owned())),
            (1, percent),
            (3, Some(done)),
            (4, rate),
            (7, elapsed),
            (2, left),
            (6, limit),
        ]
        .into_iter()
        .filter_map(|(rank, part)| part.map(|part| (rank, part)))
        .collect()
    }
}

/// A time without fractions, which would only flicker.
fn whole_seconds(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds => units::duration(Duration::from_secs(seconds)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use holdfast_engine::{Bottleneck, Unit};

    use super::{Part, ProgressLine, bar};

    const GIB: u64 = 1 << 30;

    fn line() -> ProgressLine<'static> {
        ProgressLine {
            part: None,
            phase: "reading vda",
            unit: Unit::Bytes,
            done: 3 * GIB / 2,
            total: Some(4 * GIB),
            rate: Some(120 << 20),
            elapsed: Duration::from_millis(12_800),
            left: Some(Duration::from_secs(192)),
            bottleneck: Some(Bottleneck::Source),
        }
    }

    #[test]
    fn a_line_says_everything() {
        assert_eq!(
            line().in_full(),
            "reading vda  37.5%  1.5 GiB of 4.0 GiB  120 MiB/s  12 s elapsed  3 m 12 s left  limited by the source"
        );
        let second = ProgressLine {
            part: Some(Part { number: 2, count: 5 }),
            ..line()
        };
        assert!(second.in_full().starts_with("2 of 5: reading vda  37.5%  "));
    }

    #[test]
    fn what_is_not_known_is_not_said() {
        let line = ProgressLine {
            part: None,
            phase: "checking packs",
            unit: Unit::Items,
            done: 1234,
            total: None,
            rate: Some(56),
            elapsed: Duration::ZERO,
            left: None,
            bottleneck: None,
        };
        assert_eq!(line.in_full(), "checking packs  1,234  56/s");
        assert_eq!(line.fit(200), line.in_full());
    }

    #[test]
    fn without_room_the_least_important_goes_first() {
        assert_eq!(
            line().fit(200),
            "reading vda  [#######-------------]  37.5%  1.5 GiB of 4.0 GiB  120 MiB/s  12 s elapsed  3 m 12 s left  limited by the source"
        );
        assert_eq!(
            line().fit(94),
            "reading vda  [#######-------------]  37.5%  1.5 GiB of 4.0 GiB  120 MiB/s  3 m 12 s left"
        );
        assert_eq!(
            line().fit(70),
            "reading vda  37.5%  1.5 GiB of 4.0 GiB  120 MiB/s  3 m 12 s left"
        );
        assert_eq!(line().fit(60), "reading vda  37.5%  1.5 GiB of 4.0 GiB  3 m 12 s left");
        assert_eq!(line().fit(40), "reading vda  37.5%  3 m 12 s left");
        assert_eq!(line().fit(20), "reading vda  37.5%");
        assert_eq!(line().fit(3), "reading vda");
    }

    #[test]
    fn a_bar_is_as_full_as_the_work_is_done() {
        assert_eq!(bar(0, 10), format!("[{}]", "-".repeat(20)));
        assert_eq!(bar(5, 10), format!("[{}{}]", "#".repeat(10), "-".repeat(10)));
        assert_eq!(bar(u64::MAX, u64::MAX), format!("[{}]", "#".repeat(20)));
        assert_eq!(bar(0, 0), format!("[{}]", "#".repeat(20)));
        assert_eq!(bar(11, 10), format!("[{}]", "#".repeat(20)));
    }

    #[test]
    fn the_last_minute_counts_whole_seconds() {
        let line = ProgressLine {
            left: Some(Duration::from_secs(17)),
            ..line()
        };
        assert!(line.in_full().contains("  17 s left"));
    }
}
