//! Both hosts and the network, step by step.

use std::collections::BTreeSet;
use std::time::Duration;

use holdfast_block::{SeededRandom, to_usize};
use holdfast_transfer::{
    Capabilities, ConvergenceOptions, CopyPurpose, DiskId, ErrorCode, FirstPassTakes, Frame, FrameBytes, FreezeTrigger,
    LinkId, Message, Outcome, Ownership, PriorContent, RangeCompressor, RangeContent, Receiver, ReceiverAction,
    ReceiverEvent, RoundDecision, Sender, SenderAction, SenderEvent, SenderOptions, SenderState, SenderWarning,
    SessionId, ThrottlePolicy, TrackerCheck, Unconverged, UnitLayout,
};

use super::network::Connection;
use super::options::{FaultFocus, Faults, UNIT_BYTES, WorldOptions};
use super::source::{PendingRead, SECTOR_BYTES, Source};
use super::target::{OpenFile, Target};

const SESSION: SessionId = SessionId([7; 16]);
/// A history that takes more steps than this hangs.
const STEP_COUNT_MAX: u64 = 400_000;
/// By this time at the latest, the sender has learned the time, and its action was carried out.
const TICK_DELAY_MAX: Duration = Duration::from_secs(1);
/// The target that the copy is meant for. Others are stale.
const REAL: usize = 0;

pub(super) struct World {
    options: WorldOptions,
    random: SeededRandom,
    now: Duration,
    source: Source,
    targets: Vec<Target>,
    connections: Vec<Connection>,
    /// The connection of the present sender.
    current: Option<usize>,
    link_count: u64,
    connection_count: u64,
    faults_left: u64,
    writes_left: u64,
    is_completed: bool,
    /// Since when the guest is frozen, if a time was promised.
    promised_since: Option<Duration>,
    is_time_promised: bool,
    freeze_count: u64,
    sent_bytes: u64,
    frame_count: u64,
    /// What happened in this history.
    occurrences: BTreeSet<&'static str>,
}

impl World {
    pub(super) fn random(seed: u64) -> Self {
        Self::new(WorldOptions::random(seed))
    }

    pub(super) fn new(options: WorldOptions) -> Self {
        let mut random = SeededRandom::new(options.seed);
        let size_bytes = options.unit_count * u64::from(UNIT_BYTES);
        // Some units are holes, and the last one may be short.
        let mut disk = random.bytes(size_bytes as usize);
        for unit in disk.chunks_mut(UNIT_BYTES as usize) {
            if options.write_count > 0 {
                match random.below(4) {
                    0 => unit.fill(0),
                    // This compresses.
                    1 => unit[512..].fill(0xCC),
                    _ => {}
                }
            }
        }
        if options.write_count > 0 {
            disk.truncate(disk.len() - to_usize(random.below(7)) * SECTOR_BYTES as usize);
        }
        let mut world = Self {
            random,
            now: Duration::ZERO,
            targets: Vec::new(),
            connections: Vec::new(),
            current: None,
            link_count: 0,
            connection_count: 0,
            faults_left: options.fault_count,
            writes_left: options.write_count,
            is_completed: false,
            promised_since: None,
            is_time_promised: true,
            freeze_count: 0,
            sent_bytes: 0,
            frame_count: 0,
            occurrences: BTreeSet::new(),
            source: Source::new(disk),
            options,
        };
        world.add_target(OpenFile::Ours);
        for number in 0..world.options.stale_target_count {
            let size_bytes = world.disk_bytes();
            world.add_target(OpenFile::Another);
            if number == 1 {
                // This one holds the copy of another session.
                let stale = world.targets.last_mut().unwrap();
                let session = SessionId([9; 16]);
                *stale = Target::with_copy(size_bytes, session, world.options.receiver(size_bytes, 9));
            }
        }
        world.start_sender();
        world
    }

