//! The receiver of a copy, without input and output: events in, actions out.
//!
//! | state | meaning |
//! |---|---|
//! | empty | no copy was accepted |
//! | filling | data arrives |
//! | synced | everything up to a synchronization is durable, and in the journal |
//! | sealed | all is durable and equal to what was sent, in the file that the hypervisor has open |
//! | owner | the receiver owns the disk, durably; it accepts nothing more |
//!
//! Only the journal outlives a connection: a new connection of the same session starts at the last synchronization,
//! whatever arrived after it. The sender knows what it has sent since, and sends it again.
//!
//! A receiver that says "the sender owns the disk" gives up its seal, and ignores older connections. So a COMMIT that
//! is still under way cannot make it the owner afterwards.

mod connection;
mod order;
mod session;
mod task;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

use crate::digest::Digest;
use crate::journal::{CopyIdentity, JournalState};
use crate::layout::PriorContent;
use crate::wire::{
    Capabilities, CompressedRange, ErrorCode, Frame, Hello, Message, Ownership, PeerError, RangeContent, ReceiverId,
    VersionRange,
};
use connection::Connection;
use order::ArrivedRange;
use task::Task;

/// How a receiver behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceiverOptions {
    /// Random bytes: the identity of a new copy, if one is accepted.
    pub receiver: ReceiverId,
    /// What the receiver can do.
    pub capabilities: Capabilities,
    /// Bytes of frames with data that may be under way. At least eight units.
    pub window_bytes: u64,
    /// Largest number of streams, at least 1.
    pub stream_count_max: u16,
    /// Size of the target, in bytes. A larger disk is refused. It also bounds the memory: about 200 bytes for each unit.
    pub disk_bytes_max: u64,
    /// What the target held before the copy began.
    pub prior: PriorContent,
    /// Name and version of the program.
    pub program: String,
}

/// A byte stream of a connection, by a number that the caller never uses again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkId(pub u64);

/// An operation of a receiver that the caller carries out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct OperationId(pub u64);

/// Whether the file that was written is the one that the hypervisor has open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileIdentity {
    /// Device and inode are the same.
    Same,
    /// They differ, or nothing has the file open.
    Different {
        /// What was found, for people.
        detail: String,
    },
}

/// What happened.
#[derive(Debug)]
pub enum ReceiverEvent {
    /// A frame arrived.
    Received {
        /// Where.
        link: LinkId,
        /// The frame.
        frame: Frame,
    },
    /// A byte stream ended, or delivered bytes that are no frame.
    LinkClosed(LinkId),
    /// A write, a flush or a write of the journal is complete.
    Completed(OperationId),
    /// A unit was read and hashed.
    UnitHashed {
        /// The operation.
        operation: OperationId,
        /// The hash of the content.
        digest: Digest,
    },
    /// A frame was decompressed.
    Decompressed {
        /// The operation.
        operation: OperationId,
        /// Its data, or the error of the decompression: the peer has sent what is none.
        data: crate::Result<Vec<u8>>,
    },
    /// The identity of the file was examined.
    IdentityExamined {
        /// The operation.
        operation: OperationId,
        /// The result.
        identity: FileIdentity,
    },
    /// An operation failed. The receiver does not continue: the caller creates a new one from the journal.
    OperationFailed {
        /// Why.
        failure: StorageFailure,
        /// The reason, for people.
        detail: String,
    },
}

/// Why an operation on the target failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StorageFailure {
    /// The target is full: another attempt would end at the same place.
    NoSpace,
    /// Another reason.
    Other,
}

/// What the caller has to do. It may carry out operations at the same time and in any order, as they complete.
#[derive(Debug, PartialEq, Eq)]
pub enum ReceiverAction {
    /// Send a frame.
    Send {
        /// Where.
        link: LinkId,
        /// The frame.
        frame: Frame,
    },
    /// Close a byte stream, after sending what was to be sent.
    Close(LinkId),
    /// Write to the image.
    Write {
        /// The operation.
        operation: OperationId,
        /// Where.
        range: Range<u64>,
        /// What.
        content: RangeContent,
    },
    /// Decompress a frame with [`RangeDecompressor`](crate::RangeDecompressor).
    Decompress {
        /// The operation.
        operation: OperationId,
        /// The frame.
        frame: CompressedRange,
    },
    /// Make all completed writes durable: fdatasync, and once for a new file its size and its folder.
    Flush {
        /// The operation.
        operation: OperationId,
    },
    /// Append to the journal, and make that durable.
    AppendJournal {
        /// The operation.
        operation: OperationId,
        /// What.
        bytes: Vec<u8>,
    },
    /// Read a range of the image and hash it. The bytes must come from the image, not from what was received.
    HashUnit {
        /// The operation.
        operation: OperationId,
        /// The range.
        range: Range<u64>,
    },
    /// Compare device and inode of the file that was written with those of the file that the hypervisor has open.
    ///
    /// A copy into a file that the hypervisor has not opened passes all other checks.
    ExamineIdentity {
        /// The operation.
        operation: OperationId,
    },
    /// The receiver owns the disk now: the machine may be started here.
    BecameOwner {
        /// The seal that was committed.
        seal: u64,
    },
    /// The sender knows that the receiver owns the disk, and does not ask any more: the journal may be deleted.
    EndKnown,
}

