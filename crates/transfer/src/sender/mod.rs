//! The sender of a copy, without input and output: events in, actions out.
//!
//! ```text
//! NEW -> PREFLIGHT -> [COMPARING] -> FULL -> ROUNDS <-> THROTTLED
//! ROUNDS -> PRESYNC (sync, a round, sync) -> ARMED (rounds continue) -> FROZEN -> LAST (at most twice) -> SEAL
//! SEAL -> COMMIT -> DONE
//! any state before COMMIT, on an error -> the guest is thawed -> RESUMABLE or FAILED
//! COMMIT without an answer -> IN_DOUBT: neither thaw nor start, but ask the receiver until it answers
//! ```
//!
//! Rules that keep the copy right:
//!
//! - Marks are taken from the tracker before the ranges are read. A read that began before belongs to the pass before:
//!   no marks are taken for a new pass while a read is in progress.
//! - The guest is thawed only as long as no COMMIT was sent, or when the receiver has said that it is not the owner.
//! - COMMIT is sent only after the caller has durably noted the handover, so that a restarted sender asks first.

mod greeting;
mod handover;
mod link;
mod passes;
mod progress;

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use holdfast_block::DirtyBitmap;

use crate::convergence::{ConvergenceOptions, ConvergenceRule, Forecast};
use crate::layout::UnitLayout;
use crate::wire::{
    Capabilities, DiskId, Frame, Message, PeerError, RangeContent, ReceiverId, ReceiverTimes, SessionId,
};
use link::{Liveness, SenderLink};
use progress::CopyProgress;

/// When the guest is frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FreezeTrigger {
    /// As soon as the prediction permits it.
    WhenReady,
    /// When the caller requests it ([`SenderEvent::FreezeRequested`]), for example after the memory of the machine was
    /// sent. Rounds continue until then.
    OnRequest,
}

/// How a sender behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SenderOptions {
    /// The copy.
    pub session: SessionId,
    /// The disk.
    pub disk: DiskId,
    /// Its dimensions.
    pub layout: UnitLayout,
    /// Bytes that one mark of the tracker covers; at most a unit.
    pub granularity_bytes: u32,
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
    /// A stream of the connection ended, or delivered bytes that are no frame.
    Disconnected,
    /// A frame arrived.
    Received(Frame),
    /// The tracker records all writes from now on.
    TrackerStarted,
    /// The marks that were taken, of the granularity and size of the options.
    DirtyTaken {
        /// Which request this answers.
        query: u64,
        /// The marks.
        marks: DirtyBitmap,
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
    /// Time has passed. See [`Sender::next_tick`].
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
    /// said that it is not the owner ([`Sender::in_doubt`]).
    NoteHandover(HandoverNote),
    /// Remove the note, durably.
    ClearHandover,
    /// Show the numbers of a round.
    Report(Forecast),
    /// Show a warning.
    Warn(SenderWarning),
    /// The copy ended. The sender is of no more use.
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
    /// Nobody knows which side owns the disk, and this answer does not help. The sender continues to ask.
    StillInDoubt(PeerError),
}

/// How a copy ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The receiver owns the disk. The guest must not run here any more.
    HandedOver(HandoverReport),
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
    /// From the request to freeze to COMMITTED. Zero if the sender was restarted meanwhile.
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

/// What the sender waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Disconnected,
    Greeting,
    AskingOwner,
    StartingTracker,
    Offering,
    Comparing,
    /// The first pass, or a round.
    Sending,
    Taking,
    Counting,
    /// A synchronization is awaited, to freeze the guest soon after.
    Syncing,
    /// A last count before arming.
    CountingToArm,
    /// FREEZE_OK is awaited.
    Intending,
    /// Armed, and nothing is dirty.
    Resting,
    Freezing,
    /// The guest is frozen; reads of the last round are awaited.
    Draining,
    TakingLast,
    SendingLast,
    Checking,
    Sealing,
    Noting,
    Committing,
    Done,
    Failed,
}

/// Whether writes are recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TrackerState {
    Stopped,
    /// A second request would lose the marks since the first.
    Starting,
    Started,
}

/// How far the rounds are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Rounds,
    /// This many synchronizations are awaited.
    Presync(u32),
    Armed,
}

/// Whether the prediction has to be within the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FreezeLimit {
    Kept,
    /// The user wants the copy to end.
    Waived,
}

