//! Serves one connection of an initiator: the login, then requests until the session ends.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::super::frames::{Frames, SequenceNumbers};
use super::super::login::{LoggedIn, RECEIVE_SEGMENT_BYTES};
use super::super::nexus::Nexus;
use super::super::pdu::{Digests, Parsed, parse};
use super::super::session::{
    Exchange, Queued, ReadyTask, SessionInfo, Step, TargetDirectory, TargetSession, TaskOrder,
};
use super::super::target::{EnteredSession, Target};
use super::directory::RegisteredSession;
use super::ending::SessionEnding;
use super::event::{InitiatorGone, TargetEvent};
use super::execution::{Execution, work_of};
use super::login_phase::log_in;
use super::shared::TargetShared;
use crate::registry::{ClientEntry, ClientProtocol};
use crate::server::client::{ConnectedClient, ServerCore};
use crate::server::connections::{Protocol, ReachedLimit, ThreadNames};
use crate::server::dispatch::{Dispatch, DispatchPolicy};
use crate::server::outbox::{Outbox, RequestCost};
use crate::server::peer::Peer;
use crate::server::receive::{ReceiveEnd, Receiver, Waiting};

/// Responses are sent when they reach this size, even if more requests wait.
const BATCH_BYTES: usize = 256 << 10;
/// Interval of pings to an idle initiator.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// The longest PDU: header, additional headers, data and digests.
const PDU_BYTES_MAX: usize = (256 << 10) + 2048;
const _: () = assert!(RECEIVE_SEGMENT_BYTES as usize + 48 + 4 * 255 + 8 <= PDU_BYTES_MAX);

type ConnectedInitiator = ConnectedClient<Frames>;

impl Protocol for TargetShared {
    type Reply = Frames;
    const THREAD_NAMES: ThreadNames = ThreadNames {
        listener: "iscsi-listener",
        connection: "iscsi-session",
    };

    fn core(&self) -> &ServerCore {
        &self.core
    }

    fn serve(self: &Arc<Self>, client: &ConnectedInitiator) {
        serve(self, client);
    }

    fn too_many(&self, peer: &Peer, _limit: ReachedLimit) {
        self.events.target_event(&TargetEvent::TooMany { peer });
    }

    fn accept_failed(&self, error: &std::io::Error) {
        self.events.target_event(&TargetEvent::AcceptFailed { error });
    }
}

/// Serves an initiator until the connection ends.
fn serve(shared: &Arc<TargetShared>, client: &ConnectedInitiator) {
    let ConnectedInitiator {
        peer, stream, outbox, ..
    } = client;
    shared.events.target_event(&TargetEvent::Connected { peer });
    let mut receiver = Receiver::new(Arc::clone(stream), Arc::clone(&shared.core.clock));
    let reason = match log_in(shared, stream, &mut receiver) {
        Ok((logged_in, numbers)) => {
            client.enter();
            run_session(shared, client, receiver, &logged_in, numbers)
        }
        Err(reason) => {
            // The response to the last login request was sent.
            outbox.wait_until_empty();
            reason
        }
    };
    let reason = match reason {
        InitiatorGone::ByInitiator | InitiatorGone::Abandoned(_) if shared.core.is_stopping() => {
            InitiatorGone::ByServer
        }
        reason => reason,
    };
    stream.close_gracefully();
    shared
        .events
        .target_event(&TargetEvent::Disconnected { peer, reason: &reason });
}

/// Enters a session, runs it to its end, and removes all that belongs to it.
fn run_session(
    shared: &Arc<TargetShared>,
    client: &ConnectedInitiator,
    receiver: Receiver,
    logged_in: &LoggedIn,
    numbers: SequenceNumbers,
) -> InitiatorGone {
    let target = logged_in.target.as_ref();
    let known = RegisteredSession {
        port: logged_in.initiator.clone(),
        target: target.map(|target| target.name().to_owned()),
        stream: Arc::clone(&client.stream),
    };
    shared
        .sessions
        .enter(logged_in.session_handle, known, &*shared.core.clock);
    shared.events.target_event(&TargetEvent::LoggedIn {
        peer: &client.peer,
        initiator: &logged_in.initiator.name,
        target: target.map(|target| target.name()),
    });
    let nexus = Nexus {
        id: client.peer.connection,
        port: logged_in.initiator.clone(),
    };
    let exchange = Arc::new(Exchange::new(numbers));
    let session = entered_session(shared, client, logged_in, &exchange);
    let _place = SessionPlace {
        shared,
        target,
        nexus: nexus.clone(),
        handle: logged_in.session_handle,
    };
    if target.is_some_and(|target| !target.enter(session)) {
        return InitiatorGone::TargetRemoved;
    }
    let info = Arc::new(SessionInfo {
        nexus,
        target: logged_in.target.clone(),
    });
    let portal = client.stream.local_address();
    let directory = TargetDirectory {
        targets: Arc::clone(&shared.targets),
        portal: portal.map_or_else(String::new, |address| address.to_string()),
    };
    let parameters = logged_in.parameters;
    let session = TargetSession::new(info, exchange, parameters, logged_in.connection_id, directory);
    let connection = TargetConnection {
        shared: Arc::clone(shared),
        client: client.clone(),
        dispatch: Arc::new(DispatchPolicy::new()),
        digests: parameters.digests,
        session,
        receiver,
        unsent_bytes: 0,
        starved_since: None,
    };
    let reason = connection.run();
    // The session lasts until the workers have finished its tasks: a session that replaces it must not overtake them.
    client.outbox.wait_until_empty();
    reason
}

