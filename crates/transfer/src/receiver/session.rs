//! What a receiver does with the messages of a connection.

use std::time::Duration;

use super::connection::{Copying, SealProgress, SealStep};
use super::order::{ArrivedRange, Placement};
use super::task::{SyncWork, Task};
use super::{Decompression, HashRequest, OperationId, Receiver, ReceiverAction, Refusal, WriteCredit, refusal};
use crate::digest::{Digest, UnitDigests, UnitState};
use crate::journal::{CopyIdentity, JournalEntry};
use crate::layout::PriorContent;
use crate::wire::{
    Accept, Barrier, Capabilities, ErrorCode, HeldUnits, Message, Offer, RangeContent, RangeFrame, Seal,
    UnitComparison, UnitHash, UnitVerdict,
};

/// Limit of units that are hashed at the same time.
const HASH_COUNT_MAX: usize = 256;
/// Credit is returned in parts of the window of this size.
const CREDIT_PARTS: u64 = 8;

impl Receiver {
    /// Handles the next message of stream 0; false if there is none, or it has to wait.
    pub(super) fn proceed_once(&mut self, now: Duration) -> Result<bool, Refusal> {
        let Some(connection) = &self.connection else {
            return Ok(false);
        };
        let Some(message) = connection.order.front() else {
            return Ok(false);
        };
        let is_ready = match message {
            Message::Offer(_) | Message::OwnerQuery { .. } => self.is_at_rest(),
            Message::Round(round) => self.is_reached(&round.barrier)?,
            Message::Sync { barrier, .. } => self.task.is_idle() && self.is_reached(barrier)?,
            Message::Seal(seal) => self.task.is_idle() && self.is_reached(&seal.barrier)?,
            Message::FreezeIntent { .. } | Message::Commit { .. } => self.task.is_idle(),
            _ => true,
        };
        if !is_ready {
            return Ok(false);
        }
        let message = self
            .connection
            .as_mut()
            .and_then(|connection| connection.order.take_front());
        self.control(message.expect("it is at the front"), now)?;
        Ok(true)
    }

    /// Whether nothing is in progress, also of earlier connections.
    fn is_at_rest(&self) -> bool {
        self.task.is_idle() && self.writes.is_empty() && self.hashes.is_empty() && self.decompressions.is_empty()
    }

    /// Whether all frames before a barrier have arrived and are applied.
    fn is_reached(&self, barrier: &Barrier) -> Result<bool, Refusal> {
        let Some(connection) = &self.connection else {
            return Ok(false);
        };
        let has_arrived = connection.order.has_arrived(barrier);
        let has_arrived = has_arrived.map_err(|violation| refusal(ErrorCode::Protocol, violation))?;
        Ok(has_arrived && self.writes.is_empty() && self.decompressions.is_empty())
    }

    fn control(&mut self, message: Message, now: Duration) -> Result<(), Refusal> {
        match message {
            Message::Offer(offer) => self.offered(&offer),
            Message::OwnerQuery { receiver } => self.answer_owner(receiver),
            Message::Hashes(expected) => self.compare_unit(expected),
            Message::Round(_) => self.end_pass(),
            Message::Sync { number, .. } => self.sync(number, now),
            Message::Seal(seal) => self.seal(&seal, now),
            Message::FreezeIntent { .. } => {
                self.send(Message::FreezeOk);
                Ok(())
            }
            Message::Frozen | Message::Last(_) => Ok(()),
            Message::Commit { seal } => self.commit(seal),
            Message::Thaw => {
                if let Some(connection) = &mut self.connection {
                    connection.give_up_seal();
                }
                Ok(())
            }
            Message::End { .. } => {
                if self.journal.as_ref().is_some_and(|journal| journal.owner.is_some()) {
                    self.actions.push_back(ReceiverAction::EndKnown);
                }
                self.disconnect();
                Ok(())
            }
            Message::Error(_) => {
                self.disconnect();
                Ok(())
            }
            _ => Err(refusal(ErrorCode::Protocol, "a message that a sender does not send")),
        }
    }

