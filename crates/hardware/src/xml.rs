//! Reading XML within bounds, and writing what is safe in it.

use roxmltree::{Document, Node, ParsingOptions};

use crate::machine::bound;
use crate::{Error, Result};

/// Elements and texts that a configuration has at most.
const NODE_COUNT_MAX: u32 = 200_000;

/// Parses `text`, which is to be a `form`.
pub(crate) fn parse<'t>(text: &'t str, form: &'static str) -> Result<Document<'t>> {
    if text.len() > bound::TEXT_BYTES {
        return Err(Error::Malformed {
            form,
            detail: format!("it has {} bytes", text.len()),
        });
    }
    let options = ParsingOptions {
        nodes_limit: NODE_COUNT_MAX,
        ..ParsingOptions::default()
    };
    Document::parse_with_options(text, options).map_err(|error| Error::Malformed {
        form,
        detail: error.to_string(),
    })
}

/// The first element of that name below `node`.
pub(crate) fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    children(node, name).next()
}

/// The elements of that name below `node`.
pub(crate) fn children<'a, 'input>(node: Node<'a, 'input>, name: &str) -> impl Iterator<Item = Node<'a, 'input>> {
    node.children()
        .filter(move |child| child.is_element() && child.tag_name().name() == name)
}

/// The text of the first element of that name below `node`, without spaces around it.
pub(crate) fn text<'a>(node: Node<'a, '_>, name: &str) -> Option<&'a str> {
    child(node, name).and_then(|child| child.text()).map(str::trim)
}

/// An attribute of the first element of that name below `node`.
pub(crate) fn attribute<'a>(node: Node<'a, '_>, name: &str, attribute: &str) -> Option<&'a str> {
    child(node, name).and_then(|child| child.attribute(attribute))
}

/// An attribute of `node` by its name alone, whatever its namespace.
pub(crate) fn named<'a>(node: Node<'a, '_>, name: &str) -> Option<&'a str> {
    node.attributes()
        .find(|attribute| attribute.name() == name)
        .map(|attribute| attribute.value())
}

/// `text` as it may stand in an element or an attribute. What XML cannot say at all is left out.
pub(crate) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&apos;"),
            '\t' | '\n' | '\r' => escaped.push(character),
            control if control < ' ' || matches!(control, '\u{fffe}' | '\u{ffff}') => {}
            other => escaped.push(other),
        }
    }
    escaped
}
