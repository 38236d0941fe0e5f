//! Parses calendar expressions.
//!
//! An expression consists of words separated by spaces: `[WEEKDAYS] [DATE] [TIME] [ZONE]`, or `SHORTHAND [ZONE]`. The
//! characters of a word show its kind: weekdays and shorthands begin with a letter, a time has a colon, a date has a
//! hyphen or a tilde.

use std::str::FromStr;

use jiff::tz::TimeZone;

use super::component::{Component, Item, Part};
use super::weekdays::{self, Weekdays};
use super::{Calendar, ParseCalendarError};
use crate::nearest::nearest;

/// Shorthands for whole expressions. systemd also accepts those that `systemd.time(7)` does not list.
const SHORTHANDS: [(&str, &str); 12] = [
    ("minutely", "*-*-* *:*:00"),
    ("hourly", "*-*-* *:00:00"),
    ("daily", "*-*-* 00:00:00"),
    ("weekly", "Mon *-*-* 00:00:00"),
    ("monthly", "*-*-01 00:00:00"),
    ("quarterly", "*-01,04,07,10-01 00:00:00"),
    ("semiannually", "*-01,07-01 00:00:00"),
    ("semi-annually", "*-01,07-01 00:00:00"),
    ("biannually", "*-01,07-01 00:00:00"),
    ("bi-annually", "*-01,07-01 00:00:00"),
    ("yearly", "*-01-01 00:00:00"),
    ("annually", "*-01-01 00:00:00"),
];
/// systemd has the same limit.
const ITEM_COUNT_MAX: usize = 240;
const DATE_OR_TIME: &str = "a date like *-*-01 or a time like 02:30";

impl FromStr for Calendar {
    type Err = ParseCalendarError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut words = text.split_whitespace().peekable();
        let Some(first) = words.peek() else {
            return Err(ParseCalendarError::Nothing);
        };
        let mut calendar = Self::midnights();
        let shorthand = SHORTHANDS.iter().find(|(word, _)| word.eq_ignore_ascii_case(first));
        if let Some((_, meaning)) = shorthand {
            words.next();
            calendar = meaning.parse()?;
        } else {
            if let Some(word) = words.next_if(|word| begins_with_letter(word)) {
                calendar.weekdays = parse_weekdays(word)?;
            }
            if let Some(word) = words.next_if(|word| !begins_with_letter(word) && !word.contains(':')) {
                calendar.parse_date(word)?;
            }
            if let Some(word) = words.next_if(|word| !begins_with_letter(word)) {
                calendar.parse_time(word)?;
            }
        }
        if let Some(word) = words.next() {
            calendar.zone = Some(parse_zone(word, shorthand.is_some())?);
        }
        match words.next() {
            None => Ok(calendar),
            Some(word) => Err(ParseCalendarError::Unexpected {
                text: word.to_owned(),
                expected: "part of the expression any more: it ends with the time zone",
            }),
        }
    }
}

impl Calendar {
    /// Midnight of every day: the default for omitted parts.
    fn midnights() -> Self {
        let zero = |part| {
            let item = Item {
                first: 0,
                last: None,
                step: None,
            };
            Component::of(part, vec![item])
        };
        Self {
            weekdays: Weekdays::ALL,
            year: Component::every(Part::Year),
            month: Component::every(Part::Month),
            day: Component::every(Part::Day),
            hour: zero(Part::Hour),
            minute: zero(Part::Minute),
            second: zero(Part::Second),
            zone: None,
        }
    }

    /// `[[YEAR-]MONTH-]DAY` with at least one of the hyphens, the last of which may be a tilde.
    fn parse_date(&mut self, text: &str) -> Result<(), ParseCalendarError> {
        let unexpected = |expected| ParseCalendarError::Unexpected {
            text: text.to_owned(),
            expected,
        };
        let (before, day, part) = match (text.rsplit_once('~'), text.rsplit_once('-')) {
            (Some((before, day)), _) => (before, day, Part::DayFromEnd),
            (None, Some((before, day))) => (before, day, Part::Day),
            (None, None) => return Err(unexpected(DATE_OR_TIME)),
        };
        let (year, month) = match before.split_once('-') {
            Some((year, month)) => (Some(year), month),
            None => (None, before),
        };
        if month.contains(['-', '~']) {
            return Err(unexpected("a date like *-*-01, 12-24 or *-02~01"));
        }
        if let Some(year) = year {
            self.year = parse_component(year, Part::Year)?;
        }
        self.month = parse_component(month, Part::Month)?;
        self.day = match parse_component(day, part)? {
            every if every == Component::every(Part::DayFromEnd) => Component::every(Part::Day),
            days => days,
        };
        Ok(())
    }

