//! Edits an XML text by ranges: the rest of the text is not changed.

use std::ops::Range;

use roxmltree::{Attribute, Node};

use super::element::Element;
use super::escape::{escaped_text, escaped_value};

/// Changes to a text. They are collected while the text is read, and applied together.
pub struct Edits<'t> {
    text: &'t str,
    edits: Vec<(Range<usize>, String)>,
}

impl<'t> Edits<'t> {
    /// Starts without changes. All nodes passed to the methods must be parsed from `text`.
    pub fn new(text: &'t str) -> Self {
        Self {
            text,
            edits: Vec::new(),
        }
    }

    /// Replaces a range by `new`, which is XML.
    fn replace(&mut self, range: Range<usize>, new: String) {
        self.edits.push((range, new));
    }

    /// Removes an element. If the element begins a line, the line is removed too.
    pub fn remove_element(&mut self, node: Node<'_, '_>) {
        let range = node.range();
        let before = self.text[..range.start].trim_end_matches([' ', '\t']);
        let before = before.strip_suffix('\n').unwrap_or(before);
        let before = before.strip_suffix('\r').unwrap_or(before);
        self.replace(before.len()..range.end, String::new());
    }

    /// Replaces an element.
    pub fn replace_element(&mut self, node: Node<'_, '_>, new: &Element) {
        let indent = self.indent_of(node.range().start);
        self.replace(node.range(), new.spliced(indent));
    }

    /// Replaces an element by an element of another document, byte for byte.
    pub fn replace_with_copy(&mut self, node: Node<'_, '_>, copied: Node<'_, '_>) {
        self.replace(node.range(), copied.document().input_text()[copied.range()].to_owned());
    }

    /// Sets the text of an element that is empty or contains only text.
    pub fn set_text(&mut self, node: Node<'_, '_>, value: &str) {
        let value = escaped_text(value);
        let tag = self.start_tag(node);
        if self.text[tag.clone()].ends_with("/>") {
            let name = &self.text[tag.start + 1..];
            let name = name
                .split(|end: char| end.is_whitespace() || matches!(end, '/' | '>'))
                .next();
            let name = name.unwrap_or_default();
            self.replace(tag.end - 2..tag.end, format!(">{value}</{name}>"));
            return;
        }
        let whole = node.range();
        let length = self.text[whole.clone()].rfind("</").expect("a tag is closed");
        self.replace(tag.end..whole.start + length, value);
    }

    /// Sets an attribute.
    pub fn set_attribute(&mut self, node: Node<'_, '_>, name: &str, value: &str) {
        if let Some(attribute) = attribute_of(node, name) {
            if attribute.value() != value {
                self.replace(attribute.range_value(), escaped_value(value));
            }
            return;
        }
        let tag = self.start_tag(node);
        let length = if self.text[tag.clone()].ends_with("/>") { 2 } else { 1 };
        let before = self.text[..tag.end - length].trim_end().len();
        self.replace(before..before, format!(" {name}='{}'", escaped_value(value)));
    }

    /// Sets an attribute, or removes it for `None`.
    pub fn put_attribute(&mut self, node: Node<'_, '_>, name: &str, value: Option<&str>) {
        match value {
            Some(value) => self.set_attribute(node, name, value),
            None => self.remove_attribute(node, name),
        }
    }

    /// Removes an attribute, with the white space before it.
    pub fn remove_attribute(&mut self, node: Node<'_, '_>, name: &str) {
        if let Some(attribute) = attribute_of(node, name) {
            let range = attribute.range();
            self.replace(self.start_with_space(range.start)..range.end, String::new());
        }
    }

    /// Appends an element to an element's content, with the white space of its last child element.
    pub fn append(&mut self, node: Node<'_, '_>, new: &Element) {
        let Some(last) = node.children().rfind(Node::is_element) else {
            return;
        };
        let start = last.range().start;
        let space = &self.text[self.start_with_space(start)..start];
        let new = new.spliced(self.indent_of(start));
        self.replace(last.range().end..last.range().end, format!("{space}{new}"));
    }

    /// Inserts an element before another one, on a separate line if the other one begins a line.
    pub fn insert_before(&mut self, node: Node<'_, '_>, new: &Element) {
        let start = node.range().start;
        let indent = self.indent_of(start);
        let space = indent.map(|indent| format!("\n{indent}")).unwrap_or_default();
        self.replace(start..start, new.spliced(indent) + &space);
    }

