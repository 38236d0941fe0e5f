//! The address of a network card, which everybody writes in another way.

/// `text` in lower case with colons; nothing where it is no address of six bytes. Colons, dashes, dots or nothing may stand between them.
pub(crate) fn address(text: &str) -> Option<String> {
    let digits: Vec<char> = text
        .trim()
        .chars()
        .filter(|character| !matches!(character, ':' | '-' | '.'))
        .map(|character| character.to_ascii_lowercase())
        .take(13)
        .collect();
    if digits.len() != 12 || !digits.iter().all(char::is_ascii_hexdigit) {
        return None;
    }
    let bytes: Vec<String> = digits.chunks(2).map(|pair| pair.iter().collect()).collect();
    Some(bytes.join(":"))
}

#[cfg(test)]
mod tests {
    use super::address;

    #[test]
    fn addresses_are_read_in_every_notation() {
        for text in [
            "080027A1E615",
            "08:00:27:a1:e6:15",
            "08-00-27-A1-E6-15",
            " 0800.27a1.e615 ",
        ] {
            assert_eq!(address(text).as_deref(), Some("08:00:27:a1:e6:15"), "{text}");
        }
        for text in ["", "0", "08:00:27:a1:e6", "08:00:27:a1:e6:15:00", "08:00:27:a1:e6:1g"] {
            assert_eq!(address(text), None, "{text}");
        }
    }
}
