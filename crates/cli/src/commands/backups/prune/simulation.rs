//! `holdfast prune --simulate`: shows what the rules would keep over time.

use std::time::Duration;

use holdfast_policy::{
    Band, Calendar, DAY_COUNT_MAX, KeptPoint, Policy, Pruning, Reason, Scenario, Simulation, TimeZone, Timestamp,
    simulate,
};
use jiff::SignedDuration;
use serde::Serialize;

use super::timeline::{LEGEND, Row, Timeline};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Column, Page, Report, Style, Table};
use crate::process::time;
use crate::units;

/// A quarter of a year, so that days, weeks and months all show.
const DAY_COUNT_DEFAULT: u32 = 90;
/// More than the hours in a quarter of a year. Pruning after each of many more points would take too long, with the
/// same result.
const AFTER_EACH_COUNT_MAX: usize = 3_000;
/// Number of points listed as text: one or two screens.
const LISTED_COUNT_MAX: usize = 60;

/// Options of `prune --simulate`.
#[derive(Debug, clap::Args)]
pub(super) struct SimulateArgs {
    /// Show on a timeline what the rules would keep over time; needs no repository
    #[arg(long, conflicts_with_all = ["machines", "dry_run"])]
    pub(super) simulate: bool,
    /// With --simulate: number of days [default: 90]
    #[arg(long, value_name = "N", requires = "simulate", value_parser = clap::value_parser!(u32).range(1..=i64::from(DAY_COUNT_MAX)))]
    days: Option<u32>,
    /// With --simulate: when snapshots are taken (daily, Mon..Fri 02:30, *:0/15) [default: hourly with --keep-hourly, else daily]
    #[arg(long, value_name = "CALENDAR", requires = "simulate")]
    every: Option<Calendar>,
}

/// Report of `prune --simulate`.
#[derive(Debug, Serialize)]
struct Simulated {
    every: String,
    #[serde(skip)]
    every_reason: &'static str,
    pruned: &'static str,
    start: String,
    end: String,
    day_count: u32,
    taken_count: u64,
    kept_count: u64,
    kept_count_max: u64,
    points: Vec<PointDocument>,
    bands: Vec<BandDocument>,
    history: Vec<DayDocument>,
    #[serde(skip)]
    notes: Vec<&'static str>,
    #[serde(skip)]
    timeline: Timeline,
}

#[derive(Debug, Serialize)]
struct PointDocument {
    time: String,
    #[serde(skip)]
    time_local: String,
    age_ms: u64,
    gap_ms: u64,
    reasons: Vec<String>,
    #[serde(skip)]
    brief: String,
}

#[derive(Debug, Serialize)]
struct BandDocument {
    from_ms: u64,
    to_ms: u64,
    count: u64,
    gap_max_ms: Option<u64>,
}

#[derive(Debug, Serialize)]
struct DayDocument {
    end: String,
    count: u64,
    oldest: Option<String>,
}

impl Report for Simulated {
    fn command(&self) -> &'static str {
        "prune"
    }

    fn human(&self, page: &mut Page) {
        let days = units::counted(self.day_count.into(), "day", "days");
        page.styled(Style::Heading, &format!("{days} of taking and pruning"));
        page.fields(&[
            ("taken", format!("{}{}", self.every, self.every_reason)),
            ("pruned", self.pruned.to_owned()),
        ]);
        for note in &self.notes {
            page.line(note);
        }
        page.gap();
        for line in self.timeline.lines(page.width()) {
            page.line(&line);
        }
        page.gap();
        page.line(LEGEND);
        page.gap();
        self.points_table(page);
        self.bands_table(page);
        let taken = units::counted(self.taken_count, "snapshot", "snapshots");
        let [kept, most] = [self.kept_count, self.kept_count_max].map(units::count);
        page.line(&format!("keeps {kept} of {taken}, and has at most {most} at once"));
        if let Some(oldest) = self.points.last() {
            page.line(&format!("goes back {}, to {}", span(oldest.age_ms), oldest.time_local));
        }
    }
}

impl Simulated {
    fn points_table(&self, page: &mut Page) {
        if self.points.is_empty() {
            return;
        }
        let mut table = Table::new([
            Column::text("TIME"),
            Column::number("AGE"),
            Column::number("GAP"),
            Column::long_text("KEPT BY"),
        ]);
        for point in self.points.iter().take(LISTED_COUNT_MAX) {
            table.row([
                point.time_local.clone(),
                span(point.age_ms),
                span(point.gap_ms),
                point.brief.clone(),
            ]);
        }
        page.table(&table);
        let unlisted_count = self.points.len().saturating_sub(LISTED_COUNT_MAX) as u64;
        if unlisted_count > 0 {
            page.line(&format!("and {} older; --json lists all", units::count(unlisted_count)));
        }
        page.gap();
    }

