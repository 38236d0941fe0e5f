//! Retention in time lapse: what would be there after so many days of taking snapshots and pruning them.
//!
//! Nobody sees from `keep-daily 7, keep-weekly 4` how far back that goes, and how fine. Playing it, with the same [`plan`] that prune
//! carries out, shows it; days on which clocks are set and periods without a snapshot are as they would be.

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

use crate::{Calendar, Candidate, Policy, Protection, Reason, Verdict, plan};

/// Days that are played at most: ten years.
pub const DAY_COUNT_MAX: u32 = 3660;
/// Snapshots that are taken at most. More are a slip, as a calendar of seconds.
const TAKEN_COUNT_MAX: u64 = 200_000;
/// Ends of the ages that [`Simulation::bands`] tells apart: a day, a week, a month, a quarter, a year, and five.
const BAND_ENDS_DAYS: [i64; 6] = [1, 7, 30, 90, 365, 1826];

/// What is played.
#[derive(Debug, Clone)]
pub struct Scenario<'s> {
    /// What is kept.
    pub policy: &'s Policy,
    /// When a snapshot is taken.
    pub calendar: &'s Calendar,
    /// Whose days and hours they are.
    pub zone: &'s TimeZone,
    /// The first snapshot is later than this.
    pub start: Timestamp,
    /// From one to [`DAY_COUNT_MAX`]; days of the calendar, of 23 or 25 hours where the clock is set.
    pub day_count: u32,
    /// When it is pruned.
    pub pruning: Pruning,
}

/// When it is pruned. What is kept at the end is the same; how many there are in between is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pruning {
    /// After each snapshot.
    AfterEach,
    /// At the end of each day, counted from the start.
    Daily,
}

/// What is there at the end, and how it came to that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Simulation {
    /// When it begins.
    pub start: Timestamp,
    /// When it ends: the "now" of ages.
    pub end: Timestamp,
    /// How many snapshots were taken.
    pub taken_count: u64,
    /// The most that there were at once, before they were pruned.
    pub count_max: u64,
    /// Each day's end.
    pub days: Vec<SimulatedDay>,
    /// The snapshots that are there at the end, the newest first.
    pub points: Vec<KeptPoint>,
}

/// What is there when a day has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimulatedDay {
    /// The instant.
    pub end: Timestamp,
    /// How many snapshots there are.
    pub count: u64,
    /// The oldest of them.
    pub oldest: Option<Timestamp>,
}

/// A snapshot that is there at the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptPoint {
    /// When it was taken.
    pub time: Timestamp,
    /// How long before the end.
    pub age: SignedDuration,
    /// How long before the next newer one, or before the end where there is none.
    pub gap: SignedDuration,
    /// What keeps it.
    pub reasons: Vec<Reason>,
}

/// How fine it goes back, among points of similar age.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Band {
    /// Points of this age belong to the band before.
    pub from: SignedDuration,
    /// The greatest age; in the last band that of the oldest point.
    pub to: SignedDuration,
    /// How many points there are.
    pub count: u64,
    /// The longest time from one of them to the next newer point, whatever the age of that; none without a point.
    pub gap_max: Option<SignedDuration>,
}

/// Why nothing was played.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimulationError {
    /// No day, or more than ten years.
    #[error("{day_count} days cannot be simulated: from 1 to {DAY_COUNT_MAX} can")]
    DayCount {
        /// How many were asked for.
        day_count: u32,
    },
    /// More snapshots than anybody keeps.
    #[error("{calendar} in {day_count} days is more than {TAKEN_COUNT_MAX} snapshots")]
    TooMany {
        /// When they are taken.
        calendar: String,
        /// In how many days.
        day_count: u32,
    },
    /// It would end after the last year that there is.
    #[error("{day_count} days from {start} on end after the last day of the calendar")]
    EndOfTime {
        /// When it begins.
        start: Timestamp,
        /// In how many days it ends.
        day_count: u32,
    },
}

