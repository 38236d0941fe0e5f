//! One connection: the handshake, then requests until the end.

use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast_block::{Clock, Error as DeviceError};

use super::budget::{Budget, Lease};
use super::event::{Closed, Event, EventSink, Peer};
use super::execute::{Drain, Executor};
use super::export::Exports;
use super::handshake::{Handshake, INPUT_BYTES_MAX, Progress, Session, Surroundings};
use super::limits::Limits;
use super::outbox::{Outbox, Room, Weight};
use super::pace::{Pace, Place};
use super::receive::{Receiver, Waiting};
use super::reply::{Address, ReplyBuffer};
use super::request::{Command, Refusal, Request, Verdict, judge, payload_bytes};
use super::tls_policy::TlsPolicy;
use super::workers::Workers;
use crate::nbd::stream::Stream;
use crate::nbd::wire::{ErrorNumber, RequestHeader};

/// Replies are sent when there are as many bytes of them, even if more requests wait: the peer can work on them meanwhile.
const BATCH_BYTES: usize = 256 << 10;

/// What all connections of a server share.
pub(crate) struct Shared {
    pub(crate) exports: Arc<dyn Exports>,
    pub(crate) limits: Limits,
    pub(crate) tls: TlsPolicy,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) events: Arc<dyn EventSink>,
    pub(crate) workers: Workers,
    pub(crate) budget: Arc<Budget>,
    pub(crate) is_stopping: AtomicBool,
}

impl Shared {
    fn is_stopping(&self) -> bool {
        // Relaxed: a request that sees it a moment later is one that came a moment earlier.
        self.is_stopping.load(Ordering::Relaxed)
    }
}

/// A client that is connected.
#[derive(Clone)]
pub(crate) struct Client {
    pub(crate) peer: Arc<Peer>,
    pub(crate) stream: Arc<Stream>,
    pub(crate) outbox: Arc<Outbox>,
    /// Where it comes from, over the network.
    pub(crate) address: Option<IpAddr>,
    /// Whether the handshake is over.
    pub(crate) has_entered: Arc<AtomicBool>,
    /// Whether it has lost its place to another one.
    pub(crate) is_displaced: bool,
}

/// Serves a client until the connection ends.
pub(crate) fn serve(shared: &Arc<Shared>, client: &Client) {
    let Client {
        peer, stream, outbox, ..
    } = client;
    shared.events.event(&Event::Connected { peer });
    let mut receiver = Receiver::new(Arc::clone(stream), Arc::clone(&shared.clock));
    let reason = match shake_hands(shared, stream, &mut receiver, peer) {
        Ok(session) => {
            client.has_entered.store(true, Ordering::Relaxed);
            transmit(shared, receiver, outbox, peer, session)
        }
        Err(reason) => reason,
    };
    let reason = match reason {
        Closed::ByClient | Closed::Abandoned(_) if shared.is_stopping() => Closed::ByServer,
        reason => reason,
    };
    // Until workers are done with what it asked for, the connection keeps its place: whoever connects anew to ask for more
    // gets no more than anyone else.
    outbox.wait_until_empty();
    stream.say_goodbye();
    let event = Event::Disconnected { peer, reason: &reason };
    shared.events.event(&event);
}

pub(crate) fn outbox(limits: &Limits, stream: &Arc<Stream>) -> Arc<Outbox> {
    let room = Room {
        request_count_max: limits.request_count_max,
        bytes_max: limits.request_bytes_max,
    };
    Arc::new(Outbox::new(Arc::clone(stream), room))
}

fn shake_hands(shared: &Shared, stream: &Stream, receiver: &mut Receiver, peer: &Peer) -> Result<Session, Closed> {
    let deadline = shared.clock.now() + shared.limits.handshake;
    let mut handshake = Handshake::new(shared.tls.mode());
    let mut output = Vec::new();
    Handshake::greet(&mut output);
    let on_error = |export: &str, error: &DeviceError| {
        shared.events.event(&Event::OpenFailed { peer, export, error });
    };
    loop {
        let surroundings = Surroundings {
            exports: &*shared.exports,
            stopping: shared.is_stopping(),
            on_error: &on_error,
        };
        let (used, progress) = handshake.step(receiver.bytes(), surroundings, &mut output);
        receiver.consume(used);
        stream.send_all(&output).map_err(Closed::Io)?;
        output.clear();
        match progress {
            Progress::NeedInput => receiver.fill(INPUT_BYTES_MAX, Waiting::Until(deadline))?,
            Progress::Continue => {}
            Progress::StartTls => {
                // Whoever speaks on before TLS began would have it taken for what was said under its protection.
                if !receiver.bytes().is_empty() {
                    return Err(Closed::Nonsense("plain bytes where TLS should begin"));
                }
                let server = shared.tls.server().ok_or(Closed::Nonsense("TLS where there is none"))?;
                stream.start_tls(server.begin().map_err(Closed::Io)?);
                handshake.encrypted();
            }
            Progress::Enter(session) => return Ok(session),
            Progress::End(reason) => return Err(Closed::Handshake(reason)),
        }
    }
}

