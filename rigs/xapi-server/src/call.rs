//! Calls: permissions, references, and dispatch to the handlers.

mod argument;
mod device;
mod event;
mod filter;
mod generic;
mod memory;
mod session;
mod snapshot;
mod task;
pub(crate) mod vdi;
pub(crate) mod vm;

use serde_json::{Value, json};

use crate::database::new_reference;
use crate::failure::{Answer, Failure};
use crate::faults::Fault;
use crate::pool::{ADDRESSES, Outcome, Pending, Pool, State};
use crate::rpc::{MethodCall, xml};
use crate::schema;

pub(crate) use device::mac_from;
pub(crate) use task::{end_task, new_task};

/// The context of a call.
pub(crate) struct Context<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) state: &'a mut State,
    /// The caller.
    pub(crate) session: &'a str,
    /// The called method, such as `VM.snapshot`, without `Async.`.
    pub(crate) method: &'a str,
}

/// Methods with an `Async.` form on this server.
const ASYNC: &[&str] = &[
    "VM.snapshot",
    "VM.checkpoint",
    "VM.destroy",
    "VM.clone",
    "VM.copy",
    "VM.start",
    "VM.start_on",
    "VM.hard_shutdown",
    "VM.clean_shutdown",
    "VM.suspend",
    "VM.resume",
    "VM.provision",
    "VM.create",
    "VDI.create",
    "VDI.destroy",
    "VDI.snapshot",
    "VDI.clone",
    "VDI.resize",
    "VDI.enable_cbt",
    "VDI.disable_cbt",
    "VDI.data_destroy",
    "VDI.list_changed_blocks",
    "VBD.create",
    "VBD.destroy",
    "VIF.create",
    "VIF.destroy",
];

/// Answers a call to the host with this number.
pub(crate) fn answer(pool: &Pool, host: usize, call: &MethodCall) -> Answer<Value> {
    let (is_async, method) = match call.method.strip_prefix("Async.") {
        Some(method) => (true, method),
        None => (false, call.method.as_str()),
    };
    let mut state = pool.state();
    state.calls.push(call.method.clone());
    if host != state.master {
        let master = ADDRESSES[state.master].to_string();
        return Err(Failure::new("HOST_IS_SLAVE", &[&master]));
    }
    if session::needs_none(method) {
        let planned = planned_failure(pool, method);
        return planned.map_or_else(|| session::open(pool, &mut state, method, &call.parameters), Err);
    }
    let (session, arguments) = session_of(pool, &mut state, call)?;
    if !is_async {
        return perform(pool, &mut state, &session, method, arguments);
    }
    if !ASYNC.contains(&method) {
        return Err(Failure::internal(format!(
            "No async mode for this operation (rpc: {method})"
        )));
    }
    let call = MethodCall {
        method: method.to_owned(),
        parameters: arguments.to_vec(),
    };
    Ok(json!(begin_async(pool, &mut state, &session, call)))
}

/// The session of a call, and the other parameters.
fn session_of<'a>(pool: &Pool, state: &mut State, call: &'a MethodCall) -> Answer<(String, &'a [Value])> {
    if pool.faults.session_ends_with_this_call() {
        state.end_sessions();
    }
    let Some((session, arguments)) = call.parameters.split_first() else {
        return Err(Failure::new(
            "MESSAGE_PARAMETER_COUNT_MISMATCH",
            &[&call.method, "1", "0"],
        ));
    };
    let session = session.as_str().unwrap_or_default();
    if !state.database.exists("session", session) {
        return Err(Failure::new("SESSION_INVALID", &[session]));
    }
    Ok((session.to_owned(), arguments))
}

/// The failure that a test has requested for this call, if any.
pub(crate) fn planned_failure(pool: &Pool, method: &str) -> Option<Failure> {
    pool.faults.take(|fault| match fault {
        Fault::CallFails { method: known, error } if known == method => Some(Failure::from_words(error)),
        _ => None,
    })
}

/// Executes a call.
pub(crate) fn perform(
    pool: &Pool,
    state: &mut State,
    session: &str,
    method: &str,
    arguments: &[Value],
) -> Answer<Value> {
    if let Some(failure) = planned_failure(pool, method) {
        return Err(failure);
    }
    let unknown = || Failure::new("MESSAGE_METHOD_UNKNOWN", &[method]);
    let (name, operation) = method.split_once('.').ok_or_else(unknown)?;
    let mut context = Context {
        pool,
        state,
        session,
        method,
    };
    let answer = match name {
        "session" => session::call(&mut context, operation, arguments),
        "event" => event::call(&mut context, operation, arguments),
        "task" => task::call(&mut context, operation, arguments),
        "VM" => {
            snapshot::call(&mut context, operation, arguments).or_else(|| vm::call(&mut context, operation, arguments))
        }
        "VDI" => vdi::call(&mut context, operation, arguments),
        "host" if operation == "get_server_certificate" => Some(server_certificate(&context, arguments)),
        "VBD" | "VIF" => device::call(&mut context, name, operation, arguments),
        _ => None,
    };
    if let Some(answer) = answer {
        return answer;
    }
    let class = schema::class(name).ok_or_else(unknown)?;
    generic::call(&mut context, class, operation, arguments).unwrap_or_else(|| Err(unknown()))
}

/// The certificate of a host, in PEM.
fn server_certificate(context: &Context<'_>, arguments: &[Value]) -> Answer<Value> {
    let [host] = argument::exactly(context.method, arguments)?;
    let reference = argument::text(host, "self")?;
    context.state.database.get("host", reference)?;
    let number = context.state.hosts.iter().position(|known| known == reference);
    Ok(json!(
        context.pool.identity(number.unwrap_or_default()).certificate_pem()
    ))
}

/// Creates a task for a call, and executes the call unless a fault delays it.
fn begin_async(pool: &Pool, state: &mut State, session: &str, call: MethodCall) -> String {
    let task = new_task(pool, state, &format!("Async.{}", call.method));
    let stuck = pool.faults.take(|fault| match fault {
        Fault::TaskStuck(looks) => Some(*looks),
        _ => None,
    });
    let looks = stuck.unwrap_or(pool.habits().pending_polls);
    let outcome = if stuck.is_some() {
        Outcome::Waiting {
            session: session.to_owned(),
            call,
        }
    } else {
        Outcome::Done(perform(pool, state, session, &call.method, &call.parameters))
    };
    let pending = Pending {
        looks_left: looks,
        looks_total: looks,
        outcome,
    };
    state.pending.insert(task.clone(), pending);
    task
}

/// The text in `task.result` for the value of a call.
pub(crate) fn result_text(value: &Value) -> String {
    match value {
        Value::String(word) if word.is_empty() => String::new(),
        value => xml::write_value(value),
    }
}

/// A generation id in xapi's form: two random numbers.
fn generation_id() -> String {
    let digits = |text: String| -> String { text.chars().filter(char::is_ascii_digit).take(15).collect() };
    format!("{}:{}", digits(new_reference()), digits(new_reference()))
}
