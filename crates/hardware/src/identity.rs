//! UUIDs of machines and MAC addresses of network cards, which hypervisors write in different notations.

/// A MAC address in lower case with colons; `None` if `text` is not an address of six bytes. Colons, dashes, dots or
/// nothing may separate the bytes.
pub(crate) fn mac(text: &str) -> Option<String> {
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

/// A UUID in lower case without braces; `None` if `text` is not a UUID.
pub(crate) fn uuid(text: &str) -> Option<String> {
    let text = text.trim().trim_start_matches('{').trim_end_matches('}');
    let lengths: Vec<usize> = text.split('-').map(str::len).take(6).collect();
    let is_digit = |character: char| character == '-' || character.is_ascii_hexdigit();
    (lengths == [8, 4, 4, 4, 12] && text.chars().all(is_digit)).then(|| text.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::{mac, uuid};

    #[test]
    fn addresses_are_read_in_every_notation() {
        for text in [
            "080027A1E615",
            "08:00:27:a1:e6:15",
            "08-00-27-A1-E6-15",
            " 0800.27a1.e615 ",
        ] {
            assert_eq!(mac(text).as_deref(), Some("08:00:27:a1:e6:15"), "{text}");
        }
        for text in ["", "0", "08:00:27:a1:e6", "08:00:27:a1:e6:15:00", "08:00:27:a1:e6:1g"] {
            assert_eq!(mac(text), None, "{text}");
        }
    }

    #[test]
    fn uuids_are_read_with_braces_and_without() {
        let expected = Some("9f6d1b8e-1f2a-4c3d-8e4f-5a6b7c8d9e0f");
        assert_eq!(uuid("{9F6D1B8E-1F2A-4C3D-8E4F-5A6B7C8D9E0F}").as_deref(), expected);
        assert_eq!(uuid("9f6d1b8e-1f2a-4c3d-8e4f-5a6b7c8d9e0f").as_deref(), expected);
        for text in [
            "",
            "web",
            "9f6d1b8e1f2a4c3d8e4f5a6b7c8d9e0f",
            "9f6d1b8e-1f2a-4c3d-8e4f-5a6b7c8d9e0g",
        ] {
            assert_eq!(uuid(text), None, "{text}");
        }
    }
}
