//! The text format of LVM's metadata: sections in braces, and assignments of numbers, strings and lists.
//!
//! ```text
//! vg0 {
//!     seqno = 4                       # a comment
//!     status = ["READ", "WRITE"]
//!     physical_volumes { pv0 { id = "..." } }
//! }
//! ```

use crate::{Error, Result};

const DEPTH_MAX: usize = 8;
/// Assignments and sections of one text.
const ITEM_COUNT_MAX: usize = 1 << 18;

/// A section: its assignments and the sections in it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Section {
    items: Vec<SectionItem>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct SectionItem {
    name: String,
    value: ItemValue,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum ItemValue {
    Section(Section),
    /// A single value is a list of one.
    List(Vec<Scalar>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Scalar {
    Number(u64),
    Text(String),
    /// A number that is negative or a fraction.
    Other,
}

impl Section {
    /// The sections in this one, in order.
    pub(super) fn sections(&self) -> impl Iterator<Item = (&str, &Section)> {
        self.items.iter().filter_map(|item| match &item.value {
            ItemValue::Section(section) => Some((item.name.as_str(), section)),
            ItemValue::List(_) => None,
        })
    }

    pub(super) fn section(&self, name: &str) -> Option<&Section> {
        self.sections()
            .find(|(other, _)| *other == name)
            .map(|(_, section)| section)
    }

    fn list(&self, name: &str) -> &[Scalar] {
        let item = self.items.iter().find(|item| item.name == name);
        match item.map(|item| &item.value) {
            Some(ItemValue::List(list)) => list,
            _ => &[],
        }
    }

    pub(super) fn number(&self, name: &str) -> Option<u64> {
        match self.list(name) {
            [Scalar::Number(number)] => Some(*number),
            _ => None,
        }
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        match self.list(name) {
            [Scalar::Text(text)] => Some(text),
            _ => None,
        }
    }

    pub(super) fn texts(&self, name: &str) -> Vec<String> {
        let texts = self.list(name).iter().filter_map(|scalar| match scalar {
            Scalar::Text(text) => Some(text.clone()),
            _ => None,
        });
        texts.collect()
    }

    /// The text of a list of a text and a number.
    pub(super) fn first_text(&self, name: &str) -> Option<&str> {
        match self.list(name) {
            [Scalar::Text(text), Scalar::Number(_)] => Some(text),
            _ => None,
        }
    }

    /// The number of a list of a text and a number.
    pub(super) fn first_number(&self, name: &str) -> Option<u64> {
        match self.list(name) {
            [Scalar::Text(_), Scalar::Number(number)] => Some(*number),
            _ => None,
        }
    }
}

/// Parses a whole text.
pub(super) fn parse(text: &str) -> Result<Section> {
    let mut parser = TextParser {
        rest: text,
        item_count: 0,
    };
    let section = parser.section(0)?;
    parser.skip_space();
    if parser.rest.is_empty() {
        Ok(section)
    } else {
        Err(parser.error("a brace closes nothing"))
    }
}

struct TextParser<'a> {
    rest: &'a str,
    item_count: usize,
}

impl<'a> TextParser<'a> {
    fn error(&self, detail: &str) -> Error {
        let near: String = self.rest.chars().take(20).collect();
        Error::damaged("LVM metadata", format!("{detail} near {near:?}"))
    }

    fn skip_space(&mut self) {
        loop {
            self.rest = self.rest.trim_start();
            if !self.rest.starts_with('#') {
                return;
            }
            self.rest = self.rest.split_once('\n').map_or("", |(_, rest)| rest);
        }
    }

    fn accept(&mut self, letter: char) -> bool {
        self.skip_space();
        let rest = self.rest.strip_prefix(letter);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// The items up to a closing brace, which is left, or the end of the text.
    fn section(&mut self, depth: usize) -> Result<Section> {
        if depth > DEPTH_MAX {
            return Err(self.error("sections are nested too deeply"));
        }
        let mut section = Section::default();
        loop {
            self.skip_space();
            if self.rest.is_empty() || self.rest.starts_with('}') {
                return Ok(section);
            }
            self.item_count += 1;
            if self.item_count > ITEM_COUNT_MAX {
                return Err(self.error("there are too many values"));
            }
            let name = self.word()?.to_owned();
            let value = if self.accept('{') {
                let inner = self.section(depth + 1)?;
                if !self.accept('}') {
                    return Err(self.error("a section does not end"));
                }
                ItemValue::Section(inner)
            } else if self.accept('=') {
                ItemValue::List(self.value()?)
            } else {
                return Err(self.error("neither = nor { follows a name"));
            };
            section.items.push(SectionItem { name, value });
        }
    }

    fn word(&mut self) -> Result<&'a str> {
        self.skip_space();
        let is_part = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '_' | '-' | '.' | '+');
        let end = self.rest.find(|letter| !is_part(letter)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        if word.is_empty() {
            return Err(self.error("a name or number is missing"));
        }
        self.rest = rest;
        Ok(word)
    }

    fn value(&mut self) -> Result<Vec<Scalar>> {
        if !self.accept('[') {
            return Ok(vec![self.scalar()?]);
        }
        let mut list = Vec::new();
        while !self.accept(']') {
            self.item_count += 1;
            if self.item_count > ITEM_COUNT_MAX {
                return Err(self.error("there are too many values"));
            }
            list.push(self.scalar()?);
            if !self.accept(',') && !self.rest.starts_with(']') {
                return Err(self.error("a list does not end"));
            }
        }
        Ok(list)
    }

    fn scalar(&mut self) -> Result<Scalar> {
        if !self.accept('"') {
            let word = self.word()?;
            return Ok(word.parse().map_or(Scalar::Other, Scalar::Number));
        }
        let mut text = String::new();
        let mut letters = self.rest.char_indices();
        while let Some((at, letter)) = letters.next() {
            match letter {
                '"' => {
                    self.rest = self.rest.get(at + 1..).unwrap_or_default();
                    return Ok(Scalar::Text(text));
                }
                '\\' => text.extend(letters.next().map(|(_, letter)| letter)),
                letter => text.push(letter),
            }
        }
        Err(self.error("a string does not end"))
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn sections_lists_strings_and_comments_are_read() {
        let text = "# head\nvg0 {\n id = \"a\\\"b\"\n seqno = 4 # why\n flags = []\n status = [\"READ\", \"WRITE\"]\n\
                    lv { segment1 { stripes = [\n \"pv0\", 12 ] } }\n}\nversion = 1\n";
        let root = parse(text).unwrap();
        let group = root.section("vg0").unwrap();
        assert_eq!(group.text("id"), Some("a\"b"));
        assert_eq!(group.number("seqno"), Some(4));
        assert_eq!(group.texts("status"), ["READ", "WRITE"]);
        assert!(group.texts("flags").is_empty());
        let segment = group.section("lv").unwrap().section("segment1").unwrap();
        assert_eq!(
            (segment.first_text("stripes"), segment.first_number("stripes")),
            (Some("pv0"), Some(12))
        );
        assert_eq!(root.number("version"), Some(1));
    }

    #[test]
    fn broken_texts_are_refused() {
        let deep = "a {".repeat(20);
        for text in [
            "a",
            "a {",
            "a { }}",
            "a = [1 2]",
            "a = [1",
            "a = \"x",
            "= 1",
            deep.as_str(),
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
