//! The sender of a copy: carries out what the state machine asks for.
//!
//! ```text
//! main thread     events -> state machine -> actions
//! readers         ranges of the source
//! control         the tracker, freeze and thaw, one after another
//! link            frames in, frames out, and compression of those that wait
//! connecting      one attempt at a time
//! ```

mod director;
mod request;
mod source_work;

use std::sync::mpsc::{Receiver as Inbox, RecvTimeoutError, Sender as Outbox, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_block::error_text;
use holdfast_engine::{Interrupted, Job, Unit};
use holdfast_transfer::{
    Capabilities, ErrorCode, Forecast, Frame, FrameBytes, HandoverReport, Message, Outcome, RangeContent, Sender,
    SenderAction, SenderEvent, SenderOptions, SenderState,
};

use crate::error::{Error, Result};
use crate::frame_queue::FrameTreatment;
use crate::link::{Link, LinkCompression, LinkEvent, LinkOptions};
use crate::phases::PhaseTimes;
use crate::request::{ReceiveRequest, RefusalKind, SeedProgress};
use crate::stream::ByteStream;
pub use director::CopyDirector;
pub use request::{
    CopyCompression, CopyObserver, CopyWarning, LiveCopyReport, LiveCopyRequest, MachineHandover, session_of,
};
use source_work::{ControlledSource, ReadTask, read_ranges};

/// Threads that read the source.
const READER_COUNT: usize = 4;
/// Delays before another attempt to connect.
const RETRY_DELAY_MIN: Duration = Duration::from_millis(200);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(5);

/// Copies a disk. The source runs on afterwards, and in case of an error.
///
/// # Errors
/// The copy is not complete. Unless the error says otherwise, another attempt continues it.
pub fn copy_live(request: &LiveCopyRequest<'_>, job: Job<'_>) -> Result<LiveCopyReport> {
    let source = request.source;
    let sender = Sender::new(SenderOptions {
        purpose: request.purpose,
        session: request.session,
        disk: request.disk,
        layout: request.layout,
        granularity_bytes: source.granularity_bytes(),
        first_pass_takes: source.first_pass_takes(),
        capabilities: match compression_of(request) {
            LinkCompression::Adaptive => Capabilities::ALL,
            LinkCompression::Off => Capabilities::ALL.without(Capabilities::COMPRESSION),
        },
        stream_count: 1,
        convergence: request.convergence,
        trigger: request.trigger,
        attempt_count_max: request.attempt_count_max,
        program: request.program.clone(),
    })?;
    let (events, inbox) = channel();
    if let Some(director) = request.director {
        director.begin(events.clone());
    }
    let (reads, read_queue) = channel();
    let (controls, control_queue) = channel();
    let read_queue = Mutex::new(read_queue);
    let result = std::thread::scope(|scope| {
        for _ in 0..READER_COUNT {
            let (events, queue) = (events.clone(), &read_queue);
            scope.spawn(move || read_ranges(source, queue, &events));
        }
        let to_control = events.clone();
        let controlled = ControlledSource {
            source,
            events: to_control,
            rate: &request.rate,
            clock: job.clock,
        };
        scope.spawn(move || controlled.control(&control_queue));
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
            state: SenderState::New,
            tally: Tally::new(job.clock.now()),
            outcome: None,
        };
        let result = driver.run(&inbox);
        if let Some(link) = driver.link.take() {
            link.close();
        }
        result
    });
    if let Some(director) = request.director {
        director.end();
    }
    let stopped = source.stop_tracking();
    let report = result?;
    stopped?;
    Ok(report)
}

fn compression_of(request: &LiveCopyRequest<'_>) -> LinkCompression {
    match request.compression {
        CopyCompression::Adaptive if !request.connector.is_local() => LinkCompression::Adaptive,
        CopyCompression::Adaptive | CopyCompression::Off => LinkCompression::Off,
    }
}

/// What the main thread waits for.
enum Event {
    Sender(SenderEvent),
    /// By the director.
    Cancelled,
    Link {
        connection: u64,
        event: LinkEvent,
    },
    /// The receiver copies a seed.
    Seeding(SeedProgress),
    Opened(Result<ByteStream>),
    /// The source could not be frozen. The sender gets an event of its own.
    NotFrozen(String),
    NotThrottled,
}

/// Attempts to connect.
#[derive(Default)]
struct Connecting {
    /// When the present series of attempts began.
    since: Option<Duration>,
    attempt_count: u32,
    last_reason: String,
    /// Bytes of the seed that the receiver has copied in this attempt.
    seeded_bytes: u64,
    /// Whether a receiver has ever begun to copy a seed.
    has_seeded: bool,
}

