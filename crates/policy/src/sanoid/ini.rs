//! The INI syntax: sections, keys, values, and their lines.
//!
//! Source: the grammar of Perl's Config::IniFiles 3, which sanoid uses. Comments are whole lines that begin with `#` or
//! `;`: text after a value belongs to the value.

use super::SanoidError;

/// A section, in the order of the file; repeated sections are merged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct IniSection {
    pub(super) name: String,
    pub(super) entries: Vec<IniEntry>,
}

/// A key and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct IniEntry {
    pub(super) key: String,
    pub(super) value: String,
    /// The line, from 1.
    pub(super) line: u32,
}

/// Parses a text. Lines that cannot be parsed are added to `errors` and skipped.
pub(super) fn sections(text: &str, errors: &mut Vec<SanoidError>) -> Vec<IniSection> {
    let mut sections: Vec<IniSection> = Vec::new();
    let mut present = None;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    for (number, line) in (1..).zip(text.lines()) {
        let content = line.trim();
        if content.is_empty() || content.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = content.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            let name = name.trim();
            if name.is_empty() {
                errors.push(malformed(number, content));
                continue;
            }
            let place = sections.iter().position(|section| section.name == name);
            present = Some(place.unwrap_or_else(|| {
                sections.push(IniSection {
                    name: name.to_owned(),
                    entries: Vec::new(),
                });
                sections.len() - 1
            }));
            continue;
        }
        let parts = content.split_once('=').map(|(key, value)| (key.trim(), value.trim()));
        match (parts, present) {
            (Some((key, value)), Some(section)) if !key.is_empty() && !value.starts_with("<<") => {
                sections[section].entries.push(IniEntry {
                    key: key.to_owned(),
                    value: value.to_owned(),
                    line: number,
                });
            }
            (Some((key, _)), None) if !key.is_empty() => errors.push(SanoidError::OutsideSection {
                line: number,
                key: key.to_owned(),
            }),
            _ => errors.push(malformed(number, content)),
        }
    }
    sections
}

fn malformed(line: u32, text: &str) -> SanoidError {
    SanoidError::Malformed {
        line,
        text: text.chars().take(80).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::sections;
    use crate::sanoid::SanoidError;

    #[test]
    fn sections_keys_and_values_are_where_they_were_written() {
        let mut errors = Vec::new();
        let text = "\u{feff}# a\n[ tank/a b ]\r\n\t daily = 1 # not a comment \n;b\n\nhourly=\n[x]\npath = a = b\n[tank/a b]\nweekly=2";
        let found = sections(text, &mut errors);
        assert_eq!(errors, []);
        let found = found.iter().map(|section| {
            let entries = section.entries.iter();
            let entries = entries.map(|entry| (entry.line, &entry.key[..], &entry.value[..]));
            (&section.name[..], entries.collect::<Vec<_>>())
        });
        assert_eq!(
            found.collect::<Vec<_>>(),
            [
                (
                    "tank/a b",
                    vec![
                        (3, "daily", "1 # not a comment"),
                        (6, "hourly", ""),
                        (10, "weekly", "2")
                    ]
                ),
                ("x", vec![(8, "path", "a = b")]),
            ]
        );
    }

    #[test]
    fn malformed_lines_are_errors_with_their_number() {
        let mut errors = Vec::new();
        let found = sections("a = 1\n[]\n[x]\nno sign\n= 2\nb = <<EOT\n[y\nz = 3", &mut errors);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].entries.len(), 1);
        let lines = errors.iter().map(|error| match error {
            SanoidError::OutsideSection { line, .. } => (*line, true),
            SanoidError::Malformed { line, .. } => (*line, false),
            other => panic!("{other}"),
        });
        let expected = [(1, true), (2, false), (4, false), (5, false), (6, false), (7, false)];
        assert_eq!(lines.collect::<Vec<_>>(), expected);
    }
}
