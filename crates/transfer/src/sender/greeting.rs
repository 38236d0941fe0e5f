//! From a new connection to the first data, and what follows the end of a connection.

use std::time::Duration;

use super::link::SenderLink;
use super::{
    FreezeLimit, HandoverNote, Outcome, Phase, RoundProgress, Sender, SenderAction, SenderWarning, Stage, TrackerState,
};
use crate::wire::{
    Accept, Capabilities, ErrorCode, Frame, Hello, Message, Offer, Ownership, PeerError, VersionRange, window_bytes_of,
};

/// Number of errors of the receiver after which the copy ends.
const RETRY_COUNT_MAX: u32 = 8;
/// Number of largest frames that must fit into the window.
const WINDOW_FRAME_COUNT_MIN: u64 = 4;

impl Sender {
    pub(super) fn connected(&mut self, connection: u64, now: Duration) {
        if self.phase != Phase::Disconnected {
            return;
        }
        let options = &self.options;
        let hello = SenderLink::hello(options.session, connection, options.capabilities, &options.program);
        let mut link = SenderLink::new(hello, now);
        let frame = link.greeting();
        self.link = Some(link);
        self.phase = Phase::Greeting;
        self.act(SenderAction::Send(frame));
    }

    /// The connection ended. Without a COMMIT under way, the guest runs on; the next connection continues.
    pub(super) fn disconnected(&mut self) {
        if self.link.take().is_none() {
            if self.phase == Phase::Disconnected {
                self.act(SenderAction::Connect);
            }
            return;
        }
        self.copy.disconnect();
        self.stage = Stage::Rounds;
        self.freeze.limit = FreezeLimit::Kept;
        self.phase = Phase::Disconnected;
        if self.can_thaw() {
            self.thaw();
        }
        self.act(SenderAction::Connect);
    }

    /// Ends the connection from this side.
    pub(super) fn drop_link(&mut self) {
        self.act(SenderAction::Disconnect);
        self.disconnected();
    }

    pub(super) fn received(&mut self, frame: Frame, now: Duration) {
        let Some(link) = &mut self.link else { return };
        if !link.count(&frame, now) {
            return self.drop_link();
        }
        self.message_received(frame.message, now);
    }

    fn message_received(&mut self, message: Message, now: Duration) {
        let Some(link) = &mut self.link else { return };
        match (message, self.phase) {
            (Message::Hello(hello), Phase::Greeting) => self.greeted(&hello, now),
            (Message::OwnerAnswer(owner), Phase::AskingOwner) => self.owner_answered(owner),
            (Message::Accept(accept), Phase::Offering) => self.accepted(&accept, now),
            (Message::Want(verdict), Phase::Comparing) => self.compared(verdict),
            (Message::Synced { number, took }, _) => self.synced(number, took),
            (Message::FreezeOk, Phase::Intending) => self.intent_accepted(now),
            (Message::Sealed { number }, _) => self.sealed(number, now),
            (Message::Committed { seal }, Phase::Committing) => self.committed(seal, now),
            (Message::Credit { bytes }, _) => {
                if let Some(took) = link.credited(bytes, now) {
                    self.traffic.add_applied(bytes, took);
                }
            }
            (Message::Times(times), _) => self.freeze.report.receiver = times,
            (Message::Pong { number }, _) => link.pong(number, now),
            (Message::Ping { number }, _) => self.send(Message::Pong { number }),
            (Message::Error(error), _) => self.refused(error),
            (Message::Skipped { .. }, _) => {}
            _ if self.can_thaw() => self.fail(Outcome::Protocol("a message that was not expected")),
            _ => self.drop_link(),
        }
    }

