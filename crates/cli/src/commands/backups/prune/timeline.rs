//! Draws past points in time on a text timeline that ends now.
//!
//! Retention keeps many recent snapshots and few old ones. So the scale is logarithmic: each doubling of the age takes
//! the same width. The output is ASCII, so that it can be pasted into a mail or a ticket.

use jiff::SignedDuration;

/// Below the minimum the timeline is unreadable; above the maximum the marks are too far from the names.
const WIDTH_MIN: usize = 60;
const WIDTH_MAX: usize = 120;
/// The width if the output has no line limit.
const WIDTH_DEFAULT: usize = 80;
/// Between the names and the scale.
const GAP: &str = "  ";
const NOW: &str = "now";
/// Ages that get a label on the scale if there is room, in hours, the most important first.
const TICKS: [(i64, &str); 16] = [
    (1, "1h"),
    (24, "1d"),
    (7 * 24, "1w"),
    (30 * 24, "1m"),
    (365 * 24, "1y"),
    (6, "6h"),
    (3 * 24, "3d"),
    (91 * 24, "3m"),
    (5 * 365 * 24, "5y"),
    (12, "12h"),
    (14 * 24, "2w"),
    (182 * 24, "6m"),
    (2 * 365 * 24, "2y"),
    (3, "3h"),
    (2 * 24, "2d"),
    (4 * 24, "4d"),
];
/// Characters between two labels on the scale.
const TICK_GAP: usize = 2;

/// Explains the marks.
pub(super) const LEGEND: &str = "| one, 2-9 so many, # ten or more; finer towards now";

/// Rows of points by age.
#[derive(Debug)]
pub(super) struct Timeline {
    /// The age at the end of the scale.
    pub(super) reach: SignedDuration,
    /// The label of that age.
    pub(super) reach_name: String,
    /// The age above which each doubling takes the same width.
    pub(super) finest: SignedDuration,
    pub(super) rows: Vec<Row>,
}

/// A name and the ages of its points.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) ages: Vec<SignedDuration>,
}

impl Timeline {
    /// The timeline, as wide as the terminal, within bounds.
    pub(super) fn lines(&self, width: Option<usize>) -> Vec<String> {
        let width = width.unwrap_or(WIDTH_DEFAULT).clamp(WIDTH_MIN, WIDTH_MAX);
        let name_width = self.rows.iter().map(|row| row.name.len()).max().unwrap_or_default();
        let scale = Scale::new(self, width.saturating_sub(name_width + GAP.len()));
        let (names, axis) = scale.head(&self.reach_name);
        let head = [("", names), ("", axis)];
        let rows = self.rows.iter().map(|row| (row.name.as_str(), scale.marks(&row.ages)));
        head.into_iter()
            .chain(rows)
            .map(|(name, drawn)| format!("{name:<name_width$}{GAP}{drawn}").trim_end().to_owned())
            .collect()
    }
}

/// The columns of a drawing.
struct Scale {
    /// The age at the beginning of each column, in seconds.
    beginnings: Vec<f64>,
}

impl Scale {
    fn new(timeline: &Timeline, column_count: usize) -> Self {
        let finest = timeline.finest.as_secs_f64();
        let doublings = (timeline.reach.as_secs_f64() / finest).ln_1p();
        // A terminal's width fits into 16 bits.
        let count = u16::try_from(column_count).unwrap_or(u16::MAX);
        let beginning = |column: u16| finest * (doublings * f64::from(column) / f64::from(count)).exp_m1();
        Self {
            beginnings: (0..count).map(beginning).collect(),
        }
    }

    fn width(&self) -> usize {
        self.beginnings.len()
    }

    fn column(&self, age: SignedDuration) -> usize {
        let seconds = age.as_secs_f64();
        self.beginnings
            .partition_point(|beginning| *beginning <= seconds)
            .saturating_sub(1)
    }

