//! Tests of the gate.

use std::io::{Cursor, Read as _};

use super::{Joining, ZfsAnnouncement, ZfsGate};
use crate::storage::changed_blocks::send_stream::record::{ByteOrder, RECORD_LENGTH, feature};
use crate::storage::changed_blocks::send_stream::specimen::{QUERY, SendStreamWriter, SenderVersion};
use crate::storage::provider::incoming::{StreamCheck, StreamRefusal};

fn announced(names: &[&str]) -> ZfsAnnouncement {
    ZfsAnnouncement {
        snapshots: names
            .iter()
            .map(|name| ((*name).to_owned(), QUERY.to_guid.to_string()))
            .collect(),
        joining: Joining::Refused,
    }
}

/// The output of the gate, and the received snapshots.
type GateOutput = (Vec<u8>, Option<Vec<(String, u64)>>);

fn pass_as(stream: &[u8], announced: ZfsAnnouncement) -> Result<GateOutput, String> {
    let (gate, arrived) = ZfsGate::new(announced);
    let mut passed = Vec::new();
    let read = StreamCheck::of(Box::new(gate))
        .guard(Box::new(Cursor::new(stream.to_vec())))
        .read_to_end(&mut passed);
    read.map_err(|error| StreamRefusal::of(&error).expect("memory can be read").reason.clone())?;
    let arrived = arrived.lock().unwrap().take();
    Ok((passed, arrived))
}

fn valid(order: ByteOrder, age: SenderVersion) -> Vec<u8> {
    let mut writer = SendStreamWriter::new(order, age, 0);
    writer
        .object(8, 8192, 100_000, 50)
        .write(8, 0, 300_000)
        .free(8, 400_000, 1000);
    writer.end()
}

/// A stream with a changed number in its begin record.
fn with_u64(at: usize, number: u64) -> Vec<u8> {
    let mut stream = valid(ByteOrder::Little, SenderVersion::New);
    stream[at..at + 8].copy_from_slice(&number.to_le_bytes());
    stream
}

fn with_name(name: &[u8]) -> Vec<u8> {
    let mut stream = valid(ByteOrder::Little, SenderVersion::New);
    stream[56..RECORD_LENGTH].fill(0);
    stream[56..56 + name.len()].copy_from_slice(name);
    stream
}

fn reason(stream: &[u8]) -> String {
    pass_as(stream, announced(&["b"])).expect_err("the stream is refused")
}

#[test]
fn the_announced_snapshot_passes_unchanged() {
    for (order, age) in [
        (ByteOrder::Little, SenderVersion::Old),
        (ByteOrder::Big, SenderVersion::Old),
        (ByteOrder::Little, SenderVersion::New),
        (ByteOrder::Big, SenderVersion::New),
    ] {
        let stream = valid(order, age);
        for announced in [announced(&["b"]), announced(&[])] {
            let (passed, arrived) = pass_as(&stream, announced).unwrap();
            assert!(passed == stream);
            assert_eq!(arrived.unwrap(), [("b".to_owned(), QUERY.to_guid)]);
        }
    }
    // A sender without GUIDs has announced a name.
    let nameless = ZfsAnnouncement {
        snapshots: vec![("b".to_owned(), String::new())],
        joining: Joining::Refused,
    };
    assert!(pass_as(&valid(ByteOrder::Little, SenderVersion::Old), nameless).is_ok());
}

#[test]
fn a_truncated_stream_never_reaches_its_end() {
    let mut writer = SendStreamWriter::new(ByteOrder::Little, SenderVersion::New, 0);
    writer.write(8, 0, 1000).free(8, 4000, 1000);
    let stream = writer.end();
    for length in 0..stream.len() {
        let (passed, arrived) = pass_as(&stream[..length], announced(&["b"])).unwrap();
        assert!(arrived.is_none() && stream.starts_with(&passed) && passed.len() <= length);
        assert!(passed.len() < stream.len() - RECORD_LENGTH + 1);
    }
}

