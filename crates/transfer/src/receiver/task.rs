//! What a receiver does one at a time: journal a new copy, synchronize, seal, commit.

use std::time::Duration;

use super::{ErrorCode, FileIdentity, OperationId, Receiver, ReceiverAction, Refusal, refusal};
use crate::digest::UnitState;
use crate::journal::{CopyIdentity, JournalEntry, JournalState, SyncEntry};
use crate::wire::{Capabilities, Message, Offer, ReceiverTimes};

/// The operation in progress.
#[derive(Debug)]
pub(super) enum Task {
    Idle,
    /// The journal of a new copy is written.
    Begin {
        operation: OperationId,
        offer: Offer,
        copy: CopyIdentity,
        connection: u64,
    },
    /// The identity of the file is examined; the first step of a seal.
    Examine {
        operation: OperationId,
        work: SyncWork,
    },
    /// Data is made durable.
    Flush {
        operation: OperationId,
        work: SyncWork,
    },
    /// Units are written to the journal.
    Journal {
        operation: OperationId,
        work: SyncWork,
    },
    /// The receiver becomes the owner.
    Commit {
        operation: OperationId,
        seal: u64,
    },
}

impl Task {
    pub(super) fn is_idle(&self) -> bool {
        matches!(self, Self::Idle)
    }

    pub(super) fn is_commit(&self) -> bool {
        matches!(self, Self::Commit { .. })
    }

    fn operation(&self) -> Option<OperationId> {
        match self {
            Self::Idle => None,
            Self::Begin { operation, .. }
            | Self::Examine { operation, .. }
            | Self::Flush { operation, .. }
            | Self::Journal { operation, .. }
            | Self::Commit { operation, .. } => Some(*operation),
        }
    }
}

/// A synchronization, alone or as a part of a seal.
#[derive(Debug)]
pub(super) struct SyncWork {
    number: u64,
    /// The changed units as the barrier found them. Later frames may change them before the flush; the sender then
    /// sends these units again if the connection breaks.
    units: Vec<UnitState>,
    connection: u64,
    pub(super) seal: Option<u64>,
    started: Duration,
    step_started: Duration,
    times: ReceiverTimes,
}

impl SyncWork {
    pub(super) fn new(number: u64, units: Vec<UnitState>, connection: u64, now: Duration) -> Self {
        Self {
            number,
            units,
            connection,
            seal: None,
            started: now,
            step_started: now,
            times: ReceiverTimes::default(),
        }
    }

    /// The time since the last step.
    fn step(&mut self, now: Duration) -> Duration {
        let took = now.saturating_sub(self.step_started);
        self.step_started = now;
        took
    }
}

impl Receiver {
    pub(super) fn begin_copy(&mut self, offer: &Offer, copy: CopyIdentity) {
        let operation = self.operation();
        let mut bytes = Vec::new();
        JournalEntry::Begin(copy).encode(&mut bytes);
        self.task = Task::Begin {
            operation,
            offer: *offer,
            copy,
            connection: self.connection.as_ref().map_or(0, |connection| connection.number),
        };
        self.actions
            .push_back(ReceiverAction::AppendJournal { operation, bytes });
    }

    pub(super) fn flush(&mut self, work: SyncWork) {
        let operation = self.operation();
        self.task = Task::Flush { operation, work };
        self.actions.push_back(ReceiverAction::Flush { operation });
    }

    pub(super) fn examine_identity(&mut self, work: SyncWork) {
        let operation = self.operation();
        self.task = Task::Examine { operation, work };
        self.actions.push_back(ReceiverAction::ExamineIdentity { operation });
    }

    pub(super) fn identity_examined(
        &mut self,
        operation: OperationId,
        identity: FileIdentity,
        now: Duration,
    ) -> Result<(), Refusal> {
        if self.task.operation() != Some(operation) {
            return Ok(());
        }
        let Task::Examine { mut work, .. } = std::mem::replace(&mut self.task, Task::Idle) else {
            return Ok(());
        };
        work.times.identity = work.step(now);
        match identity {
            _ if !self.is_current(work.connection) => Ok(()),
            FileIdentity::Same => {
                self.flush(work);
                Ok(())
            }
            FileIdentity::Different { detail } => Err(refusal(ErrorCode::WrongFile, detail)),
        }
    }

    /// A write, a flush or a write of the journal is complete.
    pub(super) fn completed(&mut self, operation: OperationId, now: Duration) -> Result<(), Refusal> {
        if let Some(credit) = self.writes.remove(&operation) {
            self.written(&credit);
            return Ok(());
        }
        if self.task.operation() != Some(operation) {
            return Ok(());
        }
        match std::mem::replace(&mut self.task, Task::Idle) {
            Task::Begin {
                offer,
                copy,
                connection,
                ..
            } => {
                self.journal = Some(JournalState::begun(copy));
                if self.is_current(connection) {
                    self.accept(&offer);
                }
            }
            Task::Flush { work, .. } if self.is_current(work.connection) => self.append_sync(work, now),
            Task::Flush { .. } | Task::Idle | Task::Examine { .. } => {}
            Task::Journal { work, .. } => self.synced(work, now)?,
            Task::Commit { seal, .. } => {
                if let Some(journal) = &mut self.journal {
                    journal.owner = Some(seal);
                }
                self.actions.push_back(ReceiverAction::BecameOwner { seal });
                // If the connection broke meanwhile, the sender asks on a new one, and this is not sent.
                if self
                    .connection
                    .as_ref()
                    .is_some_and(super::connection::Connection::is_sealed)
                {
                    self.send(Message::Committed { seal });
                }
            }
        }
        Ok(())
    }

    /// Writes the units of a synchronization to the journal: their data is durable now.
    fn append_sync(&mut self, mut work: SyncWork, now: Duration) {
        work.times.flush = work.step(now);
        let operation = self.operation();
        let entry = JournalEntry::Sync(SyncEntry {
            number: work.number,
            units: work.units.clone(),
        });
        let mut bytes = Vec::new();
        entry.encode(&mut bytes);
        self.task = Task::Journal { operation, work };
        self.actions
            .push_back(ReceiverAction::AppendJournal { operation, bytes });
    }

    /// A synchronization is durable.
    fn synced(&mut self, mut work: SyncWork, now: Duration) -> Result<(), Refusal> {
        work.times.journal = work.step(now);
        let number = work.number;
        if let Some(journal) = &mut self.journal {
            let units = std::mem::take(&mut work.units);
            let applied = journal.apply(SyncEntry { number, units });
            applied.map_err(|detail| refusal(ErrorCode::Protocol, detail))?;
        }
        if !self.is_current(work.connection) {
            return Ok(());
        }
        let connection = self.connection.as_mut().expect("it is the current one");
        if connection.capabilities.has(Capabilities::SYNC) {
            let took = now.saturating_sub(work.started);
            self.send(Message::Synced { number, took });
        }
        if let Some(number) = work.seal
            && self
                .connection
                .as_mut()
                .is_some_and(|connection| connection.complete_seal(number))
        {
            self.send(Message::Times(work.times));
            self.send(Message::Sealed { number });
        }
        Ok(())
    }

    fn is_current(&self, connection: u64) -> bool {
        self.connection
            .as_ref()
            .is_some_and(|current| current.number == connection)
    }
}
