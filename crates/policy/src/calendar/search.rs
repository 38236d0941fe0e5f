//! Finds the next instant.
//!
//! Between two changes of a zone's clock, local time is UTC plus a constant. The first matching local time is searched
//! in each such period; skipped times are in no period, and repeated times are in two.
//!
//! The search terminates: no expression matches after [`Part::Year`]'s last value, each date is examined once per
//! period, and a zone has few changes.

use jiff::civil::{Date, DateTime, Time};
use jiff::tz::{Offset, TimeZone};
use jiff::{SignedDuration, Timestamp};

use super::Calendar;
use super::component::{Component, Part};

const SECOND: SignedDuration = SignedDuration::from_secs(1);

impl Calendar {
    /// The first matching instant after `after`; `None` if there is none before the year 2200.
    ///
    /// The instant is a whole second. Local time is that of `zone`, unless the expression names a zone.
    pub fn next_after(&self, after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        let zone = self.zone.as_ref().unwrap_or(zone);
        let mut start = next_second(after)?;
        loop {
            let offset = zone.to_offset(start);
            let end = zone.following(start).next().map(|change| change.timestamp());
            let last = match end {
                Some(end) => offset.to_datetime(end.checked_sub(SECOND).ok()?),
                None => DateTime::MAX,
            };
            let mut from = offset.to_datetime(start);
            if !self.means_every_hour() {
                from = from.max(first_time_is_over(start, zone).unwrap_or(from));
            }
            if let Some(found) = self.first_on_wall(from, last) {
                return offset.to_timestamp(found).ok();
            }
            start = end?;
            if year_of(offset.to_datetime(start).date())? > *Part::Year.values().end() {
                return None;
            }
        }
    }

    /// Whether `instant` matches.
    pub fn matches(&self, instant: Timestamp, zone: &TimeZone) -> bool {
        let before = instant.checked_sub(SignedDuration::from_nanos(1)).ok();
        before.is_some_and(|before| self.next_after(before, zone) == Some(instant))
    }

    /// The first matching local time from `from` to `last`, both included.
    fn first_on_wall(&self, from: DateTime, last: DateTime) -> Option<DateTime> {
        let mut date = from.date();
        loop {
            date = self.first_date(date, last.date())?;
            let earliest = if date == from.date() {
                from.time()
            } else {
                Time::midnight()
            };
            if let Some(time) = self.first_time(earliest) {
                let found = date.to_datetime(time);
                return (found <= last).then_some(found);
            }
            date = date.tomorrow().ok()?;
        }
    }

    fn first_date(&self, from: Date, last: Date) -> Option<Date> {
        let mut date = from;
        while date <= last {
            let year = year_of(date)?;
            if year > *Part::Year.values().end() {
                return None;
            }
            date = if !self.year.contains(year) {
                date.last_of_year().tomorrow().ok()?
            } else if !contains(&self.month, date.month()) {
                date.last_of_month().tomorrow().ok()?
            } else if self.has_day(date) {
                return Some(date);
            } else {
                date.tomorrow().ok()?
            };
        }
        None
    }

    fn has_day(&self, date: Date) -> bool {
        let number = match self.day.part() {
            Part::DayFromEnd => date.days_in_month() + 1 - date.day(),
            _ => date.day(),
        };
        contains(&self.day, number) && self.weekdays.contains(date.weekday())
    }

    fn first_time(&self, earliest: Time) -> Option<Time> {
        let [hour, minute, second] = [earliest.hour(), earliest.minute(), earliest.second()].map(i8::unsigned_abs);
        let [hour, minute, second] = [hour, minute, second].map(u16::from);
        let time = |hour: u16, minute: u16, second: u16| {
            let [hour, minute, second] = [hour, minute, second].map(i8::try_from);
            Time::new(hour.ok()?, minute.ok()?, second.ok()?, 0).ok()
        };
        // The minute, the hour or a larger unit has changed: all smaller units start again.
        if self.hour.contains(hour) {
            if self.minute.contains(minute)
                && let Some(second) = self.second.first_from(second)
            {
                return time(hour, minute, second);
            }
            if let Some(minute) = self.minute.first_from(minute + 1) {
                return time(hour, minute, self.second.first_from(0)?);
            }
        }
        let hour = self.hour.first_from(hour + 1)?;
        time(hour, self.minute.first_from(0)?, self.second.first_from(0)?)
    }
}

fn contains(component: &Component, number: i8) -> bool {
    component.contains(number.unsigned_abs().into())
}

/// `None` before the year 0.
fn year_of(date: Date) -> Option<u16> {
    u16::try_from(date.year()).ok()
}

fn next_second(after: Timestamp) -> Option<Timestamp> {
    // jiff has already rounded up the seconds of an instant before 1970.
    let is_rounded_up = after.subsec_nanosecond() < 0;
    Timestamp::from_second(after.as_second() + i64::from(!is_rounded_up)).ok()
}

/// The local time that the clock showed just before it was last changed. After a clock was set back, times until then
/// are repeated.
fn first_time_is_over(start: Timestamp, zone: &TimeZone) -> Option<DateTime> {
    let change = zone.preceding(start.checked_add(SECOND).ok()?).next()?.timestamp();
    let before: Offset = zone.to_offset(change.checked_sub(SECOND).ok()?);
    Some(before.to_datetime(change))
}
