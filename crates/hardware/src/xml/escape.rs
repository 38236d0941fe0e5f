//! Escapes text for XML.
//!
//! Source: XML 1.0, sections 2.2 (characters), 2.11 (ends of lines) and 3.3.3 (values of attributes).

use std::fmt::Write as _;

/// Whether XML 1.0 can represent a character: it has no control characters but white space, not even as references.
pub(crate) fn is_representable(character: char) -> bool {
    match character {
        '\t' | '\n' | '\r' => true,
        '\u{fffe}' | '\u{ffff}' => false,
        _ => character >= ' ',
    }
}

/// Escapes `text` for the content of an element, without unrepresentable characters.
pub(super) fn escaped_text(text: &str) -> String {
    escaped(text, &['\r'])
}

/// Escapes `text` for the value of an attribute in quotes of either kind, without unrepresentable characters.
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
            other if is_representable(other) => escaped.push(other),
            _ => {}
        }
    }
    escaped
}
