//! Fuzz target for streams of a hostile sender.

use std::io::{Cursor, Read as _};

use holdfast_block::hostile::Outcome;

use super::{Joining, ZfsAnnouncement, ZfsGate};
use crate::storage::changed_blocks::send_stream::record::{BeginRecord, ByteOrder, RECORD_LENGTH, feature};
use crate::storage::changed_blocks::send_stream::specimen::{QUERY, SendStreamWriter, SenderVersion};
use crate::storage::provider::incoming::StreamCheck;

/// A ZFS stream to a receiver that expects one snapshot. The output is a prefix of the input: all of the input, or
/// the input without the end.
pub(crate) fn zfs_stream(bytes: &[u8]) -> Outcome {
    let (gate, arrived) = ZfsGate::new(ZfsAnnouncement {
        snapshots: vec![("b".to_owned(), QUERY.to_guid.to_string())],
        joining: Joining::Refused,
    });
    let mut passed = Vec::new();
    let stream = Cursor::new(bytes.to_vec());
    let read = StreamCheck::of(Box::new(gate))
        .guard(Box::new(stream))
        .read_to_end(&mut passed);
    assert!(bytes.starts_with(&passed), "nothing else passes");
    if let Some(first) = passed.first_chunk::<RECORD_LENGTH>() {
        let (_, begin) = BeginRecord::parse(first).expect("a stream begins with a beginning");
        assert!(begin.is_single() && begin.to_guid == QUERY.to_guid && begin.flags & 1 == 0);
        assert_eq!(begin.features & (feature::DEDUPLICATED | feature::HOLDS), 0);
    }
    match (read, arrived.lock().expect("no thread panics with it").take()) {
        (Ok(_), Some(arrived)) => {
            assert!(passed == bytes && arrived.len() == 1, "it is whole");
            Outcome::Decoded
        }
        (_, arrived) => {
            assert!(arrived.is_none(), "what is refused has not arrived");
            Outcome::Refused
        }
    }
}

/// Valid streams of one snapshot.
pub(crate) fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let seed = |name, order, age| {
        let mut writer = SendStreamWriter::new(order, age, 0);
        writer.object(8, 8192, 100_000, 50).write(8, 0, 600).free(8, 4000, 1000);
        ("zfs_stream", name, writer.end())
    };
    vec![
        seed("old", ByteOrder::Little, SenderVersion::Old),
        seed("new", ByteOrder::Little, SenderVersion::New),
        seed("new_big_endian", ByteOrder::Big, SenderVersion::New),
    ]
}