    /// `HOUR:MINUTE[:SECOND]`.
    fn parse_time(&mut self, text: &str) -> Result<(), ParseCalendarError> {
        let (hour, minute, second) = match text.split(':').collect::<Vec<_>>()[..] {
            [hour, minute] => (hour, minute, None),
            [hour, minute, second] => (hour, minute, Some(second)),
            _ => {
                let text = text.to_owned();
                let expected = "a time like 02:30, 00/2:30 or 02:30:15";
                return Err(ParseCalendarError::Unexpected { text, expected });
            }
        };
        self.hour = parse_component(hour, Part::Hour)?;
        self.minute = parse_component(minute, Part::Minute)?;
        if let Some(second) = second {
            self.second = parse_component(second, Part::Second)?;
        }
        Ok(())
    }
}

fn begins_with_letter(word: &str) -> bool {
    word.starts_with(char::is_alphabetic)
}

/// `Mon`, `Mon..Fri`, `Mon,Wed..Fri`. As in systemd, a trailing comma and a hyphen instead of the dots are allowed.
fn parse_weekdays(text: &str) -> Result<Weekdays, ParseCalendarError> {
    let mut weekdays = Weekdays::NONE;
    for item in text.strip_suffix(',').unwrap_or(text).split(',') {
        let (first, last) = item
            .split_once("..")
            .or_else(|| item.split_once('-'))
            .unwrap_or((item, item));
        let (first, last) = (parse_weekday(first)?, parse_weekday(last)?);
        if first > last {
            return Err(ParseCalendarError::WeekdayOrder { text: item.to_owned() });
        }
        (first..=last).for_each(|day| weekdays.insert(day));
    }
    Ok(weekdays)
}

fn parse_weekday(word: &str) -> Result<usize, ParseCalendarError> {
    weekdays::number_of(word).ok_or_else(|| {
        let shorthands = SHORTHANDS.iter().map(|(shorthand, _)| *shorthand);
        let names = weekdays::NAMES.iter().flat_map(|name| [*name, weekdays::short(name)]);
        let known: Vec<(String, &str)> = shorthands
            .chain(names)
            .map(|known| (known.to_ascii_lowercase(), known))
            .collect();
        let found = nearest(&word.to_lowercase(), known.iter().map(|(lower, _)| lower.as_str()));
        let meant = known.iter().find(|(lower, _)| Some(lower.as_str()) == found);
        ParseCalendarError::UnknownWord {
            word: word.to_owned(),
            nearest: meant.map(|(_, known)| (*known).to_owned()),
        }
    })
}

/// The rules of a zone are read from the system's database: the only external input.
fn parse_zone(name: &str, follows_shorthand: bool) -> Result<TimeZone, ParseCalendarError> {
    if name.eq_ignore_ascii_case("UTC") {
        return Ok(TimeZone::UTC);
    }
    if !begins_with_letter(name) {
        let expected = if follows_shorthand {
            "a time zone, and a word like daily is followed by nothing else"
        } else {
            "a time zone; what comes before it is weekdays, then a date like *-*-01, then a time like 02:30"
        };
        let text = name.to_owned();
        return Err(ParseCalendarError::Unexpected { text, expected });
    }
    TimeZone::get(name).map_err(|_| {
        let known: Vec<String> = jiff::tz::db().available().map(|known| known.to_string()).collect();
        ParseCalendarError::UnknownZone {
            name: name.to_owned(),
            nearest: nearest(name, known.iter().map(String::as_str)).map(str::to_owned),
        }
    })
}

