//! Serves one connection: the handshake, then requests until the connection ends.

use std::sync::Arc;

use holdfast_block::Error as DeviceError;

use super::event::{Closed, Event, EventSink};
use super::execute::Executor;
use super::export::Exports;
use super::handshake::{INPUT_BYTES_MAX, NbdSession, Progress, ServerHandshake, ServerState};
use super::reply::{ReplyBuffer, ReplyTarget};
use super::request::{Request, RequestCommand, RequestError, Verdict, payload_bytes, validate};
use super::request_context::RequestContext;
use super::tls_policy::TlsPolicy;
use super::work::work_of;
use crate::nbd::wire::{ErrorNumber, RequestHeader};
use crate::registry::{ClientEnding, ClientEntry, ClientProtocol};
use crate::server::budget::Lease;
use crate::server::client::{ConnectedClient, ServerCore};
use crate::server::connections::{Protocol, ReachedLimit, ThreadNames};
use crate::server::dispatch::{Dispatch, DispatchPolicy};
use crate::server::limits::Limits;
use crate::server::outbox::{Outbox, RequestCost};
use crate::server::peer::Peer;
use crate::server::receive::{Receiver, Waiting};
use crate::stream::SocketStream;

/// Replies are sent when they reach this size, even if more requests wait: the peer can process them meanwhile.
const BATCH_BYTES: usize = 256 << 10;

/// State that all connections of a server share.
pub(crate) struct ServerShared {
    pub(crate) core: ServerCore,
    pub(crate) exports: Arc<dyn Exports>,
    pub(crate) tls: TlsPolicy,
    pub(crate) events: Arc<dyn EventSink>,
}

impl ServerShared {
    fn limits(&self) -> &Limits {
        self.core.limits()
    }
}

type Client = ConnectedClient<ReplyBuffer>;

impl Protocol for ServerShared {
    type Reply = ReplyBuffer;
    const THREAD_NAMES: ThreadNames = ThreadNames {
        listener: "nbd-listener",
        connection: "nbd-connection",
    };

    fn core(&self) -> &ServerCore {
        &self.core
    }

    fn serve(self: &Arc<Self>, client: &Client) {
        serve(self, client);
    }

    fn too_many(&self, peer: &Peer, _limit: ReachedLimit) {
        self.events.event(&Event::TooMany { peer });
    }

    fn accept_failed(&self, error: &std::io::Error) {
        self.events.event(&Event::AcceptFailed { error });
    }
}

/// Serves a client until the connection ends.
fn serve(shared: &Arc<ServerShared>, client: &Client) {
    let Client {
        peer, stream, outbox, ..
    } = client;
    shared.events.event(&Event::Connected { peer });
    let mut receiver = Receiver::new(Arc::clone(stream), Arc::clone(&shared.core.clock));
    let reason = match run_handshake(shared, stream, &mut receiver, peer) {
        Ok(session) => {
            client.enter();
            transmit(shared, receiver, client, session)
        }
        Err(reason) => reason,
    };
    let reason = match reason {
        Closed::ByClient | Closed::Abandoned(_) if shared.core.is_stopping() => Closed::ByServer,
        reason => reason,
    };
    // The connection counts until the workers have finished its requests: a client gains nothing by reconnecting to
    // send more requests.
    outbox.wait_until_empty();
    stream.close_gracefully();
    let event = Event::Disconnected { peer, reason: &reason };
    shared.events.event(&event);
}

fn run_handshake(
    shared: &ServerShared,
    stream: &SocketStream,
    receiver: &mut Receiver,
    peer: &Peer,
) -> Result<NbdSession, Closed> {
    let deadline = shared.core.clock.now() + shared.limits().handshake;
    let mut handshake = ServerHandshake::new(shared.tls.mode());
    let mut output = Vec::new();
    ServerHandshake::greet(&mut output);
    let on_error = |export: &str, error: &DeviceError| {
        shared.events.event(&Event::OpenFailed { peer, export, error });
    };
    loop {
        let server = ServerState {
            exports: &*shared.exports,
            is_stopping: shared.core.is_stopping(),
            on_error: &on_error,
        };
        let (used, progress) = handshake.step(receiver.bytes(), server, &mut output);
        receiver.consume(used);
        stream.send_all(&output).map_err(Closed::Io)?;
        output.clear();
        match progress {
            Progress::NeedInput => receiver.fill(INPUT_BYTES_MAX, Waiting::Until(deadline))?,
            Progress::Continue => {}
            Progress::StartTls => {
                // Plain bytes that were sent before TLS started must not be treated as protected by TLS.
                if !receiver.bytes().is_empty() {
                    return Err(Closed::Malformed("plain bytes where TLS should start"));
                }
                let server = shared.tls.server().ok_or(Closed::Malformed("TLS is not configured"))?;
                stream.start_tls(server.begin().map_err(Closed::Io)?);
                handshake.encrypted();
            }
            Progress::Enter(session) => return Ok(session),
            Progress::End(reason) => return Err(Closed::Handshake(reason)),
        }
    }
}

