//! The messages of the protocol: one JSON object per line.

use serde_json::{Map, Value, json};

use super::{MonitorError, QmpCommand, Result};

/// Limit on the bytes of one message of QEMU. A list of thousands of block nodes has a few MiB.
pub(crate) const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// A message of QEMU.
#[derive(Debug)]
pub(crate) enum Message {
    /// The greeting: version and capabilities.
    Greeting,
    /// An answer to the command with this number.
    Answer(Option<u64>, std::result::Result<Value, Refusal>),
    /// An event.
    Event(Event),
}

/// QEMU refuses the command.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) class: String,
    pub(crate) description: String,
}

/// An event of QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// "STOP", "BLOCK_JOB_COMPLETED"...
    pub name: String,
    /// The data; an object, or null.
    pub data: Value,
    /// The time in microseconds since 1970, by the clock of QEMU's host.
    pub time_us: u64,
}

/// A command as an object, without an id, which the sender adds.
pub(crate) fn object_of(command: &QmpCommand) -> Value {
    let mut object = json!({ "execute": command.name });
    if !command.arguments.is_null() {
        object["arguments"] = command.arguments.clone();
    }
    object
}

/// A command as bytes, with a line end.
pub(crate) fn encode(command: &QmpCommand, number: u64) -> Vec<u8> {
    let mut object = object_of(command);
    object["id"] = number.into();
    let mut bytes = object.to_string().into_bytes();
    bytes.push(b'\n');
    bytes
}

/// Parses one line of QEMU.
pub(crate) fn decode(line: &[u8]) -> std::result::Result<Message, String> {
    let value: Value = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    let Value::Object(mut object) = value else {
        return Err("not an object".to_owned());
    };
    if object.contains_key("QMP") {
        return Ok(Message::Greeting);
    }
    if let Some(name) = object.get("event").and_then(Value::as_str) {
        let name = name.to_owned();
        return Ok(Message::Event(Event {
            name,
            time_us: time_us(&object),
            data: object.remove("data").unwrap_or(Value::Null),
        }));
    }
    let number = object.get("id").and_then(Value::as_u64);
    if let Some(answer) = object.remove("return") {
        return Ok(Message::Answer(number, Ok(answer)));
    }
    match object.remove("error") {
        Some(error) => Ok(Message::Answer(number, Err(refusal(&error)))),
        None => Err("neither an answer nor an event".to_owned()),
    }
}

fn refusal(error: &Value) -> Refusal {
    let text = |key: &str| error.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    Refusal {
        class: text("class"),
        description: text("desc"),
    }
}

fn time_us(object: &Map<String, Value>) -> u64 {
    let part = |key: &str| {
        object
            .get("timestamp")
            .and_then(|time| time.get(key))
            .and_then(Value::as_u64)
    };
    let seconds = part("seconds").unwrap_or_default();
    seconds
        .saturating_mul(1_000_000)
        .saturating_add(part("microseconds").unwrap_or_default())
}

/// Converts the answer to a command for its caller.
pub(crate) fn answer(command: &str, answer: std::result::Result<Value, Refusal>) -> Result<Value> {
    answer.map_err(|Refusal { class, description }| MonitorError::Refused {
        command: command.to_owned(),
        class,
        description,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Message, decode, encode};
    use crate::qemu::qmp::QmpCommand;

    #[test]
    fn commands_are_lines() {
        let command = QmpCommand::new("stop", serde_json::Value::Null);
        assert_eq!(encode(&command, 3), b"{\"execute\":\"stop\",\"id\":3}\n");
        let command = QmpCommand::new("blockdev-del", json!({ "node-name": "a\"b" }));
        let text = String::from_utf8(encode(&command, 4)).unwrap();
        assert_eq!(
            text,
            "{\"arguments\":{\"node-name\":\"a\\\"b\"},\"execute\":\"blockdev-del\",\"id\":4}\n"
        );
    }

    #[test]
    fn lines_are_answers_or_events() {
        let Ok(Message::Answer(Some(7), Ok(value))) = decode(br#"{"return": {"a": 1}, "id": 7}"#) else {
            panic!("an answer");
        };
        assert_eq!(value, json!({ "a": 1 }));
        let line = br#"{"id": 8, "error": {"class": "GenericError", "desc": "no such node"}}"#;
        let Ok(Message::Answer(Some(8), Err(refusal))) = decode(line) else {
            panic!("a refusal");
        };
        assert_eq!(
            (&refusal.class[..], &refusal.description[..]),
            ("GenericError", "no such node")
        );
        let line = br#"{"timestamp": {"seconds": 2, "microseconds": 5}, "event": "STOP"}"#;
        let Ok(Message::Event(event)) = decode(line) else {
            panic!("an event");
        };
        assert_eq!((&event.name[..], event.time_us), ("STOP", 2_000_005));
        assert!(matches!(decode(br#"{"QMP": {}}"#), Ok(Message::Greeting)));
        for invalid in [&b"{}"[..], b"[]", b"{", b"", b"\xff"] {
            assert!(decode(invalid).is_err());
        }
    }
}
