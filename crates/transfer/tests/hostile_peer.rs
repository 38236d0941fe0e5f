//! Peers that send anything: neither side panics, and a receiver does not become the owner of an incomplete copy.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "all of it is test, with small numbers"
)]

use std::time::Duration;

use holdfast_block::conformance::test_seed;
use holdfast_block::{DirtyBitmap, SeededRandom, to_usize};
use holdfast_transfer::{
    Accept, Barrier, Capabilities, CompressedRange, ConvergenceOptions, CopyPurpose, Digest, DiskId, ErrorCode,
    FileIdentity, FirstPassTakes, Frame, FreezeTrigger, HeldUnits, Hello, LastPass, LinkId, Message, Offer,
    OperationId, Ownership, PeerError, PriorContent, RangeCompressor, RangeContent, RangeDecompressor, RangeFrame,
    Receiver, ReceiverAction, ReceiverEvent, ReceiverId, ReceiverOptions, ReceiverState, ReceiverTimes, RoundEnd, Seal,
    Sender, SenderAction, SenderEvent, SenderOptions, SessionId, ThrottlePolicy, TrackerCheck, Unconverged,
    UnitComparison, UnitHash, UnitLayout, UnitVerdict, VersionRange,
};

const UNIT_BYTES: u64 = 4096;
const ID: [u8; 16] = [1; 16];

fn layout() -> UnitLayout {
    UnitLayout::new(4 * UNIT_BYTES, UNIT_BYTES as u32).unwrap()
}

fn hello(connection: u64) -> Message {
    Message::Hello(Hello {
        versions: VersionRange::KNOWN,
        capabilities: Capabilities::ALL,
        session: SessionId(ID),
        connection,
        program: "stranger".to_owned(),
    })
}

fn offer() -> Message {
    Message::Offer(Offer {
        disk: DiskId(ID),
        layout: layout(),
        granularity_bytes: 512,
        stream_count: 2,
    })
}

fn receiver() -> Receiver {
    receiver_with(Capabilities::ALL)
}

fn receiver_with(capabilities: Capabilities) -> Receiver {
    let options = ReceiverOptions {
        receiver: ReceiverId(ID),
        capabilities,
        window_bytes: 10 * UNIT_BYTES,
        stream_count_max: 2,
        disk_bytes_max: layout().size_bytes(),
        prior: PriorContent::Unrelated,
        program: "test".to_owned(),
    };
    Receiver::new(options, None)
}

/// A message with fields that are often valid, and often just not.
fn any_message(random: &mut SeededRandom) -> Message {
    let number = random.below(4);
    let barrier = Barrier {
        frame_counts: (0..=random.below(3)).map(|_| random.below(12)).collect(),
    };
    match random.below(30) {
        0 => hello(number),
        1 | 2 => offer(),
        3 => Message::Accept(Accept {
            receiver: ReceiverId([number as u8; 16]),
            window_bytes: [0, 1000, 100_000, u64::MAX][to_usize(random.below(4))],
            stream_count: 1 + random.below(3) as u16,
            sync: number,
            held: HeldUnits::none(UnitLayout::new((1 + random.below(12)) * UNIT_BYTES, UNIT_BYTES as u32).unwrap()),
        }),
        4..=8 => Message::Range(any_range(random)),
        9 => Message::Hashes(UnitHash {
            unit: random.below(6),
            digest: Digest([number as u8; 32]),
        }),
        10 => Message::Want(UnitVerdict {
            unit: random.below(6),
            content: if random.one_in(2) {
                UnitComparison::Same
            } else {
                UnitComparison::Different
            },
        }),
        11 => Message::Round(RoundEnd {
            round: 1,
            frame_count: 1,
            frame_bytes: 1,
            barrier,
        }),
        12 => Message::Sync { number, barrier },
        13 => Message::Synced {
            number,
            took: Duration::from_nanos(random.next_u64()),
        },
        14 => Message::FreezeIntent {
            predicted: Duration::from_nanos(random.next_u64()),
        },
        15 => Message::FreezeOk,
        16 => Message::Last(LastPass {
            attempt: 1,
            dirty_bytes: random.next_u64(),
        }),
        17 => Message::Seal(Seal {
            number,
            sync: random.below(9),
            tree: Digest([0; 32]),
            barrier,
        }),
        18 => Message::Sealed { number },
        19 => Message::Commit { seal: number },
        20 => Message::Committed { seal: number },
        21 => Message::OwnerQuery {
            receiver: ReceiverId(ID),
        },
        22 => Message::OwnerAnswer(Ownership::Sender),
        23 => Message::Thaw,
        24 => Message::Ping { number },
        25 => Message::Pong { number },
        26 => Message::Credit {
            bytes: random.next_u64() >> random.below(64),
        },
        27 => Message::Compressed(any_compressed(random)),
        28 => Message::Times(ReceiverTimes::default()),
        _ => Message::Error(PeerError {
            code: [ErrorCode::Storage, ErrorCode::Protocol][to_usize(random.below(2))],
            text: String::new(),
        }),
    }
}

