//! Serves one connection of an initiator: the login, then requests until the session ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast_block::Clock;

use super::super::frames::{Frames, SequenceNumbers};
use super::super::login::{LoggedIn, RECEIVE_SEGMENT_BYTES};
use super::super::nexus::Nexus;
use super::super::pdu::{Digests, Parsed, parse};
use super::super::session::{Directory, Exchange, Queued, ReadyTask, SessionInfo, Step, TargetSession, TaskOrder};
use super::super::target::Target;
use super::directory::KnownSession;
use super::event::{InitiatorGone, TargetEvent};
use super::execution::{Execution, work_of};
use super::login_phase::log_in;
use super::shared::TargetShared;
use crate::server::connections::{ConnectedClient, Protocol, ThreadNames};
use crate::server::dispatch::{Dispatch, DispatchPolicy};
use crate::server::limits::Limits;
use crate::server::outbox::{Outbox, RequestCost, WorkerQuota};
use crate::server::peer::Peer;
use crate::server::receive::{ReceiveEnd, Receiver, Waiting};
use crate::stream::SocketStream;

/// Responses are sent when they reach this size, even if more requests wait.
const BATCH_BYTES: usize = 256 << 10;
/// Interval of pings to an idle initiator.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// The longest PDU: header, additional headers, data and digests.
const PDU_BYTES_MAX: usize = (256 << 10) + 2048;
const _: () = assert!(RECEIVE_SEGMENT_BYTES as usize + 48 + 4 * 255 + 8 <= PDU_BYTES_MAX);

/// A connected initiator.
#[derive(Clone)]
pub(super) struct ConnectedInitiator {
    peer: Arc<Peer>,
    stream: Arc<SocketStream>,
    outbox: Arc<Outbox<Frames>>,
    has_entered: Arc<AtomicBool>,
}

impl ConnectedClient for ConnectedInitiator {
    fn has_entered(&self) -> bool {
        self.has_entered.load(Ordering::Relaxed)
    }

    fn is_busy(&self) -> bool {
        !self.outbox.is_empty()
    }
}

impl Protocol for TargetShared {
    type Client = ConnectedInitiator;
    const THREAD_NAMES: ThreadNames = ThreadNames {
        listener: "iscsi-listener",
        connection: "iscsi-session",
    };

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    fn stop_flag(&self) -> &AtomicBool {
        &self.is_stopping
    }

    fn client(&self, peer: Arc<Peer>, stream: Arc<SocketStream>) -> ConnectedInitiator {
        let quota = WorkerQuota {
            request_count_max: self.limits.request_count_max,
            bytes_max: self.limits.request_bytes_max,
        };
        ConnectedInitiator {
            peer,
            outbox: Arc::new(Outbox::new(Arc::clone(&stream), quota)),
            stream,
            has_entered: Arc::default(),
        }
    }

    fn serve(self: &Arc<Self>, client: &ConnectedInitiator) {
        serve(self, client);
    }

