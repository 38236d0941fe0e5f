//! A pool: sessions, and requests to its master.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast_block::Clock;
use serde_json::{Value, json};

use super::address::host_and_port;
use super::http::Connection;
use super::record::{Reference, XapiRecord};
use super::retry::RetryContext;
use super::trust::{Fingerprint, Trust};
use super::{XapiError, XapiResult, XenAddress};

/// Limit on the bytes of an answer: all records of a pool of hundreds of machines.
const ANSWER_BYTES_MAX: u64 = 256 << 20;
/// How long a host may be silent during a call.
const CALL_IDLE_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a host may be silent during cleanup, which delays a requested stop.
const CLEANUP_IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// The originator of Holdfast's sessions in the logs of the pool.
const ORIGINATOR: &str = "holdfast";

/// The address and user of a pool, the password and the trusted certificates.
#[derive(Clone)]
pub struct Login {
    /// The address, with the user.
    pub address: XenAddress,
    /// The password.
    pub password: String,
    /// The trusted certificates of the hosts.
    pub trust: Trust,
}

/// Connects to a host and checks its certificate, without a login: the password is requested only if the host is
/// trusted. `is_stopped` returns whether a stop was requested.
///
/// # Errors
/// The host cannot be reached, or is not trusted.
pub fn check_trust(
    address: &XenAddress,
    trust: &Trust,
    clock: Arc<dyn Clock>,
    is_stopped: Arc<dyn Fn() -> bool + Send + Sync>,
) -> XapiResult<()> {
    let retry_context = RetryContext {
        clock,
        is_stopped,
        idle_timeout: CALL_IDLE_TIMEOUT,
        is_known: Arc::default(),
    };
    Connection::open(&address.host, address.port, &trust.tls()?, &retry_context).map(drop)
}

/// A pool with an open session. Dropping the pool logs out.
pub struct Pool {
    login: Login,
    state: Mutex<PoolSession>,
    pub(super) retry_context: RetryContext,
}

struct PoolSession {
    /// The last known master.
    host: (String, u16),
    session: Option<String>,
    /// Certificates of the other hosts of the pool, from the master.
    others: Vec<Fingerprint>,
    /// Whether a request has timed out. If so, later cleanup does not wait again.
    has_timed_out_before: bool,
}

impl Pool {
    /// Logs in. `is_stopped` returns whether a stop was requested.
    pub fn log_in(
        login: Login,
        clock: Arc<dyn Clock>,
        is_stopped: Arc<dyn Fn() -> bool + Send + Sync>,
    ) -> XapiResult<Self> {
        let retry_context = RetryContext {
            clock,
            is_stopped,
            idle_timeout: CALL_IDLE_TIMEOUT,
            is_known: Arc::default(),
        };
        Self::log_in_with(login, retry_context)
    }

    fn log_in_with(login: Login, retry_context: RetryContext) -> XapiResult<Self> {
        let pool = Self::new(login, retry_context);
        pool.session()?;
        Ok(pool)
    }

    fn new(login: Login, retry_context: RetryContext) -> Self {
        Self {
            state: Mutex::new(PoolSession {
                host: (login.address.host.clone(), login.address.port),
                session: None,
                others: Vec::new(),
                has_timed_out_before: false,
            }),
            login,
            retry_context,
        }
    }

    /// Opens another session for cleanup, which a stop does not interrupt. It has a shorter timeout, and waits only
    /// once for a silent pool.
    #[must_use]
    pub fn for_cleanup(&self) -> Self {
        let retry_context = RetryContext {
            clock: Arc::clone(&self.retry_context.clock),
            is_stopped: Arc::new(|| false),
            idle_timeout: CLEANUP_IDLE_TIMEOUT,
            is_known: Arc::clone(&self.retry_context.is_known),
        };
        let mut login = self.login.clone();
        (login.address.host, login.address.port) = self.host();
        Self::new(login, retry_context)
    }

    /// Returns whether a stop was requested.
    pub fn is_stopped(&self) -> Arc<dyn Fn() -> bool + Send + Sync> {
        Arc::clone(&self.retry_context.is_stopped)
    }

    /// The address, for users.
    pub fn title(&self) -> String {
        self.login.address.pool()
    }

    fn lock(&self) -> MutexGuard<'_, PoolSession> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Host name and port of the master.
    pub(super) fn host(&self) -> (String, u16) {
        self.lock().host.clone()
    }

    /// The trusted certificates, including those of hosts that the master has confirmed.
    pub(super) fn trust(&self) -> Trust {
        self.login.trust.and(self.lock().others.iter().copied())
    }

