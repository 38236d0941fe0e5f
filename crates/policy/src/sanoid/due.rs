//! Which snapshots are due.
//!
//! A type is due if its newest snapshot is older than the last scheduled time. That time is computed with sanoid's
//! arithmetic, step by step, including days with clock changes. Otherwise Holdfast would take more or fewer snapshots
//! than sanoid.

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};

use super::{DatasetPolicy, SnapshotType};

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;
/// 31 years instead of one year, as in all versions of sanoid until 2.3.0. Before this year's scheduled time, a yearly
/// snapshot is due only if there is none yet.
const YEAR_BEFORE: i64 = DAY * 31 * 36_525 / 100;

impl DatasetPolicy {
    /// The types of snapshots that are due, in the order in which they are taken; `newest` returns the time of the
    /// newest snapshot of a type.
    pub fn due(&self, newest: impl Fn(SnapshotType) -> Option<Timestamp>, now: &Zoned) -> Vec<SnapshotType> {
        if !self.takes() {
            return Vec::new();
        }
        let calendar = WallClock::new(now);
        let is_due = |kind: &SnapshotType| {
            self.count(*kind) > 0
                && newest(*kind).is_none_or(|newest| newest.as_second() < self.wanted_last(*kind, &calendar))
        };
        SnapshotType::ALL.into_iter().filter(is_due).collect()
    }

    /// The last scheduled time of a type, in seconds of the epoch.
    fn wanted_last(&self, kind: SnapshotType, calendar: &WallClock<'_>) -> i64 {
        let set = |key| i64::from(self.number(key));
        let WallClock { now, now_second, .. } = *calendar;
        let (today, hour) = (now.date(), i64::from(now.hour()));
        match kind {
            SnapshotType::Frequently => {
                let period = set("frequent_period");
                let minute = i64::from(now.minute()) / period * period;
                calendar.before(calendar.second_of(today, hour, minute), 60 * period)
            }
            SnapshotType::Hourly => {
                let wanted = calendar.second_of(today, hour, set("hourly_min")) + calendar.dst_offset;
                calendar.before(wanted, HOUR)
            }
            SnapshotType::Daily => {
                let mut wanted = calendar.second_of(today, set("daily_hour"), set("daily_min")) + calendar.dst_offset;
                if calendar.is_dst && !calendar.is_dst_at(wanted) {
                    wanted -= HOUR;
                }
                if wanted > now_second {
                    // The day before does not end in the repeated hour.
                    wanted -= DAY + 2 * calendar.dst_offset;
                }
                wanted
            }
            SnapshotType::Weekly => {
                let weekday = i64::from(now.weekday().to_sunday_zero_offset());
                let wanted_day = set("weekly_wday");
                let next_week = if wanted_day < weekday { 7 } else { 0 };
                let wanted = calendar.second_of(today, set("weekly_hour"), set("weekly_min"));
                calendar.before(wanted + (wanted_day - weekday + next_week) * DAY, 7 * DAY)
            }
            SnapshotType::Monthly => {
                let day = day_of_month(today, now.month(), self.number("monthly_mday"));
                let wanted = calendar.second_of(day, set("monthly_hour"), set("monthly_min"));
                calendar.before(wanted, 31 * DAY)
            }
            SnapshotType::Yearly => {
                let month = i8::try_from(self.number("yearly_mon")).expect("months were checked when they were read");
                let day = day_of_month(today, month, self.number("yearly_mday"));
                let wanted = calendar.second_of(day, set("yearly_hour"), set("yearly_min"));
                calendar.before(wanted, YEAR_BEFORE)
            }
        }
    }
}

/// A day of a month of this year. If the month is shorter, its last day; sanoid ends with an error instead.
fn day_of_month(today: Date, month: i8, day: u32) -> Date {
    let first = today.with().month(month).day(1).build();
    let first = first.expect("every month has a first day");
    let day = i8::try_from(day).expect("days were checked when they were read");
    first
        .with()
        .day(day.min(first.days_in_month()))
        .build()
        .expect("the month has this day")
}

/// Local time, with sanoid's adjustments for summer time.
struct WallClock<'z> {
    now: &'z Zoned,
    zone: &'z TimeZone,
    now_second: i64,
    /// Whether it is summer time.
    is_dst: bool,
    /// An hour on days on which the repeated hour has begun or has passed.
    dst_offset: i64,
}

impl<'z> WallClock<'z> {
    fn new(now: &'z Zoned) -> Self {
        let mut calendar = Self {
            now,
            zone: now.time_zone(),
            now_second: now.timestamp().as_second(),
            is_dst: false,
            dst_offset: 0,
        };
        calendar.is_dst = calendar.is_dst_at(calendar.now_second);
        let was_dst = calendar.is_dst_at(calendar.second_of(now.date(), 0, 0));
        if was_dst && !calendar.is_dst {
            calendar.dst_offset = HOUR;
        }
        calendar
    }

    /// The instant of a local time. For a repeated time, the instant in summer time, as in Perl's Time::Local: the
    /// first one, except in Ireland, where winter time counts as daylight saving. For a skipped time, an hour later.
    fn second_of(&self, day: Date, hour: i64, minute: i64) -> i64 {
        let part = |value: i64| i8::try_from(value).expect("hours and minutes were checked when they were read");
        let time = self.zone.to_ambiguous_timestamp(day.at(part(hour), part(minute), 0, 0));
        let first = time.compatible();
        let chosen = match (first, time.later()) {
            (Ok(first), Ok(second)) if self.is_dst_at(second.as_second()) && !self.is_dst_at(first.as_second()) => {
                Ok(second)
            }
            (first, _) => first,
        };
        // The calendar ends in the year 9999.
        chosen.map_or(self.now_second, Timestamp::as_second)
    }

    fn is_dst_at(&self, second: i64) -> bool {
        let time = Timestamp::from_second(second);
        time.is_ok_and(|time| self.zone.to_offset_info(time).dst().is_dst())
    }

    /// The time `wanted`, or one period earlier if `wanted` is in the future.
    fn before(&self, wanted: i64, period: i64) -> i64 {
        if wanted > self.now_second {
            wanted - period
        } else {
            wanted
        }
    }
}
