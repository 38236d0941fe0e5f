//! Decodes XML documents, which may be in other encodings than UTF-8.

use std::borrow::Cow;

/// The declaration must be within the first bytes of a document.
const DECLARATION_BYTES_MAX: usize = 200;

/// The document as text; `None` if its bytes are not valid in the declared encoding, or if the encoding is not
/// supported.
///
/// Supported are UTF-8, UTF-16 with a byte order mark or a leading `<`, and Latin-1.
pub fn xml_text(bytes: &[u8]) -> Option<Cow<'_, str>> {
    match bytes {
        [0xff, 0xfe, rest @ ..] => utf16(rest, u16::from_le_bytes),
        [0xfe, 0xff, rest @ ..] => utf16(rest, u16::from_be_bytes),
        [b'<', 0, ..] => utf16(bytes, u16::from_le_bytes),
        [0, b'<', ..] => utf16(bytes, u16::from_be_bytes),
        [0xef, 0xbb, 0xbf, rest @ ..] => std::str::from_utf8(rest).ok().map(Cow::Borrowed),
        _ if is_latin1(bytes) => Some(bytes.iter().copied().map(char::from).collect::<String>().into()),
        _ => std::str::from_utf8(bytes).ok().map(Cow::Borrowed),
    }
}

fn utf16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> Option<Cow<'_, str>> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let text: Result<String, _> = char::decode_utf16(pairs.iter().copied().map(unit)).collect();
    text.ok().filter(|_| rest.is_empty()).map(Cow::Owned)
}

/// Whether the declaration names Latin-1.
fn is_latin1(bytes: &[u8]) -> bool {
    let start = bytes.get(..DECLARATION_BYTES_MAX).unwrap_or(bytes);
    let Some(end) = start.windows(2).position(|pair| pair == b"?>") else {
        return false;
    };
    let declaration = String::from_utf8_lossy(start.get(..end).unwrap_or_default()).to_ascii_lowercase();
    let Some((_, encoding)) = declaration.split_once("encoding") else {
        return false;
    };
    ["iso-8859-1", "latin1", "us-ascii"]
        .iter()
        .any(|name| encoding.contains(name))
}

#[cfg(test)]
mod tests {
    use super::xml_text;

    #[test]
    fn documents_are_read_in_their_declared_encoding() {
        let text = "<?xml version=\"1.0\" encoding=\"UTF-16\"?><a>B\u{fc}ro \u{1f4be}</a>";
        let units = || text.encode_utf16();
        let little: Vec<u8> = units().flat_map(u16::to_le_bytes).collect();
        let big: Vec<u8> = units().flat_map(u16::to_be_bytes).collect();
        let marked = |mark: &[u8], bytes: &[u8]| [mark, bytes].concat();
        for bytes in [
            text.as_bytes().to_vec(),
            marked(&[0xef, 0xbb, 0xbf], text.as_bytes()),
            marked(&[0xff, 0xfe], &little),
            marked(&[0xfe, 0xff], &big),
            little.clone(),
            big,
        ] {
            assert_eq!(xml_text(&bytes).as_deref(), Some(text), "{bytes:?}");
        }
        let latin = b"<?xml version='1.0' encoding='ISO-8859-1'?><a>B\xfcro</a>";
        assert!(xml_text(latin).unwrap().ends_with("<a>B\u{fc}ro</a>"));
        assert_eq!(xml_text(b"<a>B\xfcro</a>"), None);
        assert_eq!(xml_text(&marked(&[0xff, 0xfe], &little[1..])), None);
    }
}
