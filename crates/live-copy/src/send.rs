//! The sender of a copy: carries out what the state machine asks for.
//!
//! ```text
//! main thread     events -> state machine -> actions
//! readers         ranges of the source
//! control         the tracker, freeze and thaw, one after another
//! link            frames in, frames out
//! connecting      one attempt at a time
//! ```

use std::ops::Range;
use std::sync::mpsc::{Receiver as Inbox, RecvTimeoutError, Sender as Outbox, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use holdfast_block::{Clock, ExtentKind, error_text, for_each_extent, is_zero, to_usize};
use holdfast_engine::{Interrupted, Job};
use holdfast_transfer::{
    ConvergenceOptions, CopyPurpose, DiskId, ErrorCode, Forecast, FreezeTrigger, HandoverReport, Message, Outcome,
    RangeContent, Sender, SenderAction, SenderEvent, SenderOptions, SenderWarning, SessionId, UnitLayout,
};

use crate::error::{Error, Result};
use crate::link::{Link, LinkEvent};
use crate::phases::{PhaseTime, PhaseTimes};
use crate::request::{ReceiveRequest, RefusalKind};
use crate::source::{LiveSource, ReadContent, timed};
use crate::stream::{ByteStream, Connector};

/// Threads that read the source.
const READER_COUNT: usize = 4;
/// Delays before another attempt to connect.
const RETRY_DELAY_MIN: Duration = Duration::from_millis(200);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(5);
/// Attempts to thaw before the error is reported.
const THAW_COUNT: u32 = 5;
const THAW_INTERVAL: Duration = Duration::from_millis(200);

/// A copy of a disk.
pub struct LiveCopyRequest<'a> {
    /// The disk.
    pub source: &'a dyn LiveSource,
    /// How it is divided.
    pub layout: UnitLayout,
    /// Where the receiver is.
    pub connector: Arc<dyn Connector>,
    /// What the receiver is to do.
    pub receive: ReceiveRequest,
    /// The same for each attempt to copy this disk to this target.
    pub session: SessionId,
    /// The disk, within the session.
    pub disk: DiskId,
    /// When the source is frozen.
    pub convergence: ConvergenceOptions,
    /// Number of attempts to freeze.
    pub attempt_count_max: u32,
    /// For how long a lost connection is tried again.
    pub retry_time: Duration,
    /// Randomness for the numbers of connections.
    pub randomness: &'a dyn holdfast_repo::key::Randomness,
    /// Name and version of the program.
    pub program: String,
    /// Sees rounds and warnings as they come.
    pub observer: &'a dyn CopyObserver,
}

/// Sees what happens.
pub trait CopyObserver: Sync {
    /// A round has ended.
    fn round(&self, forecast: &Forecast);
    /// The source was frozen for too long, and was thawed; or another event that a user should know.
    fn warning(&self, warning: CopyWarning);
}

/// What a user should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopyWarning {
    /// Of the protocol.
    Protocol(SenderWarning),
    /// The connection was lost, and is made again.
    ConnectionLost {
        /// The reason of the other side, if it gave one.
        reason: Option<String>,
    },
    /// The source could not be frozen.
    NotFrozen {
        /// Why.
        reason: String,
    },
    /// The source writes too fast, and cannot be slowed down.
    NotThrottled,
}

/// The result of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveCopyReport {
    /// The frozen time with its parts.
    pub handover: HandoverReport,
    /// How long each phase took, in order.
    pub phases: Vec<PhaseTime>,
    /// The rounds.
    pub rounds: Vec<Forecast>,
    /// Bytes of the disk.
    pub size_bytes: u64,
    /// Bytes of frames that were sent.
    pub sent_bytes: u64,
    /// Bytes that were read as zeroes or holes, and not sent.
    pub zero_bytes: u64,
    /// Number of connections that were lost.
    pub lost_connection_count: u32,
    /// How long it took.
    pub duration: Duration,
    /// Whether an earlier attempt had completed the copy already.
    pub was_complete: bool,
}

