use holdfast_block::SeededRandom;
use holdfast_block::conformance::test_seed;

use super::record::ByteOrder;
use super::specimen::{Field, QUERY, SendStreamWriter, SenderVersion};
use super::{SendStreamQuery, StreamChanges, StreamObject, WholeFileReason, by_send_stream};
use crate::storage::changed_blocks::SendStreamError;

const FILE: u64 = 8;

fn ask(bytes: &[u8], query: &SendStreamQuery) -> Result<StreamChanges, SendStreamError> {
    by_send_stream(&mut &bytes[..], query)
}

fn writers() -> impl Iterator<Item = SendStreamWriter> {
    let ages = [SenderVersion::Old, SenderVersion::New].into_iter();
    ages.flat_map(|age| [ByteOrder::Little, ByteOrder::Big].map(|order| SendStreamWriter::new(order, age, 0)))
}

fn file(block_before_bytes: u32, from_transaction: Option<u64>) -> SendStreamQuery {
    SendStreamQuery {
        object: StreamObject::File {
            number: FILE,
            block_before_bytes: block_before_bytes.into(),
            from_transaction,
        },
        ..QUERY
    }
}

#[test]
fn all_types_of_records_that_change_a_file_count() {
    for mut writer in writers() {
        writer
            .object(7, 8192, 5, 5)
            .write(7, 0, 8192)
            .object(FILE, 8192, 100_000, 100)
            .free(FILE, 106_496, u64::MAX)
            .write(FILE, 0, 8192)
            .write(FILE, 8192, 8192)
            .free(FILE, 32_768, 8192)
            .write(9, 50_000, 512);
        let by_reference = [Field::Long(8, FILE), Field::Long(16, 49_152), Field::Long(24, 8192)];
        writer.record(6, &by_reference, &[]);
        let embedded = [
            Field::Long(8, FILE),
            Field::Long(16, 65_536),
            Field::Long(24, 8192),
            Field::Word(48, 8192),
            Field::Word(52, 13),
        ];
        writer.record(8, &embedded, &[1; 16]);
        let compressed = [
            Field::Long(8, FILE),
            Field::Long(24, 81_920),
            Field::Long(32, 8192),
            Field::Byte(50, 15),
            Field::Long(96, 1024),
        ];
        writer.record(3, &compressed, &[2; 1024]);
        let attributes = [Field::Long(8, FILE), Field::Long(16, 512)];
        writer.record(7, &attributes, &[3; 512]);
        writer.record(9, &[Field::Long(8, 0), Field::Long(16, 32)], &[]);
        writer.record(2, &[Field::Long(8, 9), Field::Long(16, 1000)], &[]);
        let stream = writer.end();
        let found = ask(&stream, &QUERY).unwrap();
        assert_eq!(found.whole, None);
        let expected = [
            0..16_384,
            32_768..40_960,
            49_152..57_344,
            65_536..73_728,
            81_920..90_112,
        ];
        assert_eq!(found.ranges.as_slice(), expected);
        assert_eq!((found.record_count, found.stream_bytes), (16, stream.len() as u64));
    }
}