fn parse_component(text: &str, part: Part) -> Result<Component, ParseCalendarError> {
    if text == "*" {
        return Ok(Component::every(part));
    }
    let count = text.split(',').count();
    if count > ITEM_COUNT_MAX {
        return Err(ParseCalendarError::TooMany {
            part: part.name(),
            count,
            count_max: ITEM_COUNT_MAX,
        });
    }
    if text.starts_with('*') || text.contains(",*") {
        return Err(ParseCalendarError::EveryAndMore {
            part: part.name(),
            text: text.to_owned(),
            from: match part {
                Part::DayFromEnd => *part.values().end(),
                _ => *part.values().start(),
            },
        });
    }
    let items: Vec<Item> = text
        .split(',')
        .map(|item| parse_item(item, part))
        .collect::<Result<_, _>>()?;
    // systemd writes the seconds of `0/1` as `*`.
    let every_second = Item {
        first: 0,
        last: None,
        step: Some(1),
    };
    if part == Part::Second && items.contains(&every_second) {
        return Ok(Component::every(part));
    }
    Ok(Component::of(part, items))
}

/// `5`, `1..5`, `0/15`, `9..17/2`.
fn parse_item(text: &str, part: Part) -> Result<Item, ParseCalendarError> {
    let (range, step) = match text.split_once('/') {
        Some((range, step)) => (range, Some(step)),
        None => (text, None),
    };
    let (first, last) = match range.split_once("..") {
        Some((first, last)) => (first, Some(last)),
        None => (range, None),
    };
    let first = parse_value(first, part, text)?;
    let last = last.map(|last| parse_value(last, part, text)).transpose()?;
    if last.is_some_and(|last| last < first) {
        return Err(ParseCalendarError::Order {
            part: part.name(),
            text: text.to_owned(),
        });
    }
    let step = step.map(|step| parse_step(step, part, text)).transpose()?;
    if let Some(last) = last {
        let step = step.unwrap_or(1);
        let reached = last - (last - first) % step;
        let is_range = reached > first;
        return Ok(Item {
            first,
            last: is_range.then_some(reached),
            step: is_range.then_some(step),
        });
    }
    let is_taken_once = |step: &u16| match part {
        Part::DayFromEnd => first > *step,
        _ => first.saturating_add(*step) <= *part.values().end(),
    };
    if step.is_some_and(|step| !is_taken_once(&step)) {
        return Err(step_error(part, text));
    }
    Ok(Item { first, last, step })
}

/// A number in the bounds of `part`. A year of two digits is from 1970 to 2069.
fn parse_value(number: &str, part: Part, item: &str) -> Result<u16, ParseCalendarError> {
    let values = part.values();
    let value = parse_number(number, part, item)?.map(|value| match (part, value) {
        (Part::Year, 0..70) => value + 2000,
        (Part::Year, 70..100) => value + 1900,
        _ => value,
    });
    value
        .filter(|value| values.contains(value))
        .ok_or_else(|| ParseCalendarError::OutOfRange {
            part: part.name(),
            number: number.to_owned(),
            least: *values.start(),
            greatest: *values.end(),
        })
}

/// A step is at least 1. The caller checks its upper bound: in a range, systemd accepts a step that leaves the range at
/// once.
fn parse_step(number: &str, part: Part, item: &str) -> Result<u16, ParseCalendarError> {
    let step = parse_number(number, part, item)?.filter(|step| *step > 0);
    step.ok_or_else(|| step_error(part, item))
}

fn step_error(part: Part, item: &str) -> ParseCalendarError {
    ParseCalendarError::Step {
        part: part.name(),
        text: item.to_owned(),
    }
}

/// Parses a number; `None` if it is too large.
fn parse_number(text: &str, part: Part, item: &str) -> Result<Option<u16>, ParseCalendarError> {
    if part == Part::Second && text.contains('.') {
        return Err(ParseCalendarError::SubSecond { text: item.to_owned() });
    }
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(ParseCalendarError::NotANumber {
            part: part.name(),
            text: item.to_owned(),
        });
    }
    Ok(text.parse().ok())
}
