//! What goes into a sender, and what comes out.

use std::ops::Range;
use std::time::Duration;

use holdfast_block::DirtyBitmap;

use crate::convergence::{ConvergenceOptions, Forecast};
use crate::layout::UnitLayout;
use crate::traffic::FrameBytes;
use crate::wire::{Capabilities, DiskId, Frame, PeerError, RangeContent, ReceiverId, ReceiverTimes, SessionId};

/// When the guest is frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FreezeTrigger {
    /// As soon as the prediction permits it.
    WhenReady,
    /// When the caller requests it ([`SenderEvent::FreezeRequested`]), for example after the memory of the machine was
    /// sent. Rounds continue until then.
    OnRequest,
}

/// How often marks are taken during the first pass. What was written to a range that is not read yet needs no mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstPassTakes {
    /// Sixteen times.
    Often,
    /// At its end: taking marks is expensive, as for a tracker that reads the disk.
    AtEnd,
}

/// What the copy is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyPurpose {
    /// The receiver gets the disk as of the freeze. The guest is thawed as soon as everything was read, and runs on.
    Duplicate,
    /// The disk changes its owner. The guest stays frozen until the receiver has answered, and must not run here then.
    Handover,
}

/// How a sender behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SenderOptions {
    /// What the copy is for.
    pub purpose: CopyPurpose,
    /// The copy.
    pub session: SessionId,
    /// The disk.
    pub disk: DiskId,
    /// Its dimensions.
    pub layout: UnitLayout,
    /// Bytes that one mark of the tracker covers; at most a unit.
    pub granularity_bytes: u32,
    /// How often marks are taken during the first pass.
    pub first_pass_takes: FirstPassTakes,
    /// What the sender can do.
    pub capabilities: Capabilities,
    /// Number of streams to use, at least 1.
    pub stream_count: u16,
    /// When rounds have converged. Its limit is also a promise: a guest that is frozen for longer is thawed.
    pub convergence: ConvergenceOptions,
    /// When the guest is frozen.
    pub trigger: FreezeTrigger,
    /// Number of attempts to hand over, at least 1. An attempt fails if the guest would be frozen for too long.
    pub attempt_count_max: u32,
    /// Name and version of the program.
    pub program: String,
}

/// What a tracker says when it is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrackerCheck {
    /// It has recorded every write since it was started, and these bytes are marked.
    Valid {
        /// Number of marked bytes.
        dirty_bytes: u64,
    },
    /// It may have missed writes.
    Invalid,
}

/// What happened.
#[derive(Debug)]
pub enum SenderEvent {
    /// Stream 0 of a new connection exists.
    Connected {
        /// A random number, unique to the connection.
        connection: u64,
    },
    /// A stream of the present connection ended, or delivered bytes that are no frame; or no connection could be made.
    Disconnected,
    /// A frame of the present connection arrived.
    Received(Frame),
    /// Frames with data of the present connection are about to be written, some of them compressed. The caller may leave
    /// this out if it compresses none.
    Written(FrameBytes),
    /// The tracker records all writes from now on.
    TrackerStarted,
    /// The marks that were taken, of the granularity and size of the options.
    DirtyTaken {
        /// Which request this answers.
        query: u64,
        /// The marks.
        marks: DirtyBitmap,
        /// How long it took to take them. The guest waits for it while it is frozen.
        took: Duration,
    },
    /// The number of marked bytes.
    DirtyCounted {
        /// Which request this answers.
        query: u64,
        /// The number.
        dirty_bytes: u64,
    },
    /// The tracker was checked.
    TrackerChecked {
        /// Which request this answers.
        query: u64,
        /// The result.
        check: TrackerCheck,
    },
    /// A range was read.
    Read {
        /// Which request this answers.
        read: u64,
        /// Its content; data has the length of the range.
        content: RangeContent,
    },
    /// The disk cannot be read, or the tracker does not work.
    SourceFailed {
        /// The reason, for people.
        detail: String,
    },
    /// The guest is to be frozen as soon as the copy permits it.
    FreezeRequested,
    /// The request to freeze is void: the caller has let the guest run, or does so whatever this sender does.
    FreezeRevoked,
    /// The guest does not run, and none of its writes is in progress.
    Frozen {
        /// Which request this answers.
        attempt: u32,
    },
    /// The guest could not be frozen.
    FreezeFailed {
        /// Which request this answers.
        attempt: u32,
    },
    /// The handover is noted durably.
    HandoverNoted(HandoverNote),
    /// Time has passed. See [`Sender::next_tick`](super::Sender::next_tick).
    Tick,
    /// The user wants to stop. After COMMIT this has no effect.
    Cancel,
}

