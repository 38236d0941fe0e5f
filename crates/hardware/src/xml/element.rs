//! Builds XML elements.

use std::fmt::{self, Display, Write as _};

use roxmltree::Node;

use super::escape::{escaped_text, escaped_value};

const INDENT: &str = "  ";
const DECLARATION: &str = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n";

/// An element with attributes and content. Values are escaped when the element is written.
///
/// Names are constants, so an external value cannot become a name. Characters that XML 1.0 cannot represent are left
/// out of values; writers remove them before and add a note. `Display` writes one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Element {
    name: &'static str,
    attributes: Vec<(&'static str, String)>,
    content: Vec<Content>,
    is_inline: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Content {
    Element(Element),
    Text(String),
    /// The source of an element that was parsed.
    Copy(String),
}

/// The quotes around values of attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quote {
    /// `'`, as libvirt writes them.
    Single,
    /// `"`, as VMware and VirtualBox write them.
    Double,
}

impl Quote {
    fn character(self) -> char {
        match self {
            Self::Single => '\'',
            Self::Double => '"',
        }
    }
}

impl Element {
    /// An empty element.
    ///
    /// # Panics
    /// `name` is not an XML name.
    pub fn new(name: &'static str) -> Self {
        assert!(is_name(name), "{name:?} is no name of XML");
        Self {
            name,
            attributes: Vec::new(),
            content: Vec::new(),
            is_inline: false,
        }
    }

    /// Adds an attribute.
    ///
    /// # Panics
    /// `name` is not an XML name, or the element already has this attribute.
    #[must_use]
    pub fn attribute(mut self, name: &'static str, value: impl Display) -> Self {
        assert!(is_name(name), "{name:?} is no name of XML");
        let is_new = self.attributes.iter().all(|(other, _)| *other != name);
        assert!(is_new, "an element has one attribute {name}");
        self.attributes.push((name, value.to_string()));
        self
    }

    /// Adds an attribute if there is a value.
    #[must_use]
    pub fn attribute_if(self, name: &'static str, value: Option<impl Display>) -> Self {
        match value {
            Some(value) => self.attribute(name, value),
            None => self,
        }
    }

    /// Adds a child element.
    #[must_use]
    pub fn child(mut self, child: Self) -> Self {
        self.content.push(Content::Element(child));
        self
    }

    /// Adds child elements.
    #[must_use]
    pub fn children(mut self, children: impl IntoIterator<Item = Self>) -> Self {
        self.content.extend(children.into_iter().map(Content::Element));
        self
    }

    /// Adds text.
    #[must_use]
    pub fn text(mut self, text: impl Display) -> Self {
        self.content.push(Content::Text(text.to_string()));
        self
    }

    /// Adds an element of a parsed document, byte for byte. All other XML is built from values.
    ///
    /// Namespaces that are declared outside of the element are not declared again.
    #[must_use]
    pub fn copy(mut self, node: Node<'_, '_>) -> Self {
        let source = &node.document().input_text()[node.range()];
        self.content.push(Content::Copy(source.to_owned()));
        self
    }

    /// Writes the element on one line, with both tags even if it is empty.
    #[must_use]
    pub fn inline(mut self) -> Self {
        self.is_inline = true;
        self
    }

    /// The element on indented lines.
    pub fn to_lines(&self, quote: Quote) -> String {
        let mut xml = String::new();
        self.write(&mut xml, quote, Some(""));
        xml.push('\n');
        xml
    }

    /// A document: the XML declaration, and the element on indented lines.
    pub fn to_document(&self) -> String {
        DECLARATION.to_owned() + &self.to_lines(Quote::Double)
    }

    /// The element for insertion into a document: on lines with this `indent`, or on one line if it is `None`.
    pub(super) fn spliced(&self, indent: Option<&str>) -> String {
        let mut xml = String::new();
        self.write(&mut xml, Quote::Single, indent);
        xml
    }

    /// Writes the element. If there is an `indent`, its children and its end tag are on separate lines.
    fn write(&self, xml: &mut String, quote: Quote, indent: Option<&str>) {
        xml.push('<');
        xml.push_str(self.name);
        for (name, value) in &self.attributes {
            let quote = quote.character();
            let value = escaped_value(value);
            write!(xml, " {name}={quote}{value}{quote}").expect("a string takes all");
        }
        if self.content.is_empty() && !self.is_inline {
            xml.push_str("/>");
            return;
        }
        xml.push('>');
        // White space next to text would become part of the text.
        let has_text = self.content.iter().any(|content| matches!(content, Content::Text(_)));
        let indent = indent.filter(|_| !has_text && !self.is_inline);
        let inner = indent.map(|indent| format!("{indent}{INDENT}"));
        for content in &self.content {
            if let Some(inner) = &inner {
                xml.push('\n');
                xml.push_str(inner);
            }
            match content {
                Content::Element(element) => element.write(xml, quote, inner.as_deref()),
                Content::Text(text) => xml.push_str(&escaped_text(text)),
                Content::Copy(source) => xml.push_str(source),
            }
        }
        if let Some(indent) = indent {
            xml.push('\n');
            xml.push_str(indent);
        }
        xml.push_str("</");
        xml.push_str(self.name);
        xml.push('>');
    }
}

