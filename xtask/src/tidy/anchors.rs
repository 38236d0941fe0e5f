//! The anchors of a document's headings, by GitHub's rule.

use std::collections::{BTreeMap, BTreeSet};

/// The anchors of all headings; a repeated heading gets a number.
pub(super) fn anchors(text: &str) -> BTreeSet<String> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut anchors = BTreeSet::new();
    for heading in headings(text) {
        let slug = slug(heading);
        let count = counts.entry(slug.clone()).or_default();
        anchors.insert(if *count == 0 { slug } else { format!("{slug}-{count}") });
        *count += 1;
    }
    anchors
}

/// The texts of the headings; code blocks are skipped.
fn headings(text: &str) -> impl Iterator<Item = &str> {
    let mut in_code = false;
    text.lines().filter_map(move |line| {
        in_code ^= line.trim_start().starts_with("```");
        let words = line.trim_start_matches('#');
        let level = line.len() - words.len();
        let is_heading = !in_code && (1..=6).contains(&level) && words.starts_with(' ');
        is_heading.then(|| words.trim().trim_end_matches('#').trim_end())
    })
}

/// Lower case, without punctuation, and with `-` for each space. For a link, only its text counts.
fn slug(heading: &str) -> String {
    let mut slug = String::new();
    let mut rest = heading;
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        if c == ']' && rest.starts_with('(') {
            rest = rest.split_once(')').map_or("", |(_, after)| after);
        } else if c == ' ' {
            slug.push('-');
        } else if c.is_alphanumeric() || matches!(c, '-' | '_') {
            slug.extend(c.to_lowercase());
        }
    }
    slug
}

#[cfg(test)]
mod tests {
    use super::anchors;

    fn of(text: &str) -> Vec<String> {
        anchors(text).into_iter().collect()
    }

    #[test]
    fn punctuation_goes_and_spaces_become_dashes() {
        assert_eq!(of("# What is it, and what not?"), ["what-is-it-and-what-not"]);
        assert_eq!(of("## `[pools.NAME]`"), ["poolsname"]);
        assert_eq!(of("### `run`, `runs`"), ["run-runs"]);
        assert_eq!(of("## XCP-ng & co. ##"), ["xcp-ng--co"]);
        assert_eq!(of("## x_y: [the page](a/b.md) é"), ["x_y-the-page-é"]);
    }

    #[test]
    fn a_repeated_heading_gets_a_number() {
        assert_eq!(of("# A\n## A\n## B\n### A\n"), ["a", "a-1", "a-2", "b"]);
    }

    #[test]
    fn only_headings_count() {
        assert_eq!(
            of("#no\n####### seven\n```\n# comment\n```\ntext # not\n# Yes\n"),
            ["yes"]
        );
    }
}
