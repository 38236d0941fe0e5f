//! Rust source as text: distinguishes code from comments, strings and tests.
//!
//! This is not a parser, but it is sufficient to ignore a brace in a string or a banned call in a comment.

use std::ops::Range;

pub(crate) struct RustFile {
    /// Relative to the root of the repository.
    pub(crate) path: String,
    /// The text with comments, strings and character literals replaced by spaces, so that offsets and lines are the
    /// same.
    pub(crate) code: String,
    /// The string literals as written, with quotes, by offset.
    pub(crate) strings: Vec<(usize, String)>,
    /// For each line, whether it belongs to a test.
    test_lines: Vec<bool>,
}

/// Whether a whole file is only for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Only the items marked `#[cfg(test)]` are for tests.
    Production,
    /// The whole file is for tests: below `tests/` or `benches/`, or declared by `#[cfg(test)] mod`.
    Test,
}

impl RustFile {
    pub(crate) fn new(path: &str, text: &str, purpose: Purpose) -> Self {
        let Masked { code, strings } = mask(text);
        let strings = strings.into_iter().map(|range| (range.start, text[range].to_owned()));
        let strings = strings.collect();
        let mut test_lines = vec![purpose == Purpose::Test; text.lines().count()];
        for range in test_items(&code) {
            for line in line_of(&code, range.start)..=line_of(&code, range.end) {
                if let Some(is_test) = test_lines.get_mut(line - 1) {
                    *is_test = true;
                }
            }
        }
        Self {
            path: path.to_owned(),
            code,
            strings,
            test_lines,
        }
    }

    /// Whether `line`, counted from 1, belongs to a test.
    pub(crate) fn is_test(&self, line: usize) -> bool {
        self.test_lines.get(line.wrapping_sub(1)).copied().unwrap_or(false)
    }

    /// Number of lines that do not belong to a test.
    pub(crate) fn production_line_count(&self) -> usize {
        self.test_lines.iter().filter(|is_test| !**is_test).count()
    }

    /// The line, from 1, of the byte at `offset`.
    pub(crate) fn line_of(&self, offset: usize) -> usize {
        line_of(&self.code, offset)
    }

    /// The functions with a body: name and byte range from `fn` to the closing brace.
    pub(crate) fn functions(&self) -> Vec<(&str, Range<usize>)> {
        let mut functions = self.declarations();
        functions.retain(|(_, range)| self.code[range.end..].starts_with('}'));
        functions
    }

    /// The functions with a body, and those of traits without: name and byte range from `fn` to the last byte.
    pub(crate) fn declarations(&self) -> Vec<(&str, Range<usize>)> {
        word_offsets(&self.code, "fn")
            .filter_map(|start| {
                let after = self.code[start + 2..].trim_start();
                let name_length = after.find(|c: char| !is_word(c)).unwrap_or(after.len());
                let (end, _) = item_end(&self.code, start)?;
                (name_length > 0).then(|| (&after[..name_length], start..end))
            })
            .collect()
    }
}

/// The positions of `word` in `code` as a whole word.
pub(crate) fn word_offsets<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    code.match_indices(word)
        .map(|(offset, _)| offset)
        .filter(move |&offset| !code[..offset].ends_with(is_word) && !code[offset + word.len()..].starts_with(is_word))
}

pub(crate) fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn line_of(code: &str, offset: usize) -> usize {
    1 + code[..offset.min(code.len())].matches('\n').count()
}

/// The last byte of the item that begins at or after `start`, and the character there: `}` or `;`.
fn item_end(code: &str, start: usize) -> Option<(usize, char)> {
    let mut depth = 0_usize;
    let mut brace_depth = 0_usize;
    for (offset, c) in code[start..].char_indices() {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth = depth.saturating_sub(1),
            '{' => brace_depth += 1,
            '}' => {
                brace_depth = brace_depth.checked_sub(1)?;
                if brace_depth == 0 && depth == 0 {
                    return Some((start + offset, c));
                }
            }
            ';' if depth == 0 && brace_depth == 0 => return Some((start + offset, c)),
            _ => {}
        }
    }
    None
}

/// The byte ranges of the items with `#[cfg(test)]`.
fn test_items(code: &str) -> Vec<Range<usize>> {
    const MARK: &str = "#[cfg(test)]";
    code.match_indices(MARK)
        .filter_map(|(start, _)| Some(start..item_end(code, start + MARK.len())?.0))
        .collect()
}

/// A text with only the code.
struct Masked {
    code: String,
    /// The ranges of the string literals.
    strings: Vec<Range<usize>>,
}

