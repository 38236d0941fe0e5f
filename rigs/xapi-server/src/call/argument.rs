//! Arguments of calls.

use std::num::TryFromIntError;

use serde_json::{Map, Value};

use crate::failure::{Answer, Failure};

/// Checks that there are exactly `N` arguments.
pub(super) fn exactly<'a, const N: usize>(method: &str, arguments: &'a [Value]) -> Answer<&'a [Value; N]> {
    arguments.try_into().map_err(|_| mismatch(method, N, arguments.len()))
}

/// The error for a wrong number of arguments. The session is not counted.
pub(super) fn mismatch(method: &str, expected: usize, received: usize) -> Failure {
    let (expected, received) = (expected.to_string(), received.to_string());
    Failure::new("MESSAGE_PARAMETER_COUNT_MISMATCH", &[method, &expected, &received])
}

fn wrong(name: &str) -> Failure {
    Failure::new("FIELD_TYPE_ERROR", &[name])
}

pub(super) fn text<'a>(value: &'a Value, name: &str) -> Answer<&'a str> {
    value.as_str().ok_or_else(|| wrong(name))
}

/// A number in JSON, or as text, which XML-RPC uses for numbers.
pub(super) fn number(value: &Value, name: &str) -> Answer<u64> {
    let digits = value.as_str().and_then(|text| text.parse::<i64>().ok());
    let number = value.as_i64().or(digits).ok_or_else(|| wrong(name))?;
    u64::try_from(number)
        .map_err(|_: TryFromIntError| Failure::new("VALUE_NOT_SUPPORTED", &[name, &number.to_string(), ""]))
}

pub(super) fn flag(value: &Value, name: &str) -> Answer<bool> {
    value.as_bool().ok_or_else(|| wrong(name))
}

pub(super) fn map<'a>(value: &'a Value, name: &str) -> Answer<&'a Map<String, Value>> {
    value.as_object().ok_or_else(|| wrong(name))
}

/// The field `field` of a record that was passed to `create`.
pub(super) fn field<'a>(record: &'a Map<String, Value>, field: &str) -> Answer<&'a Value> {
    record.get(field).ok_or_else(|| wrong(field))
}
