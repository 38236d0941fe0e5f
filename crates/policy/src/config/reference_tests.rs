//! Compares `docs/configuration.md` with the parser: it has every setting with its type and default, and no others.

use std::collections::BTreeMap;

use super::form::Form;
use super::keys::{DAEMON, JOB, NOTIFY, POOL, REPOSITORY};
use super::kinds::{JobOption, KEEP, KINDS};

const TEXT: &str = include_str!("../../../../docs/configuration.md");

/// The rows of the table below a heading, by the code in the first cell.
fn rows(heading: &str) -> BTreeMap<&'static str, Vec<&'static str>> {
    let (_, section) = TEXT
        .split_once(&format!("\n{heading}\n"))
        .unwrap_or_else(|| panic!("there is no heading {heading}"));
    let lines = section.lines().take_while(|line| !line.starts_with('#'));
    let rows = lines.filter_map(|line| line.strip_prefix("| `"));
    rows.map(|row| {
        let (name, cells) = row.split_once("` |").unwrap();
        (name, cells.trim_end_matches('|').split('|').map(str::trim).collect())
    })
    .collect()
}

/// The words between backticks.
fn code(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// Whether a cell describes `form`.
fn describes(cell: &str, form: Form) -> bool {
    match form {
        // The command checks sizes.
        Form::Text => cell == "text" || cell == "size",
        Form::Path => cell == "path",
        Form::Flag => cell == "flag",
        Form::Count { min, max } => cell == format!("{min} to {max}"),
        Form::Duration => cell == "duration",
        Form::Span => cell == "span",
        Form::Texts => cell == "list",
        Form::Calendars => cell == "calendars",
        Form::OneOf(words) | Form::SomeOf(words) => code(cell) == words,
    }
}

/// Asserts that the tables below these headings have exactly these settings.
fn check(headings: &[&str], settings: impl Iterator<Item = (&'static str, Form)>) {
    let mut rows: BTreeMap<_, _> = headings.iter().flat_map(|heading| rows(heading)).collect();
    for (name, form) in settings.collect::<BTreeMap<_, _>>() {
        let cells = rows
            .remove(name)
            .unwrap_or_else(|| panic!("{name} is missing in {headings:?}"));
        assert!(describes(cells[0], form), "{name} is {form:?}, not {}", cells[0]);
        assert!(!cells.last().unwrap().is_empty(), "{name} has no meaning");
    }
    assert!(rows.is_empty(), "{headings:?}: no such settings: {:?}", rows.keys());
}

#[test]
fn sections_have_exactly_the_settings_of_the_reference() {
    for (heading, keys) in [
        ("## `[daemon]`", DAEMON),
        ("## `[repositories.NAME]`", REPOSITORY),
        ("## `[pools.NAME]`", POOL),
        ("## `[notify.NAME]`", NOTIFY),
    ] {
        check(&[heading], keys.iter().map(|key| (key.name, key.form)));
    }
    let of_option = |option: &JobOption| (option.key, option.form);
    check(&["## `[retention.NAME]`"], KEEP.iter().map(of_option));
    check(&["## `[jobs.NAME]`"], JOB.iter().map(|(key, _)| (key.name, key.form)));
    let options = KINDS
        .iter()
        .flat_map(|kind| kind.options)
        .filter(|option| !KEEP.contains(option));
    check(
        &["### Targets of a job", "### Options of a job"],
        options.map(of_option),
    );
}

#[test]
fn defaults_of_jobs_are_those_of_the_reference() {
    let rows = rows("## `[jobs.NAME]`");
    for (key, default) in JOB.iter().filter(|(_, default)| !default.is_empty()) {
        assert_eq!(rows[key.name][1].trim_matches('`'), *default, "{}", key.name);
    }
}

#[test]
fn kinds_of_jobs_take_the_settings_of_the_reference() {
    let mut rows = rows("### Kinds of jobs");
    for kind in KINDS {
        let cells = rows
            .remove(kind.name)
            .unwrap_or_else(|| panic!("{} is missing", kind.name));
        let command = format!("`holdfast {}`", kind.verb.join(" "));
        assert!(cells[0].contains(&command), "{command} is not {}", cells[0]);
        let mut described = code(cells[1]);
        if let Some(at) = described.iter().position(|word| *word == "[retention.NAME]") {
            described.splice(at..=at, KEEP.iter().map(|rule| rule.key));
        }
        described.sort_unstable();
        let mut keys: Vec<&str> = kind.options.iter().map(|option| option.key).collect();
        keys.sort_unstable();
        assert_eq!(described, keys, "{}", kind.name);
    }
    assert!(rows.is_empty(), "no such kinds: {:?}", rows.keys());
}

/// Every example is valid together with the sections that it refers to.
#[test]
fn examples_are_valid() {
    let examples: Vec<&str> = TEXT
        .split("```toml\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap())
        .collect();
    assert!(examples.len() >= 8, "{}", examples.len());
    let (whole, parts) = examples.split_first().unwrap();
    super::Config::parse(whole).unwrap();
    let others = "\n[notify.admin]\nby = \"mail\"\nto = \"root\"\n";
    super::Config::parse(&format!("version = 1\n{}{others}", parts.concat())).unwrap();
}
