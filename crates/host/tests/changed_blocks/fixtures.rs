//! Streams of real senders, kept for ever: `fixtures/README.md` says how they were made.

use std::fs;
use std::path::Path;

use holdfast_block::SeededRandom;
use holdfast_block::conformance::test_seed;
use holdfast_host::changed_blocks::{StreamChanges, StreamError, StreamObject, StreamQuestion, Whole, by_send_stream};

const BLOCK: u64 = 4096;

fn stream(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    fs::read(folder.join(format!("{name}.stream"))).unwrap()
}

fn ask(bytes: &[u8], question: &StreamQuestion) -> Result<StreamChanges, StreamError> {
    by_send_stream(&mut &bytes[..], question)
}

/// A stream, what is asked of it, and which blocks of 4 KiB it changes.
struct Fixture {
    name: &'static str,
    question: StreamQuestion,
    blocks: &'static [u64],
    whole: Option<Whole>,
}

/// A file of 16 blocks that has 17 now.
fn file(guids: (u64, u64), number: u64, from_transaction: u64) -> StreamQuestion {
    StreamQuestion {
        from_guid: guids.0,
        to_guid: guids.1,
        object: StreamObject::File {
            number,
            block_before_bytes: BLOCK,
            from_transaction: Some(from_transaction),
        },
        size_before_bytes: 16 * BLOCK,
        size_after_bytes: 17 * BLOCK,
    }
}

/// Blocks 3, 9, 11 and 16 are written, block 7 becomes a hole.
const BLOCKS: &[u64] = &[3, 7, 9, 11, 16];

fn fixtures() -> Vec<Fixture> {
    let fuse = file((5_029_236_237_818_324_029, 11_433_497_025_865_987_389), 5, 13);
    let of = |name, question, blocks, whole| Fixture {
        name,
        question,
        blocks,
        whole,
    };
    vec![
        of("zfs-fuse-0.7.0", fuse, BLOCKS, None),
        of("zfs-fuse-0.7.0-D", fuse, BLOCKS, None),
    ]
}

#[test]
fn streams_of_real_senders_are_understood() {
    for fixture in fixtures() {
        let found = ask(&stream(fixture.name), &fixture.question).unwrap();
        let mut blocks = Vec::new();
        for range in found.ranges.as_slice() {
            blocks.extend(range.start / BLOCK..range.end.div_ceil(BLOCK));
        }
        assert_eq!(blocks, fixture.blocks, "{}", fixture.name);
        assert_eq!(found.whole, fixture.whole, "{}", fixture.name);
    }
}

/// Cut off anywhere, or with bytes that were changed anywhere.
#[test]
fn streams_of_real_senders_that_were_damaged_give_no_answer() {
    let mut random = SeededRandom::new(test_seed());
    for fixture in fixtures() {
        let bytes = stream(fixture.name);
        let right = ask(&bytes, &fixture.question).unwrap();
        for _ in 0..300 {
            let length = usize::try_from(random.below(bytes.len() as u64)).unwrap();
            let cut = ask(&bytes[..length], &fixture.question);
            assert!(
                matches!(cut, Err(StreamError::Short { .. })),
                "{} {length}: {cut:?}",
                fixture.name
            );
            let mut damaged = bytes.clone();
            damaged[length] ^= 1 << random.below(8);
            // In the last record there are bytes that mean nothing.
            match ask(&damaged, &fixture.question) {
                Ok(found) => assert_eq!(found, right, "{} {length}", fixture.name),
                Err(_) => continue,
            }
            assert!(length >= bytes.len() - 312, "{} {length}", fixture.name);
        }
    }
}

/// Whatever is asked: they do not hold what changed.
#[test]
fn streams_of_another_kind_are_refused() {
    let question = fixtures()[0].question;
    for (name, words) in [("zfs-fuse-0.7.0-R", "several streams")] {
        let refused = ask(&stream(name), &question).unwrap_err().to_string();
        assert!(refused.contains(words), "{name}: {refused}");
    }
}