impl Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.spliced(None))
    }
}

/// Whether `name` is an ASCII XML name, with or without a prefix.
fn is_name(name: &str) -> bool {
    let is_part = |part: &str| {
        part.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))
    };
    let (prefix, local) = name.split_once(':').unwrap_or(("x", name));
    is_part(prefix) && is_part(local)
}

#[cfg(test)]
mod tests {
    use roxmltree::Document;

    use super::{Element, Quote, is_name};

    #[test]
    fn elements_are_indented_and_text_is_not() {
        let element = Element::new("a")
            .attribute("b", 1)
            .child(Element::new("c").text("x\ny"))
            .child(Element::new("d").child(Element::new("e")))
            .child(Element::new("f").text(""));
        assert_eq!(
            element.to_lines(Quote::Double),
            "<a b=\"1\">\n  <c>x\ny</c>\n  <d>\n    <e/>\n  </d>\n  <f></f>\n</a>\n"
        );
        assert_eq!(element.to_string(), "<a b='1'><c>x\ny</c><d><e/></d><f></f></a>");
    }

    #[test]
    fn an_inline_element_is_in_one_line_and_has_both_tags() {
        let inner = Element::new("b")
            .inline()
            .child(Element::new("c").inline())
            .child(Element::new("d"));
        assert_eq!(
            Element::new("a").child(inner).to_lines(Quote::Single),
            "<a>\n  <b><c></c><d/></b>\n</a>\n"
        );
    }

    #[test]
    fn hostile_values_survive_a_round_trip() {
        for value in [
            "'/><x y='",
            "\"/><x y=\"",
            "</a><b/>",
            "]]>",
            "<!--",
            "<![CDATA[x]]>",
            "&amp;&#0;&x;",
            " a\tb\nc\r\nd\r ",
            "\u{7f}\u{85}\u{2028}\u{1f4be}\u{fffd}",
            "<?xml?>",
        ] {
            let element = Element::new("a")
                .attribute("v", value)
                .child(Element::new("t").text(value));
            for xml in [
                element.to_string(),
                element.to_lines(Quote::Single),
                element.to_lines(Quote::Double),
                element.to_document(),
            ] {
                let document = Document::parse(&xml).unwrap();
                let root = document.root_element();
                assert_eq!(root.attribute("v"), Some(value), "{xml}");
                let children: Vec<_> = root.children().filter(roxmltree::Node::is_element).collect();
                assert_eq!(children.len(), 1, "{xml}");
                assert_eq!(children[0].text(), Some(value), "{xml}");
            }
        }
    }

    #[test]
    fn characters_that_xml_cannot_hold_are_left_out() {
        let held =
            |character: &char| !character.is_ascii_control() || matches!(character, '\t' | '\n' | '\r' | '\u{7f}');
        let value: String = ('\0'..' ').chain(['\u{7f}', '\u{fffe}', '\u{ffff}', 'x']).collect();
        let expected: String = value
            .chars()
            .filter(held)
            .filter(|character| !matches!(character, '\u{fffe}' | '\u{ffff}'))
            .collect();
        let xml = Element::new("a").attribute("v", &value).text(&value).to_string();
        let document = Document::parse(&xml).unwrap();
        let root = document.root_element();
        assert_eq!(root.attribute("v"), Some(&expected[..]));
        assert_eq!(root.text(), Some(&expected[..]));
    }

    #[test]
    fn a_parsed_element_is_copied_byte_for_byte() {
        let source = "<x><y  z = \"'\" ><!-- & --></y></x>";
        let document = Document::parse(source).unwrap();
        let node = document.root_element().first_element_child().unwrap();
        assert_eq!(
            Element::new("a").copy(node).to_string(),
            "<a><y  z = \"'\" ><!-- & --></y></a>"
        );
    }

    #[test]
    fn names_are_validated() {
        for name in ["a", "_a", "vmw:Config", "dateTime.iso8601", "a-1"] {
            assert!(is_name(name), "{name}");
        }
        for name in ["", "1a", "a b", "a>", "a:b:c", ":a", "a:", "-a", "a/", "a='"] {
            assert!(!is_name(name), "{name}");
        }
    }

    #[test]
    #[should_panic(expected = "no name of XML")]
    fn an_invalid_name_is_refused() {
        drop(Element::new("a><b"));
    }

    #[test]
    #[should_panic(expected = "one attribute")]
    fn an_attribute_cannot_be_repeated() {
        drop(Element::new("a").attribute("b", 1).attribute("b", 2));
    }
}