/// Attempts to hand over.
#[derive(Debug)]
struct FreezeProgress {
    attempt: u32,
    failed_count: u32,
    /// When the guest was asked to freeze. While this is set, the guest may be frozen.
    since: Option<Duration>,
    /// When a step of the handover began.
    step_since: Duration,
    pass_count: u32,
    is_requested: bool,
    limit: FreezeLimit,
    seal: u64,
    report: HandoverReport,
}

/// Numbers of the round in progress.
#[derive(Debug, Default)]
struct RoundProgress {
    number: u32,
    since: Duration,
    frame_count: u64,
    frame_bytes: u64,
    /// Bytes that were sent since the last synchronization, and since marks were last taken.
    unsynced_bytes: u64,
    untaken_bytes: u64,
}

/// The sender of a copy.
#[derive(Debug)]
pub struct Sender {
    options: SenderOptions,
    phase: Phase,
    stage: Stage,
    link: Option<SenderLink>,
    copy: CopyProgress,
    rule: ConvergenceRule,
    round: RoundProgress,
    freeze: FreezeProgress,
    /// The handover whose COMMIT may have arrived.
    doubt: Option<HandoverNote>,
    tracker: TrackerState,
    /// Requests for marks that are not answered.
    taking_count: u32,
    /// The request to the tracker whose answer is awaited. Answers to earlier ones do not advance the copy.
    query: u64,
    retry_count: u32,
    /// The longest of the last synchronizations.
    sync_time: Duration,
    actions: VecDeque<SenderAction>,
}

impl Sender {
    /// A sender of a new copy, or of an interrupted one after a restart of the program.
    ///
    /// The receiver is asked what it holds, and everything is compared by hash: the marks of the tracker are lost.
    ///
    /// # Errors
    /// The granularity is not one that [`DirtyBitmap`] supports.
    pub fn new(options: SenderOptions) -> holdfast_block::Result<Self> {
        let copy = CopyProgress::new(options.layout, options.granularity_bytes)?;
        let rule = ConvergenceRule::new(options.convergence, options.layout.size_bytes());
        Ok(Self {
            options,
            phase: Phase::Disconnected,
            stage: Stage::Rounds,
            link: None,
            copy,
            rule,
            round: RoundProgress::default(),
            freeze: FreezeProgress {
                attempt: 0,
                failed_count: 0,
                since: None,
                step_since: Duration::ZERO,
                pass_count: 0,
                is_requested: false,
                limit: FreezeLimit::Kept,
                seal: 0,
                report: HandoverReport::default(),
            },
            doubt: None,
            tracker: TrackerState::Stopped,
            taking_count: 0,
            query: 0,
            retry_count: 0,
            sync_time: Duration::ZERO,
            actions: VecDeque::from([SenderAction::Connect]),
        })
    }

