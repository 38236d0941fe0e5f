//! Dispatch of requests to handlers.

mod export_vm;
mod import_objects;
mod import_vm;
mod raw;
mod target;
mod transfer;

use std::io;
use std::time::Duration;

use holdfast_block::Clock;
use serde_json::Value;

use crate::call;
use crate::failure::Answer;
use crate::faults::Fault;
use crate::http::{Connection, Request};
use crate::pool::Pool;
use crate::rpc::{MethodCall, json, xml};

pub(crate) use target::Target;

/// Interval of checks for events of a waiting client.
const EVENT_TICK: Duration = Duration::from_millis(10);

/// Answers the requests of a client until it disconnects.
pub(crate) fn serve(pool: &Pool, host: usize, connection: &mut Connection) {
    while let Ok(Some(request)) = connection.receive() {
        let answered = match (request.method.as_str(), request.path.as_str()) {
            ("POST", "/jsonrpc") => rpc(pool, host, connection, &request, Dialect::Json),
            ("POST", "/" | "/RPC2") => rpc(pool, host, connection, &request, Dialect::Xml),
            ("GET", "/export") => export_vm::export(pool, host, connection, &request),
            ("GET", "/export_metadata") => export_vm::export_metadata(pool, host, connection, &request),
            ("PUT", "/import") => import_vm::import(pool, host, connection, &request),
            ("PUT", "/import_metadata") => import_vm::import_metadata(pool, host, connection, &request),
            ("GET", "/export_raw_vdi") => raw::export(pool, host, connection, &request),
            ("PUT", "/import_raw_vdi") => raw::import(pool, host, connection, &request),
            _ => connection.send_error(404, "The page is not here.").map(|()| Next::End),
        };
        match answered {
            Ok(Next::Request) if request.keeps_alive() => {}
            Ok(_) => {
                connection.say_goodbye();
                return;
            }
            Err(_) => {
                connection.cut();
                return;
            }
        }
    }
}

/// The state of the connection after an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// The client may send another request.
    Request,
    /// The connection is closed, which marks the end of the answer.
    End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dialect {
    Json,
    Xml,
}

fn rpc(pool: &Pool, host: usize, connection: &mut Connection, request: &Request, dialect: Dialect) -> io::Result<Next> {
    let Some(body) = connection.call_body(request)? else {
        connection.send_error(500, "Http_svr.Client_requested_size_over_limit")?;
        return Ok(Next::End);
    };
    let delay = pool.faults.take(|fault| match fault {
        Fault::AnswerDelayed(delay) => Some(*delay),
        _ => None,
    });
    if let Some(delay) = delay {
        pool.clock.sleep(delay);
    }
    let status = pool.faults.take(|fault| match fault {
        Fault::RpcStatus(status) => Some(*status),
        _ => None,
    });
    if let Some(status) = status {
        connection.send_error(status, "")?;
        return Ok(Next::End);
    }
    let read = match dialect {
        Dialect::Json => json::read(&body).map(|(envelope, call)| (Some(envelope), call)),
        Dialect::Xml => std::str::from_utf8(&body)
            .ok()
            .and_then(xml::read_call)
            .map(|call| (None, call)),
    };
    let Some((envelope, call)) = read else {
        connection.send_error(500, "An unexpected error occurred; please wait a while and try again.")?;
        return Ok(Next::End);
    };
    let answer = answer_in_time(pool, host, &call);
    let (text, kind) = match envelope {
        Some(envelope) => (json::write(&envelope, &answer), "application/json"),
        None => (xml::write_answer(&answer), "text/xml"),
    };
    let headers = [
        ("content-type", kind),
        ("connection", if request.keeps_alive() { "keep-alive" } else { "close" }),
        ("Access-Control-Allow-Origin", "*"),
        ("Access-Control-Allow-Headers", "X-Requested-With"),
    ];
    connection.send("200 OK", &headers, text.as_bytes())?;
    Ok(Next::Request)
}

/// Answers a call. `event.from` returns as soon as there are events, and at the latest after its timeout.
fn answer_in_time(pool: &Pool, host: usize, call: &MethodCall) -> Answer<Value> {
    let first = call::answer(pool, host, call);
    let seconds = call.parameters.get(3).and_then(Value::as_f64);
    let (true, Some(seconds)) = (call.method == "event.from", seconds) else {
        return first;
    };
    let deadline = pool.clock.now() + Duration::from_secs_f64(seconds.clamp(0.0, 60.0));
    let mut answer = first;
    loop {
        let is_empty = matches!(&answer, Ok(value) if value["events"].as_array().is_some_and(Vec::is_empty));
        if !is_empty || pool.clock.now() >= deadline || pool.is_stopping() {
            return answer;
        }
        pool.clock.sleep(EVENT_TICK);
        answer = call::answer(pool, host, call);
        // The repeated query counts as one call.
        pool.state().calls.pop();
    }
}