fn any_range(random: &mut SeededRandom) -> RangeFrame {
    let start = random.below(5 * UNIT_BYTES);
    let length = 1 + random.below(2 * UNIT_BYTES);
    RangeFrame {
        pass: random.below(3) as u32,
        range: start..start + length,
        content: match random.below(3) {
            0 => RangeContent::Data(vec![7; to_usize(length)]),
            1 => RangeContent::Zero,
            _ => RangeContent::Hole,
        },
    }
}

/// Often more than one unit, not of its length, outside of the disk, or no zstd frame.
fn any_compressed(random: &mut SeededRandom) -> CompressedRange {
    let mut plain = any_range(random);
    let length = plain.range.end - plain.range.start;
    plain.content = RangeContent::Data(vec![7; to_usize(length)]);
    let compressed = RangeCompressor::default().compress(&plain);
    let bytes = compressed.map_or(vec![1, 2, 3], |compressed| compressed.bytes);
    let longer = random.below(2);
    CompressedRange {
        pass: plain.pass,
        range: plain.range.start..plain.range.end + longer,
        bytes,
    }
}

fn answer(action: &ReceiverAction, random: &mut SeededRandom) -> Option<ReceiverEvent> {
    match action {
        ReceiverAction::Write { operation, .. }
        | ReceiverAction::Flush { operation }
        | ReceiverAction::AppendJournal { operation, .. } => Some(ReceiverEvent::Completed(*operation)),
        ReceiverAction::HashUnit { operation, .. } => Some(ReceiverEvent::UnitHashed {
            operation: *operation,
            digest: Digest([random.below(4) as u8; 32]),
        }),
        ReceiverAction::Decompress { operation, frame } => Some(ReceiverEvent::Decompressed {
            operation: *operation,
            data: RangeDecompressor::default().decompress(frame),
        }),
        ReceiverAction::ExamineIdentity { operation } => Some(ReceiverEvent::IdentityExamined {
            operation: *operation,
            identity: FileIdentity::Same,
        }),
        _ => None,
    }
}

#[test]
fn a_receiver_survives_any_sender() {
    let mut random = SeededRandom::new(test_seed());
    let mut accepted_count = 0;
    for _ in 0..5000 {
        let mut receiver = receiver();
        let mut sequences = [[0_u64; 3]; 3];
        let mut waiting = Vec::new();
        for step in 0..60 {
            let (link, stream) = (random.below(3), random.below(3).min(random.below(3)) as u16);
            let message = match step {
                0 => hello(link),
                1 => offer(),
                _ => any_message(&mut random),
            };
            let sequence = &mut sequences[to_usize(link)][usize::from(stream)];
            let frame = Frame {
                stream,
                sequence: *sequence,
                message,
            };
            *sequence += u64::from(!random.one_in(20));
            let link = LinkId(link * 10 + u64::from(stream));
            receiver.handle(ReceiverEvent::Received { link, frame }, Duration::from_millis(step));
            if random.one_in(100) {
                receiver.handle(ReceiverEvent::LinkClosed(link), Duration::from_millis(step));
            }
            loop {
                while let Some(action) = receiver.next_action() {
                    let is_accept = matches!(&action, ReceiverAction::Send { frame, .. } if matches!(frame.message, Message::Accept(_)));
                    accepted_count += u64::from(is_accept);
                    waiting.extend(answer(&action, &mut random));
                }
                if waiting.is_empty() || random.one_in(3) {
                    break;
                }
                let event = waiting.swap_remove(to_usize(random.below(waiting.len() as u64)));
                receiver.handle(event, Duration::from_millis(step));
            }
        }
        // No seal has the right digest.
        assert!(!matches!(
            receiver.state(),
            ReceiverState::Owner | ReceiverState::Sealed
        ));
    }
    assert!(accepted_count > 100, "{accepted_count}");
}

/// Sends messages of a sender on one stream, carries everything out, and returns what the receiver sends.
struct Dialogue {
    receiver: Receiver,
    link: u64,
    sequence: u64,
}

