//! Runs the login of a connection within its time limit.

use std::cell::Cell;
use std::time::Duration;

use super::super::frames::{Frames, SequenceNumbers};
use super::super::login::{
    CHALLENGE_BYTES, ChallengeSeed, LOGIN_DIGESTS, LOGIN_SEGMENT_BYTES, LoggedIn, Login, LoginContext, LoginProgress,
};
use super::super::pdu::{Parsed, parse};
use super::COMMAND_WINDOW;
use super::event::InitiatorGone;
use super::shared::TargetShared;
use crate::server::receive::{Receiver, Waiting};
use crate::stream::SocketStream;

/// The longest login request: header, additional headers and data.
const REQUEST_BYTES_MAX: usize = LOGIN_SEGMENT_BYTES + 2048;

pub(super) fn log_in(
    shared: &TargetShared,
    stream: &SocketStream,
    receiver: &mut Receiver,
) -> Result<(LoggedIn, SequenceNumbers), InitiatorGone> {
    let deadline = shared.core.clock.now() + shared.core.limits().handshake;
    let mut random = [0; CHALLENGE_BYTES + 1];
    shared.randomness.fill(&mut random).map_err(InitiatorGone::Io)?;
    let (challenge, identifier) = random.split_first_chunk().unwrap_or((&[0; CHALLENGE_BYTES], &[]));
    let has_session = |handle| shared.sessions.contains(handle);
    let reserved = Cell::new(None);
    let new_session = || {
        if !shared.core.is_stopping() {
            reserved.set(shared.sessions.reserve());
        }
        reserved.get()
    };
    let context = LoginContext {
        targets: &shared.targets.list(),
        authentication: &shared.authentication,
        has_session: &has_session,
        new_session: &new_session,
        seed: ChallengeSeed {
            identifier: identifier.first().copied().unwrap_or(0),
            challenge: *challenge,
        },
    };
    let done = negotiate_login(stream, receiver, &context, deadline);
    // A response that cannot be sent must not keep its handle.
    if let (Err(_), Some(handle)) = (&done, reserved.get()) {
        shared.sessions.remove(handle);
    }
    done
}

/// Answers login requests until the login has succeeded or failed.
fn negotiate_login(
    stream: &SocketStream,
    receiver: &mut Receiver,
    context: &LoginContext<'_>,
    deadline: Duration,
) -> Result<(LoggedIn, SequenceNumbers), InitiatorGone> {
    let mut numbers = SequenceNumbers {
        status: 1,
        expected_command: 0,
        command_count: 0,
        window: COMMAND_WINDOW,
    };
    let mut login = Login::new();
    loop {
        let (progress, length) = match parse(receiver.bytes(), LOGIN_DIGESTS, LOGIN_SEGMENT_BYTES) {
            Parsed::Incomplete => {
                receiver.fill(REQUEST_BYTES_MAX, Waiting::Until(deadline))?;
                continue;
            }
            Parsed::Malformed(reason) => return Err(InitiatorGone::Malformed(reason)),
            Parsed::Pdu(pdu, length) => {
                let mut frames = Frames::new(LOGIN_DIGESTS);
                let progress = login.step(&pdu, context, &mut numbers, &mut frames);
                frames.stamp(&mut numbers);
                stream.send_all(frames.as_ref()).map_err(InitiatorGone::Io)?;
                (progress, length)
            }
        };
        receiver.consume(length);
        match progress {
            LoginProgress::Continue => {}
            LoginProgress::Complete(logged_in) => return Ok((*logged_in, numbers)),
            LoginProgress::Failed(reason) => return Err(InitiatorGone::LoginFailed(reason)),
        }
    }
}