/// Copies a disk. The source runs on afterwards, and in case of an error.
///
/// # Errors
/// The copy is not complete. Unless the error says otherwise, another attempt continues it.
pub fn copy_live(request: &LiveCopyRequest<'_>, job: Job<'_>) -> Result<LiveCopyReport> {
    let source = request.source;
    let sender = Sender::new(SenderOptions {
        purpose: CopyPurpose::Duplicate,
        session: request.session,
        disk: request.disk,
        layout: request.layout,
        granularity_bytes: source.granularity_bytes(),
        first_pass_takes: source.first_pass_takes(),
        capabilities: holdfast_transfer::Capabilities::ALL,
        stream_count: 1,
        convergence: request.convergence,
        trigger: FreezeTrigger::WhenReady,
        attempt_count_max: request.attempt_count_max,
        program: request.program.clone(),
    })?;
    let (events, inbox) = channel();
    let (reads, read_queue) = channel();
    let (controls, control_queue) = channel();
    let read_queue = Mutex::new(read_queue);
    let result = std::thread::scope(|scope| {
        for _ in 0..READER_COUNT {
            let (events, queue) = (events.clone(), &read_queue);
            scope.spawn(move || read_ranges(source, queue, &events));
        }
        let to_control = events.clone();
        scope.spawn(move || control(source, &control_queue, &to_control, job.clock));
        let mut driver = Driver {
            request,
            job,
            sender,
            events,
            reads,
            controls,
            link: None,
            connection: 0,
            connecting: Connecting::default(),
            is_cancelled: false,
            tally: Tally::new(job.clock.now()),
            outcome: None,
        };
        let result = driver.run(&inbox);
        if let Some(link) = driver.link.take() {
            link.close();
        }
        result
    });
    let stopped = source.stop_tracking();
    let report = result?;
    stopped?;
    Ok(report)
}

/// What the main thread waits for.
enum Event {
    Sender(SenderEvent),
    Link {
        connection: u64,
        event: LinkEvent,
    },
    Opened(Result<ByteStream>),
    /// The source could not be frozen; the sender is told by another event.
    NotFrozen(String),
    NotThrottled,
}

struct ReadTask {
    read: u64,
    range: Range<u64>,
}

/// Attempts to connect.
#[derive(Default)]
struct Connecting {
    /// When the present series of attempts began.
    since: Option<Duration>,
    attempt_count: u32,
    last_reason: String,
}

/// What the report counts.
struct Tally {
    started: Duration,
    rounds: Vec<Forecast>,
    phases: PhaseTimes,
    sent_bytes: u64,
    zero_bytes: u64,
    lost_count: u32,
}

impl Tally {
    fn new(now: Duration) -> Self {
        Self {
            started: now,
            rounds: Vec::new(),
            phases: PhaseTimes::new(now),
            sent_bytes: 0,
            zero_bytes: 0,
            lost_count: 0,
        }
    }
}

struct Driver<'a> {
    request: &'a LiveCopyRequest<'a>,
    job: Job<'a>,
    sender: Sender,
    events: Outbox<Event>,
    reads: Outbox<ReadTask>,
    controls: Outbox<SenderAction>,
    link: Option<Link>,
    /// The number of the present connection.
    connection: u64,
    connecting: Connecting,
    is_cancelled: bool,
    tally: Tally,
    outcome: Option<Result<Option<HandoverReport>>>,
}

