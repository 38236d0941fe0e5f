//! Text of login and text requests: `key=value` pairs, each ended by a zero byte (RFC 7143 section 6.1).

/// The maximum length of a key.
const KEY_BYTES_MAX: usize = 63;
/// The maximum number of pairs of one request.
const PAIR_COUNT_MAX: usize = 256;

/// A pair, not yet understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pair<'a> {
    pub(crate) key: &'a str,
    pub(crate) value: &'a str,
}

/// Splits text into pairs. `None` if it is not valid text.
pub(crate) fn parse(bytes: &[u8]) -> Option<Vec<Pair<'_>>> {
    let text = std::str::from_utf8(bytes).ok()?;
    let mut pairs = Vec::new();
    // Initiators exist that end the text with several zero bytes.
    for item in text.split('\0').filter(|item| !item.is_empty()) {
        let (key, value) = item.split_once('=')?;
        if !is_key(key) || pairs.len() == PAIR_COUNT_MAX {
            return None;
        }
        pairs.push(Pair { key, value });
    }
    Some(pairs)
}

fn is_key(key: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b".-+@_#".contains(&byte);
    (1..=KEY_BYTES_MAX).contains(&key.len()) && key.bytes().all(is_valid)
}

/// Appends a pair.
pub(crate) fn push(text: &mut Vec<u8>, key: &str, value: &str) {
    text.extend(key.as_bytes());
    text.push(b'=');
    text.extend(value.as_bytes());
    text.push(0);
}

/// A number in decimal or in hexadecimal after `0x`.
pub(crate) fn number(value: &str) -> Option<u64> {
    match value.strip_prefix("0x").or_else(|| value.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16)
            .ok()
            .filter(|_| !digits.starts_with('+')),
        None => value.parse().ok().filter(|_| !value.starts_with('+')),
    }
}

/// A binary value: hexadecimal after `0x`, or Base64 after `0b`; at most `bytes_max` bytes.
pub(crate) fn binary(value: &str, bytes_max: usize) -> Option<Vec<u8>> {
    let (prefix, digits) = value.split_at_checked(2)?;
    if digits.len() > 2 * bytes_max + 4 {
        return None;
    }
    let bytes = match prefix {
        "0x" | "0X" => hexadecimal(digits)?,
        "0b" | "0B" => base64(digits)?,
        _ => return None,
    };
    (!bytes.is_empty() && bytes.len() <= bytes_max).then_some(bytes)
}

fn hexadecimal(digits: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut digits = digits.bytes();
    let mut bytes = Vec::new();
    if digits.len() % 2 == 1 {
        bytes.push(digit(digits.next()?)?);
    }
    while let (Some(high), Some(low)) = (digits.next(), digits.next()) {
        bytes.push(digit(high)? << 4 | digit(low)?);
    }
    Some(bytes)
}

fn base64(digits: &str) -> Option<Vec<u8>> {
    let digits = digits.trim_end_matches('=');
    let mut bytes = Vec::new();
    let mut bits: u32 = 0;
    let mut bit_count = 0;
    for byte in digits.bytes() {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = (bits << 6 | u32::from(value)) & 0xffff;
        bit_count += 6;
        if bit_count >= 8 {
            bit_count -= 8;
            bytes.push(u8::try_from(bits >> bit_count & 0xff).ok()?);
        }
    }
    (bit_count < 6).then_some(bytes)
}

/// The hexadecimal form of `bytes`.
pub(crate) fn to_hexadecimal(bytes: &[u8]) -> String {
    let mut text = String::from("0x");
    for byte in bytes {
        for digit in [byte >> 4, byte & 15] {
            text.extend(char::from_digit(u32::from(digit), 16));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{Pair, binary, number, parse, to_hexadecimal};

    #[test]
    fn pairs_are_split_and_nonsense_is_refused() {
        let pair = |key, value| Pair { key, value };
        assert_eq!(
            parse(b"A=1\0Bc.d=x=y\0\0E=\0"),
            Some(vec![pair("A", "1"), pair("Bc.d", "x=y"), pair("E", "")])
        );
        for wrong in [&b"A\0"[..], b"=1\0", b"A B=1\0", b"A=\xff\0"] {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
        let long = format!("{}=1\0", "k".repeat(64));
        assert_eq!(parse(long.as_bytes()), None);
        assert_eq!(parse("A=1\0".repeat(257).as_bytes()), None);
    }

    #[test]
    fn numbers_and_binary_values_are_decoded() {
        assert_eq!(
            [number("12"), number("0x1F"), number("+1"), number("x")],
            [Some(12), Some(31), None, None]
        );
        assert_eq!(binary("0x0aFf", 2), Some(vec![10, 255]));
        assert_eq!(binary("0xaff", 2), Some(vec![10, 255]));
        assert_eq!(binary("0bSGVsbG8=", 5), Some(b"Hello".to_vec()));
        assert_eq!(binary("0bSGVsbG8", 5), Some(b"Hello".to_vec()));
        for wrong in ["", "0", "0x", "0xzz", "12", "0b*", "0x0102030405"] {
            assert_eq!(binary(wrong, 4), None, "{wrong}");
        }
        assert_eq!(to_hexadecimal(&[10, 255]), "0x0aff");
    }
}