    /// The labels of the scale, and the line below them.
    fn head(&self, reach_name: &str) -> (String, String) {
        let end = self.width().saturating_sub(reach_name.len());
        let mut names = vec![b' '; self.width()];
        let mut axis = vec![b'-'; self.width()];
        let mut taken: Vec<(usize, usize)> = Vec::new();
        let ends = [(0, NOW), (end, reach_name)].map(|(column, name)| (column, column, name));
        let ticks = TICKS.map(|(hours, name)| {
            let column = self.column(SignedDuration::from_hours(hours));
            (column, column, name)
        });
        for (column, mark, name) in ends.into_iter().chain(ticks) {
            let (from, to) = (column, column + name.len());
            let is_free =
                |(other_from, other_to): &(usize, usize)| to + TICK_GAP <= *other_from || other_to + TICK_GAP <= from;
            if to > self.width() || !taken.iter().all(is_free) {
                continue;
            }
            names[from..to].copy_from_slice(name.as_bytes());
            axis[mark] = b'+';
            taken.push((from, to));
        }
        axis[end] = b'-';
        for border in [0, self.width() - 1] {
            axis[border] = b'|';
        }
        let text = |bytes: Vec<u8>| bytes.into_iter().map(char::from).collect();
        (text(names), text(axis))
    }

    fn marks(&self, ages: &[SignedDuration]) -> String {
        let mut counts = vec![0_u32; self.width()];
        for age in ages {
            counts[self.column(*age)] += 1;
        }
        let mark = |count: u32| match count {
            0 => ' ',
            1 => '|',
            2..10 => char::from_digit(count, 10).unwrap_or('#'),
            _ => '#',
        };
        counts.into_iter().map(mark).collect()
    }
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;
    use proptest::prelude::*;

    use super::{Row, Timeline};

    fn hours(hours: impl IntoIterator<Item = i64>) -> Vec<SignedDuration> {
        hours.into_iter().map(SignedDuration::from_hours).collect()
    }

    fn timeline() -> Timeline {
        let rows = [
            ("hourly 24/24", hours(0..24)),
            ("daily 14/14", hours((0..14).map(|day| day * 24))),
            ("weekly 13/20", hours((0..13).map(|week| week * 7 * 24))),
            ("within 1d", Vec::new()),
        ];
        Timeline {
            reach: SignedDuration::from_hours(90 * 24),
            reach_name: "90d".to_owned(),
            finest: SignedDuration::from_hours(1),
            rows: rows
                .map(|(name, ages)| Row {
                    name: name.to_owned(),
                    ages,
                })
                .into(),
        }
    }

    #[test]
    fn it_fits_a_narrow_terminal_a_wide_one_and_a_file() {
        assert_eq!(
            timeline().lines(Some(60)),
            [
                "              now        6h      1d    3d   1w  2w   1m  90d",
                "              |----------+-------+-----+----+---+----+-----|",
                "hourly 24/24  |   | | |||||222333|",
                "daily 14/14   |                  |   | | |||||22|",
                "weekly 13/20  |                             |   |  | ||||2|2",
                "within 1d",
            ]
        );
        for (width, expected) in [(None, 80), (Some(80), 80), (Some(120), 120), (Some(200), 120)] {
            assert_eq!(timeline().lines(width)[1].len(), expected);
        }
        assert_eq!(timeline().lines(Some(1)), timeline().lines(Some(60)));
    }

    proptest! {
        /// In every timeline, no line is too wide, no point is missing, and all characters are ASCII.
        #[test]
        fn each_point_has_a_mark(
            width in 0_usize..200,
            reach_days in 1_i64..4000,
            finest_seconds in 60_i64..86_400,
            shares in prop::collection::vec(0.0..=1.0, 0..50),
        ) {
            let reach = SignedDuration::from_hours(reach_days * 24);
            let timeline = Timeline {
                reach,
                reach_name: format!("{reach_days}d"),
                finest: SignedDuration::from_secs(finest_seconds),
                rows: vec![Row { name: "all".to_owned(), ages: shares.iter().map(|share| reach.mul_f64(*share)).collect() }],
            };
            let lines = timeline.lines(Some(width));
            prop_assert!(lines.iter().all(|line| line.is_ascii() && line.len() <= width.clamp(60, 120)), "{lines:#?}");
            prop_assert_eq!(lines[1].len(), width.clamp(60, 120));
            let count = |mark: char| match mark {
                '|' => 1,
                '#' => 10,
                digit => digit.to_digit(10).unwrap_or(0),
            };
            let marked: u32 = lines[2].strip_prefix("all").unwrap().chars().map(count).sum();
            let ages = u32::try_from(shares.len()).unwrap();
            prop_assert!(marked == ages || (lines[2].contains('#') && marked < ages), "{} of {ages}: {lines:#?}", marked);
        }
    }
}
