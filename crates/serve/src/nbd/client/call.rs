//! One operation of one thread: a few requests, in flight at once, and their answers.

use std::sync::{Arc, Condvar, PoisonError};

use holdfast_block::{Request, RequestKind, to_usize};

use super::command::Command;
use super::connection::{Baton, Chunk, Connection, Gone, Mail, Turn};
use super::dialogue::{Answer, Event, Failure, Sequel};
use super::status::Status;
use super::{Error, Loss};
use crate::nbd::wire::ErrorNumber;

/// Data that is left to the thread that waits for it; less is copied, which is quicker than to wake that thread.
const LEFT_BYTES_MIN: u64 = 32 << 10;

/// A request, with what it writes.
pub(super) type Sending<'d> = (Command, &'d [u8]);

/// The requests of one operation on one connection.
pub(super) struct Call<'c, 'b> {
    connection: &'c Connection,
    id: u64,
    wake: Arc<Condvar>,
    /// Where data go: memory, and the offset in the export of its first byte. All reads lie inside.
    target: &'b mut [u8],
    base: u64,
    in_flight_count: usize,
    statuses: Vec<(Request, Vec<Status>)>,
    failure: Option<Error>,
}

/// The baton in the hands of a thread. Lost, it takes the connection with it: nobody could read any more.
struct Hand<'c> {
    connection: &'c Connection,
    baton: Option<Baton>,
}

impl Hand<'_> {
    fn baton(&mut self) -> &mut Baton {
        self.baton.as_mut().expect("it is passed on at the end only")
    }
}

impl Drop for Hand<'_> {
    fn drop(&mut self) {
        if self.baton.is_some() {
            self.connection.lose(Loss::Abandoned);
        }
    }
}

/// What became of the baton.
enum Course {
    /// Go on.
    Continue,
    /// Another thread has it.
    Passed,
}

impl<'c, 'b> Call<'c, 'b> {
    /// An operation that reads into `target`, whose first byte is that at `base` of the export.
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

