//! One operation of one thread: a few requests in flight at once, and their replies.

use std::sync::{Arc, Condvar, PoisonError};

use holdfast_block::{Request, RequestKind, to_usize};

use super::command::ClientCommand;
use super::connection::{Chunk, Connection, ConnectionLost, Delivery, ReadToken, SendMode};
use super::status::Status;
use super::transmission::{Answer, ChunkPosition, ReplyEvent, ServerFailure};
use super::{Error, Loss};
use crate::nbd::wire::ErrorNumber;

/// Data of at least this length is left for the thread that waits for it. Copying less is cheaper than waking that
/// thread.
const LEFT_BYTES_MIN: u64 = 32 << 10;

/// A command with the data that it writes.
pub(super) type CommandWithData<'d> = (ClientCommand, &'d [u8]);

/// The requests of one operation on one connection.
pub(super) struct Call<'c, 'b> {
    connection: &'c Connection,
    id: u64,
    wake: Arc<Condvar>,
    /// The buffer for the data, and the export offset of its first byte. All reads lie inside the buffer.
    target: &'b mut [u8],
    base: u64,
    in_flight_count: usize,
    statuses: Vec<(Request, Vec<Status>)>,
    failure: Option<Error>,
}

/// The read token while a thread holds it. If it is dropped without being passed on, the connection is closed, because
/// no other thread could read any more.
struct HeldToken<'c> {
    connection: &'c Connection,
    read_token: Option<ReadToken>,
}

impl HeldToken<'_> {
    fn read_token(&mut self) -> &mut ReadToken {
        self.read_token
            .as_mut()
            .expect("the token is passed on only at the end")
    }
}

impl Drop for HeldToken<'_> {
    fn drop(&mut self) {
        if self.read_token.is_some() {
            self.connection.disconnect(Loss::Abandoned);
        }
    }
}

/// Whether this thread still holds the read token.
enum ReadStep {
    /// This thread holds the token and continues to read.
    Continue,
    /// Another thread holds the token.
    TokenPassed,
}

impl<'c, 'b> Call<'c, 'b> {
    /// An operation that reads into `target`; `base` is the export offset of the first byte of `target`.
    pub(super) fn new(connection: &'c Connection, target: &'b mut [u8], base: u64) -> Result<Self, Error> {
        let (id, wake) = connection.register()?;
        Ok(Self {
            connection,
            id,
            wake,
            target,
            base,
            in_flight_count: 0,
            statuses: Vec::new(),
            failure: None,
        })
    }

