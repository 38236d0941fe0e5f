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
//! - COMMIT of a handover is sent only after the caller has durably noted it, so that a restarted sender asks first. A
//!   duplicate needs no note: the guest runs on whatever the answer is.

mod event;
mod greeting;
mod handover;
mod link;
mod passes;
mod progress;

use std::collections::VecDeque;
use std::time::Duration;

use crate::convergence::ConvergenceRule;
use crate::traffic::LinkTraffic;
use crate::wire::{Capabilities, Message};
pub use event::{
    CopyPurpose, FirstPassTakes, FreezeTrigger, HandoverNote, HandoverReport, Outcome, SenderAction, SenderEvent,
    SenderOptions, SenderState, SenderWarning, TrackerCheck,
};
use link::{Liveness, SenderLink};
use progress::CopyProgress;

/// A promise is broken after its end, not at it.
const TICK_DELAY: Duration = Duration::from_millis(1);

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
    /// The guest is frozen; reads of the last round, and marks that were taken before, are awaited.
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
    /// When everything was sent. Counting the marks afterwards may take long.
    sent_at: Option<Duration>,
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
    /// Number of requests for marks that are not answered.
    taking_count: u32,
    /// The request to the tracker whose answer is awaited. Answers to earlier ones do not advance the copy.
    query: u64,
    retry_count: u32,
    traffic: LinkTraffic,
    /// The longest of the last synchronizations.
    sync_time: Duration,
    /// The longest of the last times that the tracker needed to take marks.
    take_time: Duration,
    /// When the present event was handled.
    now: Duration,
    actions: VecDeque<SenderAction>,
}

impl Sender {
    /// A sender of a new copy, or of an interrupted one after a restart of the program.
    ///
    /// The receiver is asked what it holds, and everything is compared by hash: the marks of the tracker are lost.
    ///
    /// # Errors
    /// The granularity is not one that [`DirtyBitmap`](holdfast_block::DirtyBitmap) supports.
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
            traffic: LinkTraffic::default(),
            sync_time: Duration::ZERO,
            take_time: Duration::ZERO,
            now: Duration::ZERO,
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
            Some(since) if self.can_thaw() => regular.min(since + self.options.convergence.frozen_max + TICK_DELAY),
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

    /// What both sides of the present connection can do; nothing before they have greeted each other. With
    /// [`COMPRESSION`](Capabilities::COMPRESSION), the caller may send frames with data compressed.
    pub fn common_capabilities(&self) -> Capabilities {
        self.link
            .as_ref()
            .map_or(Capabilities::default(), |link| link.capabilities)
    }

    /// Handles an event. `now` is the time since any fixed point.
    pub fn handle(&mut self, event: SenderEvent, now: Duration) {
        if self.is_over() {
            return;
        }
        self.now = now;
        match event {
            SenderEvent::Connected { connection } => self.connected(connection, now),
            SenderEvent::Disconnected => self.disconnected(),
            SenderEvent::Received(frame) => self.received(frame, now),
            SenderEvent::Written(written) => self.traffic.add_written(written),
            SenderEvent::TrackerStarted => self.tracker_started(),
            SenderEvent::DirtyTaken { query, marks, took } => {
                self.take_time = took.max(self.take_time / 2);
                self.dirty_taken(query, marks, now);
            }
            SenderEvent::DirtyCounted { query, dirty_bytes } if query == self.query => self.counted(dirty_bytes, now),
            SenderEvent::TrackerChecked { query, check } if query == self.query => self.tracker_checked(check, now),
            SenderEvent::Read { read, content } => self.read_completed(read, content),
            SenderEvent::SourceFailed { detail } if self.can_thaw() => self.fail(Outcome::SourceFailed(detail)),
            SenderEvent::FreezeRequested => self.freeze_requested(now),
            SenderEvent::FreezeRevoked => self.freeze_revoked(),
            SenderEvent::Frozen { attempt } => self.frozen(attempt, now),
            SenderEvent::FreezeFailed { attempt } => self.freeze_failed(attempt),
            SenderEvent::HandoverNoted(note) => self.handover_noted(note, now),
            SenderEvent::Tick => self.tick(now),
            SenderEvent::Cancel if self.can_thaw() => self.fail(Outcome::Cancelled),
            // Answers to earlier requests; and after COMMIT, only the receiver knows the owner.
            SenderEvent::DirtyCounted { .. }
            | SenderEvent::TrackerChecked { .. }
            | SenderEvent::SourceFailed { .. }
            | SenderEvent::Cancel => {}
        }
        // After the end, the guest is not this sender's any more.
        if !self.is_over() {
            self.keep_promise(now);
            self.pump();
        }
    }

    fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Done | Phase::Failed)
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
        self.send(Message::End { reason });
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