/// Takes and prunes, from the start of `scenario` to its end.
///
/// The last instant belongs to it. Nothing is protected and nothing has a tag.
pub fn simulate(scenario: &Scenario<'_>) -> Result<Simulation, SimulationError> {
    let &Scenario {
        start,
        day_count,
        pruning,
        ..
    } = scenario;
    if !(1..=DAY_COUNT_MAX).contains(&day_count) {
        return Err(SimulationError::DayCount { day_count });
    }
    let mut instants = scenario.calendar.instants_after(start, scenario.zone).peekable();
    let mut present = Vec::new();
    let mut days = Vec::new();
    let (mut taken_count, mut count_max) = (0, 0);
    for day in 1..=day_count {
        let end = end_of_day(scenario, day)?;
        while let Some(time) = instants.next_if(|time| *time <= end) {
            taken_count += 1;
            if taken_count > TAKEN_COUNT_MAX {
                let calendar = scenario.calendar.to_string();
                return Err(SimulationError::TooMany { calendar, day_count });
            }
            present.push(candidate(time));
            count_max = count_max.max(count(&present));
            if pruning == Pruning::AfterEach {
                present = pruned(scenario, present, time);
            }
        }
        if pruning == Pruning::Daily {
            present = pruned(scenario, present, end);
        }
        days.push(SimulatedDay {
            end,
            count: count(&present),
            oldest: present.iter().map(|candidate| candidate.time).min(),
        });
    }
    let end = days.last().map_or(start, |day| day.end);
    Ok(Simulation {
        start,
        end,
        taken_count,
        count_max,
        days,
        points: kept_points(scenario, &present, end),
    })
}

impl Simulation {
    /// The age of the oldest point; none without a point.
    pub fn reach(&self) -> Option<SignedDuration> {
        self.points.last().map(|point| point.age)
    }

    /// How fine it goes back: points by age, up to that of the oldest.
    pub fn bands(&self) -> Vec<Band> {
        let Some(reach) = self.reach() else { return Vec::new() };
        let mut from = SignedDuration::ZERO;
        let mut bands = Vec::new();
        let ends = BAND_ENDS_DAYS.map(|days| SignedDuration::from_hours(days * 24));
        for end in ends.into_iter().chain([reach]) {
            let to = end.min(reach);
            // A point of this very instant has no age, and belongs to the first band.
            let is_first = bands.is_empty();
            let in_band = self
                .points
                .iter()
                .filter(|point| (point.age > from || is_first) && point.age <= to);
            let gaps: Vec<SignedDuration> = in_band.map(|point| point.gap).collect();
            bands.push(Band {
                from,
                to,
                count: count(&gaps),
                gap_max: gaps.into_iter().max(),
            });
            from = to;
            if to == reach {
                break;
            }
        }
        bands
    }
}

fn end_of_day(scenario: &Scenario<'_>, day: u32) -> Result<Timestamp, SimulationError> {
    let Scenario { start, day_count, .. } = *scenario;
    let local = start.to_zoned(scenario.zone.clone());
    // Counted from the start each time: a clock that is set on one day must not move the days after it.
    let end = local.checked_add(jiff::Span::new().days(i64::from(day)));
    end.map(|end| end.timestamp())
        .map_err(|_| SimulationError::EndOfTime { start, day_count })
}

fn candidate(time: Timestamp) -> Candidate {
    Candidate {
        time,
        // No two are of the same time.
        id: String::new(),
        tags: Vec::new(),
        protection: Protection::None,
    }
}

fn pruned(scenario: &Scenario<'_>, present: Vec<Candidate>, now: Timestamp) -> Vec<Candidate> {
    if scenario.policy.is_empty() {
        return present;
    }
    let plan = plan(scenario.policy, &present, now, scenario.zone);
    plan.kept().cloned().collect()
}

fn kept_points(scenario: &Scenario<'_>, present: &[Candidate], end: Timestamp) -> Vec<KeptPoint> {
    let plan = plan(scenario.policy, present, end, scenario.zone);
    let kept = plan
        .decisions()
        .iter()
        .filter(|decision| decision.verdict == Verdict::Keep);
    let mut newer = end;
    let mut points = Vec::new();
    for decision in kept {
        let time = decision.candidate.time;
        points.push(KeptPoint {
            time,
            age: end.duration_since(time),
            gap: newer.duration_since(time),
            reasons: decision.reasons.clone(),
        });
        newer = time;
    }
    points
}

fn count<T>(items: &[T]) -> u64 {
    items.len() as u64
}