impl Dialogue {
    fn new() -> Self {
        Self {
            receiver: receiver(),
            link: 0,
            sequence: 0,
        }
    }

    fn connect(&mut self) {
        self.link += 1;
        self.sequence = 0;
        self.send(hello(self.link));
    }

    fn send(&mut self, message: Message) -> Vec<Message> {
        let frame = Frame {
            stream: 0,
            sequence: self.sequence,
            message,
        };
        self.sequence += 1;
        let link = LinkId(self.link);
        self.receiver
            .handle(ReceiverEvent::Received { link, frame }, Duration::ZERO);
        let mut sent = Vec::new();
        while let Some(action) = self.receiver.next_action() {
            if let Some(event) = answer(&action, &mut SeededRandom::new(1)) {
                self.receiver.handle(event, Duration::ZERO);
            }
            if let ReceiverAction::Send { frame, .. } = action {
                sent.push(frame.message);
            }
        }
        sent
    }

    /// Sends a disk of zeroes, and a seal of it.
    fn seal(&mut self, number: u64) -> Vec<Message> {
        let size_bytes = layout().size_bytes();
        self.send(Message::Range(RangeFrame {
            pass: 0,
            range: 0..size_bytes,
            content: RangeContent::Zero,
        }));
        let zero = blake3::hash(&[0; UNIT_BYTES as usize]);
        let group = blake3::hash(&zero.as_bytes().repeat(4));
        let mut tree = blake3::Hasher::new();
        tree.update(&size_bytes.to_le_bytes())
            .update(&(UNIT_BYTES as u32).to_le_bytes());
        tree.update(group.as_bytes());
        let barrier = self.barrier();
        self.send(Message::Seal(Seal {
            number,
            sync: number,
            tree: Digest(*tree.finalize().as_bytes()),
            barrier,
        }))
    }

    fn barrier(&self) -> Barrier {
        Barrier {
            frame_counts: vec![self.sequence, 0],
        }
    }
}

fn has_error(messages: &[Message], code: ErrorCode) -> bool {
    messages
        .iter()
        .any(|message| matches!(message, Message::Error(error) if error.code == code))
}

fn compressed(pass: u32, range: std::ops::Range<u64>) -> CompressedRange {
    let length = range.end - range.start;
    let plain = RangeFrame {
        pass,
        range,
        content: RangeContent::Data(vec![7; to_usize(length)]),
    };
    RangeCompressor::default().compress(&plain).unwrap()
}

/// Each is refused before it takes memory, except for the data itself, whose length was agreed.
#[test]
fn compressed_data_that_was_not_agreed_is_refused() {
    let whole = compressed(0, 0..UNIT_BYTES);
    let beyond = compressed(0, 3 * UNIT_BYTES..5 * UNIT_BYTES);
    let mut longer = whole.clone();
    longer.range.end += 1;
    let mut shorter = whole.clone();
    shorter.range.end -= 1;
    let mut trailing = whole.clone();
    trailing.bytes.push(0);
    for (frame, is_refused) in [
        (whole, false),
        (beyond, true),
        (longer, true),
        (shorter, true),
        (trailing, true),
    ] {
        let mut dialogue = Dialogue::new();
        dialogue.connect();
        dialogue.send(offer());
        let sent = dialogue.send(Message::Compressed(frame));
        assert_eq!(has_error(&sent, ErrorCode::Protocol), is_refused, "{sent:?}");
    }
    // Within the disk, but it expands to more than the window.
    let mut dialogue = Dialogue::new();
    dialogue.connect();
    dialogue.send(offer());
    let mut sent = Vec::new();
    for _ in 0..3 {
        // A later pass: it is held.
        sent = dialogue.send(Message::Compressed(compressed(1, 0..4 * UNIT_BYTES)));
    }
    assert!(has_error(&sent, ErrorCode::Protocol), "{sent:?}");
    // Before ACCEPT.
    let mut dialogue = Dialogue::new();
    dialogue.connect();
    let sent = dialogue.send(Message::Compressed(compressed(0, 0..UNIT_BYTES)));
    assert!(has_error(&sent, ErrorCode::Protocol), "{sent:?}");
}

#[test]
fn a_receiver_without_the_capability_takes_nothing_compressed() {
    let mut dialogue = Dialogue::new();
    dialogue.receiver = receiver_with(Capabilities::SYNC | Capabilities::HASHES);
    dialogue.connect();
    dialogue.send(offer());
    let sent = dialogue.send(Message::Compressed(compressed(0, 0..UNIT_BYTES)));
    assert!(has_error(&sent, ErrorCode::Protocol), "{sent:?}");
}