/// What the report counts.
struct Tally {
    started: Duration,
    rounds: Vec<Forecast>,
    phases: PhaseTimes,
    /// Bytes of frames, before and after compression.
    plain_bytes: u64,
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
            plain_bytes: 0,
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
    /// The state that the observer knows.
    state: SenderState,
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
                self.cancel();
            }
        }
    }

    /// A sender that waits for the answer to COMMIT ignores the request to cancel. The source runs in any case.
    fn cancel(&mut self) {
        self.feed(SenderEvent::Cancel);
        self.outcome
            .get_or_insert_with(|| Err(Error::Engine(Interrupted.into())));
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Sender(event) => self.feed(event),
            Event::Cancelled => self.cancel(),
            Event::Link { connection, event } if connection == self.connection && self.link.is_some() => match event {
                LinkEvent::Frame(frame) => {
                    self.connecting = Connecting::default();
                    self.feed(SenderEvent::Received(frame));
                }
                LinkEvent::Written(written) => self.written(written),
                LinkEvent::Closed => self.lost(),
            },
            Event::Link { .. } => {}
            Event::Seeding(progress) => self.seeding(progress),
            Event::Opened(Ok(stream)) => self.opened(stream),
            Event::Opened(Err(error)) => self.not_opened(error),
            Event::NotFrozen(reason) => self.request.observer.warning(CopyWarning::NotFrozen { reason }),
            Event::NotThrottled => self.request.observer.warning(CopyWarning::NotThrottled),
        }
    }

    fn feed(&mut self, event: SenderEvent) {
        let now = self.job.clock.now();
        self.sender.handle(event, now);
        let size_bytes = self.request.layout.size_bytes();
        let state = self.sender.state();
        self.tally.phases.enter(state, now, self.job.progress, size_bytes);
        // Before the actions: the last one waits until the observer knows how the migration has ended.
        if state != self.state {
            self.state = state;
            self.request.observer.state(state);
        }
        self.act();
    }

    fn act(&mut self) {
        while let Some(action) = self.sender.next_action() {
            match action {
                SenderAction::Connect => self.connect(),
                SenderAction::Send(frame) => self.send(frame),
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
                SenderAction::NoteHandover(note) => self.request.observer.sealed(note),
                SenderAction::Finished(outcome) => {
                    let is_handed_over = matches!(outcome, Outcome::Completed(_));
                    self.finished(outcome);
                    if is_handed_over && self.request.observer.handed_over() == MachineHandover::Failed {
                        return;
                    }
                }
                control => {
                    self.controls.send(control).ok();
                }
            }
        }
    }

    fn send(&mut self, frame: Frame) {
        let mut treatment = FrameTreatment::AsItIs;
        if let Message::Range(range) = &frame.message {
            let length = range.range.end - range.range.start;
            self.job.progress.advance(length);
            if !matches!(range.content, RangeContent::Data(_)) {
                self.tally.zero_bytes += length;
            } else if self.sender.common_capabilities().has(Capabilities::COMPRESSION) {
                treatment = FrameTreatment::MayCompress;
            }
        }
        self.tally.plain_bytes += frame.encoded_bytes();
        self.tally.sent_bytes += frame.encoded_bytes();
        if let Some(link) = &self.link {
            link.send(frame, treatment);
        }
    }

    fn written(&mut self, written: FrameBytes) {
        self.tally.sent_bytes -= written.plain_bytes - written.wire_bytes;
        self.feed(SenderEvent::Written(written));
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
        self.connecting.seeded_bytes = 0;
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
        let clock = Arc::clone(&self.request.clock);
        // It is not waited for at the end: an attempt may take as long as the network lets it.
        let started = std::thread::Builder::new().name("connect".to_owned()).spawn(move || {
            clock.sleep(delay);
            let to_seeding = events.clone();
            let watch = move |progress| {
                to_seeding.send(Event::Seeding(progress)).ok();
            };
            events.send(Event::Opened(connector.connect(&receive, &watch))).ok();
        });
        if let Err(error) = started {
            self.connecting.last_reason = error.to_string();
            self.feed(SenderEvent::Disconnected);
        }
    }

    fn seeding(&mut self, seeding: SeedProgress) {
        let progress = self.job.progress;
        if self.connecting.seeded_bytes == 0 {
            progress.phase("copying the seed at the target", Unit::Bytes);
            progress.total(seeding.total_bytes);
        }
        progress.advance(seeding.done_bytes.saturating_sub(self.connecting.seeded_bytes));
        self.connecting.seeded_bytes = seeding.done_bytes;
        self.connecting.has_seeded = true;
    }

    fn opened(&mut self, stream: ByteStream) {
        self.connection += 1;
        let connection = self.connection;
        let events = self.events.clone();
        let deliver = move |event| events.send(Event::Link { connection, event }).is_ok();
        let clock = Arc::clone(&self.request.clock);
        let mut random = [0; 8];
        let linked = match self.request.randomness.fill(&mut random) {
            Ok(()) => {
                let options = LinkOptions {
                    clock,
                    compression: compression_of(self.request),
                    rate: Arc::clone(&self.request.rate),
                };
                Link::start(stream, options, deliver).map_err(|error| error.to_string())
            }
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
        // Without any answer, the way to the receiver is wrong rather than interrupted.
        let has_answered = self.connection > 0 || self.connecting.has_seeded;
        if matches!(error, Error::Refused { .. }) || !has_answered {
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
                    ErrorCode::TooLarge | ErrorCode::NoSpace => RefusalKind::NoSpace,
                    ErrorCode::Version | ErrorCode::Protocol => RefusalKind::OtherVersion,
                    _ => RefusalKind::Io,
                },
                reason: error.text,
            }),
            Outcome::NotConverging(forecast) => Err(Error::NotConverging(Box::new(forecast))),
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
            plain_bytes: tally.plain_bytes,
            zero_bytes: tally.zero_bytes,
            lost_connection_count: tally.lost_count,
            duration: now.saturating_sub(tally.started),
        }
    }
}
