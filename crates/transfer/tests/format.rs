//! The bytes of frames and journals: fixtures of version 1, and what is damaged or hostile.

use std::time::Duration;

use holdfast_block::conformance::test_seed;
use holdfast_block::{SeededRandom, to_usize};
use holdfast_transfer::{
    Accept, Barrier, Capabilities, CopyIdentity, Digest, DiskId, Error, ErrorCode, Frame, FrameDecoder, HeldUnits,
    Hello, JournalEntry, JournalState, LastPass, Message, Offer, Ownership, PeerError, RangeContent, RangeFrame,
    ReceiverId, ReceiverTimes, RoundEnd, Seal, SessionId, SyncEntry, UnitComparison, UnitHash, UnitLayout, UnitState,
    UnitVerdict, VersionRange,
};

const SESSION: &[u8] = include_bytes!("fixtures/session-v1.bin");
const JOURNAL: &[u8] = include_bytes!("fixtures/journal-v1.bin");

fn layout() -> UnitLayout {
    UnitLayout::new(20_480, 4096).expect("five units")
}

fn greeting() -> Message {
    Message::Hello(Hello {
        versions: VersionRange { lowest: 1, highest: 1 },
        capabilities: Capabilities::ALL,
        session: SessionId(*b"session-16-bytes"),
        connection: 0x0102_0304_0506_0708,
        program: "holdfast 0.1.0".to_owned(),
    })
}

fn range(pass: u32, start: u64, length: u64, content: RangeContent) -> Message {
    Message::Range(RangeFrame {
        pass,
        range: start..start + length,
        content,
    })
}

fn barrier(counts: &[u64]) -> Barrier {
    Barrier {
        frame_counts: counts.to_vec(),
    }
}

/// The messages of the fixture: each kind at least once.
fn messages() -> Vec<Message> {
    let mut held = HeldUnits::none(layout());
    held.insert(1);
    held.insert(4);
    let digest = Digest([0xAB; 32]);
    let number = 7;
    vec![
        greeting(),
        Message::Offer(Offer {
            disk: DiskId(*b"disk-of-16-bytes"),
            layout: layout(),
            granularity_bytes: 4096,
            stream_count: 2,
        }),
        Message::Accept(Accept {
            receiver: ReceiverId(*b"receiver-16-byte"),
            window_bytes: 64 << 20,
            stream_count: 2,
            sync: 3,
            held,
        }),
        Message::Hashes(UnitHash { unit: 1, digest }),
        Message::Want(UnitVerdict {
            unit: 1,
            content: UnitComparison::Same,
        }),
        Message::Want(UnitVerdict {
            unit: 4,
            content: UnitComparison::Different,
        }),
        range(0, 0, 5, RangeContent::Data(b"bytes".to_vec())),
        range(0, 4096, 4096, RangeContent::Zero),
        range(0, 8192, 4096, RangeContent::Hole),
        Message::Credit { bytes: 4133 },
        Message::Round(RoundEnd {
            round: 1,
            frame_count: 3,
            frame_bytes: 117,
            barrier: barrier(&[10, 2]),
        }),
        Message::Sync {
            number: 4,
            barrier: barrier(&[11, 2]),
        },
        Message::Synced {
            number: 4,
            took: Duration::from_micros(5300),
        },
        Message::Ping { number },
        Message::Pong { number },
        Message::FreezeIntent {
            predicted: Duration::from_millis(23),
        },
        Message::FreezeOk,
        Message::Frozen,
        Message::Last(LastPass {
            attempt: 1,
            dirty_bytes: 4096,
        }),
        Message::Seal(Seal {
            number: 1,
            sync: 5,
            tree: digest,
            barrier: barrier(&[15, 3]),
        }),
        Message::Times(ReceiverTimes {
            identity: Duration::from_micros(90),
            flush: Duration::from_micros(4100),
            journal: Duration::from_micros(900),
        }),
        Message::Sealed { number: 1 },
        Message::Commit { seal: 1 },
        Message::Committed { seal: 1 },
        Message::OwnerQuery {
            receiver: ReceiverId(*b"receiver-16-byte"),
        },
        Message::OwnerAnswer(Ownership::Receiver),
        Message::OwnerAnswer(Ownership::Sender),
        Message::Thaw,
        Message::End {
            reason: "stopped by the user".to_owned(),
        },
        Message::Error(PeerError {
            code: ErrorCode::WrongFile,
            text: "device 5 inode 7 is not open".to_owned(),
        }),
        Message::Skipped {
            kind: 200,
            payload: b"of a later version".to_vec(),
        },
    ]
}

fn frames() -> Vec<Frame> {
    let numbered = (0..).zip(messages());
    numbered
        .map(|(sequence, message)| Frame {
            stream: u16::from(matches!(message, Message::Range(_))),
            sequence,
            message,
        })
        .collect()
}

fn encoded(frames: &[Frame]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for frame in frames {
        frame.encode(&mut bytes);
    }
    bytes
}

