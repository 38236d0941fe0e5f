//! The sender's end of one connection.

use std::time::Duration;

use crate::wire::{Barrier, Capabilities, Frame, Hello, Message, RangeFrame, SessionId, VersionRange};

/// How often the sender asks for a sign of life.
const PING_INTERVAL: Duration = Duration::from_secs(1);
/// A peer that is silent for this long is gone.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// One connection with all its streams.
#[derive(Debug)]
pub(super) struct SenderLink {
    hello: Hello,
    pub(super) capabilities: Capabilities,
    /// Number of frames that were sent on each stream.
    sent_counts: Vec<u64>,
    next_stream: u16,
    received_count: u64,
    /// Number of barriers that were sent.
    pass: u32,
    /// Whether frames with data were sent since the last barrier.
    has_open_pass: bool,
    /// Bytes that may still be sent.
    pub(super) credit_bytes: u64,
    pub(super) window_bytes: u64,
    /// When the last credit came, if more is under way.
    credited: Option<Duration>,
    /// The synchronization that the receiver has not confirmed, of those of this connection.
    pub(super) sync: Option<u64>,
    heard: Duration,
    pinged: Duration,
    ping_count: u64,
    pub(super) round_trip: Duration,
}

/// Whether a peer is alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Liveness {
    Alive,
    /// Ask for a sign of life.
    PingDue,
    Silent,
}

impl SenderLink {
    pub(super) fn new(hello: Hello, now: Duration) -> Self {
        Self {
            hello,
            capabilities: Capabilities::default(),
            sent_counts: vec![0],
            next_stream: 0,
            received_count: 0,
            pass: 0,
            has_open_pass: false,
            credit_bytes: 0,
            window_bytes: 0,
            credited: None,
            sync: None,
            heard: now,
            pinged: now,
            ping_count: 0,
            round_trip: Duration::ZERO,
        }
    }

    pub(super) fn hello(session: SessionId, connection: u64, capabilities: Capabilities, program: &str) -> Hello {
        Hello {
            versions: VersionRange::KNOWN,
            capabilities,
            session,
            connection,
            program: program.to_owned(),
        }
    }

    /// Whether `hello` is the answer to this connection's.
    pub(super) fn is_answered_by(&self, hello: &Hello) -> bool {
        hello.session == self.hello.session && hello.connection == self.hello.connection
    }

    pub(super) fn set_streams(&mut self, stream_count: u16) {
        self.sent_counts.resize(usize::from(stream_count), 0);
    }

    /// A message on stream 0.
    pub(super) fn control(&mut self, message: Message) -> Frame {
        self.frame(0, message)
    }

    /// The first message of the connection.
    pub(super) fn greeting(&mut self) -> Frame {
        let hello = Message::Hello(self.hello.clone());
        self.frame(0, hello)
    }

    /// A frame with data on the next stream, and before it the greeting if it is the first on its stream.
    pub(super) fn data(&mut self, frame: RangeFrame) -> Vec<Frame> {
        let stream = self.next_stream;
        let stream_count = u16::try_from(self.sent_counts.len()).expect("at most 64 streams were agreed");
        self.next_stream = (stream + 1) % stream_count;
        let mut frames = Vec::new();
        if self.sent_counts.get(usize::from(stream)) == Some(&0) {
            let hello = Message::Hello(self.hello.clone());
            frames.push(self.frame(stream, hello));
        }
        self.has_open_pass = true;
        frames.push(self.frame(stream, Message::Range(frame)));
        frames
    }

    /// The receiver has applied frames. Returns how long that took since it had applied others.
    pub(super) fn credited(&mut self, bytes: u64, now: Duration) -> Option<Duration> {
        self.credit_bytes = self.credit_bytes.saturating_add(bytes).min(self.window_bytes);
        let more = (self.credit_bytes < self.window_bytes).then_some(now);
        let last = std::mem::replace(&mut self.credited, more);
        last.map(|last| now.saturating_sub(last))
    }

    pub(super) fn pass(&self) -> u32 {
        self.pass
    }

    pub(super) fn has_open_pass(&self) -> bool {
        self.has_open_pass
    }

    /// Ends the pass.
    pub(super) fn barrier(&mut self) -> Barrier {
        self.pass += 1;
        self.has_open_pass = false;
        Barrier {
            frame_counts: self.sent_counts.clone(),
        }
    }

    fn frame(&mut self, stream: u16, message: Message) -> Frame {
        let count = self
            .sent_counts
            .get_mut(usize::from(stream))
            .expect("the stream was agreed");
        let sequence = *count;
        *count += 1;
        Frame {
            stream,
            sequence,
            message,
        }
    }

    /// Counts a frame that arrived; false if one is missing, or came twice.
    pub(super) fn count(&mut self, frame: &Frame, now: Duration) -> bool {
        let is_next = frame.stream == 0 && frame.sequence == self.received_count;
        self.received_count += 1;
        self.heard = now;
        is_next
    }

    pub(super) fn liveness(&self, now: Duration) -> Liveness {
        if now.saturating_sub(self.heard) > SILENCE_MAX {
            Liveness::Silent
        } else if now.saturating_sub(self.pinged) >= PING_INTERVAL {
            Liveness::PingDue
        } else {
            Liveness::Alive
        }
    }

    pub(super) fn ping(&mut self, now: Duration) -> Frame {
        self.pinged = now;
        self.ping_count += 1;
        let number = self.ping_count;
        self.control(Message::Ping { number })
    }

    pub(super) fn pong(&mut self, number: u64, now: Duration) {
        if number == self.ping_count {
            self.round_trip = now.saturating_sub(self.pinged);
        }
    }

    /// The answer to the greeting measures the first round trip.
    pub(super) fn greeted(&mut self, capabilities: Capabilities, now: Duration) {
        self.capabilities = self.hello.capabilities & capabilities;
        self.round_trip = now.saturating_sub(self.pinged);
    }
}
