//! The errors of QEMU.

use serde_json::{Value, json};

/// Result of a command.
pub(crate) type Answer<T> = Result<T, Refusal>;

/// An error of QEMU: its class and its message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) class: &'static str,
    pub(crate) description: String,
}

impl Refusal {
    pub(crate) fn generic(description: impl Into<String>) -> Self {
        Self {
            class: "GenericError",
            description: description.into(),
        }
    }

    pub(crate) fn device_not_found(name: &str) -> Self {
        Self {
            class: "DeviceNotFound",
            description: format!("Device '{name}' not found"),
        }
    }

    pub(crate) fn command_not_found(name: &str) -> Self {
        Self {
            class: "CommandNotFound",
            description: format!("The command {name} has not been found"),
        }
    }

    pub(crate) fn to_value(&self) -> Value {
        json!({ "class": self.class, "desc": self.description })
    }
}

/// An argument that is a text.
pub(crate) fn text<'a>(arguments: &'a Value, key: &str) -> Answer<&'a str> {
    let found = arguments.get(key).and_then(Value::as_str);
    found.ok_or_else(|| Refusal::generic(format!("Parameter '{key}' is missing")))
}

/// An argument that is true or false; false if missing.
pub(crate) fn flag(arguments: &Value, key: &str) -> bool {
    arguments.get(key).and_then(Value::as_bool).unwrap_or_default()
}

/// An argument that is a list; empty if missing.
pub(crate) fn items<'a>(arguments: &'a Value, key: &str) -> &'a [Value] {
    arguments.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}
