//! Recipients of notifications: channel and events.

use super::document::Section;
use super::form::Value;
use super::{ConfigError, keys};
use crate::config::values::{Values, count, place, text, values_of};

/// A recipient of notifications.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipient {
    /// The name that jobs use.
    pub name: String,
    /// The line of its section.
    pub line: u32,
    /// The channel.
    pub channel: Channel,
    /// The events.
    pub on: Vec<Event>,
}

/// A channel for notifications.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Channel {
    /// A mail, sent by the host's mail system.
    Mail {
        /// The recipient's address.
        to: Vec<String>,
        /// The sender's address; the mail system's default if not set.
        from: Option<String>,
        /// The program that sends the mail; `sendmail` in the path if not set.
        sendmail: Option<String>,
    },
    /// A JSON document, sent by HTTP POST.
    Webhook {
        /// The URL.
        url: String,
        /// A file whose first line is sent as a bearer token.
        token_file: Option<String>,
    },
    /// A message to a topic of ntfy.
    Ntfy {
        /// The topic's URL.
        url: String,
        /// A file whose first line is sent as a bearer token.
        token_file: Option<String>,
        /// From 1 to 5; by default 4 for failures and 2 for recoveries.
        priority: Option<u8>,
    },
}

/// An event of a notification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Event {
    /// A job fails, still fails, or has recovered.
    Failure,
    /// A machine has no fresh snapshot, still has none, or has one again.
    Silence,
    /// A job completed with warnings.
    Warnings,
    /// A job completed.
    Success,
}

impl Event {
    /// All events.
    pub const ALL: [Self; 4] = [Self::Failure, Self::Silence, Self::Warnings, Self::Success];

    /// The word in the file.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Failure => "failure",
            Self::Silence => "silence",
            Self::Warnings => "warnings",
            Self::Success => "success",
        }
    }
}

/// Reads a recipient; `None` if it has errors.
pub(super) fn read(section: &Section, errors: &mut Vec<ConfigError>) -> Option<Recipient> {
    let values = values_of(section, keys::NOTIFY, errors);
    let has = |key: &str| section.get(key);
    let missing = |what: &str| ConfigError::Missing {
        line: section.line,
        place: place(section),
        what: what.to_owned(),
    };
    let Some(by) = text(&values, "by") else {
        if has("by").is_none() {
            errors.push(missing("by = \"mail\", \"webhook\" or \"ntfy\""));
        }
        return None;
    };
    let (needed, foreign): (&str, &[&str]) = match &by[..] {
        "mail" => ("to", &["url", "token_file", "priority"]),
        "webhook" => ("url", &["to", "from", "sendmail", "priority"]),
        _ => ("url", &["to", "from", "sendmail"]),
    };
    for entry in foreign.iter().filter_map(|key| has(key)) {
        errors.push(ConfigError::Together {
            line: entry.line,
            place: place(section),
            what: format!("{} is not a setting of {by}", entry.key),
        });
    }
    if has(needed).is_none() {
        errors.push(missing(needed));
    }
    check_addresses(section, &values, errors);
    let channel = channel(&by, &values)?;
    Some(Recipient {
        name: section.name.clone().unwrap_or_default(),
        line: section.line,
        channel,
        on: events(values.get("on").map(|(_, value)| value)),
    })
}

fn check_addresses(section: &Section, values: &Values, errors: &mut Vec<ConfigError>) {
    let mut wrong = |line: u32, key: &str, wanted: String| {
        errors.push(ConfigError::Value {
            line,
            place: place(section),
            key: key.to_owned(),
            wanted,
        });
    };
    if let Some((line, value)) = values.get("url")
        && !value.texts().iter().all(|url| is_url(url))
    {
        let wanted = "an address that begins with https:// or http://, without spaces";
        wrong(*line, "url", wanted.to_owned());
    }
    for key in ["to", "from"] {
        let Some((line, value)) = values.get(key) else { continue };
        if let Some(text) = value.texts().iter().find(|text| !is_address(text)) {
            wrong(*line, key, format!("a mail address, which {text:?} is not"));
        }
    }
}

/// The channel; `None` if it has no address.
fn channel(by: &str, values: &Values) -> Option<Channel> {
    let text = |key: &str| text(values, key);
    Some(match by {
        "mail" => Channel::Mail {
            to: values.get("to")?.1.texts().to_vec(),
            from: text("from"),
            sendmail: text("sendmail"),
        },
        "webhook" => Channel::Webhook {
            url: text("url")?,
            token_file: text("token_file"),
        },
        _ => Channel::Ntfy {
            url: text("url")?,
            token_file: text("token_file"),
            priority: count(values, "priority").and_then(|priority| u8::try_from(priority).ok()),
        },
    })
}

/// By default, the events are those of problems.
fn events(value: Option<&Value>) -> Vec<Event> {
    let Some(value) = value else {
        return vec![Event::Failure, Event::Silence];
    };
    let words = value.texts();
    let is_named = |event: &Event| words.iter().any(|word| word == event.word());
    Event::ALL.into_iter().filter(is_named).collect()
}

fn is_url(url: &str) -> bool {
    let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    rest.is_some_and(|rest| !rest.is_empty()) && !url.contains(|c: char| c.is_whitespace() || c.is_control())
}

/// Whether a text is valid in a mail header: local users have no `@`.
fn is_address(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with('-')
        && !text.contains(|c: char| c.is_whitespace() || c.is_control() || c == ',')
}