impl Driver<'_> {
    fn run(&mut self, inbox: &Inbox<Event>) -> Result<LiveCopyReport> {
        self.act();
        loop {
            if let Some(outcome) = self.outcome.take() {
                return outcome.map(|handover| self.report(handover));
            }
            let now = self.job.clock.now();
            let patience = self.sender.next_tick(now).saturating_sub(now);
            match inbox.recv_timeout(patience) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => self.feed(SenderEvent::Tick),
                Err(RecvTimeoutError::Disconnected) => unreachable!("this thread holds a sender"),
            }
            if self.job.interrupt.is_requested() && !self.is_cancelled {
                self.is_cancelled = true;
                self.feed(SenderEvent::Cancel);
            }
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Sender(event) => self.feed(event),
            Event::Link { connection, event } if connection == self.connection && self.link.is_some() => match event {
                LinkEvent::Frame(frame) => {
                    self.connecting = Connecting::default();
                    self.feed(SenderEvent::Received(frame));
                }
                LinkEvent::Closed => self.lost(),
            },
            Event::Link { .. } => {}
            Event::Opened(Ok(stream)) => self.opened(stream),
            Event::Opened(Err(error)) => self.not_opened(error),
            Event::NotFrozen(reason) => self.request.observer.warning(CopyWarning::NotFrozen { reason }),
            Event::NotThrottled => self.request.observer.warning(CopyWarning::NotThrottled),
        }
    }

    fn feed(&mut self, event: SenderEvent) {
        let now = self.job.clock.now();
        self.sender.handle(event, now);
        self.tally.phases.enter(self.sender.state(), now, self.job.progress);
        self.act();
    }

    fn act(&mut self) {
        while let Some(action) = self.sender.next_action() {
            match action {
                SenderAction::Connect => self.connect(),
                SenderAction::Send(frame) => {
                    if let Message::Range(range) = &frame.message {
                        let length = range.range.end - range.range.start;
                        self.job.progress.advance(length);
                        if !matches!(range.content, RangeContent::Data(_)) {
                            self.tally.zero_bytes += length;
                        }
                    }
                    self.tally.sent_bytes += frame.encoded_bytes();
                    if let Some(link) = &self.link {
                        link.send(frame);
                    }
                }
                SenderAction::Disconnect => {
                    if let Some(link) = self.link.take() {
                        link.close();
                    }
                }
                SenderAction::Read { read, range } => {
                    self.reads.send(ReadTask { read, range }).ok();
                }
                SenderAction::Report(forecast) => {
                    self.request.observer.round(&forecast);
                    self.tally.rounds.push(forecast);
                }
                SenderAction::Warn(warning) => self.request.observer.warning(CopyWarning::Protocol(warning)),
                SenderAction::Finished(outcome) => self.finished(outcome),
                control => {
                    self.controls.send(control).ok();
                }
            }
        }
    }

    fn connect(&mut self) {
        let now = self.job.clock.now();
        let since = *self.connecting.since.get_or_insert(now);
        let waited = now.saturating_sub(since);
        let is_repeated = self.connection > 0 || self.connecting.attempt_count > 0;
        if is_repeated && waited >= self.request.retry_time {
            self.outcome.get_or_insert(Err(Error::GivenUp {
                place: self.request.connector.place(),
                waited_s: waited.as_secs(),
                reason: self.connecting.last_reason.clone(),
            }));
            return;
        }
        let delay = match self.connecting.attempt_count {
            0 => Duration::ZERO,
            count => RETRY_DELAY_MIN.saturating_mul(1 << count.min(8)).min(RETRY_DELAY_MAX),
        };
        self.connecting.attempt_count += 1;
        let connector = Arc::clone(&self.request.connector);
        let receive = ReceiveRequest {
            // What was deleted for the first attempt is not deleted again.
            interrupted: if self.connection == 0 {
                self.request.receive.interrupted
            } else {
                crate::request::InterruptedCopy::Continue
            },
            ..self.request.receive.clone()
        };
        let events = self.events.clone();
        let clock = holdfast_block::SystemClock::new();
        // It is not waited for at the end: an attempt may take as long as the network lets it.
        let started = std::thread::Builder::new().name("connect".to_owned()).spawn(move || {
            clock.sleep(delay);
            events.send(Event::Opened(connector.connect(&receive))).ok();
        });
        if let Err(error) = started {
            self.connecting.last_reason = error.to_string();
            self.feed(SenderEvent::Disconnected);
        }
    }

    fn opened(&mut self, stream: ByteStream) {
        self.connection += 1;
        let connection = self.connection;
        let events = self.events.clone();
        let deliver = move |event| events.send(Event::Link { connection, event }).is_ok();
        let clock: Arc<dyn Clock> = Arc::new(holdfast_block::SystemClock::new());
        let mut random = [0; 8];
        let linked = match self.request.randomness.fill(&mut random) {
            Ok(()) => Link::start(stream, clock, deliver).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        match linked {
            Ok(link) => {
                self.link = Some(link);
                self.feed(SenderEvent::Connected {
                    connection: u64::from_le_bytes(random),
                });
            }
            Err(reason) => {
                self.connecting.last_reason = reason;
                self.feed(SenderEvent::Disconnected);
            }
        }
    }

    fn not_opened(&mut self, error: Error) {
        if matches!(error, Error::Refused { .. }) {
            self.outcome.get_or_insert(Err(error));
            self.feed(SenderEvent::Cancel);
            return;
        }
        self.connecting.last_reason = error_text(&error);
        self.feed(SenderEvent::Disconnected);
    }

    /// The connection has ended. The sender asks for another one.
    fn lost(&mut self) {
        let reason = self.link.take().and_then(Link::close);
        self.tally.lost_count += 1;
        if let Some(reason) = &reason {
            self.connecting.last_reason.clone_from(reason);
        }
        self.request.observer.warning(CopyWarning::ConnectionLost { reason });
        self.feed(SenderEvent::Disconnected);
    }

    fn finished(&mut self, outcome: Outcome) {
        let place = self.request.connector.place();
        let result = match outcome {
            Outcome::Completed(handover) => Ok(Some(handover)),
            Outcome::Refused(error) if error.code == ErrorCode::AlreadyOwner => Ok(None),
            Outcome::Refused(error) => Err(Error::Refused {
                place,
                kind: match error.code {
                    ErrorCode::WrongSession | ErrorCode::WrongDisk => RefusalKind::OtherCopy,
                    ErrorCode::TooLarge => RefusalKind::NoSpace,
                    ErrorCode::Version | ErrorCode::Protocol => RefusalKind::OtherVersion,
                    _ => RefusalKind::Io,
                },
                reason: error.text,
            }),
            Outcome::NotConverging(forecast) => Err(Error::NotConverging(forecast)),
            Outcome::FrozenTooLong => Err(Error::FrozenTooLong {
                attempt_count: self.request.attempt_count_max,
                frozen_max_ms: self.request.convergence.frozen_max.as_millis(),
            }),
            Outcome::Protocol(reason) => Err(Error::Protocol {
                place,
                reason: reason.to_owned(),
            }),
            Outcome::TrackerInvalid => Err(Error::TrackerInvalid),
            Outcome::SourceFailed(reason) => Err(Error::Source { reason }),
            Outcome::Cancelled => Err(Error::Engine(Interrupted.into())),
        };
        self.outcome.get_or_insert(result);
    }

    fn report(&mut self, handover: Option<HandoverReport>) -> LiveCopyReport {
        let now = self.job.clock.now();
        let tally = &mut self.tally;
        LiveCopyReport {
            was_complete: handover.is_none(),
            handover: handover.unwrap_or_default(),
            phases: tally.phases.end(now),
            rounds: std::mem::take(&mut tally.rounds),
            size_bytes: self.request.layout.size_bytes(),
            sent_bytes: tally.sent_bytes,
            zero_bytes: tally.zero_bytes,
            lost_connection_count: tally.lost_count,
            duration: now.saturating_sub(tally.started),
        }
    }
}

