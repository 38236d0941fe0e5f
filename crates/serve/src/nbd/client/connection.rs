//! One connection, shared by any number of threads.
//!
//! There is no reader thread. A thread that waits for a reply holds the *read token*, which contains the buffer between
//! stream and replies, and reads the server's replies for all threads. It reads the data for its own request directly
//! into its caller's memory. Long data for another waiting thread is left to that thread, together with the token.
//! Short data, and data for a thread that is still sending, is queued for that thread. A thread that has finished
//! passes the token on. So a single thread needs no context switches, and many threads copy little data.
//!
//! Invariants:
//! - Whenever a request is in flight and no thread holds the read token, a thread is about to take it: a thread that
//!   returns the token wakes a waiting thread, and a thread that leaves without taking the token wakes the next one.
//! - A thread with requests in flight never waits for the right to send: it reads instead. The replies of a server that
//!   does not read while it writes are therefore always read, and the two sides cannot deadlock.
//! - The state's lock is held briefly, never during a system call that may block. Lock order: sender, state.

use std::collections::HashMap;
use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use holdfast_block::{Clock, Request};

use super::command::ClientCommand;
use super::export::{ExportInfo, MetaContext};
use super::handshake::Outcome;
use super::inbox::Inbox;
use super::transmission::{Answer, ChunkPosition, Ticket, TransmissionState};
use super::{Error, Loss, Stream};
use crate::nbd::wire::{CommandFlags, CommandKind, HeaderStyle, RequestHeader};

/// Minimum throughput in bytes per second. After the request timeout, a server may take longer by the bytes in flight
/// divided by this.
const BYTES_PER_SECOND_MIN: u64 = 64 << 10;

/// A connection in the transmission phase.
pub(super) struct Connection {
    server: Arc<str>,
    stream: Arc<dyn Stream>,
    style: HeaderStyle,
    export: ExportInfo,
    contexts: Vec<MetaContext>,
    clock: Arc<dyn Clock>,
    timeout: Duration,
    is_stopped: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
    /// Interval between checks of the deadlines.
    tick: Duration,
    call_count: AtomicUsize,
    /// In nanoseconds of the clock: when the last bytes arrived, and when the deadlines were last checked.
    received_at: AtomicU64,
    checked_at: AtomicU64,
    /// Whether the connection is lost.
    is_over: AtomicBool,
    /// Held by the sending thread; buffer for headers.
    sender: Mutex<Vec<u8>>,
    state: Mutex<ConnectionState>,
}

/// Limits on waiting for a server.
pub(super) struct WaitLimits {
    pub(super) clock: Arc<dyn Clock>,
    /// Time without a byte from the server.
    pub(super) timeout: Duration,
    /// Whether cancellation was requested.
    pub(super) is_stopped: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
}

pub(super) struct ConnectionState {
    pub(super) transmission: TransmissionState,
    /// [`None`] while a thread holds the token.
    pub(super) read_token: Option<ReadToken>,
    pub(super) calls: HashMap<u64, CallSlot>,
    next_call: u64,
    pub(super) loss: Option<Arc<Loss>>,
}

/// The exclusive right to read from the stream, and the duty to do so.
pub(super) struct ReadToken {
    pub(super) inbox: Box<Inbox>,
    /// The chunk of data that arrives next.
    pub(super) chunk: Option<Chunk>,
}

/// A chunk of export data that arrives next.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chunk {
    pub(super) cookie: u64,
    pub(super) call: u64,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) position: ChunkPosition,
}

/// Deliveries for a call, left by other threads.
pub(super) struct CallSlot {
    pub(super) wake: Arc<Condvar>,
    pub(super) is_parked: bool,
    pub(super) deliveries: Vec<Delivery>,
    pub(super) read_token: Option<ReadToken>,
}

/// Data or a reply that arrived for a call while another thread held the read token.
pub(super) enum Delivery {
    Bytes { offset: u64, bytes: Vec<u8> },
    Zeroes { offset: u64, length: u64 },
    Answer(Answer),
}

/// The connection is lost; the state has the reason.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConnectionLost;

/// Whether a thread may wait for others to finish sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendMode {
    Wait,
    IfFree,
}

impl Connection {
    /// Takes over a stream after the handshake, whose `outcome` describes an export.
    pub(super) fn new(
        server: Arc<str>,
        stream: Arc<dyn Stream>,
        outcome: Outcome,
        export: ExportInfo,
        patience: WaitLimits,
    ) -> io::Result<Self> {
        let WaitLimits {
            clock,
            timeout,
            is_stopped,
        } = patience;
        let tick = (timeout / 16).clamp(Duration::from_millis(2), crate::nbd::client::connection::STOP_TICK);
        stream.set_timeout(tick)?;
        let now = nanos(clock.now());
        Ok(Self {
            server,
            stream,
            style: outcome.style,
            contexts: outcome.contexts.clone(),
            clock,
            timeout,
            is_stopped,
            tick,
            call_count: AtomicUsize::new(0),
            received_at: AtomicU64::new(now),
            checked_at: AtomicU64::new(now),
            is_over: AtomicBool::new(false),
            sender: Mutex::default(),
            state: Mutex::new(ConnectionState {
                transmission: TransmissionState::new(outcome.style, outcome.contexts, export.size_bytes()),
                read_token: Some(ReadToken {
                    inbox: Box::new(Inbox::new()),
                    chunk: None,
                }),
                calls: HashMap::new(),
                next_call: 0,
                loss: None,
            }),
            export,
        })
    }