fn transmit(shared: &Arc<ServerShared>, receiver: Receiver, client: &Client, session: NbdSession) -> Closed {
    let peer = &client.peer;
    let export = session.export.name();
    let ending = Arc::new(ClientEnding::new(Arc::clone(&client.stream)));
    let entry = || ClientEntry {
        protocol: ClientProtocol::Nbd,
        peer: peer.name.clone(),
        name: None,
        since: shared.core.clock.now(),
    };
    let registered = session.export.registered().cloned();
    let entered = registered.map(|export| export.enter(entry(), Arc::clone(&ending) as _));
    if entered.as_ref().is_some_and(Option::is_none) {
        return Closed::ByServer;
    }
    shared.events.event(&Event::Entered { peer, export });
    let transmission = Transmission {
        shared: Arc::clone(shared),
        client: client.clone(),
        context: Arc::new(RequestContext {
            clock: Arc::clone(&shared.core.clock),
            events: Arc::clone(&shared.events),
            peer: Arc::clone(peer),
            executor: Executor::new(session, Arc::clone(&shared.core.clock)),
            dispatch: DispatchPolicy::new(),
        }),
        receiver,
        replies: ReplyBuffer::default(),
        payload: ReplyBuffer::default(),
        ending: Arc::clone(&ending),
    };
    let closed = transmission.run();
    // The client uses the export until its last request has ended.
    client.outbox.wait_until_empty();
    drop(entered);
    match closed {
        Closed::ByClient | Closed::Abandoned(_) if ending.is_ending() => Closed::ByServer,
        closed => closed,
    }
}

/// The receiving thread of a connection in the transmission phase.
struct Transmission {
    shared: Arc<ServerShared>,
    client: Client,
    context: Arc<RequestContext>,
    receiver: Receiver,
    replies: ReplyBuffer,
    /// The payload of a write that is larger than the receive buffer.
    payload: ReplyBuffer,
    ending: Arc<ClientEnding>,
}

impl Transmission {
    fn run(mut self) -> Closed {
        let ended = loop {
            match self.take_ready() {
                Ok(()) => {}
                Err(reason) => break reason,
            }
        };
        // Pending replies are still sent, if possible.
        drop(self.send());
        ended
    }

    /// Answers all received requests, sends the replies, and receives more.
    fn take_ready(&mut self) -> Result<(), Closed> {
        let terms = &self.context.executor.session.terms;
        let header_bytes = RequestHeader::size_bytes(terms.style);
        while let Some(bytes) = self.receiver.bytes().get(..header_bytes) {
            let Some(header) = RequestHeader::decode(bytes, self.context.executor.session.terms.style) else {
                return Err(Closed::Malformed("a request without its magic number"));
            };
            self.receiver.consume(header_bytes);
            self.take_request(&header)?;
            if self.replies.len() >= BATCH_BYTES {
                self.send()?;
            }
        }
        self.send()?;
        let limits = self.shared.limits();
        let waiting = if self.receiver.bytes().is_empty() {
            Waiting::ForNext(limits.idle)
        } else {
            Waiting::ForRest(limits.stall)
        };
        Ok(self.receiver.fill(INPUT_BYTES_MAX, waiting)?)
    }

    fn take_request(&mut self, header: &RequestHeader) -> Result<(), Closed> {
        let terms = &self.context.executor.session.terms;
        let payload_length = payload_bytes(header, terms.style);
        let verdict = if self.shared.core.is_stopping() {
            refuse(validate(header, terms), "the server is being stopped")
        } else if self.ending.is_ending() {
            refuse(validate(header, terms), "the export was removed")
        } else {
            validate(header, terms)
        };
        match verdict {
            Verdict::Accept(request) => self.execute_or_submit(&request, payload_length),
            Verdict::Refuse(RequestError { error, reason }) => {
                let address = ReplyTarget {
                    cookie: header.cookie,
                    offset: header.offset,
                };
                self.replies.error(terms.style, address, error, reason);
                if payload_length > self.receiver.bytes().len() as u64 {
                    self.send()?;
                }
                Ok(self.receiver.skip(payload_length, self.shared.limits().stall)?)
            }
            Verdict::Disconnect => Err(Closed::ByClient),
            Verdict::End(reason) => Err(Closed::Malformed(reason)),
        }
    }

    fn execute_or_submit(&mut self, request: &Request, payload_length: u64) -> Result<(), Closed> {
        let length = holdfast_block::to_usize(payload_length);
        if self.context.dispatch.choose(work_of(request).class) == Dispatch::Worker {
            return self.hand_over(request, length);
        }
        let bytes = answer_length(request) + payload_length;
        if bytes <= Limits::SMALL_BYTES {
            return self.execute_here(request, length);
        }
        let lease = self.lease(bytes)?;
        let done = self.execute_here(request, length).and_then(|()| self.send());
        drop(lease);
        done
    }