#[test]
fn other_content_is_refused_before_the_first_record_passes() {
    let version = |features: u64, kind: u64| with_u64(16, features << 2 | kind);
    let others = [
        (with_name(b"tank/vm@c\0"), "announced"),
        (with_name(b"tank/vm\0"), "no name"),
        (with_name(b"tank/vm@\0"), "no name"),
        (with_name(b"tank/vm@b@b\0"), "no name"),
        (with_name(b"tank/vm@a/b\0"), "no name"),
        (with_name(&[b'a'; RECORD_LENGTH - 56]), "no name"),
        (with_u64(40, 7), "announced"),
        (version(0, 2), "exactly one"),
        (version(0, 3), "exactly one"),
        (version(0, 0), "exactly one"),
        (version(1, 1), "features"),
        (version(2, 1), "features"),
        (version(feature::REDACTED, 1), "features"),
        (version(feature::HOLDS, 1), "features"),
        (version(1 << 40, 1), "features"),
        (with_u64(32, 2 | 1 << 32), "clone"),
        (with_u64(32, 2 | 1 << 40), "flags"),
        (with_u64(32, 4), "type"),
        (with_u64(0, 8 << 32), "unexpected data"),
        (with_u64(0, 0xffff_ffff << 32), "bytes of data"),
        (vec![0; 1000], "not a stream"),
    ];
    for (stream, expected) in others {
        let reason = reason(&stream);
        assert!(reason.contains(expected), "{expected}: {reason}");
    }
    let twice = [
        valid(ByteOrder::Little, SenderVersion::New),
        valid(ByteOrder::Little, SenderVersion::New),
    ]
    .concat();
    assert!(reason(&twice).contains("after its end"));
    // Data of other snapshots, a second begin record, and data of any size.
    for (kind, fields) in [
        (6_u32, vec![]),
        (0, vec![]),
        (10, vec![]),
        (77, vec![]),
        (3, vec![(32, u64::MAX)]),
    ] {
        let mut record = [0; RECORD_LENGTH];
        record[..4].copy_from_slice(&kind.to_le_bytes());
        for (at, number) in fields {
            record[at..at + 8].copy_from_slice(&u64::to_le_bytes(number));
        }
        let stream = [
            &valid(ByteOrder::Little, SenderVersion::Old)[..RECORD_LENGTH],
            &record,
            &[0; 1000],
        ]
        .concat();
        reason(&stream);
    }
}

/// A resumed stream contains one of the missing snapshots.
#[test]
fn a_resumed_stream_brings_a_missing_snapshot() {
    let mut rest = with_u64(16, feature::RESUMING << 2 | 1);
    rest[4..8].copy_from_slice(&8_u32.to_le_bytes());
    rest.splice(RECORD_LENGTH..RECORD_LENGTH, [0; 8]);
    for names in [&["a", "b", "c"][..], &["b"], &[]] {
        let (_, arrived) = pass_as(&rest, announced(names)).unwrap();
        assert_eq!(arrived.unwrap()[0].0, "b");
    }
    assert!(pass_as(&rest, announced(&["a", "c"])).is_err());
    // Several announced snapshots cannot be in one plain stream.
    assert!(pass_as(&valid(ByteOrder::Little, SenderVersion::New), announced(&["a", "b"])).is_err());
}

/// Several streams in one: the list, each stream, and the common end.
#[test]
fn joined_streams_are_accepted_only_from_this_host_and_as_announced() {
    let mut list = SendStreamWriter::empty(ByteOrder::Little);
    list.begin(2, &[1; 64]);
    let list = list.end();
    let mut end = [0; RECORD_LENGTH];
    end[0] = 5;
    let second = |name: &[u8]| {
        let mut stream = valid(ByteOrder::Little, SenderVersion::New);
        stream[56..56 + name.len()].copy_from_slice(name);
        stream
    };
    let stream = [&list, &second(b"tank/vm@b\0"), &second(b"tank/vm@c\0"), &end[..]].concat();
    let joined = |names: &[&str]| ZfsAnnouncement {
        joining: Joining::Allowed,
        ..announced(names)
    };
    let (passed, arrived) = pass_as(&stream, joined(&["b", "c"])).unwrap();
    assert!(passed == stream);
    assert_eq!(arrived.unwrap().len(), 2);
    for names in [&["b"][..], &["c", "b"], &["b", "c", "d"], &[], &["b", "d"]] {
        assert!(pass_as(&stream, joined(names)).is_err(), "{names:?}");
    }
    assert!(
        pass_as(&stream, announced(&["b", "c"]))
            .unwrap_err()
            .contains("exactly one")
    );
    let nested = [&list[..], &list, &second(b"tank/vm@b\0"), &end].concat();
    assert!(pass_as(&nested, joined(&["b", "c"])).is_err());
}
