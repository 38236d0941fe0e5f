//! The login phase (RFC 7143 sections 6.3 and 11.12): a state machine from requests to responses.
//!
//! The security stage authenticates the initiator, the operational stage negotiates parameters. A login that fails is
//! answered with the reason, and ends the connection.

mod chap;
mod parameters;
mod stage;

use std::sync::Arc;

use super::frames::{Frames, SequenceNumbers, StatusNumber};
use super::nexus::InitiatorPort;
use super::pdu::{Digests, FLAG_CONTINUE, FLAG_FINAL, Header, Pdu, request, response};
use super::target::{NAME_BYTES_MAX, PORTAL_GROUP, Target};
use super::text::{self, Pair};
use chap::{ChapFailure, ChapState};
use stage::{Stage, Transition};

pub use chap::{Authentication, ChapSecret, ChapUser};
pub(crate) use chap::{CHALLENGE_BYTES, ChallengeSeed};
pub(crate) use parameters::{FIRST_BURST_BYTES, Parameters, RECEIVE_SEGMENT_BYTES, SessionType, Unsolicited};
use parameters::{KeyAnswer, negotiate};

/// Limit of the text of one request with all its continuations.
const TEXT_BYTES_MAX: usize = 16 << 10;
/// Limit of requests of one login.
const REQUEST_COUNT_MAX: u32 = 64;
/// Length of the data segments of login requests: the default maximum.
pub(crate) const LOGIN_SEGMENT_BYTES: usize = 8192;

/// Status of a failed login: class and detail (RFC 7143 section 11.13.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LoginStatus {
    InitiatorError = 0x0200,
    AuthenticationFailure = 0x0201,
    AuthorizationFailure = 0x0202,
    NotFound = 0x0203,
    UnsupportedVersion = 0x0205,
    TooManyConnections = 0x0206,
    MissingParameter = 0x0207,
    SessionTypeNotSupported = 0x0209,
    SessionDoesNotExist = 0x020a,
    InvalidDuringLogin = 0x020b,
    ServiceUnavailable = 0x0301,
    OutOfResources = 0x0302,
}

/// The data that a login depends on.
pub(crate) struct LoginContext<'a> {
    pub(crate) targets: &'a [Arc<Target>],
    pub(crate) authentication: &'a Authentication,
    /// Whether a session with this handle exists.
    pub(crate) has_session: &'a dyn Fn(u16) -> bool,
    /// A new handle for a session; `None` if the server stops or has too many sessions.
    pub(crate) new_session: &'a dyn Fn() -> Option<u16>,
    pub(crate) seed: ChallengeSeed,
}

/// The result of a login.
#[derive(Debug, Clone)]
pub(crate) struct LoggedIn {
    pub(crate) initiator: InitiatorPort,
    /// The target; `None` in a discovery session.
    pub(crate) target: Option<Arc<Target>>,
    pub(crate) parameters: Parameters,
    pub(crate) session_handle: u16,
    pub(crate) connection_id: u16,
}

/// The consequence of a login request.
#[derive(Debug)]
pub(crate) enum LoginProgress {
    /// Send the output, and wait for the next request.
    Continue,
    /// Send the output; the full feature phase begins.
    Complete(Box<LoggedIn>),
    /// Send the output, and close the connection.
    Failed(&'static str),
}

/// A login in progress.
#[derive(Debug)]
pub(crate) struct Login {
    stage: Stage,
    request_count: u32,
    /// Text of requests that are continued.
    text: Vec<u8>,
    leading: Option<Leading>,
    chap: ChapState,
    is_authenticated: bool,
    /// Keys that were negotiated: each may be negotiated once.
    negotiated: Vec<String>,
    has_declared_length: bool,
    parameters: Parameters,
}

/// The content of the first request.
#[derive(Debug, Clone)]
struct Leading {
    initiator: InitiatorPort,
    session: SessionType,
    target: Option<Arc<Target>>,
    connection_id: u16,
}

/// A failure with its explanation for the log.
#[derive(Debug, Clone, Copy)]
struct LoginFailure {
    status: LoginStatus,
    reason: &'static str,
}

const fn fail<T>(status: LoginStatus, reason: &'static str) -> Result<T, LoginFailure> {
    Err(LoginFailure { status, reason })
}

impl Login {
    pub(crate) fn new() -> Self {
        Self {
            stage: Stage::Start,
            request_count: 0,
            text: Vec::new(),
            leading: None,
            chap: ChapState::Begin,
            is_authenticated: false,
            negotiated: Vec::new(),
            has_declared_length: false,
            parameters: Parameters::default(),
        }
    }