    pub(super) fn server(&self) -> &Arc<str> {
        &self.server
    }

    pub(super) fn export(&self) -> &ExportInfo {
        &self.export
    }

    /// The contexts that the server granted.
    pub(super) fn contexts(&self) -> &[MetaContext] {
        &self.contexts
    }

    pub(super) fn style(&self) -> HeaderStyle {
        self.style
    }

    /// Number of calls in progress.
    pub(super) fn call_count(&self) -> usize {
        self.call_count.load(Ordering::Relaxed)
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lock().loss.is_some()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error of a lost connection.
    pub(super) fn loss_error(&self) -> Error {
        let loss = self.lock().loss.clone();
        Error::Lost {
            server: self.server.clone(),
            loss: loss.unwrap_or_else(|| Arc::new(Loss::Abandoned)),
        }
    }

    /// Disconnects all users of the connection; the first reason is kept.
    pub(super) fn disconnect(&self, loss: Loss) -> ConnectionLost {
        let mut state = self.lock();
        if state.loss.is_none() {
            state.loss = Some(Arc::new(loss));
            self.is_over.store(true, Ordering::Release);
            // The stream may be closed already.
            self.stream.shutdown().ok();
        }
        state.calls.values().for_each(|slot| slot.wake.notify_all());
        ConnectionLost
    }

    /// Registers a call: a slot for its replies.
    pub(super) fn register(&self) -> Result<(u64, Arc<Condvar>), Error> {
        let wake = Arc::new(Condvar::new());
        let slot = CallSlot {
            wake: wake.clone(),
            is_parked: false,
            deliveries: Vec::new(),
            read_token: None,
        };
        let mut state = self.lock();
        if state.loss.is_some() {
            drop(state);
            return Err(self.loss_error());
        }
        let call = state.next_call;
        state.next_call += 1;
        state.calls.insert(call, slot);
        self.call_count.fetch_add(1, Ordering::Relaxed);
        Ok((call, wake))
    }

    /// Removes a call. Data that arrives for it later is discarded.
    pub(super) fn unregister(&self, call: u64) {
        let mut state = self.lock();
        let slot = state.calls.remove(&call);
        self.call_count.fetch_sub(1, Ordering::Relaxed);
        if let Some(read_token) = slot.and_then(|slot| slot.read_token) {
            state.read_token = Some(read_token);
            state.wake_reader();
        }
    }

    /// Sends commands of a call; the last command has the `payload`. Returns whether sending was possible now.
    pub(super) fn send(
        &self,
        call: u64,
        commands: &[ClientCommand],
        payload: &[u8],
        turn: SendMode,
    ) -> Result<bool, ConnectionLost> {
        let mut headers = match (turn, self.sender.try_lock()) {
            (_, Ok(guard)) => guard,
            (_, Err(TryLockError::Poisoned(poisoned))) => poisoned.into_inner(),
            (SendMode::Wait, Err(TryLockError::WouldBlock)) => {
                self.sender.lock().unwrap_or_else(PoisonError::into_inner)
            }
            (SendMode::IfFree, Err(TryLockError::WouldBlock)) => return Ok(false),
        };
        headers.clear();
        let Some(last) = commands.last() else { return Ok(true) };
        {
            let mut state = self.lock();
            if state.loss.is_some() {
                return Err(ConnectionLost);
            }
            let sent = self.clock.now();
            for command in commands {
                let under_way = state.transmission.payload_bytes() + command.payload_bytes();
                let ticket = Ticket {
                    call,
                    sent,
                    deadline: sent + self.timeout + Duration::from_secs(under_way / BYTES_PER_SECOND_MIN),
                };
                let header = state.transmission.ask(*command, ticket);
                header.encode(self.style, &mut headers);
            }
        }
        self.write_all(&mut [IoSlice::new(&headers), IoSlice::new(payload)], last.request)?;
        Ok(true)
    }

    fn write_all(&self, mut buffers: &mut [IoSlice], request: Request) -> Result<(), ConnectionLost> {
        let mut taken_at = self.clock.now();
        // This removes empty slices from the start.
        IoSlice::advance_slices(&mut buffers, 0);
        while !buffers.is_empty() {
            match self.stream.write_vectored(buffers) {
                Ok(0) => return Err(self.disconnect(Loss::Closed)),
                Ok(count) => {
                    IoSlice::advance_slices(&mut buffers, count);
                    taken_at = self.clock.now();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_timeout(&error) => {
                    self.check_stopped()?;
                    let waited = self.clock.now().saturating_sub(taken_at);
                    if waited >= self.timeout {
                        let waited_ms = millis(waited);
                        return Err(self.disconnect(Loss::SendTimedOut { request, waited_ms }));
                    }
                }
                Err(source) => return Err(self.disconnect(Loss::Io { action: "send", source })),
            }
        }
        Ok(())
    }

    /// Reads some bytes. Only the holder of the read token calls it.
    pub(super) fn read(&self, buffers: &mut [IoSliceMut]) -> Result<usize, ConnectionLost> {
        loop {
            match self.stream.read_vectored(buffers) {
                Ok(0) => return Err(self.disconnect(Loss::Closed)),
                // Earlier data may have been discarded when the connection was closed.
                Ok(_) if self.is_over.load(Ordering::Acquire) => return Err(ConnectionLost),
                Ok(count) => {
                    let now = self.clock.now();
                    self.received_at.store(nanos(now), Ordering::Relaxed);
                    if nanos(now).saturating_sub(self.checked_at.load(Ordering::Relaxed)) > nanos(self.tick) {
                        self.check_deadlines(now)?;
                    }
                    return Ok(count);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_timeout(&error) => {
                    self.check_stopped()?;
                    self.check_deadlines(self.clock.now())?;
                }
                Err(source) => {
                    let action = "receive";
                    return Err(self.disconnect(Loss::Io { action, source }));
                }
            }
        }
    }

    /// Disconnects when cancellation was requested: a waiting thread would otherwise wait for the whole request
    /// timeout.
    fn check_stopped(&self) -> Result<(), ConnectionLost> {
        match &self.is_stopped {
            Some(is_stopped) if is_stopped() => Err(self.disconnect(Loss::Stopped)),
            _ => Ok(()),
        }
    }

    /// Disconnects when nothing arrived within the request timeout, or when one request is in flight for longer than
    /// the total amount of data in flight can explain.
    fn check_deadlines(&self, now: Duration) -> Result<(), ConnectionLost> {
        self.checked_at.store(nanos(now), Ordering::Relaxed);
        let received_at = Duration::from_nanos(self.received_at.load(Ordering::Relaxed));
        let late = {
            let state = self.lock();
            if state.loss.is_some() {
                return Err(ConnectionLost);
            }
            let oldest = state.transmission.outstanding().min_by_key(|(ticket, _)| ticket.sent);
            let stalled = oldest.filter(|(ticket, _)| now >= ticket.sent.max(received_at) + self.timeout);
            stalled.or_else(|| {
                state
                    .transmission
                    .outstanding()
                    .find(|(ticket, _)| now >= ticket.deadline)
            })
        };
        match late {
            Some((ticket, request)) => Err(self.disconnect(Loss::TimedOut {
                request,
                waited_ms: millis(now.saturating_sub(ticket.sent)),
            })),
            None => Ok(()),
        }
    }
}

impl Drop for Connection {
    /// Sends a disconnect request if that is possible without waiting: servers log a warning about clients that do not
    /// send it.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if state.loss.is_none() {
            let header = RequestHeader {
                flags: CommandFlags::default(),
                kind: CommandKind::DISCONNECT,
                cookie: 0,
                offset: 0,
                length: 0,
            };
            let mut bytes = Vec::new();
            header.encode(self.style, &mut bytes);
            let farewell = self.stream.write_vectored(&[IoSlice::new(&bytes)]);
            // All requests have their replies: an error has no consequence.
            drop(farewell.and_then(|_| self.stream.shutdown()));
        }
    }
}

impl ConnectionState {
    /// Wakes a waiting thread if the read token is free: the thread whose data arrives next, or any other.
    pub(super) fn wake_reader(&self) {
        let Some(read_token) = &self.read_token else { return };
        let owner = read_token.chunk.and_then(|chunk| self.calls.get(&chunk.call));
        let parked = owner
            .filter(|slot| slot.is_parked)
            .or_else(|| self.calls.values().find(|slot| slot.is_parked));
        if let Some(slot) = parked {
            slot.wake.notify_one();
        }
    }

    /// Leaves a delivery for a call, if the call still exists.
    pub(super) fn deliver(&mut self, call: u64, delivery: Delivery) {
        if let Some(slot) = self.calls.get_mut(&call) {
            slot.deliveries.push(delivery);
            slot.wake.notify_one();
        }
    }
}

/// Whether an error is a timeout of the stream.
pub(super) fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The duration in milliseconds, for messages.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Interval at which a waiting thread checks for cancellation.
pub(crate) const STOP_TICK: Duration = Duration::from_millis(200);