    fn bands_table(&self, page: &mut Page) {
        if self.bands.is_empty() {
            return;
        }
        let mut table = Table::new([
            Column::number("GOING BACK"),
            Column::number("SNAPSHOTS"),
            Column::number("LARGEST GAP"),
        ]);
        for band in &self.bands {
            let gap = band.gap_max_ms.map_or_else(|| "-".to_owned(), span);
            table.row([format!("to {}", span(band.to_ms)), units::count(band.count), gap]);
        }
        page.table(&table);
        page.gap();
    }
}

pub(super) fn run(args: &SimulateArgs, policy: &Policy, context: &Context) -> Result<Exit, Error> {
    // Whole seconds, as calendars have them; fractions would only make the output harder to read.
    let now = Timestamp::from_second(time::now().as_second()).unwrap_or_else(|_| time::now());
    context.report(&simulated(args, policy, now, context.zone())?)
}

fn simulated(args: &SimulateArgs, policy: &Policy, now: Timestamp, zone: &TimeZone) -> Result<Simulated, Error> {
    let (calendar, every_reason) = match &args.every {
        Some(calendar) => (calendar.clone(), ""),
        None => default_calendar(policy),
    };
    let day_count = args.days.unwrap_or(DAY_COUNT_DEFAULT);
    let local = now.to_zoned(zone.clone());
    let start = local.checked_sub(jiff::Span::new().days(i64::from(day_count)));
    let start = start.map_or(Timestamp::MIN, |start| start.timestamp());
    let taken = calendar.instants_after(start, zone).take_while(|time| *time <= now);
    let pruning = match taken.take(AFTER_EACH_COUNT_MAX + 1).count() {
        ..=AFTER_EACH_COUNT_MAX => Pruning::AfterEach,
        _ => Pruning::Daily,
    };
    let simulation = simulate(&Scenario {
        policy,
        calendar: &calendar,
        zone,
        start,
        day_count,
        pruning,
    })?;
    Ok(Simulated {
        every: calendar.to_string(),
        every_reason,
        pruned: match pruning {
            Pruning::AfterEach => "after each snapshot",
            Pruning::Daily => "once a day",
        },
        start: simulation.start.to_string(),
        end: simulation.end.to_string(),
        day_count,
        taken_count: simulation.taken_count,
        kept_count: simulation.points.len() as u64,
        kept_count_max: simulation.count_max,
        points: simulation.points.iter().map(|point| document(point, zone)).collect(),
        bands: simulation.bands().iter().map(band_document).collect(),
        history: history(&simulation),
        notes: notes(policy, &simulation),
        timeline: timeline(&simulation, day_count),
    })
}

/// The common calendar that fits the rules.
fn default_calendar(policy: &Policy) -> (Calendar, &'static str) {
    let (word, reason) = match policy.keep_hourly {
        Some(1..) => ("hourly", " (hourly, as --keep-hourly is given)"),
        _ => ("daily", " (daily; --every sets it)"),
    };
    let calendar = word.parse();
    (calendar.expect("a word of the language"), reason)
}

fn notes(policy: &Policy, simulation: &Simulation) -> Vec<&'static str> {
    let mut notes = Vec::new();
    if simulation.taken_count == 0 {
        notes.push("this time does not come in these days: nothing is taken");
    }
    if policy.is_empty() {
        notes.push("no rule is given: everything is kept");
    }
    if !policy.keep_tags.is_empty() {
        notes.push("no simulated snapshot has a tag: --keep-tag keeps none");
    }
    notes
}

fn document(point: &KeptPoint, zone: &TimeZone) -> PointDocument {
    // "Newest" is not listed as a reason if a rule keeps the snapshot as well.
    let is_listed = |reason: &&Reason| point.reasons.len() == 1 || **reason != Reason::Newest;
    let rules: Vec<String> = point.reasons.iter().filter(is_listed).map(Reason::brief).collect();
    PointDocument {
        time: point.time.to_string(),
        time_local: time::local(point.time, zone),
        age_ms: millis(point.age),
        gap_ms: millis(point.gap),
        reasons: point.reasons.iter().map(ToString::to_string).collect(),
        brief: rules.join(", "),
    }
}

fn band_document(band: &Band) -> BandDocument {
    BandDocument {
        from_ms: millis(band.from),
        to_ms: millis(band.to),
        count: band.count,
        gap_max_ms: band.gap_max.map(millis),
    }
}

fn history(simulation: &Simulation) -> Vec<DayDocument> {
    let days = simulation.days.iter().map(|day| DayDocument {
        end: day.end.to_string(),
        count: day.count,
        oldest: day.oldest.map(|time| time.to_string()),
    });
    days.collect()
}