/// The session as its target knows it.
fn entered_session(
    shared: &TargetShared,
    client: &ConnectedInitiator,
    logged_in: &LoggedIn,
    exchange: &Arc<Exchange>,
) -> EnteredSession {
    EnteredSession {
        nexus: Nexus {
            id: client.peer.connection,
            port: logged_in.initiator.clone(),
        },
        entry: ClientEntry {
            protocol: ClientProtocol::Iscsi,
            peer: client.peer.name.clone(),
            name: Some(logged_in.initiator.name.clone()),
            since: shared.core.clock.now(),
        },
        ending: Arc::new(SessionEnding {
            exchange: Arc::clone(exchange),
            outbox: Arc::clone(&client.outbox),
            stream: Arc::clone(&client.stream),
            digests: logged_in.parameters.digests,
            is_asked: AtomicBool::new(false),
        }),
    }
}

/// The place of a session in its target and among the sessions of the server. It is left when this is dropped, even if
/// the thread of the session panics.
struct SessionPlace<'a> {
    shared: &'a TargetShared,
    target: Option<&'a Arc<Target>>,
    nexus: Nexus,
    handle: u16,
}

impl Drop for SessionPlace<'_> {
    fn drop(&mut self) {
        if let Some(target) = self.target {
            target.leave(&self.nexus);
        }
        self.shared.sessions.remove(self.handle);
    }
}

/// The receiving thread of a connection in the full feature phase.
struct TargetConnection {
    shared: Arc<TargetShared>,
    client: ConnectedInitiator,
    dispatch: Arc<DispatchPolicy>,
    digests: Digests,
    session: TargetSession,
    receiver: Receiver,
    /// Bytes of responses that this thread has queued and not sent.
    unsent_bytes: usize,
    /// Since when commands hold memory, and no data made one of them complete.
    starved_since: Option<Duration>,
}

impl TargetConnection {
    fn run(mut self) -> InitiatorGone {
        let reason = loop {
            if let Err(reason) = self.take_ready() {
                break reason;
            }
        };
        // Pending responses are still sent, if possible.
        drop(self.send());
        reason
    }

    /// Handles all received PDUs, sends the responses, and receives more.
    fn take_ready(&mut self) -> Result<(), InitiatorGone> {
        loop {
            let bytes = self.receiver.bytes();
            let (step, length) = match parse(bytes, self.digests, RECEIVE_SEGMENT_BYTES as usize) {
                Parsed::Incomplete => break,
                Parsed::Malformed(reason) => return Err(InitiatorGone::Malformed(reason)),
                Parsed::Pdu(pdu, length) => {
                    let mut queue = own_queue(&self.client.outbox, &mut self.unsent_bytes);
                    (self.session.receive(&pdu, &mut queue), length)
                }
            };
            self.receiver.consume(length);
            self.take_step(step)?;
            self.grant_memory()?;
            if self.unsent_bytes >= BATCH_BYTES {
                self.send()?;
            }
        }
        self.send()?;
        self.check_progress()?;
        self.receive()
    }

    fn receive(&mut self) -> Result<(), InitiatorGone> {
        let waiting = if self.receiver.bytes().is_empty() {
            Waiting::ForNext(Some(PING_INTERVAL.min(self.shared.core.limits().stall)))
        } else {
            Waiting::ForRest(self.shared.core.limits().stall)
        };
        match self.receiver.fill(PDU_BYTES_MAX, waiting) {
            Ok(()) => Ok(()),
            Err(ReceiveEnd::Idle) => {
                let mut queue = own_queue(&self.client.outbox, &mut self.unsent_bytes);
                if self.session.ping(&mut queue) {
                    Ok(())
                } else {
                    Err(InitiatorGone::Abandoned("the initiator does not answer a ping"))
                }
            }
            Err(end) => Err(end.into()),
        }
    }