/// A barrier waits until the frames before it are decompressed, and data that is compressed also ends a seal.
#[test]
fn compressed_data_counts_as_data_from_its_arrival() {
    let mut dialogue = Dialogue::new();
    dialogue.connect();
    dialogue.send(offer());
    dialogue.seal(1);
    assert_eq!(dialogue.receiver.state(), ReceiverState::Sealed);
    let frame = Frame {
        stream: 0,
        sequence: dialogue.sequence,
        message: Message::Compressed(compressed(1, 0..UNIT_BYTES)),
    };
    dialogue.sequence += 1;
    let link = LinkId(dialogue.link);
    let received = ReceiverEvent::Received { link, frame };
    dialogue.receiver.handle(received, Duration::ZERO);
    assert_ne!(dialogue.receiver.state(), ReceiverState::Sealed);
    let Some(ReceiverAction::Decompress { operation, frame }) = dialogue.receiver.next_action() else {
        panic!("the frame belongs to the present pass");
    };
    let barrier = dialogue.barrier();
    let sent = dialogue.send(Message::Sync { number: 2, barrier });
    assert_eq!(sent, [], "the barrier was passed");
    let data = RangeDecompressor::default().decompress(&frame);
    dialogue
        .receiver
        .handle(ReceiverEvent::Decompressed { operation, data }, Duration::ZERO);
    let sent = dialogue.send(Message::Ping { number: 1 });
    assert!(
        sent.iter()
            .any(|message| matches!(message, Message::Synced { number: 2, .. })),
        "{sent:?}"
    );
}

#[test]
fn a_seal_of_another_content_is_refused() {
    let mut dialogue = Dialogue::new();
    dialogue.connect();
    dialogue.send(offer());
    dialogue.send(Message::Range(RangeFrame {
        pass: 0,
        range: 0..layout().size_bytes(),
        content: RangeContent::Zero,
    }));
    let barrier = dialogue.barrier();
    let seal = Message::Seal(Seal {
        number: 1,
        sync: 1,
        tree: Digest([5; 32]),
        barrier,
    });
    assert!(has_error(&dialogue.send(seal), ErrorCode::WrongContent));
}

#[test]
fn a_seal_ends_with_data_with_thaw_with_an_answer_about_the_owner_and_with_the_connection() {
    let data = Message::Range(RangeFrame {
        pass: 1,
        range: 0..1,
        content: RangeContent::Zero,
    });
    let receiver = ReceiverId(ID);
    for ending in [
        None,
        Some(data),
        Some(Message::Thaw),
        Some(Message::OwnerQuery { receiver }),
        Some(hello(9)),
    ] {
        let mut dialogue = Dialogue::new();
        dialogue.connect();
        dialogue.send(offer());
        let sealed = dialogue.seal(1);
        assert!(sealed.contains(&Message::Sealed { number: 1 }), "{sealed:?}");
        assert_eq!(dialogue.receiver.state(), ReceiverState::Sealed);
        let is_valid = ending.is_none();
        match ending {
            Some(Message::Hello(_)) => dialogue.connect(),
            Some(message) => drop(dialogue.send(message)),
            None => {}
        }
        let answers = dialogue.send(Message::Commit { seal: 1 });
        assert_eq!(
            answers.contains(&Message::Committed { seal: 1 }),
            is_valid,
            "{answers:?}"
        );
        assert_eq!(dialogue.receiver.state() == ReceiverState::Owner, is_valid);
        assert_eq!(has_error(&answers, ErrorCode::NotSealed), !is_valid);
    }
}

#[test]
fn an_owner_accepts_no_further_copy() {
    let mut dialogue = Dialogue::new();
    dialogue.connect();
    dialogue.send(offer());
    dialogue.seal(1);
    dialogue.send(Message::Commit { seal: 1 });
    dialogue.connect();
    assert!(has_error(&dialogue.send(offer()), ErrorCode::AlreadyOwner));
}