    /// Returns the text with all changes.
    pub fn apply(mut self) -> String {
        self.edits.sort_by_key(|(range, _)| (range.start, range.end));
        let (mut result, mut done) = (String::with_capacity(self.text.len()), 0);
        for (range, new) in self.edits {
            assert!(range.start >= done, "changes of one text do not overlap");
            result.push_str(&self.text[done..range.start]);
            result.push_str(&new);
            done = range.end;
        }
        result.push_str(&self.text[done..]);
        result
    }

    /// The indentation of the element at `start`, if it begins its line.
    fn indent_of(&self, start: usize) -> Option<&'t str> {
        let line = self.text[..start].rfind('\n')? + 1;
        let indent = &self.text[line..start];
        indent.trim().is_empty().then_some(indent)
    }

    fn start_with_space(&self, start: usize) -> usize {
        self.text[..start].trim_end().len()
    }

    /// The range of an element's start tag. Values may contain `>`.
    fn start_tag(&self, node: Node<'_, '_>) -> Range<usize> {
        let start = node.range().start;
        let after_values = node.attributes().map(|attribute| attribute.range().end).max();
        let from = after_values.unwrap_or(start);
        let length = self.text[from..].find('>').expect("a tag ends");
        start..from + length + 1
    }
}

fn attribute_of<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Attribute<'a, 'input>> {
    node.attributes()
        .find(|attribute| attribute.name() == name && attribute.namespace().is_none())
}

#[cfg(test)]
mod tests {
    use roxmltree::{Document, Node};

    use super::{Edits, Element};

    fn edited(text: &str, edit: impl FnOnce(&mut Edits<'_>, Node<'_, '_>)) -> String {
        let document = Document::parse(text).unwrap();
        let mut edits = Edits::new(text);
        edit(&mut edits, document.root_element());
        let result = edits.apply();
        Document::parse(&result).unwrap();
        result
    }

    #[test]
    fn attributes_are_changed_added_and_removed() {
        for (before, after) in [
            ("<a x=\"1>\" y='2' />", "<a x=\"1>\" y='&lt;&apos;' />"),
            ("<a/>", "<a y='&lt;&apos;'/>"),
            ("<a x='>'></a>", "<a x='>' y='&lt;&apos;'></a>"),
            ("<a  x='1'  >t</a>", "<a  x='1' y='&lt;&apos;'  >t</a>"),
        ] {
            assert_eq!(
                edited(before, |edits, node| edits.set_attribute(node, "y", "<'")),
                after
            );
        }
        let removed = edited("<a b='1'\n  y='2' c='3'/>", |edits, node| {
            edits.remove_attribute(node, "y");
        });
        assert_eq!(removed, "<a b='1' c='3'/>");
    }

    #[test]
    fn text_is_set_in_elements_with_and_without_text() {
        for (before, after) in [
            ("<a>old<!-- </a> --></a >", "<a>n&amp;w</a >"),
            ("<a><![CDATA[</a>]]></a>", "<a>n&amp;w</a>"),
            ("<x:a xmlns:x='u'/>", "<x:a xmlns:x='u'>n&amp;w</x:a>"),
            ("<a/>", "<a>n&amp;w</a>"),
            ("<a x='/>' />", "<a x='/>' >n&amp;w</a>"),
            ("<a></a>", "<a>n&amp;w</a>"),
        ] {
            assert_eq!(edited(before, |edits, node| edits.set_text(node, "n&w")), after);
        }
    }

    #[test]
    fn elements_are_removed_with_their_line_and_added_on_a_line_of_their_own() {
        let text = "<a>\n  <b/> <!-- kept -->\n  <c/>\n</a>";
        let remove = |edits: &mut Edits<'_>, node: Node<'_, '_>| {
            edits.remove_element(node.children().find(|child| child.has_tag_name("c")).unwrap());
        };
        assert_eq!(edited(text, remove), "<a>\n  <b/> <!-- kept -->\n</a>");
        assert_eq!(edited("<a><b/>  \r\n\t<c/>\r\n</a>", remove), "<a><b/>  \r\n</a>");
        assert_eq!(edited("<a>x <c/> y</a>", remove), "<a>x y</a>");
        let added = edited(text, |edits, node| edits.append(node, &Element::new("d")));
        assert_eq!(added, "<a>\n  <b/> <!-- kept -->\n  <c/>\n  <d/>\n</a>");
    }
}