    /// Runs all requests, at most `window` (at least 1) at a time, and returns the replies to queries.
    ///
    /// After the first error no further request is sent; the requests in flight are awaited.
    pub(super) fn run<'d>(
        mut self,
        sendings: impl Iterator<Item = CommandWithData<'d>>,
        window: usize,
    ) -> Result<Vec<(Request, Vec<Status>)>, Error> {
        let mut sendings = sendings.peekable();
        let mut batch: Vec<ClientCommand> = Vec::new();
        loop {
            while self.failure.is_none() && self.in_flight_count < window {
                batch.clear();
                let mut payload: &[u8] = &[];
                // Commands without data are batched; a write is sent alone.
                while payload.is_empty() && self.in_flight_count + batch.len() < window {
                    let is_next = |sending: &CommandWithData| sending.1.is_empty() || batch.is_empty();
                    let Some((command, data)) = sendings.next_if(is_next) else {
                        break;
                    };
                    batch.push(command);
                    payload = data;
                }
                if batch.is_empty() {
                    break;
                }
                if !self.send(&batch, payload)? {
                    // Another thread is sending: read replies first.
                    self.wait()?;
                    self.send_late(&batch, payload)?;
                }
            }
            match (self.in_flight_count, self.failure.take()) {
                (0, Some(failure)) => return Err(failure),
                (0, None) => return Ok(std::mem::take(&mut self.statuses)),
                (_, failure) => self.failure = failure,
            }
            let waited = self.wait();
            // The error of a request is more specific than the loss of connection that may follow.
            waited.map_err(|lost| self.failure.take().unwrap_or(lost))?;
        }
    }

    fn send(&mut self, commands: &[ClientCommand], payload: &[u8]) -> Result<bool, Error> {
        let turn = if self.in_flight_count == 0 {
            SendMode::Wait
        } else {
            SendMode::IfFree
        };
        match self.connection.send(self.id, commands, payload, turn) {
            Ok(true) => {
                self.in_flight_count += commands.len();
                Ok(true)
            }
            Ok(false) => Ok(false),
            Err(ConnectionLost) => Err(self.connection.loss_error()),
        }
    }

    /// Sends commands that could not be sent at once, and reads replies meanwhile.
    fn send_late(&mut self, commands: &[ClientCommand], payload: &[u8]) -> Result<(), Error> {
        while !self.send(commands, payload)? {
            self.wait()?;
        }
        Ok(())
    }

    /// Waits for the reply to at least one request.
    fn wait(&mut self) -> Result<(), Error> {
        let before = self.in_flight_count;
        while self.in_flight_count == before {
            let mut state = self.connection.lock();
            let (deliveries, read_token) = loop {
                if state.loss.is_some() {
                    drop(state);
                    return Err(self.connection.loss_error());
                }
                let slot = state.calls.get_mut(&self.id).expect("the call is registered");
                slot.is_parked = false;
                let deliveries = std::mem::take(&mut slot.deliveries);
                let read_token = slot.read_token.take();
                if !deliveries.is_empty() || read_token.is_some() {
                    if read_token.is_none() {
                        // The wake-up may have been meant for a thread that can take the read token.
                        state.wake_reader();
                    }
                    break (deliveries, read_token);
                }
                if let Some(read_token) = state.read_token.take() {
                    break (deliveries, Some(read_token));
                }
                let slot = state.calls.get_mut(&self.id).expect("the call is registered");
                slot.is_parked = true;
                state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            drop(state);
            let held = read_token.map(|read_token| HeldToken {
                connection: self.connection,
                read_token: Some(read_token),
            });
            for delivery in deliveries {
                self.accept(delivery);
            }
            // Replies that arrived before the connection was lost are still valid; the next request reports the loss.
            if let Some(held) = held
                && self.read_for_all(held, before).is_err()
                && self.in_flight_count == before
            {
                return Err(self.connection.loss_error());
            }
        }
        Ok(())
    }

    /// Reads replies for all calls, until fewer than `before` requests of this call are in flight and the received
    /// bytes contain no complete reply.
    fn read_for_all(&mut self, mut held: HeldToken<'c>, before: usize) -> Result<(), ConnectionLost> {
        loop {
            let step = match held.read_token().chunk {
                Some(chunk) => self.move_data(&mut held, chunk, before)?,
                None => self.decode_next(&mut held, before)?,
            };
            if matches!(step, ReadStep::TokenPassed) {
                return Ok(());
            }
        }
    }

    /// Parses the received bytes up to the next data. If they are not sufficient, reads more, or returns the read
    /// token.
    fn decode_next(&mut self, held: &mut HeldToken<'c>, before: usize) -> Result<ReadStep, ConnectionLost> {
        let connection = self.connection;
        let mut state = connection.lock();
        if state.loss.is_some() {
            return Err(ConnectionLost);
        }
        let received = state.transmission.receive(held.read_token().inbox.bytes());
        let (consumed, event) = match received {
            Ok(received) => received,
            Err(violation) => {
                drop(state);
                return Err(connection.disconnect(Loss::Violation(violation)));
            }
        };
        held.read_token().inbox.consume(consumed);
        match event {
            ReplyEvent::NeedBytes(_) if self.in_flight_count < before => {
                state.read_token = held.read_token.take();
                state.wake_reader();
                return Ok(ReadStep::TokenPassed);
            }
            ReplyEvent::NeedBytes(count) => {
                drop(state);
                let inbox = &mut held.read_token().inbox;
                inbox.fill(count, |buffers| connection.read(buffers))?;
            }
            ReplyEvent::Continue => {}
            ReplyEvent::Data {
                cookie,
                ticket,
                offset,
                length,
                position,
            } => {
                held.read_token().chunk = Some(Chunk {
                    cookie,
                    call: ticket.call,
                    offset,
                    length,
                    position,
                });
            }
            ReplyEvent::Zeroes {
                ticket,
                offset,
                length,
                answer,
            } => {
                let deliveries = [Some(Delivery::Zeroes { offset, length }), answer.map(Delivery::Answer)];
                let deliveries = deliveries.into_iter().flatten();
                if ticket.call == self.id {
                    drop(state);
                    deliveries.for_each(|delivery| self.accept(delivery));
                } else {
                    deliveries.for_each(|delivery| state.deliver(ticket.call, delivery));
                }
            }
            ReplyEvent::Answer(answer) if answer.ticket.call == self.id => {
                drop(state);
                self.finish(answer);
            }
            ReplyEvent::Answer(answer) => state.deliver(answer.ticket.call, Delivery::Answer(answer)),
        }
        Ok(ReadStep::Continue)
    }

    /// Copies data to its call, or leaves that to the thread of that call.
    fn move_data(&mut self, held: &mut HeldToken<'c>, chunk: Chunk, before: usize) -> Result<ReadStep, ConnectionLost> {
        let connection = self.connection;
        let read = |buffers: &mut [std::io::IoSliceMut]| connection.read(buffers);
        if chunk.call == self.id {
            let from = to_usize(chunk.offset - self.base);
            let target = &mut self.target[from..from + to_usize(chunk.length)];
            held.read_token().inbox.read_to(target, read)?;
            held.read_token().chunk = None;
            if chunk.position == ChunkPosition::Last {
                let answer = self.complete(chunk)?;
                self.finish(answer);
            }
            return Ok(ReadStep::Continue);
        }
        let is_wanted = {
            let mut state = connection.lock();
            let state = &mut *state;
            if let Some(slot) = state.calls.get_mut(&chunk.call) {
                let is_here = held.read_token().inbox.bytes().len() as u64 >= chunk.length;
                if slot.is_parked && chunk.length >= LEFT_BYTES_MIN && !is_here {
                    slot.read_token = held.read_token.take();
                    slot.wake.notify_one();
                    return Ok(ReadStep::TokenPassed);
                }
                if self.in_flight_count < before && !is_here {
                    state.read_token = held.read_token.take();
                    state.wake_reader();
                    return Ok(ReadStep::TokenPassed);
                }
                true
            } else {
                false
            }
        };
        let mut bytes = Vec::new();
        if is_wanted {
            // The length is at most that of the request, which this client has chosen.
            bytes.resize(to_usize(chunk.length), 0);
            held.read_token().inbox.read_to(&mut bytes, read)?;
        } else {
            held.read_token().inbox.skip(chunk.length, read)?;
        }
        held.read_token().chunk = None;
        let answer = match chunk.position {
            ChunkPosition::Last => Some(self.complete(chunk)?),
            ChunkPosition::More => None,
        };
        let mut state = connection.lock();
        let offset = chunk.offset;
        state.deliver(chunk.call, Delivery::Bytes { offset, bytes });
        if let Some(answer) = answer {
            state.deliver(chunk.call, Delivery::Answer(answer));
        }
        Ok(ReadStep::Continue)
    }

    fn complete(&self, chunk: Chunk) -> Result<Answer, ConnectionLost> {
        let answer = self.connection.lock().transmission.complete(chunk.cookie);
        answer.map_err(|violation| self.connection.disconnect(Loss::Violation(violation)))
    }

    fn accept(&mut self, delivery: Delivery) {
        match delivery {
            Delivery::Bytes { offset, bytes } => {
                let from = to_usize(offset - self.base);
                self.target[from..from + bytes.len()].copy_from_slice(&bytes);
            }
            Delivery::Zeroes { offset, length } => {
                let from = to_usize(offset - self.base);
                self.target[from..from + to_usize(length)].fill(0);
            }
            Delivery::Answer(answer) => self.finish(answer),
        }
    }

    fn finish(&mut self, answer: Answer) {
        self.in_flight_count -= 1;
        let request = answer.command.request;
        match answer.result {
            Ok(statuses) if request.kind == RequestKind::Extents => self.statuses.push((request, statuses)),
            Ok(_) => {}
            Err(ServerFailure { number, message }) => {
                let server = self.connection.server().clone();
                self.failure.get_or_insert(Error::Server {
                    server,
                    request,
                    number,
                    message,
                });
                if number == ErrorNumber::ESHUTDOWN.0 {
                    // "If the client receives an NBD_ESHUTDOWN error it MUST initiate a soft disconnect."
                    self.connection.disconnect(Loss::ShuttingDown);
                }
            }
        }
    }
}

impl Drop for Call<'_, '_> {
    fn drop(&mut self) {
        self.connection.unregister(self.id);
    }
}
