//! The TOML document: sections, keys and values, each with its line.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::ConfigError;
use crate::config::section_names::{NAMED, ROOT, SINGLE};

/// A section and its entries.
#[derive(Debug)]
pub(super) struct Section {
    /// `daemon`, `jobs`; empty for the lines before the first section.
    pub(super) group: String,
    /// `nightly` of `[jobs.nightly]`.
    pub(super) name: Option<String>,
    pub(super) line: u32,
    pub(super) entries: Vec<Entry>,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) line: u32,
    pub(super) value: RawValue,
}

/// A value that was not checked yet.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum RawValue {
    Text(String),
    Flag(bool),
    /// A whole number; its text if it is not an `i64`.
    Number(Result<i64, String>),
    List(Vec<RawValue>),
    /// A type that no setting uses: a table, a date, a fraction.
    Other(&'static str),
}

impl Section {
    /// The title as written: `jobs.nightly`.
    pub(super) fn title(&self) -> String {
        match &self.name {
            Some(name) => format!("{}.{name}", self.group),
            None => self.group.clone(),
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.key == key)
    }
}

/// The sections of a file, in order. Invalid TOML and unknown sections are added to `errors`.
pub(super) fn sections(text: &str, errors: &mut Vec<ConfigError>) -> Vec<Section> {
    let lines = Lines::new(text);
    let (root, wrong) = DeTable::parse_recoverable(text);
    errors.extend(wrong.iter().map(|error| ConfigError::Syntax {
        line: error.span().map_or(1, |span| lines.line(span.start)),
        what: error.message().to_owned(),
    }));
    let mut top = Section {
        group: ROOT.to_owned(),
        name: None,
        line: 1,
        entries: Vec::new(),
    };
    let mut sections = Vec::new();
    for (key, value) in in_order(root.get_ref()) {
        let line = lines.line(key.span().start);
        let group: &str = key.get_ref();
        let is_named = NAMED.contains(&group);
        match value.get_ref() {
            DeValue::Table(table) if is_named => {
                for (name, value) in in_order(table) {
                    let line = lines.line(name.span().start);
                    match value.get_ref() {
                        DeValue::Table(table) => {
                            sections.push(section(group, Some(name.get_ref()), line, table, &lines));
                        }
                        _ => errors.push(ConfigError::NoSection {
                            line,
                            group: group.to_owned(),
                            name: name.get_ref().to_string(),
                        }),
                    }
                }
            }
            DeValue::Table(table) if SINGLE.contains(&group) => {
                sections.push(section(group, None, line, table, &lines));
            }
            DeValue::Table(_) => errors.push(ConfigError::unknown_section(line, group)),
            _ if is_named || SINGLE.contains(&group) => errors.push(ConfigError::NoSection {
                line,
                group: group.to_owned(),
                name: "NAME".to_owned(),
            }),
            value => top.entries.push(Entry {
                key: group.to_owned(),
                line,
                value: raw(value),
            }),
        }
    }
    sections.insert(0, top);
    sections
}

/// The entries of a table in the order of the file.
fn in_order<'t, 'i>(table: &'t DeTable<'i>) -> Vec<(&'t TomlKey<'i>, &'t Spanned<DeValue<'i>>)> {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    entries
}

type TomlKey<'i> = Spanned<std::borrow::Cow<'i, str>>;

fn section(group: &str, name: Option<&str>, line: u32, table: &DeTable<'_>, lines: &Lines) -> Section {
    let entries = in_order(table).into_iter().map(|(key, value)| Entry {
        key: key.get_ref().to_string(),
        line: lines.line(key.span().start),
        value: raw(value.get_ref()),
    });
    Section {
        group: group.to_owned(),
        name: name.map(str::to_owned),
        line,
        entries: entries.collect(),
    }
}

fn raw(value: &DeValue<'_>) -> RawValue {
    match value {
        DeValue::String(text) => RawValue::Text(text.to_string()),
        DeValue::Boolean(flag) => RawValue::Flag(*flag),
        DeValue::Integer(number) => {
            let text = number.as_str();
            RawValue::Number(i64::from_str_radix(text, number.radix()).map_err(|_| text.to_owned()))
        }
        DeValue::Array(values) => RawValue::List(values.iter().map(|value| raw(value.get_ref())).collect()),
        DeValue::Float(_) => RawValue::Other("a fraction"),
        DeValue::Datetime(_) => RawValue::Other("a date"),
        DeValue::Table(_) => RawValue::Other("a table"),
    }
}

/// The offsets of the ends of lines.
struct Lines {
    ends: Vec<usize>,
}

impl Lines {
    fn new(text: &str) -> Self {
        Self {
            ends: text.match_indices('\n').map(|(offset, _)| offset).collect(),
        }
    }

    /// The line of the byte at `offset`, from 1.
    fn line(&self, offset: usize) -> u32 {
        let before = self.ends.partition_point(|end| *end < offset);
        u32::try_from(before + 1).unwrap_or(u32::MAX)
    }
}