    /// Handles a request, and appends the response to `frames`.
    pub(crate) fn step(
        &mut self,
        pdu: &Pdu<'_>,
        context: &LoginContext<'_>,
        numbers: &mut SequenceNumbers,
        frames: &mut Frames,
    ) -> LoginProgress {
        let header = &pdu.header;
        if header.opcode() != request::LOGIN {
            return LoginProgress::Failed("a request that is no login request came before the login");
        }
        if self.request_count == 0 {
            numbers.expected_command = header.command_number();
        }
        self.request_count += 1;
        let mut output = Header::response(response::LOGIN, 0, header.task_tag());
        output.set(8, &header.field::<6>(8));
        output.set_u16(14, header.u16(14));
        match self.answer(pdu, context, &mut output) {
            Ok(answer) => {
                frames.push(output, StatusNumber::Advance, &answer);
                self.progress(&output)
            }
            Err(LoginFailure { status, reason }) => {
                output.0[1] = 0;
                output.set_u16(36, status as u16);
                frames.push(output, StatusNumber::Advance, &[]);
                LoginProgress::Failed(reason)
            }
        }
    }

    fn progress(&self, output: &Header) -> LoginProgress {
        match (&self.stage, &self.leading) {
            (Stage::FullFeature, Some(leading)) => LoginProgress::Complete(Box::new(LoggedIn {
                initiator: leading.initiator.clone(),
                target: leading.target.clone(),
                parameters: self.parameters,
                session_handle: output.u16(14),
                connection_id: leading.connection_id,
            })),
            _ => LoginProgress::Continue,
        }
    }

    /// Returns the text of the response, and completes its header.
    fn answer(
        &mut self,
        pdu: &Pdu<'_>,
        context: &LoginContext<'_>,
        output: &mut Header,
    ) -> Result<Vec<u8>, LoginFailure> {
        let header = &pdu.header;
        let [_, _, _, version_min, ..] = header.0;
        if version_min != 0 {
            return fail(
                LoginStatus::UnsupportedVersion,
                "the initiator needs a newer version of iSCSI",
            );
        }
        if self.request_count > REQUEST_COUNT_MAX {
            return fail(LoginStatus::InitiatorError, "the login has too many requests");
        }
        let transition = Transition::of(header.flags(), self.stage);
        let transition = transition.ok_or(LoginFailure {
            status: LoginStatus::InvalidDuringLogin,
            reason: "a login request with an invalid transition between stages",
        })?;
        output.0[1] = transition.current.bits() << 2;
        if self.text.len() + pdu.data.len() > TEXT_BYTES_MAX {
            return fail(LoginStatus::OutOfResources, "the text of a login request is too long");
        }
        self.text.extend(pdu.data);
        if header.flags() & FLAG_CONTINUE != 0 {
            return match transition.next {
                None => Ok(Vec::new()),
                Some(_) => fail(LoginStatus::InitiatorError, "a continued login request that is final"),
            };
        }
        let text = std::mem::take(&mut self.text);
        let Some(pairs) = text::parse(&text) else {
            return fail(LoginStatus::InitiatorError, "a login request whose text is invalid");
        };
        let mut answer = Vec::new();
        if self.leading.is_none() {
            self.leading = Some(lead(header, &pairs, context)?);
            if self.leading.as_ref().is_some_and(|leading| leading.target.is_some()) {
                text::push(&mut answer, "TargetPortalGroupTag", &PORTAL_GROUP.to_string());
            }
        }
        self.stage = transition.current;
        match self.stage {
            Stage::Security => self.security(&pairs, context, &mut answer)?,
            _ => self.operational(&pairs, context, &mut answer)?,
        }
        if answer.len() > LOGIN_SEGMENT_BYTES {
            return fail(LoginStatus::OutOfResources, "the answer to a login request is too long");
        }
        self.transit(transition, context, output)?;
        Ok(answer)
    }