#[test]
fn a_replaced_file_is_changed_as_a_whole() {
    let whole = |query: &SendStreamQuery, fill: &dyn Fn(&mut SendStreamWriter)| {
        let answers: Vec<_> = writers()
            .map(|mut writer| {
                fill(&mut writer);
                let found = ask(&writer.end(), query).unwrap();
                let all = if found.whole.is_some() { 100_000 } else { 0 };
                assert_eq!(found.ranges.bytes(), all);
                found.whole
            })
            .collect();
        assert!(answers.iter().all(|answer| *answer == answers[0]));
        answers[0]
    };
    let same = |writer: &mut SendStreamWriter| {
        writer.object(FILE, 8192, 100_000, 100);
    };
    assert_eq!(whole(&QUERY, &same), None);
    let younger = |writer: &mut SendStreamWriter| {
        writer.object(FILE, 8192, 100_000, 101);
    };
    assert_eq!(whole(&QUERY, &younger), Some(WholeFileReason::Replaced));
    assert_eq!(whole(&file(8192, None), &same), Some(WholeFileReason::AgeUnknown));
    assert_eq!(whole(&file(4096, Some(100)), &same), Some(WholeFileReason::BlockSize));
    let other_size = |writer: &mut SendStreamWriter| {
        writer.object(FILE, 8192, 99_999, 100);
    };
    assert_eq!(whole(&QUERY, &other_size), Some(WholeFileReason::AgeUnknown));
    let folder = |writer: &mut SendStreamWriter| {
        writer.record(
            1,
            &[Field::Long(8, FILE), Field::Word(16, 20), Field::Word(24, 8192)],
            &[],
        );
    };
    assert_eq!(whole(&QUERY, &folder), Some(WholeFileReason::Kind));
    let raw = |writer: &mut SendStreamWriter| {
        let fields = [
            Field::Long(8, FILE),
            Field::Word(16, 19),
            Field::Word(20, 44),
            Field::Word(24, 8192),
            Field::Word(28, 168),
            Field::Word(36, 320),
        ];
        writer.record(1, &fields, &[9; 320]);
    };
    assert_eq!(whole(&QUERY, &raw), Some(WholeFileReason::AgeUnknown));
    for (first, count, has_object) in [
        (8, 1, true),
        (0, 9, true),
        (0, 8, false),
        (9, u64::MAX, false),
        (1, u64::MAX, true),
    ] {
        let freed = |writer: &mut SendStreamWriter| {
            writer.record(2, &[Field::Long(8, first), Field::Long(16, count)], &[]);
        };
        assert_eq!(whole(&QUERY, &freed), has_object.then_some(WholeFileReason::Freed));
    }
}

/// Streams without large blocks report a block size of 128 KiB for larger blocks.
#[test]
fn the_limit_of_128_kib_is_not_another_block_size() {
    for (features, sent, has_changed) in [
        (0, 128 << 10, false),
        (1 << 19, 1 << 20, false),
        (1 << 19, 128 << 10, true),
    ] {
        let mut writer = SendStreamWriter::new(ByteOrder::Little, SenderVersion::New, features);
        writer.object(FILE, sent, 100_000, 1);
        let found = ask(&writer.end(), &file(1 << 20, Some(100))).unwrap();
        assert_eq!(found.whole, has_changed.then_some(WholeFileReason::BlockSize));
    }
}

#[test]
fn a_file_that_grew_is_changed_after_its_old_end() {
    let query = SendStreamQuery {
        size_before_bytes: 60_000,
        ..QUERY
    };
    let found = ask(
        &SendStreamWriter::new(ByteOrder::Little, SenderVersion::New, 0).end(),
        &query,
    )
    .unwrap();
    assert_eq!(found.ranges.as_slice(), std::slice::from_ref(&(60_000..100_000)));
}

#[test]
fn streams_without_all_changes_are_refused() {
    let refused = |bytes: &[u8], query: &SendStreamQuery| match ask(bytes, query) {
        Err(SendStreamError::Unusable { reason }) => reason,
        other => unreachable!("{other:?}"),
    };
    for (features, words) in [
        (1 << 20, "interrupted"),
        (1 << 21, "redacted"),
        (1 << 18, "unknown"),
        (1 << 50, "unknown"),
    ] {
        let reason = refused(
            &SendStreamWriter::new(ByteOrder::Little, SenderVersion::New, features).end(),
            &QUERY,
        );
        assert!(reason.contains(words), "{reason}");
    }
    for (version_word, words) in [(2, "several"), (3, "form"), (0, "form")] {
        let mut writer = SendStreamWriter::empty(ByteOrder::Little);
        writer.begin(version_word, &[0; 16]);
        let reason = refused(&writer.end(), &QUERY);
        assert!(reason.contains(words), "{reason}");
    }
    let plain = SendStreamWriter::new(ByteOrder::Big, SenderVersion::Old, 0).end();
    for (from_guid, to_guid) in [(0, QUERY.to_guid), (QUERY.from_guid, 1)] {
        let query = SendStreamQuery {
            from_guid,
            to_guid,
            ..QUERY
        };
        assert!(refused(&plain, &query).contains("other snapshots"));
    }
    let volume = SendStreamQuery {
        object: StreamObject::Volume,
        ..QUERY
    };
    assert!(refused(&plain, &volume).contains("type 2"));
}