/// Reads ranges until there are none left.
fn read_ranges(source: &dyn LiveSource, queue: &Mutex<Inbox<ReadTask>>, events: &Outbox<Event>) {
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(ReadTask { read, range }) = next else { return };
        let event = match read_range(source, &range) {
            Ok(content) => SenderEvent::Read { read, content },
            Err(error) => SenderEvent::SourceFailed {
                detail: error_text(&error),
            },
        };
        if events.send(Event::Sender(event)).is_err() {
            return;
        }
    }
}

/// Reads a range. What the source reports as zero or absent is not read.
fn read_range(source: &dyn LiveSource, range: &Range<u64>) -> Result<RangeContent> {
    let device = source.device();
    let length = range.end - range.start;
    let mut has_data = false;
    for_each_extent(device, range.clone(), |extent| {
        has_data |= extent.kind == ExtentKind::Data;
        Ok(())
    })?;
    if !has_data {
        source.was_read(range.start, ReadContent::Zero(length));
        return Ok(RangeContent::Hole);
    }
    let mut bytes = vec![0; to_usize(length)];
    device.read_at(&mut bytes, range.start)?;
    source.was_read(range.start, ReadContent::Data(&bytes));
    Ok(if is_zero(&bytes) {
        RangeContent::Zero
    } else {
        RangeContent::Data(bytes)
    })
}

/// Carries out what concerns the tracker and the guest, in order.
fn control(source: &dyn LiveSource, queue: &Inbox<SenderAction>, events: &Outbox<Event>, clock: &dyn Clock) {
    while let Ok(action) = queue.recv() {
        let event = match control_once(source, action, events, clock) {
            Ok(Some(event)) => event,
            Ok(None) => continue,
            Err(error) => SenderEvent::SourceFailed {
                detail: error_text(&error),
            },
        };
        events.send(Event::Sender(event)).ok();
    }
}

fn control_once(
    source: &dyn LiveSource,
    action: SenderAction,
    events: &Outbox<Event>,
    clock: &dyn Clock,
) -> Result<Option<SenderEvent>> {
    Ok(Some(match action {
        SenderAction::StartTracker => {
            source.start_tracking()?;
            SenderEvent::TrackerStarted
        }
        SenderAction::TakeDirty { query } => {
            let (marks, took) = timed(clock, || source.take_marks());
            SenderEvent::DirtyTaken {
                query,
                marks: marks?,
                took,
            }
        }
        SenderAction::CountDirty { query } => SenderEvent::DirtyCounted {
            query,
            dirty_bytes: source.count_marks()?,
        },
        SenderAction::CheckTracker { query } => SenderEvent::TrackerChecked {
            query,
            check: source.check()?,
        },
        SenderAction::Freeze { attempt } => match source.freeze() {
            Ok(()) => SenderEvent::Frozen { attempt },
            Err(error) => {
                events.send(Event::NotFrozen(error_text(&error))).ok();
                source.thaw().ok();
                SenderEvent::FreezeFailed { attempt }
            }
        },
        SenderAction::Thaw => {
            thaw(source, clock)?;
            return Ok(None);
        }
        SenderAction::Throttle { dirty_bytes_per_s_max } => {
            if !source.throttle(dirty_bytes_per_s_max)? {
                events.send(Event::NotThrottled).ok();
            }
            return Ok(None);
        }
        SenderAction::Unthrottle => {
            source.unthrottle()?;
            return Ok(None);
        }
        // The note of a handover: a duplicate has none.
        _ => return Ok(None),
    }))
}

fn thaw(source: &dyn LiveSource, clock: &dyn Clock) -> Result<()> {
    let mut result = source.thaw();
    for _ in 1..THAW_COUNT {
        if result.is_ok() {
            break;
        }
        clock.sleep(THAW_INTERVAL);
        result = source.thaw();
    }
    result
}
