//! Patterns for machine names: `*` matches any text, `?` one character, `[a-c]` one of these characters, `[!a-c]` any
//! other character.

use std::fmt;

/// A pattern for names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob {
    text: String,
    parts: Vec<GlobPart>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum GlobPart {
    Any,
    One,
    Exactly(char),
    Of {
        ranges: Vec<(char, char)>,
        is_negated: bool,
    },
}

/// Characters that make a text a pattern.
const SPECIAL: [char; 3] = ['*', '?', '['];

impl Glob {
    /// Whether a text has special characters.
    pub fn is_one(text: &str) -> bool {
        text.contains(SPECIAL)
    }

    /// Parses a pattern; a text without special characters matches only itself.
    ///
    /// # Errors
    /// A bracket that is not closed, or is empty.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = text.chars();
        while let Some(character) = rest.next() {
            parts.push(match character {
                '*' => GlobPart::Any,
                '?' => GlobPart::One,
                '[' => {
                    let (part, after) = bracket(rest.as_str())
                        .ok_or_else(|| format!("{text:?} has a '[' without its ']', or with nothing in between"))?;
                    rest = after.chars();
                    part
                }
                other => GlobPart::Exactly(other),
            });
        }
        Ok(Self {
            text: text.to_owned(),
            parts,
        })
    }

    /// Whether the whole `name` matches.
    pub fn matches(&self, name: &str) -> bool {
        let name: Vec<char> = name.chars().collect();
        let (mut at, mut part) = (0, 0);
        // The position of the last `*` and of the text that it matches: only the last `*` has to be retried.
        let mut retry = None;
        while at < name.len() {
            match self.parts.get(part) {
                Some(GlobPart::Any) => {
                    retry = Some((part, at));
                    part += 1;
                }
                Some(one) if one.takes(name[at]) => {
                    at += 1;
                    part += 1;
                }
                _ => match retry {
                    Some((star, reach)) => {
                        retry = Some((star, reach + 1));
                        at = reach + 1;
                        part = star + 1;
                    }
                    None => return false,
                },
            }
        }
        self.parts[part..].iter().all(|part| *part == GlobPart::Any)
    }
}

impl fmt::Display for Glob {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)
    }
}

impl GlobPart {
    fn takes(&self, character: char) -> bool {
        match self {
            Self::Any => false,
            Self::One => true,
            Self::Exactly(wanted) => *wanted == character,
            Self::Of { ranges, is_negated } => {
                let is_in = ranges.iter().any(|(first, last)| (first..=last).contains(&&character));
                is_in != *is_negated
            }
        }
    }
}

/// Parses the set after a `[`. Also returns the text after its `]`. A `]` at the start belongs to the set.
fn bracket(text: &str) -> Option<(GlobPart, &str)> {
    let (is_negated, inner) = match text.strip_prefix(['!', '^']) {
        Some(inner) => (true, inner),
        None => (false, text),
    };
    let first_length = inner.chars().next()?.len_utf8();
    let end = first_length + inner[first_length..].find(']')?;
    let characters: Vec<char> = inner[..end].chars().collect();
    let mut ranges = Vec::new();
    let mut rest = &characters[..];
    while let [first, after @ ..] = rest {
        if let ['-', last, others @ ..] = after {
            ranges.push((*first, *last));
            rest = others;
        } else {
            ranges.push((*first, *first));
            rest = after;
        }
    }
    Some((GlobPart::Of { ranges, is_negated }, &inner[end + 1..]))
}

#[cfg(test)]
mod tests {
    use super::Glob;

    fn matches(pattern: &str, name: &str) -> bool {
        Glob::parse(pattern).unwrap().matches(name)
    }

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name) in [
            ("*", ""),
            ("*", "web1"),
            ("web*", "web"),
            ("web?", "web1"),
            ("*-db-*", "eu-db-db-1"),
            ("a*b*c", "axxbyybc"),
            ("[a-c]x", "bx"),
            ("[!a-c]x", "dx"),
            ("[]a]", "]"),
            ("[a-]", "-"),
            ("größe?", "größe1"),
            ("web1", "web1"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [
            ("web", "web1"),
            ("web?", "web"),
            ("*b", "abc"),
            ("[a-c]x", "dx"),
            ("[!a-c]x", "ax"),
            ("a*b*c", "acb"),
            ("", "a"),
        ] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn a_bracket_without_end_is_refused_and_many_stars_take_no_time() {
        for pattern in ["[", "a[", "[]", "[!", "[a"] {
            assert!(Glob::parse(pattern).is_err(), "{pattern}");
        }
        let pattern = "*a".repeat(100) + "b";
        assert!(!matches(&pattern, &"a".repeat(10_000)));
    }
}
