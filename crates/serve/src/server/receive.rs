//! The receive buffer, and the time limits of receiving.

use std::sync::Arc;
use std::time::Duration;

use holdfast_block::Clock;

use crate::stream::{SocketStream, Wait};

/// Size of the buffer: space for a batch of small requests, or the payload of a few writes.
const BUFFER_BYTES: usize = 128 << 10;
/// Number of polls for a payload before blocking: some microseconds.
const POLL_ATTEMPTS: u32 = 20;

/// Why no more bytes can be received.
#[derive(Debug)]
pub(crate) enum ReceiveEnd {
    /// The peer closed the connection between two messages.
    ByPeer,
    /// The peer sent nothing for longer than the time limit between two messages.
    Idle,
    /// The peer closed the connection, or took too long, in the middle of a message.
    Abandoned(&'static str),
    /// The socket failed.
    Io(std::io::Error),
}

/// The message that is being received. It determines the time limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// Between requests: this time limit, or unlimited.
    ForNext(Option<Duration>),
    /// Inside a message: every part must arrive within this time.
    ForRest(Duration),
    /// The handshake must be complete by this time of the clock.
    Until(Duration),
}

pub(crate) struct Receiver {
    stream: Arc<SocketStream>,
    clock: Arc<dyn Clock>,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl Receiver {
    pub(crate) fn new(stream: Arc<SocketStream>, clock: Arc<dyn Clock>) -> Self {
        Self {
            stream,
            clock,
            buffer: vec![0; BUFFER_BYTES],
            start: 0,
            end: 0,
        }
    }

    /// The buffered bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Removes the first `length` bytes.
    pub(crate) fn consume(&mut self, length: usize) {
        self.start = (self.start + length).min(self.end);
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Receives at least one more byte, and buffers at most `length_max`. Fails when the client closes the connection.
    pub(crate) fn fill(&mut self, length_max: usize, waiting: Waiting) -> Result<(), ReceiveEnd> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.end == self.buffer.len() {
            assert!(self.end < length_max, "a message is longer than its bound");
            let length = (2 * self.buffer.len()).min(length_max);
            self.buffer.resize(length, 0);
        }
        let buffer = &mut self.buffer[self.end..];
        self.end += receive(&self.stream, &*self.clock, buffer, waiting)?;
        Ok(())
    }

    /// Fills `payload` from the buffer, and then from the socket.
    pub(crate) fn take_payload(&mut self, payload: &mut [u8], patience: Duration) -> Result<(), ReceiveEnd> {
        let ready = self.bytes().len().min(payload.len());
        payload[..ready].copy_from_slice(&self.bytes()[..ready]);
        self.consume(ready);
        let mut done = ready;
        // Many clients send a header and its payload separately. Blocking in between and being woken at once would take
        // longer than receiving the payload.
        for _ in 0..POLL_ATTEMPTS {
            if done == payload.len() {
                return Ok(());
            }
            match self.stream.receive(&mut payload[done..], Wait::Not) {
                Ok(length) if length > 0 => done += length,
                _ => std::hint::spin_loop(),
            }
        }
        while done < payload.len() {
            let rest = &mut payload[done..];
            done += receive(&self.stream, &*self.clock, rest, Waiting::ForRest(patience))?;
        }
        Ok(())
    }

    /// Discards `length` bytes.
    pub(crate) fn skip(&mut self, mut length: u64, patience: Duration) -> Result<(), ReceiveEnd> {
        loop {
            let ready = holdfast_block::to_usize(length).min(self.bytes().len());
            self.consume(ready);
            length -= ready as u64;
            if length == 0 {
                return Ok(());
            }
            self.fill(BUFFER_BYTES, Waiting::ForRest(patience))?;
        }
    }
}

/// Receives at least one byte. The socket's own timeout only determines how often the clock is checked.
fn receive(stream: &SocketStream, clock: &dyn Clock, buffer: &mut [u8], waiting: Waiting) -> Result<usize, ReceiveEnd> {
    let mut silent_since = None;
    loop {
        match stream.receive(buffer, Wait::ForPeer) {
            Ok(0) => {
                return Err(match waiting {
                    Waiting::ForNext(_) => ReceiveEnd::ByPeer,
                    Waiting::ForRest(_) => {
                        ReceiveEnd::Abandoned("the connection was closed in the middle of a request")
                    }
                    Waiting::Until(_) => ReceiveEnd::Abandoned("the connection was closed during the handshake"),
                });
            }
            Ok(length) => {
                return match waiting {
                    Waiting::Until(deadline) if clock.now() > deadline => Err(HANDSHAKE_TIMEOUT),
                    _ => Ok(length),
                };
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                let now = clock.now();
                let silence = now.saturating_sub(*silent_since.get_or_insert(now));
                match waiting {
                    Waiting::ForNext(Some(limit)) if silence >= limit => {
                        return Err(ReceiveEnd::Idle);
                    }
                    Waiting::ForRest(limit) if silence >= limit => {
                        return Err(ReceiveEnd::Abandoned("the rest of a request did not come in time"));
                    }
                    Waiting::Until(deadline) if now > deadline => return Err(HANDSHAKE_TIMEOUT),
                    _ => {}
                }
            }
            Err(error) => return Err(ReceiveEnd::Io(error)),
        }
    }
}

const HANDSHAKE_TIMEOUT: ReceiveEnd = ReceiveEnd::Abandoned("the handshake took too long");
