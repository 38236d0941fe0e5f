//! The types of values of settings.

use super::document::RawValue;
use crate::{Calendar, FixedDuration, Span};

/// The type of a setting's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Any non-empty text.
    Text,
    /// An absolute path: a service has no working directory.
    Path,
    /// true or false.
    Flag,
    /// A whole number in a range.
    Count { min: u64, max: u64 },
    /// `5min`.
    Duration,
    /// `7d`, by the calendar.
    Span,
    /// One text, or a list of texts.
    Texts,
    /// One calendar expression, or a list of them.
    Calendars,
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// A list of these words.
    SomeOf(&'static [&'static str]),
}

/// A value that was checked against the form of its setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Value {
    Text(String),
    Flag(bool),
    Count(u64),
    Duration(FixedDuration),
    Texts(Vec<String>),
    Calendars(Vec<Calendar>),
}

impl Value {
    pub(super) fn shown(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Flag(flag) => flag.to_string(),
            Self::Count(count) => count.to_string(),
            Self::Duration(duration) => duration.to_string(),
            Self::Texts(texts) => texts.join(", "),
            Self::Calendars(calendars) => calendars.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        }
    }

    pub(super) fn texts(&self) -> &[String] {
        match self {
            Self::Text(text) => std::slice::from_ref(text),
            Self::Texts(texts) => texts,
            _ => &[],
        }
    }
}

impl Form {
    /// Checks a value; the error describes what is expected.
    pub(super) fn read(self, raw: &RawValue) -> Result<Value, String> {
        let wanted = || self.wanted();
        match (self, raw) {
            (Self::Text, RawValue::Text(text)) if !text.trim().is_empty() => Ok(Value::Text(text.clone())),
            (Self::Path, RawValue::Text(text)) if text.starts_with('/') => Ok(Value::Text(text.clone())),
            (Self::Flag, RawValue::Flag(flag)) => Ok(Value::Flag(*flag)),
            (Self::Count { min, max }, RawValue::Number(Ok(number))) => {
                let count = u64::try_from(*number).ok().filter(|count| (min..=max).contains(count));
                count.map(Value::Count).ok_or_else(wanted)
            }
            (Self::Duration, RawValue::Text(text)) => text.parse().map(Value::Duration).map_err(because(&wanted())),
            (Self::Span, RawValue::Text(text)) => {
                let span = text.parse::<Span>().map_err(because(&wanted()))?;
                Ok(Value::Text(span.to_string()))
            }
            (Self::OneOf(words), RawValue::Text(text)) if words.contains(&&text[..]) => Ok(Value::Text(text.clone())),
            (Self::Texts, raw) => texts(raw).map(Value::Texts).ok_or_else(wanted),
            (Self::SomeOf(words), raw) => {
                let texts = texts(raw).filter(|texts| texts.iter().all(|text| words.contains(&&text[..])));
                texts.map(Value::Texts).ok_or_else(wanted)
            }
            (Self::Calendars, raw) => {
                let texts = texts(raw).ok_or_else(wanted)?;
                let calendars = texts.iter().map(|text| text.parse::<Calendar>());
                let calendars = calendars.collect::<Result<_, _>>().map_err(because(&wanted()))?;
                Ok(Value::Calendars(calendars))
            }
            _ => Err(wanted()),
        }
    }

    fn wanted(self) -> String {
        match self {
            Self::Text => "a text in quotes".to_owned(),
            Self::Path => "an absolute path in quotes".to_owned(),
            Self::Flag => "true or false".to_owned(),
            Self::Count { min, max } => format!("a whole number from {min} to {max}"),
            Self::Duration => "a length of time like \"90s\", \"5min\", \"2h\" or \"1d\"".to_owned(),
            Self::Span => "a span of the calendar like \"12h\", \"7d\", \"6m\" (months) or \"1y\"".to_owned(),
            Self::Texts => "a text in quotes, or a list of texts".to_owned(),
            Self::Calendars => {
                "a calendar expression like \"daily\" or \"Mon..Fri 02:30\", or a list of them".to_owned()
            }
            Self::OneOf(words) => format!("one of {}", quoted(words)),
            Self::SomeOf(words) => format!("a list of some of {}", quoted(words)),
        }
    }
}

fn because<E: std::fmt::Display>(wanted: &str) -> impl Fn(E) -> String {
    let wanted = wanted.to_owned();
    move |error| format!("{wanted}: {error}")
}

fn quoted(words: &[&str]) -> String {
    words
        .iter()
        .map(|word| format!("{word:?}"))
        .collect::<Vec<_>>()
        .join(", ")
}

/// One text or several; `None` if there is none, or one is empty.
fn texts(raw: &RawValue) -> Option<Vec<String>> {
    let one = |raw: &RawValue| match raw {
        RawValue::Text(text) if !text.trim().is_empty() => Some(text.clone()),
        _ => None,
    };
    match raw {
        RawValue::List(values) if !values.is_empty() => values.iter().map(one).collect(),
        RawValue::List(_) => None,
        raw => one(raw).map(|text| vec![text]),
    }
}