/// Replaces comments, strings and character literals by spaces; line ends are kept.
fn mask(text: &str) -> Masked {
    let bytes = text.as_bytes();
    let mut masked = bytes.to_vec();
    let mut strings = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let end = match bytes[at] {
            b'/' if bytes[at..].starts_with(b"//") => find(bytes, at, b"\n"),
            b'/' if bytes[at..].starts_with(b"/*") => block_comment_end(bytes, at),
            b'"' => string_end(bytes, at + 1),
            b'r' if !follows_word(bytes, at) => raw_string_end(bytes, at).unwrap_or(at),
            b'b' if !follows_word(bytes, at) && bytes.get(at + 1) == Some(&b'r') => {
                raw_string_end(bytes, at + 1).unwrap_or(at)
            }
            b'\'' => character_end(text, at).unwrap_or(at),
            _ => at,
        };
        if end == at {
            at += 1;
            continue;
        }
        if !matches!(bytes[at], b'/' | b'\'') {
            strings.push(at..end.min(bytes.len()));
        }
        for byte in &mut masked[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end;
    }
    Masked {
        code: String::from_utf8_lossy(&masked).into_owned(),
        strings,
    }
}

fn follows_word(bytes: &[u8], at: usize) -> bool {
    at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_')
}

/// Offset of `needle` at or after `at`, or the end of the text.
fn find(bytes: &[u8], at: usize, needle: &[u8]) -> usize {
    bytes[at..]
        .windows(needle.len())
        .position(|window| window == needle)
        .map_or(bytes.len(), |found| at + found)
}

fn block_comment_end(bytes: &[u8], start: usize) -> usize {
    let mut depth = 0_usize;
    let mut at = start;
    while at < bytes.len() {
        if bytes[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if bytes[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    bytes.len()
}

fn string_end(bytes: &[u8], mut at: usize) -> usize {
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// The end of the raw string whose `r` is at `at`; `None` if there is no raw string.
fn raw_string_end(bytes: &[u8], at: usize) -> Option<usize> {
    let hash_count = bytes[at + 1..].iter().take_while(|byte| **byte == b'#').count();
    let quote = at + 1 + hash_count;
    if bytes.get(quote) != Some(&b'"') {
        return None;
    }
    let mut closing = vec![b'"'];
    closing.resize(1 + hash_count, b'#');
    Some((find(bytes, quote + 1, &closing) + closing.len()).min(bytes.len()))
}

/// The end of the character literal at `at`; `None` if the quote begins a lifetime.
fn character_end(text: &str, at: usize) -> Option<usize> {
    let rest = &text[at + 1..];
    let first = rest.chars().next()?;
    if first == '\\' {
        // The escaped character may itself be a quote.
        return rest[2..].find('\'').map(|found| at + 1 + 2 + found + 1);
    }
    rest[first.len_utf8()..]
        .starts_with('\'')
        .then_some(at + 1 + first.len_utf8() + 1)
}

#[cfg(test)]
mod tests {
    use super::{Purpose, RustFile, mask};

    #[test]
    fn comments_strings_and_characters_are_no_code() {
        let text = "let a = \"todo!() \\\" {\"; // todo!()\n/* /* } */ todo!() */ let b = '{'; let c = '\\''; x";
        let masked = mask(text).code;
        assert_eq!(masked.len(), text.len());
        assert!(!masked.contains("todo") && !masked.contains(['{', '}']), "{masked}");
        assert!(masked.contains("let b") && masked.ends_with('x'), "{masked}");
    }

    #[test]
    fn raw_strings_and_lifetimes_are_distinguished() {
        let masked = mask("fn f<'a>(x: &'a str) { g(r#\"quote \" } \"#, br\"}\", for_r) }").code;
        assert_eq!(masked.matches('}').count(), 1, "{masked}");
        assert!(
            masked.contains("<'a>(x: &'a str)") && masked.contains("for_r"),
            "{masked}"
        );
    }

    #[test]
    fn test_items_end_where_their_brace_does() {
        let text =
            "fn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() {}\n}\nfn c() {}\n#[cfg(test)]\nuse x;\nfn d() {}\n";
        let file = RustFile::new("x.rs", text, Purpose::Production);
        let tests: Vec<usize> = (1..=9).filter(|line| file.is_test(*line)).collect();
        assert_eq!(tests, [2, 3, 4, 5, 7, 8]);
        assert_eq!(file.production_line_count(), 3);
        assert_eq!(RustFile::new("x.rs", text, Purpose::Test).production_line_count(), 0);
    }

    #[test]
    fn functions_have_a_name_and_a_body() {
        let text = "trait T { fn no_body(&self, a: [u8; 2]); }\nfn one(f: fn(u8) -> u8) -> u8 {\n    { f(1) }\n}\n";
        let file = RustFile::new("x.rs", text, Purpose::Production);
        let functions = file.functions();
        assert_eq!(functions.len(), 1, "{functions:?}");
        assert_eq!(functions[0].0, "one");
        assert_eq!(file.declarations()[0].0, "no_body");
        assert_eq!(file.line_of(functions[0].1.start), 2);
        assert_eq!(file.line_of(functions[0].1.end), 4);
    }
}
