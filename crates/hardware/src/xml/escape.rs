//! Text as it may stand in XML.
//!
//! Source: XML 1.0, sections 2.2 (characters), 2.11 (ends of lines) and 3.3.3 (values of attributes).

use std::fmt::Write as _;

/// `text` as it may stand in an element. Characters that XML 1.0 cannot hold are left out.
pub(super) fn escaped_text(text: &str) -> String {
    escaped(text, &['\r'])
}

/// `text` as it may stand in an attribute's value, in quotes of either kind. Characters that XML 1.0 cannot hold are left out.
pub(super) fn escaped_value(text: &str) -> String {
    escaped(text, &['\r', '\n', '\t'])
}

/// Escapes `text`, with references for the white space that a parser would change.
fn escaped(text: &str, references: &[char]) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&apos;"),
            space if references.contains(&space) => {
                write!(escaped, "&#{};", u32::from(space)).expect("a string takes all");
            }
            '\t' | '\n' | '\r' => escaped.push(character),
            control if control < ' ' || matches!(control, '\u{fffe}' | '\u{ffff}') => {}
            other => escaped.push(other),
        }
    }
    escaped
}
