//! The values of QEMU's options: `driver=qcow2,node-name=disk0`, or an object of JSON.

use std::fmt::Write as _;

use serde_json::{Map, Value};

/// How an option is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Syntax {
    /// Keys with values, separated by commas; commas in values are doubled.
    Pairs,
    Json,
}

/// The value of an option, as keys with values. Keys of nested objects are joined by dots.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct OptionPairs {
    syntax: Syntax,
    /// A word without `=` is a key without a value.
    pairs: Vec<(String, Option<Value>)>,
}

impl OptionPairs {
    /// Everything is a value of an option. What looks like JSON and is not is read as pairs.
    pub(super) fn parse(text: &str) -> Self {
        let object = text.trim_start().starts_with('{').then(|| serde_json::from_str(text));
        if let Some(Ok(Value::Object(object))) = object {
            let mut pairs = Vec::new();
            flatten("", object, &mut pairs);
            return Self {
                syntax: Syntax::Json,
                pairs,
            };
        }
        Self {
            syntax: Syntax::Pairs,
            pairs: split(text)
                .iter()
                .map(|part| match part.split_once('=') {
                    Some((key, value)) => (key.to_owned(), Some(Value::from(value))),
                    None => (part.clone(), None),
                })
                .collect(),
        }
    }

    /// The value as it is written on a command line.
    pub(super) fn text(&self) -> String {
        match self.syntax {
            Syntax::Json => {
                let mut object = Map::new();
                for (key, value) in &self.pairs {
                    insert(&mut object, key, value.clone().unwrap_or_default());
                }
                Value::Object(object).to_string()
            }
            Syntax::Pairs => {
                let mut text = String::new();
                for (key, value) in &self.pairs {
                    let comma = if text.is_empty() { "" } else { "," };
                    // Writing to a string does not fail.
                    match value {
                        Some(value) => write!(text, "{comma}{key}={}", text_of(value).replace(',', ",,")).ok(),
                        None => write!(text, "{comma}{}", key.replace(',', ",,")).ok(),
                    };
                }
                text
            }
        }
    }

    /// The text with this key.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        let (_, value) = self.pairs.iter().find(|(other, _)| other == key)?;
        value.as_ref()?.as_str()
    }

    /// The keys whose text `is_wanted`.
    pub(super) fn keys_of(&self, is_wanted: impl Fn(&str) -> bool) -> Vec<String> {
        let texts = self
            .pairs
            .iter()
            .filter_map(|(key, value)| Some((key, value.as_ref()?.as_str()?)));
        texts
            .filter(|(_, text)| is_wanted(text))
            .map(|(key, _)| key.clone())
            .collect()
    }

    /// All texts; of a word without `=`, the word.
    pub(super) fn texts(&self) -> Vec<&str> {
        let mut texts = Vec::new();
        for (key, value) in &self.pairs {
            match value {
                None => texts.push(&key[..]),
                Some(value) => strings_of(value, &mut texts),
            }
        }
        texts
    }

    /// Whether a switch is on: `server`, `server=on`, `"server": true`.
    pub(super) fn is_on(&self, key: &str) -> bool {
        self.pairs.iter().any(|(other, value)| {
            other == key
                && match value {
                    None | Some(Value::Bool(true)) => true,
                    Some(value) => matches!(value.as_str(), Some("on" | "yes" | "true")),
                }
        })
    }

    /// Sets a key, in its place or at the end.
    pub(super) fn set(&mut self, key: &str, text: &str) {
        let value = Some(Value::from(text));
        match self.pairs.iter_mut().find(|(other, _)| other == key) {
            Some((_, old)) => *old = value,
            None => self.pairs.push((key.to_owned(), value)),
        }
    }

    /// Replaces the first word, which has no key: `q35` in `q35,accel=kvm`. False if there is none.
    pub(super) fn set_first_word(&mut self, word: &str) -> bool {
        match self.pairs.first_mut() {
            Some((first, None)) => {
                word.clone_into(first);
                true
            }
            _ => false,
        }
    }

    /// Inserts a pair at the front.
    pub(super) fn push_front(&mut self, key: &str, text: &str) {
        self.pairs.insert(0, (key.to_owned(), Some(Value::from(text))));
    }

    /// Removes the keys that `is_unwanted`.
    pub(super) fn remove(&mut self, is_unwanted: impl Fn(&str) -> bool) {
        self.pairs.retain(|(key, _)| !is_unwanted(key));
    }
}