    fn add_target(&mut self, open_file: OpenFile) {
        let options = self.options.receiver(self.disk_bytes(), self.targets.len() as u8);
        let mut content = self.source.disk.clone();
        for (number, unit) in content.chunks_mut(UNIT_BYTES as usize).enumerate() {
            if self.options.prior == PriorContent::Unrelated || number % 8 == 0 {
                unit.fill(0xEE);
            }
        }
        self.targets.push(Target::new(content, open_file, options));
    }

    pub(super) fn disk_bytes(&self) -> u64 {
        self.source.disk.len() as u64
    }

    pub(super) fn freeze_count(&self) -> u64 {
        self.freeze_count
    }

    /// Bytes of data that were sent.
    pub(super) fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    pub(super) fn into_occurrences(self) -> BTreeSet<&'static str> {
        self.occurrences
    }

    /// Frames that were sent by both sides.
    pub(super) fn frame_count(&self) -> u64 {
        self.frame_count
    }

    /// Runs until the disk is handed over, and checks what must hold.
    pub(super) fn run(&mut self) {
        let mut step_count = 0;
        while !self.is_completed {
            step_count += 1;
            assert!(step_count < STEP_COUNT_MAX, "the copy hangs: {}", self.description());
            self.step(step_count);
            self.check();
        }
        let real = &mut self.targets[REAL];
        assert!(
            real.is_owner(),
            "the sender has released the disk, and the target does not own it"
        );
        real.lose_power(&mut self.random);
        assert!(
            self.targets[REAL].is_owner() && self.is_right(&self.targets[REAL].durable),
            "the content is lost with the power"
        );
        let runs_on = self.options.purpose == CopyPurpose::Duplicate;
        assert_eq!(self.source.is_guest_running, runs_on);
    }

    /// Whether a target may own this content: what the guest had written when it was frozen. A duplicate may be that of
    /// an earlier freeze, if the program was killed after it had sent COMMIT.
    fn is_right(&self, content: &[u8]) -> bool {
        match self.options.purpose {
            CopyPurpose::Duplicate => self.source.frozen_disks.iter().any(|disk| disk == content),
            CopyPurpose::Handover => self.source.disk == content,
        }
    }

    fn check(&self) {
        let state = self.source.sender.as_ref().map(Sender::state);
        if let Some(since) = self.promised_since
            && matches!(state, Some(SenderState::Frozen | SenderState::Last | SenderState::Seal))
        {
            let frozen = self.now.saturating_sub(since);
            assert!(
                frozen < self.options.frozen_max + TICK_DELAY_MAX,
                "the guest is frozen for {frozen:?}"
            );
        }
        let owner = self.targets.iter().position(Target::is_owner);
        if let Some(owner) = owner {
            assert_eq!(owner, REAL, "a stale target became the owner");
            assert!(
                self.options.purpose == CopyPurpose::Duplicate || !self.source.is_guest_running,
                "the guest runs, and the target owns the disk"
            );
            let target = &self.targets[REAL];
            assert!(self.is_right(&target.durable), "the target owns a wrong content");
        }
    }

    fn description(&self) -> String {
        let sender = self.source.sender.as_ref().map(Sender::state);
        let receivers: Vec<_> = self
            .targets
            .iter()
            .map(|target| target.receiver.as_ref().map(Receiver::state))
            .collect();
        format!("sender {sender:?}, receivers {receivers:?}, {:?}", self.source.actions)
    }

    fn step(&mut self, number: u64) {
        self.now += Duration::from_micros(self.random.below(1000));
        if self.faults_left > 0 && self.random.one_in(self.fault_interval()) {
            self.faults_left -= 1;
            self.fail();
            return;
        }
        if number.is_multiple_of(self.options.write_interval) && self.writes_left > 0 && self.source.is_guest_running {
            self.writes_left -= 1;
            self.source.guest_writes(&mut self.random);
        }
        match self.random.below(10) {
            0 | 1 => self.source_acts(),
            2 | 3 => self.source_reads(),
            4 | 5 => self.arrive_at_receiver(),
            6 => self.arrive_at_sender(),
            7 => self.target_operates(),
            8 => {
                let answers = if self.random.one_in(40) {
                    &mut self.source.late_answers
                } else {
                    &mut self.source.answers
                };
                if !answers.is_empty() {
                    let answer = answers.swap_remove(to_usize(self.random.below(answers.len() as u64)));
                    self.deliver_to_sender(answer);
                }
            }
            _ => self.notice(),
        }
    }

    /// The number of steps between failures: in half of the histories, they happen where they are most dangerous.
    fn fault_interval(&self) -> u64 {
        let state = self.source.sender.as_ref().map(Sender::state);
        match (state, self.options.focus) {
            (Some(SenderState::Commit | SenderState::InDoubt), FaultFocus::Handover) => 4,
            (Some(SenderState::Seal), FaultFocus::Handover) => 40,
            (_, FaultFocus::Handover) => 2000,
            (_, FaultFocus::Anywhere) => 150,
        }
    }

    /// Something breaks.
    fn fail(&mut self) {
        match self.random.below(6) {
            0 | 1 => self.cut(),
            2 => {
                if !self.source.is_guest_running && self.source.sender.is_some() {
                    self.occurrences.insert("sender crashed while frozen");
                }
                self.close_current();
                self.source.crash();
            }
            3 => self.fail_target(Faults::ReceiverLosesPower),
            4 => self.fail_target(Faults::ConnectionBreaks),
            _ => {
                // An acknowledgement is lost with its connection, and everything else arrives, perhaps much later.
                if let Some(connection) = self.current.map(|current| &mut self.connections[current]) {
                    connection.is_sender_open = false;
                    connection.is_slow = self.random.one_in(2);
                }
            }
        }
    }

    fn cut(&mut self) {
        if let Some(connection) = self.current.map(|current| &mut self.connections[current]) {
            connection.lose();
            connection.is_sender_open = false;
            connection.is_receiver_open = false;
        }
    }

    fn fail_target(&mut self, fault: Faults) {
        let target = to_usize(self.random.below(self.targets.len() as u64));
        if self.targets[target]
            .journal_state()
            .is_some_and(|journal| journal.sync > 0)
        {
            self.occurrences.insert("target lost power after a synchronization");
        }
        let is_decompressing = |operation: &ReceiverAction| matches!(operation, ReceiverAction::Decompress { .. });
        if self.targets[target].operations.iter().any(is_decompressing) {
            self.occurrences.insert("power failed while data was decompressed");
        }
        match fault {
            Faults::ReceiverLosesPower => self.targets[target].lose_power(&mut self.random),
            Faults::ConnectionBreaks => self.targets[target].kill(&mut self.random),
        }
        for connection in self
            .connections
            .iter_mut()
            .filter(|connection| connection.target == target)
        {
            connection.lose();
            connection.is_receiver_open = false;
        }
    }

    fn close_current(&mut self) {
        if let Some(connection) = self.current.take().map(|current| &mut self.connections[current]) {
            connection.is_sender_open = false;
        }
    }

    /// Time passes, ends of connections are noticed, programs are started again.
    fn notice(&mut self) {
        match self.random.below(4) {
            0 => self.deliver_to_sender(SenderEvent::Tick),
            1 => {
                // Most often while a read of a round is in progress.
                let is_armed = self.source.sender.as_ref().map(Sender::state) == Some(SenderState::Armed);
                let interval = if !is_armed {
                    100
                } else if self.source.completed_reads.is_empty() {
                    12
                } else {
                    1
                };
                if self.options.trigger == FreezeTrigger::OnRequest && self.random.one_in(interval) {
                    self.deliver_to_sender(SenderEvent::FreezeRequested);
                }
                if self.options.trigger == FreezeTrigger::OnRequest && self.random.one_in(150) {
                    self.deliver_to_sender(SenderEvent::FreezeRevoked);
                }
            }
            2 => self.notice_closed(),
            _ => {
                if self.source.sender.is_none() && !self.is_completed {
                    self.start_sender();
                }
                let index = to_usize(self.random.below(self.targets.len() as u64));
                let target = &mut self.targets[index];
                if target.receiver.is_none() {
                    target.start();
                }
            }
        }
    }

    fn notice_closed(&mut self) {
        if let Some(current) = self.current {
            let connection = &self.connections[current];
            let is_over = !connection.is_receiver_open && !connection.has_frames_to_sender();
            if is_over || !connection.is_sender_open {
                self.close_current();
                self.deliver_to_sender(SenderEvent::Disconnected);
                return;
            }
        }
        let over = |connection: &&mut Connection| {
            !connection.is_sender_open && connection.is_receiver_open && !connection.has_frames_to_receiver()
        };
        if let Some(connection) = self.connections.iter_mut().find(over) {
            connection.is_receiver_open = false;
            let target = connection.target;
            if let Some(link) = connection.streams.first().map(|stream| stream.link) {
                self.deliver_to_receiver(target, ReceiverEvent::LinkClosed(link));
            }
        }
    }

    fn start_sender(&mut self) {
        let layout = UnitLayout::new(self.disk_bytes(), UNIT_BYTES).unwrap();
        let options = SenderOptions {
            session: SESSION,
            disk: DiskId([1; 16]),
            layout,
            granularity_bytes: SECTOR_BYTES as u32,
            capabilities: self.options.capabilities,
            stream_count: self.options.stream_count,
            convergence: ConvergenceOptions {
                frozen_max: self.options.frozen_max,
                other_frozen: Duration::ZERO,
                throttle: if self.random.one_in(2) {
                    ThrottlePolicy::IfNeeded
                } else {
                    ThrottlePolicy::Never
                },
                unconverged: if self.random.one_in(2) {
                    Unconverged::GiveUp
                } else {
                    Unconverged::FreezeAtMinimum
                },
            },
            trigger: self.options.trigger,
            purpose: self.options.purpose,
            first_pass_takes: if self.random.one_in(2) {
                FirstPassTakes::Often
            } else {
                FirstPassTakes::AtEnd
            },
            attempt_count_max: 3,
            program: "simulation".to_owned(),
        };
        let sender = match self.source.note {
            None => {
                self.source.is_guest_running = true;
                Sender::new(options)
            }
            Some(note) => {
                self.occurrences.insert("sender restarted in doubt");
                Sender::in_doubt(options, note)
            }
        };
        self.source.sender = Some(sender.unwrap());
        self.promised_since = None;
        self.is_time_promised = true;
        self.collect_sender();
    }

    fn deliver_to_sender(&mut self, event: SenderEvent) {
        if let Some(sender) = &mut self.source.sender {
            sender.handle(event, self.now);
            self.collect_sender();
        }
    }

    fn collect_sender(&mut self) {
        let Some(sender) = &mut self.source.sender else { return };
        let mut is_finished = false;
        while let Some(action) = sender.next_action() {
            let is_end = matches!(&action, SenderAction::Disconnect)
                || matches!(&action, SenderAction::Send(frame) if matches!(frame.message, Message::End { .. }));
            assert!(!is_finished || is_end, "{action:?} after the end");
            is_finished |= matches!(action, SenderAction::Finished(_));
            match action {
                SenderAction::Read { read, range } => self.source.reads.push(PendingRead { read, range }),
                action => self.source.actions.push_back(action),
            }
        }
    }

    /// The connection that a link is a stream of.
    fn connection_of(&mut self, link: LinkId) -> &mut Connection {
        let has_link = |connection: &&mut Connection| connection.streams.iter().any(|stream| stream.link == link);
        let found = self.connections.iter_mut().find(has_link);
        found.expect("links are never forgotten")
    }

    fn deliver_to_receiver(&mut self, target: usize, event: ReceiverEvent) {
        let Some(receiver) = &mut self.targets[target].receiver else {
            return;
        };
        receiver.handle(event, self.now);
        let mut actions = Vec::new();
        while let Some(action) = receiver.next_action() {
            actions.push(action);
        }
        for action in actions {
            match action {
                ReceiverAction::Send { link, frame } => {
                    let connection = self.connection_of(link);
                    if connection.is_receiver_open {
                        connection.send_to_sender(link, &frame);
                        self.count_frame();
                    }
                }
                ReceiverAction::Close(link) => self.connection_of(link).is_receiver_open = false,
                ReceiverAction::BecameOwner { .. } => {}
                // The history ends before: the sender sends END after it has noted the end.
                ReceiverAction::EndKnown => panic!("the sender may still ask for the owner"),
                operation => self.targets[target].operations.push(operation),
            }
        }
    }

    fn source_acts(&mut self) {
        let Some(action) = self.source.actions.pop_front() else {
            return;
        };
        match action {
            SenderAction::Connect => self.connect(),
            SenderAction::Send(frame) => {
                let frame = self.compressed_or_not(frame);
                let data_bytes = match &frame.message {
                    Message::Range(range) => match &range.content {
                        RangeContent::Data(bytes) => bytes.len() as u64,
                        _ => 0,
                    },
                    Message::Compressed(compressed) => compressed.range.end - compressed.range.start,
                    _ => 0,
                };
                if let Some(connection) = self.current.map(|current| &mut self.connections[current]) {
                    connection.send_to_receiver(&frame, &mut self.link_count);
                    if !connection.is_receiver_open {
                        connection.lose();
                    }
                    self.sent_bytes += data_bytes;
                    self.count_frame();
                }
            }
            SenderAction::Disconnect => self.close_current(),
            SenderAction::StartTracker => {
                self.source.start_tracker();
                self.answer(SenderEvent::TrackerStarted);
            }
            SenderAction::TakeDirty { query } => {
                let marks = self.source.take_dirty();
                let took = Duration::ZERO;
                self.answer(SenderEvent::DirtyTaken { query, marks, took });
            }
            SenderAction::CountDirty { query } => {
                let dirty_bytes = self.source.dirty_bytes();
                self.answer(SenderEvent::DirtyCounted { query, dirty_bytes });
            }
            SenderAction::CheckTracker { query } => {
                let dirty_bytes = self.source.dirty_bytes();
                let check = TrackerCheck::Valid { dirty_bytes };
                self.answer(SenderEvent::TrackerChecked { query, check });
            }
            SenderAction::Freeze { attempt } => {
                self.freeze_count += 1;
                if self.random.one_in(20) {
                    self.answer(SenderEvent::FreezeFailed { attempt });
                } else {
                    self.source.is_guest_running = false;
                    self.source.frozen_disks.push(self.source.disk.clone());
                    self.promised_since = self.is_time_promised.then_some(self.now);
                    self.answer(SenderEvent::Frozen { attempt });
                }
            }
            SenderAction::Thaw => {
                self.source.is_guest_running = true;
                self.promised_since = None;
            }
            SenderAction::Report(forecast) => {
                self.is_time_promised = forecast.decision != RoundDecision::FreezeAtMinimum;
            }
            SenderAction::NoteHandover(note) => {
                self.source.note = Some(note);
                self.answer(SenderEvent::HandoverNoted(note));
            }
            SenderAction::ClearHandover => self.source.note = None,
            SenderAction::Throttle { .. } => {
                self.occurrences.insert("throttled");
                self.options.write_interval *= 2;
            }
            SenderAction::Warn(SenderWarning::PromiseNotKept { .. }) => {
                self.occurrences.insert("promise not kept");
            }
            SenderAction::Finished(outcome) => self.finished(&outcome),
            SenderAction::Read { .. } => unreachable!("reads are carried out apart"),
            // What arrives is what was sent: the receiver has no reason.
            SenderAction::Warn(SenderWarning::Retried(error)) => panic!("{error:?}"),
            SenderAction::Unthrottle | SenderAction::Warn(_) => {}
        }
    }

    /// Half of the data that can be compressed is.
    fn compressed_or_not(&mut self, mut frame: Frame) -> Frame {
        let sender = self.source.sender.as_ref().expect("it has sent the frame");
        let common = sender.common_capabilities();
        let Message::Range(range) = &frame.message else {
            return frame;
        };
        let plain_bytes = frame.encoded_bytes();
        let [here, there] = [self.options.capabilities, self.options.receiver_capabilities];
        match [here, there].map(|side| side.has(Capabilities::COMPRESSION)) {
            [true, false] => self.occurrences.insert("compressed data not possible at the receiver"),
            [false, true] => self.occurrences.insert("compressed data not possible at the sender"),
            _ => false,
        };
        // Without a connection there are no common capabilities, and the frame is lost.
        if common.has(Capabilities::COMPRESSION) && self.random.one_in(2) {
            assert!((here & there).has(Capabilities::COMPRESSION), "it was not agreed");
            if let Some(compressed) = RangeCompressor::default().compress(range) {
                self.occurrences.insert("compressed data sent");
                frame.message = Message::Compressed(compressed);
            }
        }
        let wire_bytes = frame.encoded_bytes();
        self.deliver_to_sender(SenderEvent::Written(FrameBytes {
            plain_bytes,
            wire_bytes,
        }));
        frame
    }

    /// Some answers are very late.
    fn answer(&mut self, event: SenderEvent) {
        if self.random.one_in(30) {
            self.source.late_answers.push(event);
        } else {
            self.source.answers.push(event);
        }
    }

    fn count_frame(&mut self) {
        if self.options.cut_at_frame == Some(self.frame_count) {
            match self.options.cut_fault {
                Faults::ConnectionBreaks => self.cut(),
                Faults::ReceiverLosesPower => self.fail_target(Faults::ReceiverLosesPower),
            }
        }
        self.frame_count += 1;
    }

    fn connect(&mut self) {
        let is_in_doubt = self.source.sender.as_ref().map(Sender::state) == Some(SenderState::InDoubt);
        let may_be_stale = is_in_doubt || self.faults_left > 0 && self.random.one_in(2);
        let stale = self.targets.len() > 1 && may_be_stale && self.random.one_in(2);
        let target = if stale {
            1 + to_usize(self.random.below(self.targets.len() as u64 - 1))
        } else {
            REAL
        };
        if self.targets[target].receiver.is_none() {
            return self.deliver_to_sender(SenderEvent::Disconnected);
        }
        self.connections.push(Connection::new(target));
        self.current = Some(self.connections.len() - 1);
        self.connection_count += 1;
        let connection = self.connection_count;
        self.deliver_to_sender(SenderEvent::Connected { connection });
        if self.random.one_in(10) {
            self.duplicate_attempt(target);
        }
    }

    /// The attempt to connect is repeated on a connection of its own, which the sender has given up.
    fn duplicate_attempt(&mut self, target: usize) {
        let Some(SenderAction::Send(frame)) = self.source.actions.front().cloned() else {
            return;
        };
        let mut connection = Connection::new(target);
        connection.is_sender_open = false;
        connection.send_to_receiver(&frame, &mut self.link_count);
        self.connections.push(connection);
    }

    fn finished(&mut self, outcome: &Outcome) {
        self.source.end_sender();
        match outcome {
            Outcome::Completed(_) => {
                self.is_completed = true;
                if self.options.purpose == CopyPurpose::Duplicate {
                    self.occurrences.insert("duplicate completed");
                }
            }
            Outcome::FrozenTooLong | Outcome::NotConverging(_) => {
                self.occurrences.insert(match outcome {
                    Outcome::FrozenTooLong => "frozen too long",
                    _ => "not converging",
                });
                assert!(self.source.is_guest_running);
                self.options.frozen_max = Duration::from_secs(1000);
            }
            Outcome::Refused(error) => {
                assert!(self.source.is_guest_running);
                if error.code == ErrorCode::AlreadyOwner {
                    // The program was killed before it learned that the duplicate is complete.
                    assert_eq!(self.options.purpose, CopyPurpose::Duplicate);
                    self.occurrences.insert("duplicate completed before a restart");
                    self.is_completed = true;
                    return;
                }
                self.occurrences.insert(match error.code {
                    ErrorCode::WrongFile => "wrong file",
                    ErrorCode::WrongSession => "wrong session",
                    _ => panic!("{error:?}"),
                });
            }
            outcome => panic!("{outcome:?}"),
        }
    }

    /// A read takes the content at one step, and is answered at a later one.
    fn source_reads(&mut self) {
        if !self.source.reads.is_empty() && self.random.one_in(2) {
            let index = to_usize(self.random.below(self.source.reads.len() as u64));
            let PendingRead { read, range } = self.source.reads.swap_remove(index);
            let content = self.source.content(range, &mut self.random);
            self.source.completed_reads.push(SenderEvent::Read { read, content });
        } else if !self.source.completed_reads.is_empty() {
            let index = to_usize(self.random.below(self.source.completed_reads.len() as u64));
            let answer = self.source.completed_reads.swap_remove(index);
            self.deliver_to_sender(answer);
        }
    }

    fn arrive_at_receiver(&mut self) {
        let filled: Vec<usize> = (0..self.connections.len())
            .filter(|index| self.connections[*index].has_frames_to_receiver())
            .filter(|index| !self.connections[*index].is_slow || self.random.one_in(100))
            .collect();
        if filled.is_empty() {
            return;
        }
        let connection = &mut self.connections[filled[to_usize(self.random.below(filled.len() as u64))]];
        let target = connection.target;
        let arrived = connection.arrive_at_receiver(&mut self.random);
        // Frames that arrived before the receiver closed the connection may reach it afterwards.
        let is_delivered = connection.is_receiver_open || self.random.one_in(2);
        if let Some((link, frame)) = arrived.filter(|_| is_delivered) {
            self.deliver_to_receiver(target, ReceiverEvent::Received { link, frame });
        }
    }

    fn observe(&mut self, message: &Message) {
        let event = match message {
            Message::OwnerAnswer(Ownership::Sender) => "commit lost, sender owns",
            Message::OwnerAnswer(Ownership::Receiver) => "commit lost, receiver owns",
            Message::Want(_) => "copy resumed after comparing",
            Message::Accept(accept) if accept.sync > 0 => "copy resumed",
            Message::Accept(accept) if accept.stream_count > 1 => "several streams",
            _ => return,
        };
        self.occurrences.insert(event);
    }

    fn arrive_at_sender(&mut self) {
        let Some(current) = self.current else { return };
        let connection = &mut self.connections[current];
        if connection.is_sender_open
            && let Some(frame) = connection.arrive_at_sender(&mut self.random)
        {
            self.observe(&frame.message);
            self.deliver_to_sender(SenderEvent::Received(frame));
        }
    }

    fn target_operates(&mut self) {
        let index = to_usize(self.random.below(self.targets.len() as u64));
        let busy = if self.random.one_in(2) { REAL } else { index };
        let target = &mut self.targets[busy];
        if target.operations.is_empty() {
            return;
        }
        let operation = to_usize(self.random.below(target.operations.len() as u64));
        let event = target.operate(operation);
        self.deliver_to_receiver(busy, event);
    }
}