/// The state of a receiver, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiverState {
    /// No copy was accepted.
    Empty,
    /// Data was received since the last synchronization, or there was none.
    Filling,
    /// All data is durable up to this synchronization.
    Synced(u64),
    /// The copy is complete, durable and compared.
    Sealed,
    /// The receiver owns the disk.
    Owner,
    /// An operation failed; the caller creates a new receiver from the journal.
    Failed,
}

/// The receiver of a copy.
#[derive(Debug)]
pub struct Receiver {
    options: ReceiverOptions,
    /// What is durable.
    journal: Option<JournalState>,
    connection: Option<Connection>,
    task: Task,
    /// Writes in progress, also of earlier connections, and the bytes to credit for them.
    writes: BTreeMap<OperationId, WriteCredit>,
    hashes: BTreeMap<OperationId, HashRequest>,
    decompressions: BTreeMap<OperationId, Decompression>,
    operation_count: u64,
    is_failed: bool,
    actions: VecDeque<ReceiverAction>,
}

#[derive(Debug)]
struct WriteCredit {
    connection: u64,
    frame_bytes: u64,
}

#[derive(Debug)]
struct HashRequest {
    connection: u64,
    expected: crate::wire::UnitHash,
}

/// A frame that is being decompressed.
#[derive(Debug)]
struct Decompression {
    connection: u64,
    pass: u32,
    range: Range<u64>,
}

/// Why a connection ends.
type Refusal = PeerError;

fn refusal(code: ErrorCode, text: impl Into<String>) -> Refusal {
    PeerError {
        code,
        text: text.into(),
    }
}

impl Receiver {
    /// A receiver with the journal of an earlier one, or none. See [`JournalState::decode`] for the duties of the
    /// caller.
    pub fn new(options: ReceiverOptions, journal: Option<JournalState>) -> Self {
        Self {
            options,
            journal,
            connection: None,
            task: Task::Idle,
            writes: BTreeMap::new(),
            hashes: BTreeMap::new(),
            decompressions: BTreeMap::new(),
            operation_count: 0,
            is_failed: false,
            actions: VecDeque::new(),
        }
    }

    /// The state.
    pub fn state(&self) -> ReceiverState {
        match (&self.journal, &self.connection) {
            _ if self.is_failed => ReceiverState::Failed,
            (None, _) => ReceiverState::Empty,
            (Some(journal), _) if journal.owner.is_some() => ReceiverState::Owner,
            (_, Some(connection)) if connection.is_sealed() => ReceiverState::Sealed,
            (_, Some(connection)) if connection.has_changes() => ReceiverState::Filling,
            (Some(journal), _) if journal.sync > 0 => ReceiverState::Synced(journal.sync),
            (Some(_), _) => ReceiverState::Filling,
        }
    }

    /// The copy that is held.
    pub fn copy(&self) -> Option<&CopyIdentity> {
        self.journal.as_ref().map(|journal| &journal.copy)
    }

    /// The next action; the caller takes all of them after each event.
    pub fn next_action(&mut self) -> Option<ReceiverAction> {
        self.actions.pop_front()
    }

    /// Handles an event. `now` is the time since any fixed point.
    pub fn handle(&mut self, event: ReceiverEvent, now: Duration) {
        if self.is_failed {
            return;
        }
        let result = match event {
            ReceiverEvent::Received { link, frame } => self.received(link, frame, now),
            ReceiverEvent::LinkClosed(link) => {
                if self
                    .connection
                    .as_ref()
                    .is_some_and(|connection| connection.has_link(link))
                {
                    self.disconnect();
                }
                Ok(())
            }
            ReceiverEvent::Completed(operation) => self.completed(operation, now),
            ReceiverEvent::UnitHashed { operation, digest } => {
                self.unit_hashed(operation, digest);
                Ok(())
            }
            ReceiverEvent::Decompressed { operation, data } => self.decompressed(operation, data),
            ReceiverEvent::IdentityExamined { operation, identity } => self.identity_examined(operation, identity, now),
            ReceiverEvent::OperationFailed { failure, detail } => {
                self.is_failed = true;
                let code = match failure {
                    StorageFailure::NoSpace => ErrorCode::NoSpace,
                    StorageFailure::Other => ErrorCode::Storage,
                };
                Err(refusal(code, detail))
            }
        };
        let result = result.and_then(|()| if self.is_failed { Ok(()) } else { self.proceed(now) });
        if let Err(error) = result {
            self.send(Message::Error(error));
            self.disconnect();
        }
    }