/// The parts between commas. Two commas are one in a part.
fn split(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter == ',' && letters.next_if_eq(&',').is_none() {
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(letter);
        }
    }
    parts
}

fn text_of(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn flatten(prefix: &str, object: Map<String, Value>, pairs: &mut Vec<(String, Option<Value>)>) {
    for (key, value) in object {
        match value {
            Value::Object(object) if !object.is_empty() => flatten(&format!("{prefix}{key}."), object, pairs),
            value => pairs.push((format!("{prefix}{key}"), Some(value))),
        }
    }
}

fn insert(object: &mut Map<String, Value>, key: &str, value: Value) {
    match key.split_once('.') {
        None => drop(object.insert(key.to_owned(), value)),
        Some((first, rest)) => {
            let inner = object.entry(first).or_insert_with(|| Value::Object(Map::new()));
            if let Value::Object(inner) = inner {
                insert(inner, rest, value);
            }
        }
    }
}

fn strings_of<'v>(value: &'v Value, strings: &mut Vec<&'v str>) {
    match value {
        Value::String(text) => strings.push(text),
        Value::Array(values) => values.iter().for_each(|value| strings_of(value, strings)),
        Value::Object(values) => values.values().for_each(|value| strings_of(value, strings)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::OptionPairs;

    #[test]
    fn options_are_written_as_they_were_read() {
        for text in [
            "",
            "q35,accel=kvm",
            "file=/a,,b.qcow2,format=qcow2,if=none",
            "socket,id=c,path=/run/a,server=on,wait=off",
            "file:/tmp/,,x",
            "{no json}",
        ] {
            assert_eq!(OptionPairs::parse(text).text(), text);
        }
        let object = json!({
            "driver": "qcow2", "read-only": false, "cache": { "direct": true },
            "file": { "driver": "file", "filename": "/a,b" }, "list": [1, "x"], "none": {},
        });
        let pairs = OptionPairs::parse(&object.to_string());
        assert_eq!(serde_json::from_str::<Value>(&pairs.text()).unwrap(), object);
    }

    #[test]
    fn keys_are_found_and_changed() {
        let mut pairs = OptionPairs::parse("socket,path=/run/a,,b,server,wait=off");
        assert_eq!(pairs.get("path"), Some("/run/a,b"));
        assert!(pairs.is_on("server") && !pairs.is_on("wait") && !pairs.is_on("path"));
        assert_eq!(pairs.texts(), ["socket", "/run/a,b", "server", "off"]);
        assert_eq!(pairs.keys_of(|text| text.starts_with('/')), ["path"]);
        pairs.set("path", "/run/c");
        pairs.set("id", "x");
        pairs.remove(|key| key == "wait");
        assert_eq!(pairs.text(), "socket,path=/run/c,server,id=x");
        assert!(pairs.set_first_word("file"));
        assert_eq!(pairs.text(), "file,path=/run/c,server,id=x");
        let mut nested = OptionPairs::parse(r#"{"file":{"filename":"/a"},"server":true,"names":["/b"]}"#);
        assert!(nested.is_on("server"));
        assert_eq!(nested.texts(), ["/a", "/b"]);
        nested.set("file.filename", "/c");
        assert_eq!(nested.get("file.filename"), Some("/c"));
        assert!(!nested.set_first_word("x"));
    }
}