    /// Takes memory for a request. If it has to wait, it sends pending replies first.
    fn lease(&mut self, bytes: u64) -> Result<Lease, Closed> {
        if let Some(lease) = self.shared.core.budget().try_take(self.client.key.origin, bytes) {
            return Ok(lease);
        }
        self.send()?;
        Ok(self.shared.core.budget().take(self.client.key.origin, bytes))
    }

    fn execute_here(&mut self, request: &Request, length: usize) -> Result<(), Closed> {
        if length <= self.receiver.bytes().len() {
            let payload = &self.receiver.bytes()[..length];
            let outbox = &self.client.outbox;
            let mut drain = |replies: &mut ReplyBuffer| {
                // The next send reports a closed peer.
                outbox.send(replies.as_slice()).unwrap_or_default();
                replies.clear();
            };
            self.context
                .execute(request, payload, &mut self.replies, Some(&mut drain));
            self.receiver.consume(length);
            return Ok(());
        }
        // Pending replies must not wait for the rest of this request.
        self.send()?;
        let payload = self.payload.space(length);
        self.receiver.take_payload(payload, self.shared.limits().stall)?;
        self.context
            .execute(request, self.payload.as_slice(), &mut self.replies, None);
        self.payload.clear();
        Ok(())
    }

    /// Gives a request to a worker; waits for quota if necessary.
    fn hand_over(&mut self, request: &Request, payload_length: usize) -> Result<(), Closed> {
        let bytes = answer_length(request) + payload_length as u64;
        if payload_length > self.receiver.bytes().len() || !self.client.outbox.has_room(bytes) {
            self.send()?;
        }
        let request_count = self.client.outbox.admit(bytes);
        let lease = if request_count == 1 && bytes <= Limits::SMALL_BYTES {
            Ok(None)
        } else {
            self.lease(bytes).map(Some)
        };
        let mut payload = Vec::new();
        let (lease, received) = match lease {
            Ok(lease) => {
                payload.resize(payload_length, 0);
                let stall = self.shared.limits().stall;
                (
                    lease,
                    self.receiver.take_payload(&mut payload, stall).map_err(Closed::from),
                )
            }
            Err(reason) => (None, Err(reason)),
        };
        let cost = RequestCost { bytes, lease };
        if let Err(reason) = received {
            self.client.outbox.abort(cost);
            return Err(reason);
        }
        let context = Arc::clone(&self.context);
        let outbox = Arc::clone(&self.client.outbox);
        let request = *request;
        let mut pending = PendingReply {
            outbox,
            cost: Some(cost),
        };
        let task = move || {
            let outbox = &pending.outbox;
            let mut reply = ReplyBuffer::default();
            // If the peer has closed, reads are skipped; writes are executed, as if the peer had closed a moment later.
            if !(outbox.is_dead() && matches!(request.command, RequestCommand::Read(_) | RequestCommand::Cache)) {
                context.execute(&request, &payload, &mut reply, None);
            }
            if let Some(cost) = pending.cost.take() {
                pending.outbox.deliver(reply, cost);
            }
        };
        self.shared.core.workers().submit(self.client.key, Box::new(task));
        Ok(())
    }

    fn send(&mut self) -> Result<(), Closed> {
        if self.replies.is_empty() {
            return Ok(());
        }
        let sent = self.client.outbox.send(self.replies.as_slice());
        self.replies.clear();
        sent.map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => Closed::Abandoned("the client does not take its replies"),
            _ => Closed::Io(error),
        })
    }
}

/// Number of bytes that a request reads.
fn answer_length(request: &Request) -> u64 {
    match request.command {
        RequestCommand::Read(_) => request.length,
        _ => 0,
    }
}

/// The pending reply to a request that was given to a worker. If a panic prevents the reply, the connection is closed
/// instead of waiting forever.
struct PendingReply {
    outbox: Arc<Outbox<ReplyBuffer>>,
    /// `None` once the reply was delivered.
    cost: Option<RequestCost>,
}

impl Drop for PendingReply {
    fn drop(&mut self) {
        if let Some(cost) = self.cost.take() {
            self.outbox.abort(cost);
        }
    }
}

/// "The error value issued in respect of these requests and any subsequently received requests SHOULD be
/// NBD_ESHUTDOWN."
fn refuse(verdict: Verdict, reason: &'static str) -> Verdict {
    match verdict {
        Verdict::Accept(_) => Verdict::Refuse(RequestError {
            error: ErrorNumber::ESHUTDOWN,
            reason,
        }),
        verdict => verdict,
    }
}
