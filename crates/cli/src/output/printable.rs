//! Makes external text safe for a terminal.

use std::borrow::Cow;
use std::fmt::Write as _;

/// `text` with all invisible characters escaped: control characters, line ends, and marks that change the direction of
/// text.
///
/// Names come from repositories and images that others may have written; unescaped, they could move the cursor, change
/// colours or hide adjacent text.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        if is_hidden(character) {
            safe.extend(character.escape_default());
        } else {
            safe.push(character);
        }
    }
    Cow::Owned(safe)
}

/// Escapes the same characters in `json`, where the serializer escapes only those below 32. They occur in strings only.
pub(super) fn printable_json(json: String) -> String {
    if !json.chars().any(is_hidden) {
        return json;
    }
    let mut safe = String::with_capacity(json.len() + 8);
    for character in json.chars() {
        if is_hidden(character) {
            // None of them needs two UTF-16 units.
            write!(safe, "\\u{:04x}", u32::from(character)).expect("a string can be written to");
        } else {
            safe.push(character);
        }
    }
    safe
}

fn is_hidden(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200e}' | '\u{200f}' | '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::{printable, printable_json};

    #[test]
    fn only_what_would_not_show_is_escaped() {
        assert_eq!(printable("Büro データ \"x\""), "Büro データ \"x\"");
        assert_eq!(printable("a\u{1b}[2Jb\nc\u{202e}d"), "a\\u{1b}[2Jb\\nc\\u{202e}d");
    }

    #[test]
    fn json_means_the_same_when_it_is_escaped() {
        let name = "Büro \u{9b}31m \u{202e}x \u{7f} \u{1b} \\";
        let json = serde_json::to_string(name).unwrap();
        let safe = printable_json(json);
        assert_eq!(safe, "\"Büro \\u009b31m \\u202ex \\u007f \\u001b \\\\\"");
        assert_eq!(serde_json::from_str::<String>(&safe).unwrap(), name);
    }
}
