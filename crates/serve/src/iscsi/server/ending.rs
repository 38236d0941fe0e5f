//! Ends the session of an initiator whose target is removed.

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::frames::{Frames, StatusNumber};
use super::super::pdu::{Digests, FLAG_FINAL, Header, NO_TAG, response};
use super::super::session::{Exchange, Queued};
use crate::registry::ClientSession;
use crate::server::outbox::Outbox;
use crate::stream::SocketStream;

/// "Target requests Logout" (RFC 7143 section 11.9.1).
const REQUEST_LOGOUT: u8 = 1;
/// The time that an initiator has to log out, in seconds.
const LOGOUT_S: u32 = 3;

/// Asks an initiator to log out, or closes its connection.
pub(super) struct SessionEnding {
    pub(super) exchange: Arc<Exchange>,
    pub(super) outbox: Arc<Outbox<Frames>>,
    pub(super) stream: Arc<SocketStream>,
    pub(super) digests: Digests,
    pub(super) is_asked: AtomicBool,
}

impl ClientSession for SessionEnding {
    fn ask_to_end(&self) {
        // Each unit of the target asks; the initiator learns of it once.
        if self.is_asked.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut header = Header::response(response::ASYNCHRONOUS_MESSAGE, FLAG_FINAL, NO_TAG);
        header.0[36] = REQUEST_LOGOUT;
        header.set_u32(40, LOGOUT_S);
        let mut frames = Frames::new(self.digests);
        frames.push(header, StatusNumber::Advance, &[]);
        self.exchange.respond(frames, &mut |queued| {
            let (Queued::OfTask(frames) | Queued::Own(frames)) = queued;
            self.outbox.push_own(frames, None);
        });
        self.outbox.send_ready();
    }

    fn cut(&self) {
        self.stream.shut_down(Shutdown::Both);
    }
}