    fn offered(&mut self, offer: &Offer) -> Result<(), Refusal> {
        let Some(connection) = &mut self.connection else {
            return Ok(());
        };
        if connection.copy.is_some() {
            return Err(refusal(ErrorCode::Protocol, "a second OFFER"));
        }
        let present = self.journal.as_ref().map(|journal| journal.copy.receiver);
        let copy = CopyIdentity {
            receiver: present.unwrap_or(self.options.receiver),
            session: connection.session,
            disk: offer.disk,
            layout: offer.layout,
        };
        let size_bytes = offer.layout.size_bytes();
        match &self.journal {
            Some(journal) if journal.owner.is_some() => Err(refusal(
                ErrorCode::AlreadyOwner,
                "the disk was handed over to this receiver",
            )),
            Some(journal) if journal.copy != copy => Err(refusal(
                ErrorCode::WrongDisk,
                "this receiver holds another disk, or one of other dimensions",
            )),
            Some(_) => {
                self.accept(offer);
                Ok(())
            }
            None if size_bytes > self.options.disk_bytes_max => {
                let limit = self.options.disk_bytes_max;
                let text = format!("the disk has {size_bytes} bytes, the target has {limit}");
                Err(refusal(ErrorCode::TooLarge, text))
            }
            None => {
                self.begin_copy(offer, copy);
                Ok(())
            }
        }
    }

    /// Answers an offer. The copy is in the journal.
    pub(super) fn accept(&mut self, offer: &Offer) {
        let (Some(connection), Some(journal)) = (&mut self.connection, &self.journal) else {
            return;
        };
        let stream_count = offer.stream_count.min(self.options.stream_count_max);
        connection.stream_count = stream_count;
        connection.order.set_stream_count(stream_count);
        let mut digests = UnitDigests::new(journal.copy.layout);
        let mut held = match self.options.prior {
            PriorContent::Unrelated => HeldUnits::none(journal.copy.layout),
            PriorContent::Similar => HeldUnits::all(journal.copy.layout),
        };
        for (unit, digest) in &journal.units {
            held.insert(*unit);
            digests.set(UnitState {
                unit: *unit,
                digest: Some(*digest),
            });
        }
        digests.take_changed();
        connection.copy = Some(Copying {
            digests,
            in_flight_bytes: 0,
            due_bytes: 0,
            seal: None,
        });
        let accept = Accept {
            receiver: journal.copy.receiver,
            window_bytes: self.options.window_bytes,
            stream_count,
            sync: journal.sync,
            held,
        };
        self.send(Message::Accept(accept));
    }

    pub(super) fn range_received(&mut self, range: ArrivedRange) -> Result<(), Refusal> {
        let protocol = |violation: &str| refusal(ErrorCode::Protocol, violation);
        let frame_bytes = range.window_bytes();
        let Some(connection) = &mut self.connection else {
            return Ok(());
        };
        let is_plain = matches!(range, ArrivedRange::Plain(_));
        if !is_plain && !connection.capabilities.has(Capabilities::COMPRESSION) {
            return Err(protocol("compressed data, which was not agreed"));
        }
        let copy = connection.copy.as_mut().ok_or(protocol("data before ACCEPT"))?;
        if !copy.digests.layout().contains(range.range()) {
            return Err(protocol("data outside of the disk"));
        }
        copy.in_flight_bytes += frame_bytes;
        if copy.in_flight_bytes > self.options.window_bytes {
            return Err(protocol("more data than the window permits"));
        }
        match connection.order.place(range).map_err(protocol)? {
            Placement::Held => Ok(()),
            Placement::Apply(range) => self.apply(range),
        }
    }

