//! XML-RPC in xapi's notation.
//!
//! Integers are strings of digits, and strings have no type element. A text in the form of a date becomes a
//! `dateTime.iso8601`, because values inside the server have no type for dates.

use roxmltree::{Document, Node};
use serde_json::{Map, Value, json};

use super::MethodCall;
use crate::failure::Answer;

/// Limit of the nesting of values; a call with deeper ones is invalid.
const DEPTH_MAX: usize = 32;

/// Reads a `methodCall`.
pub(crate) fn read_call(body: &str) -> Option<MethodCall> {
    let document = Document::parse(body).ok()?;
    let root = document.root_element();
    if !root.has_tag_name("methodCall") {
        return None;
    }
    let method = child(root, "methodName")?.text()?.trim().to_owned();
    let parameters = match child(root, "params") {
        None => Vec::new(),
        Some(parameters) => parameters
            .children()
            .filter(|node| node.has_tag_name("param"))
            .map(|node| value(child(node, "value")?, 0))
            .collect::<Option<_>>()?,
    };
    Some(MethodCall { method, parameters })
}

/// Parses a document that is one value, such as `ova.xml`.
pub(crate) fn read_value(body: &str) -> Option<Value> {
    let document = Document::parse(body).ok()?;
    let root = document.root_element();
    root.has_tag_name("value").then(|| value(root, 0))?
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn value(node: Node<'_, '_>, depth: usize) -> Option<Value> {
    if depth > DEPTH_MAX {
        return None;
    }
    let Some(typed) = node.children().find(Node::is_element) else {
        return Some(json!(node.text().unwrap_or_default()));
    };
    let text = typed.text().unwrap_or_default();
    match typed.tag_name().name() {
        "string" | "dateTime.iso8601" => Some(json!(text)),
        "i4" | "i8" | "int" => Some(json!(text.trim().parse::<i64>().ok()?)),
        "boolean" => Some(json!(text.trim() == "1")),
        "double" => Some(json!(text.trim().parse::<f64>().ok()?)),
        "nil" => Some(Value::Null),
        "array" => {
            let data = child(typed, "data")?;
            let items = data.children().filter(Node::is_element);
            items
                .map(|item| value(item, depth + 1))
                .collect::<Option<Vec<_>>>()
                .map(Value::Array)
        }
        "struct" => {
            let mut members = Map::new();
            for member in typed.children().filter(Node::is_element) {
                let name = child(member, "name")?.text().unwrap_or_default();
                members.insert(name.to_owned(), value(child(member, "value")?, depth + 1)?);
            }
            Some(Value::Object(members))
        }
        _ => None,
    }
}

/// Writes a `methodResponse`.
pub(crate) fn write_answer(answer: &Answer<Value>) -> String {
    let answer = match answer {
        Ok(result) => json!({"Status": "Success", "Value": result}),
        Err(failure) => json!({"Status": "Failure", "ErrorDescription": failure.words()}),
    };
    format!(
        "<?xml version=\"1.0\"?><methodResponse><params><param>{}</param></params></methodResponse>",
        write_value(&answer)
    )
}

/// Writes one value.
pub(crate) fn write_value(value: &Value) -> String {
    let mut text = String::new();
    append(value, &mut text);
    text
}

fn append(value: &Value, text: &mut String) {
    text.push_str("<value>");
    match value {
        Value::Null => text.push_str("<nil/>"),
        Value::Bool(flag) => text.push_str(if *flag {
            "<boolean>1</boolean>"
        } else {
            "<boolean>0</boolean>"
        }),
        Value::Number(number) if number.is_f64() => {
            text.extend(["<double>", &number.to_string(), "</double>"]);
        }
        Value::Number(number) => text.push_str(&number.to_string()),
        Value::String(word) if is_date(word) => {
            text.extend(["<dateTime.iso8601>", word, "</dateTime.iso8601>"]);
        }
        Value::String(word) => text.push_str(&escape(word)),
        Value::Array(items) => {
            text.push_str("<array><data>");
            for item in items {
                append(item, text);
            }
            text.push_str("</data></array>");
        }
        Value::Object(members) => {
            text.push_str("<struct>");
            for (name, member) in members {
                text.extend(["<member><name>", &escape(name), "</name>"]);
                append(member, text);
                text.push_str("</member>");
            }
            text.push_str("</struct>");
        }
    }
    text.push_str("</value>");
}

fn escape(word: &str) -> String {
    let mut escaped = String::with_capacity(word.len());
    for character in word.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&apos;"),
            // XML 1.0 cannot represent the other control characters.
            '\t' | '\n' | '\r' | ' '.. => escaped.push(character),
            _ => {}
        }
    }
    escaped
}

/// Whether `word` is a date in xapi's form: `20260101T12:00:00Z`.
fn is_date(word: &str) -> bool {
    let pattern = b"dddddddd\x54dd:dd:dd\x5A";
    word.len() == pattern.len()
        && word.bytes().zip(pattern).all(|(byte, expected)| match expected {
            b'd' => byte.is_ascii_digit(),
            expected => byte == *expected,
        })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{read_call, read_value, write_answer, write_value};
    use crate::failure::Failure;

    #[test]
    fn written_values_are_read_again() {
        let value = json!({"name": "a<b&\"c\"", "list": ["x", true, 1.5], "date": "20260101T12:00:00Z", "empty": ""});
        let text = write_value(&value);
        assert!(text.contains("<dateTime.iso8601>"), "{text}");
        assert_eq!(read_value(&text), Some(value));
    }

    #[test]
    fn integers_are_text() {
        assert_eq!(write_value(&json!(64)), "<value>64</value>");
        assert_eq!(write_value(&json!(1.0)), "<value><double>1.0</double></value>");
    }

    #[test]
    fn a_call_has_typed_and_untyped_strings() {
        let call = read_call(
            "<?xml version='1.0'?><methodCall><methodName>VM.x</methodName><params><param><value><string>a</string></value></param>\
             <param><value>b</value></param><param><value><struct><member><name>k</name><value><i4>3</i4></value></member></struct>\
             </value></param></params></methodCall>",
        )
        .unwrap();
        assert_eq!(call.parameters, [json!("a"), json!("b"), json!({"k": 3})]);
        assert!(read_call("<methodCall/>").is_none());
        assert!(read_call("not xml").is_none());
    }

    #[test]
    fn a_failure_is_a_list() {
        let text = write_answer(&Err(Failure::new("UUID_INVALID", &["VM", "x"])));
        assert!(
            text.contains("<data><value>UUID_INVALID</value><value>VM</value><value>x</value></data>"),
            "{text}"
        );
    }
}
