//! Changes of an XML text by ranges: what no edit names stays byte for byte.

use std::ops::Range;

use roxmltree::{Attribute, Node};

use super::element::Element;
use super::escape::{escaped_text, escaped_value};

/// Changes that are gathered while the text is read, and made at once.
pub struct Edits<'t> {
    text: &'t str,
    edits: Vec<(Range<usize>, String)>,
}

impl<'t> Edits<'t> {
    /// No change yet of `text`, which is the one that the nodes of all changes are of.
    pub fn new(text: &'t str) -> Self {
        Self {
            text,
            edits: Vec::new(),
        }
    }

    /// Puts `new`, which is XML, in the place of a range.
    fn replace(&mut self, range: Range<usize>, new: String) {
        self.edits.push((range, new));
    }

    /// Takes an element out, with its line where it begins one.
    pub fn remove_element(&mut self, node: Node<'_, '_>) {
        let range = node.range();
        let before = self.text[..range.start].trim_end_matches([' ', '\t']);
        let before = before.strip_suffix('\n').unwrap_or(before);
        let before = before.strip_suffix('\r').unwrap_or(before);
        self.replace(before.len()..range.end, String::new());
    }

    /// Puts another element in the place of an element.
    pub fn replace_element(&mut self, node: Node<'_, '_>, new: &Element) {
        let indent = self.indent_of(node.range().start);
        self.replace(node.range(), new.spliced(indent));
    }

    /// Puts an element of another document in the place of an element, byte for byte.
    pub fn replace_with_copy(&mut self, node: Node<'_, '_>, copied: Node<'_, '_>) {
        self.replace(node.range(), copied.document().input_text()[copied.range()].to_owned());
    }

    /// Changes the text in an element that has only text, or nothing.
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

    /// Changes an attribute, or adds it.
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

    /// Has an attribute be this value, or not there.
    pub fn put_attribute(&mut self, node: Node<'_, '_>, name: &str, value: Option<&str>) {
        match value {
            Some(value) => self.set_attribute(node, name, value),
            None => self.remove_attribute(node, name),
        }
    }

    /// Takes an attribute out, with the white space before it.
    pub fn remove_attribute(&mut self, node: Node<'_, '_>, name: &str) {
        if let Some(attribute) = attribute_of(node, name) {
            let range = attribute.range();
            self.replace(self.start_with_space(range.start)..range.end, String::new());
        }
    }

    /// Puts an element at the end of an element's content, on a line of its own as its other content.
    pub fn append(&mut self, node: Node<'_, '_>, new: &Element) {
        let Some(last) = node.children().rfind(Node::is_element) else {
            return;
        };
        let start = last.range().start;
        let space = &self.text[self.start_with_space(start)..start];
        let new = new.spliced(self.indent_of(start));
        self.replace(last.range().end..last.range().end, format!("{space}{new}"));
    }

    /// Puts an element before an element, on a line of its own where that begins one.
    pub fn insert_before(&mut self, node: Node<'_, '_>, new: &Element) {
        let start = node.range().start;
        let indent = self.indent_of(start);
        let space = indent.map(|indent| format!("\n{indent}")).unwrap_or_default();
        self.replace(start..start, new.spliced(indent) + &space);
    }

    /// The text with all changes.
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

    /// The white space before the element at `start`, where it begins its line.
    fn indent_of(&self, start: usize) -> Option<&'t str> {
        let line = self.text[..start].rfind('\n')? + 1;
        let indent = &self.text[line..start];
        indent.trim().is_empty().then_some(indent)
    }

    fn start_with_space(&self, start: usize) -> usize {
        self.text[..start].trim_end().len()
    }

    /// From `<` to `>` of an element's first tag. A `>` may stand in a value.
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
    fn attributes_are_changed_added_and_removed_wherever_they_stand() {
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
    fn text_is_set_where_there_is_some_and_where_there_is_none() {
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
    fn elements_go_with_their_line_and_come_on_a_line_of_their_own() {
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