    /// A sender after a restart of the program, with the note of a handover. The guest must not run.
    ///
    /// If the receiver is not the owner, the sender returns [`SenderAction::Thaw`], and continues with the copy.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn in_doubt(options: SenderOptions, note: HandoverNote) -> holdfast_block::Result<Self> {
        let mut sender = Self::new(options)?;
        sender.doubt = Some(note);
        sender.freeze.seal = note.seal;
        sender.freeze.since = Some(Duration::ZERO);
        Ok(sender)
    }

    /// The next action; the caller takes all of them after each event, and once at the start.
    pub fn next_action(&mut self) -> Option<SenderAction> {
        self.actions.pop_front()
    }

    /// When the caller should send [`SenderEvent::Tick`] at the latest.
    pub fn next_tick(&self, now: Duration) -> Duration {
        let regular = now + Duration::from_millis(100);
        match self.freeze.since {
            Some(since) if self.can_thaw() => regular.min(since + self.options.convergence.frozen_max),
            _ => regular,
        }
    }

    /// The state.
    pub fn state(&self) -> SenderState {
        match self.phase {
            Phase::Done => SenderState::Done,
            Phase::Failed => SenderState::Failed,
            Phase::Committing => SenderState::Commit,
            _ if self.doubt.is_some() => SenderState::InDoubt,
            Phase::Disconnected if self.tracker == TrackerState::Stopped => SenderState::New,
            Phase::Disconnected => SenderState::Resumable,
            Phase::Greeting | Phase::AskingOwner | Phase::StartingTracker | Phase::Offering => SenderState::Preflight,
            Phase::Comparing => SenderState::Comparing,
            Phase::Freezing | Phase::Draining | Phase::TakingLast => SenderState::Frozen,
            Phase::SendingLast | Phase::Checking => SenderState::Last,
            Phase::Sealing | Phase::Noting => SenderState::Seal,
            Phase::Sending
            | Phase::Taking
            | Phase::Counting
            | Phase::Syncing
            | Phase::CountingToArm
            | Phase::Intending
            | Phase::Resting => match self.stage {
                Stage::Armed => SenderState::Armed,
                Stage::Presync(_) => SenderState::Presync,
                Stage::Rounds if self.copy.is_first_pass => SenderState::Full,
                Stage::Rounds if self.rule.is_throttled() => SenderState::Throttled,
                Stage::Rounds => SenderState::Rounds,
            },
        }
    }

    /// Handles an event. `now` is the time since any fixed point.
    pub fn handle(&mut self, event: SenderEvent, now: Duration) {
        if matches!(self.phase, Phase::Done | Phase::Failed) {
            return;
        }
        match event {
            SenderEvent::Connected { connection } => self.connected(connection, now),
            SenderEvent::Disconnected => self.disconnected(),
            SenderEvent::Received(frame) => self.received(frame.message, now),
            SenderEvent::TrackerStarted => self.tracker_started(),
            SenderEvent::DirtyTaken { query, marks } => self.dirty_taken(query, marks, now),
            SenderEvent::DirtyCounted { query, dirty_bytes } if query == self.query => self.counted(dirty_bytes, now),
            SenderEvent::TrackerChecked { query, check } if query == self.query => self.tracker_checked(check, now),
            SenderEvent::DirtyCounted { .. } | SenderEvent::TrackerChecked { .. } => {}
            SenderEvent::Read { read, content } => self.read_completed(read, content),
            SenderEvent::SourceFailed { detail } if self.can_thaw() => self.fail(Outcome::SourceFailed(detail)),
            SenderEvent::FreezeRequested => self.freeze_requested(now),
            SenderEvent::Frozen { attempt } => self.frozen(attempt, now),
            SenderEvent::FreezeFailed { attempt } => self.freeze_failed(attempt),
            SenderEvent::HandoverNoted(note) => self.handover_noted(note, now),
            SenderEvent::Tick => self.tick(now),
            SenderEvent::Cancel if self.can_thaw() => self.fail(Outcome::Cancelled),
            SenderEvent::SourceFailed { .. } | SenderEvent::Cancel => {}
        }
        self.keep_promise(now);
        self.pump();
    }

    fn act(&mut self, action: SenderAction) {
        self.actions.push_back(action);
    }

    fn send(&mut self, message: Message) {
        if let Some(link) = &mut self.link {
            let frame = link.control(message);
            self.act(SenderAction::Send(frame));
        }
    }

    /// The number of a new request to the tracker.
    fn new_query(&mut self) -> u64 {
        self.query += 1;
        self.query
    }

    fn take_dirty(&mut self) {
        self.taking_count += 1;
        let query = self.new_query();
        self.act(SenderAction::TakeDirty { query });
    }

    /// Whether this side owns the disk for certain.
    fn can_thaw(&self) -> bool {
        self.doubt.is_none()
    }

    /// Lets the guest run, if it may be frozen.
    fn thaw(&mut self) {
        assert!(self.can_thaw(), "the receiver may own the disk");
        if self.freeze.since.take().is_some() {
            self.act(SenderAction::Thaw);
            self.act(SenderAction::ClearHandover);
        }
    }

    /// Ends the copy; the guest runs on here.
    fn fail(&mut self, outcome: Outcome) {
        self.thaw();
        if self.rule.is_throttled() {
            self.act(SenderAction::Unthrottle);
        }
        let reason = format!("{outcome:?}");
        self.send(Message::Abort { reason });
        if self.link.take().is_some() {
            self.act(SenderAction::Disconnect);
        }
        self.phase = Phase::Failed;
        self.act(SenderAction::Finished(outcome));
    }

    fn tick(&mut self, now: Duration) {
        let Some(link) = &mut self.link else { return };
        match link.liveness(now) {
            Liveness::Alive => {}
            Liveness::PingDue => {
                let frame = link.ping(now);
                self.act(SenderAction::Send(frame));
            }
            Liveness::Silent => self.drop_link(),
        }
        if self.phase == Phase::Resting {
            self.count(Phase::Counting);
        }
    }
}
