//! Escapes of a URI in text.

/// `text` with `%41` as `A`; nothing where that is no text. A sign that begins no escape stands for itself.
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

#[cfg(test)]
mod tests {
    use super::decoded;

    #[test]
    fn escapes_are_resolved() {
        assert_eq!(decoded("a%20b%C3%A9").as_deref(), Some("a b\u{e9}"));
        assert_eq!(decoded("%").as_deref(), Some("%"));
        assert_eq!(decoded("a%2").as_deref(), Some("a%2"));
        assert_eq!(decoded("%zz%20").as_deref(), Some("%zz "));
        assert_eq!(decoded("%ff"), None, "no text");
    }
}
