//! One connection, shared by any number of threads.
//!
//! There is no thread of its own. Whoever waits for an answer reads what the server sends, for all: it holds the *baton*,
//! which is the buffer between stream and replies. Bytes for its own request go straight into its caller's memory. Long ones
//! for another thread that waits already are left to that thread, together with the baton; short ones, and those of
//! a thread that is still busy sending, are set aside for it. A thread that is done passes the baton on. So a lone thread
//! pays for no switch, and many threads copy no more than they must.
//!
//! Invariants:
//! - Whenever a request is under way and nobody holds the baton, some thread is on its way to take it: who puts it down wakes
//!   one that waits, and who leaves without taking it wakes the next.
//! - A thread with requests under way never waits for the right to send: it reads instead. So a server that does not read
//!   because it writes is always read, and the two sides never wait for each other.
//! - The state's lock is held for moments, never during a call to the operating system that may wait. Lock order: sender, state.

use std::collections::HashMap;
use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use holdfast_block::{Clock, Request};

use super::command::Command;
use super::dialogue::{Answer, Dialogue, Sequel, Ticket};
use super::export::{Context, ExportInfo};
use super::handshake::Outcome;
use super::inbox::Inbox;
use super::{Error, Loss, Stream};
use crate::nbd::wire::{CommandFlags, CommandKind, HeaderStyle, RequestHeader};

/// Slowest server that is not taken for one that hangs, beyond the time for a request, in bytes of what is under way for each second.
const BYTES_PER_SECOND_MIN: u64 = 64 << 10;

/// One connection that is past its handshake.
pub(super) struct Connection {
    server: Arc<str>,
    stream: Arc<dyn Stream>,
    style: HeaderStyle,
    export: ExportInfo,
    contexts: Vec<Context>,
    clock: Arc<dyn Clock>,
    timeout: Duration,
    is_stopped: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
    /// Between two looks at the deadlines.
    tick: Duration,
    call_count: AtomicUsize,
    /// In nanoseconds of the clock: when the last bytes came, and when the deadlines were last looked at.
    received_at: AtomicU64,
    checked_at: AtomicU64,
    /// Whether it is lost.
    is_over: AtomicBool,
    /// Held by the thread that sends; memory for headers.
    sender: Mutex<Vec<u8>>,
    state: Mutex<State>,
}

/// How long a server is waited for.
pub(super) struct Patience {
    pub(super) clock: Arc<dyn Clock>,
    /// Time without a byte from it.
    pub(super) timeout: Duration,
    /// Whether somebody asked to stop.
    pub(super) is_stopped: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
}

pub(super) struct State {
    pub(super) dialogue: Dialogue,
    /// [`None`] while a thread holds it.
    pub(super) baton: Option<Baton>,
    pub(super) calls: HashMap<u64, Slot>,
    next_call: u64,
    pub(super) loss: Option<Arc<Loss>>,
}

/// The right, and the duty, to read.
pub(super) struct Baton {
    pub(super) inbox: Box<Inbox>,
    /// Data that come next.
    pub(super) chunk: Option<Chunk>,
}

/// Data of the export that come next.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chunk {
    pub(super) cookie: u64,
    pub(super) call: u64,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) sequel: Sequel,
}

/// What others leave for a call.
pub(super) struct Slot {
    pub(super) wake: Arc<Condvar>,
    pub(super) is_parked: bool,
    pub(super) mail: Vec<Mail>,
    pub(super) baton: Option<Baton>,
}

/// What came for a call while another thread held the baton.
pub(super) enum Mail {
    Bytes { offset: u64, bytes: Vec<u8> },
    Zeroes { offset: u64, length: u64 },
    Answer(Answer),
}

/// The connection is lost; why is in its state.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gone;

/// Whether a thread may wait for others to finish sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    Wait,
    IfFree,
}