/// One row for each rule, and one for all rules together.
fn timeline(simulation: &Simulation, day_count: u32) -> Timeline {
    let day = SignedDuration::from_hours(24);
    let points = &simulation.points;
    let mut rows: Vec<Row> = Vec::new();
    // The newest point has all rules, in their order.
    for reason in points.iter().take(1).flat_map(|newest| &newest.reasons) {
        let of_rule = points.iter().filter(|point| {
            let mut rules = point.reasons.iter().map(Reason::rule);
            rules.any(|rule| rule == reason.rule())
        });
        let ages: Vec<SignedDuration> = of_rule.map(|point| point.age).collect();
        let name = match reason {
            Reason::Last { count, .. } | Reason::LastOfPeriod { count, .. } => {
                format!("{} {}/{count}", reason.rule(), ages.len())
            }
            Reason::Within { span } => format!("within {span}"),
            _ => continue,
        };
        rows.push(Row { name, ages });
    }
    rows.push(Row {
        name: format!("all {}", points.len()),
        ages: points.iter().map(|point| point.age).collect(),
    });
    let finest = points.iter().skip(1).map(|point| point.gap).min();
    Timeline {
        reach: simulation.end.duration_since(simulation.start),
        reach_name: format!("{day_count}d"),
        finest: finest.unwrap_or(day).clamp(SignedDuration::from_mins(1), day),
        rows,
    }
}

fn millis(duration: SignedDuration) -> u64 {
    units::millis(duration.unsigned_abs())
}

/// A time span; whole days are shown without hours.
fn span(millis: u64) -> String {
    const DAY_MILLIS: u64 = 24 * 60 * 60 * 1000;
    match (millis / DAY_MILLIS, millis % DAY_MILLIS) {
        (days @ 1.., 0) => format!("{days} d"),
        _ => units::duration(Duration::from_millis(millis)),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::Parser as _;

    use super::{SimulateArgs, simulated};
    use crate::args::RetentionArgs;
    use crate::errors::Error;
    use crate::output::{Page, Paint, Report as _};
    use holdfast_policy::TimeZone;

    #[derive(Debug, clap::Parser)]
    struct SimulationLine {
        #[command(flatten)]
        simulate: SimulateArgs,
        /// As in `prune`, which refuses them together.
        #[arg(long)]
        dry_run: bool,
        machines: Vec<String>,
        #[command(flatten)]
        retention: RetentionArgs,
    }

    fn page(line: &str, now: &str, width: Option<usize>) -> Result<String, Error> {
        let words = ["prune", "--simulate"].into_iter().chain(line.split_whitespace());
        let args = SimulationLine::try_parse_from(words).unwrap_or_else(|error| panic!("{line}: {error}"));
        let zone = TimeZone::get("Europe/Berlin").unwrap();
        let answer = simulated(&args.simulate, &args.retention.policy(), now.parse().unwrap(), &zone)?;
        let mut page = Page::new(width, Paint::Plain);
        answer.human(&mut page);
        Ok(page.into_text())
    }

    /// Complete outputs, in `tests/simulations`; HOLDFAST_UPDATE_SNAPSHOTS=1 rewrites them.
    #[test]
    #[allow(clippy::disallowed_methods, reason = "a test writes its own files")]
    fn answers_are_as_they_were_read() {
        let gfs = "--keep-hourly 24 --keep-daily 14 --keep-weekly 8 --keep-monthly 12";
        // The year includes both changes of the clock; the clock was set back one day before now.
        let after_summer = "2026-10-26T12:00:30+01:00";
        let november = "2026-11-22T16:48:05+01:00";
        for (name, line, now, width) in [
            ("60-columns", gfs, november, 60),
            ("80-columns", gfs, november, 80),
            ("120-columns", gfs, november, 200),
            (
                "clock-set-back",
                "--days 3 --keep-hourly 40 --keep-last 2",
                after_summer,
                80,
            ),
            (
                "a-year-of-workdays",
                "--days 365 --every Mon..Fri --keep-daily 5 --keep-monthly 12",
                november,
                80,
            ),
            ("no-rule", "--days 7 --every 00/12:00", november, 80),
            ("only-tags", "--days 7 --keep-tag release --keep-last 0", november, 80),
            ("empty", "--days 7 --every *-02-30 --keep-last 3", november, 80),
            ("many", "--days 30 --every minutely --keep-within 3h", november, 80),
        ] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/simulations/{name}.txt"));
            let actual = page(line, now, Some(width)).unwrap();
            if std::env::var_os("HOLDFAST_UPDATE_SNAPSHOTS").is_some() {
                std::fs::write(&path, &actual).unwrap();
            }
            let expected = std::fs::read_to_string(&path).unwrap();
            assert!(
                actual == expected,
                "{name}\n== expected\n{expected}\n== actual\n{actual}"
            );
            assert!(
                actual.lines().all(|line| line.chars().count() <= width),
                "{name} is too wide"
            );
        }
    }

    #[test]
    fn what_cannot_be_played_says_so() {
        let error = page("--days 30 --every *:*:*", "2026-11-22T00:00:00Z", None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "*-*-* *:*:* in 30 days is more than 200000 snapshots"
        );
        let refused = |line: &str| SimulationLine::try_parse_from(line.split(' ')).unwrap_err().to_string();
        for line in [
            "prune --days 3",
            "prune --every daily",
            "prune --simulate --dry-run",
            "prune --simulate web1",
            "prune --simulate --days 0",
            "prune --simulate --days 3661",
        ] {
            assert!(refused(line).starts_with("error: "), "{line}");
        }
        let dayly = refused("prune --simulate --every dayly");
        assert!(dayly.contains("did you mean daily?"), "{dayly}");
    }
}