    /// The session. Logs in if there is none.
    pub(super) fn session(&self) -> XapiResult<String> {
        if let Some(session) = &self.lock().session {
            return Ok(session.clone());
        }
        let address = &self.login.address;
        let words = json!([address.user(), self.login.password, "2.0", ORIGINATOR]);
        let answer = match self.ask("session.login_with_password", &words) {
            Err(XapiError::Refused { code, details, .. }) if code == "HOST_IS_SLAVE" => {
                let Some(master) = details.into_iter().next() else {
                    return Err(self.invalid_answer("session.login_with_password", "it does not name the master"));
                };
                self.lock().host.0 = master;
                self.ask("session.login_with_password", &words)
            }
            other => other,
        };
        let session = answer.map_err(|error| match error {
            XapiError::Refused { code, details, .. } if code == "SESSION_AUTHENTICATION_FAILED" => XapiError::Login {
                host: self.shown(),
                user: address.user().to_owned(),
                detail: details.into_iter().nth(1).unwrap_or(code),
            },
            other => other,
        })?;
        let Some(session) = session.as_str().filter(|session| !session.is_empty()) else {
            return Err(self.invalid_answer("session.login_with_password", "not a session"));
        };
        self.retry_context.is_known.store(true, Ordering::Relaxed);
        self.lock().session = Some(session.to_owned());
        Ok(session.to_owned())
    }

    /// Discards an expired session: the next request logs in again.
    pub(super) fn discard_session(&self, session: &str) {
        let mut state = self.lock();
        if state.session.as_deref() == Some(session) {
            state.session = None;
        }
    }

    /// Calls a method of the master. An expired session is renewed once.
    pub fn call(&self, method: &str, arguments: &[Value]) -> XapiResult<Value> {
        let mut is_second = false;
        loop {
            // The arguments are not logged: the first one is the session.
            log::debug!("asks the pool: {method}");
            let session = self.session()?;
            let words: Vec<Value> = [json!(session)].into_iter().chain(arguments.iter().cloned()).collect();
            match self.ask(method, &Value::Array(words)) {
                Err(error) if error.is_refusal("SESSION_INVALID") && !is_second => {
                    self.discard_session(&session);
                    is_second = true;
                }
                // The pool has another master now.
                Err(XapiError::Refused { code, details, .. })
                    if code == "HOST_IS_SLAVE" && !is_second && !details.is_empty() =>
                {
                    self.discard_session(&session);
                    self.lock().host.0 = details.into_iter().next().unwrap_or_default();
                    is_second = true;
                }
                other => return other,
            }
        }
    }

    /// Calls a method that returns a reference.
    pub fn call_for_reference(&self, method: &str, arguments: &[Value]) -> XapiResult<Reference> {
        let answer = self.call(method, arguments)?;
        let text = answer.as_str();
        text.map(|text| Reference(text.to_owned()))
            .ok_or_else(|| self.invalid_answer(method, "not a reference"))
    }

    /// The record of an object.
    pub fn record(&self, class: &'static str, reference: &Reference) -> XapiResult<XapiRecord> {
        let value = self.call(&format!("{class}.get_record"), &[json!(reference.0)])?;
        Ok(XapiRecord::new(class, reference.clone(), value))
    }

    /// The records of all objects of a class.
    pub fn records(&self, class: &'static str) -> XapiResult<Vec<XapiRecord>> {
        self.records_of(class, "get_all_records", &[])
    }

    /// The records of the objects with this name or UUID.
    ///
    /// Each query is a separate request: a name in the pool's filter expressions cannot contain a quote
    /// (`db_filter_lex.mll`).
    pub fn records_named(&self, class: &'static str, name: &str) -> XapiResult<Vec<XapiRecord>> {
        let method = format!("{class}.get_by_name_label");
        let answer = self.call(&method, &[json!(name)])?;
        let Value::Array(list) = answer else {
            return Err(self.invalid_answer(&method, "not a list"));
        };
        let mut found: Vec<Reference> = list
            .iter()
            .filter_map(Value::as_str)
            .map(|text| Reference(text.to_owned()))
            .collect();
        match self.call_for_reference(&format!("{class}.get_by_uuid"), &[json!(name)]) {
            Ok(reference) if !found.contains(&reference) => found.push(reference),
            Ok(_) => {}
            Err(error) if error.is_refusal("UUID_INVALID") || error.is_refusal("HANDLE_INVALID") => {}
            Err(error) => return Err(error),
        }
        let mut records = Vec::new();
        for reference in found {
            match self.record(class, &reference) {
                // The object was removed in the meantime.
                Err(error) if error.is_refusal("HANDLE_INVALID") => {}
                other => records.push(other?),
            }
        }
        Ok(records)
    }