    fn operation(&mut self) -> OperationId {
        self.operation_count += 1;
        OperationId(self.operation_count)
    }

    fn send(&mut self, message: Message) {
        if let Some(connection) = &mut self.connection {
            let sequence = connection.sent_count;
            connection.sent_count += 1;
            let frame = Frame {
                stream: 0,
                sequence,
                message,
            };
            let link = connection.control;
            self.actions.push_back(ReceiverAction::Send { link, frame });
        }
    }

    /// Ends the connection. What was received since the last synchronization does not count any more.
    fn disconnect(&mut self) {
        if let Some(connection) = self.connection.take() {
            let closed = connection.links().map(ReceiverAction::Close);
            self.actions.extend(closed);
        }
    }

    fn received(&mut self, link: LinkId, frame: Frame, now: Duration) -> Result<(), Refusal> {
        let protocol = |violation: &str| refusal(ErrorCode::Protocol, violation);
        let is_known = self
            .connection
            .as_ref()
            .is_some_and(|connection| connection.has_link(link));
        match (frame.message, is_known) {
            (Message::Hello(hello), false) => self.greeted(link, frame.stream, &hello),
            // Frames of earlier connections, and of strangers.
            (_, false) => Ok(()),
            (message, true) => {
                let Some(connection) = &mut self.connection else {
                    return Ok(());
                };
                connection.check_link(link, frame.stream).map_err(protocol)?;
                connection.order.count(frame.stream, frame.sequence).map_err(protocol)?;
                match message {
                    Message::Range(range) => self.range_received(ArrivedRange::Plain(range)),
                    Message::Compressed(range) => self.range_received(ArrivedRange::Compressed(range)),
                    Message::Ping { number } => {
                        self.send(Message::Pong { number });
                        Ok(())
                    }
                    Message::Skipped { .. } | Message::Times(_) => Ok(()),
                    message if frame.stream == 0 => connection.order.enqueue(message).map_err(protocol),
                    _ => Err(protocol("a message that is only allowed on stream 0")),
                }?;
                self.proceed(now)
            }
        }
    }

    /// Handles the messages of stream 0 in order, as far as they need not wait.
    fn proceed(&mut self, now: Duration) -> Result<(), Refusal> {
        while self.connection.is_some() && self.proceed_once(now)? {}
        Ok(())
    }

    /// A first message on a byte stream: a new connection, or another stream of the present one.
    fn greeted(&mut self, link: LinkId, stream: u16, hello: &Hello) -> Result<(), Refusal> {
        if stream > 0 {
            let connection = self.connection.as_mut();
            let is_added = connection.is_some_and(|connection| connection.add_link(link, stream, hello.connection));
            if !is_added {
                self.actions.push_back(ReceiverAction::Close(link));
            }
            return Ok(());
        }
        self.disconnect();
        self.connection = Some(Connection::new(link, hello, self.options.capabilities));
        if VersionRange::KNOWN.common(hello.versions).is_none() {
            return Err(refusal(ErrorCode::Version, "no common version of the protocol"));
        }
        let other = self
            .journal
            .as_ref()
            .is_some_and(|journal| journal.copy.session != hello.session);
        if other {
            return Err(refusal(
                ErrorCode::WrongSession,
                "this receiver holds the copy of another session",
            ));
        }
        self.send(Message::Hello(Hello {
            versions: VersionRange::KNOWN,
            capabilities: self.options.capabilities,
            session: hello.session,
            connection: hello.connection,
            program: self.options.program.clone(),
        }));
        Ok(())
    }

    /// Answers who owns the disk. Nothing is in progress.
    fn answer_owner(&mut self, receiver: ReceiverId) -> Result<(), Refusal> {
        let session = self.connection.as_ref().map(|connection| connection.session);
        let journal = self.journal.as_ref();
        let journal =
            journal.filter(|journal| session == Some(journal.copy.session) && journal.copy.receiver == receiver);
        let Some(journal) = journal else {
            // The owner may be the real receiver of this session: this one knows nothing about it.
            return Err(refusal(
                ErrorCode::WrongSession,
                "this receiver holds no copy of this session",
            ));
        };
        let owner = match journal.owner {
            Some(_) => Ownership::Receiver,
            None => Ownership::Sender,
        };
        if let Some(connection) = &mut self.connection {
            connection.give_up_seal();
        }
        self.send(Message::OwnerAnswer(owner));
        Ok(())
    }
}
