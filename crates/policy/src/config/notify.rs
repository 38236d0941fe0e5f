//! Who is told, by which way, and of what.

use super::document::Section;
use super::form::Value;
use super::{ConfigError, keys};
use crate::config::values::{Values, count, place, text, values_of};

/// Somebody who is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notify {
    /// What jobs call him.
    pub name: String,
    /// The line of his section.
    pub line: u32,
    /// By which way.
    pub channel: Channel,
    /// Of what.
    pub on: Vec<Event>,
}

/// A way to tell somebody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Channel {
    /// A mail, handed to the host's own mail system.
    Mail {
        /// To whom.
        to: Vec<String>,
        /// From whom; the mail system's own choice where nobody says.
        from: Option<String>,
        /// The program that takes it; `sendmail` of the path where nobody says.
        sendmail: Option<String>,
    },
    /// A JSON document, posted.
    Webhook {
        /// Where to.
        url: String,
        /// A file whose first line is sent as a bearer token.
        token_file: Option<String>,
    },
    /// A message to a topic of ntfy.
    Ntfy {
        /// The topic's address.
        url: String,
        /// A file whose first line is sent as a bearer token.
        token_file: Option<String>,
        /// From 1 to 5; where nobody says, 4 for what is bad and 2 for what is good.
        priority: Option<u8>,
    },
}

/// What somebody is told of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Event {
    /// A job fails; it fails still; it is well again.
    Failure,
    /// A machine has no fresh snapshot; it has none still; it has one again.
    Silence,
    /// A job was done, and there is something to look at.
    Warnings,
    /// A job was done.
    Success,
}

impl Event {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Failure, Self::Silence, Self::Warnings, Self::Success];

    /// Its word in the file.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Failure => "failure",
            Self::Silence => "silence",
            Self::Warnings => "warnings",
            Self::Success => "success",
        }
    }
}

/// Somebody, where nothing is wrong with it.
pub(super) fn read(section: &Section, errors: &mut Vec<ConfigError>) -> Option<Notify> {
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
            what: format!("{} is nothing that {by} has", entry.key),
        });
    }
    if has(needed).is_none() {
        errors.push(missing(needed));
    }
    check_addresses(section, &values, errors);
    let channel = channel(&by, &values)?;
    Some(Notify {
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
            wrong(*line, key, format!("an address of mail; {text:?} is none"));
        }
    }
}

/// The way; none where it has no address.
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

/// What is bad, where nobody says.
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

/// Whether a text can stand in the head of a mail: local users have no `@`.
fn is_address(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with('-')
        && !text.contains(|c: char| c.is_whitespace() || c.is_control() || c == ',')
}
