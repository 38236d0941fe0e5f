//! Text from outside made safe for a terminal.

use std::borrow::Cow;

/// `text` with everything escaped that would not show as a character: control characters, line ends, and marks that turn
/// the direction of text around.
///
/// Names come from repositories and images that others may have written; shown raw, they could move the cursor, recolour
/// or hide what stands beside them.
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

fn is_hidden(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200e}' | '\u{200f}' | '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn only_what_would_not_show_is_escaped() {
        assert_eq!(printable("Büro データ \"x\""), "Büro データ \"x\"");
        assert_eq!(printable("a\u{1b}[2Jb\nc\u{202e}d"), "a\\u{1b}[2Jb\\nc\\u{202e}d");
    }
}