    fn greeted(&mut self, hello: &Hello, now: Duration) {
        let Some(link) = &mut self.link else { return };
        if !link.is_answered_by(hello) || VersionRange::KNOWN.common(hello.versions).is_none() {
            let error = PeerError {
                code: ErrorCode::Version,
                text: "the peer answers for another session or version".to_owned(),
            };
            return self.refused(error);
        }
        link.greeted(hello.capabilities, now);
        if let Some(HandoverNote { receiver, .. }) = self.doubt {
            self.phase = Phase::AskingOwner;
            self.send(Message::OwnerQuery { receiver });
        } else {
            self.prepare();
        }
    }

    /// Starts the tracker before anything is read, and offers the disk.
    fn prepare(&mut self) {
        match self.tracker {
            TrackerState::Started => self.offer(),
            TrackerState::Starting => self.phase = Phase::StartingTracker,
            TrackerState::Stopped => {
                self.tracker = TrackerState::Starting;
                self.phase = Phase::StartingTracker;
                self.act(SenderAction::StartTracker);
            }
        }
    }

    pub(super) fn tracker_started(&mut self) {
        self.tracker = TrackerState::Started;
        if self.phase == Phase::StartingTracker {
            self.offer();
        }
    }

    fn offer(&mut self) {
        self.phase = Phase::Offering;
        self.send(Message::Offer(Offer {
            disk: self.options.disk,
            layout: self.options.layout,
            granularity_bytes: self.options.granularity_bytes,
            stream_count: self.options.stream_count,
        }));
    }

    fn owner_answered(&mut self, owner: Ownership) {
        match owner {
            Ownership::Receiver => self.finish(),
            Ownership::Sender => {
                self.doubt = None;
                self.thaw();
                self.prepare();
            }
        }
    }

    /// The receiver owns the disk.
    pub(super) fn finish(&mut self) {
        self.phase = Phase::Done;
        self.doubt = None;
        let report = self.freeze.report;
        self.act(SenderAction::Finished(Outcome::Completed(report)));
        // The receiver may forget the copy only when the caller does not ask any more, also after a restart.
        let reason = "the receiver owns the disk".to_owned();
        self.send(Message::End { reason });
        self.link = None;
        self.act(SenderAction::Disconnect);
    }

    fn accepted(&mut self, accept: &Accept, now: Duration) {
        let layout = self.options.layout;
        let frame_bytes_max = window_bytes_of(u64::from(layout.unit_bytes()));
        if accept.window_bytes / WINDOW_FRAME_COUNT_MIN < frame_bytes_max || accept.held.check(layout).is_err() {
            return self.fail(Outcome::Protocol("ACCEPT has a window or a map of the wrong size"));
        }
        if accept.stream_count > self.options.stream_count {
            return self.fail(Outcome::Protocol("ACCEPT has more streams than were offered"));
        }
        let Some(link) = &mut self.link else { return };
        link.set_streams(accept.stream_count);
        link.credit_bytes = accept.window_bytes;
        link.window_bytes = accept.window_bytes;
        let capabilities = link.capabilities;
        if !capabilities.has(Capabilities::SYNC) {
            self.act(SenderAction::Warn(SenderWarning::SyncWhileFrozen));
        }
        if !capabilities.has(Capabilities::HASHES) {
            self.act(SenderAction::Warn(SenderWarning::NoHashes));
        }
        self.copy.resume(accept, capabilities);
        self.phase = Phase::Comparing;
        // What was sent on another connection says nothing about this one.
        self.round = RoundProgress {
            number: self.round.number,
            since: now,
            ..RoundProgress::default()
        };
    }

    /// The receiver ended the connection with an error.
    fn refused(&mut self, error: PeerError) {
        if self.doubt.is_some() {
            // The error says nothing about the owner.
            self.act(SenderAction::Warn(SenderWarning::StillInDoubt(error)));
            return self.drop_link();
        }
        self.retry_count += 1;
        if !error.code.is_retriable() || self.retry_count > RETRY_COUNT_MAX {
            return self.fail(Outcome::Refused(error));
        }
        self.copy.distrust();
        self.act(SenderAction::Warn(SenderWarning::Retried(error)));
        self.drop_link();
    }
}