fn transmit(
    shared: &Arc<Shared>,
    receiver: Receiver,
    outbox: &Arc<Outbox>,
    peer: &Arc<Peer>,
    session: Session,
) -> Closed {
    let export = session.export.name();
    shared.events.event(&Event::Entered { peer, export });
    let transmission = Transmission {
        shared: Arc::clone(shared),
        outbox: Arc::clone(outbox),
        context: Arc::new(Context {
            shared: Arc::clone(shared),
            peer: Arc::clone(peer),
            executor: Executor::new(session, Arc::clone(&shared.clock)),
            pace: Pace::new(),
        }),
        receiver,
        replies: ReplyBuffer::default(),
        payload: ReplyBuffer::default(),
    };
    transmission.run()
}

/// What carrying out a request needs, on whichever thread.
struct Context {
    shared: Arc<Shared>,
    peer: Arc<Peer>,
    executor: Executor,
    pace: Pace,
}

impl Context {
    /// Carries `request` out and appends its reply; measures how long that takes, and reports what the device complains of.
    fn execute(&self, request: &Request, payload: &[u8], replies: &mut ReplyBuffer, drain: Drain<'_>) {
        let clock = &*self.shared.clock;
        let begun = clock.now();
        let mut waited = Duration::ZERO;
        let mut timed_drain = drain.map(|drain| {
            |replies: &mut ReplyBuffer| {
                let begun = clock.now();
                drain(replies);
                waited += clock.now().saturating_sub(begun);
            }
        });
        let drain = timed_drain
            .as_mut()
            .map(|drain| drain as &mut dyn FnMut(&mut ReplyBuffer));
        // A device that breaks its contract costs the request, not the server.
        let done = catch_unwind(AssertUnwindSafe(|| {
            self.executor.execute(request, payload, replies, drain)
        }));
        // The peer's slowness is not the device's.
        self.pace.learn(request, clock.now().saturating_sub(begun + waited));
        let error = match done {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(_) => {
                let message = "the device of the export broke down";
                replies.abandon();
                replies.error(
                    self.executor.session.terms.style,
                    address(request),
                    ErrorNumber::EIO,
                    message,
                );
                DeviceError::layer(std::io::Error::other(message))
            }
        };
        self.shared.events.event(&Event::RequestFailed {
            peer: &self.peer,
            export: self.executor.session.export.name(),
            action: action(request),
            offset: request.offset,
            length: request.length,
            error: &error,
        });
    }
}

fn address(request: &Request) -> Address {
    Address {
        cookie: request.cookie,
        offset: request.offset,
    }
}

fn action(request: &Request) -> &'static str {
    match request.command {
        Command::Read(_) => "read",
        Command::Write => "write",
        Command::Flush => "flush",
        Command::Trim => "trim",
        Command::Cache => "read ahead",
        Command::WriteZeroes(_) => "write zeroes",
        Command::BlockStatus { .. } => "look for extents",
    }
}

/// The receiving thread of a connection in transmission.
struct Transmission {
    shared: Arc<Shared>,
    outbox: Arc<Outbox>,
    context: Arc<Context>,
    receiver: Receiver,
    replies: ReplyBuffer,
    /// The payload of a write that is longer than what is received ahead.
    payload: ReplyBuffer,
}

impl Transmission {
    fn run(mut self) -> Closed {
        let ended = loop {
            match self.take_ready() {
                Ok(()) => {}
                Err(reason) => break reason,
            }
        };
        // What was answered before the end still goes out, if it can.
        drop(self.send());
        ended
    }

    /// Answers all requests that were received, sends the replies, and receives more.
    fn take_ready(&mut self) -> Result<(), Closed> {
        let terms = &self.context.executor.session.terms;
        let header_bytes = RequestHeader::size_bytes(terms.style);
        while let Some(bytes) = self.receiver.bytes().get(..header_bytes) {
            let Some(header) = RequestHeader::decode(bytes, self.context.executor.session.terms.style) else {
                return Err(Closed::Nonsense("a request without its magic number"));
            };
            self.receiver.consume(header_bytes);
            self.take_request(&header)?;
            if self.replies.len() >= BATCH_BYTES {
                self.send()?;
            }
        }
        self.send()?;
        let limits = &self.shared.limits;
        let waiting = if self.receiver.bytes().is_empty() {
            Waiting::ForNext(limits.idle)
        } else {
            Waiting::ForRest(limits.stall)
        };
        self.receiver.fill(INPUT_BYTES_MAX, waiting)
    }

    fn take_request(&mut self, header: &RequestHeader) -> Result<(), Closed> {
        let terms = &self.context.executor.session.terms;
        let payload_length = payload_bytes(header, terms.style);
        let verdict = if self.shared.is_stopping() {
            refuse_for_stop(judge(header, terms))
        } else {
            judge(header, terms)
        };
        match verdict {
            Verdict::Accept(request) => self.carry_out(&request, payload_length),
            Verdict::Refuse(Refusal { error, reason }) => {
                let address = Address {
                    cookie: header.cookie,
                    offset: header.offset,
                };
                self.replies.error(terms.style, address, error, reason);
                if payload_length > self.receiver.bytes().len() as u64 {
                    self.send()?;
                }
                self.receiver.skip(payload_length, self.shared.limits.stall)
            }
            Verdict::Disconnect => Err(Closed::ByClient),
            Verdict::End(reason) => Err(Closed::Nonsense(reason)),
        }
    }

