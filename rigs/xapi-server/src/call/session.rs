//! `session.*`: login and logout.

use serde_json::{Value, json};

use super::Context;
use super::argument::{exactly, mismatch, text};
use crate::failure::{Answer, Failure};
use crate::pool::{PASSWORD, Pool, State, USER};

/// Whether `method` can be called without a session.
pub(super) fn needs_none(method: &str) -> bool {
    method == "session.login_with_password"
}

/// Opens a session.
pub(super) fn open(pool: &Pool, state: &mut State, method: &str, arguments: &[Value]) -> Answer<Value> {
    let words: Vec<&str> = arguments.iter().filter_map(Value::as_str).collect();
    // Version and originator are optional: old clients omit them.
    let ([user, password] | [user, password, _] | [user, password, _, _]) = words[..] else {
        return Err(mismatch(method, 4, arguments.len()));
    };
    if (user, password) != (USER, PASSWORD) {
        let reason = "Authentication failure";
        return Err(Failure::new("SESSION_AUTHENTICATION_FAILED", &[user, reason]));
    }
    let session = state.database.add(
        "session",
        json!({
            "this_host": state.hosts[state.master], "auth_user_name": user, "last_active": pool.date(),
            "originator": words.get(3).copied().unwrap_or_default(),
        }),
    );
    Ok(json!(session))
}

pub(super) fn call(context: &mut Context<'_>, operation: &str, arguments: &[Value]) -> Option<Answer<Value>> {
    match operation {
        "logout" => Some(logout(context, arguments)),
        "get_this_host" => Some(this_host(context, arguments)),
        _ => None,
    }
}

fn logout(context: &mut Context<'_>, arguments: &[Value]) -> Answer<Value> {
    let [] = exactly(context.method, arguments)?;
    context.state.database.remove("session", context.session)?;
    Ok(json!(""))
}

fn this_host(context: &Context<'_>, arguments: &[Value]) -> Answer<Value> {
    let [session] = exactly(context.method, arguments)?;
    let record = context.state.database.get("session", text(session, "self")?)?;
    Ok(record.get("this_host").cloned().unwrap_or_default())
}