#[test]
fn records_out_of_place_are_errors() {
    let all = [0, 10, 11, u32::MAX];
    for kind in all {
        let mut writer = SendStreamWriter::new(ByteOrder::Little, SenderVersion::Old, 0);
        writer.record(kind, &[Field::Long(8, 1)], &[]);
        let result = ask(&writer.end(), &QUERY);
        assert!(
            matches!(result, Err(SendStreamError::Invalid { .. })),
            "{kind}: {result:?}"
        );
    }
    for (features, payload) in [(0, 17 << 20), (0, u64::MAX), (0, 6)] {
        let mut writer = SendStreamWriter::new(ByteOrder::Little, SenderVersion::Old, features);
        writer.record(3, &[Field::Long(8, FILE), Field::Long(32, payload)], &[]);
        let result = ask(&writer.end(), &QUERY);
        assert!(
            matches!(result, Err(SendStreamError::Invalid { .. })),
            "{payload}: {result:?}"
        );
    }
    let mut stream = SendStreamWriter::new(ByteOrder::Little, SenderVersion::Old, 0).end();
    stream.push(0);
    assert!(matches!(ask(&stream, &QUERY), Err(SendStreamError::Invalid { .. })));
    assert!(matches!(ask(&[7; 312], &QUERY), Err(SendStreamError::Invalid { .. })));
}

/// A truncated stream or a flipped bit is always an error.
#[test]
fn a_damaged_stream_is_an_error() {
    for mut writer in writers() {
        writer
            .object(FILE, 8192, 100_000, 100)
            .write(FILE, 0, 64)
            .free(FILE, 8192, 8192);
        let stream = writer.end();
        ask(&stream, &QUERY).unwrap();
        for length in 0..stream.len() {
            let result = ask(&stream[..length], &QUERY);
            assert!(
                matches!(result, Err(SendStreamError::Short { .. })),
                "{length}: {result:?}"
            );
        }
        for bit in 0..stream.len() * 8 {
            let mut damaged = stream.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let in_last_record = bit / 8 >= stream.len() - 312;
            let result = ask(&damaged, &QUERY);
            // In old streams, the rest of the end record is neither covered by a checksum nor used.
            assert!(result.is_err() || in_last_record, "bit {bit}: {result:?}");
            if let Ok(found) = result {
                assert_eq!(found, ask(&stream, &QUERY).unwrap());
            }
        }
    }
}

/// Random streams about several files, with all types of writes: exactly the ranges in records are reported.
#[test]
fn random_streams_are_reported_exactly() {
    let mut random = SeededRandom::new(test_seed());
    for round in 0..200 {
        let age = if round % 2 == 0 {
            SenderVersion::Old
        } else {
            SenderVersion::New
        };
        let order = if random.one_in(2) {
            ByteOrder::Little
        } else {
            ByteOrder::Big
        };
        let mut writer = SendStreamWriter::new(order, age, 0);
        let mut expected = vec![false; 100_000];
        for _ in 0..random.below(60) {
            let number = 6 + random.below(4);
            let (offset, length) = (random.below(120_000), 8 * random.below(1000));
            let touched = match random.below(3) {
                0 => {
                    writer.write(number, offset, usize::try_from(length).unwrap());
                    offset..offset + length
                }
                1 => {
                    let length = if random.one_in(8) { u64::MAX } else { length };
                    writer.free(number, offset, length);
                    offset..offset.saturating_add(length)
                }
                _ => {
                    writer.object(number, 8192, 100_000, random.below(101));
                    0..0
                }
            };
            if number == FILE {
                let end = touched.end.min(100_000);
                expected[usize::try_from(touched.start.min(end)).unwrap()..usize::try_from(end).unwrap()].fill(true);
            }
        }
        let found = ask(&writer.end(), &QUERY).unwrap();
        let mut seen = vec![false; 100_000];
        for range in found.ranges.as_slice() {
            seen[usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()].fill(true);
        }
        assert!(seen == expected, "round {round}");
    }
}