    /// Closes the connection of an initiator that holds memory for data that it does not send.
    fn check_progress(&mut self) -> Result<(), InitiatorGone> {
        if !self.session.holds_memory() {
            self.starved_since = None;
            return Ok(());
        }
        let now = self.shared.core.clock.now();
        let since = *self.starved_since.get_or_insert(now);
        if now.saturating_sub(since) > self.shared.core.limits().stall {
            return Err(InitiatorGone::Abandoned(
                "the initiator does not send the data that it announced",
            ));
        }
        Ok(())
    }

    fn take_step(&mut self, step: Step) -> Result<(), InitiatorGone> {
        match step {
            Step::Continue => Ok(()),
            Step::Execute(task) => {
                if task.lease.is_some() {
                    self.starved_since = None;
                }
                self.execute(*task)
            }
            Step::LoggedOut => Err(InitiatorGone::LoggedOut),
            Step::TargetReset => {
                self.send()?;
                if let Some(target) = &self.session.info.target {
                    self.shared.sessions.close_target(target.name());
                }
                Err(InitiatorGone::Replaced)
            }
            Step::Malformed(reason) => Err(InitiatorGone::Malformed(reason)),
        }
    }

    /// Gives memory to the commands that wait for it.
    ///
    /// This thread must not wait for memory while commands of its own hold some: only this thread can receive the data
    /// that completes them. They are granted more when one of them is complete.
    fn grant_memory(&mut self) -> Result<(), InitiatorGone> {
        while let Some(wanted) = self.session.wanted_memory() {
            let lease = match self.shared.core.budget().try_take(self.client.key.origin, wanted.bytes) {
                Some(lease) => lease,
                None if self.session.holds_memory() => return Ok(()),
                None => {
                    self.send()?;
                    self.shared.core.budget().take(self.client.key.origin, wanted.bytes)
                }
            };
            let step = {
                let mut queue = own_queue(&self.client.outbox, &mut self.unsent_bytes);
                self.session.grant(wanted.task_tag, lease, &mut queue)
            };
            self.take_step(step)?;
        }
        Ok(())
    }

    fn execute(&mut self, task: ReadyTask) -> Result<(), InitiatorGone> {
        if task.command.order == TaskOrder::Ordered {
            self.send()?;
            self.client.outbox.wait_until_empty();
        }
        let work = work_of(&task);
        let is_inline = work.is_none_or(|work| self.dispatch.choose(work.class) == Dispatch::Inline);
        let execution = Execution {
            clock: Arc::clone(&self.shared.core.clock),
            events: Arc::clone(&self.shared.events),
            peer: Arc::clone(&self.client.peer),
            info: Arc::clone(&self.session.info),
            dispatch: Arc::clone(&self.dispatch),
            work,
        };
        let exchange = Arc::clone(&self.session.exchange);
        if is_inline {
            let frames = execution.run(&task);
            let mut lease = task.lease;
            let unsent_bytes = &mut self.unsent_bytes;
            let outbox = &self.client.outbox;
            exchange.complete(task.command.task_tag, frames, &mut |queued| match queued {
                Queued::OfTask(frames) => {
                    *unsent_bytes += frames.len();
                    outbox.push_own(frames, lease.take());
                }
                Queued::Own(frames) => {
                    *unsent_bytes += frames.len();
                    outbox.push_own(frames, None);
                }
            });
            return Ok(());
        }
        let bytes = task.byte_count();
        if !self.client.outbox.has_room(bytes) {
            self.send()?;
        }
        self.client.outbox.admit(bytes);
        let outbox = Arc::clone(&self.client.outbox);
        let run = move || {
            let frames = execution.run(&task);
            let mut cost = Some(RequestCost {
                bytes,
                lease: task.lease,
            });
            exchange.complete(
                task.command.task_tag,
                frames,
                &mut |queued| match (queued, cost.take()) {
                    (Queued::OfTask(frames), Some(cost)) => outbox.push(frames, cost),
                    (Queued::OfTask(frames) | Queued::Own(frames), _) => outbox.push_own(frames, None),
                },
            );
            outbox.send_ready();
        };
        self.shared.core.workers().submit(self.client.key, Box::new(run));
        Ok(())
    }

    fn send(&mut self) -> Result<(), InitiatorGone> {
        self.unsent_bytes = 0;
        self.client.outbox.send(&[]).map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => InitiatorGone::Abandoned("the initiator does not take its responses"),
            _ => InitiatorGone::Io(error),
        })
    }
}

/// Queues responses of the receiving thread.
fn own_queue<'a>(outbox: &'a Outbox<Frames>, unsent_bytes: &'a mut usize) -> impl FnMut(Queued) + use<'a> {
    move |queued| {
        let (Queued::OfTask(frames) | Queued::Own(frames)) = queued;
        *unsent_bytes += frames.len();
        outbox.push_own(frames, None);
    }
}
