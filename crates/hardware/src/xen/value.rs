//! XML-RPC values in the notation of XenServer.
//!
//! Source: the XML-RPC specification (Dave Winer, 1999). XenServer writes integers as untyped text.

use roxmltree::Node;

use crate::xml::{self, Element};
use crate::{Error, Result};

/// Limit of nesting; a machine's records have five levels.
const DEPTH_MAX: usize = 32;

/// An XML-RPC value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Text, and untyped values.
    Text(String),
    /// `<boolean>`.
    Bool(bool),
    /// `<dateTime.iso8601>`, unparsed.
    Time(String),
    /// `<array>`.
    Array(Vec<Value>),
    /// `<struct>`: names and values, in their order.
    Struct(Vec<(String, Value)>),
}

impl Value {
    /// Parses one value; `form` names the format in errors.
    pub fn parse(text: &str, form: &'static str) -> Result<Self> {
        let document = xml::parse(text, form)?;
        of_node(document.root_element(), form, 0)
    }

    /// A text value.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    /// The member of a struct with this name.
    pub fn get(&self, name: &str) -> Option<&Self> {
        match self {
            Self::Struct(members) => members
                .iter()
                .find(|(member, _)| member == name)
                .map(|(_, value)| value),
            _ => None,
        }
    }

    /// Copies the members with these names from `other`.
    pub(super) fn copy_members(&mut self, other: &Self, names: &[&str]) {
        let Self::Struct(members) = self else { return };
        for name in names {
            let Some(value) = other.get(name) else { continue };
            match members.iter_mut().find(|(member, _)| member == name) {
                Some((_, member)) => *member = value.clone(),
                None => members.push(((*name).to_owned(), value.clone())),
            }
        }
    }

    /// The text of the member with this name; empty if there is none.
    pub fn text_of(&self, name: &str) -> &str {
        self.get(name).and_then(Self::as_text).unwrap_or_default()
    }

    /// Whether the member with this name is true.
    pub fn is_true(&self, name: &str) -> bool {
        match self.get(name) {
            Some(Self::Bool(truth)) => *truth,
            Some(Self::Text(text)) => matches!(text.as_str(), "true" | "1"),
            _ => false,
        }
    }

    /// The text of a [`Self::Text`].
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) | Self::Time(text) => Some(text),
            _ => None,
        }
    }

    /// The elements of an array.
    pub fn as_array(&self) -> &[Self] {
        match self {
            Self::Array(values) => values,
            _ => &[],
        }
    }

    /// The element in the notation of XenServer: without white space between tags and without self-closing tags, which
    /// XenServer's readers may not support.
    pub fn to_element(&self) -> Element {
        let value = Element::new("value").inline();
        match self {
            Self::Text(text) => value.text(text),
            Self::Bool(truth) => value.child(Element::new("boolean").text(u8::from(*truth))),
            Self::Time(time) => value.child(Element::new("dateTime.iso8601").text(time)),
            Self::Array(values) => {
                let data = Element::new("data")
                    .inline()
                    .children(values.iter().map(Self::to_element));
                value.child(Element::new("array").child(data))
            }
            Self::Struct(members) => {
                let members = members.iter().map(|(name, value)| {
                    Element::new("member")
                        .child(Element::new("name").text(name))
                        .child(value.to_element())
                });
                value.child(Element::new("struct").inline().children(members))
            }
        }
    }
}

fn of_node(node: Node<'_, '_>, form: &'static str, depth: usize) -> Result<Value> {
    let wrong = |detail: String| Err(Error::Malformed { form, detail });
    if node.tag_name().name() != "value" {
        return wrong(format!(
            "an element <{}> is where a value should be",
            node.tag_name().name()
        ));
    }
    if depth == DEPTH_MAX {
        return wrong(format!("values are more than {DEPTH_MAX} deep"));
    }
    let Some(typed) = node.children().find(Node::is_element) else {
        return Ok(Value::Text(node.text().unwrap_or_default().to_owned()));
    };
    let text = || typed.text().unwrap_or_default().to_owned();
    Ok(match typed.tag_name().name() {
        "string" | "int" | "i4" | "i8" | "double" | "base64" => Value::Text(text()),
        "boolean" => Value::Bool(text().trim() == "1"),
        "dateTime.iso8601" => Value::Time(text()),
        "nil" => Value::Text(String::new()),
        "array" => {
            let data = xml::child(typed, "data");
            let values = data.iter().flat_map(|data| xml::children(*data, "value"));
            Value::Array(
                values
                    .map(|value| of_node(value, form, depth + 1))
                    .collect::<Result<_>>()?,
            )
        }
        "struct" => {
            let mut members = Vec::new();
            for member in xml::children(typed, "member") {
                let name = xml::child(member, "name")
                    .and_then(|name| name.text())
                    .unwrap_or_default();
                let Some(value) = xml::child(member, "value") else {
                    return wrong(format!("the member {name:?} has no value"));
                };
                members.push((name.to_owned(), of_node(value, form, depth + 1)?));
            }
            Value::Struct(members)
        }
        other => return wrong(format!("a value of the type <{other}>")),
    })
}

#[cfg(test)]
mod tests {
    use super::Value;

    #[test]
    fn values_survive_a_round_trip() {
        let value = Value::Struct(vec![
            ("name".to_owned(), Value::text("a<b & \"c\"")),
            ("yes".to_owned(), Value::Bool(true)),
            ("when".to_owned(), Value::Time("19700101T00:00:00Z".to_owned())),
            ("empty".to_owned(), Value::Array(Vec::new())),
            (
                "all".to_owned(),
                Value::Array(vec![Value::text("1"), Value::Struct(Vec::new())]),
            ),
        ]);
        assert_eq!(Value::parse(&value.to_element().to_string(), "value").unwrap(), value);
        assert!(value.is_true("yes") && !value.is_true("name"));
        assert_eq!((value.text_of("name"), value.text_of("nothing")), ("a<b & \"c\"", ""));
        assert_eq!(value.get("all").unwrap().as_array().len(), 2);
    }

    #[test]
    fn malformed_values_are_errors() {
        let deep = format!(
            "{}{}",
            "<value><array><data>".repeat(40),
            "</data></array></value>".repeat(40)
        );
        for wrong in [
            "",
            "<struct/>",
            "<value><odd/></value>",
            "<value><struct><member><name>a</name></member></struct></value>",
            &deep,
        ] {
            Value::parse(wrong, "value").unwrap_err();
        }
    }
}
