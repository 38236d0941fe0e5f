//! Simulations of taking and pruning: known calendars as text files in `tests/simulations`, and properties of all
//! simulations.
//!
//! A file has two parts, with `---` between them: one line each for `zone NAME`, `start TIME`, `days N`, `every
//! CALENDAR` and the rules; and the expected result. `#` begins a comment. With HOLDFAST_UPDATE_SNAPSHOTS=1 the result
//! is written, and must be reviewed.

#![allow(clippy::disallowed_methods, reason = "a test writes its own files")]

use std::fmt::Write as _;
use std::path::Path;

use holdfast_policy::{
    Calendar, Candidate, KeptPoint, Policy, Protection, Pruning, Scenario, Simulation, SimulationError, TimeZone,
    Timestamp, plan, simulate,
};
use jiff::SignedDuration;
use proptest::prelude::*;

#[derive(Debug)]
struct Case {
    zone: TimeZone,
    start: Timestamp,
    day_count: u32,
    calendar: Calendar,
    policy: Policy,
}

impl Case {
    fn parse(head: &str) -> Self {
        let mut case = Self {
            zone: TimeZone::UTC,
            start: Timestamp::UNIX_EPOCH,
            day_count: 0,
            calendar: "daily".parse().unwrap(),
            policy: Policy::default(),
        };
        for line in head.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (key, value) = line.split_once(' ').unwrap();
            match key {
                "zone" => case.zone = TimeZone::get(value).unwrap(),
                "start" => case.start = value.parse().unwrap(),
                "days" => case.day_count = value.parse().unwrap(),
                "every" => case.calendar = value.parse().unwrap(),
                "keep-last" => case.policy.keep_last = Some(value.parse().unwrap()),
                "keep-hourly" => case.policy.keep_hourly = Some(value.parse().unwrap()),
                "keep-daily" => case.policy.keep_daily = Some(value.parse().unwrap()),
                "keep-weekly" => case.policy.keep_weekly = Some(value.parse().unwrap()),
                "keep-monthly" => case.policy.keep_monthly = Some(value.parse().unwrap()),
                "keep-within" => case.policy.keep_within = Some(value.parse().unwrap()),
                _ => panic!("unknown line: {line}"),
            }
        }
        case
    }

    fn simulate(&self, pruning: Pruning) -> Result<Simulation, SimulationError> {
        simulate(&Scenario {
            policy: &self.policy,
            calendar: &self.calendar,
            zone: &self.zone,
            start: self.start,
            day_count: self.day_count,
            pruning,
        })
    }
}

fn local(time: Timestamp, zone: &TimeZone) -> String {
    time.to_zoned(zone.clone()).strftime("%Y-%m-%dT%H:%M%:z").to_string()
}

fn render(case: &Case) -> String {
    let each = case.simulate(Pruning::AfterEach).unwrap();
    let daily = case.simulate(Pruning::Daily).unwrap();
    let mut text = String::new();
    writeln!(text, "end {}", local(each.end, &case.zone)).unwrap();
    let (count_max, count_max_daily) = (each.count_max, daily.count_max);
    let taken_count = each.taken_count;
    writeln!(
        text,
        "taken {taken_count}, at most {count_max}, pruned daily {count_max_daily}"
    )
    .unwrap();
    let counts: Vec<String> = each.days.iter().map(|day| day.count.to_string()).collect();
    writeln!(text, "at the ends of days {}", counts.join(" ")).unwrap();
    for band in each.bands() {
        let gap = band.gap_max.map_or("-".to_owned(), |gap| format!("{gap:#}"));
        writeln!(text, "band {:#} to {:#}: {}, gap {gap}", band.from, band.to, band.count).unwrap();
    }
    for KeptPoint { time, gap, reasons, .. } in &each.points {
        let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
        let time = local(*time, &case.zone);
        writeln!(text, "{time} gap {:<9} {}", format!("{gap:#}"), reasons.join("; ")).unwrap();
    }
    text
}

#[test]
fn the_simulation_keeps_the_documented_snapshots() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/simulations");
    let is_update = std::env::var_os("HOLDFAST_UPDATE_SNAPSHOTS").is_some();
    let mut case_count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let (head, expected) = text.split_once("---\n").unwrap();
        let actual = render(&Case::parse(head));
        if is_update {
            std::fs::write(&path, format!("{head}---\n{actual}")).unwrap();
        } else {
            let path = path.display();
            assert!(
                actual == expected,
                "{path}\n== expected\n{expected}\n== actual\n{actual}"
            );
        }
        case_count += 1;
    }
    assert!(case_count >= 5, "only {case_count} files were found");
}