    /// Does all requests, at most `window` (at least 1) of them at once, and gives the answers to queries.
    ///
    /// After the first error no further request is sent; those under way are waited for.
    pub(super) fn run<'d>(
        mut self,
        sendings: impl Iterator<Item = Sending<'d>>,
        window: usize,
    ) -> Result<Vec<(Request, Vec<Status>)>, Error> {
        let mut sendings = sendings.peekable();
        let mut batch: Vec<Command> = Vec::new();
        loop {
            while self.failure.is_none() && self.in_flight_count < window {
                batch.clear();
                let mut payload: &[u8] = &[];
                // What carries nothing goes together; what is written goes alone.
                while payload.is_empty() && self.in_flight_count + batch.len() < window {
                    let is_next = |sending: &Sending| sending.1.is_empty() || batch.is_empty();
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
                    // Others send: what is under way comes first.
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
            // The error of a request tells more than the loss that may come of it.
            waited.map_err(|lost| self.failure.take().unwrap_or(lost))?;
        }
    }

    fn send(&mut self, commands: &[Command], payload: &[u8]) -> Result<bool, Error> {
        let turn = if self.in_flight_count == 0 {
            Turn::Wait
        } else {
            Turn::IfFree
        };
        match self.connection.send(self.id, commands, payload, turn) {
            Ok(true) => {
                self.in_flight_count += commands.len();
                Ok(true)
            }
            Ok(false) => Ok(false),
            Err(Gone) => Err(self.connection.lost()),
        }
    }

    /// Sends what could not be sent at once, however long it takes; reads meanwhile.
    fn send_late(&mut self, commands: &[Command], payload: &[u8]) -> Result<(), Error> {
        while !self.send(commands, payload)? {
            self.wait()?;
        }
        Ok(())
    }

    /// Waits for the answer to at least one request.
    fn wait(&mut self) -> Result<(), Error> {
        let before = self.in_flight_count;
        while self.in_flight_count == before {
            let mut state = self.connection.lock();
            let (mail, baton) = loop {
                if state.loss.is_some() {
                    drop(state);
                    return Err(self.connection.lost());
                }
                let slot = state.calls.get_mut(&self.id).expect("the call is registered");
                slot.is_parked = false;
                let mail = std::mem::take(&mut slot.mail);
                let baton = slot.baton.take();
                if !mail.is_empty() || baton.is_some() {
                    if baton.is_none() {
                        // The wake-up may have been meant for whoever takes the baton.
                        state.wake_reader();
                    }
                    break (mail, baton);
                }
                if let Some(baton) = state.baton.take() {
                    break (mail, Some(baton));
                }
                let slot = state.calls.get_mut(&self.id).expect("the call is registered");
                slot.is_parked = true;
                state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            drop(state);
            let hand = baton.map(|baton| Hand {
                connection: self.connection,
                baton: Some(baton),
            });
            for mail in mail {
                self.take_in(mail);
            }
            // What was answered stays answered, whatever came behind it: the loss meets the next request.
            if let Some(hand) = hand
                && self.lead(hand, before).is_err()
                && self.in_flight_count == before
            {
                return Err(self.connection.lost());
            }
        }
        Ok(())
    }

    /// Reads for all, until fewer than `before` requests of this call are under way and nothing more is there to be understood.
    fn lead(&mut self, mut hand: Hand<'c>, before: usize) -> Result<(), Gone> {
        loop {
            let step = match hand.baton().chunk {
                Some(chunk) => self.move_data(&mut hand, chunk, before)?,
                None => self.understand(&mut hand, before)?,
            };
            if matches!(step, Course::Passed) {
                return Ok(());
            }
        }
    }

    /// Understands what is there, up to the next data; reads on, or puts the baton down, when it is not enough.
    fn understand(&mut self, hand: &mut Hand<'c>, before: usize) -> Result<Course, Gone> {
        let connection = self.connection;
        let mut state = connection.lock();
        if state.loss.is_some() {
            return Err(Gone);
        }
        let received = state.dialogue.receive(hand.baton().inbox.bytes());
        let (consumed, event) = match received {
            Ok(received) => received,
            Err(violation) => {
                drop(state);
                return Err(connection.lose(Loss::Violation(violation)));
            }
        };
        hand.baton().inbox.consume(consumed);
        match event {
            Event::Wanted(_) if self.in_flight_count < before => {
                state.baton = hand.baton.take();
                state.wake_reader();
                return Ok(Course::Passed);
            }
            Event::Wanted(count) => {
                drop(state);
                let inbox = &mut hand.baton().inbox;
                inbox.fill(count, |buffers| connection.read(buffers))?;
            }
            Event::Noted => {}
            Event::Data {
                cookie,
                ticket,
                offset,
                length,
                sequel,
            } => {
                hand.baton().chunk = Some(Chunk {
                    cookie,
                    call: ticket.call,
                    offset,
                    length,
                    sequel,
                });
            }
            Event::Zeroes {
                ticket,
                offset,
                length,
                answer,
            } => {
                let mails = [Some(Mail::Zeroes { offset, length }), answer.map(Mail::Answer)];
                let mails = mails.into_iter().flatten();
                if ticket.call == self.id {
                    drop(state);
                    mails.for_each(|mail| self.take_in(mail));
                } else {
                    mails.for_each(|mail| state.deliver(ticket.call, mail));
                }
            }
            Event::Answer(answer) if answer.ticket.call == self.id => {
                drop(state);
                self.finish(answer);
            }
            Event::Answer(answer) => state.deliver(answer.ticket.call, Mail::Answer(answer)),
        }
        Ok(Course::Continue)
    }

    /// Moves data to where they belong, or leaves that to the thread that they belong to.
    fn move_data(&mut self, hand: &mut Hand<'c>, chunk: Chunk, before: usize) -> Result<Course, Gone> {
        let connection = self.connection;
        let read = |buffers: &mut [std::io::IoSliceMut]| connection.read(buffers);
        if chunk.call == self.id {
            let from = to_usize(chunk.offset - self.base);
            let target = &mut self.target[from..from + to_usize(chunk.length)];
            hand.baton().inbox.read_to(target, read)?;
            hand.baton().chunk = None;
            if chunk.sequel == Sequel::Last {
                let answer = self.complete(chunk)?;
                self.finish(answer);
            }
            return Ok(Course::Continue);
        }
        let is_wanted = {
            let mut state = connection.lock();
            let state = &mut *state;
            if let Some(slot) = state.calls.get_mut(&chunk.call) {
                let is_here = hand.baton().inbox.bytes().len() as u64 >= chunk.length;
                if slot.is_parked && chunk.length >= LEFT_BYTES_MIN && !is_here {
                    slot.baton = hand.baton.take();
                    slot.wake.notify_one();
                    return Ok(Course::Passed);
                }
                if self.in_flight_count < before && !is_here {
                    state.baton = hand.baton.take();
                    state.wake_reader();
                    return Ok(Course::Passed);
                }
                true
            } else {
                false
            }
        };
        let mut bytes = Vec::new();
        if is_wanted {
            // The length is at most that of a request which this program made, with memory for it.
            bytes.resize(to_usize(chunk.length), 0);
            hand.baton().inbox.read_to(&mut bytes, read)?;
        } else {
            hand.baton().inbox.skip(chunk.length, read)?;
        }
        hand.baton().chunk = None;
        let answer = match chunk.sequel {
            Sequel::Last => Some(self.complete(chunk)?),
            Sequel::More => None,
        };
        let mut state = connection.lock();
        let offset = chunk.offset;
        state.deliver(chunk.call, Mail::Bytes { offset, bytes });
        if let Some(answer) = answer {
            state.deliver(chunk.call, Mail::Answer(answer));
        }
        Ok(Course::Continue)
    }

    fn complete(&self, chunk: Chunk) -> Result<Answer, Gone> {
        let answer = self.connection.lock().dialogue.complete(chunk.cookie);
        answer.map_err(|violation| self.connection.lose(Loss::Violation(violation)))
    }

    fn take_in(&mut self, mail: Mail) {
        match mail {
            Mail::Bytes { offset, bytes } => {
                let from = to_usize(offset - self.base);
                self.target[from..from + bytes.len()].copy_from_slice(&bytes);
            }
            Mail::Zeroes { offset, length } => {
                let from = to_usize(offset - self.base);
                self.target[from..from + to_usize(length)].fill(0);
            }
            Mail::Answer(answer) => self.finish(answer),
        }
    }

    fn finish(&mut self, answer: Answer) {
        self.in_flight_count -= 1;
        let request = answer.command.request;
        match answer.result {
            Ok(statuses) if request.kind == RequestKind::Extents => self.statuses.push((request, statuses)),
            Ok(_) => {}
            Err(Failure { number, message }) => {
                let server = self.connection.server().clone();
                self.failure.get_or_insert(Error::Server {
                    server,
                    request,
                    number,
                    message,
                });
                if number == ErrorNumber::ESHUTDOWN.0 {
                    // "If the client receives an NBD_ESHUTDOWN error it MUST initiate a soft disconnect."
                    self.connection.lose(Loss::ShuttingDown);
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