    fn carry_out(&mut self, request: &Request, payload_length: u64) -> Result<(), Closed> {
        let length = holdfast_block::to_usize(payload_length);
        if self.context.pace.place(request) == Place::Worker {
            return self.hand_over(request, length);
        }
        let bytes = answer_length(request) + payload_length;
        if bytes <= Limits::SMALL_BYTES {
            return self.carry_out_here(request, length);
        }
        let lease = self.lease(bytes)?;
        let done = self.carry_out_here(request, length).and_then(|()| self.send());
        drop(lease);
        done
    }

    /// Memory for a request, after waiting until there is room for it. What was answered does not wait for that.
    fn lease(&mut self, bytes: u64) -> Result<Lease, Closed> {
        if let Some(lease) = self.shared.budget.try_take(bytes) {
            return Ok(lease);
        }
        self.send()?;
        Ok(self.shared.budget.take(bytes))
    }

    fn carry_out_here(&mut self, request: &Request, length: usize) -> Result<(), Closed> {
        if length <= self.receiver.bytes().len() {
            let payload = &self.receiver.bytes()[..length];
            let outbox = &self.outbox;
            let mut drain = |replies: &mut ReplyBuffer| {
                // A peer that is gone is noticed by the next one who sends.
                outbox.send(replies.as_slice()).unwrap_or_default();
                replies.clear();
            };
            self.context
                .execute(request, payload, &mut self.replies, Some(&mut drain));
            self.receiver.consume(length);
            return Ok(());
        }
        // What was answered does not wait for the rest of this one.
        self.send()?;
        let payload = self.payload.space(length);
        self.receiver.take_payload(payload, self.shared.limits.stall)?;
        self.context
            .execute(request, self.payload.as_slice(), &mut self.replies, None);
        self.payload.clear();
        Ok(())
    }

    /// Gives a request to a worker, after waiting until there is room for it.
    fn hand_over(&mut self, request: &Request, payload_length: usize) -> Result<(), Closed> {
        let bytes = answer_length(request) + payload_length as u64;
        if payload_length > self.receiver.bytes().len() || !self.outbox.has_room(bytes) {
            self.send()?;
        }
        let request_count = self.outbox.admit(bytes);
        let lease = if request_count == 1 && bytes <= Limits::SMALL_BYTES {
            Ok(None)
        } else {
            self.lease(bytes).map(Some)
        };
        let mut payload = Vec::new();
        let (lease, received) = match lease {
            Ok(lease) => {
                payload.resize(payload_length, 0);
                let stall = self.shared.limits.stall;
                (lease, self.receiver.take_payload(&mut payload, stall))
            }
            Err(reason) => (None, Err(reason)),
        };
        let weight = Weight { bytes, lease };
        if let Err(reason) = received {
            self.outbox.break_off(weight);
            return Err(reason);
        }
        let context = Arc::clone(&self.context);
        let outbox = Arc::clone(&self.outbox);
        let request = *request;
        let mut promise = Promise {
            outbox,
            weight: Some(weight),
        };
        let task = move || {
            let outbox = &promise.outbox;
            let mut reply = ReplyBuffer::default();
            // Nobody is left to read for; what was to be written is written, as if the peer had gone a moment later.
            if !(outbox.is_dead() && matches!(request.command, Command::Read(_) | Command::Cache)) {
                context.execute(&request, &payload, &mut reply, None);
            }
            if let Some(weight) = promise.weight.take() {
                promise.outbox.deliver(reply, weight);
            }
        };
        self.shared
            .workers
            .hand_over(self.context.peer.connection, Box::new(task));
        Ok(())
    }

    fn send(&mut self) -> Result<(), Closed> {
        if self.replies.is_empty() {
            return Ok(());
        }
        let sent = self.outbox.send(self.replies.as_slice());
        self.replies.clear();
        sent.map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => Closed::Abandoned("the client does not take its replies"),
            _ => Closed::Io(error),
        })
    }
}

/// Bytes that a request wants to have read.
fn answer_length(request: &Request) -> u64 {
    match request.command {
        Command::Read(_) => request.length,
        _ => 0,
    }
}

/// The reply to a request that a worker has. Where a panic keeps it from coming, the connection ends rather than waits.
struct Promise {
    outbox: Arc<Outbox>,
    /// None once it is kept.
    weight: Option<Weight>,
}

impl Drop for Promise {
    fn drop(&mut self) {
        if let Some(weight) = self.weight.take() {
            self.outbox.break_off(weight);
        }
    }
}

/// "The error value issued in respect of these requests and any subsequently received requests SHOULD be NBD_ESHUTDOWN."
fn refuse_for_stop(verdict: Verdict) -> Verdict {
    match verdict {
        Verdict::Accept(_) => Verdict::Refuse(Refusal {
            error: ErrorNumber::ESHUTDOWN,
            reason: "the server is being stopped",
        }),
        verdict => verdict,
    }
}
