//! `event.from`: the events since a token was issued.
//!
//! Source: `ocaml/xapi/xapi_event.ml` and `ocaml/xapi-types/event_types.ml`. A client without a token gets all objects.
//! A client that has all events gets an empty list here, and the connection repeats the query until the client's
//! timeout has passed.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::Context;
use super::argument::{exactly, text};
use super::task::look_at_all;
use crate::database::Happening;
use crate::failure::{Answer, Failure};

pub(super) fn call(context: &mut Context<'_>, operation: &str, arguments: &[Value]) -> Option<Answer<Value>> {
    (operation == "from").then(|| from(context, arguments))
}

fn from(context: &mut Context<'_>, arguments: &[Value]) -> Answer<Value> {
    let [classes, token, timeout] = exactly(context.method, arguments)?;
    let classes: Vec<&str> = classes
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let token = text(token, "token")?;
    if timeout.as_f64().is_none() {
        return Err(Failure::new("FIELD_TYPE_ERROR", &["timeout"]));
    }
    let since = match token.split(',').next() {
        Some("") | None => 0,
        Some(number) => number
            .parse()
            .map_err(|_| Failure::new("EVENT_FROM_TOKEN_PARSE_FAILURE", &[token]))?,
    };
    look_at_all(context.pool, context.state);
    let database = &context.state.database;
    let mut last_by_object = BTreeMap::new();
    for happening in database.happenings_after(since).filter(|it| is_wanted(it, &classes)) {
        // An object that is new to the client is reported as added, even if it was changed since.
        let is_new = happening.operation == "add" || since == 0;
        let entry = last_by_object
            .entry((happening.class, &happening.reference))
            .or_insert((happening, is_new));
        *entry = (happening, entry.1 || is_new);
    }
    let mut events: Vec<_> = last_by_object.into_values().collect();
    events.sort_by_key(|(happening, _)| happening.number);
    let events: Vec<Value> = events
        .into_iter()
        .filter(|(happening, _)| !(since == 0 && happening.operation == "del"))
        .map(|(happening, is_new)| event(happening, is_new))
        .collect();
    Ok(json!({
        "events": events,
        "valid_ref_counts": database.counts(),
        "token": format!("{:020},{:020}", database.happening_count(), 0),
    }))
}

fn is_wanted(happening: &Happening, classes: &[&str]) -> bool {
    classes.iter().any(|wanted| match wanted.split_once('/') {
        Some((class, reference)) => class.eq_ignore_ascii_case(happening.class) && reference == happening.reference,
        None => *wanted == "*" || wanted.eq_ignore_ascii_case(happening.class),
    })
}

fn event(happening: &Happening, is_new: bool) -> Value {
    let operation = match happening.operation {
        "del" => "del",
        _ if is_new => "add",
        operation => operation,
    };
    let mut event = json!({
        "id": happening.number.to_string(), "timestamp": "0.0", "class": happening.class.to_lowercase(),
        "operation": operation, "ref": happening.reference,
    });
    if let Some(snapshot) = &happening.snapshot {
        event["snapshot"] = Value::Object(snapshot.clone());
    }
    event
}