/// What the caller has to do. Reads may be carried out at the same time and in any order; all other actions are carried
/// out in the order in which they are returned. Answers may be late, and arrive in any order.
#[derive(Debug, Clone, PartialEq)]
pub enum SenderAction {
    /// Connect to the receiver. After a failure, the caller waits and tries again.
    Connect,
    /// Send a frame on its stream. The first frame of a stream above 0 is HELLO: the caller opens another byte stream
    /// to the receiver for it.
    Send(Frame),
    /// Close all streams of the connection.
    Disconnect,
    /// Record all writes from now on. A tracker that runs already is restarted.
    StartTracker,
    /// Take all marks: return and clear them in one step.
    TakeDirty {
        /// The number of the request.
        query: u64,
    },
    /// Count the marks without a change.
    CountDirty {
        /// The number of the request.
        query: u64,
    },
    /// Count the marks, and check that the tracker has recorded everything.
    CheckTracker {
        /// The number of the request.
        query: u64,
    },
    /// Read a range of the disk.
    Read {
        /// The number of the request.
        read: u64,
        /// The range.
        range: Range<u64>,
    },
    /// Limit the guest, so that at most this many bytes become dirty per second.
    Throttle {
        /// The limit.
        dirty_bytes_per_s_max: u64,
    },
    /// Do not limit the guest any more.
    Unthrottle,
    /// Freeze the guest, and wait for its writes in progress.
    Freeze {
        /// The number of the request.
        attempt: u32,
    },
    /// Let the guest run, whether or not it is frozen already.
    Thaw,
    /// Note durably that the disk may be handed over: after a restart, the guest must not run before the receiver has
    /// said that it is not the owner ([`Sender::in_doubt`](super::Sender::in_doubt)).
    NoteHandover(HandoverNote),
    /// Remove the note, durably.
    ClearHandover,
    /// Show the numbers of a round.
    Report(Forecast),
    /// Show a warning.
    Warn(SenderWarning),
    /// The copy ended. After a handover, the caller notes durably that it is completed, before it carries out the actions
    /// that follow: then the receiver may forget the copy. The sender is of no more use.
    Finished(Outcome),
}

/// A handover that may have happened: what a restarted sender has to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandoverNote {
    /// The seal.
    pub seal: u64,
    /// The receiver that sealed. Only it can say who owns the disk.
    pub receiver: ReceiverId,
}

/// What a user should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SenderWarning {
    /// The receiver cannot synchronize on request: everything is made durable while the guest is frozen.
    SyncWhileFrozen,
    /// The receiver cannot compare by hash: after an interruption, data is sent again.
    NoHashes,
    /// The guest was thawed, because it would have been frozen for too long.
    PromiseNotKept {
        /// How long it was frozen.
        frozen: Duration,
    },
    /// The receiver ended the connection with an error that another attempt may not have.
    Retried(PeerError),
    /// The answer does not say which side owns the disk. The sender continues to ask.
    StillInDoubt(PeerError),
}

/// How a copy ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The receiver owns the disk, or its duplicate. After a handover, the guest must not run here any more.
    Completed(HandoverReport),
    /// The rounds do not converge. The guest was not frozen.
    NotConverging(Forecast),
    /// Every attempt would have frozen the guest for too long.
    FrozenTooLong,
    /// The receiver refused.
    Refused(PeerError),
    /// The answer of the receiver is against the protocol.
    Protocol(&'static str),
    /// The tracker has missed writes, or still has marks while the guest is frozen.
    TrackerInvalid,
    /// The source cannot be read.
    SourceFailed(String),
    /// The user stopped the copy.
    Cancelled,
}

/// The numbers of a handover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HandoverReport {
    /// From the request to freeze until COMMITTED; for a duplicate, until the guest was thawed. Zero if the sender was
    /// restarted meanwhile.
    pub frozen: Duration,
    /// The freeze command alone.
    pub freeze: Duration,
    /// From the frozen guest to SEAL: the last reads, and sending.
    pub last_pass: Duration,
    /// From SEAL to its answer.
    pub seal: Duration,
    /// Bytes of the last pass.
    pub last_bytes: u64,
    /// The parts of the seal at the receiver.
    pub receiver: ReceiverTimes,
}

/// The state of a sender, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SenderState {
    /// Nothing was sent.
    New,
    /// The sides get to know each other.
    Preflight,
    /// Units that the receiver holds are compared by hash.
    Comparing,
    /// The first pass.
    Full,
    /// What was written is sent again.
    Rounds,
    /// The same, and the guest is limited.
    Throttled,
    /// The receiver makes the data durable.
    Presync,
    /// All is ready to freeze the guest; rounds continue.
    Armed,
    /// The guest is frozen.
    Frozen,
    /// The last data is sent.
    Last,
    /// The receiver makes it durable and compares.
    Seal,
    /// The disk is handed over.
    Commit,
    /// The receiver owns the disk.
    Done,
    /// The disk may be handed over: the receiver is asked.
    InDoubt,
    /// The connection is interrupted; the next one continues.
    Resumable,
    /// The copy ended, and the guest runs here.
    Failed,
}
