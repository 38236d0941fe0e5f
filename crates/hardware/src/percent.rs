//! Percent-encoding of text.

use std::fmt::Write as _;

/// Decodes `%41` to `A`; `None` if the result is not UTF-8. A `%` that begins no escape is kept.
pub(crate) fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, behind)) = rest.split_first() {
        let digits = behind
            .get(..2)
            .filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        let escaped = digits
            .filter(|_| *first == b'%')
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        if let Some(byte) = escaped {
            bytes.push(byte);
            rest = behind.get(2..).unwrap_or_default();
        } else {
            bytes.push(*first);
            rest = behind;
        }
    }
    String::from_utf8(bytes).ok()
}

/// Encodes `text` on one line: everything except letters, digits, spaces and common punctuation is escaped.
pub(crate) fn encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b" -_.!~*'()/,;=+@&?".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            write!(encoded, "%{byte:02X}").expect("a string takes all");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::{decoded, encoded};

    #[test]
    fn encoded_text_is_decoded_again() {
        for text in ["", "plain", "two\nlines", "100 %41", "\u{e9}t\u{e9} #1 <b>", "%"] {
            let escaped = encoded(text);
            assert!(!escaped.contains('\n'), "{escaped:?}");
            assert_eq!(decoded(&escaped).as_deref(), Some(text));
        }
        assert_eq!(decoded("%"), Some("%".to_owned()));
        assert_eq!(decoded("a%2"), Some("a%2".to_owned()));
        assert_eq!(decoded("%zz%20"), Some("%zz ".to_owned()));
        assert_eq!(decoded("%ff"), None, "not UTF-8");
    }
}