    fn too_many(&self, peer: &Peer) {
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
    let mut receiver = Receiver::new(Arc::clone(stream), Arc::clone(&shared.clock));
    let reason = match log_in(shared, stream, &mut receiver) {
        Ok((logged_in, numbers)) => {
            client.has_entered.store(true, Ordering::Relaxed);
            run_session(shared, client, receiver, &logged_in, numbers)
        }
        Err(reason) => {
            // The response to the last login request was sent.
            outbox.wait_until_empty();
            reason
        }
    };
    let reason = match reason {
        InitiatorGone::ByInitiator | InitiatorGone::Abandoned(_) if shared.is_stopping.load(Ordering::Relaxed) => {
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
    let known = KnownSession {
        port: logged_in.initiator.clone(),
        target: target.map(|target| target.name().to_owned()),
        stream: Arc::clone(&client.stream),
    };
    shared.sessions.enter(logged_in.session_handle, known, &*shared.clock);
    shared.events.target_event(&TargetEvent::LoggedIn {
        peer: &client.peer,
        initiator: &logged_in.initiator.name,
        target: target.map(|target| target.name()),
    });
    let nexus = Nexus {
        id: client.peer.connection,
        port: logged_in.initiator.clone(),
    };
    let _entered = EnteredSession::enter(shared, target, nexus.clone(), logged_in.session_handle);
    let info = Arc::new(SessionInfo {
        nexus,
        target: logged_in.target.clone(),
    });
    let portal = client.stream.local_address();
    let directory = Directory {
        targets: Arc::clone(&shared.targets),
        portal: portal.map_or_else(String::new, |address| address.to_string()),
    };
    let exchange = Arc::new(Exchange::new(numbers));
    let parameters = logged_in.parameters;
    let session = TargetSession::new(info, exchange, parameters, logged_in.connection_id, directory);
    let connection = TargetConnection {
        shared: Arc::clone(shared),
        peer: Arc::clone(&client.peer),
        outbox: Arc::clone(&client.outbox),
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

/// A session that has entered its units. It leaves them when it is dropped, even if its thread panics.
struct EnteredSession<'a> {
    shared: &'a TargetShared,
    target: Option<&'a Arc<Target>>,
    nexus: Nexus,
    handle: u16,
}

impl<'a> EnteredSession<'a> {
    fn enter(shared: &'a TargetShared, target: Option<&'a Arc<Target>>, nexus: Nexus, handle: u16) -> Self {
        for unit in target.into_iter().flat_map(|target| target.units()) {
            unit.enter(&nexus);
        }
        Self {
            shared,
            target,
            nexus,
            handle,
        }
    }
}

impl Drop for EnteredSession<'_> {
    fn drop(&mut self) {
        for unit in self.target.into_iter().flat_map(|target| target.units()) {
            unit.leave(&self.nexus);
        }
        self.shared.sessions.remove(self.handle);
    }
}

/// The receiving thread of a connection in the full feature phase.
struct TargetConnection {
    shared: Arc<TargetShared>,
    peer: Arc<Peer>,
    outbox: Arc<Outbox<Frames>>,
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
                    let mut queue = own_queue(&self.outbox, &mut self.unsent_bytes);
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
            Waiting::ForNext(Some(PING_INTERVAL.min(self.shared.limits.stall)))
        } else {
            Waiting::ForRest(self.shared.limits.stall)
        };
        match self.receiver.fill(PDU_BYTES_MAX, waiting) {
            Ok(()) => Ok(()),
            Err(ReceiveEnd::Idle) => {
                let mut queue = own_queue(&self.outbox, &mut self.unsent_bytes);
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
        let now = self.shared.clock.now();
        let since = *self.starved_since.get_or_insert(now);
        if now.saturating_sub(since) > self.shared.limits.stall {
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
            let lease = match self.shared.budget.try_take(wanted.bytes) {
                Some(lease) => lease,
                None if self.session.holds_memory() => return Ok(()),
                None => {
                    self.send()?;
                    self.shared.budget.take(wanted.bytes)
                }
            };
            let step = {
                let mut queue = own_queue(&self.outbox, &mut self.unsent_bytes);
                self.session.grant(wanted.task_tag, lease, &mut queue)
            };
            self.take_step(step)?;
        }
        Ok(())
    }

    fn execute(&mut self, task: ReadyTask) -> Result<(), InitiatorGone> {
        if task.command.order == TaskOrder::Ordered {
            self.send()?;
            self.outbox.wait_until_empty();
        }
        let work = work_of(&task);
        let is_inline = work.is_none_or(|work| self.dispatch.choose(work.class) == Dispatch::Inline);
        let execution = Execution {
            clock: Arc::clone(&self.shared.clock),
            events: Arc::clone(&self.shared.events),
            peer: Arc::clone(&self.peer),
            info: Arc::clone(&self.session.info),
            dispatch: Arc::clone(&self.dispatch),
            work,
        };
        let exchange = Arc::clone(&self.session.exchange);
        if is_inline {
            let frames = execution.run(&task);
            let mut lease = task.lease;
            let unsent_bytes = &mut self.unsent_bytes;
            let outbox = &self.outbox;
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
        if !self.outbox.has_room(bytes) {
            self.send()?;
        }
        self.outbox.admit(bytes);
        let outbox = Arc::clone(&self.outbox);
        let connection = self.peer.connection;
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
        self.shared.workers.submit(connection, Box::new(run));
        Ok(())
    }

    fn send(&mut self) -> Result<(), InitiatorGone> {
        self.unsent_bytes = 0;
        self.outbox.send(&[]).map_err(|error| match error.kind() {
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
