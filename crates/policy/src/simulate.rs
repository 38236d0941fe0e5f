//! Simulates retention: which snapshots exist after some days of taking and pruning them.
//!
//! It is not obvious how far back `keep-daily 7, keep-weekly 4` reaches, and with which gaps. A simulation with the
//! same [`plan`] that prune executes shows it, including clock changes and periods without a snapshot.

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

use crate::{Calendar, Candidate, Policy, Protection, Reason, Verdict, plan};

/// Maximum number of simulated days: ten years.
pub const DAY_COUNT_MAX: u32 = 3660;
/// Maximum number of snapshots. A larger number is a mistake, such as a calendar of seconds.
const TAKEN_COUNT_MAX: u64 = 200_000;
/// Upper ages of [`Simulation::bands`]: a day, a week, a month, a quarter, a year, and five years.
const BAND_ENDS_DAYS: [i64; 6] = [1, 7, 30, 90, 365, 1826];

/// The input of a simulation.
#[derive(Debug, Clone)]
pub struct Scenario<'s> {
    /// The retention policy.
    pub policy: &'s Policy,
    /// When snapshots are taken.
    pub calendar: &'s Calendar,
    /// The time zone of days and hours.
    pub zone: &'s TimeZone,
    /// The first snapshot is taken after this.
    pub start: Timestamp,
    /// From one to [`DAY_COUNT_MAX`] calendar days, which have 23 or 25 hours when the clock changes.
    pub day_count: u32,
    /// When pruning happens.
    pub pruning: Pruning,
}

/// When pruning happens. This affects the number of snapshots in between, but not the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pruning {
    /// After each snapshot.
    AfterEach,
    /// At the end of each day, counted from the start.
    Daily,
}

/// The result of a simulation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Simulation {
    /// Its start.
    pub start: Timestamp,
    /// The end. Ages are relative to it.
    pub end: Timestamp,
    /// Number of snapshots taken.
    pub taken_count: u64,
    /// The largest number of snapshots at one time, before pruning.
    pub count_max: u64,
    /// The end of each day.
    pub days: Vec<SimulatedDay>,
    /// The remaining snapshots, the newest first.
    pub points: Vec<KeptPoint>,
}

/// The state at the end of a day.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimulatedDay {
    /// The end of the day.
    pub end: Timestamp,
    /// Number of snapshots.
    pub count: u64,
    /// The oldest snapshot.
    pub oldest: Option<Timestamp>,
}

/// A remaining snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptPoint {
    /// When it was taken.
    pub time: Timestamp,
    /// Its age at the end.
    pub age: SignedDuration,
    /// The time to the next newer one, or to the end.
    pub gap: SignedDuration,
    /// The reasons to keep it.
    pub reasons: Vec<Reason>,
}

/// The distances of points of similar age.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Band {
    /// Younger points belong to the previous band.
    pub from: SignedDuration,
    /// The greatest age; in the last band that of the oldest point.
    pub to: SignedDuration,
    /// Number of points.
    pub count: u64,
    /// The longest time from one of the points to the next newer point of any band; `None` without a point.
    pub gap_max: Option<SignedDuration>,
}

/// Why a simulation is not possible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimulationError {
    /// No day, or more than ten years.
    #[error("{day_count} days cannot be simulated: from 1 to {DAY_COUNT_MAX} can")]
    DayCount {
        /// The requested number of days.
        day_count: u32,
    },
    /// Too many snapshots.
    #[error("{calendar} in {day_count} days is more than {TAKEN_COUNT_MAX} snapshots")]
    TooMany {
        /// When they are taken.
        calendar: String,
        /// The number of days.
        day_count: u32,
    },
    /// The simulation would end after the last supported year.
    #[error("{day_count} days from {start} on end after the last day of the calendar")]
    EndOfTime {
        /// The start.
        start: Timestamp,
        /// The number of days.
        day_count: u32,
    },
}

/// Takes and prunes snapshots from the start of `scenario` to its end.
///
/// The last instant is included. Snapshots have no protection and no tags.
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

    /// The bands of ages, up to the age of the oldest point.
    pub fn bands(&self) -> Vec<Band> {
        let Some(reach) = self.reach() else { return Vec::new() };
        let mut from = SignedDuration::ZERO;
        let mut bands = Vec::new();
        let ends = BAND_ENDS_DAYS.map(|days| SignedDuration::from_hours(days * 24));
        for end in ends.into_iter().chain([reach]) {
            let to = end.min(reach);
            // A point exactly at the end has the age 0, and belongs to the first band.
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
    // Computed from the start for each day: a clock change on one day must not shift the following days.
    let end = local.checked_add(jiff::Span::new().days(i64::from(day)));
    end.map(|end| end.timestamp())
        .map_err(|_| SimulationError::EndOfTime { start, day_count })
}

fn candidate(time: Timestamp) -> Candidate {
    Candidate {
        time,
        // An id is not needed: no two snapshots have the same time.
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
