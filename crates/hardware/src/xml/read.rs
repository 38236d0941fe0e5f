//! Reads XML within limits.

use roxmltree::{Document, Node, ParsingOptions};

use crate::machine::bound;
use crate::{Error, Result};

/// Limit of elements and texts in a configuration.
const NODE_COUNT_MAX: u32 = 200_000;
/// Limit of attributes of an element: the parser compares each attribute with all others.
const ATTRIBUTE_COUNT_MAX: usize = 256;
/// Limit of namespace declarations: for each element with a declaration, the parser copies all declarations in scope.
const NAMESPACE_COUNT_MAX: usize = 1000;
/// Limit of nesting; a machine of VirtualBox with a chain of 250 snapshots has 500 levels.
const DEPTH_MAX: usize = 1000;

/// Parses `text`; `form` names the format in errors.
pub(crate) fn parse<'t>(text: &'t str, form: &'static str) -> Result<Document<'t>> {
    if text.len() > bound::TEXT_BYTES {
        return Err(Error::Malformed {
            form,
            detail: format!("it has {} bytes", text.len()),
        });
    }
    check_shape(text).map_err(|detail| Error::Malformed {
        form,
        detail: detail.to_owned(),
    })?;
    let options = ParsingOptions {
        nodes_limit: NODE_COUNT_MAX,
        ..ParsingOptions::default()
    };
    Document::parse_with_options(text, options).map_err(|error| Error::Malformed {
        form,
        detail: error.to_string(),
    })
}

/// Refuses a text that would take the parser far longer than its length justifies. Syntax errors are left to the
/// parser.
fn check_shape(text: &str) -> Result<(), &'static str> {
    let (mut depth, mut namespace_count) = (0_usize, 0);
    let mut rest = text;
    while let Some(at) = rest.find('<') {
        rest = &rest[at..];
        let special = [
            ("<!--", "-->"),
            ("<![CDATA[", "]]>"),
            ("<?", "?>"),
            ("<!", ">"),
            ("</", ">"),
        ];
        if let Some((start, end)) = special.into_iter().find(|(start, _)| rest.starts_with(start)) {
            if start == "</" {
                depth = depth.saturating_sub(1);
            }
            let inside = &rest[start.len()..];
            let Some(length) = inside.find(end) else {
                return Ok(());
            };
            rest = &inside[length + end.len()..];
            continue;
        }
        let tag = Tag::of(&rest[1..]);
        namespace_count += tag.namespace_count;
        if !tag.is_empty {
            depth += 1;
        }
        rest = tag.behind;
        if tag.attribute_count > ATTRIBUTE_COUNT_MAX {
            return Err("an element has too many attributes");
        }
        if namespace_count > NAMESPACE_COUNT_MAX {
            return Err("it declares too many namespaces");
        }
        if depth > DEPTH_MAX {
            return Err("too many elements are inside of one another");
        }
    }
    Ok(())
}

/// A tag between `<` and `>`.
struct Tag<'t> {
    attribute_count: usize,
    namespace_count: usize,
    /// Whether the tag also ends the element.
    is_empty: bool,
    behind: &'t str,
}

impl<'t> Tag<'t> {
    /// Parses the tag at the start of `text`, which begins after the `<`.
    fn of(text: &'t str) -> Self {
        let mut tag = Self {
            attribute_count: 0,
            namespace_count: 0,
            is_empty: false,
            behind: "",
        };
        let mut rest = text;
        while let Some(at) = rest.find(['"', '\'', '>']) {
            let (before, found) = rest.split_at(at);
            let quote = &found[..1];
            let value = &found[1..];
            if quote == ">" {
                tag.is_empty = before.ends_with('/');
                tag.behind = value;
                return tag;
            }
            // This may also count other attributes, which only makes the limit stricter.
            tag.namespace_count += usize::from(before.contains("xmlns"));
            tag.attribute_count += 1;
            let Some(end) = value.find(quote) else { return tag };
            rest = &value[end + 1..];
        }
        tag
    }
}

/// The first child element with this name.
pub(crate) fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    children(node, name).next()
}

/// The child elements with this name.
pub(crate) fn children<'a, 'input>(node: Node<'a, 'input>, name: &str) -> impl Iterator<Item = Node<'a, 'input>> {
    node.children()
        .filter(move |child| child.is_element() && child.tag_name().name() == name)
}

/// The text of the first child element with this name, without spaces around it.
pub(crate) fn text<'a>(node: Node<'a, '_>, name: &str) -> Option<&'a str> {
    child(node, name).and_then(|child| child.text()).map(str::trim)
}

/// An attribute of the first child element with this name.
pub(crate) fn attribute<'a>(node: Node<'a, '_>, name: &str, attribute: &str) -> Option<&'a str> {
    child(node, name).and_then(|child| child.attribute(attribute))
}

/// An attribute of `node` by its name alone, in any namespace.
pub(crate) fn named<'a>(node: Node<'a, '_>, name: &str) -> Option<&'a str> {
    node.attributes()
        .find(|attribute| attribute.name() == name)
        .map(|attribute| attribute.value())
}

#[cfg(test)]
mod tests {
    use super::{Tag, check_shape, parse};

    #[test]
    fn attributes_and_namespaces_of_a_tag_are_counted() {
        let counts = |text: &'static str| {
            let tag = Tag::of(text);
            (tag.attribute_count, tag.namespace_count, tag.is_empty, tag.behind)
        };
        assert_eq!(counts("a>b"), (0, 0, false, "b"));
        assert_eq!(counts("a/>"), (0, 0, true, ""));
        assert_eq!(counts("a xmlns='>' b=\"'/>\" >x"), (2, 1, false, "x"));
        assert_eq!(counts("a b='xmlns'\n xmlns:c='d'/>"), (2, 1, true, ""));
        assert_eq!(counts("a\nxmlns:c='d'/>"), (1, 1, true, ""));
        assert_eq!(counts("a b='c"), (1, 0, false, ""));
    }

    /// Each of these would take the parser minutes, or gigabytes.
    #[test]
    fn excessive_shapes_are_refused() {
        let attributes = |count: usize| {
            let attributes: Vec<String> = (0..count).map(|number| format!("a{number}=''")).collect();
            format!("<a {}/>", attributes.join(" "))
        };
        let nested = |count: usize| format!("{}{}", "<a>".repeat(count), "</a>".repeat(count));
        let namespaces = |count: usize| {
            let starts: Vec<String> = (0..count).map(|number| format!("<a xmlns:b{number}='c'>")).collect();
            format!("{}{}", starts.concat(), "</a>".repeat(count))
        };
        for fitting in [
            attributes(256),
            nested(1000),
            namespaces(500),
            format!("<a>{}</a>", "<b/><c></c>".repeat(5000)),
            format!("<a><!-- {} --><![CDATA[{}]]></a>", "'".repeat(1000), "<b>".repeat(2000)),
        ] {
            parse(&fitting, "text").unwrap();
        }
        for wrong in [attributes(257), nested(1001), namespaces(1001), attributes(100_000)] {
            check_shape(&wrong).unwrap_err();
            parse(&wrong, "text").unwrap_err();
        }
    }
}