#[test]
fn invalid_requests_are_refused() {
    let head = "zone UTC\nstart 2026-01-01T00:00:00Z\nkeep-last 3\n";
    let error = |more: &str| {
        let error = Case::parse(&format!("{head}{more}"))
            .simulate(Pruning::Daily)
            .unwrap_err();
        error.to_string()
    };
    assert_eq!(error("days 0"), "0 days cannot be simulated: from 1 to 3660 can");
    assert_eq!(error("days 3661"), "3661 days cannot be simulated: from 1 to 3660 can");
    let too_many = "*-*-* *:*:* in 30 days is more than 200000 snapshots";
    assert_eq!(error("days 30\nevery *:*:*"), too_many);
    let end = error("days 3660\nstart 9998-01-01T00:00:00Z");
    assert_eq!(
        end,
        "3660 days from 9998-01-01T00:00:00Z on end after the last day of the calendar"
    );
}

#[test]
fn a_calendar_without_dates_takes_no_snapshot() {
    let head = "zone UTC\nstart 2026-01-01T00:00:00Z\nkeep-last 3\ndays 5\nevery *-02-30";
    let simulation = Case::parse(head).simulate(Pruning::AfterEach).unwrap();
    assert_eq!(
        (simulation.taken_count, simulation.points.len(), simulation.reach()),
        (0, 0, None)
    );
    assert_eq!(simulation.bands(), []);
    assert_eq!(simulation.days.len(), 5);
}

fn cases() -> impl Strategy<Value = Case> {
    let count = || prop::option::weighted(0.5, 0_u32..6);
    let calendar = prop_oneof![
        Just("daily"),
        Just("hourly"),
        Just("*:0/30"),
        Just("Mon..Fri 02:30"),
        Just("*-*-1..10 00/5:15")
    ];
    // Around both clock changes in Berlin.
    let start = prop_oneof![Just("2026-03-20T12:00:00Z"), Just("2026-10-15T12:00:00Z")];
    (
        count(),
        count(),
        count(),
        count(),
        prop::option::of(Just("2d")),
        calendar,
        start,
        1_u32..30,
    )
        .prop_map(
            |(keep_last, keep_hourly, keep_daily, keep_weekly, within, calendar, start, day_count)| Case {
                zone: TimeZone::get("Europe/Berlin").unwrap(),
                start: start.parse().unwrap(),
                day_count,
                calendar: calendar.parse().unwrap(),
                policy: Policy {
                    keep_last,
                    keep_hourly,
                    keep_daily,
                    keep_weekly,
                    keep_within: within.map(|text| text.parse().unwrap()),
                    ..Policy::default()
                },
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

    /// Pruning after each snapshot or once a day leaves the same as pruning all snapshots once at the end.
    #[test]
    fn repeated_prunes_keep_the_same_as_one_final_prune(case in cases()) {
        let each = case.simulate(Pruning::AfterEach).unwrap();
        let daily = case.simulate(Pruning::Daily).unwrap();
        prop_assert_eq!(&each.points, &daily.points);
        prop_assert!(each.count_max <= daily.count_max);
        let taken: Vec<Candidate> = case
            .calendar
            .instants_after(case.start, &case.zone)
            .take_while(|time| *time <= each.end)
            .map(|time| Candidate { time, id: String::new(), tags: Vec::new(), protection: Protection::None })
            .collect();
        prop_assert_eq!(each.taken_count, taken.len() as u64);
        let at_once = plan(&case.policy, &taken, each.end, &case.zone);
        let expected: Vec<Timestamp> = at_once.kept().map(|kept| kept.time).collect();
        let points: Vec<Timestamp> = each.points.iter().map(|point| point.time).collect();
        prop_assert_eq!(points, expected);
    }

    /// Ages grow, gaps add up to ages, bands count each point once, and the last day agrees with the points.
    #[test]
    fn the_numbers_of_a_simulation_are_consistent(case in cases()) {
        let simulation = case.simulate(Pruning::AfterEach).unwrap();
        let mut age = SignedDuration::ZERO;
        for point in &simulation.points {
            age += point.gap;
            prop_assert_eq!(point.age, age);
            prop_assert_eq!(simulation.end.duration_since(point.time), age);
        }
        prop_assert_eq!(simulation.reach(), simulation.points.last().map(|_| age));
        let bands = simulation.bands();
        prop_assert_eq!(bands.iter().map(|band| band.count).sum::<u64>(), simulation.points.len() as u64);
        let gap_max = simulation.points.iter().map(|point| point.gap).max();
        prop_assert_eq!(bands.iter().filter_map(|band| band.gap_max).max(), gap_max);
        prop_assert_eq!(bands.last().map(|band| band.to), simulation.reach());
        let last = simulation.days.last().unwrap();
        prop_assert_eq!(last.end, simulation.end);
        prop_assert_eq!(last.count, simulation.points.len() as u64);
        prop_assert_eq!(last.oldest, simulation.points.last().map(|point| point.time));
        prop_assert_eq!(simulation.days.len(), usize::try_from(case.day_count).unwrap());
    }
}