/// Decodes until the end, or an error.
fn decode(bytes: &[u8], piece_bytes: usize) -> (Vec<Frame>, Option<Error>) {
    let mut decoder = FrameDecoder::new();
    let mut frames = Vec::new();
    for piece in bytes.chunks(piece_bytes) {
        decoder.push(piece);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => return (frames, Some(error)),
            }
        }
    }
    (frames, None)
}

#[test]
fn the_session_of_version_1_is_read_and_written_as_it_was() {
    assert_eq!(encoded(&frames()), SESSION);
    for piece_bytes in [1, 2, 3, 7, 20, 21, 100, SESSION.len()] {
        assert_eq!(decode(SESSION, piece_bytes), (frames(), None));
    }
    for frame in frames() {
        assert_eq!(frame.encoded_bytes(), encoded(&[frame]).len() as u64);
    }
}

#[test]
fn the_journal_of_version_1_is_read_and_written_as_it_was() {
    let copy = CopyIdentity {
        receiver: ReceiverId(*b"receiver-16-byte"),
        session: SessionId(*b"session-16-bytes"),
        disk: DiskId(*b"disk-of-16-bytes"),
        layout: layout(),
    };
    let state = |unit, digest| UnitState { unit, digest };
    let digest = Digest([0xCD; 32]);
    let entries = [
        JournalEntry::Begin(copy),
        JournalEntry::Sync(SyncEntry {
            number: 1,
            units: vec![state(0, Some(digest)), state(4, Some(digest))],
        }),
        JournalEntry::Sync(SyncEntry {
            number: 3,
            units: vec![state(4, None)],
        }),
        JournalEntry::Owner { seal: 2 },
    ];
    let mut bytes = Vec::new();
    for entry in &entries {
        entry.encode(&mut bytes);
    }
    assert_eq!(bytes, JOURNAL);
    let journal = JournalState::decode(JOURNAL).unwrap().unwrap();
    assert_eq!((journal.copy, journal.sync, journal.owner), (copy, 3, Some(2)));
    assert_eq!(journal.units.into_iter().collect::<Vec<_>>(), [(0, digest)]);
}

#[test]
fn a_changed_bit_is_found_wherever_it_is() {
    for at in 0..SESSION.len() {
        let mut damaged = SESSION.to_vec();
        damaged[at] ^= 1 << (at % 8);
        let (frames_before, _) = decode(&damaged, damaged.len());
        let end: usize = frames_before
            .iter()
            .map(|frame| encoded(std::slice::from_ref(frame)).len())
            .sum();
        assert!(
            end <= at,
            "byte {at} was changed, and a frame that ends at {end} was accepted"
        );
    }
}

/// A hostile peer sends correct checksums.
#[test]
fn hostile_frames_are_an_error_or_a_message_and_never_a_panic() {
    let mut random = SeededRandom::new(test_seed());
    let valid = frames();
    let mut decoded_count = 0;
    for _ in 0..200_000 {
        let frame = &valid[to_usize(random.below(valid.len() as u64))];
        let mut bytes = encoded(std::slice::from_ref(frame));
        bytes.truncate(bytes.len() - 4);
        for _ in 0..random.below(4) {
            match random.below(4) {
                0 => bytes.truncate(16 + to_usize(random.below(bytes.len() as u64 - 15))),
                1 => bytes.extend(vec![0xFF; to_usize(random.below(9))]),
                _ => {
                    let at = 4 + to_usize(random.below(bytes.len() as u64 - 4));
                    bytes[at] = random.bytes(1)[0];
                }
            }
        }
        let length = u32::try_from(bytes.len() - 16).unwrap();
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        let checksum = crc32c::crc32c(&bytes);
        bytes.extend(checksum.to_le_bytes());
        let (decoded, error) = decode(&bytes, bytes.len());
        assert!(decoded.len() == 1 || error.is_some());
        decoded_count += decoded.len();
        if let Some(frame) = decoded.first() {
            assert_eq!(decode(&encoded(&decoded), 1000).0.first(), Some(frame));
        }
    }
    assert!(decoded_count > 10_000);
}

#[test]
fn random_bytes_are_never_a_frame() {
    let mut random = SeededRandom::new(test_seed());
    for _ in 0..20_000 {
        let length = to_usize(random.below(100));
        let (frames, _) = decode(&random.bytes(length), 13);
        assert_eq!(frames, []);
    }
}

#[test]
fn an_unknown_message_is_skipped_only_if_it_is_optional() {
    let frame = Frame {
        stream: 0,
        sequence: 0,
        message: Message::Skipped {
            kind: 99,
            payload: vec![1, 2, 3],
        },
    };
    let mut bytes = encoded(&[frame]);
    assert_eq!(decode(&bytes, 9).1, None);
    bytes[5] = 0;
    let end = bytes.len() - 4;
    let checksum = crc32c::crc32c(&bytes[..end]).to_le_bytes();
    bytes[end..].copy_from_slice(&checksum);
    assert_eq!(decode(&bytes, 9).1, Some(Error::UnknownMessage { kind: 99 }));
}

#[test]
fn a_length_beyond_the_limit_is_refused_before_the_bytes_arrive() {
    let mut header = [0; 16];
    header[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(decode(&header, 16).1, Some(Error::FrameTooLong { .. })));
}