impl Connection {
    /// Takes over a stream whose handshake came to `outcome`, with information on an export.
    pub(super) fn new(
        server: Arc<str>,
        stream: Arc<dyn Stream>,
        outcome: Outcome,
        export: ExportInfo,
        patience: Patience,
    ) -> io::Result<Self> {
        let Patience {
            clock,
            timeout,
            is_stopped,
        } = patience;
        let tick = (timeout / 16).clamp(Duration::from_millis(2), crate::nbd::client::connection::STOP_TICK);
        stream.set_patience(tick)?;
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
            state: Mutex::new(State {
                dialogue: Dialogue::new(outcome.style, outcome.contexts, export.size_bytes()),
                baton: Some(Baton {
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
    pub(super) fn contexts(&self) -> &[Context] {
        &self.contexts
    }

    pub(super) fn style(&self) -> HeaderStyle {
        self.style
    }

    /// Calls under way.
    pub(super) fn call_count(&self) -> usize {
        self.call_count.load(Ordering::Relaxed)
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lock().loss.is_some()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error of a connection that is lost.
    pub(super) fn lost(&self) -> Error {
        let loss = self.lock().loss.clone();
        Error::Lost {
            server: self.server.clone(),
            loss: loss.unwrap_or_else(|| Arc::new(Loss::Abandoned)),
        }
    }

    /// Ends the connection for everyone; the first reason stays.
    pub(super) fn lose(&self, loss: Loss) -> Gone {
        let mut state = self.lock();
        if state.loss.is_none() {
            state.loss = Some(Arc::new(loss));
            self.is_over.store(true, Ordering::Release);
            // It may be closed already, and then has nothing to end.
            self.stream.shutdown().ok();
        }
        state.calls.values().for_each(|slot| slot.wake.notify_all());
        Gone
    }

    /// Begins a call: a place where its answers are left.
    pub(super) fn register(&self) -> Result<(u64, Arc<Condvar>), Error> {
        let wake = Arc::new(Condvar::new());
        let slot = Slot {
            wake: wake.clone(),
            is_parked: false,
            mail: Vec::new(),
            baton: None,
        };
        let mut state = self.lock();
        if state.loss.is_some() {
            drop(state);
            return Err(self.lost());
        }
        let call = state.next_call;
        state.next_call += 1;
        state.calls.insert(call, slot);
        self.call_count.fetch_add(1, Ordering::Relaxed);
        Ok((call, wake))
    }

    /// Ends a call. What comes for it from now on is thrown away.
    pub(super) fn unregister(&self, call: u64) {
        let mut state = self.lock();
        let slot = state.calls.remove(&call);
        self.call_count.fetch_sub(1, Ordering::Relaxed);
        if let Some(baton) = slot.and_then(|slot| slot.baton) {
            state.baton = Some(baton);
            state.wake_reader();
        }
    }

    /// Sends requests of a call, the last of them with `payload`; says whether it was possible to send now.
    pub(super) fn send(&self, call: u64, commands: &[Command], payload: &[u8], turn: Turn) -> Result<bool, Gone> {
        let mut headers = match (turn, self.sender.try_lock()) {
            (_, Ok(guard)) => guard,
            (_, Err(TryLockError::Poisoned(poisoned))) => poisoned.into_inner(),
            (Turn::Wait, Err(TryLockError::WouldBlock)) => self.sender.lock().unwrap_or_else(PoisonError::into_inner),
            (Turn::IfFree, Err(TryLockError::WouldBlock)) => return Ok(false),
        };
        headers.clear();
        let Some(last) = commands.last() else { return Ok(true) };
        {
            let mut state = self.lock();
            if state.loss.is_some() {
                return Err(Gone);
            }
            let sent = self.clock.now();
            for command in commands {
                let under_way = state.dialogue.payload_bytes() + command.payload_bytes();
                let ticket = Ticket {
                    call,
                    sent,
                    deadline: sent + self.timeout + Duration::from_secs(under_way / BYTES_PER_SECOND_MIN),
                };
                let header = state.dialogue.ask(*command, ticket);
                header.encode(self.style, &mut headers);
            }
        }
        self.write_all(&mut [IoSlice::new(&headers), IoSlice::new(payload)], last.request)?;
        Ok(true)
    }

    fn write_all(&self, mut buffers: &mut [IoSlice], request: Request) -> Result<(), Gone> {
        let mut taken_at = self.clock.now();
        // Cuts off what is empty from the start.
        IoSlice::advance_slices(&mut buffers, 0);
        while !buffers.is_empty() {
            match self.stream.write_vectored(buffers) {
                Ok(0) => return Err(self.lose(Loss::Closed)),
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
                        return Err(self.lose(Loss::SendTimedOut { request, waited_ms }));
                    }
                }
                Err(source) => return Err(self.lose(Loss::Io { action: "send", source })),
            }
        }
        Ok(())
    }

    /// Reads some bytes; only the holder of the baton does.
    pub(super) fn read(&self, buffers: &mut [IoSliceMut]) -> Result<usize, Gone> {
        loop {
            match self.stream.read_vectored(buffers) {
                Ok(0) => return Err(self.lose(Loss::Closed)),
                // What came before may have been thrown away by whoever ended it.
                Ok(_) if self.is_over.load(Ordering::Acquire) => return Err(Gone),
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
                    return Err(self.lose(Loss::Io { action, source }));
                }
            }
        }
    }

    /// Gives up when somebody asked to stop: whoever waits for an answer would wait for the whole time of a request.
    fn check_stopped(&self) -> Result<(), Gone> {
        match &self.is_stopped {
            Some(is_stopped) if is_stopped() => Err(self.lose(Loss::Stopped)),
            _ => Ok(()),
        }
    }

    /// Gives up when nothing came for the time of a request, or when one request is out for longer than all that is
    /// under way can explain.
    fn check_deadlines(&self, now: Duration) -> Result<(), Gone> {
        self.checked_at.store(nanos(now), Ordering::Relaxed);
        let received_at = Duration::from_nanos(self.received_at.load(Ordering::Relaxed));
        let late = {
            let state = self.lock();
            if state.loss.is_some() {
                return Err(Gone);
            }
            let oldest = state.dialogue.outstanding().min_by_key(|(ticket, _)| ticket.sent);
            let stalled = oldest.filter(|(ticket, _)| now >= ticket.sent.max(received_at) + self.timeout);
            stalled.or_else(|| state.dialogue.outstanding().find(|(ticket, _)| now >= ticket.deadline))
        };
        match late {
            Some((ticket, request)) => Err(self.lose(Loss::TimedOut {
                request,
                waited_ms: millis(now.saturating_sub(ticket.sent)),
            })),
            None => Ok(()),
        }
    }
}

impl Drop for Connection {
    /// Says goodbye, where that is possible at once: servers write a warning about clients that do not.
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
            // Nobody is left to be told: the requests have their answers.
            drop(farewell.and_then(|_| self.stream.shutdown()));
        }
    }
}

impl State {
    /// Wakes a thread that waits, when the baton lies there: the one whose data come next, or any.
    pub(super) fn wake_reader(&self) {
        let Some(baton) = &self.baton else { return };
        let owner = baton.chunk.and_then(|chunk| self.calls.get(&chunk.call));
        let parked = owner
            .filter(|slot| slot.is_parked)
            .or_else(|| self.calls.values().find(|slot| slot.is_parked));
        if let Some(slot) = parked {
            slot.wake.notify_one();
        }
    }

    /// Leaves something for a call, if it still waits.
    pub(super) fn deliver(&mut self, call: u64, mail: Mail) {
        if let Some(slot) = self.calls.get_mut(&call) {
            slot.mail.push(mail);
            slot.wake.notify_one();
        }
    }
}

/// Whether a stream lost its patience.
pub(super) fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// For messages.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// How often somebody who waits looks whether to go on.
pub(crate) const STOP_TICK: Duration = Duration::from_millis(200);