    fn apply(&mut self, frame: ArrivedRange) -> Result<(), Refusal> {
        // The machine may already run from this file.
        if self.task.is_commit() || self.journal.as_ref().is_some_and(|journal| journal.owner.is_some()) {
            return Err(refusal(ErrorCode::AlreadyOwner, "data after COMMIT"));
        }
        if let Some(connection) = &mut self.connection {
            connection.give_up_seal();
        }
        match frame {
            ArrivedRange::Plain(frame) => self.write(frame),
            ArrivedRange::Compressed(frame) => {
                let operation = self.operation();
                let request = Decompression {
                    connection: self.connection_number(),
                    pass: frame.pass,
                    range: frame.range.clone(),
                };
                self.decompressions.insert(operation, request);
                self.actions.push_back(ReceiverAction::Decompress { operation, frame });
            }
        }
        Ok(())
    }

    /// No barrier was passed meanwhile: it waits for the frames before it.
    pub(super) fn decompressed(&mut self, operation: OperationId, data: crate::Result<Vec<u8>>) -> Result<(), Refusal> {
        let Some(Decompression {
            connection,
            pass,
            range,
        }) = self.decompressions.remove(&operation)
        else {
            return Ok(());
        };
        if self.connection_number() != connection {
            return Ok(());
        }
        let data = data.map_err(|error| refusal(ErrorCode::Protocol, error.to_string()))?;
        if data.len() as u64 != range.end - range.start {
            return Err(refusal(ErrorCode::Protocol, "compressed data of another length"));
        }
        let content = RangeContent::Data(data);
        self.write(RangeFrame { pass, range, content });
        Ok(())
    }

    fn write(&mut self, frame: RangeFrame) {
        let operation = self.operation();
        let Some(connection) = &mut self.connection else { return };
        let Some(copy) = &mut connection.copy else { return };
        copy.digests.add(&frame.range, frame.content());
        let credit = WriteCredit {
            connection: connection.number,
            frame_bytes: frame.window_bytes(),
        };
        self.writes.insert(operation, credit);
        self.actions.push_back(ReceiverAction::Write {
            operation,
            range: frame.range,
            content: frame.content,
        });
    }

    /// A write is complete: its bytes can be credited.
    pub(super) fn written(&mut self, credit: &WriteCredit) {
        let window_bytes = self.options.window_bytes;
        let Some(connection) = &mut self.connection else { return };
        let Some(copy) = connection
            .copy
            .as_mut()
            .filter(|_| connection.number == credit.connection)
        else {
            return;
        };
        copy.due_bytes += credit.frame_bytes;
        if copy.due_bytes >= window_bytes / CREDIT_PARTS {
            self.return_credit();
        }
    }

    fn return_credit(&mut self) {
        let Some(copy) = self.connection.as_mut().and_then(|connection| connection.copy.as_mut()) else {
            return;
        };
        let bytes = std::mem::take(&mut copy.due_bytes);
        copy.in_flight_bytes -= bytes;
        if bytes > 0 {
            self.send(Message::Credit { bytes });
        }
    }

    fn compare_unit(&mut self, expected: UnitHash) -> Result<(), Refusal> {
        let operation = self.operation();
        let protocol = |violation: &str| refusal(ErrorCode::Protocol, violation);
        let Some(connection) = &self.connection else {
            return Ok(());
        };
        let copy = connection.copy.as_ref().ok_or(protocol("HASHES before ACCEPT"))?;
        if expected.unit >= copy.digests.layout().unit_count() || self.hashes.len() >= HASH_COUNT_MAX {
            return Err(protocol("HASHES of a unit that does not exist, or of too many"));
        }
        let range = copy.digests.layout().bytes_of(expected.unit);
        let request = HashRequest {
            connection: connection.number,
            expected,
        };
        self.hashes.insert(operation, request);
        self.actions.push_back(ReceiverAction::HashUnit { operation, range });
        Ok(())
    }