    fn records_of(&self, class: &'static str, call_name: &str, arguments: &[Value]) -> XapiResult<Vec<XapiRecord>> {
        let method = format!("{class}.{call_name}");
        match self.call(&method, arguments)? {
            Value::Object(records) => Ok(records
                .into_iter()
                .map(|(reference, value)| XapiRecord::new(class, Reference(reference), value))
                .collect()),
            _ => Err(self.invalid_answer(&method, "not a map of records")),
        }
    }

    /// Asks the master for the certificates of its hosts, which are then trusted like its own.
    pub(super) fn fetch_certificates(&self) -> XapiResult<()> {
        let mut others = Vec::new();
        for host in self.records("host")? {
            let certificate = self.call("host.get_server_certificate", &[json!(host.reference.0)]);
            // A host that is offline cannot present a certificate.
            let pem = certificate.ok().and_then(|pem| pem.as_str().map(str::to_owned));
            others.extend(pem.as_deref().and_then(Fingerprint::of_pem));
        }
        self.lock().others = others;
        Ok(())
    }

    fn shown(&self) -> String {
        let (host, port) = self.host();
        host_and_port(&host, port)
    }

    pub(super) fn invalid_answer(&self, request: &str, detail: &str) -> XapiError {
        XapiError::Answer {
            host: self.shown(),
            request: request.to_owned(),
            detail: detail.to_owned(),
        }
    }

    /// Sends one request to the master. A request that changes nothing is repeated if the connection is lost.
    fn ask(&self, method: &str, words: &Value) -> XapiResult<Value> {
        if self.lock().has_timed_out_before {
            return Err(XapiError::Broken {
                action: "send a request to",
                host: self.shown(),
                source: std::io::ErrorKind::TimedOut.into(),
            });
        }
        let answer = if changes_nothing(method) {
            self.retry_context.retry(|| self.ask_once(method, words))
        } else if is_optional(method) {
            self.ask_once(method, words)
        } else {
            self.retry_context.retry_if_not_sent(|| self.ask_once(method, words))
        };
        if let Err(error) = &answer
            && (error.has_timed_out() || error.is_connection_refused())
            && self.retry_context.idle_timeout == CLEANUP_IDLE_TIMEOUT
        {
            self.lock().has_timed_out_before = true;
        }
        answer
    }

    fn ask_once(&self, method: &str, words: &Value) -> XapiResult<Value> {
        let (host, port) = self.host();
        let mut connection = Connection::open(&host, port, &self.trust().tls()?, &self.retry_context)?;
        let content = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": words}).to_string();
        let headers = [
            "Content-Type: application/json".to_owned(),
            format!("Content-Length: {}", content.len()),
        ];
        connection.ask("POST", "/jsonrpc", &headers)?;
        connection.send(content.as_bytes())?;
        let head = connection.head(method)?;
        if head.status != 200 {
            return Err(XapiError::Status {
                host: self.shown(),
                request: method.to_owned(),
                status: head.status,
                reason: head.reason,
            });
        }
        let text = connection.body(&head, method)?.text(method, ANSWER_BYTES_MAX)?;
        let answer: Value =
            serde_json::from_str(&text).map_err(|error| self.invalid_answer(method, &error.to_string()))?;
        if let Some(error) = answer.get("error").filter(|error| !error.is_null()) {
            return Err(refusal(method, error));
        }
        match answer {
            Value::Object(mut members) => members
                .remove("result")
                .ok_or_else(|| self.invalid_answer(method, "it has no result")),
            _ => Err(self.invalid_answer(method, "not a JSON-RPC answer")),
        }
    }
}

/// Whether a request can be repeated without harm. A login whose answer was lost leaves a session, which expires by
/// itself.
fn changes_nothing(method: &str) -> bool {
    let (_, verb) = method.split_once('.').unwrap_or_default();
    verb.starts_with("get_") || ["login_with_password", "list_changed_blocks"].contains(&verb)
}

/// Whether a request may be omitted. Tasks and sessions expire by themselves, so these requests do not wait for an
/// unreachable pool.
fn is_optional(method: &str) -> bool {
    ["task.cancel", "task.destroy", "session.logout"].contains(&method)
}

/// Converts a JSON-RPC error to an error of a pool.
pub(super) fn refusal(request: &str, error: &Value) -> XapiError {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    XapiError::Refused {
        request: request.to_owned(),
        code: error.get("message").map(text).unwrap_or_default(),
        details: error
            .get("data")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .map(text)
            .collect(),
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let session = self.lock().session.take();
        if let Some(session) = session {
            // Sessions expire by themselves, too.
            drop(self.ask("session.logout", &json!([session])));
        }
    }
}
