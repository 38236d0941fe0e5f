//! Recorded streams of real senders; `fixtures/README.md` describes how they were made.

use std::fs;
use std::path::Path;

use holdfast_block::SeededRandom;
use holdfast_block::conformance::test_seed;
use holdfast_host::changed_blocks::{
    SendStreamError, SendStreamQuery, StreamChanges, StreamObject, WholeFileReason, by_send_stream,
};

const BLOCK: u64 = 4096;

fn stream(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    fs::read(folder.join(format!("{name}.stream"))).unwrap()
}

fn ask(bytes: &[u8], query: &SendStreamQuery) -> Result<StreamChanges, SendStreamError> {
    by_send_stream(&mut &bytes[..], query)
}

/// A stream, the query for it, and the changed blocks of 4 KiB.
struct Fixture {
    name: &'static str,
    query: SendStreamQuery,
    blocks: Vec<u64>,
    whole: Option<WholeFileReason>,
}

/// A file that grew from 16 to 17 blocks.
fn file(guids: (u64, u64), number: u64, from_transaction: u64) -> SendStreamQuery {
    SendStreamQuery {
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
    let open = file((6_245_087_082_637_965_899, 13_535_555_182_167_684_739), 2, 10);
    let encrypted = file((6_771_972_823_796_758_410, 5_955_882_754_301_217_688), 2, 29);
    let of = |name, query, blocks, whole| Fixture {
        name,
        query,
        blocks,
        whole,
    };
    let blocks = || BLOCKS.to_vec();
    let mut fixtures = vec![
        of("zfs-fuse-0.7.0", fuse, blocks(), None),
        of("zfs-fuse-0.7.0-D", fuse, blocks(), None),
        of("openzfs-2.1", open, blocks(), None),
        of("openzfs-2.1-e", open, blocks(), None),
        of("openzfs-2.1-Lec", open, blocks(), None),
        of("openzfs-2.1-bookmark", open, blocks(), None),
        of(
            "openzfs-2.1-w",
            encrypted,
            (0..17).collect(),
            Some(WholeFileReason::AgeUnknown),
        ),
    ];
    fixtures.extend(others());
    fixtures
}

/// A volume, large blocks, and replaced files.
fn others() -> [Fixture; 4] {
    let volume = SendStreamQuery {
        object: StreamObject::Volume,
        size_before_bytes: 1 << 20,
        size_after_bytes: 1 << 20,
        ..file((5_276_669_124_356_687_334, 15_910_708_718_387_134_249), 0, 0)
    };
    let sized = |guids, block_before_bytes, from_transaction, size_before_bytes, size_after_bytes| SendStreamQuery {
        object: StreamObject::File {
            number: 2,
            block_before_bytes,
            from_transaction: Some(from_transaction),
        },
        size_before_bytes,
        size_after_bytes,
        ..file(guids, 0, 0)
    };
    let large_guids = (16_739_419_475_533_321_987, 16_937_799_077_466_642_867);
    let replaced_guids = (17_711_604_921_717_118_044, 14_591_458_239_294_386_625);
    let grown_guids = (15_597_587_517_854_825_692, 10_443_623_144_007_373_361);
    [
        Fixture {
            name: "openzfs-2.1-volume",
            query: volume,
            // If the older state has no blocks at all, the holes after the last block are reported too.
            blocks: [5, 9].into_iter().chain(16..256).collect(),
            whole: None,
        },
        Fixture {
            name: "openzfs-2.1-Lc-1M",
            query: sized(large_guids, 1 << 20, 57, 3 << 20, 3 << 20),
            blocks: (256..512).collect(),
            whole: None,
        },
        Fixture {
            name: "openzfs-2.1-replaced",
            query: sized(replaced_guids, BLOCK, 62, 16_384, 16_384),
            blocks: (0..4).collect(),
            whole: Some(WholeFileReason::Replaced),
        },
        Fixture {
            name: "openzfs-2.1-grown",
            query: sized(grown_guids, 1536, 91, 1500, 8192),
            blocks: (0..2).collect(),
            whole: Some(WholeFileReason::BlockSize),
        },
    ]
}

#[test]
fn streams_of_real_senders_are_parsed() {
    for fixture in fixtures() {
        let found = ask(&stream(fixture.name), &fixture.query).unwrap();
        let mut blocks = Vec::new();
        for range in found.ranges.as_slice() {
            blocks.extend(range.start / BLOCK..range.end.div_ceil(BLOCK));
        }
        assert_eq!(blocks, fixture.blocks, "{}", fixture.name);
        assert_eq!(found.whole, fixture.whole, "{}", fixture.name);
    }
}

/// Truncated anywhere, or with a changed byte anywhere.
#[test]
fn damaged_streams_of_real_senders_are_errors() {
    let mut random = SeededRandom::new(test_seed());
    for fixture in fixtures() {
        let bytes = stream(fixture.name);
        let right = ask(&bytes, &fixture.query).unwrap();
        for _ in 0..300 {
            let length = usize::try_from(random.below(bytes.len() as u64)).unwrap();
            let cut = ask(&bytes[..length], &fixture.query);
            assert!(
                matches!(cut, Err(SendStreamError::Short { .. })),
                "{} {length}: {cut:?}",
                fixture.name
            );
            let mut damaged = bytes.clone();
            damaged[length] ^= 1 << random.below(8);
            // The end record has bytes without a meaning.
            match ask(&damaged, &fixture.query) {
                Ok(found) => assert_eq!(found, right, "{} {length}", fixture.name),
                Err(_) => continue,
            }
            assert!(length >= bytes.len() - 312, "{} {length}", fixture.name);
        }
    }
}

/// They do not contain all changes, for any query.
#[test]
fn streams_of_another_kind_are_refused() {
    let query = fixtures()[0].query;
    for (name, words) in [
        ("zfs-fuse-0.7.0-R", "several streams"),
        ("openzfs-2.1-R", "several streams"),
        ("openzfs-2.1-resumed", "interrupted"),
        ("openzfs-2.1-redacted", "redacted"),
        ("openzfs-2.1", "other snapshots"),
        ("openzfs-2.1-volume", "dataset of type 3"),
    ] {
        let refused = ask(&stream(name), &query).unwrap_err().to_string();
        assert!(refused.contains(words), "{name}: {refused}");
    }
}