    pub(super) fn unit_hashed(&mut self, operation: super::OperationId, digest: Digest) {
        let Some(HashRequest { connection, expected }) = self.hashes.remove(&operation) else {
            return;
        };
        let current = self.connection.as_mut().filter(|current| current.number == connection);
        let Some(copy) = current.and_then(|current| current.copy.as_mut()) else {
            return;
        };
        let is_same = digest == expected.digest;
        copy.digests.set(UnitState {
            unit: expected.unit,
            digest: is_same.then_some(digest),
        });
        self.send(Message::Want(UnitVerdict {
            unit: expected.unit,
            content: if is_same {
                UnitComparison::Same
            } else {
                UnitComparison::Different
            },
        }));
    }

    /// Passes a barrier, and applies the frames that waited for it.
    fn end_pass(&mut self) -> Result<(), Refusal> {
        let Some(connection) = &mut self.connection else {
            return Ok(());
        };
        let copy = connection.copy.as_mut();
        let copy = copy.ok_or_else(|| refusal(ErrorCode::Protocol, "a barrier before ACCEPT"))?;
        copy.digests.end_pass();
        for frame in connection.order.pass_barrier() {
            self.apply(frame)?;
        }
        self.return_credit();
        Ok(())
    }

    /// The units that changed since the last synchronization, as the barrier found them.
    fn take_changes(&mut self) -> Vec<UnitState> {
        let Some(copy) = self.connection.as_mut().and_then(|connection| connection.copy.as_mut()) else {
            return Vec::new();
        };
        copy.digests.end_pass();
        let changed = copy.digests.take_changed();
        let state = |unit| UnitState {
            unit,
            digest: copy.digests.get(unit),
        };
        changed.into_iter().map(state).collect()
    }

    fn sync(&mut self, number: u64, now: Duration) -> Result<(), Refusal> {
        self.check_sync(number)?;
        // Before the frames after the barrier are applied.
        let units = self.take_changes();
        self.end_pass()?;
        let work = SyncWork::new(number, units, self.connection_number(), now);
        self.flush(work);
        Ok(())
    }

    fn seal(&mut self, seal: &Seal, now: Duration) -> Result<(), Refusal> {
        self.check_sync(seal.sync)?;
        let units = self.take_changes();
        let copy = self.connection.as_mut().and_then(|connection| connection.copy.as_mut());
        let copy = copy.ok_or_else(|| refusal(ErrorCode::Protocol, "SEAL before ACCEPT"))?;
        let tree = copy.digests.tree().map_err(|unit| {
            let text = format!("unit {unit} of the disk was never received as a whole");
            refusal(ErrorCode::WrongContent, text)
        })?;
        if tree != seal.tree {
            let text = "the received content differs from the sent one";
            return Err(refusal(ErrorCode::WrongContent, text));
        }
        copy.seal = Some(SealProgress {
            number: seal.number,
            step: SealStep::InProgress,
        });
        self.end_pass()?;
        let mut work = SyncWork::new(seal.sync, units, self.connection_number(), now);
        work.seal = Some(seal.number);
        self.examine_identity(work);
        Ok(())
    }

    fn check_sync(&self, number: u64) -> Result<(), Refusal> {
        let last = self.journal.as_ref().map_or(0, |journal| journal.sync);
        if number > last {
            Ok(())
        } else {
            Err(refusal(
                ErrorCode::Protocol,
                "a synchronization has a number that was used",
            ))
        }
    }

    fn commit(&mut self, seal: u64) -> Result<(), Refusal> {
        let wanted = SealProgress {
            number: seal,
            step: SealStep::Complete,
        };
        let present = self
            .connection
            .as_ref()
            .and_then(|connection| connection.copy.as_ref()?.seal);
        if present != Some(wanted) {
            return Err(refusal(ErrorCode::NotSealed, "COMMIT of a copy that is not sealed"));
        }
        let operation = self.operation();
        let mut bytes = Vec::new();
        JournalEntry::Owner { seal }.encode(&mut bytes);
        self.task = Task::Commit { operation, seal };
        self.actions
            .push_back(ReceiverAction::AppendJournal { operation, bytes });
        Ok(())
    }

    fn connection_number(&self) -> u64 {
        self.connection.as_ref().map_or(0, |connection| connection.number)
    }
}