    /// Enters the next stage, if the initiator wants to and may.
    fn transit(
        &mut self,
        transition: Transition,
        context: &LoginContext<'_>,
        output: &mut Header,
    ) -> Result<(), LoginFailure> {
        let Some(next) = transition.next else { return Ok(()) };
        if !self.is_authenticated && matches!(context.authentication, Authentication::Chap { .. }) {
            // The next stage has to wait for the authentication.
            return if self.negotiated.iter().any(|key| key == "AuthMethod") {
                Ok(())
            } else {
                fail(LoginStatus::AuthenticationFailure, "the initiator did not authenticate")
            };
        }
        output.0[1] |= FLAG_FINAL | next.bits();
        self.stage = next;
        if next == Stage::FullFeature {
            let handle = (context.new_session)().ok_or(LoginFailure {
                status: LoginStatus::ServiceUnavailable,
                reason: "the server stops, or has too many sessions",
            })?;
            output.set_u16(14, handle);
        }
        Ok(())
    }

    fn security(
        &mut self,
        pairs: &[Pair<'_>],
        context: &LoginContext<'_>,
        answer: &mut Vec<u8>,
    ) -> Result<(), LoginFailure> {
        if let Some(offers) = pairs.iter().find(|pair| pair.key == "AuthMethod") {
            let wanted = match context.authentication {
                Authentication::None => "None",
                Authentication::Chap { .. } => "CHAP",
            };
            if self.is_authenticated || self.negotiated.iter().any(|key| key == "AuthMethod") {
                return fail(
                    LoginStatus::InitiatorError,
                    "the authentication method was negotiated twice",
                );
            }
            if !offers.value.split(',').any(|offer| offer == wanted) {
                return fail(
                    LoginStatus::AuthenticationFailure,
                    "the initiator does not offer the required authentication method",
                );
            }
            self.negotiated.push("AuthMethod".to_owned());
            text::push(answer, "AuthMethod", wanted);
        }
        let is_chap = pairs.iter().any(|pair| pair.key.starts_with("CHAP_"));
        if is_chap {
            self.authenticate(pairs, context, answer)?;
        }
        // Operational keys may come in this stage, too.
        let is_other = |pair: &&Pair<'_>| pair.key != "AuthMethod" && !pair.key.starts_with("CHAP_");
        for pair in pairs.iter().filter(is_other) {
            self.key(*pair, answer)?;
        }
        Ok(())
    }

    fn authenticate(
        &mut self,
        pairs: &[Pair<'_>],
        context: &LoginContext<'_>,
        answer: &mut Vec<u8>,
    ) -> Result<(), LoginFailure> {
        let Authentication::Chap { users, target } = context.authentication else {
            return fail(LoginStatus::InitiatorError, "CHAP was not agreed on");
        };
        if !self.negotiated.iter().any(|key| key == "AuthMethod") {
            return fail(LoginStatus::InitiatorError, "CHAP was not agreed on");
        }
        match self.chap.step(pairs, users, target.as_ref(), context.seed, answer) {
            Ok(user) => {
                self.is_authenticated |= user.is_some();
                Ok(())
            }
            Err(ChapFailure::Refused) => fail(LoginStatus::AuthenticationFailure, "the initiator has a wrong secret"),
            Err(ChapFailure::Malformed) => fail(LoginStatus::AuthenticationFailure, "the authentication is invalid"),
        }
    }

    fn operational(
        &mut self,
        pairs: &[Pair<'_>],
        context: &LoginContext<'_>,
        answer: &mut Vec<u8>,
    ) -> Result<(), LoginFailure> {
        if !self.is_authenticated && matches!(context.authentication, Authentication::Chap { .. }) {
            return fail(LoginStatus::AuthenticationFailure, "the initiator did not authenticate");
        }
        for pair in pairs {
            self.key(*pair, answer)?;
        }
        if !self.has_declared_length {
            self.has_declared_length = true;
            text::push(answer, "MaxRecvDataSegmentLength", &RECEIVE_SEGMENT_BYTES.to_string());
        }
        Ok(())
    }

    /// Answers one key.
    fn key(&mut self, pair: Pair<'_>, answer: &mut Vec<u8>) -> Result<(), LoginFailure> {
        if ["InitiatorName", "SessionType", "TargetName"].contains(&pair.key) {
            return Ok(());
        }
        if self.negotiated.iter().any(|key| key == pair.key) {
            return fail(LoginStatus::InitiatorError, "a key was negotiated twice");
        }
        self.negotiated.push(pair.key.to_owned());
        let session = self
            .leading
            .as_ref()
            .map_or(SessionType::Normal, |leading| leading.session);
        match negotiate(pair, session, &mut self.parameters) {
            KeyAnswer::Silence => Ok(()),
            KeyAnswer::Value(value) => {
                text::push(answer, pair.key, &value);
                Ok(())
            }
            KeyAnswer::Unacceptable => fail(LoginStatus::InitiatorError, "no offered digest is known"),
        }
    }
}

/// Handles the keys that only the first request has.
fn lead(header: &Header, pairs: &[Pair<'_>], context: &LoginContext<'_>) -> Result<Leading, LoginFailure> {
    let value = |key: &str| pairs.iter().find(|pair| pair.key == key).map(|pair| pair.value);
    let handle = header.u16(14);
    if handle != 0 {
        return if (context.has_session)(handle) {
            fail(LoginStatus::TooManyConnections, "the session has a connection already")
        } else {
            fail(LoginStatus::SessionDoesNotExist, "the session does not exist")
        };
    }
    let Some(initiator) = value("InitiatorName").filter(|name| (1..=NAME_BYTES_MAX).contains(&name.len())) else {
        return fail(LoginStatus::MissingParameter, "the initiator has no name");
    };
    let session = match value("SessionType") {
        None | Some("Normal") => SessionType::Normal,
        Some("Discovery") => SessionType::Discovery,
        Some(_) => return fail(LoginStatus::SessionTypeNotSupported, "the session type is unknown"),
    };
    let target = match (session, value("TargetName")) {
        (SessionType::Discovery, _) => None,
        (SessionType::Normal, None) => {
            return fail(LoginStatus::MissingParameter, "the initiator names no target");
        }
        (SessionType::Normal, Some(name)) => {
            let found = context
                .targets
                .iter()
                .find(|target| target.name().eq_ignore_ascii_case(name));
            let Some(target) = found else {
                return fail(LoginStatus::NotFound, "the target does not exist");
            };
            if !target.admits(initiator) {
                return fail(
                    LoginStatus::AuthorizationFailure,
                    "the initiator may not use the target",
                );
            }
            Some(Arc::clone(target))
        }
    };
    Ok(Leading {
        initiator: InitiatorPort {
            name: initiator.to_owned(),
            session_id: header.field(8),
        },
        session,
        target,
        connection_id: header.u16(20),
    })
}

/// The digests of login PDUs: none, whatever is negotiated for later.
pub(crate) const LOGIN_DIGESTS: Digests = Digests {
    header: super::pdu::Digest::None,
    data: super::pdu::Digest::None,
};
