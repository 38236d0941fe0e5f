//! One line that says where a job stands.

use std::time::Duration;

use holdfast_engine::{Bottleneck, Unit};
use unicode_width::UnicodeWidthStr as _;

use crate::units;

/// Where a job stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgressLine<'a> {
    /// Name of the phase.
    pub phase: &'a str,
    /// What it counts.
    pub unit: Unit,
    /// How much is done.
    pub done: u64,
    /// How much there is, where that is known.
    pub total: Option<u64>,
    /// How much per second.
    pub rate: Option<u64>,
    /// Time left.
    pub left: Option<Duration>,
    /// What it waits for.
    pub bottleneck: Option<Bottleneck>,
}

impl ProgressLine<'_> {
    /// The line in at most `width_max` characters: what matters least goes first when there is no room.
    pub fn render(&self, width_max: Option<usize>) -> String {
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
        let left = self.left.map(|left| format!("{} left", time_left(left)));
        let limit = self.bottleneck.map(|bottleneck| format!("limited by {bottleneck}"));
        // Parts in the order of the line, each with its rank: the highest rank is the first to go.
        let mut parts: Vec<(u8, String)> = [
            (0, Some(self.phase.to_owned())),
            (1, percent),
            (3, Some(done)),
            (4, rate),
            (2, left),
            (5, limit),
        ]
        .into_iter()
        .filter_map(|(rank, part)| part.map(|part| (rank, part)))
        .collect();
        loop {
            let line = parts
                .iter()
                .map(|(_, part)| part.as_str())
                .collect::<Vec<_>>()
                .join("  ");
            if parts.len() == 1 || width_max.is_none_or(|width| line.width() <= width) {
                return line;
            }
            let last = (0..parts.len()).max_by_key(|&index| parts[index].0);
            parts.remove(last.expect("there are two parts or more"));
        }
    }
}

/// A time left, without the fractions that would only flicker.
fn time_left(left: Duration) -> String {
    match left.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        _ => units::duration(left),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use holdfast_engine::{Bottleneck, Unit};

    use super::ProgressLine;

    const GIB: u64 = 1 << 30;

    fn line() -> ProgressLine<'static> {
        ProgressLine {
            phase: "reading vda",
            unit: Unit::Bytes,
            done: 3 * GIB / 2,
            total: Some(4 * GIB),
            rate: Some(120 << 20),
            left: Some(Duration::from_secs(192)),
            bottleneck: Some(Bottleneck::Source),
        }
    }

    #[test]
    fn a_line_says_everything() {
        assert_eq!(
            line().render(None),
            "reading vda  37.5%  1.5 GiB of 4.0 GiB  120 MiB/s  3 m 12 s left  limited by the source"
        );
    }

    #[test]
    fn what_is_not_known_is_not_said() {
        let line = ProgressLine {
            phase: "checking packs",
            unit: Unit::Items,
            done: 1234,
            total: None,
            rate: Some(56),
            left: None,
            bottleneck: None,
        };
        assert_eq!(line.render(None), "checking packs  1,234  56/s");
    }

    #[test]
    fn without_room_the_least_important_goes_first() {
        let render = |width| line().render(Some(width));
        assert_eq!(
            render(70),
            "reading vda  37.5%  1.5 GiB of 4.0 GiB  120 MiB/s  3 m 12 s left"
        );
        assert_eq!(render(60), "reading vda  37.5%  1.5 GiB of 4.0 GiB  3 m 12 s left");
        assert_eq!(render(40), "reading vda  37.5%  3 m 12 s left");
        assert_eq!(render(20), "reading vda  37.5%");
        assert_eq!(render(3), "reading vda");
    }

    #[test]
    fn the_last_minute_counts_whole_seconds() {
        let line = ProgressLine {
            left: Some(Duration::from_secs(17)),
            ..line()
        };
        assert!(line.render(None).contains("  17 s left"));
    }
}