#[test]
fn more_data_than_the_window_is_refused() {
    let mut receiver = receiver();
    let frame = |sequence, message| Frame {
        stream: 0,
        sequence,
        message,
    };
    let link = LinkId(1);
    receiver.handle(
        ReceiverEvent::Received {
            link,
            frame: frame(0, hello(1)),
        },
        Duration::ZERO,
    );
    receiver.handle(
        ReceiverEvent::Received {
            link,
            frame: frame(1, offer()),
        },
        Duration::ZERO,
    );
    receiver.handle(ReceiverEvent::Completed(OperationId(1)), Duration::ZERO);
    for sequence in 2..30 {
        let range = Message::Range(RangeFrame {
            pass: 0,
            range: 0..UNIT_BYTES,
            content: RangeContent::Data(vec![1; to_usize(UNIT_BYTES)]),
        });
        receiver.handle(
            ReceiverEvent::Received {
                link,
                frame: frame(sequence, range),
            },
            Duration::ZERO,
        );
    }
    let mut write_count = 0;
    let mut is_refused = false;
    while let Some(action) = receiver.next_action() {
        match action {
            ReceiverAction::Write { .. } => write_count += 1,
            ReceiverAction::Send { frame, .. } => is_refused |= matches!(frame.message, Message::Error(_)),
            _ => {}
        }
    }
    assert!(is_refused && write_count < 10, "{write_count}");
}

#[test]
fn a_sender_survives_any_receiver() {
    let mut random = SeededRandom::new(test_seed());
    let mut read_count = 0;
    for _ in 0..5000 {
        let options = SenderOptions {
            purpose: CopyPurpose::Handover,
            first_pass_takes: FirstPassTakes::Often,
            session: SessionId(ID),
            disk: DiskId(ID),
            layout: layout(),
            granularity_bytes: 512,
            capabilities: Capabilities::ALL,
            stream_count: 2,
            convergence: ConvergenceOptions {
                frozen_max: Duration::from_millis(50),
                other_frozen: Duration::ZERO,
                throttle: ThrottlePolicy::Never,
                unconverged: Unconverged::FreezeAtMinimum,
            },
            trigger: FreezeTrigger::WhenReady,
            attempt_count_max: 3,
            program: "test".to_owned(),
        };
        let mut sender = Sender::new(options).unwrap();
        let mut connection = 0;
        // Of the connection in use.
        let mut arrived = ArrivedFrames::default();
        for step in 0..60 {
            let now = Duration::from_millis(step);
            while let Some(action) = sender.next_action() {
                read_count += u64::from(matches!(action, SenderAction::Read { .. }));
                if let Some(event) = source_answer(action, &mut connection) {
                    sender.handle(event, now);
                }
            }
            let message = match random.below(4) {
                0 => hello(connection),
                1 => Message::Accept(Accept {
                    receiver: ReceiverId(ID),
                    window_bytes: 100_000,
                    stream_count: 2,
                    sync: 0,
                    held: HeldUnits::none(layout()),
                }),
                _ => any_message(&mut random),
            };
            let frame = arrived.next(connection, message, &mut random);
            sender.handle(SenderEvent::Received(frame), now);
            sender.handle(SenderEvent::Tick, now);
        }
    }
    assert!(read_count > 1000, "{read_count}");
}

/// The frames of a connection, rarely with a wrong number.
#[derive(Default)]
struct ArrivedFrames {
    connection: u64,
    count: u64,
}

impl ArrivedFrames {
    fn next(&mut self, connection: u64, message: Message, random: &mut SeededRandom) -> Frame {
        if connection != self.connection {
            (self.connection, self.count) = (connection, 0);
        }
        let sequence = self.count + u64::from(random.one_in(50));
        self.count += 1;
        Frame {
            stream: 0,
            sequence,
            message,
        }
    }
}

/// Carries out what a sender asks for, on a disk without a guest that writes.
fn source_answer(action: SenderAction, connection: &mut u64) -> Option<SenderEvent> {
    Some(match action {
        SenderAction::Connect => {
            *connection += 1;
            SenderEvent::Connected {
                connection: *connection,
            }
        }
        SenderAction::StartTracker => SenderEvent::TrackerStarted,
        SenderAction::TakeDirty { query } => SenderEvent::DirtyTaken {
            took: Duration::ZERO,
            query,
            marks: DirtyBitmap::new(layout().size_bytes(), 512).unwrap(),
        },
        SenderAction::CountDirty { query } => SenderEvent::DirtyCounted { query, dirty_bytes: 0 },
        SenderAction::CheckTracker { query } => SenderEvent::TrackerChecked {
            query,
            check: TrackerCheck::Valid { dirty_bytes: 0 },
        },
        SenderAction::Read { read, range } => SenderEvent::Read {
            read,
            content: RangeContent::Data(vec![3; to_usize(range.end - range.start)]),
        },
        SenderAction::Freeze { attempt } => SenderEvent::Frozen { attempt },
        SenderAction::NoteHandover(note) => SenderEvent::HandoverNoted(note),
        _ => return None,
    })
}
