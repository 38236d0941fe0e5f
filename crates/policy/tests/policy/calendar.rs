//! Properties of every calendar: the next instant is later and matches, and no earlier one matches.

use holdfast_policy::{Calendar, TimeZone, Timestamp};
use jiff::ToSpan as _;
use jiff::civil::DateTime;
use proptest::prelude::*;

const MINUTE_SECONDS: i64 = 60;
/// A week, to include the time after a clock change.
const MINUTE_COUNT_MAX: i64 = 7 * 24 * 60;

/// The text of some numbers, and the numbers that it matches.
#[derive(Debug, Clone)]
struct Numbers {
    text: String,
    matching: Vec<i8>,
}

fn every(greatest: i8) -> BoxedStrategy<Numbers> {
    let matching = (0..=greatest).collect();
    Just(Numbers {
        text: "*".to_owned(),
        matching,
    })
    .boxed()
}

/// Any set of numbers: a list, a range or a step.
fn numbers(least: i8, greatest: i8) -> impl Strategy<Value = Numbers> {
    let list = prop::collection::vec(least..=greatest, 1..4).prop_map(|matching| {
        let words: Vec<String> = matching.iter().map(ToString::to_string).collect();
        Numbers {
            text: words.join(","),
            matching,
        }
    });
    let range = (least..=greatest, least..=greatest).prop_map(|(one, other)| Numbers {
        text: format!("{}..{}", one.min(other), one.max(other)),
        matching: (one.min(other)..=one.max(other)).collect(),
    });
    let step = (least..greatest)
        .prop_flat_map(move |first| (Just(first), 1..=greatest - first))
        .prop_map(move |(first, step)| Numbers {
            text: format!("{first}/{step}"),
            matching: (first..=greatest).step_by(usize::from(step.unsigned_abs())).collect(),
        });
    prop_oneof![every(greatest), list, range, step]
}

#[derive(Debug, Clone)]
struct Model {
    day: Numbers,
    hour: Numbers,
    minute: Numbers,
}

impl Model {
    fn text(&self) -> String {
        format!("*-{} {}:{}", self.day.text, self.hour.text, self.minute.text)
    }

    /// Compares with the local time; `is_second_time` if the clock shows that time for the second time.
    fn matches(&self, wall: DateTime, is_second_time: bool) -> bool {
        let is_shown = self.day.matching.contains(&wall.day())
            && self.hour.matching.contains(&wall.hour())
            && self.minute.matching.contains(&wall.minute());
        let is_every_hour = (0..24).all(|hour| self.hour.matching.contains(&hour));
        is_shown && (is_every_hour || !is_second_time)
    }
}

fn models() -> impl Strategy<Value = Model> {
    (numbers(1, 31), numbers(0, 23), numbers(0, 59)).prop_map(|(day, hour, minute)| Model { day, hour, minute })
}

/// Times around clock changes: forward and back, by one hour, half an hour, and a whole day.
fn places() -> impl Strategy<Value = (TimeZone, Timestamp)> {
    let changes = prop_oneof![
        Just(("Europe/Berlin", "2026-03-29T01:00:00Z")),
        Just(("Europe/Berlin", "2026-10-25T01:00:00Z")),
        Just(("Australia/Lord_Howe", "2026-04-04T15:00:00Z")),
        Just(("Australia/Lord_Howe", "2026-10-03T15:30:00Z")),
        Just(("America/Sao_Paulo", "2018-02-18T02:00:00Z")),
        Just(("America/Sao_Paulo", "2018-11-04T03:00:00Z")),
        Just(("Pacific/Apia", "2011-12-30T10:00:00Z")),
        Just(("UTC", "2026-12-31T12:00:00Z")),
    ];
    (changes, -3 * 86_400_i64..86_400).prop_map(|((zone, change), seconds)| {
        let change: Timestamp = change.parse().unwrap();
        let zone = TimeZone::get(zone).unwrap();
        (zone, change.checked_add(seconds.seconds()).unwrap())
    })
}

fn is_second_time(instant: Timestamp, zone: &TimeZone) -> bool {
    zone.to_ambiguous_timestamp(zone.to_datetime(instant))
        .earlier()
        .unwrap()
        < instant
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Compares with a search minute by minute.
    #[test]
    fn the_next_instant_is_the_first_that_matches(model in models(), (zone, after) in places()) {
        let calendar: Calendar = model.text().parse().unwrap();
        let next = calendar.next_after(after, &zone);
        prop_assert!(next.is_none_or(|next| next > after && calendar.matches(next, &zone)));
        let first_minute = after.as_second().div_euclid(MINUTE_SECONDS) + 1;
        let minutes = (first_minute..first_minute + MINUTE_COUNT_MAX)
            .map(|minute| Timestamp::from_second(minute * MINUTE_SECONDS).unwrap());
        let expected = minutes.into_iter().find(|minute| {
            model.matches(zone.to_datetime(*minute), is_second_time(*minute, &zone))
        });
        let end = Timestamp::from_second((first_minute + MINUTE_COUNT_MAX) * MINUTE_SECONDS).unwrap();
        prop_assert_eq!(next.filter(|next| *next < end), expected, "{} after {}", calendar, after);
    }

    #[test]
    fn the_normalized_form_means_the_same(model in models()) {
        let calendar: Calendar = model.text().parse().unwrap();
        let again: Calendar = calendar.to_string().parse().unwrap();
        prop_assert_eq!(again, calendar);
    }

    /// Any text gives a calendar or an error, without long computation.
    #[test]
    fn any_text_gives_a_calendar_or_an_error(text in "[*0-9,./:~ MonFrid-]{0,24}|.{0,40}") {
        if let Ok(calendar) = text.parse::<Calendar>() {
            let after = "2026-03-29T00:00:00Z".parse().unwrap();
            let next = calendar.next_after(after, &TimeZone::get("Europe/Berlin").unwrap());
            prop_assert!(next.is_none_or(|next| next > after));
            prop_assert_eq!(calendar.to_string().parse::<Calendar>(), Ok(calendar));
        }
    }
}
