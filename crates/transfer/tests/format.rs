//! The bytes of frames and journals: fixtures of version 1, and what is damaged or hostile.

use std::time::Duration;

use holdfast_block::conformance::test_seed;
use holdfast_block::{SeededRandom, to_usize};
use holdfast_transfer::{
    Accept, Barrier, Capabilities, CompressedRange, CopyIdentity, Digest, DiskId, Error, ErrorCode, Frame,
    FrameDecoder, HeldUnits, Hello, JournalEntry, JournalState, LastPass, Message, Offer, Ownership, PeerError,
    RangeCompressor, RangeContent, RangeDecompressor, RangeFrame, ReceiverId, ReceiverTimes, RoundEnd, Seal, SessionId,
    SyncEntry, UnitComparison, UnitHash, UnitLayout, UnitState, UnitVerdict, VersionRange,
};

const SESSION: &[u8] = include_bytes!("fixtures/session-v1.bin");
const COMPRESSED: &[u8] = include_bytes!("fixtures/compressed-v1.bin");
const JOURNAL: &[u8] = include_bytes!("fixtures/journal-v1.bin");

fn layout() -> UnitLayout {
    UnitLayout::new(20_480, 4096).expect("five units")
}

fn greeting(capabilities: Capabilities) -> Message {
    Message::Hello(Hello {
        versions: VersionRange { lowest: 1, highest: 1 },
        capabilities,
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

/// The messages of the fixture: each kind at least once, apart from COMPRESSED.
fn messages() -> Vec<Message> {
    let mut held = HeldUnits::none(layout());
    held.insert(1);
    held.insert(4);
    let digest = Digest([0xAB; 32]);
    let number = 7;
    vec![
        greeting(Capabilities::SYNC | Capabilities::HASHES),
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
    frames_of(messages())
}

fn frames_of(messages: Vec<Message>) -> Vec<Frame> {
    let numbered = (0..).zip(messages);
    numbered
        .map(|(sequence, message)| Frame {
            stream: u16::from(matches!(message, Message::Range(_) | Message::Compressed(_))),
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

/// What a guest's disk may have: text, with a counter.
fn sectors() -> Vec<u8> {
    let lines: Vec<String> = (0..200).map(|number| format!("{number:06} the same line\n")).collect();
    lines.concat().into_bytes().into_iter().cycle().take(4096).collect()
}

fn plain(data: Vec<u8>) -> RangeFrame {
    RangeFrame {
        pass: 2,
        range: 8192..8192 + data.len() as u64,
        content: RangeContent::Data(data),
    }
}

/// The frame of zstd in the fixture, at the end of the second frame. Other versions of zstd may write another one.
fn zstd_frame() -> Vec<u8> {
    let hello_bytes = encoded(&frames_of(vec![greeting(Capabilities(7))])).len();
    let (header, rest) = COMPRESSED[hello_bytes..].split_first_chunk().expect("a length");
    let payload_bytes = u32::from_le_bytes(*header) as usize;
    rest[12..][16..payload_bytes].to_vec()
}

#[test]
fn compressed_data_of_version_1_is_read_and_written_as_it_was() {
    let compressed = CompressedRange {
        pass: 2,
        range: 8192..8192 + 4096,
        bytes: zstd_frame(),
    };
    let expected = frames_of(vec![
        greeting(Capabilities(7)),
        Message::Compressed(compressed.clone()),
        range(2, 0, 5, RangeContent::Data(b"bytes".to_vec())),
    ]);
    assert_eq!(Capabilities::ALL, Capabilities(7));
    assert_eq!(encoded(&expected), COMPRESSED);
    for piece_bytes in [1, 13, COMPRESSED.len()] {
        assert_eq!(decode(COMPRESSED, piece_bytes), (expected.clone(), None));
    }
    let mut decompressor = RangeDecompressor::default();
    assert_eq!(decompressor.decompress(&compressed), Ok(sectors()));
    let again = RangeCompressor::default().compress(&plain(sectors())).unwrap();
    assert_eq!((again.pass, &again.range), (2, &compressed.range));
    assert_eq!(decompressor.decompress(&again), Ok(sectors()));
    assert!(again.bytes.len() < 1024, "{}", again.bytes.len());
}

#[test]
fn data_that_does_not_become_smaller_is_not_compressed() {
    let mut random = SeededRandom::new(test_seed());
    let mut compressor = RangeCompressor::default();
    let noise = |random: &mut SeededRandom, bytes| plain(random.bytes(bytes));
    for bytes in [4096, 65_536, 1 << 20] {
        assert_eq!(compressor.compress(&noise(&mut random, bytes)), None);
    }
    // One part of sixteen would be saved.
    let mut almost = random.bytes(65_536);
    almost[..4096].fill(0);
    assert_eq!(compressor.compress(&plain(almost)), None);
    assert_eq!(compressor.compress(&plain(vec![0; 512])), None);
    let zero = RangeContent::Zero;
    assert_eq!(
        compressor.compress(&RangeFrame {
            content: zero,
            ..plain(vec![0; 4096])
        }),
        None
    );
    assert!(compressor.compress(&plain(vec![0; 4096])).is_some());
}

/// The fields are checked before there is any memory for the data, and the data must be exactly what they say.
#[test]
fn compressed_data_is_exactly_one_zstd_frame_of_the_length_of_its_range() {
    let whole = &zstd_frame()[..];
    let mut decompressor = RangeDecompressor::default();
    let mut check = |length: u64, bytes: &[u8]| {
        decompressor.decompress(&CompressedRange {
            pass: 0,
            range: 0..length,
            bytes: bytes.to_vec(),
        })
    };
    check(4096, whole).unwrap();
    // A bomb, a length that is too large, a part, trailing bytes, a second frame, and a frame to skip.
    let skipped = [&[0x50, 0x2A, 0x4D, 0x18, 4, 0, 0, 0][..], &[0; 4]].concat();
    for (length, bytes) in [
        (4095, whole.to_vec()),
        (4097, whole.to_vec()),
        (4096, whole[..whole.len() - 1].to_vec()),
        (4096, [whole, &[0]].concat()),
        (8192, [whole, whole].concat()),
        (4096, [&skipped[..], whole].concat()),
        (4096, [whole, &skipped[..]].concat()),
        (4096, skipped.clone()),
        (4096, Vec::new()),
        (4096, vec![0xFF; 100]),
    ] {
        let result = check(length, &bytes);
        assert!(
            matches!(
                result,
                Err(Error::Malformed {
                    message: "COMPRESSED",
                    ..
                })
            ),
            "{length}: {bytes:?}"
        );
    }
}

#[test]
fn compressed_data_with_impossible_fields_is_refused_before_it_is_decompressed() {
    let compressed = &zstd_frame()[..];
    let frame = |start: u64, length: u32, bytes: &[u8]| {
        let mut whole = vec![0; 16];
        whole[4] = 7; // COMPRESSED
        whole.extend([&[0; 4][..], &start.to_le_bytes(), &length.to_le_bytes(), bytes].concat());
        let payload_bytes = u32::try_from(whole.len() - 16).unwrap();
        whole[..4].copy_from_slice(&payload_bytes.to_le_bytes());
        let checksum = crc32c::crc32c(&whole);
        whole.extend(checksum.to_le_bytes());
        decode(&whole, whole.len()).1
    };
    assert_eq!(frame(0, 4096, compressed), None);
    assert_eq!(frame(0, 4 << 20, compressed), None);
    let frame_bytes = u32::try_from(compressed.len()).unwrap();
    for (start, length, bytes) in [
        (0, (4 << 20) + 1, compressed),
        (0, u32::MAX, compressed),
        (0, 0, &[][..]),
        (0, frame_bytes, compressed),
        (u64::MAX - 4095, 4096, compressed),
    ] {
        assert!(
            matches!(
                frame(start, length, bytes),
                Some(Error::Malformed {
                    message: "COMPRESSED",
                    ..
                })
            ),
            "{start} {length}"
        );
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
    let mut valid = frames();
    valid.extend(decode(COMPRESSED, COMPRESSED.len()).0);
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
