//! `task.*`: running and completed tasks.

use serde_json::{Value, json};

use super::argument::{exactly, text};
use super::{Context, perform, result_text};
use crate::database::text as field;
use crate::failure::{Answer, Failure};
use crate::pool::{Outcome, Pool, State};

/// Creates a task.
pub(crate) fn new_task(pool: &Pool, state: &mut State, name: &str) -> String {
    let host = state.hosts[state.master].clone();
    state.database.add(
        "task",
        json!({"name_label": name, "created": pool.date(), "finished": pool.date(), "resident_on": host}),
    )
}

/// Records how a task ended, unless it was destroyed or has already ended.
pub(crate) fn end_task(pool: &Pool, state: &mut State, task: &str, answer: &Answer<Value>) {
    let Ok(record) = state.database.get("task", task) else {
        return;
    };
    let is_cancelling = match field(record, "status") {
        "pending" => false,
        "cancelling" => true,
        _ => return,
    };
    let date = pool.date();
    let changed = state.database.change("task", task, |record| {
        record.insert("finished".to_owned(), json!(date));
        record.insert("current_operations".to_owned(), json!({}));
        record.insert("allowed_operations".to_owned(), json!(["destroy"]));
        match answer {
            Ok(value) => {
                record.insert("status".to_owned(), json!("success"));
                record.insert("progress".to_owned(), json!(1.0));
                record.insert("result".to_owned(), json!(result_text(value)));
            }
            Err(failure) => {
                let status = if is_cancelling { "cancelled" } else { "failure" };
                record.insert("status".to_owned(), json!(status));
                record.insert("progress".to_owned(), json!(1.0));
                record.insert("error_info".to_owned(), json!(failure.words()));
            }
        }
    });
    debug_assert!(changed.is_ok(), "it was just found");
}

pub(super) fn call(context: &mut Context<'_>, operation: &str, arguments: &[Value]) -> Option<Answer<Value>> {
    match operation {
        "create" => Some(create(context, arguments)),
        "destroy" => Some(destroy(context, arguments)),
        "cancel" => Some(cancel(context, arguments)),
        _ => {
            // The other calls about tasks read records, which works as for any class.
            let one = arguments.first().and_then(Value::as_str).map(str::to_owned);
            match one {
                Some(task) if operation.starts_with("get_") => look(context.pool, context.state, &task),
                _ => look_at_all(context.pool, context.state),
            }
            None
        }
    }
}

fn create(context: &mut Context<'_>, arguments: &[Value]) -> Answer<Value> {
    let [label, description] = exactly(context.method, arguments)?;
    let (label, description) = (text(label, "label")?, text(description, "description")?);
    let task = new_task(context.pool, context.state, label);
    context
        .state
        .database
        .set("task", &task, "name_description", json!(description))?;
    Ok(json!(task))
}

fn destroy(context: &mut Context<'_>, arguments: &[Value]) -> Answer<Value> {
    let [task] = exactly(context.method, arguments)?;
    let task = text(task, "self")?;
    context.state.database.remove("task", task)?;
    context.state.pending.remove(task);
    Ok(json!(""))
}

/// Drops pending work. A running transfer is notified and ends itself.
fn cancel(context: &mut Context<'_>, arguments: &[Value]) -> Answer<Value> {
    let [task] = exactly(context.method, arguments)?;
    let task = text(task, "task")?;
    let record = context.state.database.get("task", task)?;
    if field(record, "status") != "pending" {
        return Ok(json!(""));
    }
    context
        .state
        .database
        .set("task", task, "status", json!("cancelling"))?;
    let is_async = context.state.pending.contains_key(task);
    if is_async {
        let cancelled = Err(Failure::new("TASK_CANCELLED", &[task]));
        let pending = context.state.pending.remove(task);
        let end = match pending.map(|pending| pending.outcome) {
            // Too late: the call was already executed, and is not undone.
            Some(Outcome::Done(answer)) => answer,
            _ => cancelled,
        };
        end_task(context.pool, context.state, task, &end);
    }
    Ok(json!(""))
}

/// Polls each pending task once.
pub(super) fn look_at_all(pool: &Pool, state: &mut State) {
    let tasks: Vec<String> = state.pending.keys().cloned().collect();
    for task in tasks {
        look(pool, state, &task);
    }
}

/// Polls a task; at the last poll its call is executed, if necessary, and the task ends.
fn look(pool: &Pool, state: &mut State, task: &str) {
    let Some(pending) = state.pending.get_mut(task) else {
        return;
    };
    if pending.looks_left > 0 {
        pending.looks_left -= 1;
        let done = f64::from(pending.looks_total - pending.looks_left);
        let progress = done / f64::from(pending.looks_total + 1);
        let set = state.database.set("task", task, "progress", json!(progress));
        debug_assert!(set.is_ok(), "a task that is destroyed is no longer pending");
        return;
    }
    let Some(pending) = state.pending.remove(task) else {
        return;
    };
    let answer = match pending.outcome {
        Outcome::Done(answer) => answer,
        Outcome::Waiting { session, call } => perform(pool, state, &session, &call.method, &call.parameters),
    };
    end_task(pool, state, task, &answer);
}
