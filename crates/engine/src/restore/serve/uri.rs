//! Names and paths in URIs.

use std::fmt::Write as _;

/// A name or a path as a part of the path or of the query of a URI (RFC 3986): everything is percent-encoded except
/// unreserved characters, `/`, `:` and `@`.
pub(super) fn percent_encoded(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~/:@".contains(byte) {
            text.push(char::from(*byte));
        } else {
            // Writing to a string cannot fail.
            write!(text, "%{byte:02X}").unwrap_or_default();
        }
    }
    text
}
